"""Groups that are failure domains, without Ray: they join, leave, pause, resume, lose no row."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.harness.chaos import SLOW_PACE_S, Campaign, elastic_config
from tests.harness.elastic import ElasticHarness
from tests.harness.files import records_in, replace_values
from tests.harness.object_store import ObjectStore
from tests.harness.ranks import run_in_turn
from tests.harness.sessions import TOKEN, snapshot, train_session
from tests.harness.wait import scaled
from tests.integration.ranks.test_movielens_arch import example_config
from trainer.checkpoint.files import checkpoints_of, list_committed
from trainer.coordination.client import Identity
from trainer.coordination.messages import Lease, Welcome
from trainer.elastic.group_session import GroupSession
from trainer.failures import EndReason
from trainer.fault_injection import Fault
from trainer.layout.layout import Layout
from trainer.protocol import requests
from trainer.protocol.events import Metrics, Recovered, SyncIntervalChanged
from trainer.protocol.requests import StopRequest
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import GroupConfig, SecretEnv, WorkerConfig
from trainer.training.worker import groups_of

TIMEOUT_S = 60.0
ONE_EPOCH = "training.epochs=1"
# However short a sync is, it takes too long.
TUNED = "parallelism.sync={every_steps: auto, tuner: {max_steps: 4, time_share: 0.0001}}"
# Where nobody is to be lost, a machine that stands still for a while must not lose anybody.
PATIENT = [f"recovery.{name}_timeout_s={scaled(20)}" for name in ("heartbeat", "exchange")]


def test_groups_join_and_leave_while_the_others_train_on(
    small_movielens: Path, tmp_path: Path
) -> None:
    data = without_labels(small_movielens, tmp_path / "data", 40)
    settings = [ONE_EPOCH, "data.on_bad_rows=quarantine", TUNED, *PATIENT]
    config = elastic_config(data, tmp_path / "run", 2, 1, *settings)
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        campaign = Campaign(harness, Random(0))
        campaign.begin()

        def spares() -> list[int]:
            groups = harness.coordinator.call("status").groups
            return [each.group for each in groups if each.standing == "spare"]

        for group in (2, 3):
            harness.start_group(group, is_spare=True)
        harness.wait_for(lambda: spares() == [2, 3], TIMEOUT_S, "spares 2 and 3 are ready")
        harness.coordinator.call("request", "want", [0, 1], 0, {(3, 0): "resize"}, 0, {})
        harness.wait_for(lambda: harness.life(3).is_over, TIMEOUT_S, "spare 3 has ended well")
        assert not [each for each in harness.of("committed") if each["group"] in (2, 3)]
        # While it copies it misses commits.
        harness.inject(Fault(kind="slow", group=2, rank=0, step=0, phase="apply", arg=0.4, times=3))
        harness.coordinator.call("request", "want", [0, 1, 2], 0, {}, 0, {})
        campaign.wait_until_over()
        harness.coordinator.call("request", "want", [1, 2], 0, {(0, 0): "drain"}, 0, {})
        harness.wait_for(lambda: harness.life(0).is_over, TIMEOUT_S, "group 0 has left")
        campaign.wait_until_over()
        assert harness.groups == [1, 2]
        ledger = campaign.finish(config)
        assert ledger["quarantined"] == [0, 40]
        check_that_nobody_was_restarted(harness)
    attempt = RunDir(config.run_dir).attempt(config.attempt_id)
    assert not records_in(attempt, Recovered), "no sync failed"
    *_, last = (m for m in records_in(attempt, Metrics) if "goodput/share" in m.values)
    assert last.values["risk/steps_undurable"] == 0, "the last checkpoint is durable"
    moves = records_in(attempt, SyncIntervalChanged)
    # What follows the first one depends on how long syncs take on this machine.
    intervals = [1, *(each.every_steps for each in moves)]
    assert intervals[1] == 2
    assert set(intervals) <= {1, 2, 4}


def without_labels(data: Path, folder: Path, num_rows: int) -> Path:
    """A copy of `data` in which some rows of the training part cannot be used."""
    shutil.copytree(data, folder)
    path = min((folder / "train").glob("*.parquet"))
    replace_values(path, "rating", dict.fromkeys(range(num_rows)))
    return folder


def check_that_nobody_was_restarted(harness: ElasticHarness) -> None:
    lives = {(record["group"], record["incarnation"]) for record in harness.of("started")}
    assert not [life for life in lives if life[1]], harness.tails()


def test_groups_go_on_from_what_the_leader_saved_to_s3_and_share_its_validation(
    small_movielens: Path, tmp_path: Path, store: ObjectStore
) -> None:
    settings = (ONE_EPOCH, "checkpoint.every_steps=1000000")
    saved_to = f"checkpoint.path={store.url('runs')}"
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, *settings, saved_to)
    config = replace(config, secrets=SecretEnv(store.environment))
    with store.failing(rates={"503": 0.05, "cut": 0.02}, seed=1):
        paused_at = _pause(config, tmp_path)
    last = replace(config, attempt_id="job-x-a1")
    with ElasticHarness(last, tmp_path / "lost", 2, scaled(0.1), restarts=False) as harness:
        harness.wait_for(lambda: shares_of(harness, 1), TIMEOUT_S, "group 1 measures its share")
        harness.life(1).kill()
        harness.wait_to_end()
        assert min(record["commit"] for record in harness.of("committed")) > paused_at
        assert shares_of(harness, 0) == [[0, 2], [0, 1]]
    again = replace(config, attempt_id="job-x-a2")
    with ElasticHarness(again, tmp_path / "whole", 2) as harness:
        harness.wait_to_end()
        assert (shares_of(harness, 0), shares_of(harness, 1)) == ([[0, 2]], [[1, 2]])
    assert validation_of(again) == pytest.approx(validation_of(last), rel=1e-9)
    assert not RunDir(config.run_dir).checkpoints_dir.exists()


def shares_of(harness: ElasticHarness, group: int) -> list[list[int]]:
    """The shares of the validation rows that a group set about to measure."""
    return [each["share"] for each in harness.of("measuring") if each["group"] == group]


def validation_of(config: WorkerConfig) -> float:
    """What the leader of an attempt reported, once."""
    told = records_in(RunDir(config.run_dir).attempt(config.attempt_id), Metrics)
    (found,) = (each.values["validation/rmse"] for each in told if "validation/rmse" in each.values)
    return found


def test_a_stalled_store_and_a_coordinator_lost_between_vote_and_verdict_cost_no_row(
    small_movielens: Path, tmp_path: Path
) -> None:
    settings = (ONE_EPOCH, "checkpoint.every_steps=2", *PATIENT)
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, *settings)
    checkpoints = RunDir(config.run_dir).checkpoints_dir
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        campaign = Campaign(harness, Random(0))
        campaign.begin()
        stall = {"kind": "slow", "rank": 0, "step": 1, "phase": "checkpoint", "arg": scaled(6)}
        harness.inject(*(Fault.model_validate(stall | {"group": group}) for group in range(2)))
        harness.wait_for(lambda: harness.of("struck"), TIMEOUT_S, "a save is under way")
        num_saved = len(list_committed(checkpoints))
        harness.wait_for_commit(harness.commit + 10)  # of which many are due for a save
        assert len(list_committed(checkpoints)) == num_saved
        # Group 0 has voted by the time that group 1 would.
        late = {"kind": "slow", "group": 1, "rank": 0, "step": 0, "phase": "before_vote"}
        harness.inject(Fault.model_validate(late | {"arg": scaled(0.5)}))
        harness.wait_for(lambda: harness.of("struck")[1:], TIMEOUT_S, "group 1 is about to vote")
        campaign.kill_coordinator(down_s=0.2)
        campaign.finish(config)
        check_that_nobody_was_restarted(harness)
    assert list_committed(checkpoints)


def _pause(config: WorkerConfig, tmp_path: Path) -> int:
    """Train and pause as a driver does; the commit that the leader saved."""
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        Campaign(harness, Random(0)).begin()
        harness.set_pace(SLOW_PACE_S)  # so that rows are left when the pause comes
        commit = harness.commit
        files = RunDir(config.run_dir).attempt(config.attempt_id)
        files.root.mkdir(parents=True, exist_ok=True)
        harness.coordinator.call("request", "want", [0, 1], 0, {}, 1, {})
        folder = checkpoints_of(config.run_dir, config.spec.checkpoint.path)
        harness.wait_for(lambda: list_committed(folder), 60, "a checkpoint that was asked for")
        requests.ask(files, StopRequest(run_index=0, cause=EndReason.PAUSED))
        harness.wait_for(lambda: files.stopping_path(0).exists(), 60, "a checkpoint for the pause")
    saved = list_committed(folder)[-1]
    assert saved.commit.commit >= commit > 0
    return saved.commit.commit


ONE_GROUP = (
    "data.batch_size=16",
    "parallelism.workers={min: 1, max: 2}",
    "parallelism.shard_group_size=1",
    "parallelism.placement=inter_host",
    "parallelism.sync.every_steps=2",
    f"recovery.heartbeat_timeout_s={scaled(4)}",
    f"recovery.exchange_timeout_s={scaled(4)}",
    "training.max_steps=24",
    "training.accumulate_steps=1",
    "training.early_stopping=null",
    "checkpoint.every_steps=8",
    "checkpoint.keep_last=9",
    "checkpoint.keep_best=false",
)


def states_of(config: WorkerConfig, folder: Path) -> list[str]:
    """Hashes of tables, moments and dense part by commit, of a run of one group."""
    with ElasticHarness(config, folder, 1) as harness:
        harness.wait_to_end()
        committed = harness.of("committed")
    by_commit = {record["commit"]: record["hash"] for record in committed}
    # Commits that train nothing leave all as it was; a run that goes on begins with one.
    return list(dict.fromkeys(by_commit[commit] for commit in sorted(by_commit)))


@pytest.mark.slow
def test_a_run_of_one_group_goes_on_bitwise_from_its_checkpoint(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(small_movielens, tmp_path / "whole", *ONE_GROUP)
    assert config.spec.model.transformer and config.spec.model.transformer.dropout > 0
    whole = states_of(config, tmp_path / "harness")
    halfway, *_ = sorted(
        list_committed(RunDir(tmp_path / "whole").checkpoints_dir), key=lambda f: f.commit.step
    )
    assert 0 < halfway.commit.step < 24
    again = replace(config, run_dir=tmp_path / "again")
    folder = RunDir(again.run_dir).checkpoints_dir
    shutil.copytree(halfway.path, folder / halfway.path.name)
    resumed = states_of(again, tmp_path / "harness_again")
    assert len(resumed) > 4
    assert resumed == whole[-len(resumed) :]


@contextmanager
def begun_group(config: WorkerConfig) -> Iterator[GroupSession]:
    """A group of one rank, where no other one trains."""
    client = Mock(identity=Identity(0, 0, 0, 1, "127.0.0.1"), token=TOKEN)
    client.join.return_value = Welcome()
    groups = groups_of(config, Layout(1, 1, "inter_host"), host=None)
    session = GroupSession(replace(config, group=GroupConfig(0, 0, "none")), groups, client)
    try:
        session.begin()
        yield session
    finally:
        session.close()


def begin_group(config: WorkerConfig) -> dict[str, Any]:
    """What a group begins with, and whether it will save at step 8 as the leader."""
    with begun_group(config) as session:
        session.is_leader, session.saves = True, session.checkpoints.standing
        saves = session._is_save_due(8 * session.shape.rows_per_step)
        return {"dense": snapshot(session)["dense"], "saves": saves}


def train_leases(config: WorkerConfig) -> list[bool]:
    """Whether the group arrives poisoned after leases of a step each, the second of which has a NaN
    gradient and a finite loss.
    """
    found = []
    with begun_group(config) as session:
        bias = next(reversed(session.optimizers.dense.params.values()))
        bias.register_hook(lambda gradient: gradient * torch.nan if found else gradient)
        for number in range(2):
            lease = Lease(id=number, epoch=0, spans=((16 * number, 16 * number + 16),))
            session._hold([lease])
            session.train_lease()
            session._syncing, session._interval = session._interval, session._new_interval()
            found.append(session._arrival().is_poisoned)
            assert session.loss_guard.part().sums.isfinite().all(), "no report tells it again"
    return found


def test_a_group_whose_last_gradient_was_nan_does_not_count_in_the_mean(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(small_movielens, tmp_path, *ONE_GROUP, "training.on_non_finite=skip")
    assert run_in_turn(1, (train_leases, config)) == [[[False, True]]]


def test_a_group_that_begins_from_other_workers_keeps_the_steps_of_adam_and_saves_when_it_is_due(
    small_movielens: Path, tmp_path: Path
) -> None:
    def config(run: str, *changes: str) -> WorkerConfig:
        return example_config(small_movielens, tmp_path / run, *ONE_GROUP, *changes)

    one = ("parallelism={workers: 1, shard_group_size: 1}", "recovery={}", "training.max_steps=8")
    alone = config("job", *one)
    warm = config("warm", f"checkpoint.warm_start={{path: {tmp_path / 'job'}}}")
    resumed = config("job")  # whose steps are of the rows of two workers
    ranks = run_in_turn(1, (train_session, alone), (begin_group, warm), (begin_group, resumed))
    for (found,) in ranks:
        steps = {each.item() for name, each in found["dense"].items() if name.endswith(".step")}
        assert steps == {8}
    assert ranks[1][0]["saves"] and ranks[2][0]["saves"]

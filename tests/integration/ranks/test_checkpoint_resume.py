"""Durable checkpoints on real gloo ranks: exact resume, other layouts, going back."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_in_turn, run_ranks
from tests.harness.sessions import (
    assemble,
    crash_after,
    load_session,
    make_config,
    next_run,
    open_session,
    snapshot,
    told,
    train_session,
)
from trainer.checkpoint import manager, resume
from trainer.checkpoint.files import list_committed, remove_folder
from trainer.coordination.client import HeartbeatReporter
from trainer.data.batches import Batch
from trainer.models.sparse import SparseArch
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sync import ReplicaSync, SyncReport
from trainer.protocol.events import Metrics, Note, SyncIntervalChanged, WorkersStarted
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec
from trainer.training.worker import train

SHORT = ("training.max_steps=12", "checkpoint.every_steps=5", "training.validate_every_steps=6")
TWO_COPIES = ("parallelism.workers=2", "parallelism.shard_group_size=1")


def _load_while_retention_works(config: WorkerConfig) -> dict[str, Any]:
    """Load a session; the first checkpoint that it begins to read is removed meanwhile."""
    load, removed = resume.load_state, []

    def load_state(path: Path, *args: Any, **named: Any) -> None:
        if not removed:
            removed.append(path.name)
            dist.barrier()
            if dist.get_rank() == 0:
                remove_folder(path)
            dist.barrier()
        load(path, *args, **named)

    with patch.object(resume, "load_state", load_state):
        return load_session(config) | {"removed": removed}


def test_a_checkpoint_that_is_removed_while_it_is_read_is_followed_by_the_next(
    small_movielens: Path, tmp_path: Path
) -> None:
    settings = (*SHORT, *TWO_COPIES, "checkpoint.keep_last=3", "checkpoint.asynchronous=false")
    config = make_config(small_movielens, tmp_path / "run", *settings)
    source = f"checkpoint.warm_start.path={config.run_dir}"
    warm = make_config(small_movielens, tmp_path / "warm", *TWO_COPIES, source)
    calls = ((_load_while_retention_works, each) for each in (next_run(config), warm))
    _, (first, _), (second, _) = run_in_turn(2, (train_session, config), *calls)
    (step,) = [e.commit.step for e in list_committed(RunDir(config.run_dir).checkpoints_dir)]
    resumed = first["state"].step
    assert f"{12:08d}" in first["removed"][0]
    assert f"{resumed:08d}" in second["removed"][0]
    assert step < resumed < 12
    (note,) = told(tmp_path / "warm", Note)
    assert (note.level, second["state"].step) == ("info", 0)
    assert str(config.run_dir) in note.message and f"at step {step}" in note.message


def _load_slowly(config: WorkerConfig) -> int:
    """Load a session from slow storage; how often the rank said meanwhile that it gets on."""
    load = resume.load_state

    def load_state(*args: Any, **named: Any) -> None:
        time.sleep(1.0)
        load(*args, **named)

    slow = patch.object(resume, "load_state", load_state), patch.object(manager, "_BEAT_S", 0.1)
    with slow[0], slow[1], patch.object(HeartbeatReporter, "advance") as advance:
        load_session(config)
    return advance.call_count


def test_a_rank_that_loads_for_long_does_not_hang(small_movielens: Path, tmp_path: Path) -> None:
    one = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
    config = make_config(small_movielens, tmp_path, *SHORT, *one)
    _, (num_beats,) = run_in_turn(1, (train_session, config), (_load_slowly, next_run(config)))
    assert num_beats > 3


class PartlyUsed(torch.nn.Module):
    """A user's network with a layer that it does not call."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        self.tables = SparseArch(spec, device)
        self.out = torch.nn.Linear(spec.embedding_tables[0].embedding_dim, 1, device=device)
        self.spare = torch.nn.Linear(3, 3, device=device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.out(self.tables(batch.sparse, batch.sequences).mean(dim=1))
        return ((found - batch.label) ** 2 * batch.weight[:, None]).mean(), found


def _train_as_before(config: WorkerConfig) -> dict[str, Any]:
    """Train as early versions did: state came with a parameter's first gradient."""
    with patch.object(Optimizers, "_begin_dense_state", lambda self: None):
        return train_session(config)


def test_parameters_that_get_no_gradient_resume_too(small_movielens: Path, tmp_path: Path) -> None:
    def config(run: str, num_steps: int) -> WorkerConfig:
        return make_config(
            small_movielens,
            tmp_path / run,
            *("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null"),
            "optimizer.dense={name: adam, lr: 0.01, weight_decay: 0.1}",
            f"model={{module: '{__name__}:PartlyUsed', tasks: [{{name: rating, loss: mse}}]}}",
            f"training.max_steps={num_steps}",
        )

    calls = [
        (train_session, config("whole", 8)),
        (train_session, config("now", 4)),
        (train_session, next_run(config("now", 8))),
        (_train_as_before, config("before", 4)),
        (train_session, next_run(config("before", 8))),
    ]
    (whole,), _, (now,), _, (before,) = run_in_turn(1, *calls)
    for resumed in (now, before):
        torch.testing.assert_close(resumed["dense"], whole["dense"], atol=0, rtol=0)


def _metrics_at(run_dir: Path, step: int) -> dict[str, float]:
    """What was told of a step last."""
    values: dict[str, float] = {}
    for report in told(run_dir, Metrics):
        values |= report.values if report.step == step else {}
    return values


def test_a_run_that_was_killed_resumes_to_the_same_result(
    small_movielens: Path, tmp_path: Path
) -> None:
    # A save between two reports: what the metrics took in so far comes back with it.
    settings = (*SHORT, "checkpoint.every_steps=4", "checkpoint.asynchronous=false")
    settings += ("optimizer.schedule={warmup_steps: 6, decay: cosine}",)
    whole = make_config(small_movielens, tmp_path / "whole", *settings)
    straight = run_ranks(train_session, 4, whole)
    cut = make_config(small_movielens, tmp_path / "cut", *settings)
    with pytest.raises(AssertionError, match="failed"):
        run_ranks(crash_after, 4, cut, 9, fresh=True)
    resumed = run_ranks(train_session, 4, next_run(cut))
    assert told(tmp_path / "cut", WorkersStarted)[-1].resumed_step == 8
    reached, wanted = resumed[0]["state"], straight[0]["state"]
    assert (reached.step, reached.position) == (wanted.step, wanted.position)
    assert reached.rows_trained == wanted.rows_trained
    assert reached.best == pytest.approx(wanted.best, abs=1e-6)
    torch.testing.assert_close(assemble(resumed), assemble(straight), atol=1e-6, rtol=0)
    after, without = (_metrics_at(tmp_path / run, 10) for run in ("cut", "whole"))
    for name in ("train/loss", "train/rmse"):
        assert after[name] == pytest.approx(without[name], rel=1e-6), name


@pytest.mark.parametrize(
    ("workers", "group_size", "placement"),
    [
        (4, 2, "inter_host"),
        (2, 1, "intra_host"),
        pytest.param(2, 2, "intra_host", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_loads_bitwise_at_another_layout(
    saved: tuple[Path, list[dict]],
    small_movielens: Path,
    workers: int,
    group_size: int,
    placement: str,
) -> None:
    run_dir, original = saved
    config = make_config(
        small_movielens,
        run_dir,
        f"parallelism.workers={workers}",
        f"parallelism.shard_group_size={group_size}",
        f"parallelism.placement={placement}",
        # With one copy there is nothing to sync, and asking for it is refused.
        *(["parallelism.sync=null"] if workers == group_size else []),
        "checkpoint.warm_start.path=/nowhere",  # what the run itself has saved comes first
        run_index=1,
    )
    loaded = run_ranks(load_session, workers, config)
    assert loaded[0]["state"].ledger == original[0]["state"].ledger
    # For decay the 12 steps of 4 ranks count as if taken by these.
    assert loaded[0]["shift"] == 12 * 4 // workers - 12
    _check_tables(loaded, original, workers // group_size)
    torch.testing.assert_close(loaded[0]["dense"], original[0]["dense"], atol=0, rtol=0)


def _check_tables(
    loaded: list[dict[str, Any]], original: list[dict[str, Any]], num_copies: int
) -> None:
    """Second moments grow in proportion to M, which was 2."""
    expected = {
        name: table * (num_copies / 2 if "momentum" in name else 1)
        for name, table in assemble(original).items()
    }
    torch.testing.assert_close(assemble(loaded), expected, atol=0, rtol=0)


@pytest.fixture(scope="module")
def saved(
    small_movielens: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict]]:
    """A finished run at T=4, L=2 and what its ranks held."""
    run_dir = tmp_path_factory.mktemp("saved")
    config = make_config(small_movielens, run_dir, *SHORT)
    return run_dir, run_ranks(train_session, 4, config)


@pytest.mark.slow
def test_a_run_goes_back_to_the_checkpoint_that_was_chosen_and_to_the_same_result(
    small_movielens: Path, tmp_path: Path
) -> None:
    settings = (*SHORT, "checkpoint.every_steps=4", "checkpoint.keep_last=5")
    first = make_config(small_movielens, tmp_path, *settings)
    straight = run_ranks(train_session, 4, first)
    saved = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert {each.commit.step for each in saved} >= {4, 8, 12}
    chosen = next(each for each in saved if each.commit.step == 4)
    rewind = {"checkpoint": chosen.path.name, "attempt_index": 1}
    RunDir(tmp_path).rewind_path.write_text(json.dumps(rewind))
    again = replace(first, attempt_id="job-test-a1")
    loaded = run_ranks(load_session, 4, again)
    assert loaded[0]["state"].step == 4
    assert len(list_committed(RunDir(tmp_path).checkpoints_dir)) == len(saved)
    trained = run_ranks(train_session, 4, again)
    kept = {each.path.name for each in list_committed(RunDir(tmp_path).checkpoints_dir)}
    assert {name for name in kept if "-a0-" in name} == {chosen.path.name}
    torch.testing.assert_close(assemble(trained), assemble(straight), atol=1e-6, rtol=0)


SLOW_FROM, SLOWDOWN = 12, 24
TUNED = (
    *TWO_COPIES,
    "data.batch_size=8",
    "parallelism.sync={every_steps: auto, tuner: {max_steps: 5, time_share: 0.6}}",
    *("training.max_steps=44", "training.report_every_steps=1", "data.split.validation=null"),
    *("checkpoint.every_steps=40", "checkpoint.keep_last=5", "checkpoint.keep_best=false"),
)


def train_as_the_link_slows_down(config: WorkerConfig) -> dict[str, Any]:
    """Train with syncs that last as long as many steps from step 12 on; at which steps they came,
    and what this rank holds at the end."""
    session, steps, times_s = open_session(config), list[int](), list[float]()
    average, run_step = ReplicaSync.__call__, session.run_step

    def timed(*args: Any) -> None:
        began_at = time.perf_counter()
        run_step(*args)
        times_s.append(time.perf_counter() - began_at)

    def slowed(sync: ReplicaSync) -> SyncReport:
        steps.append(session.state.step)
        if session.state.step >= SLOW_FROM:
            time.sleep(SLOWDOWN * statistics.median(times_s[:SLOW_FROM]))
        return average(sync)

    with patch.object(ReplicaSync, "__call__", slowed), patch.object(session, "run_step", timed):
        train(session)
    return {"steps": steps, **snapshot(session)}


def test_a_tuned_sync_interval_follows_the_link_on_all_ranks_at_once_and_outlives_a_restart(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path, *TUNED)
    ranks = run_ranks(train_as_the_link_slows_down, 2, config)
    steps = ranks[0]["steps"]
    assert ranks[1]["steps"] == steps
    moves = told(tmp_path, SyncIntervalChanged)
    assert [(each.every_steps_before, each.every_steps) for each in moves] == [(1, 2), (2, 4)]
    assert all("of its time for syncs" in each.reason for each in moves)
    first, second = (each.step for each in moves)
    assert SLOW_FROM < first < second < 40
    every_step = [(1, range(1, first + 1)), (2, range(first + 1, second + 1))]
    every_step.append((4, range(second + 1, 45)))
    assert steps == [step for every, among in every_step for step in among if step % every == 0]
    values = [each.values for each in told(tmp_path, Metrics) if "train/loss" in each.values]
    assert [values[at]["sync/every_steps"] for at in (0, -1)] == [1, 4]

    *_, saved, last = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert (saved.commit.step, saved.commit.tuning.every_steps) == (40, 4)
    remove_folder(last.path)
    again = run_ranks(train_as_the_link_slows_down, 2, next_run(config))
    for rank, straight in zip(again, ranks, strict=True):
        assert rank.pop("steps") == [44]
        del straight["steps"]
        torch.testing.assert_close(rank, straight, atol=0, rtol=0)

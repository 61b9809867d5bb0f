"""What sessions tell on gloo ranks, and how they end: NaN, bad rows, divergence, resize."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.harness.files import replace_values
from tests.harness.ranks import run_in_turn, run_ranks
from tests.harness.sessions import (
    ask_to_stop,
    assert_alike,
    load_session,
    make_config,
    next_run,
    open_session,
    told,
    train_session,
)
from tests.harness.small_model import NoHostReads, dense_parameters
from tests.harness.wait import scaled
from trainer import failures, fault_injection
from trainer.checkpoint.files import list_committed
from trainer.data.batches import Batch
from trainer.data.manifest import load_manifest
from trainer.errors import DataError
from trainer.failures import EndReason
from trainer.models.sparse import SparseArch
from trainer.parallel.divergence import DivergenceGuard
from trainer.parallel.model import stored_buffers
from trainer.parallel.touched_rows import TouchedRows
from trainer.protocol.events import (
    Divergence,
    Metrics,
    Note,
    RowsQuarantined,
    RowsSkipped,
    TraceWritten,
)
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec
from trainer.spec.training import DenseOptimizerName
from trainer.training.worker import named_failures, run_worker, train

POISON = {"kind": "nan", "group": 0, "rank": 1, "step": 13, "phase": "lookup"}
TWO_COPIES = ("parallelism.workers=2", "parallelism.shard_group_size=1")
UNTIL_POISON = (*TWO_COPIES, "training.max_steps=25", "checkpoint.every_steps=10")
QUARANTINE = (*TWO_COPIES, "training.epochs=1", "data.on_bad_rows=quarantine")
SHORT = ("training.max_steps=12", "checkpoint.every_steps=100", "data.split.validation=null")


def run_into_nan(config: WorkerConfig, step: int = 13) -> tuple[str, str]:
    """The loop on a rank whose loss becomes NaN at `step`; reason and message of its end."""
    os.environ[fault_injection.VARIABLE] = json.dumps([POISON | {"step": step}])
    fault_injection.install(config, dist.get_rank())
    return end_of(lambda: run_worker(config))


def end_of(run: Callable[[], object]) -> tuple[str, str]:
    """Reason and message of the failure that a run ends with; empty if it succeeds."""
    try:
        run()
    except failures.WorkerFailure as failure:
        return failure.reason, failure.message
    return "", ""


def fail_then_go_on(config: WorkerConfig, failing: WorkerConfig) -> dict[str, Any]:
    """A job that ends at a NaN; another one that leaves its rows out in its second life."""
    failed = run_into_nan(failing)
    first = run_into_nan(config)
    again = next_run(config)
    fault_injection.install(again, dist.get_rank())  # the fault was of the first life
    return {"failed": failed, "first": first, "end": train_session(again)["state"]}


def test_a_nan_fails_the_job_or_costs_it_the_rows_since_the_last_finite_report(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens, tmp_path / "skip", *UNTIL_POISON, "training.on_non_finite=skip"
    )
    failing = replace(
        make_config(small_movielens, tmp_path / "fail", *UNTIL_POISON), attempt_id="job-fail-a0"
    )
    ranks = run_ranks(fail_then_go_on, 2, config, failing, fresh=True)
    reasons = {rank["failed"][0] for rank in ranks}
    assert reasons == {EndReason.NON_FINITE}
    assert "training.on_non_finite: skip" in ranks[0]["failed"][1]
    assert {rank["first"][0] for rank in ranks} == {EndReason.ROWS_SKIPPED}
    # Reports come every 5 steps of 2 x 32 rows: the loss was finite at step 10, NaN by 15.
    (skipped,) = told(config.run_dir, RowsSkipped)
    assert (skipped.epoch, skipped.start, skipped.num_rows) == (0, 10 * 32, 320)
    for rank in ranks:
        state = rank["end"]
        assert state.step == 25
        assert state.rows_skipped == 320
        assert state.position.rows_done(10**9) == 25 * 64 + 320
        assert state.rows_trained == 25 * 64


def leave_out_all_that_is_left(config: WorkerConfig) -> tuple[str, str]:
    """A NaN at step 5, and how the second life ends, which leaves out all rows that are left."""
    assert run_into_nan(config, step=5)[0] == EndReason.ROWS_SKIPPED
    return run_into_nan(next_run(config), step=5)  # the fault was of the first life


@pytest.mark.parametrize("every_steps", [4, 100])
def test_a_run_whose_last_rows_are_left_out_ends_with_a_validated_checkpoint_if_it_has_trained(
    small_movielens: Path, tmp_path: Path, every_steps: int
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        *(*TWO_COPIES, "training.epochs=1", "data.batch_size=512"),
        *(f"training.report_every_steps={every_steps}", f"checkpoint.every_steps={every_steps}"),
        "training.on_non_finite=skip",
    )
    (end, _) = run_ranks(leave_out_all_that_is_left, 2, config, fresh=True)
    saved = list_committed(RunDir(config.run_dir).checkpoints_dir)
    completed = RunDir(config.run_dir).attempt(config.attempt_id).completed_path(1)
    if every_steps == 4:
        assert end == ("", "")
        assert {each.commit.step for each in saved} == {4}
        assert "validation/rmse" in saved[-1].commit.metrics
        assert completed.exists()
    else:
        assert end[0] == EndReason.NON_FINITE
        assert "every row was left out" in end[1]
        assert not (saved or completed.exists())


def run_into_nan_gradient(config: WorkerConfig, where: str) -> str:
    """A run in which the gradient of step 10 is NaN on rank 1, in one part of the model; its end's
    reason.
    """
    session = open_session(config)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        is_due = dist.get_rank() == 1 and session.state.step == 9
        return gradient * torch.nan if is_due else gradient

    pooled = SparseArch._pooled

    def spoilt(arch: SparseArch, *inputs: Any) -> torch.Tensor:
        vectors = pooled(arch, *inputs)
        vectors.register_hook(spoil)
        return vectors

    if where == "dense part":
        next(iter(session.optimizers.dense.params.values())).register_hook(spoil)
    with patch.object(SparseArch, "_pooled", spoilt if where == "tables" else pooled):
        return end_of(lambda: named_failures()(train)(session))[0]


@pytest.mark.parametrize("where", ["tables", "dense part"])
def test_a_nan_gradient_behind_a_finite_loss_is_not_saved_and_costs_the_rows_of_its_step(
    small_movielens: Path, tmp_path: Path, where: str
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        *UNTIL_POISON,
        "training.on_non_finite=skip",
        "data.split.validation=null",
    )
    assert run_ranks(run_into_nan_gradient, 2, config, where) == [EndReason.ROWS_SKIPPED] * 2
    (skipped,) = told(config.run_dir, RowsSkipped)
    assert (skipped.epoch, skipped.start, skipped.num_rows) == (0, 5 * 32, 320)
    assert not list_committed(RunDir(config.run_dir).checkpoints_dir), "step 10 was to be saved"


@pytest.fixture
def spoilt(small_movielens: Path, tmp_path: Path) -> Path:
    """A copy whose first training file has no rating in rows 5 and 6 and a bad year in row 9."""
    folder = shutil.copytree(small_movielens, tmp_path / "spoilt")
    path = folder / "train" / "part-00000.parquet"
    replace_values(path, "rating", {5: None, 6: None})
    replace_values(path, "year", {9: float("inf")})
    return folder


def told_rows(config: WorkerConfig) -> Counter[tuple[str, str]]:
    """Quarantined rows told of by split and reason."""
    rows: Counter[tuple[str, str]] = Counter()
    for record in told(config.run_dir, RowsQuarantined):
        rows[Path(record.file).parent.name, record.reason] += record.count
    return rows


def test_bad_rows_cost_themselves_and_are_told_by_file_and_reason(
    spoilt: Path, small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path / "run", f"data.path={spoilt}", *QUARANTINE)
    ranks = run_ranks(train_session, 2, config)
    assert all(value == value for value in ranks[0]["metrics"].values()), "no NaN anywhere"
    assert told_rows(config) == {
        ("train", "column 'rating' is not a value"): 2,
        ("train", "column 'year' is not a finite number"): 1,
    }
    assert {Path(record.file).name for record in told(config.run_dir, RowsQuarantined)} == {
        "part-00000.parquet"
    }
    counts = [
        record.values.get("data/quarantined_rows", 0) for record in told(config.run_dir, Metrics)
    ]
    assert sum(counts) == 3


def train_with_a_flipped_bit(config: WorkerConfig) -> tuple[str, str]:
    """Flip a bit on rank 1 before the first check; (reason, message) of this rank's end."""
    original = DivergenceGuard.check

    def flipping(guard: DivergenceGuard) -> Any:
        if dist.get_rank() == 1 and not hasattr(guard, "flipped"):
            guard.flipped = True  # type: ignore[attr-defined]
            shard = guard._model.table_shards()[0]
            shard.weight.view(torch.int32)[0, 0] ^= 1
        return original(guard)

    DivergenceGuard.check = flipping  # type: ignore[method-assign]
    return end_of(lambda: run_worker(config))


@pytest.mark.parametrize(
    ("action", "reason", "overlap"),
    [
        ("fail", EndReason.DIVERGED, "false"),
        pytest.param("rebroadcast", "", "true", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_named_and_ends_the_run_only_if_asked(
    small_movielens: Path, tmp_path: Path, action: str, reason: str, overlap: str
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        *SHORT,
        *TWO_COPIES,
        f"parallelism.divergence_check={{every_syncs: 1, action: {action}}}",
        f"parallelism.sync.overlap={overlap}",
    )
    ends = run_ranks(train_with_a_flipped_bit, 2, config, fresh=True)
    (found,) = told(config.run_dir, Divergence)
    where = f"{found.table}, shard {found.shard}, on rank(s) 1" if action == "fail" else ""
    assert [end[0] for end in ends] == [reason] * 2
    assert all(where in message for _, message in ends)
    assert (found.step, found.ranks, found.action) == (4, [1], action)
    assert found.table in {table.name for table in config.spec.embedding_tables}


def overflow_in_shard_one(config: WorkerConfig) -> None:
    """One step, then a change beyond fp16 in one copy of shard 1, then a sync."""
    session = open_session(config)
    for batch, step in session.batches():
        session.train_step(batch, step)
        break
    if session.groups.rank == max(session.groups.mesh.sharding_groups[0]):
        for shard in session.model.table_shards():
            shard.weight.mul_(1e12)
    session.synchronise()
    session.close()


def test_an_overflow_away_from_rank_0_is_an_event(small_movielens: Path, tmp_path: Path) -> None:
    config = make_config(small_movielens, tmp_path, "parallelism.sync.dtype=fp16")
    run_ranks(overflow_in_shard_one, 4, config)
    (warning,) = [note for note in told(config.run_dir, Note) if "fp16" in note.message]
    assert warning.level == "warning"


class Scaled(torch.nn.Module):
    """A user's network with what few have: a BatchNorm, a parameter without a dimension, and a
    buffer whose sum over the ranks is beyond its precision."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        self.tables = SparseArch(spec, device)
        dim = spec.embedding_tables[0].embedding_dim
        self.normalise = torch.nn.BatchNorm1d(dim, device=device)
        self.out = torch.nn.Linear(dim, 1, device=device)
        self.scale = torch.nn.Parameter(torch.ones((), device=device))
        self.register_buffer("most", torch.tensor(6e4, dtype=torch.float16, device=device))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.tables(batch.sparse, batch.sequences).mean(dim=1)
        found = self.scale * self.out(self.normalise(vectors))
        return ((found - batch.label) ** 2 * batch.weight[:, None]).mean(), found


def train_scaled(config: WorkerConfig) -> dict[str, Any]:
    """Train with a sync, a validation and a save after each fourth step, judged a little otherwise
    by rank 1; how often everything was averaged, the best value and the dense part."""
    session = open_session(config)
    num_averages = 0
    average, compute = session.sync._replicas.average_in_place, session.validation_meter.compute

    def counted(blocks: Any) -> None:
        nonlocal num_averages
        num_averages += 1
        average(blocks)

    session.sync._replicas.average_in_place = counted
    session.validation_meter.compute = lambda prefix: {
        name: value + 1e-9 * session.rank for name, value in compute(prefix).items()
    }
    train(session)
    return {
        "num_averages": num_averages,
        "best": session.state.best,
        "dense": dense_parameters(session.model),
        "buffers": torch.cat([each.flatten() for each in stored_buffers(session.model.module)]),
    }


@pytest.mark.parametrize("dense", ["at_sync", "every_step"])
def test_whatever_a_network_holds_one_averaging_serves_sync_validation_and_save(
    small_movielens: Path, tmp_path: Path, dense: str
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        f"model={{module: '{__name__}:Scaled', tasks: [{{name: rating, loss: mse}}]}}",
        *TWO_COPIES,
        "parallelism.sync={every_steps: 4, mode: full}",
        f"parallelism.dense={dense}",
        "parallelism.divergence_check={every_syncs: 1, action: fail}",
        "training.max_steps=8",
        "training.report_every_steps=4",
        "training.validate_every_steps=4",
        "checkpoint.every_steps=4",
    )
    ranks = run_ranks(train_scaled, 2, config)
    assert [rank["num_averages"] for rank in ranks] == [2] * 2
    assert len({rank["best"] for rank in ranks}) == 1
    assert ranks[0]["buffers"].max() == 6e4
    for rank in ranks[1:]:
        torch.testing.assert_close(rank["dense"], ranks[0]["dense"], atol=0, rtol=0)
        # All ranks measure one model.
        torch.testing.assert_close(rank["buffers"], ranks[0]["buffers"], atol=0, rtol=0)


class Factorised(torch.nn.Module):
    """A user's network that has tables and nothing else."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        self.tables = SparseArch(spec, device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.tables(batch.sparse, batch.sequences).prod(dim=1).sum(dim=1, keepdim=True)
        return ((found - batch.label) ** 2 * batch.weight[:, None]).mean(), found


class Frozen(Factorised):
    """One that has a part which is not trained, too."""

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.scale = torch.nn.Linear(1, 1, device=device).requires_grad_(False)


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [*(("Factorised", name) for name in get_args(DenseOptimizerName)), ("Frozen", "adam")],
)
def test_a_network_of_which_tables_alone_are_trained_trains_and_is_loaded(
    small_movielens: Path, tmp_path: Path, network: str, optimizer: str
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        f"model={{module: '{__name__}:{network}', tasks: [{{name: rating, loss: mse}}]}}",
        f"optimizer.dense.name={optimizer}",
        *TWO_COPIES,
        "parallelism.dense=at_sync",
        "training.clip_norm=1.0",
        "training.max_steps=6",
    )
    calls = ((train_session, config), (load_session, next_run(config)))
    trained, loaded = run_in_turn(2, *calls)
    assert all(rank["moved"] for rank in trained)
    assert_alike(loaded, trained)


def test_workers_that_are_asked_to_stop_save_and_fewer_train_every_row_that_is_left(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        "training.epochs=1",
        "checkpoint.every_steps=1000",
        "parallelism.workers={min: 2, max: 4}",
    )
    files = ask_to_stop(config)
    four = replace(config, spec=config.spec.with_workers(4))
    stopped = run_ranks(train_session, 4, four)
    assert files.stopping_path(0).exists()
    stop_step = config.spec.training.report_every_steps + 1  # a report lands after the next step
    assert {rank["state"].step for rank in stopped} == {stop_step}
    (saved,) = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert saved.commit.step == stop_step

    two = next_run(replace(config, spec=config.spec.with_workers(2)))
    resumed = run_ranks(train_session, 2, two)
    assert not files.stopping_path(1).exists(), "the request was for the run before"
    num_rows = load_manifest(small_movielens).splits["train"].num_rows
    assert {rank["state"].rows_trained for rank in resumed} == {num_rows}


def test_a_run_that_ends_as_it_is_asked_to_stop_has_completed(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens, tmp_path, *SHORT, *TWO_COPIES, "training.report_every_steps=11"
    )
    files = ask_to_stop(config)
    run_ranks(run_worker, 2, config)
    assert files.completed_path(0).exists()
    assert not files.stopping_path(0).exists()


def test_a_stop_comes_where_no_gradients_are_held_so_that_none_are_lost(
    small_movielens: Path, tmp_path: Path
) -> None:
    def config(run: str) -> WorkerConfig:
        return make_config(
            small_movielens,
            tmp_path / run,
            *("parallelism.workers=2", "parallelism.shard_group_size=2", "parallelism.sync=null"),
            *("training.accumulate_steps=4", "training.report_every_steps=4"),
            *("training.max_steps=16", "training.validate_every_steps=16"),
            "checkpoint.every_steps=16",
        )

    stopped = config("stopped")
    ask_to_stop(stopped)
    calls = [(train_session, each) for each in (config("whole"), stopped, next_run(stopped))]
    for whole, first, resumed in zip(*run_in_turn(2, *calls), strict=True):
        assert first["state"].step == 8, "it hears of the stop in step 5"
        torch.testing.assert_close(resumed["dense"], whole["dense"], atol=0, rtol=0)


def validate_slowly(config: WorkerConfig) -> float:
    """Validate where rank 1 measures for longer than ranks wait for each other in a step."""
    session, limit_s = open_session(config), scaled(1.0)
    for group in (session.groups.global_group, session._report_group):
        _set_pg_timeout(timedelta(seconds=limit_s), group)
    if dist.get_rank() == 1:
        session.validation_meter.update = lambda *_: time.sleep(2 * limit_s)
    session.validate()
    session.close()
    return session.final_metrics["validation/rmse"]


def test_a_validation_that_takes_one_copy_longer_than_another_does_not_fail(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path, *TWO_COPIES, "data.batch_size=512")
    first, second = run_ranks(validate_slowly, 2, config)
    assert first == second


def fail_after_a_report(config: WorkerConfig) -> list[str]:
    """Report at step 2, rank 1 once rank 0 is through with that, then fail in step 3.

    Returns what this rank's log has of it.
    """
    session = open_session(config)
    report, forward = session.report, session.pipeline.forward

    def report_in_turn() -> None:
        if dist.get_rank() == 1:
            dist.barrier()
        report()
        if dist.get_rank() == 0:
            dist.barrier()

    def fail_in_step_3(batch: Batch) -> Any:
        if session.state.step == 2:
            raise DataError("on purpose")
        return forward(batch)

    with (
        patch.object(session, "report", report_in_turn),
        patch.object(session.pipeline, "forward", fail_in_step_3),
        patch("trainer.training.session.logger.info") as log,
        pytest.raises(DataError, match="on purpose"),
    ):
        train(session)
    lines = [call.args[0] % call.args[1:] for call in log.mock_calls]
    return [line for line in lines if line.startswith("step 2/")]


def test_a_report_waits_for_no_rank_and_is_not_lost_when_the_next_step_fails(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path, *TWO_COPIES, "training.report_every_steps=2")
    (line,), nothing = run_ranks(fail_after_a_report, 2, config)
    assert " train/loss=" in line
    assert " phase/lookup_s=" in line
    assert not re.search(r"table/|/0=", line), "there may be thousands of tables and positions"
    assert nothing == [], "rank 0 speaks for all"
    (reported,) = told(tmp_path, Metrics)
    assert reported.step == 2
    assert {"train/loss", "speed/rows_per_s", "phase/backward_s"} <= reported.values.keys()
    assert reported.values["table/movies/lookups"] == 2 * 32, "a movie for each row of a batch"
    assert 0 < reported.values["table/users/hottest"] < 1
    peak = "memory/peak_rss_bytes"
    assert reported.values[f"{peak}/0"] == reported.values[peak], "L is 1: both are the most"
    assert 0 < reported.values["memory/host_used_share"] < 1


def lookups_reported(config: WorkerConfig) -> list[float]:
    """Lookups of movies in the reports of steps numbered as those of a group that skips some."""
    session = open_session(config)
    for (batch, _), step in zip(session.batches(), (1, 2, 3, 6, 7, 8, 11), strict=False):
        session.run_step(batch, step, is_dense_step=True)
        if step in (3, 7, 11):
            session.report()
    session.land_report()
    session.close()
    return [report.values["table/movies/lookups"] for report in told(config.run_dir, Metrics)]


def test_each_report_has_the_lookups_of_one_step_whatever_steps_are_numbered(
    small_movielens: Path, tmp_path: Path
) -> None:
    size = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
    config = make_config(small_movielens, tmp_path, *size)
    assert run_ranks(lookups_reported, 1, config) == [[32.0] * 3]


def train_without_host_reads(config: WorkerConfig) -> int:
    """Train with each step and report watched, but for the first, which finds out what is ahead.

    Returns how many were.
    """
    session, reads, num_calls = open_session(config), NoHostReads(), 0

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal num_calls
            if session.pipeline.is_ahead is None:
                return method(*args)
            num_calls += 1
            with reads:
                return method(*args)

        return call

    def land(land_report: Callable[[], None] = session.land_report) -> None:
        with reads.off():  # the numbers of a report that has arrived
            land_report()

    with (
        patch.object(session, "run_step", watched(session.run_step)),
        patch.object(session, "report", watched(session.report)),
        patch.object(session, "land_report", land),
        # As on GPUs; on a CPU reading costs nothing.
        patch.object(TouchedRows, "_worth_saving", lambda _, rows: rows),
    ):
        train(session)
    return num_calls


@pytest.mark.parametrize(
    "settings",
    [
        ["parallelism.sync={}", "data.weight_column=user_scale"],
        [
            "parallelism.sync={every_steps: 2, dtype: bf16, overlap: true}",
            *("training.accumulate_steps=2", "training.validate_every_steps=2"),
            "training.clip_norm=1.0",
        ],
    ],
    ids=["weighted", "accumulated, half precision"],
)
def test_nothing_of_ours_reads_on_the_host_in_a_step(
    small_movielens: Path, tmp_path: Path, settings: list[str]
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        *settings,
        "training.max_steps=6",
        "training.report_every_steps=2",
    )
    request_path = RunDir(tmp_path).attempt(config.attempt_id).trace_request_path
    request_path.parent.mkdir(parents=True, exist_ok=True)
    request_path.write_text('{"id": "t-00000001", "num_steps": 1, "ranks": [0]}')
    assert run_ranks(train_without_host_reads, 4, config) == [5 + 3] * 4
    assert [traced.step for traced in told(tmp_path, TraceWritten)] == [3]

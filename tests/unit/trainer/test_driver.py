"""The driver's decisions: what an error means, what a cluster lacks, how an attempt ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.service.builders import spec
from trainer import driver, failures
from trainer.driver import DriverContext, shortage
from trainer.events import WorkersLost, read_record
from trainer.failures import Failure, WorkerFailure
from trainer.outbox import EventWriter
from trainer.ray_worker import WorkerConfig


@pytest.fixture
def context(tmp_path: Path) -> DriverContext:
    """A driver whose spec is empty."""
    context = DriverContext.from_env(
        {
            "SHARDLOOM_JOB_ID": "job-1",
            "SHARDLOOM_ATTEMPT_ID": "job-1-a0",
            "SHARDLOOM_RUN_DIR": str(tmp_path),
            "SHARDLOOM_MAX_WORKER_FAILURES": "2",
        }
    )
    context.files.spec_path.parent.mkdir(parents=True)
    context.files.spec_path.write_text("{}")
    return context


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(KeyError, match="SHARDLOOM_JOB_ID"):
        DriverContext.from_env({})


def test_a_bad_spec_ends_the_attempt_with_its_fields(context: DriverContext) -> None:
    writer = EventWriter(context.files.stream_path("driver"))
    failure = driver.run_attempt(context, writer)
    assert failure is not None
    assert failure.reason == failures.BAD_SPEC
    assert "embedding_tables" in failure.message


@pytest.mark.parametrize("reason", [failures.WORKERS_LOST, failures.DIVERGED])
def test_workers_that_may_do_better_start_again_and_each_end_is_told(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    outcomes = [Failure(reason, "rank 3"), Failure(reason, "rank 3"), None]
    run_indices: list[int] = []

    def run_workers(config: WorkerConfig) -> Failure | None:
        run_indices.append(config.run_index)
        return outcomes[config.run_index]

    monkeypatch.setattr(driver, "prepare_spec", lambda _: spec())
    monkeypatch.setattr(driver, "note_shortage", lambda *_: None)
    monkeypatch.setattr(driver, "run_workers", run_workers)
    writer = EventWriter(context.files.stream_path("driver"))
    assert driver.run_attempt(context, writer) is None
    assert run_indices == [0, 1, 2]
    lines = context.files.stream_path("driver").read_bytes().splitlines()
    lost = [e for line in lines if isinstance(e := read_record(line, 0.0), WorkersLost)]
    assert [(e.reason, e.will_restart) for e in lost] == [(reason, True)] * 2


def test_a_cluster_that_is_large_enough_lacks_nothing() -> None:
    assert shortage({"CPU": 1.0}, 4, {"CPU": 4.0}) is None


def test_what_a_cluster_lacks_is_counted() -> None:
    message = shortage({"CPU": 2.0, "GPU": 1.0}, 16, {"CPU": 64.0, "GPU": 8.0})
    assert message is not None
    assert "16 GPU (the cluster has 8)" in message
    assert "CPU (" not in message


def _classify(errors: dict[int, Exception]) -> Failure:
    pytest.importorskip("ray", reason="classification reads Ray's exception types")
    from ray.train.v2.api.exceptions import WorkerGroupError

    return driver.classify(WorkerGroupError("it failed", errors))


def test_a_fault_named_by_a_worker_is_the_cause() -> None:
    failure = _classify(
        {
            0: WorkerFailure(failures.WORKERS_LOST, "connection closed by peer"),
            2: WorkerFailure(failures.DATA_ERROR, "part-00000.parquet, row 5"),
        }
    )
    assert failure.reason == failures.DATA_ERROR
    assert "rank 2" in failure.message


def test_a_dead_worker_is_a_loss_whatever_its_peers_say() -> None:
    pytest.importorskip("ray", reason="a dead worker is a Ray exception")
    from ray.exceptions import ActorDiedError

    failure = _classify({0: ValueError("odd"), 3: ActorDiedError()})
    assert failure.reason == failures.WORKERS_LOST
    assert "rank 3" in failure.message


def test_an_error_in_training_code_is_told_with_its_type() -> None:
    failure = _classify({1: ZeroDivisionError("division by zero")})
    assert failure == Failure(
        failures.TRAINING_ERROR, "rank 1: ZeroDivisionError: division by zero"
    )


def test_an_error_without_workers_is_a_loss() -> None:
    assert _classify({}).reason == failures.WORKERS_LOST

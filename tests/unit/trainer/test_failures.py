"""Classification of failures: the cause is named, with evidence, and spends the right budget."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer import failures
from trainer.driver import main
from trainer.driver.attempt import DriverContext
from trainer.errors import CorruptFileError, DataError, StorageError, StorageRefusedError
from trainer.failures import (
    EndReason,
    Failure,
    WorkerFailure,
    evidence_of,
    explain,
    reason_of,
    restart_delay_s,
    should_replace,
    should_restart,
    with_lost_host,
)
from trainer.protocol.outbox import EventWriter
from trainer.training.worker import named_failures

LOST = Failure(EndReason.WORKERS_LOST, "connection closed by peer")
DIVERGED = Failure(EndReason.DIVERGED, "shard 1 of table 'users' differs on rank 3")
BAD_ROW = Failure(EndReason.DATA_ERROR, "row 7")
PEER_ERRORS = (RuntimeError, ConnectionResetError)
HOST_GONE = Failure(EndReason.HOST_LOST, "rank 2 was lost", is_death=True)


def test_a_cause_outweighs_the_ranks_that_only_lost_a_peer() -> None:
    assert explain([LOST, BAD_ROW, LOST]) == BAD_ROW
    assert explain([LOST, DIVERGED, LOST]) == DIVERGED
    assert explain([LOST]).reason == explain([]).reason == EndReason.WORKERS_LOST


def test_a_dead_rank_explains_what_its_peers_ran_into() -> None:
    dead = Failure(EndReason.WORKERS_LOST, "rank 3 was lost", is_death=True)
    odd = Failure(EndReason.TRAINING_ERROR, "rank 1: something that no sign matches")
    assert explain([odd, dead, LOST]) == dead
    assert explain([odd, dead, BAD_ROW]) == BAD_ROW
    assert explain([LOST, odd]) == odd
    broken = Failure(EndReason.WORKERS_LOST, BROKEN)
    assert explain([LOST, odd, broken]) == broken
    assert explain([dead, LOST, HOST_GONE]) == HOST_GONE


def test_only_lost_workers_are_explained_by_a_host_that_is_gone() -> None:
    for reason, hosts, told in (
        (EndReason.WORKERS_LOST, {"b"}, EndReason.HOST_LOST),
        (EndReason.WORKERS_LOST, {"a", "b"}, EndReason.WORKERS_LOST),
        (EndReason.DATA_ERROR, {"b"}, EndReason.DATA_ERROR),
    ):
        assert with_lost_host(Failure(reason, "", blamed_host="a"), hosts).reason == told


def test_what_another_life_may_mend_restarts_within_the_budget() -> None:
    for failure, num_paid, restarts in (
        (LOST, 2, True),
        (LOST, 3, False),
        (DIVERGED, 2, True),
        (DIVERGED, 3, False),
        (Failure(EndReason.HANG, "rank 1 stands still"), 2, True),
        (Failure(EndReason.DEVICE_OOM, "out of memory"), 3, False),
        # Losses that nobody is to blame for never spend the budget.
        (HOST_GONE, 9, True),
        (Failure(EndReason.PREEMPTED, "the node was wanted back"), 9, True),
    ):
        assert should_restart(failure, num_paid, max_failures=2) is restarts
    for reason in ("data_error", "non_finite", "run_in_use", "no_room", "user_code"):
        assert not should_restart(Failure(EndReason(reason), ""), num_paid=0, max_failures=5)
        # A single group without room waits for it while the others train on.
        replaced = should_replace(Failure(EndReason(reason), ""), num_suspicious=0, max_failures=5)
        assert replaced == (reason == "no_room")


def test_a_lost_group_is_replaced_and_an_error_of_its_own_tried_as_the_budget_says() -> None:
    error = Failure(EndReason.TRAINING_ERROR, "KeyError")
    for failure, num_suspicious, replaced in (
        (LOST, 9, True),
        (HOST_GONE, 9, True),
        (error, 2, True),
        (error, 3, False),
    ):
        assert should_replace(failure, num_suspicious, max_failures=2) is replaced


def test_restarts_in_a_row_wait_longer_and_longer_up_to_a_minute() -> None:
    delays = [restart_delay_s(number) for number in range(1, 12)]
    assert delays[0] == 0.0
    assert delays == sorted(delays)
    assert delays[-1] == 60.0 == restart_delay_s(10_000)


ECHOES = (
    "[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1234",
    "Timed out waiting 60000ms for recv operation to complete",
    "Application timeout caused pair closure",
    "Connect timeout [127.0.0.1]:1234",
    "failed to recv, got 0 bytes",
    "NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL "
    "version 2.29.7\nLast error:\nNET/IB : Got completion from peer 10.0.0.2<43210> with error 12",
    "ncclSystemError: Last error:\nsocketProgress: Connection closed by remote peer host<1234>",
)


BROKEN = "CUDA error: uncorrectable ECC error encountered"


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


def test_an_error_that_nobody_named_is_told_by_its_type_and_text() -> None:
    for reason, errors in {
        EndReason.DEVICE_OOM: [
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            RuntimeError("CUDA error: out of memory"),
            OutOfMemoryError("[enforce fail] allocation failed"),
            RuntimeError("ncclUnhandledCudaError: Last error:\nCuda failure 2 'out of memory'"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        ],
        EndReason.HOST_OOM: [
            MemoryError(),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            RuntimeError("Task was killed due to the node running low on memory."),
        ],
        EndReason.WORKERS_LOST: [
            *(kind("Connection reset by peer") for kind in PEER_ERRORS),
            *map(RuntimeError, ECHOES),
            RuntimeError(BROKEN),
        ],
        EndReason.TRAINING_ERROR: [
            ValueError("connection refused is no option"),
            RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
            KeyError("users"),
        ],
    }.items():
        assert [reason_of(error) for error in errors] == [reason] * len(errors)


def _raise_chain() -> None:
    try:
        try:
            raise KeyError("users")
        except KeyError as error:
            raise ValueError("no such table\nwith details") from error
    except ValueError:
        raise RuntimeError("the step failed")  # noqa: B904 - its context is what is tested


def test_evidence_has_the_chain_of_the_error_and_its_place() -> None:
    with pytest.raises(RuntimeError) as caught:
        _raise_chain()
    evidence = evidence_of(caught.value)
    assert evidence["exception"] == (
        "RuntimeError: the step failed <- ValueError: no such table <- KeyError: 'users'"
    )
    assert evidence["where"].startswith("test_failures.py:")
    assert evidence["where"].endswith(" in _raise_chain")


def test_a_long_chain_keeps_its_root() -> None:
    chain = [ValueError(f"link {number}") for number in range(9)]
    for outer, inner in pairwise(chain):
        outer.__cause__ = inner
    chain[-1].__cause__ = chain[0]
    told = evidence_of(chain[0])["exception"].split(" <- ")
    assert told[0] == "ValueError: link 0"
    assert told[-1] == "ValueError: link 8"
    assert len(told) == 4


def test_a_worker_failure_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(WorkerFailure("data_error", "row 7", {"file": "part-0"})))
    assert (failure.reason, failure.message) == (EndReason.DATA_ERROR, "row 7")
    assert failure.reason.rule, "also of a worker whose code knows reasons as plain strings"
    assert failure.evidence == {"file": "part-0"}


CASES = [
    (StorageError("s3://b cannot be read"), EndReason.STORAGE_ERROR),
    (StorageRefusedError("s3://b: access was denied"), EndReason.DATA_ERROR),
    (CorruptFileError("part-0 is cut short"), EndReason.DATA_ERROR),
]


@pytest.mark.parametrize(("error", "reason"), CASES)
def test_storage_that_is_away_is_told_from_data_that_are_bad(
    error: DataError, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(failures.WorkerFailure) as caught, named_failures():
        raise error
    assert (caught.value.reason, caught.value.message) == (reason, str(error))
    monkeypatch.setattr(main, "check_versions", lambda: [])
    monkeypatch.setattr(main, "run_until_stopped", Mock(side_effect=error))
    context = DriverContext("job-1", "job-1-a0", tmp_path, None, 0)
    ended = main.end_attempt(context, EventWriter(tmp_path / "driver.jsonl"))
    assert (ended.reason, ended.message) == (reason, str(error))

"""Classification of failures: the cause is named, and only lost or diverged workers start again."""

from __future__ import annotations

import pickle

import pytest

from service.domain import EndReason
from trainer import failures
from trainer.failures import Failure, WorkerFailure, explain, is_peer_loss, should_restart

LOST = Failure(failures.WORKERS_LOST, "connection closed by peer")
DIVERGED = Failure(failures.DIVERGED, "shard 1 of table 'users' differs on rank 3")
BAD_ROW = Failure(failures.DATA_ERROR, "row 7")


def test_a_cause_outweighs_the_ranks_that_only_lost_a_peer() -> None:
    assert explain([LOST, BAD_ROW, LOST]) == BAD_ROW
    assert explain([LOST, DIVERGED, LOST]) == DIVERGED


def test_a_dead_rank_explains_what_its_peers_ran_into() -> None:
    dead = Failure(failures.WORKERS_LOST, "rank 3 was lost", is_death=True)
    odd = Failure(failures.TRAINING_ERROR, "rank 1: something that no sign matches")
    assert explain([odd, dead, LOST]) == dead
    assert explain([odd, dead, BAD_ROW]) == BAD_ROW
    assert explain([LOST, odd]) == odd


def test_without_a_cause_the_workers_were_lost() -> None:
    assert explain([LOST]).reason == failures.WORKERS_LOST
    assert explain([]).reason == failures.WORKERS_LOST


@pytest.mark.parametrize(
    ("failure", "num_failures", "restarts"),
    [
        (LOST, 1, True),
        (LOST, 2, True),
        (LOST, 3, False),
        (DIVERGED, 2, True),
        (DIVERGED, 3, False),
        (BAD_ROW, 1, False),
    ],
)
def test_lost_and_diverged_workers_restart_within_the_budget(
    failure: Failure, num_failures: int, restarts: bool
) -> None:
    assert should_restart(failure, num_failures, max_failures=2) is restarts


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1234", True),
        ("Timed out waiting 60000ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("Connect timeout [127.0.0.1]:1234", True),
        ("failed to recv, got 0 bytes", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_the_echo_of_a_lost_peer_is_told_from_a_fault(message: str, expected: bool) -> None:
    assert is_peer_loss(message) is expected


def test_a_worker_failure_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(WorkerFailure("data_error", "row 7")))
    assert (failure.reason, failure.message) == ("data_error", "row 7")


def test_every_reason_is_known_to_the_control_plane() -> None:
    reasons = {
        value for name, value in vars(failures).items() if name.isupper() and isinstance(value, str)
    }
    assert reasons <= {reason.value for reason in EndReason}

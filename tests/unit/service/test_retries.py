"""Which ends are followed by another attempt, at whose expense, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.domain import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    ReportedEnd,
)
from service.lifecycle import (
    MAX_ATTEMPTS,
    MAX_BACKOFF_S,
    RETRY_CLASSES,
    RetryClass,
    backoff_s,
    decide,
    spends_budget,
)
from tests.unit.service.builders import NOW, attempt_of, queued_job

FAILED = Observation(ObservedState.FAILED, "exit code 1")


def _live() -> tuple[Job, Attempt]:
    job = queued_job()
    attempt = attempt_of(job, submitted_at=NOW, started_at=NOW)
    return replace(job, status=JobStatus.RUNNING, current_attempt_id=attempt.id), attempt


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_s(n) for n in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert backoff_s(10_000) == MAX_BACKOFF_S


def test_every_end_reason_has_a_retry_class() -> None:
    assert set(RETRY_CLASSES) == set(EndReason)


@pytest.mark.parametrize("reason", [EndReason.HOST_LOST, EndReason.PREEMPTED, EndReason.NO_ROOM])
def test_what_is_no_fault_of_the_job_is_tried_again_whatever_the_budget(reason: EndReason) -> None:
    job, attempt = _live()
    spent = replace(job, num_failures=99)
    ended = replace(attempt, index=4, reported_end=ReportedEnd(reason, "node 3", NOW))
    again = decide(spent, ended, FAILED, NOW).job
    assert (again.status, again.num_failures) == (JobStatus.QUEUED, 99)
    assert again.retry_at == NOW + backoff_s(5)


def test_what_never_gets_better_is_given_up_after_many_attempts() -> None:
    job, attempt = _live()
    report = ReportedEnd(EndReason.NO_ROOM, "2 of 3 hosts", NOW)
    last = replace(attempt, index=MAX_ATTEMPTS - 1, reported_end=report)
    given_up = decide(job, last, FAILED, NOW).job
    assert (given_up.status, given_up.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert "no_room): 2 of 3 hosts" in given_up.message
    last_but_one = replace(last, index=MAX_ATTEMPTS - 2)
    assert decide(job, last_but_one, FAILED, NOW).job.status is JobStatus.QUEUED


@pytest.mark.parametrize("reason", EndReason)
def test_only_what_may_pass_is_retried(reason: EndReason) -> None:
    passing = {
        EndReason.WORKERS_LOST,
        EndReason.DRIVER_LOST,
        EndReason.FORGOTTEN,
        EndReason.DIVERGED,
        EndReason.HANG,
        EndReason.DEVICE_OOM,
        EndReason.HOST_OOM,
        EndReason.HOST_LOST,
        EndReason.PREEMPTED,
        EndReason.NO_ROOM,
        EndReason.ROWS_SKIPPED,
    }
    assert (RETRY_CLASSES[reason] is not RetryClass.NEVER) == (reason in passing)


def test_only_what_is_no_fault_of_the_job_is_free() -> None:
    free = {reason for reason in EndReason if not spends_budget(reason)}
    assert free == {
        EndReason.FORGOTTEN,
        EndReason.HOST_LOST,
        EndReason.PREEMPTED,
        EndReason.NO_ROOM,
    }
    assert spends_budget("a reason of a later version")

"""Decisions about a job: every transition by name, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    MAX_BACKOFF_S,
    NOT_FOUND_GRACE_S,
    REPORT_GRACE_S,
    Action,
    Decision,
    backoff_s,
    decide,
    remaining_failures,
    request_cancel,
    submission_accepted,
    submission_failed,
    submission_unanswered,
)
from tests.unit.service.builders import NOW, attempt_of, queued_job

UNREACHABLE = Observation(ObservedState.UNREACHABLE)
RUNNING = Observation(ObservedState.RUNNING)
FAILED = Observation(ObservedState.FAILED, "exit code 1")
STOPPED = Observation(ObservedState.STOPPED)
SUCCEEDED = Observation(ObservedState.SUCCEEDED)
NOT_FOUND = Observation(ObservedState.NOT_FOUND)


def _live(status: JobStatus = JobStatus.RUNNING, **changes: object) -> tuple[Job, Attempt]:
    job = queued_job()
    attempt = attempt_of(job, submitted_at=NOW, started_at=NOW)
    job = replace(job, status=status, current_attempt_id=attempt.id, **changes)
    return job, attempt


def test_a_queued_job_gets_an_attempt_before_anything_is_submitted() -> None:
    job = queued_job()
    decision = decide(job, None, UNREACHABLE, NOW)
    assert decision.job.status is JobStatus.STARTING
    assert decision.attempt is not None
    assert decision.attempt.id == decision.job.current_attempt_id == f"{job.id}-a0"
    assert decision.action is Action.NONE


def test_a_created_attempt_is_submitted_when_the_cluster_does_not_know_it() -> None:
    job, attempt = _live(JobStatus.STARTING)
    fresh = replace(attempt, submitted_at=None, started_at=None)
    assert decide(job, fresh, NOT_FOUND, NOW + 1e6).action is Action.SUBMIT
    assert decide(job, fresh, UNREACHABLE, NOW + 1e6) == Decision(job, fresh)


def test_a_submission_that_arrived_unanswered_is_not_sent_again() -> None:
    job, attempt = _live(JobStatus.STARTING)
    decision = decide(job, replace(attempt, submitted_at=None), RUNNING, NOW + 9)
    assert decision.action is Action.NONE
    assert decision.attempt is not None
    assert decision.attempt.submitted_at == NOW + 9


def test_an_accepted_submission_is_stamped() -> None:
    job, attempt = _live(JobStatus.STARTING)
    decision = submission_accepted(job, attempt, NOW + 3)
    assert decision.attempt is not None
    assert decision.attempt.submitted_at == NOW + 3


def test_a_refused_submission_fails_the_job_without_retry() -> None:
    job, attempt = _live(JobStatus.STARTING)
    decision = submission_failed(job, attempt, EndReason.SUBMISSION_REFUSED, "no", NOW)
    assert decision.job.status is JobStatus.FAILED
    assert decision.job.reason is EndReason.SUBMISSION_REFUSED


def test_success_completes_the_job() -> None:
    job, attempt = _live()
    decision = decide(job, attempt, SUCCEEDED, NOW)
    assert decision.job.status is JobStatus.SUCCEEDED
    assert decision.attempt is not None
    assert decision.attempt.end_reason is EndReason.COMPLETED


def test_a_lost_driver_is_retried_after_a_backoff() -> None:
    job, attempt = _live()
    queued = decide(job, attempt, FAILED, NOW).job
    assert (queued.status, queued.num_failures) == (JobStatus.QUEUED, 1)
    assert queued.retry_at == NOW + backoff_s(1)


def test_a_retry_waits_for_its_time_and_is_a_new_attempt() -> None:
    job, attempt = _live()
    lost = decide(job, attempt, FAILED, NOW)
    assert decide(lost.job, lost.attempt, UNREACHABLE, NOW + 0.1).job == lost.job
    again = decide(lost.job, lost.attempt, UNREACHABLE, NOW + backoff_s(1))
    assert again.job.current_attempt_id == f"{job.id}-a1"
    assert again.job.retry_at is None
    assert again.job.num_attempts == 2


def test_the_budget_counts_worker_restarts_and_lost_attempts() -> None:
    job, attempt = _live(num_failures=1)
    decision = decide(job, replace(attempt, num_worker_failures=2), FAILED, NOW)
    assert decision.job.num_failures == 4
    assert decision.job.status is JobStatus.FAILED
    assert decision.job.reason is EndReason.RETRIES_EXHAUSTED
    assert "retry.max_failures is 3" in decision.job.message
    assert "exit code 1" in decision.job.message


@pytest.mark.parametrize(
    "reason",
    [
        EndReason.WORKERS_LOST,
        EndReason.DIVERGED,
        EndReason.ROWS_SKIPPED,
        EndReason.HANG,
        EndReason.DEVICE_OOM,
        EndReason.HOST_OOM,
    ],
)
def test_a_driver_that_gave_up_on_its_workers_counts_no_further_failure(reason: EndReason) -> None:
    job, attempt = _live()
    report = ReportedEnd(reason, "rank 1", NOW)
    gave_up = replace(attempt, num_worker_failures=2, reported_end=report)
    assert decide(job, gave_up, FAILED, NOW).job.num_failures == 2


@pytest.mark.parametrize(
    "reason",
    [
        EndReason.BAD_SPEC,
        EndReason.DATA_ERROR,
        EndReason.TRAINING_ERROR,
        EndReason.NON_FINITE,
        EndReason.RUN_IN_USE,
    ],
)
def test_faults_of_the_user_are_never_retried(reason: EndReason) -> None:
    job, attempt = _live()
    ended = replace(attempt, reported_end=ReportedEnd(reason, "what went wrong", NOW))
    decision = decide(job, ended, FAILED, NOW)
    assert decision.job.status is JobStatus.FAILED
    assert (decision.job.reason, decision.job.message) == (reason, "what went wrong")
    assert decision.job.num_failures == 0


def test_copies_that_diverged_are_trained_again_from_a_checkpoint_within_the_budget() -> None:
    job, attempt = _live()
    report = ReportedEnd(EndReason.DIVERGED, "shard 1 of table 'users' differs on rank 3", NOW)
    ended = replace(attempt, reported_end=report)
    again = decide(job, ended, FAILED, NOW)
    assert (again.job.status, again.job.num_failures) == (JobStatus.QUEUED, 1)
    assert "table 'users'" in again.timeline[0].message
    spent = decide(replace(job, num_failures=3), ended, FAILED, NOW)
    assert spent.job.reason is EndReason.RETRIES_EXHAUSTED


def test_an_unknown_submission_is_given_time_to_arrive() -> None:
    job, attempt = _live()
    assert decide(job, attempt, NOT_FOUND, NOW + NOT_FOUND_GRACE_S - 1) == Decision(job, attempt)
    decision = decide(job, attempt, NOT_FOUND, NOW + NOT_FOUND_GRACE_S)
    assert decision.attempt is not None
    assert decision.attempt.end_reason is EndReason.FORGOTTEN
    assert decision.job.status is JobStatus.QUEUED


def test_a_cluster_that_forgets_never_spends_the_budget() -> None:
    job, now = queued_job(max_failures=0), NOW
    attempt, delays_s = None, []
    for _ in range(3):
        started = decide(job, attempt, UNREACHABLE, now)
        assert started.attempt is not None
        lost = decide(started.job, replace(started.attempt, submitted_at=now), NOT_FOUND, now + 99)
        job, attempt = lost.job, lost.attempt
        assert (job.status, job.num_failures) == (JobStatus.QUEUED, 0)
        assert job.retry_at is not None
        delays_s.append(job.retry_at - (now + 99))
        now = job.retry_at
    assert delays_s == [backoff_s(n) for n in (1, 2, 3)]


def test_a_cluster_that_does_not_answer_is_told_until_it_does() -> None:
    job, attempt = _live()
    away = decide(job, attempt, Observation(ObservedState.UNREACHABLE, "no answer"), NOW)
    assert away.job == replace(job, message="no answer")
    assert decide(away.job, attempt, RUNNING, NOW).job == job


def test_an_unanswered_submission_is_told_until_it_is_taken() -> None:
    job, attempt = _live(JobStatus.STARTING)
    fresh = replace(attempt, submitted_at=None, started_at=None)
    told = submission_unanswered(job, fresh, "timed out").job
    assert decide(told, fresh, NOT_FOUND, NOW).job.message == "timed out"
    assert submission_accepted(told, fresh, NOW).job.message == ""


def test_cancel_waits_for_a_submission_that_may_still_arrive_and_stops_it() -> None:
    job, attempt = _live(JobStatus.STARTING)
    stopping = request_cancel(job, NOW).job
    sent = replace(attempt, submitted_at=None, started_at=None, last_submit_at=NOW + 50)
    waiting = decide(stopping, sent, NOT_FOUND, NOW + 50 + NOT_FOUND_GRACE_S - 1)
    assert (waiting.job.status, waiting.action) == (JobStatus.STOPPING, Action.STOP)
    over = decide(stopping, sent, NOT_FOUND, NOW + 50 + NOT_FOUND_GRACE_S)
    assert over.job.status is JobStatus.CANCELLED


def test_cancel_of_an_attempt_that_was_never_sent_ends_at_once() -> None:
    job, attempt = _live(JobStatus.STARTING)
    stopping = request_cancel(job, NOW).job
    unsent = replace(attempt, submitted_at=None, started_at=None)
    assert decide(stopping, unsent, NOT_FOUND, NOW).job.status is JobStatus.CANCELLED


def test_a_reported_end_needs_no_grace_when_the_cluster_forgot() -> None:
    job, attempt = _live()
    ended = replace(attempt, reported_end=ReportedEnd(EndReason.COMPLETED, "done", NOW))
    assert decide(job, ended, NOT_FOUND, NOW).job.status is JobStatus.SUCCEEDED


def test_a_driver_that_lingers_after_its_report_is_stopped_then_believed() -> None:
    job, attempt = _live()
    ended = replace(attempt, reported_end=ReportedEnd(EndReason.COMPLETED, "done", NOW))
    assert decide(job, ended, RUNNING, NOW + 1) == Decision(job, ended)
    assert decide(job, ended, RUNNING, NOW + REPORT_GRACE_S + 1).action is Action.STOP
    late = decide(job, ended, RUNNING, NOW + 2 * REPORT_GRACE_S + 1)
    assert late.job.status is JobStatus.SUCCEEDED


def test_cancel_stops_and_ends_only_when_the_end_is_seen() -> None:
    job, attempt = _live()
    stopping = request_cancel(job, NOW).job
    assert (stopping.status, stopping.cancel_requested) == (JobStatus.STOPPING, True)
    assert decide(stopping, attempt, RUNNING, NOW).action is Action.STOP
    assert decide(stopping, attempt, UNREACHABLE, NOW) == Decision(stopping, attempt)
    ended = decide(stopping, attempt, STOPPED, NOW).job
    assert (ended.status, ended.reason) == (JobStatus.CANCELLED, EndReason.CANCELLED)


def test_cancel_of_a_queued_job_ends_it_at_once() -> None:
    decision = request_cancel(queued_job(), NOW)
    assert decision.job.status is JobStatus.CANCELLED
    assert [line.kind for line in decision.timeline] == ["cancel_requested", "job_ended"]


def test_a_job_that_completed_before_the_stop_has_succeeded() -> None:
    job, attempt = _live(JobStatus.STOPPING, cancel_requested=True)
    assert decide(job, attempt, SUCCEEDED, NOW).job.status is JobStatus.SUCCEEDED


def test_a_cancelled_job_is_not_retried_when_its_driver_dies() -> None:
    job, attempt = _live(JobStatus.STOPPING, cancel_requested=True)
    assert decide(job, attempt, FAILED, NOW).job.status is JobStatus.CANCELLED


def test_the_remaining_budget_never_goes_below_zero() -> None:
    assert remaining_failures(queued_job(max_failures=2)) == 2
    assert remaining_failures(replace(queued_job(max_failures=2), num_failures=5)) == 0


# ---- properties

_reports = st.builds(
    ReportedEnd, st.sampled_from(EndReason), st.just("said so"), st.floats(NOW - 1e4, NOW + 1e4)
)
_times = st.none() | st.floats(NOW - 1e4, NOW + 1e4)


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Job, Attempt | None]:
    job = queued_job(max_failures=draw(st.integers(0, 4)))
    attempt = None
    if draw(st.booleans()):
        attempt = attempt_of(
            job,
            index=draw(st.integers(0, 3)),
            submitted_at=draw(_times),
            started_at=draw(_times),
            end_reason=draw(st.none() | st.sampled_from(EndReason)),
            num_worker_failures=draw(st.integers(0, 5)),
            reported_end=draw(st.none() | _reports),
        )
    job = replace(
        job,
        status=draw(st.sampled_from(JobStatus)),
        cancel_requested=draw(st.booleans()),
        num_failures=draw(st.integers(0, 5)),
        retry_at=draw(_times),
        current_attempt_id=attempt.id if attempt else None,
    )
    return job, attempt


_observations = st.builds(Observation, st.sampled_from(ObservedState), st.just("seen"))


@given(_situations(), _observations, st.floats(NOW - 1e5, NOW + 1e5))
def test_every_situation_has_a_consistent_decision(
    situation: tuple[Job, Attempt | None], observation: Observation, now: float
) -> None:
    job, attempt = situation
    decision = decide(job, attempt, observation, now)
    assert decision == decide(job, attempt, observation, now)
    assert decision.job.status.is_terminal == (
        job.status.is_terminal or decision.job.ended_at is not None
    )
    if decision.action is not Action.NONE:
        assert decision.attempt is not None
        assert decision.attempt.end_reason is None
    if decision.attempt is not None and decision.job != job:
        assert decision.job.current_attempt_id == decision.attempt.id


@given(_situations(), st.floats(NOW - 1e5, NOW + 1e5))
def test_unreachable_never_fails_stops_or_submits_anything(
    situation: tuple[Job, Attempt | None], now: float
) -> None:
    job, attempt = situation
    decision = decide(job, attempt, UNREACHABLE, now)
    assert decision.action is Action.NONE
    assert decision.job.num_failures == job.num_failures
    if attempt is not None and attempt.end_reason is None:
        assert decision.attempt == attempt
        assert decision.job.status.is_terminal == job.status.is_terminal


@given(_situations(), _observations, st.floats(NOW - 1e5, NOW + 1e5))
def test_a_terminal_job_stays_as_it_is(
    situation: tuple[Job, Attempt | None], observation: Observation, now: float
) -> None:
    job, attempt = situation
    if job.status.is_terminal:
        assert decide(job, attempt, observation, now) == Decision(job, attempt)
        assert request_cancel(job, now).job == job


@given(_situations(), st.lists(_observations, max_size=30), st.sampled_from(ObservedState))
def test_every_job_ends_once_its_attempts_are_seen_to_end(
    situation: tuple[Job, Attempt | None], noise: list[Observation], last: ObservedState
) -> None:
    definite = {ObservedState.SUCCEEDED, ObservedState.FAILED, ObservedState.STOPPED}
    if situation[0].status is JobStatus.PAUSED or last not in definite:
        return
    # Each attempt needs one look to be made and one to end; the backoff passes in between.
    ends = [Observation(last)] * 2 * (situation[0].spec.retry.max_failures + 2)
    job, attempt, now = *situation, NOW + 1e5
    for observation in [*noise, *ends]:
        decision = decide(job, attempt, observation, now)
        job, attempt = decision.job, decision.attempt
        now += MAX_BACKOFF_S
    assert job.status.is_terminal

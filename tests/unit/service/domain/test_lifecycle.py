"""Decisions about a job: every transition by name."""

from __future__ import annotations

from dataclasses import replace

from service.domain.lifecycle import (
    NOT_FOUND_GRACE_S,
    REPORT_GRACE_S,
    Action,
    Decision,
    decide,
    preempt,
    request_cancel,
    request_pause,
    request_restart,
    request_resume,
    start,
    submission_accepted,
)
from service.domain.models import (
    EndReason,
    JobStatus,
    Observation,
    ObservedState,
    QueueState,
)
from tests.harness.builders import NOW, live_job, queued_job, reported

UNREACHABLE = Observation(ObservedState.UNREACHABLE)
RUNNING = Observation(ObservedState.RUNNING)
FAILED = Observation(ObservedState.FAILED, "exit code 1")
STOPPED = Observation(ObservedState.STOPPED)
SUCCEEDED = Observation(ObservedState.SUCCEEDED)
NOT_FOUND = Observation(ObservedState.NOT_FOUND)


def test_the_budget_counts_worker_restarts_and_lost_attempts() -> None:
    job, attempt = live_job(num_failures=1)
    decision = decide(job, replace(attempt, num_worker_failures=2), FAILED, NOW)
    assert decision.job.num_failures == 4
    assert decision.job.status is JobStatus.FAILED
    assert decision.job.reason is EndReason.RETRIES_EXHAUSTED
    assert "retry.max_failures is 3" in decision.job.message
    assert "exit code 1" in decision.job.message


def test_the_reason_of_an_end_decides_about_retry_and_budget() -> None:
    job, attempt = live_job()
    losses = ("workers_lost", "diverged", "rows_skipped", "hang", "device_oom", "host_oom")
    for reason in map(EndReason, losses):
        # A driver that gave up on its workers counts no further failure.
        gave_up = replace(reported(attempt, reason, "rank 1"), num_worker_failures=2)
        again = decide(job, gave_up, FAILED, NOW).job
        assert (again.status, again.num_failures) == (JobStatus.QUEUED, 2), reason
    again = decide(job, reported(attempt, EndReason.VERSION_MISMATCH, "rank 1"), FAILED, NOW).job
    assert (again.status, again.num_failures) == (JobStatus.QUEUED, 1)
    for reason in map(EndReason, ("bad_spec", "data_error", "training_error", "non_finite")):
        # Faults of the user are never retried.
        ended = reported(attempt, reason, "what went wrong")
        failed = decide(job, ended, FAILED, NOW).job
        assert (failed.status, failed.reason) == (JobStatus.FAILED, reason)
        assert (failed.message, failed.num_failures) == ("what went wrong", 0)


def test_an_unknown_submission_is_given_time_to_arrive() -> None:
    job, attempt = live_job()
    for waited_s in (NOT_FOUND_GRACE_S - 1, -1.0):
        assert decide(job, attempt, NOT_FOUND, NOW + waited_s) == Decision(job, attempt)
    set_back = decide(job, attempt, NOT_FOUND, NOW - 3600)
    assert set_back.attempt.end_reason is EndReason.FORGOTTEN, "the clock was set back"
    decision = decide(job, attempt, NOT_FOUND, NOW + NOT_FOUND_GRACE_S)
    assert decision.attempt.end_reason is EndReason.FORGOTTEN
    assert decision.job.status is JobStatus.QUEUED


def test_a_submission_without_effect_is_repeated_at_once_then_ever_later() -> None:
    job, attempt = live_job(JobStatus.STARTING)
    attempt = replace(attempt, submitted_at=None, started_at=None)
    tries = []
    for second in range(130):
        decision = decide(job, attempt, NOT_FOUND, NOW + second)
        if decision.action is Action.SUBMIT:
            tries.append(second)
            attempt = replace(attempt, last_submit_at=NOW + second)
        else:
            assert decision == Decision(job, attempt)
    assert tries == [0, 1, 2, 4, 8, 16, 32, 62, 92, 122]


def test_a_submission_is_repeated_although_the_clock_was_set_back() -> None:
    job, attempt = live_job(JobStatus.STARTING)
    tried = replace(attempt, submitted_at=None, started_at=None, last_submit_at=NOW + 20)
    assert decide(job, tried, NOT_FOUND, NOW + 21).action is Action.NONE
    for set_back_s in (1.0, 3600.0):
        assert decide(job, tried, NOT_FOUND, NOW + 20 - set_back_s).action is Action.SUBMIT


def test_cancel_waits_for_a_submission_that_may_still_arrive_and_for_no_other() -> None:
    job, attempt = live_job(JobStatus.STARTING)
    stopping = request_cancel(job, NOW).job
    sent = replace(attempt, submitted_at=None, started_at=None, last_submit_at=NOW + 50)
    waiting = decide(stopping, sent, NOT_FOUND, NOW + 50 + NOT_FOUND_GRACE_S - 1)
    assert (waiting.job.status, waiting.action) == (JobStatus.STOPPING, Action.STOP)
    over = decide(stopping, sent, NOT_FOUND, NOW + 50 + NOT_FOUND_GRACE_S)
    assert over.job.status is JobStatus.CANCELLED
    unsent = replace(sent, last_submit_at=None)
    assert decide(stopping, unsent, NOT_FOUND, NOW).job.status is JobStatus.CANCELLED


def test_success_is_seen_or_reported_where_the_cluster_forgot() -> None:
    job, attempt = live_job()
    seen = decide(job, attempt, SUCCEEDED, NOW)
    assert seen.job.status is JobStatus.SUCCEEDED
    assert seen.attempt.end_reason is EndReason.COMPLETED
    ended = reported(attempt, EndReason.COMPLETED)
    assert decide(job, ended, NOT_FOUND, NOW).job.status is JobStatus.SUCCEEDED


def test_a_driver_that_lingers_after_its_report_is_stopped_then_believed() -> None:
    job, attempt = live_job()
    ended = reported(attempt, EndReason.COMPLETED)
    assert decide(job, ended, RUNNING, NOW + 1) == Decision(job, ended)
    assert decide(job, ended, RUNNING, NOW + REPORT_GRACE_S + 1).action is Action.STOP
    late = decide(job, ended, RUNNING, NOW + 2 * REPORT_GRACE_S + 1)
    assert late.job.status is JobStatus.SUCCEEDED


def test_a_job_that_is_cancelled_ends_as_its_driver_did() -> None:
    job, attempt = live_job(JobStatus.STOPPING, cancel_requested=True)
    assert decide(job, attempt, SUCCEEDED, NOW).job.status is JobStatus.SUCCEEDED
    assert decide(job, attempt, FAILED, NOW).job.status is JobStatus.CANCELLED


# ---- pauses, preemptions, restarts


def test_a_queued_job_pauses_at_once_and_keeps_its_place() -> None:
    job = replace(queued_job(), queued_at=NOW - 50, retry_at=NOW + 9)
    paused = request_pause(job, NOW, 120).job
    assert (paused.status, paused.retry_at) == (JobStatus.PAUSED, None)
    assert decide(paused, None, UNREACHABLE, NOW + 1e6) == Decision(paused, None)
    back = request_resume(paused, NOW + 99).job
    assert (back.status, back.waits_since) == (JobStatus.QUEUED, NOW - 50)


def test_a_driver_that_does_not_save_in_time_is_stopped_and_the_job_pauses_all_the_same() -> None:
    job, attempt = live_job()
    pausing = request_pause(job, NOW, 120).job
    assert decide(pausing, attempt, UNREACHABLE, NOW + 900).action is Action.NONE
    asked = decide(pausing, attempt, RUNNING, NOW + 1000)
    assert asked.action is Action.PAUSE, "nobody could be asked before"
    assert decide(asked.job, attempt, RUNNING, NOW + 1119).action is Action.PAUSE
    assert decide(asked.job, attempt, RUNNING, NOW + 1120).action is Action.STOP
    ended = decide(asked.job, reported(attempt, EndReason.CANCELLED), STOPPED, NOW + 1125)
    assert ended.job.status is JobStatus.PAUSED
    assert ended.attempt.end_reason is EndReason.PAUSED


def test_a_pending_attempt_has_nothing_to_save_and_one_never_sent_is_not_sent() -> None:
    job, attempt = live_job(JobStatus.STARTING)
    pausing = request_pause(job, NOW, 120).job
    pending = Observation(ObservedState.PENDING)
    assert decide(pausing, attempt, pending, NOW).action is Action.STOP
    unsent = replace(attempt, submitted_at=None, started_at=None)
    assert decide(pausing, unsent, NOT_FOUND, NOW).job.status is JobStatus.PAUSED


def test_what_a_pause_finds_broken_still_counts() -> None:
    job, attempt = live_job()
    pausing = request_pause(job, NOW, 120).job
    lost = decide(pausing, attempt, FAILED, NOW)
    assert (lost.job.status, lost.job.num_failures) == (JobStatus.PAUSED, 1)
    faulty = decide(pausing, reported(attempt, EndReason.DATA_ERROR), FAILED, NOW)
    assert faulty.job.status is JobStatus.FAILED
    assert decide(pausing, attempt, SUCCEEDED, NOW).job.status is JobStatus.SUCCEEDED


def test_a_job_that_is_resumed_while_it_pauses_goes_on_with_another_attempt_at_most() -> None:
    job, attempt = live_job()
    resumed = request_resume(request_pause(job, NOW, 120).job, NOW + 1).job
    assert decide(resumed, attempt, RUNNING, NOW + 2).action is Action.NONE
    again = decide(resumed, reported(attempt, EndReason.PAUSED), FAILED, NOW + 3).job
    assert (again.status, again.retry_at) == (JobStatus.QUEUED, NOW + 3)


def test_a_job_that_pauses_again_has_all_of_its_grace_again() -> None:
    job, attempt = live_job()
    asked = decide(request_pause(job, NOW, 120).job, attempt, RUNNING, NOW).job
    resumed = request_resume(asked, NOW + 1).job
    pausing = request_pause(resumed, NOW + 500, 120).job
    assert decide(pausing, attempt, RUNNING, NOW + 500).action is Action.PAUSE


def test_a_preempted_job_saves_in_time_and_waits_again_with_its_old_place() -> None:
    job, attempt = live_job(queued_at=NOW - 7)
    pausing = preempt(job, queued_job(priority=5), NOW, 120).job
    asked = decide(pausing, attempt, RUNNING, NOW).job
    assert decide(asked, attempt, RUNNING, NOW + 120).action is Action.STOP
    saved = reported(attempt, EndReason.PAUSED)
    ended = decide(pausing, saved, FAILED, NOW + 3)
    assert (ended.job.status, ended.job.waits_since) == (JobStatus.QUEUED, NOW - 7)
    assert (ended.job.pause_requested, ended.job.queue_note) == (False, QueueState(since=NOW + 3))
    assert [line.kind for line in ended.timeline] == ["job_preempted"]
    # Somebody pauses it meanwhile.
    pausing = request_pause(pausing, NOW + 1, 120).job
    assert decide(pausing, saved, FAILED, NOW + 3).job.status is JobStatus.PAUSED


def test_a_restarted_job_waits_anew_with_a_new_budget() -> None:
    job, attempt = live_job(num_failures=3)
    failed = decide(job, attempt, FAILED, NOW).job
    assert failed.status is JobStatus.FAILED
    again = request_restart(failed, "/runs/x/checkpoints/step-00000100-a0-r0", 100, NOW + 9).job
    assert (again.status, again.num_failures, again.reason) == (JobStatus.QUEUED, 0, None)
    assert (again.ended_at, again.waits_since) == (None, NOW + 9)
    started = start(again, NOW + 10, QueueState())
    assert started.attempt.index == 1
    sent = submission_accepted(started.job, started.attempt, NOW + 11)
    assert (started.job.resume_from is None, sent.job.resume_from) == (False, None)

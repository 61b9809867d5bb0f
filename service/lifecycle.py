"""The life of a job as one pure function: `decide(job, attempt, observation, now) -> Decision`.

    QUEUED ──► STARTING ──► RUNNING ──► SUCCEEDED | FAILED | CANCELLED
      ▲           │            │                         ▲
      └── retry ──┴────────────┤                         │
                               └── cancel ──► STOPPING ──┘

`decide` is total: any status, attempt and observation gives a decision, and the same input gives
the same one. A decision is what to store first and what to ask of the backend afterwards, so
that a crash in between repeats the question and nothing else. An UNREACHABLE observation says
nothing about the attempt: it never ends, stops or submits anything. It only shows in the job's
message, until the backend answers again.

STARTING turns into RUNNING when the driver reports that its workers started, which the store
applies as the record arrives; everything else about a status is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from service.domain import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    TimelineEvent,
    attempt_id,
)

# A submission may be in flight this long after it was sent, while the backend knows nothing of it.
NOT_FOUND_GRACE_S = 30.0
# A driver that reported its end is stopped after this, and believed after twice this.
REPORT_GRACE_S = 60.0
FIRST_BACKOFF_S = 2.0
MAX_BACKOFF_S = 300.0
# With the longest backoff between them these take most of a day: nothing will change any more.
MAX_ATTEMPTS = 250


class RetryClass(StrEnum):
    """What follows when an attempt ends: nothing more, or another attempt.

    WITHIN_BUDGET spends the user's budget, ALWAYS does not: the attempt did nothing wrong.
    """

    NEVER = "never"
    WITHIN_BUDGET = "within_budget"
    ALWAYS = "always"


# Lost machines come back, and copies that diverged are equal again after a checkpoint is loaded,
# which every save writes only from copies that it finds equal (where the job checks for divergence
# at all). A host that died, was taken away or is not there yet is no fault of the job. A fault of
# the spec, data, code or storage would only repeat itself, and so would a loss that is not finite.
RETRY_CLASSES: dict[EndReason, RetryClass] = {
    EndReason.COMPLETED: RetryClass.NEVER,
    EndReason.CANCELLED: RetryClass.NEVER,
    EndReason.WORKERS_LOST: RetryClass.WITHIN_BUDGET,
    EndReason.DRIVER_LOST: RetryClass.WITHIN_BUDGET,
    # A cluster that was restarted remembers nothing of what it ran.
    EndReason.FORGOTTEN: RetryClass.ALWAYS,
    EndReason.SUBMISSION_REFUSED: RetryClass.NEVER,
    EndReason.BAD_SPEC: RetryClass.NEVER,
    EndReason.DATA_ERROR: RetryClass.NEVER,
    EndReason.STORAGE_ERROR: RetryClass.NEVER,
    EndReason.TRAINING_ERROR: RetryClass.NEVER,
    EndReason.VERSION_MISMATCH: RetryClass.NEVER,
    EndReason.DIVERGED: RetryClass.WITHIN_BUDGET,
    # Bad rows are left out from then on; too many of them are no accident.
    EndReason.ROWS_SKIPPED: RetryClass.WITHIN_BUDGET,
    EndReason.HANG: RetryClass.WITHIN_BUDGET,
    EndReason.DEVICE_OOM: RetryClass.WITHIN_BUDGET,
    EndReason.HOST_OOM: RetryClass.WITHIN_BUDGET,
    EndReason.HOST_LOST: RetryClass.ALWAYS,
    EndReason.PREEMPTED: RetryClass.ALWAYS,
    EndReason.NO_ROOM: RetryClass.ALWAYS,
    EndReason.NON_FINITE: RetryClass.NEVER,
    # The other attempt goes on: a second one beside it would find the folder in use again.
    EndReason.RUN_IN_USE: RetryClass.NEVER,
    EndReason.RETRIES_EXHAUSTED: RetryClass.NEVER,
}

# The driver restarts workers after these itself, and reports each time, the last one included.
_RESTARTED_BY_DRIVER = frozenset(
    {
        EndReason.WORKERS_LOST,
        EndReason.DIVERGED,
        EndReason.ROWS_SKIPPED,
        EndReason.HANG,
        EndReason.DEVICE_OOM,
        EndReason.HOST_OOM,
    }
)

_FINAL_STATUS = {
    EndReason.COMPLETED: JobStatus.SUCCEEDED,
    EndReason.CANCELLED: JobStatus.CANCELLED,
}


class Action(StrEnum):
    """What to ask of the backend once a decision is stored."""

    NONE = "none"
    SUBMIT = "submit"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """The job and attempt as they should be stored, and the action that follows."""

    job: Job
    attempt: Attempt | None
    action: Action = Action.NONE
    timeline: tuple[TimelineEvent, ...] = ()


@dataclass(frozen=True)
class _End:
    reason: EndReason
    message: str


def decide(job: Job, attempt: Attempt | None, observation: Observation, now: float) -> Decision:
    """What follows for a job whose newest attempt was just observed. `now` is Unix seconds."""
    if job.status.is_terminal:
        return Decision(job, attempt)
    if attempt is None or attempt.end_reason is not None:
        return _between_attempts(job, attempt, now)
    end = _end_of(job, attempt, observation, now)
    if end is not None:
        return _end_attempt(job, attempt, end, now)
    if _is_stopping(job):
        return _stop(job, attempt, observation)
    return _keep_going(job, attempt, observation, now)


def request_cancel(job: Job, now: float) -> Decision:
    """A user asks a job to stop. A job that waits in the queue ends at once."""
    if job.status.is_terminal:
        return Decision(job, None)
    asked = _line(job, None, now, "cancel_requested", "cancel requested", actor="user")
    job = replace(job, cancel_requested=True)
    if job.status is JobStatus.QUEUED:
        finished = _finish(job, _End(EndReason.CANCELLED, "cancelled while queued"), now)
        return replace(finished, timeline=(asked, *finished.timeline))
    return Decision(replace(job, status=JobStatus.STOPPING), None, timeline=(asked,))


def submission_accepted(job: Job, attempt: Attempt, now: float) -> Decision:
    """The backend took the attempt."""
    line = _line(job, attempt, now, "attempt_submitted", f"attempt {attempt.index} submitted")
    accepted = replace(attempt, submitted_at=now)
    return Decision(replace(job, message=""), accepted, timeline=(line,))


def submission_unanswered(job: Job, attempt: Attempt, message: str) -> Decision:
    """The backend did not say whether it took the attempt: it is asked again."""
    return Decision(replace(job, message=message), attempt)


def submission_failed(
    job: Job, attempt: Attempt, reason: EndReason, message: str, now: float
) -> Decision:
    """The attempt cannot be submitted at all: the backend refused, or storage did."""
    return _end_attempt(job, attempt, _End(reason, message), now)


def spends_budget(reason: str) -> bool:
    """Whether a loss of workers counts as a failure; a reason that is not known does."""
    known = {each.value: each for each in EndReason}
    return reason not in known or RETRY_CLASSES[known[reason]] is not RetryClass.ALWAYS


def remaining_failures(job: Job) -> int:
    """How many failures the budget of a job still allows."""
    return max(0, job.spec.retry.max_failures - job.num_failures)


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after failure number `num_failures` (from 1), doubling up to a limit."""
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 30))


def _is_stopping(job: Job) -> bool:
    return job.cancel_requested or job.status is JobStatus.STOPPING


def _between_attempts(job: Job, last: Attempt | None, now: float) -> Decision:
    if _is_stopping(job):
        return _finish(job, _End(EndReason.CANCELLED, "cancelled"), now, last)
    is_waiting = job.retry_at is not None and now < job.retry_at
    if is_waiting or job.status is JobStatus.PAUSED:
        return Decision(job, last)
    return _start_attempt(job, 0 if last is None else last.index + 1, now)


def _start_attempt(job: Job, index: int, now: float) -> Decision:
    attempt = Attempt(id=attempt_id(job.id, index), job_id=job.id, index=index, created_at=now)
    started = replace(job, status=JobStatus.STARTING, retry_at=None, current_attempt_id=attempt.id)
    line = _line(job, attempt, now, "attempt_created", f"attempt {index} created")
    return Decision(started, attempt, timeline=(line,))


def _end_of(job: Job, attempt: Attempt, observation: Observation, now: float) -> _End | None:
    """How the attempt ended, or None while it lives or nothing is known."""
    match observation.state:
        case ObservedState.UNREACHABLE:
            return None
        case ObservedState.PENDING | ObservedState.RUNNING:
            has_ended = _s_since_report(attempt, now) > 2 * REPORT_GRACE_S
        case ObservedState.NOT_FOUND:
            has_ended = not _may_be_in_flight(job, attempt, now)
        case _:
            has_ended = True
    return _explain(job, attempt, observation) if has_ended else None


def _s_since_report(attempt: Attempt, now: float) -> float:
    return now - attempt.reported_end.time if attempt.reported_end else 0.0


def _may_be_in_flight(job: Job, attempt: Attempt, now: float) -> bool:
    if attempt.reported_end is not None:
        return False
    if attempt.submitted_at is None and not _is_stopping(job):
        return True
    sent_at = [sent for sent in (attempt.last_submit_at, attempt.submitted_at) if sent is not None]
    return bool(sent_at) and now - max(sent_at) < NOT_FOUND_GRACE_S


def _explain(job: Job, attempt: Attempt, observation: Observation) -> _End:
    """The driver's own word where there is one, else what the backend's answer implies."""
    end = _implied_end(observation)
    if attempt.reported_end is not None:
        end = _End(attempt.reported_end.reason, attempt.reported_end.message)
    if _is_stopping(job) and end.reason is not EndReason.COMPLETED:
        return _End(EndReason.CANCELLED, "cancelled on request")
    return end


def _implied_end(observation: Observation) -> _End:
    detail = f": {observation.message}" if observation.message else ""
    match observation.state:
        case ObservedState.SUCCEEDED:
            return _End(EndReason.COMPLETED, "the driver exited with success")
        case ObservedState.STOPPED:
            return _End(EndReason.CANCELLED, f"stopped on the cluster, not by the service{detail}")
        case ObservedState.NOT_FOUND:
            return _End(EndReason.FORGOTTEN, "the cluster knows no such submission any more")
        case _:
            return _End(EndReason.DRIVER_LOST, f"the driver ended without a report{detail}")


def _end_attempt(job: Job, attempt: Attempt, end: _End, now: float) -> Decision:
    ended = replace(attempt, ended_at=now, end_reason=end.reason, message=end.message)
    job = replace(job, num_failures=job.num_failures + _num_failures(attempt, end.reason))
    match RETRY_CLASSES[end.reason]:
        case RetryClass.NEVER:
            return _finish(job, end, now, ended)
        case RetryClass.WITHIN_BUDGET if job.num_failures > job.spec.retry.max_failures:
            return _finish(job, _exhausted(job, end), now, ended)
        case RetryClass.WITHIN_BUDGET:
            cost = f"failure {job.num_failures} of {job.spec.retry.max_failures} allowed"
            return _requeue(job, ended, now, backoff_s(job.num_failures), cost)
        case RetryClass.ALWAYS if ended.index + 1 >= MAX_ATTEMPTS:
            return _finish(job, _hopeless(ended, end), now, ended)
        case RetryClass.ALWAYS:
            # Attempts stand for failures here, so that a cluster that keeps forgetting is spared.
            return _requeue(job, ended, now, backoff_s(ended.index + 1), "not counted as a failure")


def _num_failures(attempt: Attempt, reason: EndReason) -> int:
    """Failures that an attempt spent: its worker restarts, and its own loss if not among them."""
    if reason in _RESTARTED_BY_DRIVER:
        return max(1, attempt.num_worker_failures)
    is_lost = RETRY_CLASSES[reason] is RetryClass.WITHIN_BUDGET
    return attempt.num_worker_failures + int(is_lost)


def _exhausted(job: Job, end: _End) -> _End:
    return _End(
        EndReason.RETRIES_EXHAUSTED,
        f"gave up after {job.num_failures} failure(s), retry.max_failures is "
        f"{job.spec.retry.max_failures}; the last one: {end.message}",
    )


def _hopeless(ended: Attempt, end: _End) -> _End:
    return _End(
        EndReason.RETRIES_EXHAUSTED,
        f"gave up after {ended.index + 1} attempts, the last of which ended without a fault of "
        f"the job's own ({end.reason}): {end.message}",
    )


def _requeue(job: Job, ended: Attempt, now: float, delay_s: float, cost: str) -> Decision:
    line = _line(
        job,
        ended,
        now,
        "retry_scheduled",
        f"attempt {ended.index} ended ({ended.end_reason}: {ended.message}); "
        f"next one in {delay_s:g} s, {cost}",
    )
    queued = replace(job, status=JobStatus.QUEUED, retry_at=now + delay_s, message="")
    return Decision(queued, ended, timeline=(line,))


def _finish(job: Job, end: _End, now: float, attempt: Attempt | None = None) -> Decision:
    finished = replace(
        job,
        status=_FINAL_STATUS.get(end.reason, JobStatus.FAILED),
        reason=end.reason,
        message=end.message,
        ended_at=now,
        retry_at=None,
    )
    line = _line(job, attempt, now, "job_ended", f"{finished.status} ({end.reason}): {end.message}")
    return Decision(finished, attempt, timeline=(line,))


def _stop(job: Job, attempt: Attempt, observation: Observation) -> Decision:
    # Asked again at every look until the end is observed: a lost request costs nothing, and a
    # submission that is still in flight must not outlive its job.
    is_answered = observation.state is not ObservedState.UNREACHABLE
    stopping = replace(_with_contact(job, observation), status=JobStatus.STOPPING)
    return Decision(stopping, attempt, Action.STOP if is_answered else Action.NONE)


def _keep_going(job: Job, attempt: Attempt, observation: Observation, now: float) -> Decision:
    if job.status is JobStatus.QUEUED:
        job = replace(job, status=JobStatus.STARTING)
    if observation.state is ObservedState.NOT_FOUND and attempt.submitted_at is None:
        # The message may tell of a submission that got no answer: it stands until one does.
        return Decision(job, attempt, Action.SUBMIT)
    job = _with_contact(job, observation)
    if observation.state in (ObservedState.UNREACHABLE, ObservedState.NOT_FOUND):
        return Decision(job, attempt)
    if attempt.submitted_at is None:
        # An earlier submission arrived although its answer did not.
        attempt = replace(attempt, submitted_at=now)
    if observation.state is ObservedState.RUNNING and attempt.started_at is None:
        attempt = replace(attempt, started_at=now)
    is_overdue = _s_since_report(attempt, now) > REPORT_GRACE_S
    return Decision(job, attempt, Action.STOP if is_overdue else Action.NONE)


def _with_contact(job: Job, observation: Observation) -> Job:
    """The job with a message that says whether its cluster answers."""
    is_away = observation.state is ObservedState.UNREACHABLE
    return replace(job, message=observation.message if is_away else "")


def _line(
    job: Job,
    attempt: Attempt | None,
    now: float,
    kind: str,
    message: str,
    *,
    actor: str = "service",
) -> TimelineEvent:
    """A timeline line; the store gives it its id."""
    return TimelineEvent(
        id=0,
        job_id=job.id,
        attempt_id=attempt.id if attempt else None,
        time=now,
        kind=kind,
        message=message,
        actor=actor,
        data={},
    )

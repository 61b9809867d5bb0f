"""The state machine of jobs: `decide`, and the requests of users and the scheduler. Pure.

    QUEUED ──► STARTING ──► RUNNING ──► SUCCEEDED | FAILED | CANCELLED
    ▲  ▲          │            │                         ▲
    │  └─ retry ──┴────────────┤                         │
    │                          ├── cancel ──► STOPPING ──┘
    └── resume ── PAUSED ◄─────┘ pause

`decide(job, attempt, observation, now)` is total and deterministic. A `Decision` is what to store
first and what to ask of the backend afterwards, so a crash in between repeats the request and
nothing else. An UNREACHABLE observation never ends, stops or submits anything: it only shows in
the job's message until the backend answers again.

The scheduler admits a queued job with `start`. STARTING turns into RUNNING when the driver reports
that its workers started (`service.domain.ingest`). Retry rules are in `service.domain.retries`.
Requests give the job to store and the timeline events; a repeated request changes nothing. Times
are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    QueueState,
    ReportedEnd,
    TimelineEvent,
    attempt_id,
)
from service.domain.retries import backoff_s
from service.domain.timeline import ServiceEvent, end_details, timeline_event
from trainer.failures import Budget

# How long after it was sent a submission may be unknown to the backend.
NOT_FOUND_GRACE_S = 30.0
# Pauses between tries to submit double up to this. A quota or a right is mended in minutes.
_MAX_SUBMIT_PAUSE_S = 30.0
# A driver that reported its end is stopped after this, and believed after twice this.
REPORT_GRACE_S = 60.0
# Workers may outlive their driver for some seconds, and commit a checkpoint meanwhile.
LATE_RECORDS_S = 30.0
# With the longest backoff between them these take most of a day.
MAX_ATTEMPTS = 250
# What a job says that pauses, and while run storage does not take the request.
PAUSING = "pausing: workers that train save a checkpoint and leave"
NOT_ASKED = "pausing: run storage cannot be written, so that the workers are not asked yet"
_FINAL_STATUS = {
    EndReason.COMPLETED: JobStatus.SUCCEEDED,
    EndReason.CANCELLED: JobStatus.CANCELLED,
}


class Action(StrEnum):
    """What to do for an attempt once a decision is stored; PAUSE asks it to save and end."""

    NONE = "none"
    SUBMIT = "submit"
    STOP = "stop"
    PAUSE = "pause"


@dataclass(frozen=True)
class Decision:
    """The job and attempt as they should be stored, and the action that follows."""

    job: Job
    attempt: Attempt | None
    action: Action = Action.NONE
    timeline: tuple[TimelineEvent, ...] = ()


def decide(job: Job, attempt: Attempt | None, observation: Observation, now: float) -> Decision:
    """What follows for a job whose newest attempt was just observed."""
    if job.status.is_terminal:
        return Decision(job, attempt)
    if attempt is None or attempt.end_reason is not None:
        return _between_attempts(job, attempt, now)
    if _has_existed(attempt, observation):
        # Only one attempt starts from the requested checkpoint; the next follows what it saved.
        job = replace(job, resume_from=None)
    end = _end_of(job, attempt, observation, now)
    if end is not None:
        return end_attempt(job, attempt, end.reason, end.message, now)
    if job.cancel_requested:
        return _stop(job, attempt, observation)
    if job.pause_requested:
        return _pause(job, attempt, observation, now)
    return _keep_going(job, attempt, observation, now)


def start(job: Job, now: float, note: QueueState) -> Decision:
    """A job leaves the queue with a new attempt, to be submitted."""
    index = job.num_attempts
    attempt = Attempt(id=attempt_id(job.id, index), job_id=job.id, index=index, created_at=now)
    started = replace(
        job,
        status=JobStatus.STARTING,
        retry_at=None,
        current_attempt_id=attempt.id,
        queue_note=replace(note, since=now),
        message="",
    )
    waited_s = None if job.queued_at is None else round(max(0.0, now - job.queued_at), 3)
    facts = {"queued_s": waited_s, "resume_from": job.resume_from}
    message = f"attempt {index} created"
    made = timeline_event(job, attempt, now, ServiceEvent.ATTEMPT_CREATED, message, facts)
    return Decision(started, attempt, timeline=(made,))


def submission_accepted(
    job: Job, attempt: Attempt, now: float, notes: tuple[str, ...] = ()
) -> Decision:
    """The backend took the attempt; `notes` say what it does differently from those before."""
    message = "; ".join((f"attempt {attempt.index} submitted", *notes))
    sent = timeline_event(job, attempt, now, ServiceEvent.ATTEMPT_SUBMITTED, message)
    accepted = replace(attempt, submitted_at=now)
    return Decision(replace(job, message="", resume_from=None), accepted, timeline=(sent,))


def _between_attempts(job: Job, last: Attempt | None, now: float) -> Decision:
    """No attempt is live: the job is queued, paused, or cancelled."""
    if job.cancel_requested:
        return finish(job, EndReason.CANCELLED, "cancelled", now, last)
    if job.status is JobStatus.PAUSED or job.pause_requested:
        return Decision(replace(job, status=JobStatus.PAUSED, pause_requested=False), last)
    return Decision(replace(job, status=JobStatus.QUEUED), last)


def _end_of(job: Job, attempt: Attempt, observation: Observation, now: float) -> ReportedEnd | None:
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


def _has_existed(attempt: Attempt, observation: Observation) -> bool:
    """Whether the attempt is known to have reached the cluster, with or without an answer."""
    unknown = (ObservedState.UNREACHABLE, ObservedState.NOT_FOUND)
    return attempt.reported_end is not None or observation.state not in unknown


def _s_since_report(attempt: Attempt, now: float) -> float:
    return now - attempt.reported_end.time if attempt.reported_end else 0.0


def _may_be_in_flight(job: Job, attempt: Attempt, now: float) -> bool:
    if attempt.reported_end is not None:
        return False
    if attempt.submitted_at is None and not job.cancel_requested and not job.pause_requested:
        return True
    sent_at = [sent for sent in (attempt.last_submit_at, attempt.submitted_at) if sent is not None]
    # Clocks of replicas may differ by a little; one that was set back by more is not waited for.
    return bool(sent_at) and abs(now - max(sent_at)) < NOT_FOUND_GRACE_S


def _explain(job: Job, attempt: Attempt, observation: Observation) -> ReportedEnd:
    """The end that the driver reported, else the one that the observation implies."""
    end = attempt.reported_end or _implied_end(observation)
    if job.cancel_requested and end.reason is not EndReason.COMPLETED:
        return ReportedEnd(EndReason.CANCELLED, "cancelled on request")
    was_stopped_by_us = job.pause_requested or bool(job.queue_note.stop_sent)
    if end.reason is EndReason.CANCELLED and was_stopped_by_us:
        # Also where the pause was withdrawn after the stop had been sent.
        message = "stopped before it had saved; training goes on from the newest checkpoint"
        return ReportedEnd(EndReason.PAUSED, message)
    was_sent = attempt.submitted_at is not None
    if job.pause_requested and not was_sent and end.reason is EndReason.FORGOTTEN:
        return ReportedEnd(EndReason.PAUSED, "paused before it was submitted")
    return end


def _implied_end(observation: Observation) -> ReportedEnd:
    detail = f": {observation.message}" if observation.message else ""
    match observation.state:
        case ObservedState.SUCCEEDED:
            return ReportedEnd(EndReason.COMPLETED, "the driver exited with success")
        case ObservedState.STOPPED:
            message = f"stopped on the cluster, not by the service{detail}"
            return ReportedEnd(EndReason.CANCELLED, message)
        case ObservedState.NOT_FOUND:
            return ReportedEnd(EndReason.FORGOTTEN, "the cluster knows no such submission any more")
        case _ if observation.reason is not None:
            return ReportedEnd(observation.reason, observation.message)
        case _:
            detail = detail.replace("\n", "; the end of its log:\n", 1)  # which need not say why
            return ReportedEnd(EndReason.DRIVER_LOST, f"the driver ended without a report{detail}")


def end_attempt(
    job: Job, attempt: Attempt, reason: EndReason, message: str, now: float
) -> Decision:
    """What follows an end of an attempt: the end of the job, a pause, or a retry."""
    late_at = now + LATE_RECORDS_S
    ended = replace(attempt, ended_at=now, end_reason=reason, message=message, collect_at=late_at)
    job = replace(job, num_failures=job.num_failures + _num_failures(attempt, reason))
    is_spent = job.num_failures > job.spec.retry.max_failures
    num_free = (job.queue_note.num_free or 0) + 1
    match reason.rule.budget:
        case Budget.NONE:
            return finish(job, reason, message, now, ended)
        case Budget.USER if is_spent:
            message = (
                f"gave up after {job.num_failures} failure(s), retry.max_failures is "
                f"{job.spec.retry.max_failures}; the last one: {message}"
            )
            return finish(job, EndReason.RETRIES_EXHAUSTED, message, now, ended)
        case Budget.FREE if num_free >= MAX_ATTEMPTS and not job.pause_requested:
            message = (
                f"gave up after {num_free} attempts in a row that ended without a fault of the "
                f"job's own, the last one ({reason}): {message}"
            )
            return finish(job, EndReason.RETRIES_EXHAUSTED, message, now, ended)
    return _paused(job, ended, now) if job.pause_requested else _requeue(job, ended, num_free, now)


def _num_failures(attempt: Attempt, reason: EndReason) -> int:
    """Failures that an attempt spent: its worker restarts, and its own loss if not among them."""
    # The driver reports each loss after which it restarts workers itself, the last one included.
    own = int(reason.rule.budget is Budget.USER)
    known = attempt.num_worker_failures
    return max(own, known) if reason.rule.restarts_workers else own + known


def _paused(job: Job, ended: Attempt, now: float) -> Decision:
    """A pause is complete: the job stays paused, or after a preemption is queued again."""
    assert ended.end_reason is not None
    by, reason = job.queue_note.preempted_by, ended.end_reason.value
    cause = f"attempt {ended.index} ended ({reason}: {ended.message})"
    note = QueueState(since=now)
    rested = replace(job, pause_requested=False, retry_at=None, message="", queue_note=note)
    if by is None:
        message = f"paused: {cause}"
        told = timeline_event(job, ended, now, ServiceEvent.JOB_PAUSED, message, {"reason": reason})
        return Decision(replace(rested, status=JobStatus.PAUSED), ended, timeline=(told,))
    message = f"made way for {by} and waits with its old place: {cause}"
    facts = {"reason": reason, "preempted_by": by}
    told = timeline_event(job, ended, now, ServiceEvent.JOB_PREEMPTED, message, facts)
    return Decision(replace(rested, status=JobStatus.QUEUED), ended, timeline=(told,))


def _requeue(job: Job, ended: Attempt, num_free: int, now: float) -> Decision:
    """Retry after a backoff that grows with failures, or with attempts if they are free."""
    assert ended.end_reason is not None
    rule = ended.end_reason.rule
    is_free = rule.budget is Budget.FREE
    # Attempts count like failures here, to spare a cluster that keeps losing submissions.
    num_in_a_row = num_free if is_free else job.num_failures
    delay_s = backoff_s(rule.first_backoff_s, num_in_a_row, ended.id)
    allowed = f"failure {job.num_failures} of {job.spec.retry.max_failures} allowed"
    cost = "not counted as a failure" if is_free else allowed
    message = (
        f"attempt {ended.index} ended ({ended.end_reason}: {ended.message}); "
        f"next one in {delay_s:g} s, {cost}"
    )
    facts = {"reason": ended.end_reason.value, "delay_s": delay_s, "is_counted": not is_free}
    data = {**end_details(job, ended), **facts}
    told = timeline_event(job, ended, now, ServiceEvent.RETRY_SCHEDULED, message, data)
    retry_at = now + delay_s
    note = QueueState(since=retry_at, num_free=num_free if is_free else None)
    queued = replace(job, status=JobStatus.QUEUED, retry_at=retry_at, message="", queue_note=note)
    return Decision(queued, ended, timeline=(told,))


def finish(
    job: Job, reason: EndReason, message: str, now: float, attempt: Attempt | None = None
) -> Decision:
    """End a job for `reason`, which determines its final status."""
    finished = replace(
        job,
        status=_FINAL_STATUS.get(reason, JobStatus.FAILED),
        reason=reason,
        message=message,
        ended_at=now,
        retry_at=None,
        pause_requested=False,
        queue_note=QueueState(),
    )
    facts = {"status": finished.status.value, "reason": reason.value}
    data = {**end_details(job, attempt), **facts}
    said = f"{finished.status} ({reason}): {message}"
    told = timeline_event(job, attempt, now, ServiceEvent.JOB_ENDED, said, data)
    return Decision(finished, attempt, timeline=(told,))


def _stop(job: Job, attempt: Attempt, observation: Observation) -> Decision:
    # Repeated until the end is observed: a request may be lost, and a submission that is still in
    # flight must not outlive its job.
    is_answered = observation.state is not ObservedState.UNREACHABLE
    stopping = replace(_with_contact(job, observation), status=JobStatus.STOPPING)
    return Decision(stopping, attempt, Action.STOP if is_answered else Action.NONE)


def _pause(job: Job, attempt: Attempt, observation: Observation, now: float) -> Decision:
    """Let the driver save and end; stop one that has nothing to save, or takes too long."""
    if observation.state is ObservedState.UNREACHABLE:
        return Decision(_with_contact(job, observation), attempt)
    note, has_begun = job.queue_note, observation.state is ObservedState.RUNNING
    if has_begun and note.stop_at is None and note.grace_s is not None:
        # From now on: nobody was asked while the cluster did not answer.
        note = replace(note, stop_at=now + note.grace_s)
    may_save = has_begun and (note.stop_at is None or now < note.stop_at)
    if not may_save:
        # Stored before it is sent, so that the end is known to be the service's own doing.
        note = replace(note, stop_sent=True)
    # That they could not be asked stays until they are.
    message = job.message if may_save and job.message.startswith(NOT_ASKED) else PAUSING
    pausing = replace(job, message=message, queue_note=note)
    return Decision(pausing, attempt, Action.PAUSE if may_save else Action.STOP)


def _keep_going(job: Job, attempt: Attempt, observation: Observation, now: float) -> Decision:
    if job.status.is_at_rest:
        job = replace(job, status=JobStatus.STARTING)
    if observation.state is ObservedState.NOT_FOUND and attempt.submitted_at is None:
        # The message may be about a submission without an answer: it stays until there is one.
        action = Action.SUBMIT if _may_submit(attempt, now) else Action.NONE
        return Decision(job, attempt, action)
    job = _with_contact(job, observation)
    if observation.state in (ObservedState.UNREACHABLE, ObservedState.NOT_FOUND):
        return Decision(job, attempt)
    timeline: tuple[TimelineEvent, ...] = ()
    if attempt.submitted_at is None:
        # An earlier submission arrived although its answer did not.
        accepted = submission_accepted(job, attempt, now)
        attempt, timeline = accepted.attempt or attempt, accepted.timeline
    if observation.state is ObservedState.RUNNING and attempt.started_at is None:
        attempt = replace(attempt, started_at=now)
    is_overdue = _s_since_report(attempt, now) > REPORT_GRACE_S
    return Decision(job, attempt, Action.STOP if is_overdue else Action.NONE, timeline)


def _may_submit(attempt: Attempt, now: float) -> bool:
    """Whether to try now: a second time at once, then after as long as it was tried before.

    Of a clock that was set back nothing is waited for.
    """
    tried = attempt.last_submit_at
    if tried is None:
        return True
    return not 0.0 <= now - tried < min(_MAX_SUBMIT_PAUSE_S, tried - attempt.created_at)


def _with_contact(job: Job, observation: Observation) -> Job:
    """The job with a message that says why its cluster does not answer, or does not start it."""
    is_told = observation.state in (ObservedState.UNREACHABLE, ObservedState.PENDING)
    return replace(job, message=observation.message if is_told else "")


def _requested(action: str, job: Job, now: float, actor: str, **facts: object) -> TimelineEvent:
    """The event of a user's request; `was` is the status of the job at that time."""
    kind, message = ServiceEvent[f"{action.upper()}_REQUESTED"], f"{action} requested"
    data = {"was": job.status.value, **facts}
    return timeline_event(job, None, now, kind, message, data, actor)


def request_cancel(job: Job, now: float, actor: str = "user") -> Decision:
    """Cancel a job; one for which nothing runs ends at once."""
    if job.status.is_terminal or job.cancel_requested:
        return Decision(job, None)
    asked = _requested("cancel", job, now, actor)
    cancelling = replace(job, cancel_requested=True)
    if job.status.is_at_rest:
        message = f"cancelled while {job.status.value.lower()}"
        finished = finish(cancelling, EndReason.CANCELLED, message, now)
        return replace(finished, timeline=(asked, *finished.timeline))
    return Decision(replace(cancelling, status=JobStatus.STOPPING), None, timeline=(asked,))


def request_pause(job: Job, now: float, grace_s: float, actor: str = "user") -> Decision:
    """Pause a job: it saves, gives its workers back and keeps its place in the queue.

    Its workers have `grace_s` seconds to save. A queued job pauses at once.
    """
    note = job.queue_note
    is_asked = job.pause_requested and note.preempted_by is None
    if job.status.is_terminal or job.status is JobStatus.PAUSED or is_asked:
        return Decision(job, None)
    asked = _requested("pause", job, now, actor, grace_s=grace_s)
    if job.status is JobStatus.QUEUED:
        paused = replace(
            job, status=JobStatus.PAUSED, retry_at=None, queue_note=QueueState(), message=""
        )
        return Decision(paused, None, timeline=(asked,))
    pausing = replace(note, preempted_by=None, grace_s=grace_s)
    job = replace(job, pause_requested=True, queue_note=pausing)
    return Decision(job, None, timeline=(asked,))


def preempt(job: Job, by: Job, now: float, grace_s: float) -> Decision:
    """Preempt a running job for one of a higher priority; it is queued again once paused."""
    name = by.named_for(job)
    note = replace(job.queue_note, preempted_by=name, grace_s=grace_s)
    message = f"makes way for {name} of priority {by.priority}"
    facts = {"preempted_by": name, "priority": by.priority, "grace_s": grace_s}
    told = timeline_event(job, None, now, ServiceEvent.PREEMPTION_REQUESTED, message, facts)
    pausing = replace(job, pause_requested=True, queue_note=note)
    return Decision(pausing, None, timeline=(told,))


def request_resume(job: Job, now: float, actor: str = "user") -> Decision:
    """Resume: a paused job is queued with its old place, one that still pauses goes on."""
    is_preempted = job.queue_note.preempted_by is not None
    is_pausing = job.pause_requested and not is_preempted
    if not (job.status is JobStatus.PAUSED or is_pausing):
        return Decision(job, None)
    asked = _requested("resume", job, now, actor)
    if job.status is JobStatus.PAUSED:
        queued = replace(job, status=JobStatus.QUEUED, pause_requested=False, retry_at=None)
        waiting = replace(queued, queue_note=QueueState(since=now))
        return Decision(waiting, None, timeline=(asked,))
    # A driver that has seen the request ends all the same, and another attempt follows at once.
    note = replace(job.queue_note, stop_at=None)
    going_on = replace(job, pause_requested=False, queue_note=note, message="")
    return Decision(going_on, None, timeline=(asked,))


def request_restart(
    job: Job, checkpoint: str, step: int, now: float, actor: str = "user"
) -> Decision:
    """Restart a job that has ended or rests from one of its checkpoints, with a new budget."""
    asked = _requested("restart", job, now, actor, step=step, checkpoint=checkpoint)
    asked = replace(asked, message=f"restart from step {step} requested")
    waiting = replace(
        job,
        status=JobStatus.QUEUED,
        resume_from=checkpoint,
        queued_at=now,
        reason=None,
        message="",
        ended_at=None,
        retry_at=None,
        num_failures=0,
        cancel_requested=False,
        pause_requested=False,
        queue_note=QueueState(),
    )
    return Decision(waiting, None, timeline=(asked,))

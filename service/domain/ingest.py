"""What a driver's records mean for its job: a pure fold, applied by the store in one transaction.

Only the job's current attempt while it lives may change the job: a driver that outlived its
attempt (cut off, then replaced) still has its records kept, but no longer steers anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from service.domain.membership import apply_event
from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Membership,
    ReportedEnd,
    TimelineEvent,
)
from service.domain.retries import spends_budget
from service.domain.timeline import describe, level_of
from trainer.protocol.events import (
    AttemptEnded,
    CheckpointCommitted,
    CheckpointDeleted,
    Event,
    Metrics,
    Progress,
    WorkersLost,
    WorkersStarted,
)


@dataclass
class IngestResult:
    """A job and attempt as a batch of records leaves them, and the rows that it adds.

    `points` maps (metric name, step) to (value, time): a later record of a step replaces.
    """

    job: Job
    attempt: Attempt
    now: float
    points: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    checkpoints: list[CheckpointCommitted | CheckpointDeleted] = field(default_factory=list)
    timeline: list[TimelineEvent] = field(default_factory=list)

    @property
    def steers(self) -> bool:
        """Whether the attempt speaks for its job."""
        return self.job.current_attempt_id == self.attempt.id and self.attempt.end_reason is None


def apply_events(job: Job, attempt: Attempt, events: Iterable[Event], now: float) -> IngestResult:
    """Apply records in order; `now` (Unix seconds) is when they arrived."""
    intake = IngestResult(job, attempt, now)
    for event in events:
        _apply(intake, event)
    return intake


def _apply(intake: IngestResult, event: Event) -> None:
    if intake.steers and intake.job.resume_from is not None:
        # It was submitted, whoever heard of it: a job goes back once, not with each attempt.
        intake.job = replace(intake.job, resume_from=None)
    match event:
        case Metrics():
            _take_metrics(intake, event)
        case Progress():
            _take_progress(intake, event)
        case _:
            intake.timeline.append(_line(intake, event))
    match event:
        case CheckpointCommitted() | CheckpointDeleted():
            intake.checkpoints.append(event)
            if isinstance(event, CheckpointCommitted):
                _take_commit(intake)
        case WorkersStarted() | WorkersLost() | AttemptEnded() if intake.steers:
            _steer(intake, event)
        case _ if intake.steers:
            _take_membership(intake, event)


def _take_metrics(intake: IngestResult, event: Metrics) -> None:
    for name, value in event.values.items():
        intake.points[name, event.step] = (value, event.time)
    if intake.steers:
        latest = {**intake.job.latest_metrics, **event.values}
        intake.job = replace(intake.job, latest_metrics=latest)


def _take_progress(intake: IngestResult, event: Progress) -> None:
    if intake.steers:
        before = intake.job.progress
        told = event.model_dump(exclude={"kind", "time"})
        has_advanced = (event.step, event.rows) != (before.step, before.rows)
        advanced_at = intake.now if has_advanced else before.advanced_at
        progress = replace(before, **told, advanced_at=advanced_at)
        intake.job = replace(intake.job, progress=progress)


def _take_commit(intake: IngestResult) -> None:
    if intake.steers:
        progress = replace(intake.job.progress, checkpoint_at=intake.now)
        intake.job = replace(intake.job, progress=progress)


def _take_membership(intake: IngestResult, event: Event) -> None:
    membership = apply_event(intake.job.membership, intake.attempt.id, event)
    if membership is not intake.job.membership:
        intake.job = replace(intake.job, membership=membership)


def _steer(intake: IngestResult, event: WorkersStarted | WorkersLost | AttemptEnded) -> None:
    match event:
        case WorkersStarted():
            intake.job = _with_workers(intake.job, event, intake.now)
        case WorkersLost():
            num_failures = intake.attempt.num_worker_failures + spends_budget(event.reason)
            intake.attempt = replace(intake.attempt, num_worker_failures=num_failures)
        case AttemptEnded():
            report = _reported_end(event, intake.now)
            intake.attempt = replace(intake.attempt, reported_end=report)
            latest = {**intake.job.latest_metrics, **event.final_metrics}
            intake.job = replace(intake.job, latest_metrics=latest)


def _with_workers(job: Job, event: WorkersStarted, now: float) -> Job:
    is_starting = job.status is JobStatus.STARTING
    # Workers that are only replaced again and again get a job no further.
    advanced_at = now if is_starting else job.progress.advanced_at
    # While a job rests it trains nothing that a checkpoint should hold.
    checkpoint_at = now if is_starting else job.progress.checkpoint_at
    progress = replace(
        job.progress,
        total_steps=event.total_steps,
        advanced_at=advanced_at,
        checkpoint_at=checkpoint_at,
    )
    return replace(
        job,
        progress=progress,
        status=JobStatus.RUNNING if is_starting else job.status,
        started_at=now if job.started_at is None else job.started_at,
    )


def _reported_end(event: AttemptEnded, now: float) -> ReportedEnd:
    known = {reason.value: reason for reason in EndReason}
    if event.reason in known:
        return ReportedEnd(known[event.reason], event.message, now, event.evidence)
    message = f"{event.message} (reported as '{event.reason}', a reason unknown to this version)"
    return ReportedEnd(EndReason.TRAINING_ERROR, message, now, event.evidence)


def _line(intake: IngestResult, event: Event) -> TimelineEvent:
    return TimelineEvent(
        id=0,
        job_id=intake.job.id,
        attempt_id=intake.attempt.id,
        time=event.time,
        kind=event.kind,
        message=describe(event, _known_membership(intake)),
        actor="driver",
        data=_data_of(event),
    )


def _known_membership(intake: IngestResult) -> Membership | None:
    """What is known of the groups of the attempt that the records are of."""
    membership = intake.job.membership
    is_own = membership is not None and membership.attempt_id == intake.attempt.id
    return membership if is_own else None


def _data_of(event: Event) -> dict[str, object]:
    """What the record says beyond its sentence; `level` colours the line where it matters."""
    data = event.model_dump(mode="json", exclude={"kind", "time", "message"})
    level = level_of(event)
    return data if level is None else {"level": level, **data}

"""Folding a driver's records into its job and attempt; the store applies it in one transaction.

Only the job's current attempt may change the job, while it has not ended. Records of a driver that
outlived its attempt (partitioned, then replaced) are stored and change nothing else. Pure.
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
    """The job and attempt after a batch of records, and the rows that it adds.

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
        """Whether the attempt may change its job."""
        return self.job.current_attempt_id == self.attempt.id and self.attempt.end_reason is None


def apply_events(job: Job, attempt: Attempt, events: Iterable[Event], now: float) -> IngestResult:
    """Apply records in order; `now` (Unix seconds) is when they arrived."""
    result = IngestResult(job, attempt, now)
    for event in events:
        _apply(result, event)
    return result


def _apply(result: IngestResult, event: Event) -> None:
    if result.steers and result.job.resume_from is not None:
        # The submission arrived: only one attempt starts from the requested checkpoint.
        result.job = replace(result.job, resume_from=None)
    match event:
        case Metrics():
            _apply_metrics(result, event)
        case Progress():
            _apply_progress(result, event)
        case _:
            result.timeline.append(_timeline_event(result, event))
    match event:
        case CheckpointCommitted() | CheckpointDeleted():
            result.checkpoints.append(event)
            if isinstance(event, CheckpointCommitted) and result.steers:
                progress = replace(result.job.progress, checkpoint_at=result.now)
                result.job = replace(result.job, progress=progress)
        case WorkersStarted() | WorkersLost() | AttemptEnded() if result.steers:
            _steer(result, event)
        case _ if result.steers:
            membership = apply_event(result.job.membership, result.attempt.id, event)
            if membership is not result.job.membership:
                result.job = replace(result.job, membership=membership)


def _apply_metrics(result: IngestResult, event: Metrics) -> None:
    for name, value in event.values.items():
        result.points[name, event.step] = (value, event.time)
    if result.steers:
        latest = {**result.job.latest_metrics, **event.values}
        result.job = replace(result.job, latest_metrics=latest)


def _apply_progress(result: IngestResult, event: Progress) -> None:
    if result.steers:
        before = result.job.progress
        told = event.model_dump(exclude={"kind", "time"})
        has_advanced = (event.step, event.rows) != (before.step, before.rows)
        advanced_at = result.now if has_advanced else before.advanced_at
        progress = replace(before, **told, advanced_at=advanced_at)
        result.job = replace(result.job, progress=progress)


def _steer(result: IngestResult, event: WorkersStarted | WorkersLost | AttemptEnded) -> None:
    match event:
        case WorkersStarted():
            result.job = _with_workers(result.job, event, result.now)
        case WorkersLost():
            num_failures = result.attempt.num_worker_failures + spends_budget(event.reason)
            result.attempt = replace(result.attempt, num_worker_failures=num_failures)
        case AttemptEnded():
            report = _reported_end(event, result.now)
            result.attempt = replace(result.attempt, reported_end=report)
            latest = {**result.job.latest_metrics, **event.final_metrics}
            result.job = replace(result.job, latest_metrics=latest)


def _with_workers(job: Job, event: WorkersStarted, now: float) -> Job:
    is_starting = job.status is JobStatus.STARTING
    # Workers that are only replaced again and again are no progress.
    advanced_at = now if is_starting else job.progress.advanced_at
    # Before this the job trained nothing that a checkpoint should have.
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


def _timeline_event(result: IngestResult, event: Event) -> TimelineEvent:
    membership = result.job.membership
    is_own = membership is not None and membership.attempt_id == result.attempt.id
    data = event.model_dump(mode="json", exclude={"kind", "time", "message"})
    level = level_of(event)
    return TimelineEvent(
        id=0,
        job_id=result.job.id,
        attempt_id=result.attempt.id,
        time=event.time,
        kind=event.kind,
        message=describe(event, membership if is_own else None),
        actor="driver",
        data=data if level is None else {"level": level, **data},
    )

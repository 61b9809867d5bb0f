"""Folding a driver's records into its job and attempt; the store applies it in one transaction.

Only the job's current attempt may change the job, while it has not ended. Records of a driver that
outlived its attempt (partitioned, then replaced) are stored and change nothing of the job. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from service.domain.membership import apply_event, num_places
from service.domain.metrics import OF_POSITION, admitted
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
from trainer.protocol import events

# What is known of an attempt's groups is read with its job, at every pass of the service.
_MAX_PLACES = 2**15
# So are ends of attempts, all of a job at once.
_MAX_EVIDENCE_CHARS = 2**17


@dataclass
class IngestResult:
    """The job and attempt after a batch of records, and the rows that it adds.

    `points` maps (metric name, step) to (value, time): a later record of a step replaces.
    """

    job: Job
    attempt: Attempt
    now: float
    points: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    checkpoints: list[events.CheckpointCommitted | events.CheckpointDeleted] = field(
        default_factory=list
    )
    timeline: list[TimelineEvent] = field(default_factory=list)
    # Of the job, once a record has told any.
    metrics: dict[str, float] | None = None


def apply_events(
    job: Job, attempt: Attempt, records: Iterable[events.Event], now: float
) -> IngestResult:
    """Apply records in order; `now` (Unix seconds) is when they arrived."""
    result = IngestResult(job, attempt, now)
    for event in records:
        _apply(result, event)
    if result.metrics is not None:
        result.job = replace(result.job, latest_metrics=result.metrics)
    return result


def _apply(result: IngestResult, event: events.Event) -> None:
    # Retention goes by it: a driver's clock may be wrong.
    time = min(max(event.time, result.job.created_at), result.now)
    if time != event.time:
        event = event.model_copy(update={"time": time})
    if isinstance(event, events.Metrics):
        for name, value in event.values.items():
            result.points[name, event.step] = (value, event.time)
    elif not isinstance(event, events.Progress):
        result.timeline.append(_timeline_event(result, event))
    if isinstance(event, events.CheckpointCommitted | events.CheckpointDeleted):
        result.checkpoints.append(event)
    if result.job.is_run_by(result.attempt):
        if result.job.resume_from is not None:
            # The submission arrived: only one attempt starts from the requested checkpoint.
            result.job = replace(result.job, resume_from=None)
        _steer(result, event)


def _steer(result: IngestResult, event: events.Event) -> None:
    job = result.job
    match event:
        case events.Metrics():
            _note_metrics(result, event.values)
        case events.Progress():
            before = job.progress
            told = event.model_dump(exclude={"kind", "time"})
            has_advanced = (event.step, event.rows) != (before.step, before.rows)
            advanced_at = result.now if has_advanced else before.advanced_at
            job = replace(job, progress=replace(before, **told, advanced_at=advanced_at))
        case events.CheckpointCommitted():
            job = replace(job, progress=replace(job.progress, checkpoint_at=result.now))
        case events.WorkersStarted():
            # There may be fewer positions now.
            known = job.latest_metrics if result.metrics is None else result.metrics
            result.metrics = {k: v for k, v in known.items() if not OF_POSITION.fullmatch(k)}
            job = _with_workers(job, event, result.now)
            job = replace(job, membership=apply_event(job.membership, result.attempt.id, event))
        case events.WorkersLost():
            num_failures = result.attempt.num_worker_failures + spends_budget(event.reason)
            result.attempt = replace(result.attempt, num_worker_failures=num_failures)
            job = replace(job, membership=apply_event(job.membership, result.attempt.id, event))
        case events.AttemptEnded():
            report = _reported_end(event, result.now)
            result.attempt = replace(result.attempt, reported_end=report)
            _note_metrics(result, event.final_metrics)
        case _:
            membership = apply_event(job.membership, result.attempt.id, event)
            if membership is None or num_places(membership) <= _MAX_PLACES:
                job = replace(job, membership=membership)
    result.job = job


def _note_metrics(result: IngestResult, values: Mapping[str, float]) -> None:
    known = dict(result.job.latest_metrics) if result.metrics is None else result.metrics
    kept = values
    if not values.keys() <= known.keys():
        admissible = {*known, *admitted(known, values)}
        kept = {name: value for name, value in values.items() if name in admissible}
    result.metrics = known
    known.update(kept)


def _with_workers(job: Job, event: events.WorkersStarted, now: float) -> Job:
    progress = replace(job.progress, total_steps=event.total_steps)
    if job.status is JobStatus.STARTING:
        # Not for workers that are only replaced again and again: those are no progress. Before
        # this the job trained nothing that a checkpoint should have.
        progress = replace(progress, advanced_at=now, checkpoint_at=now)
        job = replace(job, status=JobStatus.RUNNING)
    # Its own time: a recovered job's records are old.
    started_at = event.time if job.started_at is None else job.started_at
    return replace(job, progress=progress, started_at=started_at)


def _reported_end(event: events.AttemptEnded, now: float) -> ReportedEnd:
    known = {reason.value: reason for reason in EndReason}
    num_chars = sum(len(name) + len(text) for name, text in event.evidence.items())
    evidence = event.evidence if num_chars <= _MAX_EVIDENCE_CHARS else {}
    if event.reason in known:
        return ReportedEnd(known[event.reason], event.message, now, evidence)
    message = f"{event.message} (reported as '{event.reason}', a reason unknown to this version)"
    return ReportedEnd(EndReason.TRAINING_ERROR, events.shortened(message), now, evidence)


def _timeline_event(result: IngestResult, event: events.Event) -> TimelineEvent:
    membership = result.job.membership
    is_own = membership is not None and membership.attempt_id == result.attempt.id
    data = event.model_dump(mode="json", exclude={"kind", "time", "message"})
    message = events.shortened(describe(event, membership if is_own else None))
    level = level_of(event)
    data = data if level is None else {"level": level, **data}
    job_id, attempt_id = result.job.id, result.attempt.id
    return TimelineEvent(0, job_id, attempt_id, event.time, event.kind, message, "driver", data)

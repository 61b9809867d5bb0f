"""Between rows and the domain: one pair of functions per table."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from service.domain.models import (
    Attempt,
    Checkpoint,
    EndReason,
    Job,
    JobStatus,
    Membership,
    Progress,
    ReportedEnd,
    TimelineEvent,
)
from service.errors import JobUnreadable
from trainer.spec.job import JobSpec

_NUM_CACHED_SPECS = 2000
_MEMBERSHIP: TypeAdapter[Membership] = TypeAdapter(Membership)


def job_values(job: Job) -> dict[str, Any]:
    """Columns of `jobs`; what training reports often lives in `job_progress`."""
    return {
        "id": job.id,
        "project": job.project,
        "name": job.name,
        "spec": job.spec.model_dump(mode="json"),
        "status": job.status.value,
        "version": job.version,
        "reason": job.reason.value if job.reason else None,
        "message": job.message,
        "cancel_requested": job.cancel_requested,
        "num_failures": job.num_failures,
        "retry_at": job.retry_at,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "current_attempt_id": job.current_attempt_id,
        "priority": job.priority,
        "pause_requested": job.pause_requested,
        "queued_at": job.queued_at,
        "resume_from": job.resume_from,
        "queue_note": job.queue_note,
    }


def label_values(job: Job) -> list[dict[str, Any]]:
    """Rows of `job_labels`."""
    return [
        {"job_id": job.id, "key": key, "value": value} for key, value in job.spec.labels.items()
    ]


def progress_values(job: Job) -> dict[str, Any]:
    """Columns of `job_progress`."""
    progress = job.progress
    return {
        "job_id": job.id,
        "step": progress.step,
        "total_steps": progress.total_steps,
        "epoch": progress.epoch,
        "rows": progress.rows,
        "rows_per_s": _null_if_nan(progress.rows_per_s) or 0.0,
        "eta_s": _null_if_nan(progress.eta_s),
        "latest_metrics": job.latest_metrics,
        "membership": asdict(job.membership) if job.membership else None,
        "advanced_at": progress.advanced_at,
        "checkpoint_at": progress.checkpoint_at,
    }


def _null_if_nan(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def job_of(row: RowMapping) -> Job:
    """A job from `jobs` joined with `job_progress`; raises `JobUnreadable`."""
    try:
        return _job_of(row)
    except ValidationError as error:
        faults = [f"{_path(fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        raise JobUnreadable(row["id"], "; ".join(faults)) from error
    except ValueError as error:
        raise JobUnreadable(row["id"], str(error)) from error


def _path(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in location)


def _job_of(row: RowMapping) -> Job:
    return Job(
        id=row["id"],
        project=row["project"],
        name=row["name"],
        spec=_spec_of(row["spec"]),
        status=JobStatus(row["status"]),
        version=row["version"],
        reason=EndReason(row["reason"]) if row["reason"] else None,
        message=row["message"],
        cancel_requested=row["cancel_requested"],
        num_failures=row["num_failures"],
        retry_at=row["retry_at"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        current_attempt_id=row["current_attempt_id"],
        progress=_progress_of(row),
        latest_metrics=row["latest_metrics"],
        membership=_membership_of(row),
        priority=row["priority"],
        pause_requested=row["pause_requested"],
        queued_at=row["queued_at"],
        resume_from=row["resume_from"],
        queue_note=row["queue_note"],
    )


@lru_cache(_NUM_CACHED_SPECS)
def _spec_of(stored: str) -> JobSpec:
    """A spec from its JSON; it never changes, and is by far the slowest part of a job to read."""
    return JobSpec.model_validate_json(stored, context={"stored": True})


def _membership_of(row: RowMapping) -> Membership | None:
    stored = row["membership"]
    return None if stored is None else _MEMBERSHIP.validate_python(stored)


def _progress_of(row: RowMapping) -> Progress:
    return Progress(
        step=row["step"],
        total_steps=row["total_steps"],
        epoch=row["epoch"],
        rows=row["rows"],
        rows_per_s=row["rows_per_s"],
        eta_s=row["eta_s"],
        advanced_at=row["advanced_at"],
        checkpoint_at=row["checkpoint_at"],
    )


def attempt_values(attempt: Attempt) -> dict[str, Any]:
    """Columns of `attempts`."""
    report = attempt.reported_end
    return {
        "id": attempt.id,
        "job_id": attempt.job_id,
        "index": attempt.index,
        "created_at": attempt.created_at,
        "last_submit_at": attempt.last_submit_at,
        "submitted_at": attempt.submitted_at,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "end_reason": attempt.end_reason.value if attempt.end_reason else None,
        "message": attempt.message,
        "num_worker_failures": attempt.num_worker_failures,
        "reported_reason": report.reason.value if report else None,
        "reported_message": report.message if report else None,
        "reported_at": report.time if report else None,
        "reported_evidence": dict(report.evidence) if report else None,
        "token_hash": attempt.token_hash,
    }


def attempt_of(row: RowMapping) -> Attempt:
    """An attempt from its row."""
    report = None
    if row["reported_reason"] is not None:
        report = ReportedEnd(
            EndReason(row["reported_reason"]),
            row["reported_message"],
            row["reported_at"],
            row["reported_evidence"] or {},
        )
    return Attempt(
        id=row["id"],
        job_id=row["job_id"],
        index=row["index"],
        created_at=row["created_at"],
        last_submit_at=row["last_submit_at"],
        submitted_at=row["submitted_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        end_reason=EndReason(row["end_reason"]) if row["end_reason"] else None,
        message=row["message"],
        num_worker_failures=row["num_worker_failures"],
        reported_end=report,
        token_hash=row["token_hash"],
    )


def timeline_values(line: TimelineEvent) -> dict[str, Any]:
    """Columns of `timeline` without the id, which the database gives."""
    return {
        "job_id": line.job_id,
        "attempt_id": line.attempt_id,
        "time": line.time,
        "kind": line.kind,
        "message": line.message,
        "actor": line.actor,
        "data": line.data,
    }


def timeline_of(row: RowMapping) -> TimelineEvent:
    """A timeline line from its row."""
    return TimelineEvent(**row)


def checkpoint_of(row: RowMapping) -> Checkpoint:
    """A checkpoint from its row."""
    return Checkpoint(**row)

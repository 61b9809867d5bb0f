"""Conversion between rows and domain objects."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from service.domain.models import Attempt, Job, Progress
from service.errors import JobUnreadable
from trainer.spec.job import JobSpec

# Live jobs, paused ones too, are read over and over, in the same order: with more of them than this
# each is parsed again, in 2 ms. Of memory they take 0.05 MB each, 0.15 MB those of many tables.
_NUM_CACHED_SPECS = 6000
_PROGRESS_FIELDS = [each.name for each in fields(Progress)]
_OTHER_FIELDS = frozenset({"spec", "progress", "latest_metrics", "membership"})
_JOB: TypeAdapter[Job] = TypeAdapter(Job)
_ATTEMPT: TypeAdapter[Attempt] = TypeAdapter(Attempt)


def job_values(job: Job) -> dict[str, Any]:
    """Columns of `jobs` but its spec, which never changes and is by far the largest.

    What training reports often is in `job_progress`.
    """
    return {
        **{name: value for name, value in vars(job).items() if name not in _OTHER_FIELDS},
        "status": job.status.value,
        "reason": job.reason.value if job.reason else None,
        "queue_note": {k: v for k, v in vars(job.queue_note).items() if v not in (None, "")}
        or None,
    }


def progress_values(job: Job) -> dict[str, Any]:
    """Columns of `job_progress`."""
    return {
        **vars(job.progress),
        "job_id": job.id,
        "rows_per_s": _null_if_nan(job.progress.rows_per_s) or 0.0,
        "eta_s": _null_if_nan(job.progress.eta_s),
        "latest_metrics": job.latest_metrics,
        "membership": asdict(job.membership) if job.membership else None,
    }


def _null_if_nan(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def job_of(row: RowMapping) -> Job:
    """A job from `jobs` joined with `job_progress`; raises `JobUnreadable`."""
    try:
        progress = {name: row[name] for name in _PROGRESS_FIELDS}
        note = row["queue_note"] or {}  # What a later version added is dropped.
        parts = {"spec": _spec_of(row["spec"]), "progress": progress, "queue_note": note}
        return _JOB.validate_python({**row, **parts})
    except ValidationError as error:
        raise JobUnreadable(row["id"], faults_of(error)) from error
    except ValueError as error:
        raise JobUnreadable(row["id"], str(error)) from error


def faults_of(error: ValidationError) -> str:
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    return "; ".join(faults)


@lru_cache(_NUM_CACHED_SPECS)
def _spec_of(stored: str) -> JobSpec:
    """A spec from its JSON; it never changes, and is by far the slowest part of a job to read."""
    return JobSpec.model_validate_json(stored, context={"stored": True})


def attempt_values(attempt: Attempt) -> dict[str, Any]:
    """Columns of `attempts`."""
    report = attempt.reported_end
    return {
        **{name: value for name, value in vars(attempt).items() if name != "reported_end"},
        "end_reason": attempt.end_reason.value if attempt.end_reason else None,
        "reported_reason": report.reason.value if report else None,
        "reported_message": report.message if report else None,
        "reported_at": report.time if report else None,
        "reported_evidence": dict(report.evidence) if report else None,
    }


def attempt_of(row: RowMapping) -> Attempt:
    told = {
        "reason": row["reported_reason"],
        "message": row["reported_message"],
        "time": row["reported_at"],
        "evidence": row["reported_evidence"] or {},
    }
    return _ATTEMPT.validate_python({**row, "reported_end": told if told["reason"] else None})

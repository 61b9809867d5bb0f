"""Conversion between rows and domain objects."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import RowMapping

from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Membership,
    Progress,
    ReportedEnd,
)
from service.errors import JobUnreadable
from trainer.spec.job import JobSpec

_NUM_CACHED_SPECS = 2000
_PROGRESS_FIELDS = frozenset({"progress", "latest_metrics", "membership"})
_SAME_FIELDS = frozenset(each.name for each in fields(Job)) - _PROGRESS_FIELDS
_CHANGING_FIELDS = _SAME_FIELDS - {"spec"}
_MEMBERSHIP: TypeAdapter[Membership] = TypeAdapter(Membership)


def job_values(job: Job) -> dict[str, Any]:
    """Columns of `jobs` but its spec, which never changes and is by far the largest.

    What training reports often is in `job_progress`.
    """
    return {
        **{name: value for name, value in vars(job).items() if name in _CHANGING_FIELDS},
        "status": job.status.value,
        "reason": job.reason.value if job.reason else None,
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
        same = {name: row[name] for name in _SAME_FIELDS}
        membership = row["membership"]
        return Job(
            **{
                **same,
                "spec": _spec_of(row["spec"]),
                "status": JobStatus(row["status"]),
                "reason": EndReason(row["reason"]) if row["reason"] else None,
                "progress": Progress(**{each.name: row[each.name] for each in fields(Progress)}),
                "latest_metrics": row["latest_metrics"],
                "membership": None
                if membership is None
                else _MEMBERSHIP.validate_python(membership),
            }
        )
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise JobUnreadable(row["id"], "; ".join(faults)) from error
    except ValueError as error:
        raise JobUnreadable(row["id"], str(error)) from error


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
    report = None
    if row["reported_reason"] is not None:
        report = ReportedEnd(
            EndReason(row["reported_reason"]),
            row["reported_message"],
            row["reported_at"],
            row["reported_evidence"] or {},
        )
    values = {each.name: row[each.name] for each in fields(Attempt) if each.name != "reported_end"}
    end_reason = EndReason(row["end_reason"]) if row["end_reason"] else None
    return Attempt(**{**values, "end_reason": end_reason, "reported_end": report})

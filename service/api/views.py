"""From the domain to the bodies of the API."""

from __future__ import annotations

from typing import Any

from service.api.schemas import JobDetail, JobSummary, ProgressOut
from service.domain import Job, JobStatus, Progress
from service.jobs import layout_of
from service.settings import Settings
from service.submission import run_dir_of


def summary_of(job: Job) -> JobSummary:
    """A job as a list shows it."""
    return JobSummary(**_summary_fields(job))


def detail_of(job: Job, settings: Settings) -> JobDetail:
    """A job with its spec and version."""
    return JobDetail(
        **_summary_fields(job),
        version=job.version,
        spec=job.spec,
        run_dir=str(run_dir_of(settings, job.id).root),
        current_attempt_id=job.current_attempt_id,
    )


def _summary_fields(job: Job) -> dict[str, Any]:
    layout = layout_of(job.spec)
    same = ("id", "name", "project", "status", "reason", "message", "created_at", "started_at")
    return {
        **{field: getattr(job, field) for field in same},
        "ended_at": job.ended_at,
        "labels": job.spec.labels,
        "world_size": layout.world_size,
        "shard_group_size": layout.shard_group_size,
        "num_replicas": layout.num_replicas,
        "num_attempts": job.num_attempts,
        "num_failures": job.num_failures,
        "progress": _progress_of(job.progress, job.status),
        "latest_metrics": job.latest_metrics,
    }


def _progress_of(progress: Progress, status: JobStatus) -> ProgressOut:
    share = progress.step / progress.total_steps if progress.total_steps else 0.0
    return ProgressOut(
        step=progress.step,
        total_steps=progress.total_steps,
        epoch=progress.epoch,
        rows=progress.rows,
        rows_per_s=progress.rows_per_s,
        eta_s=None if status.is_terminal else progress.eta_s,
        percent=min(100.0, max(0.0, 100.0 * share)),
    )

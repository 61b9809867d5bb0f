"""From the domain to the bodies of the API."""

from __future__ import annotations

from typing import Any

from service.advice import advice_of
from service.api.schemas import (
    AttemptOut,
    JobDetail,
    JobSummary,
    MembershipOut,
    ProgressOut,
)
from service.domain import Attempt, Job, JobStatus, Progress
from service.membership import copies_needed, membership_of, missing, num_current, num_wanted
from service.queue_view import place_of
from service.settings import Settings
from service.sizes import sizes_of_job
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
        membership=_membership_view(job),
    )


def attempt_view(attempt: Attempt) -> AttemptOut:
    """An attempt, with what to change if it ended badly."""
    shown = AttemptOut.model_validate(attempt)
    return shown.model_copy(update={"advice": advice_of(attempt.end_reason)})


def _membership_view(job: Job) -> MembershipOut | None:
    membership = job.membership
    if membership is None or membership.attempt_id != job.current_attempt_id:
        return None
    same = {name: getattr(membership, name) for name in vars(membership)}
    return MembershipOut.model_validate(
        {
            **same,
            "num_current": num_current(membership),
            "num_wanted": num_wanted(membership),
            "host_copies_needed": copies_needed(job),
            "missing": missing(membership),
        }
    )


def _summary_fields(job: Job) -> dict[str, Any]:
    sizes = sizes_of_job(job)
    same = ("id", "name", "project", "status", "reason", "message", "created_at", "started_at")
    return {
        **{field: getattr(job, field) for field in same},
        "ended_at": job.ended_at,
        "labels": job.spec.labels,
        "min_workers": sizes.min_workers,
        "world_size": sizes.world_size,
        "shard_group_size": sizes.shard_group_size,
        "num_replicas": sizes.num_replicas,
        "num_attempts": job.num_attempts,
        "num_failures": job.num_failures,
        "progress": progress_of(job.progress, job.status),
        "latest_metrics": job.latest_metrics,
        "priority": job.priority,
        "pause_requested": job.pause_requested,
        "queue": place_of(job),
        "advice": advice_of(job.reason),
        **_group_counts(job),
    }


def _group_counts(job: Job) -> dict[str, int]:
    membership = membership_of(job)
    if membership is None or job.status is not JobStatus.RUNNING:
        return {}
    return {
        "num_current_groups": num_current(membership),
        "num_wanted_groups": num_wanted(membership),
    }


def progress_of(progress: Progress, status: JobStatus) -> ProgressOut:
    """How far a job has come; only one that runs is known to end at some time."""
    share = progress.step / progress.total_steps if progress.total_steps else 0.0
    return ProgressOut(
        step=progress.step,
        total_steps=progress.total_steps,
        epoch=progress.epoch,
        rows=progress.rows,
        rows_per_s=progress.rows_per_s,
        eta_s=progress.eta_s if status is JobStatus.RUNNING else None,
        percent=min(100.0, max(0.0, 100.0 * share)),
    )

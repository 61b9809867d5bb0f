"""Snapshots: what a page reads from the store in one go. Blocking, so pages call it in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.dashboard import charts
from service.db.jobs import JobStore
from service.domain.models import Attempt, Checkpoint, Job, MetricPoint, TimelineEvent

MAX_CHART_POINTS = 400


@dataclass(frozen=True)
class JobSnapshot:
    """Everything that a job's page shows but its logs. `points` is None when it did not change."""

    job: Job
    attempts: Sequence[Attempt]
    timeline: Sequence[TimelineEvent]
    checkpoints: Sequence[Checkpoint]
    points: dict[str, list[MetricPoint]] | None


def load_job(store: JobStore, job_id: str, previous: JobSnapshot | None) -> JobSnapshot:
    """Read a job, of its timeline only what is newer than `previous`; raises `JobNotFound`."""
    job = store.get_job(job_id)
    known = previous.timeline if previous else ()
    newest_id = known[-1].id if known else 0
    unchanged = previous is not None and job == previous.job
    return JobSnapshot(
        job=job,
        attempts=store.list_attempts(job_id),
        timeline=[*known, *store.list_timeline(job_id, after=newest_id)],
        checkpoints=store.list_checkpoints(job_id),
        points=None if unchanged else _load_points(store, job),
    )


def _load_points(store: JobStore, job: Job) -> dict[str, list[MetricPoint]]:
    known = set(store.metric_names(job.id))
    return {
        name: store.metric_points(job.id, name, max_points=MAX_CHART_POINTS)
        for chart in charts.charts_of(job)
        for name in (line.metric for line in chart.lines)
        if name in known
    }

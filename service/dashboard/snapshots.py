"""Snapshots: what a page reads from the store in one go. Blocking, so pages call it in a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.dashboard import charts
from service.db.jobs import JobStore
from service.db.queries import JobFilter
from service.domain.models import Attempt, Checkpoint, Job, JobStatus, MetricPoint, TimelineEvent

MAX_LISTED_JOBS = 100
LIST_MAX_AGE_S = 0.9
MAX_CHART_POINTS = 400


@dataclass(frozen=True)
class ListFilter:
    """What the reader of the job list wants to see; empty values let everything through."""

    status: JobStatus | None = None
    name: str = ""

    def admits(self, job: Job) -> bool:
        """Whether a job passes. The name matches anywhere, in names and ids."""
        if self.status is not None and job.status is not self.status:
            return False
        wanted = self.name.strip().lower()
        return wanted in job.name or wanted in job.id


@dataclass(frozen=True)
class ListSnapshot:
    """The newest jobs, `has_more` when older ones exist than `MAX_LISTED_JOBS`."""

    jobs: Sequence[Job]
    has_more: bool


class ListFeed:
    """The job list, read once for all of its readers: reading a hundred specs takes a while.

    `placed` gives a job with its position in the queue, `clock` seconds. Safe to use from several
    threads.
    """

    def __init__(
        self,
        store: JobStore,
        placed: Callable[[Job], Job] = lambda job: job,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._placed = placed
        self._clock = clock
        self._lock = threading.Lock()
        self._read: dict[frozenset[str] | None, tuple[float, ListSnapshot]] = {}

    def latest(self, projects: frozenset[str] | None = None) -> ListSnapshot:
        """The newest jobs of `projects` (None: all), as they were at most `LIST_MAX_AGE_S` ago."""
        with self._lock:
            now = self._clock()
            expires_at, snapshot = self._read.get(projects, (-math.inf, None))
            if snapshot is None or now >= expires_at:
                # Readers with other projects come and go; what is stale need not be kept.
                self._read = {key: kept for key, kept in self._read.items() if kept[0] > now}
                jobs, cursor = self._store.list_jobs(
                    JobFilter(projects=projects), limit=MAX_LISTED_JOBS
                )
                snapshot = ListSnapshot(
                    jobs=[*map(self._placed, jobs)], has_more=cursor is not None
                )
                self._read[projects] = (now + LIST_MAX_AGE_S, snapshot)
            return snapshot


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

"""Snapshots: what a page reads from the store in one go. Blocking, so pages call it in a thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from service.db.jobs import JobStore
from service.domain.models import Attempt, Checkpoint, Job, MetricPoint, TimelineEvent
from service.domain.sharding import STARTED

MAX_CHART_POINTS = 400
# The newest ones, beside the submission and the newest workers: a driver may write any number.
MAX_LINES = 5000
# After these events steps may be told of again, so that all points are read anew.
_REWINDS = frozenset({"attempt_started", "workers_started", "workers_lost"})
Points = Mapping[str, Sequence[MetricPoint]]


@dataclass(frozen=True)
class JobSnapshot:
    """Everything that a job's page shows but its logs and its points.

    `is_new` says that it is not as it was before, `is_rewound` that known points may be stale.
    """

    job: Job
    attempts: Sequence[Attempt]
    timeline: Sequence[TimelineEvent]
    checkpoints: Sequence[Checkpoint]
    is_new: bool = True
    is_rewound: bool = True


def load_job(store: JobStore, job_id: str, previous: JobSnapshot | None) -> JobSnapshot:
    """Read a job, of its timeline only what is newer than `previous`; raises `JobNotFound`."""
    job = store.get_job(job_id)
    known = previous.timeline if previous else ()
    newest_id = known[-1].id if known else 0
    told = store.list_timeline(job_id, after=newest_id, limit=MAX_LINES, newest=True)
    if previous is None and len(told) == MAX_LINES:
        begins = store.list_timeline(job_id, limit=1)
        begins += store.list_timeline(job_id, kinds=(STARTED,), limit=1, newest=True)
        told = [*(line for line in begins if line.id < told[0].id), *told]
    return JobSnapshot(
        job=job,
        attempts=store.list_attempts(job_id),
        timeline=[*known, *told],
        checkpoints=store.list_checkpoints(job_id),
        is_new=previous is None or job != previous.job,
        is_rewound=previous is None or any(line.kind in _REWINDS for line in told),
    )


def read_points(store: JobStore, job_id: str, names: Collection[str], known: Points) -> Points:
    """Points of metrics by name: of those that are known only what is newer is read.

    Once that has made them twice as many as a chart shows, they are read anew.
    """
    found: dict[str, Sequence[MetricPoint]] = {}
    for name in {*names} & {*store.metric_names(job_id)}:
        old = known.get(name, ())
        if len(old) >= 2 * MAX_CHART_POINTS:
            old = ()
        after = old[-1].step + 1 if old else None
        newer = store.metric_points(job_id, name, from_step=after, max_points=MAX_CHART_POINTS)
        if old or newer:
            found[name] = [*old, *newer]
    return found

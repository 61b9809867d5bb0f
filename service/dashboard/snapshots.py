"""Snapshots: what a page reads from the store in one go. Blocking, so pages call it in a thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

from service.db.jobs import JobStore
from service.domain.models import Attempt, Checkpoint, Job, MetricPoint, TimelineEvent
from service.domain.sharding import STARTED
from service.errors import StoreUnavailable

MAX_AGE_S = 0.9
MAX_CHART_POINTS = 400
# The newest ones, beside the submission and the newest workers: a driver may write any number.
MAX_LINES = 5000
# After these events steps may be told of again, so that all points are read anew.
_REWINDS = frozenset({"attempt_started", "workers_started", "workers_lost"})
Points = Mapping[str, Sequence[MetricPoint]]
Found = TypeVar("Found")


class Shared(Generic[Found]):
    """What is read once for all who ask for it, in threads."""

    def __init__(self, read: Callable[[], Found]) -> None:
        self._read = read
        self._lock = threading.Lock()
        # When it was read last, and what came of it.
        self._read_at = -math.inf
        self._found: Found | StoreUnavailable

    def latest(self, max_age_s: float = MAX_AGE_S) -> Found:
        """It as it was at most `max_age_s` ago; raises what reading does."""
        # Not once it is our turn: what others have read meanwhile, or failed to, is new enough.
        asked_at = time.monotonic()
        with self._lock:
            if self._read_at <= asked_at - max_age_s:
                began_at = time.monotonic()
                try:
                    self._found = self._read()
                except StoreUnavailable as error:
                    self._found = error
                self._read_at = began_at
            if isinstance(self._found, StoreUnavailable):
                raise self._found
            return self._found


@dataclass(frozen=True, eq=False)
class JobSnapshot:
    """Everything that a job's page shows but its logs and its points; equal only to itself."""

    job: Job
    attempts: Sequence[Attempt]
    timeline: Sequence[TimelineEvent]
    checkpoints: Sequence[Checkpoint]

    def is_rewound(self, since: JobSnapshot | None) -> bool:
        """Whether points that were read with the snapshot that this one goes on from are stale."""
        last = since.timeline[-1].id if since and since.timeline else 0
        told = (line for line in self.timeline if line.id > last)
        return since is None or any(line.kind in _REWINDS for line in told)


def load_job(
    store: JobStore,
    job_id: str,
    previous: JobSnapshot | None,
    placed: Callable[[Job], Job] = lambda job: job,
) -> JobSnapshot:
    """Read a job, of its timeline only what is newer than `previous`; raises `JobNotFound`.

    Returns `previous` itself where nothing is new. `placed` gives a job with its position in the
    queue.
    """
    job = placed(store.get_job(job_id))
    # The estimate of its start is another each second, and no page shows it.
    job = replace(job, queue_note=replace(job.queue_note, expected_start_at=None))
    known = previous.timeline if previous else ()
    after = known[-1].id if known else 0
    told = store.list_timeline(job_id, after=after, limit=MAX_LINES, newest=True)
    if previous is None and len(told) == MAX_LINES:
        begins = store.list_timeline(job_id, limit=1)
        begins += store.list_timeline(job_id, kinds=(STARTED,), limit=1, newest=True)
        told = [*(line for line in begins if line.id < told[0].id), *told]
    _share_groups(known, told)
    lines = [*known, *told]
    old = lines[:-MAX_LINES]
    workers = [line for line in old if line.kind == STARTED][-1:]
    lines = [*old[:1], *workers, *lines[-MAX_LINES:]]
    attempts, checkpoints = store.list_attempts(job_id), store.list_checkpoints(job_id)
    found = JobSnapshot(job, attempts, lines, checkpoints)
    return previous if previous and vars(found) == vars(previous) else found


def _share_groups(known: Sequence[TimelineEvent], told: Iterable[TimelineEvent]) -> None:
    """Make a group that is as in the event before the same object, in place.

    Each change of a membership tells all groups with all hosts, of which few have changed.
    """
    changes = (line for line in reversed(known) if line.kind == "membership_changed")
    before: dict[object, object] = {}
    for line in (*islice(changes, 1), *told):
        groups = line.data.get("groups") if line.kind == "membership_changed" else None
        if isinstance(groups, list):
            for place, each in enumerate(groups):
                same = before.get(each["group"])
                groups[place] = before[each["group"]] = same if same == each else each


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

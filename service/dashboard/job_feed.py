"""Jobs as their pages show them: read and drawn once for all readers of a job.

Pages ask once a second, in threads: what a job of hundreds of groups shows takes long to draw.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from service.dashboard import fragments
from service.dashboard.snapshots import JobSnapshot, load_job
from service.db.jobs import JobStore

MAX_AGE_S = 0.9


@dataclass(frozen=True)
class ShownJob:
    """A snapshot and the parts of its page as HTML, by name as in `fragments.PARTS`."""

    snapshot: JobSnapshot
    html: Mapping[str, str]


class FollowedJob:
    """A job that pages show. Safe to use from several threads."""

    def __init__(self, store: JobStore, job_id: str, clock: Callable[[], float]) -> None:
        self._store = store
        self._job_id = job_id
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._shown: ShownJob | None = None
        # By part: what it was drawn from.
        self._sources: dict[str, object] = {}

    def latest(self, max_age_s: float = MAX_AGE_S) -> ShownJob:
        """The job as it was at most `max_age_s` ago, the same object while nothing is new.

        Raises `JobNotFound`, `StoreUnavailable`.
        """
        with self._lock:
            now, shown = self._clock(), self._shown
            if shown is None or now >= self._read_at + max_age_s:
                known = shown.snapshot if shown else None
                self._shown = shown = self._draw(load_job(self._store, self._job_id, known), now)
                self._read_at = now
            return shown

    def _draw(self, snapshot: JobSnapshot, now: float) -> ShownJob:
        """Draw the parts whose source is another than before."""
        shown, html = self._shown, dict(self._shown.html) if self._shown else {}
        for name, part in fragments.PARTS.items():
            source = part.source(snapshot, now)
            if name not in html or source != self._sources[name]:
                html[name], self._sources[name] = part.draw(snapshot, now), source
        is_same = shown is not None and snapshot is shown.snapshot and html == shown.html
        return shown if shown is not None and is_same else ShownJob(snapshot, html)


class JobFeed:
    """The jobs that pages show now; `clock` gives Unix time in seconds. For the event loop."""

    def __init__(self, store: JobStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._followed: WeakValueDictionary[str, FollowedJob] = WeakValueDictionary()

    def follow(self, job_id: str) -> FollowedJob:
        """A job, which is remembered for as long as somebody has it."""
        return self._followed.setdefault(job_id, FollowedJob(self._store, job_id, self._clock))

"""A job as its pages show it: read and drawn once for all readers of the job.

Pages ask once a second, in threads: what a job of hundreds of groups shows takes long to draw.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.dashboard import fragments
from service.dashboard.snapshots import JobSnapshot, load_job
from service.db.jobs import JobStore
from service.errors import StoreUnavailable

MAX_AGE_S = 0.9


@dataclass(frozen=True)
class ShownJob:
    """A snapshot and the parts of its page as HTML, by name as in `fragments.PARTS`."""

    snapshot: JobSnapshot
    html: Mapping[str, str]


class JobFeed:
    """A job that pages show; `clock` gives Unix time in seconds. Safe to use from threads."""

    def __init__(
        self, store: JobStore, job_id: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._job_id, self._clock = store, job_id, clock
        self._lock = threading.Lock()
        # When it was read last, and what came of it.
        self._read_at = -math.inf
        self._found: ShownJob | StoreUnavailable
        self._shown: ShownJob | None = None
        # By part: what it was drawn from, and its HTML.
        self._drawn: dict[str, tuple[object, str]] = {}

    def latest(self, max_age_s: float = MAX_AGE_S) -> ShownJob:
        """The job as it was at most `max_age_s` ago, the same object while nothing is new.

        Raises `JobNotFound`, `StoreUnavailable`.
        """
        # Not once it is our turn: what others have read meanwhile, or failed to, is new enough.
        asked_at = time.monotonic()
        with self._lock:
            if self._read_at <= asked_at - max_age_s:
                began_at = time.monotonic()
                try:
                    self._found = self._shown = self._read()
                except StoreUnavailable as error:
                    self._found = error
                self._read_at = began_at
            if isinstance(self._found, StoreUnavailable):
                raise self._found
            return self._found

    def _read(self) -> ShownJob:
        """Read the job, and draw the parts whose source is another than before."""
        known, now = self._shown, self._clock()
        snapshot = load_job(self._store, self._job_id, known.snapshot if known else None)
        self._drawn |= {
            name: (source, part.draw(snapshot, now))
            for name, part in fragments.PARTS.items()
            if (source := part.source(snapshot, now)) != self._drawn.get(name, ("", ""))[0]
        }
        shown = ShownJob(snapshot, {name: html for name, (_, html) in self._drawn.items()})
        return known if known == shown else shown

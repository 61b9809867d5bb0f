"""A job as its pages show it: read and drawn once for all readers of the job.

Pages ask once a second, in threads: what a job of hundreds of groups shows takes long to draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from service.dashboard import fragments
from service.dashboard.snapshots import JobSnapshot, Shared, load_job
from service.db.jobs import JobStore
from service.domain.models import Job


@dataclass(frozen=True)
class ShownJob:
    """A snapshot and the parts of its page as HTML, by name as in `fragments.PARTS`."""

    snapshot: JobSnapshot
    html: Mapping[str, str]


class JobFeed(Shared[ShownJob]):
    """A job that pages show, the same object while nothing is new.

    `placed` gives a job with its position in the queue, `clock` Unix time in seconds. Reading
    raises `JobNotFound`, `StoreUnavailable`.
    """

    def __init__(
        self,
        store: JobStore,
        job_id: str,
        placed: Callable[[Job], Job] = lambda job: job,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(self._draw)
        self._load = partial(load_job, store, job_id, placed=placed)
        self._clock = clock
        self._shown: ShownJob | None = None
        # By part: what it was drawn from, and its HTML.
        self._drawn: dict[str, tuple[object, str]] = {}

    def _draw(self) -> ShownJob:
        """Read the job, and draw the parts whose source is another than before."""
        known, now = self._shown, self._clock()
        snapshot = self._load(known.snapshot if known else None)
        self._drawn |= {
            name: (source, part.draw(snapshot, now))
            for name, part in fragments.PARTS.items()
            if (source := part.source(snapshot, now)) != self._drawn.get(name, ("", ""))[0]
        }
        shown = ShownJob(snapshot, {name: html for name, (_, html) in self._drawn.items()})
        self._shown = shown = known if known == shown else shown
        return shown

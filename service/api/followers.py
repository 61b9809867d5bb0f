"""Readers that remember where they are in a job's timeline or logs. Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable

from service.api.schemas import LogLine, ProgressOut, TimelineEventOut
from service.api.sse import Item, News
from service.api.views import progress_of
from service.domain import Attempt, Job, JobStatus, attempt_id
from service.job_errors import AttemptNotFound
from service.log_lines import LogFilter
from service.logs import (
    LogPiece,
    LogPosition,
    check_source,
    list_sources,
    read_new,
    tail_position,
)
from service.settings import Settings
from service.store.base import JobStore
from service.submission import run_dir_of
from trainer.run_dir import AttemptDir

_MAX_LINES = 500
EVERYTHING = LogFilter()
# Ray ends the workers of a driver that was killed some seconds after it.
LATE_LINES_S = 10.0


class TimelineFollower:
    """Follows a job's timeline behind line `after`, and its progress where that is wanted."""

    def __init__(
        self, store: JobStore, job_id: str, after: int, *, with_progress: bool = False
    ) -> None:
        self._store = store
        self._job_id = job_id
        self._after = after
        self._with_progress = with_progress
        self._shown: ProgressOut | None = None

    def look(self) -> News:
        """New lines; ended when the job has ended and the last look found nothing."""
        # The job first: whatever was written before it ended is then found below.
        job = self._store.get_job(self._job_id)
        lines = self._store.list_timeline(job.id, after=self._after, limit=_MAX_LINES)
        bodies = [TimelineEventOut.model_validate(line) for line in lines]
        items = [Item("timeline", str(body.id), body) for body in bodies]
        self._after = lines[-1].id if lines else self._after
        items += self._progress(job)
        return News(items, None if items else _ended(job))

    def _progress(self, job: Job) -> list[Item]:
        """How far the job is, if that is new; it has the cursor of the line before it."""
        progress = progress_of(job.progress, job.status)
        if not self._with_progress or progress == self._shown:
            return []
        self._shown = progress
        return [Item("progress", str(self._after), progress)]


class LogFollower:
    """Follows the logs of one attempt (`wanted`), or of a job from attempt to attempt.

    `position` is how far it has read, and `has_moved` whether the last look found any lines,
    wanted or not.
    """

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        job: Job,
        wanted: str | None,
        source: str | None,
        log_filter: LogFilter = EVERYTHING,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._filter = log_filter
        self.has_moved = False
        self._store = store
        self._run_dir = run_dir_of(settings, job.id)
        self._job_id = job.id
        self._wanted = wanted
        self._source = source
        self._check_belongs(wanted)
        self.position = LogPosition(wanted or job.current_attempt_id)
        if source is not None:
            check_source(source, self.sources())

    def start_at_tail(self, num_lines: int) -> None:
        """Begin with the last `num_lines` of each log that there is."""
        newest = self.position.attempt_id
        if newest is not None:
            files = self._files(newest)
            self.position = tail_position(files, newest, self._wanted_sources(files), num_lines)

    def start_at(self, position: LogPosition) -> None:
        """Go on behind a position that was given out before; raises `AttemptNotFound`."""
        self._check_belongs(position.attempt_id)
        self.position = position

    def look(self) -> News:
        """New lines; ended when nobody will write any more and all was read."""
        job, read_from = self._store.get_job(self._job_id), self.position.attempt_id
        is_wanted_over = self._is_wanted_over()
        pieces = self.read()
        if self.has_moved:
            return News([_item(piece) for piece in pieces])
        is_newest_over = job.status.is_terminal and read_from == job.current_attempt_id
        return News([], job.status if is_newest_over or is_wanted_over else None)

    def read(self) -> list[LogPiece]:
        """New lines that are wanted, of the following attempt where the present one has no more."""
        self.has_moved = False
        position = self.position
        if position.attempt_id is None:
            position = LogPosition(self._store.get_job(self._job_id).current_attempt_id)
        if position.attempt_id is None:
            return []
        self.position = position
        attempt = self._store.get_attempt(position.attempt_id)
        is_final = attempt.end_reason is not None
        files = self._files(attempt.id)
        sources = self._wanted_sources(files)
        pieces = list(read_new(files, position, sources, is_final=is_final))
        self.has_moved = bool(pieces)
        if pieces:
            self.position = pieces[-1].position
        elif is_final and self._wanted is None and not self._may_write_on(attempt):
            self._move_on(attempt.index)
        return [piece for piece in pieces if self._filter.takes(piece.head, piece.text)]

    def sources(self) -> list[str]:
        """Names of the logs of the attempt being read."""
        if self.position.attempt_id is None:
            return []
        return list_sources(self._files(self.position.attempt_id))

    def _wanted_sources(self, files: AttemptDir) -> list[str]:
        names = list_sources(files) if self._source is None else [self._source]
        return [name for name in names if self._filter.takes_source(name)]

    def _may_write_on(self, attempt: Attempt) -> bool:
        """Whether workers that outlived their attempt may still write: their lines come first."""
        ended_at = attempt.ended_at or 0.0
        return 0.0 <= self._clock() - ended_at < LATE_LINES_S

    def _move_on(self, index: int) -> None:
        following = attempt_id(self._job_id, index + 1)
        if index + 1 < self._store.get_job(self._job_id).num_attempts:
            self.position = LogPosition(following)

    def _is_wanted_over(self) -> bool:
        if self._wanted is None:
            return False
        return self._store.get_attempt(self._wanted).end_reason is not None

    def _check_belongs(self, wanted: str | None) -> None:
        if wanted is not None and self._store.get_attempt(wanted).job_id != self._job_id:
            raise AttemptNotFound(wanted)

    def _files(self, wanted: str) -> AttemptDir:
        return self._run_dir.attempt(wanted)


def _ended(job: Job) -> JobStatus | None:
    return job.status if job.status.is_terminal else None


def _item(piece: LogPiece) -> Item:
    return Item("log", piece.position.encode(), LogLine.model_validate(piece))

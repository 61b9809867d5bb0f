"""Server-sent events: streams that poll the timeline or the logs of a job.

Each event carries its cursor as id, so that a client which reconnects with `Last-Event-ID` resumes
behind it. Comments keep an idle stream alive, and an `end` event says that the job has ended and
everything was sent. A stream that stops without `end` was cut off (server shutdown, store
unavailable): the client should reconnect. The followers block.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic_core import to_json

from service.api.deps import Context
from service.db.jobs import JobStore
from service.domain.models import Attempt, Job, JobStatus, attempt_id
from service.errors import AttemptNotFound, LogNotFound, ServiceError
from service.jobs.logs import (
    LogFilter,
    LogPiece,
    LogPosition,
    is_source,
    list_sources,
    read_new,
    tail_position,
)
from service.jobs.run_storage import run_dir_of
from service.schemas.jobs import LogLine
from service.settings import Settings
from service.storage import in_time
from trainer.protocol.run_dir import AttemptDir

logger = logging.getLogger(__name__)
_MAX_LINES = 500
# Of logs in the cursor of each line; with more only the last line of a batch has one.
_MAX_OFFSETS = 64
# Ray ends the workers of a driver that was killed some seconds after it.
LATE_LINES_S = 10.0
# The longest silence before a comment is sent.
HEARTBEAT_S = 15.0


@dataclass(frozen=True)
class StreamBatch:
    """Events that one poll found; `ended` is the status of a job that will bring nothing more."""

    items: list[bytes]
    ended: JobStatus | None = None


def _event(name: str, cursor: str | None, body: object) -> bytes:
    """One event of a stream: `cursor` names what comes after it, where it has one."""
    data = to_json(body, inf_nan_mode="null").decode()
    return format_sse_event(event=name, id=cursor, data_str=data)


def stream(poll: Callable[[], StreamBatch], context: Context) -> StreamingResponse:
    """Stream what `poll` returns; it blocks on storage and is therefore called in a thread."""
    return StreamingResponse(
        _frames(poll, context),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _frames(poll: Callable[[], StreamBatch], context: Context) -> AsyncIterator[bytes]:
    poll_s = context.settings.stream_poll_s
    # A first comment shows the client that it is connected before anything happens.
    silent_s = HEARTBEAT_S
    with context.telemetry.followers.track_inprogress():
        while not context.closing.is_set():
            try:
                batch = await run_in_threadpool(poll)
            except TimeoutError as error:
                # Where storage is slow as many read as may: this one has its turn later.
                logger.info("a followed stream waits: %s", error)
                yield KEEPALIVE_COMMENT
                await asyncio.sleep(poll_s)
                continue
            except (ServiceError, OSError) as error:
                logger.warning("a followed stream was cut off: %s", error)
                return
            for item in batch.items:
                yield item
            if batch.ended is not None:
                yield format_sse_event(event="end", data_str=json.dumps({"status": batch.ended}))
                return
            if batch.items:
                silent_s = 0.0
                continue
            if silent_s >= HEARTBEAT_S:
                yield KEEPALIVE_COMMENT
                silent_s = 0.0
            await asyncio.sleep(poll_s)
            silent_s += poll_s


@dataclass
class TimelineFollower:
    """Follows a job's timeline behind line `after`."""

    store: JobStore
    job_id: str
    after: int

    def poll(self) -> StreamBatch:
        """New lines; ended when the job has ended and the last poll found nothing."""
        # The job first: whatever was written before it ended is then found below.
        job = self.store.get_job(self.job_id)
        lines = self.store.list_timeline(job.id, after=self.after, limit=_MAX_LINES)
        items = [_event("timeline", str(line.id), line) for line in lines]
        self.after = lines[-1].id if lines else self.after
        return StreamBatch(items, job.status if job.status.is_terminal and not items else None)


@dataclass
class LogFollower:
    """Follows the logs of one attempt (`wanted`), or of a job from attempt to attempt.

    `position` is how far it has read, `has_moved` whether the last poll found any lines, wanted or
    not, and `has_more` whether it left any, or an attempt, for the next one.
    """

    store: JobStore
    settings: Settings
    job: Job
    wanted: str | None
    source: str | None
    log_filter: LogFilter
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.has_moved = self.has_more = False
        self._run_dir = run_dir_of(self.settings, self.job.id)
        self._check_belongs(self.wanted)
        self.position = LogPosition(self.wanted or self.job.current_attempt_id)
        # A rank may have no log *yet*.
        if self.source is not None and not is_source(self.source):
            raise LogNotFound(self.source, ", ".join(self.sources()) or "none yet")

    def start_at_tail(self, num_lines: int) -> None:
        """Begin with the last `num_lines` of each log that there is."""
        newest = self.position.attempt_id
        if newest is not None:
            files = self._run_dir.attempt(newest)
            self.position = tail_position(files, newest, self._wanted_sources(files), num_lines)

    def start_at(self, position: LogPosition) -> None:
        """Go on behind a position that was given out before; raises `AttemptNotFound`."""
        self._check_belongs(position.attempt_id)
        self.position = position

    def poll(self) -> StreamBatch:
        """New lines; ended when nobody will write any more and all was read."""
        # Asked first: whatever was written before is then found below.
        job = self.store.get_job(self.job.id)
        is_over = self._is_over(job)
        pieces = self.read()
        if self.has_moved:
            return StreamBatch([self._line(piece, is_last=piece is pieces[-1]) for piece in pieces])
        return StreamBatch([], job.status if is_over else None)

    def poll_in_time(self) -> StreamBatch:
        """`poll` within the deadline of storage; one that is left behind moves nothing here."""
        ahead = copy.copy(self)
        batch = in_time(self.settings.runs_dir, ahead.poll, owner=self.job.id)
        self.position, self.has_moved = ahead.position, ahead.has_moved
        return batch

    def _line(self, piece: LogPiece, *, is_last: bool) -> bytes:
        # A cursor has an offset for each log: of thousands it would be far larger than the line.
        has_cursor = is_last or len(piece.before.offsets) < _MAX_OFFSETS
        cursor = piece.position.encode() if has_cursor else None
        return _event("log", cursor, LogLine.model_validate(piece))

    def read(self) -> list[LogPiece]:
        """New lines that are wanted, of the following attempt where the present one has no more."""
        self.has_moved = self.has_more = False
        position = self.position
        if position.attempt_id is None:
            position = LogPosition(self.store.get_job(self.job.id).current_attempt_id)
        if position.attempt_id is None:
            return []
        self.position = position
        attempt = self.store.get_attempt(position.attempt_id)
        is_final = attempt.end_reason is not None
        files = self._run_dir.attempt(attempt.id)
        sources = self._wanted_sources(files)
        pieces = list(read_new(files, position, sources, is_final=is_final))
        self.has_moved = bool(pieces)
        self.has_more = any(piece.is_cut for piece in pieces)
        if pieces:
            self.position = pieces[-1].position
        if is_final and self.wanted is None and not self._may_write_on(attempt):
            following = attempt.index + 1
            if following < self.store.get_job(self.job.id).num_attempts:
                self.has_more = True
                if not pieces:
                    self.position = LogPosition(attempt_id(self.job.id, following))
        return [piece for piece in pieces if self.log_filter.takes(piece.head, piece.text)]

    def sources(self) -> list[str]:
        if self.position.attempt_id is None:
            return []
        return list_sources(self._run_dir.attempt(self.position.attempt_id))

    def _wanted_sources(self, files: AttemptDir) -> list[str]:
        names = list_sources(files) if self.source is None else [self.source]
        return [name for name in names if self.log_filter.takes_source(name)]

    def _is_over(self, job: Job) -> bool:
        """Whether the last attempt that is wanted is being read, and nobody writes it any more."""
        last = self.wanted or job.current_attempt_id
        is_at_end = job.status.is_terminal and self.position.attempt_id == last
        if last is None or not (self.wanted or is_at_end):
            return is_at_end
        attempt = self.store.get_attempt(last)
        has_ended = job.status.is_terminal or attempt.end_reason is not None
        return has_ended and not self._may_write_on(attempt)

    def _may_write_on(self, attempt: Attempt) -> bool:
        """Whether workers that outlived their attempt may still write: their lines come first."""
        ended_at = attempt.ended_at or 0.0
        return 0.0 <= self.clock() - ended_at < LATE_LINES_S

    def _check_belongs(self, wanted: str | None) -> None:
        if wanted is not None and self.store.get_attempt(wanted).job_id != self.job.id:
            raise AttemptNotFound(wanted)

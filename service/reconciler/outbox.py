"""Collects records that drivers left in outboxes on run storage instead of posting them.

A record that cannot be read or stored is replaced by a note, so that the numbers of those after it
still hold. An outbox that storage does not return for a while is left behind. A large one is read
in portions, as other jobs wait for the thread.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from service.db.jobs import JobStore
from service.domain.models import attempt_id
from service.errors import RecordRefused
from service.jobs.run_storage import run_dir_of
from service.observability.metrics import ServiceMetrics
from service.reconciler.submission import remove_token
from service.settings import Settings
from service.storage import in_time
from trainer.protocol.events import (
    MAX_RECORD_BYTES,
    STREAM_PATTERN,
    Event,
    EventBatch,
    damaged_record,
    read_record,
)
from trainer.protocol.run_dir import AttemptDir, stream_order
from trainer.protocol.untrusted import NotRegular, list_untrusted, open_untrusted

logger = logging.getLogger(__name__)
# How long a job waits for records that storage does not return.
PATIENCE_S = 60.0
_RETRY_S = 10.0
_BATCH_SIZE = 100
# Of an outbox, at a time: about a million records.
_PORTION_BYTES = 1 << 28
# What is stored already is gone through in pieces: months of training. A job may make any file.
_PIECE_BYTES, _MAX_PIECES = 1 << 24, 1 << 14


class _MoreUnread(Exception):
    """An outbox has more than is read at a time."""


@dataclass
class OutboxCollector:
    """Stores the records of outboxes; `clock` gives Unix seconds.

    Records stored before are skipped, so collecting again is harmless.
    """

    store: JobStore
    settings: Settings
    telemetry: ServiceMetrics
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._unreadable_since: dict[tuple[str, int], float] = {}

    def collect(self, job_id: str, index: int) -> bool:
        """Store the records of attempt `index` of a job; raises OSError if storage fails.

        Whether it stored a portion and there are more. What cannot be read or used for `PATIENCE_S`
        is left behind, so that the job goes on.
        """
        attempt = attempt_id(job_id, index)
        files = run_dir_of(self.settings, job_id).attempt(attempt)
        positions, num_stored = self.store.stream_positions(attempt), 0
        try:
            batches = unread_batches(files, positions, self.clock())
            while batch := in_time(self.settings.runs_dir, partial(next, batches, None)):
                self._take(attempt, batch)
                num_stored += len(batch.events)
        except _MoreUnread:
            self._unreadable_since.pop((job_id, index), None)
            if not num_stored:
                logger.error("attempt %s: records behind an endless line are left behind", attempt)
            return num_stored > 0
        except (OSError, ValueError) as error:
            # Of what a job wrote: a ValidationError is among the latter.
            since = self._unreadable_since.setdefault((job_id, index), self.clock())
            if self.clock() - since < PATIENCE_S:
                raise
            logger.error("attempt %s: some of its records are left behind: %s", attempt, error)
        else:
            self._unreadable_since.pop((job_id, index), None)
        return False

    def collect_late(self, job_id: str, index: int) -> bool:
        """Store what workers wrote that outlived their attempt; again later if that fails.

        Whether all is stored.
        """
        attempt = attempt_id(job_id, index)
        retry_at = self.clock() + _RETRY_S
        self.store.set_collection(attempt, retry_at)
        if self.collect(job_id, index):
            return False
        in_time(self.settings.runs_dir, partial(remove_token, job_id, attempt, self.settings))
        self.store.end_collection(attempt, retry_at)
        return True

    def _take(self, attempt: str, batch: EventBatch) -> None:
        """Store a batch; a note takes the place of a record that cannot be stored."""
        try:
            self.store.append_events(attempt, batch, self.clock())
        except RecordRefused as error:
            if len(batch.events) > 1:
                for seq, event in enumerate(batch.events, batch.first_seq):
                    single = EventBatch(stream=batch.stream, first_seq=seq, events=[event])
                    self._take(attempt, single)
                return
            logger.warning("stream %s: %s", batch.stream, error)
            damaged = batch.model_copy(update={"events": [damaged_record(self.clock())]})
            self.store.append_events(attempt, damaged, self.clock())
        self.telemetry.received_events(batch.events)


def unread_batches(
    files: AttemptDir, positions: Mapping[str, int], now: float
) -> Iterator[EventBatch]:
    """Batches of every stream from `positions` (stream -> next sequence number) on.

    Only whole lines count. `now` (Unix seconds) is the time of notes that replace damaged lines.
    Some are empty, so that each piece of a long file has a deadline of its own. Where a stream
    cannot be read OSError is raised, after the other streams; `_MoreUnread` after a portion.
    """
    problem: OSError | None = None
    num_bytes_left = _PORTION_BYTES
    try:
        paths = list_untrusted(files.outbox_dir, files.runs_dir)
    except NotADirectoryError:
        return  # There is no folder, so there are no records.
    for path in sorted((path for path in paths if path.suffix == ".jsonl"), key=stream_order):
        if not re.fullmatch(STREAM_PATTERN, path.stem):
            logger.warning("not a stream of records, left alone: %s", path)
            continue
        next_seq = positions.get(path.stem, 0)
        try:
            with open_untrusted(path, files.runs_dir) as file:
                # What is appended from now on does not count, or reading might never end.
                num_bytes = os.fstat(file.fileno()).st_size
                yield from _go_behind(file, path.stem, next_seq)
                num_unread = max(0, num_bytes - file.tell())
                lines = _whole_lines(file, min(num_unread, num_bytes_left))
                yield from _batches_of(lines, path.stem, next_seq, now)
        except NotRegular as error:
            logger.error("not a stream of records, left alone: %s", error)
            continue
        except OSError as error:
            problem = error
            continue
        num_bytes_left -= num_unread
        if num_bytes_left < 0:
            raise _MoreUnread
    if problem is not None:
        raise problem


def _go_behind(file: IO[bytes], stream: str, num_lines: int) -> Iterator[EventBatch]:
    """Go behind the first lines of a file, with an empty batch for each piece of it."""
    for _ in range(_MAX_PIECES):
        piece = file.read(_PIECE_BYTES)
        *lines, rest = piece.split(b"\n", num_lines)
        num_lines -= len(lines)
        if not (num_lines and piece):
            file.seek(-len(rest), os.SEEK_CUR)
            return
        yield EventBatch(stream=stream, first_seq=0, events=[])
    raise OSError(errno.EFBIG, "the stream is too long", file.name)


def _batches_of(
    lines: Iterator[bytes], stream: str, next_seq: int, now: float
) -> Iterator[EventBatch]:
    """Batches of as many lines as fit into MAX_RECORD_BYTES, at least one and few enough."""
    events: list[Event] = []
    num_bytes = 0
    for line in lines:
        num_bytes += len(line)
        if events and (len(events) == _BATCH_SIZE or num_bytes > MAX_RECORD_BYTES):
            yield EventBatch(stream=stream, first_seq=next_seq, events=events)
            next_seq, events, num_bytes = next_seq + len(events), [], len(line)
        events.append(read_record(line, now))
    if events:
        yield EventBatch(stream=stream, first_seq=next_seq, events=events)


def _whole_lines(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    """Lines with their ends in the first `num_bytes`; one too long for a record is empty."""
    is_overlong = False
    while piece := file.readline(min(MAX_RECORD_BYTES, num_bytes)):
        num_bytes -= len(piece)
        if not piece.endswith(b"\n"):
            is_overlong = True
            continue
        yield b"" if is_overlong else piece
        is_overlong = False

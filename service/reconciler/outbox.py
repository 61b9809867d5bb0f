"""Collects records that drivers left in outboxes on run storage instead of posting them.

A record that cannot be read or stored is replaced by a note, so that the numbers of those after it
still hold. An outbox that storage does not return for a while is left behind.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
# About a million records.
_MAX_OUTBOX_BYTES = 1 << 28


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

    def collect(self, job_id: str, index: int) -> None:
        """Store the records of attempt `index` of a job; raises OSError if storage fails.

        What cannot be read or used for `PATIENCE_S` is left behind, so that the job goes on.
        """
        attempt = attempt_id(job_id, index)
        files = run_dir_of(self.settings, job_id).attempt(attempt)
        positions = self.store.stream_positions(attempt)
        try:
            batches = unread_batches(files, positions, self.clock())
            while batch := in_time(self.settings.runs_dir, partial(next, batches, None)):
                self._take(attempt, batch)
        except (OSError, ValueError) as error:
            # Of what a job wrote: a ValidationError is among the latter.
            since = self._unreadable_since.setdefault((job_id, index), self.clock())
            if self.clock() - since < PATIENCE_S:
                raise
            logger.error("attempt %s: some of its records are left behind: %s", attempt, error)
        else:
            self._unreadable_since.pop((job_id, index), None)

    def collect_late(self, job_id: str, index: int) -> None:
        """Store what workers wrote that outlived their attempt; again later if that fails."""
        attempt = attempt_id(job_id, index)
        retry_at = self.clock() + _RETRY_S
        self.store.set_collection(attempt, retry_at)
        self.collect(job_id, index)
        in_time(self.settings.runs_dir, partial(remove_token, job_id, attempt, self.settings))
        self.store.end_collection(attempt, retry_at)

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
    Where a stream cannot be read OSError is raised, after the other streams.
    """
    problem: OSError | None = None
    num_bytes_left = _MAX_OUTBOX_BYTES
    try:
        paths = list_untrusted(files.outbox_dir, files.runs_dir)
    except NotADirectoryError:
        return  # There is no folder, so there are no records.
    for path in sorted((path for path in paths if path.suffix == ".jsonl"), key=stream_order):
        if not re.fullmatch(STREAM_PATTERN, path.stem):
            logger.warning("not a stream of records, left alone: %s", path)
            continue
        try:
            with open_untrusted(path, files.runs_dir) as file:
                # What is appended from now on does not count, or reading might never end.
                num_bytes = os.fstat(file.fileno()).st_size
                num_bytes_left -= num_bytes
                if num_bytes_left < 0:
                    logger.error("%s is left behind: the outbox is too large", path)
                    return
                lines = _whole_lines(file, num_bytes)
                yield from _unread_of(lines, path.stem, positions.get(path.stem, 0), now)
        except NotRegular as error:
            logger.error("not a stream of records, left alone: %s", error)
        except OSError as error:
            problem = error
    if problem is not None:
        raise problem


def _unread_of(
    lines: Iterator[bytes], stream: str, next_seq: int, now: float
) -> Iterator[EventBatch]:
    unread = islice(lines, next_seq, None)
    while batch := list(islice(unread, _BATCH_SIZE)):
        events = [read_record(line, now) for line in batch]
        yield EventBatch(stream=stream, first_seq=next_seq, events=events)
        next_seq += len(events)


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

"""Reads the records that a driver left on run storage and could not, or need not, post."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from trainer.events import EVENT_ADAPTER, STREAM_PATTERN, Event, EventBatch, Note

logger = logging.getLogger(__name__)

_BATCH_SIZE = 500


def unread_batches(
    outbox_dir: Path, positions: Mapping[str, int], now: float
) -> Iterator[EventBatch]:
    """Batches of every stream from `positions` (stream -> next sequence number) on.

    Only whole lines count. `now` (Unix seconds) dates the note that takes the place of a damaged
    line, so that the numbers of the lines after it still hold. Raises OSError.
    """
    for path in sorted(outbox_dir.glob("*.jsonl")):
        if not re.match(STREAM_PATTERN, path.stem):
            logger.warning("not a stream of records, left alone: %s", path)
            continue
        yield from _unread_of(path, positions.get(path.stem, 0), now)


def _unread_of(path: Path, next_seq: int, now: float) -> Iterator[EventBatch]:
    with path.open("rb") as file:
        whole_lines = (line for line in file if line.endswith(b"\n"))
        unread = islice(whole_lines, next_seq, None)
        while lines := list(islice(unread, _BATCH_SIZE)):
            events = [_record(line, now) for line in lines]
            yield EventBatch(stream=path.stem, first_seq=next_seq, events=events)
            next_seq += len(events)


def _record(line: bytes, now: float) -> Event:
    try:
        return EVENT_ADAPTER.validate_json(line)
    except ValidationError:
        return Note(time=now, level="warning", message="an event record was damaged on storage")

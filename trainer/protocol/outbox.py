"""The outbox: event records go to a file first, and from there to the control plane.

A writer appends one JSON line per record to its own stream file; the line's position is the
record's sequence number. The driver's `OutboxPoster` reads every stream of the attempt and posts
what the service has not acknowledged. The service being away loses nothing and stops nobody: the
lines stay on run storage, and the service reads them there when the attempt has ended.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import BaseModel

from trainer.protocol.events import (
    MAX_RECORD_BYTES,
    STREAM_PATTERN,
    Count,
    Event,
    EventBatch,
    read_record,
    write_record,
)
from trainer.protocol.run_dir import AttemptDir

logger = logging.getLogger(__name__)
MAX_BATCH = 500


class _Answer(BaseModel):
    """What an acknowledgement and a refusal of a batch (409) both say."""

    next_seq: Count


class EventWriter:
    """Appends records to one stream file. One writer per file; safe to use from threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._pending = b""
        self._sound_bytes: int | None = None  # of the file, where writing behind them failed
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        """Append `event`. When storage is full the line is kept and goes out with the next one."""
        with self._lock:
            self._pending += write_record(event)
            try:
                with self._path.open("ab", buffering=0) as file:
                    if self._sound_bytes is not None:
                        file.truncate(min(self._sound_bytes, file.tell()))
                    self._sound_bytes = file.seek(0, os.SEEK_END)
                    left = self._pending
                    while left:
                        left = left[file.write(left) or 0 :]
                # Not before: NFS may say at the close that there is no room.
                self._pending, self._sound_bytes = b"", None
            except OSError as error:
                logger.warning("event kept in memory, %s cannot be written: %s", self._path, error)


def read_batch(path: Path, offset: int) -> tuple[list[Event], int]:
    """Complete records behind a byte offset, and the offset behind them.

    They are up to MAX_BATCH, and of more than MAX_RECORD_BYTES no more than one.
    """
    lines: list[bytes] = []
    num_bytes = 0
    with path.open("rb") as file:
        file.seek(offset)
        while len(lines) < MAX_BATCH and (line := file.readline()).endswith(b"\n"):
            num_bytes += len(line)
            if lines and num_bytes > MAX_RECORD_BYTES:
                break
            lines.append(line)
    return [read_record(line, time.time()) for line in lines], offset + sum(map(len, lines))


@dataclass
class _StreamReader:
    """How far one growing file was read. `next_seq` is what the service wants next."""

    path: Path
    next_seq: int = 0
    offset: int = 0

    def rewind(self, next_seq: int) -> None:
        """Go to record `next_seq`, when the service holds more or fewer than expected."""
        with self.path.open("rb") as file:
            for _ in range(next_seq):
                file.readline()
            self.offset = file.tell()
        self.next_seq = next_seq


class OutboxPoster:
    """Posts an attempt's streams to the service, from a thread of the driver."""

    def __init__(
        self, files: AttemptDir, client: httpx.Client, url: str, interval_s: float = 0.5
    ) -> None:
        self._files = files
        self._client = client
        self._url = url
        self._interval_s = interval_s
        self._readers: dict[str, _StreamReader] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._is_reachable = True

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Post what is left, for at most `timeout_s`; the rest stays on storage."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._try_post_new()
        self._try_post_new()

    def _try_post_new(self) -> None:
        """Post what is new; whatever goes wrong, the thread lives on and tries again."""
        try:
            self.post_new()
        except Exception:  # a fault of ours, which must not cost the job its events
            if self._is_reachable:
                logger.exception("events stay on storage for now, posting them failed")
            self._is_reachable = False

    def post_new(self) -> None:
        """Post every unacknowledged record, stream by stream, until done or not answered."""
        for path in self._files.stream_paths():
            if not re.fullmatch(STREAM_PATTERN, path.stem):
                continue  # somebody's copy of a stream
            reader = self._readers.setdefault(path.stem, _StreamReader(path))
            while self._post_batch(path.stem, reader):
                pass

    def _post_batch(self, stream: str, reader: _StreamReader) -> bool:
        """Post one batch; True when more may follow at once."""
        try:
            events, offset = read_batch(reader.path, reader.offset)
            if not events:
                return False
            batch = EventBatch(stream=stream, first_seq=reader.next_seq, events=events)
            response = self._client.post(
                self._url,
                content=batch.model_dump_json(),
                headers={"Content-Type": "application/json"},
            )
            return self._take_answer(reader, batch, offset, response)
        except httpx.HTTPError as error:
            self._note_unreachable(str(error))
        except OSError as error:
            logger.warning("cannot read stream %s: %s", stream, error)
        return False

    def _take_answer(
        self, reader: _StreamReader, batch: EventBatch, offset: int, response: httpx.Response
    ) -> bool:
        """Move to the record that the service wants next; True when more may follow at once."""
        is_conflict = response.status_code == httpx.codes.CONFLICT
        if not (response.is_success or is_conflict):
            self._note_unreachable(f"answered {response.status_code}")
            return False
        try:
            next_seq = _Answer.model_validate_json(response.content).next_seq
        except ValueError:  # not the service, but something that stands before it
            self._note_unreachable(f"answered {response.status_code} without `next_seq`")
            return False
        if is_conflict:
            if next_seq < reader.next_seq:
                reader.rewind(next_seq)
                return True
            self._note_unreachable(f"refused record {reader.next_seq}, though it wants {next_seq}")
            return False
        if not self._is_reachable:
            logger.info("the service answers again; events go out")
        self._is_reachable = True
        if next_seq == batch.first_seq + len(batch.events):
            reader.next_seq, reader.offset = next_seq, offset
        else:
            reader.rewind(next_seq)
        return next_seq > batch.first_seq

    def _note_unreachable(self, why: str) -> None:
        if self._is_reachable:
            logger.warning(
                "events stay on storage for now, the service does not take them: %s", why
            )
        self._is_reachable = False

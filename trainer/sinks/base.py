"""The interface of sinks, and the thread that feeds a sink with a job's records.

The outbox files of a job's attempts are the queue: a sink that is slow or unreachable reads on
later, blocks nothing and costs no memory. Its offsets lie on run storage, so that an attempt goes
on where the one before it stopped, also where that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel

from trainer.protocol.events import Event
from trainer.protocol.outbox import read_batch
from trainer.protocol.run_dir import AttemptDir, RunDir, write_whole

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
_MAX_PAUSE_S = 60.0


class Sink(Protocol):
    """Takes the records of a job in order, in a thread of its own. May raise whatever it likes."""

    name: str

    def open(self) -> None:
        """Begin, or go on where an earlier attempt was."""

    def take(self, events: Sequence[Event]) -> None:
        """Take records; when it raises, or after a kill, it is given them again."""

    def close(self) -> None:
        """Nothing more will come."""


class Feed:
    """Feeds one sink until closed. `warn` tells the timeline, once, that the sink fails, and at the
    end that it has not taken everything.

    A sink that `is_of_attempt` takes no records of earlier attempts.
    """

    def __init__(
        self,
        sink: Sink,
        run_dir: RunDir,
        attempt_id: str,
        warn: Callable[[str], None],
        is_of_attempt: bool = False,
    ) -> None:
        self._sink = sink
        self._cursor_path = run_dir.sink_path(sink.name)
        self._cursor = Cursor.read(self._cursor_path)
        job, _, newest = attempt_id.rpartition("-a")
        attempts = [run_dir.attempt(f"{job}-a{index}") for index in range(int(newest) + 1)]
        self._attempts = attempts[-1:] if is_of_attempt else attempts
        self._warn = warn
        self._is_open = False
        self._has_warned = False
        self._has_all = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{sink.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Feed what is left, for at most `timeout_s`, if it was started."""
        if self._thread.ident is None:
            return  # The attempt was none of the job's: the records are another one's to feed.
        self._closing.set()
        self._thread.join(timeout_s)
        if not self._has_all:
            # Another attempt would go on from there.
            self._warn(f"{self._sink.name} has not taken all of the job's records")

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._closing.wait(pause_s):
            has_worked = self.feed()
            pause_s = INTERVAL_S if has_worked else min(_MAX_PAUSE_S, 2 * pause_s)
        self._has_all = self.feed()
        if self._has_all:
            with contextlib.suppress(Exception):  # nothing is lost that was taken
                self._sink.close()

    def feed(self) -> bool:
        """Hand everything new to the sink; False if it failed."""
        try:
            if not self._is_open:
                self._sink.open()
                self._is_open = True
            # Workers start only where no earlier attempt writes, whose files are then complete.
            is_alone = any(path.stem != "driver" for path in self._attempts[-1].stream_paths())
            for files in self._attempts:
                self._feed_attempt(files)
            if is_alone:
                self._attempts = self._attempts[-1:]
        except Exception as error:  # libraries of others: whatever they raise, training goes on
            self._note_failure(error)
            return False
        return True

    def _feed_attempt(self, files: AttemptDir) -> None:
        for path in files.stream_paths():
            key = f"{files.root.name}/{path.name}"
            while (found := read_batch(path, self._cursor.offsets.get(key, 0)))[0]:
                self._sink.take(found[0])
                self._cursor.offsets[key] = found[1]
                self._cursor.save(self._cursor_path)

    def _note_failure(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        if isinstance(error, ImportError):
            cause += "; install it where the driver runs"
        message = f"{self._sink.name} does not take the job's records: {cause}"
        if self._has_warned:
            logger.debug("%s", message)
            return
        self._has_warned = True
        logger.warning("%s", message, exc_info=error)
        if not self._closing.is_set():
            message += "; training goes on, and they are offered again"
        self._warn(message)


class Cursor(BaseModel):
    """How far a sink has read, by stream; a file on run storage."""

    offsets: dict[str, int] = {}

    @classmethod
    def read(cls, path: Path) -> Cursor:
        """The stored one, or one at the beginning where there is none that can be read."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return cls()

    def save(self, path: Path) -> None:
        """Write it, whole or not at all; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json().encode())

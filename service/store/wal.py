"""Moving what SQLite wrote from its log into the database file, beside those who write.

SQLite lets the transaction that makes the log too long move it, which takes tens of milliseconds
that somebody's request has to wait for. Here a thread of its own does it, and hinders nobody.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

logger = logging.getLogger(__name__)

# Where a transaction has to do it after all: pages of 4 KiB.
AUTOCHECKPOINT_PAGES = 16_384
_INTERVAL_S = 1.0
_MIN_LOG_BYTES = 4 << 20


class WalKeeper:
    """Keeps the log of a SQLite file short; does nothing for any other database."""

    def __init__(self, engine: Engine, interval_s: float = _INTERVAL_S) -> None:
        is_file = engine.dialect.name == "sqlite" and engine.url.database
        self._path = Path(str(engine.url.database)) if is_file else None
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wal", daemon=True)

    def start(self) -> None:
        """Begin to look at the log, every `interval_s`."""
        if self._path is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, after a move that is under way."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.shorten()
            except (OSError, sqlite3.Error) as error:
                # The log grows until a transaction does it.
                logger.warning("the log of the database stays as long as it is for now: %s", error)

    def shorten(self, min_bytes: int = _MIN_LOG_BYTES) -> bool:
        """Move what is in the log if it has `min_bytes`; whether it was moved.

        Neither readers nor writers are waited for, and what they still need stays.
        """
        if (
            self._path is None
            or _size_of(self._path.with_name(self._path.name + "-wal")) < min_bytes
        ):
            return False
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=1.0)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return True


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""Writes the audit log beside the requests: lines of a fifth of a second share a transaction.

So no request waits for its line, nor for the disk because of its neighbours' lines. A service that
is killed loses the lines of its last fifth of a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from service.security.keys import AuditRecord
from service.store.keys import KeyStore

logger = logging.getLogger(__name__)

_MAX_BATCH = 500
# Some megabytes: what a database that stands still may cost us.
_MAX_PENDING = 10_000
_LINGER_S = 0.2
_FLUSH_TIMEOUT_S = 10.0


class AuditWriter:
    """Appends records in order, from a thread that lives while there are some."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._pending: list[AuditRecord] = []
        self._num_appended = 0
        self._num_written = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._is_running = False
        self._is_wanted_now = threading.Event()

    def append(self, record: AuditRecord) -> None:
        """Write a record soon; drop it where too many wait, which the service's log tells."""
        with self._changed:
            if len(self._pending) >= _MAX_PENDING:
                self._num_dropped += 1
                return
            self._pending.append(record)
            self._num_appended += 1
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._write_all, name="audit", daemon=True).start()

    def flush(self) -> None:
        """Wait until all that was appended before is written, at most some seconds."""
        with self._changed:
            wanted = self._num_appended
            self._is_wanted_now.set()
            self._changed.wait_for(lambda: self._num_written >= wanted, _FLUSH_TIMEOUT_S)

    def _write_all(self) -> None:
        while True:
            # More lines may come that can share the transaction, unless somebody wants to read.
            self._is_wanted_now.wait(_LINGER_S)
            records = self._take()
            if not records:
                return
            self._write(records)
            self._tell_dropped()
            with self._changed:
                self._num_written += len(records)
                self._changed.notify_all()

    def _write(self, records: Sequence[AuditRecord]) -> None:
        try:
            self._keys.append_audit(records)
        except Exception as error:  # whatever it is, the lines that follow must be written
            # The log of the service is the second-best place.
            logger.error("%d lines of the audit log are not kept: %s", len(records), error)
            for record in records:
                logger.error("audit: %s", record)

    def _tell_dropped(self) -> None:
        with self._changed:
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            logger.warning("%d lines of the audit log are lost: too many waited", num_dropped)

    def _take(self) -> list[AuditRecord]:
        with self._changed:
            batch, self._pending = self._pending[:_MAX_BATCH], self._pending[_MAX_BATCH:]
            self._is_wanted_now.clear()
            self._is_running = bool(batch)
            return batch

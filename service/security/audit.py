"""Writes the audit log beside the requests: what piles up during one write goes out in the next.

A line is written within moments of its answer, in one transaction with its neighbours, so that
no request waits for it. A service that is killed in between loses the lines of those moments.
"""

from __future__ import annotations

import logging
import threading

from service.security.keys import AuditRecord
from service.store.keys import KeyStore

logger = logging.getLogger(__name__)

_MAX_BATCH = 500


class AuditWriter:
    """Appends records in order, from a thread that lives while there are some."""

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._pending: list[AuditRecord] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def append(self, record: AuditRecord) -> None:
        """Write a record soon."""
        with self._lock:
            self._pending.append(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all that was appended before is written."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _write_all(self) -> None:
        while records := self._take():
            try:
                self._keys.append_audit(records)
            except Exception as error:  # whatever it is, the lines that follow must be written
                # The log of the service is the second-best place.
                logger.error("%d lines of the audit log are not kept: %s", len(records), error)
                for record in records:
                    logger.error("audit: %s", record)

    def _take(self) -> list[AuditRecord]:
        with self._lock:
            batch, self._pending = self._pending[:_MAX_BATCH], self._pending[_MAX_BATCH:]
            if not batch:
                self._thread = None
            return batch

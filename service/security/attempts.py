"""What the token of an attempt is still worth once the attempt has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from service.domain import Attempt, Job, JobStatus
from service.security.errors import Forbidden
from service.store.base import JobStore

LATE_REPORTS_S = 3600.0
"""Seconds for which records of an ended attempt are taken: they may have waited in its outbox."""
# A driver posts several times a second, and its attempt ends but once.
_CACHE_S = 10.0
_MAX_CACHED = 10_000


def may_report(attempt: Attempt, now: float) -> bool:
    """Whether an attempt's token still lets it deliver records at a time (Unix seconds)."""
    return attempt.ended_at is None or now - attempt.ended_at < LATE_REPORTS_S


def may_read_secrets(job: Job, attempt: Attempt) -> bool:
    """Whether an attempt's token lets it read the job's secrets: its driver does so as it starts.

    Once there are workers nobody needs to, so that a token which leaked later opens nothing.
    """
    is_current = job.current_attempt_id == attempt.id and attempt.end_reason is None
    return is_current and job.status is JobStatus.STARTING


class AttemptRights:
    """Remembers for some seconds who may report, so that not every batch asks the database."""

    def __init__(self, store: JobStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def check_may_report(self, attempt_id: str) -> None:
        """Raise `Forbidden` for an attempt that ended long ago, `AttemptNotFound` for none."""
        now = self._clock()
        with self._lock:
            if now - self._asked_at.get(attempt_id, -_CACHE_S) < _CACHE_S:
                return
        if not may_report(self._store.get_attempt(attempt_id), now):
            raise Forbidden(f"attempt {attempt_id} ended too long ago to deliver records")
        with self._lock:
            if len(self._asked_at) >= _MAX_CACHED:
                self._asked_at.clear()
            self._asked_at[attempt_id] = now

"""Keeping work in the background to one thread's worth of computing.

Python runs one thread at a time, and which of those that are ready comes next is left to chance:
among eight looks at jobs that compute, a request would wait for its turn eight times as long as
beside one. Here they take turns, and step aside while they wait for somebody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE_S = 0.05


class _Held(threading.local):
    is_held = False


class Lane:
    """Room for one thread; a thread that has waited `patience_s` goes ahead beside it.

    So one that is stuck (on storage that hangs, say) holds the others up for that long only.
    """

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._room = threading.Semaphore(1)
        self._mine = _Held()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Compute in the lane."""
        self._mine.is_held = self._room.acquire(timeout=self._patience_s)
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Wait for somebody else, out of the lane."""
        was_held = self._mine.is_held
        self._leave()
        try:
            yield
        finally:
            if was_held:
                self._mine.is_held = self._room.acquire(timeout=self._patience_s)

    def _leave(self) -> None:
        if self._mine.is_held:
            self._mine.is_held = False
            self._room.release()

"""How a rank gets on, told with its heartbeats: what it does, and how long its steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

_NUM_STEP_TIMES = 50


class Heart(Protocol):
    """What carries a pulse: `trainer.elastic.member.Member`."""

    def progress(
        self, phase: str, step: int, step_time_s: float = 0.0, local_s: float = 0.0
    ) -> None:
        """Something got done."""


class Pulse:
    """Times steps for a heart; without one it does nothing."""

    def __init__(
        self, heart: Heart | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._heart = heart
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=_NUM_STEP_TIMES)
        self._began_at = 0.0
        # Seconds of a step, reading included, in which this rank waits for no other.
        self.local_s = 0.0

    def begin_step(self) -> None:
        """A training step begins: its batch is there, and it waits for no other group."""
        self._began_at = self._clock()

    def end_step(self, step: int) -> None:
        """It is done."""
        if self._heart is None:
            return
        self._times_s.append(self._clock() - self._began_at)
        self._heart.progress("train", step, median(self._times_s), self.local_s)

    def enter(self, phase: str, step: int) -> None:
        """Something other than training begins, or gets on."""
        if self._heart is None:
            return
        step_time_s = median(self._times_s) if self._times_s else 0.0
        self._heart.progress(phase, step, step_time_s, self.local_s)

"""A clock for tests of whatever waits, measures or expires: time passes only when told to."""

from __future__ import annotations

from collections.abc import Callable


class FakeClock:
    """`time.time`, `time.monotonic` and `time.sleep` in one; calling it gives the time.

    `meanwhile` runs at the beginning of each sleep with the seconds slept: what others do in that
    time. `slept` has the seconds of every sleep.
    """

    def __init__(
        self, now: float = 0.0, meanwhile: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self.now = now
        self.meanwhile = meanwhile
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    time = monotonic = perf_counter = __call__

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.meanwhile(seconds)
        self.now += seconds

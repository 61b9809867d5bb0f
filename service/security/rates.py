"""How fast each caller may ask (token buckets), and how much at the same time."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MAX_BUCKETS = 10_000


@dataclass(frozen=True)
class Rate:
    """`per_s` requests per second in the long run, `burst` at once."""

    per_s: float
    burst: int


@dataclass(frozen=True)
class Bucket:
    """How many requests are left at a time (seconds of any clock)."""

    left: float
    at: float


def take(bucket: Bucket | None, rate: Rate, now: float) -> tuple[Bucket, float]:
    """The bucket after one more request, and seconds to wait where it is refused, else 0."""
    if bucket is None:
        return Bucket(rate.burst - 1.0, now), 0.0
    left = min(float(rate.burst), bucket.left + max(0.0, now - bucket.at) * rate.per_s)
    if left >= 1.0:
        return Bucket(left - 1.0, now), 0.0
    return Bucket(left, now), (1.0 - left) / rate.per_s


class Buckets:
    """A bucket for each caller; who has not asked for longest is forgotten first."""

    def __init__(self, max_buckets: int = _MAX_BUCKETS) -> None:
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._max_buckets = max_buckets
        self._lock = threading.Lock()

    def take(self, caller: str, rate: Rate, now: float) -> float:
        """Take one request; seconds to wait where it is refused, else 0."""
        with self._lock:
            bucket, wait_s = take(self._buckets.pop(caller, None), rate, now)
            self._buckets[caller] = bucket
            if len(self._buckets) > self._max_buckets:
                self._buckets.popitem(last=False)
            return wait_s


class OpenRequests:
    """Counts what each caller has open: requests under way, and streams that it follows.

    For one thread alone, that of the event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, caller: str) -> Iterator[bool]:
        """Hold one more open; False where the caller has `most` of them already."""
        is_room = self._num_open[caller] < self._most
        self._num_open[caller] += is_room
        try:
            yield is_room
        finally:
            self._num_open[caller] -= is_room
            if not self._num_open[caller]:
                del self._num_open[caller]

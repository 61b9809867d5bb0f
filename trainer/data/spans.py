"""Sets of rows as sorted spans [start, stop): small, however many rows they hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Span = tuple[int, int]
"""Rows [start, stop)."""


class Spans:
    """A set of row numbers, kept as the bounds of spans that neither overlap nor touch."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """`spans` may come in any order, and may overlap; empty ones are left out."""
        self._bounds: list[int] = []  # start, stop, start, stop, ... in ascending order
        for start, stop in spans:
            self.add(start, stop)

    def __len__(self) -> int:
        """Number of rows."""
        return sum(self._bounds[1::2]) - sum(self._bounds[::2])

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans, sorted."""
        return tuple(zip(self._bounds[::2], self._bounds[1::2], strict=True))

    def add(self, start: int, stop: int) -> None:
        """Take rows [start, stop) in."""
        self._replace(start, stop, is_in=True)

    def remove(self, start: int, stop: int) -> None:
        """Take rows [start, stop) out."""
        self._replace(start, stop, is_in=False)

    def _replace(self, start: int, stop: int, *, is_in: bool) -> None:
        if start >= stop:
            return
        first, last = bisect_left(self._bounds, start), bisect_right(self._bounds, stop)
        # An odd place is inside a span. A bound is needed where that changes at `start` or `stop`.
        new_start = [start] if first % 2 != is_in else []
        new_stop = [stop] if last % 2 != is_in else []
        self._bounds[first:last] = new_start + new_stop

    def gap(self, start: int, stop: int) -> Span | None:
        """The first run of rows in [start, stop) that are not in the set, if there are any."""
        place = bisect_right(self._bounds, start)
        if place % 2:
            start = self._bounds[place]
            place += 1
        if place < len(self._bounds):
            stop = min(stop, self._bounds[place])
        return (start, stop) if start < stop else None

    def gaps(self, start: int, stop: int) -> list[Span]:
        """All runs of rows in [start, stop) that are not in the set, in order."""
        found = []
        while (gap := self.gap(start, stop)) is not None:
            found.append(gap)
            start = gap[1]
        return found

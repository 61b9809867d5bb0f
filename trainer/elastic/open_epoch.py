"""The rows of an epoch that has begun: done, taken or free, and which group is in which window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from trainer.data.spans import Span, Spans


class OpenEpoch:
    """An epoch's rows, by their place in its order. Rows that are leased or done are *taken*.

    A group is *in* the window in which the newest rows that it took end.
    """

    def __init__(self, bounds: Sequence[int], done: Iterable[Span] = ()) -> None:
        """`bounds` are the row bounds of the windows: 0, ..., number of rows."""
        self.done = Spans(done)
        self._taken = Spans(self.done.spans)
        self._bounds = tuple(int(bound) for bound in bounds)
        self._window_of: dict[int, int] = {}

    @property
    def _num_rows(self) -> int:
        return self._bounds[-1]

    @property
    def is_complete(self) -> bool:
        """Whether every row is done."""
        return self.done.spans == ((0, self._num_rows),)

    def is_free(self, start: int, stop: int) -> bool:
        """Whether rows [start, stop) are of this epoch, and none of them is taken."""
        return stop <= self._num_rows and self._taken.gap(start, stop) == (start, stop)

    def take(self, group: int, num_rows: int) -> Span | None:
        """Up to `num_rows` neighbouring rows for `group`; None where none are free."""
        if self._taken.gap(0, self._num_rows) is None:
            return None
        window = self._choose_window(group)
        start, _ = self._gap_in(window)
        wanted = start + num_rows
        while self._bounds[window + 1] < wanted and self._is_open(window + 1):
            window += 1
        _, stop = self._taken.gap(start, min(wanted, self._bounds[window + 1])) or (0, start)
        self.claim(group, start, stop)
        return start, stop

    def claim(self, group: int, start: int, stop: int) -> None:
        """Give free rows [start, stop) to `group`."""
        self._taken.add(start, stop)
        self._window_of[group] = bisect_right(self._bounds, stop - 1) - 1

    def release(self, start: int, stop: int) -> None:
        """Free rows that were taken."""
        self._taken.remove(start, stop)

    def leave(self, group: int) -> None:
        """`group` is in no window any more."""
        self._window_of.pop(group, None)

    def _choose_window(self, group: int) -> int:
        """A window with free rows, of which there must be one."""
        own = self._window_of.get(group, -1)
        if own >= 0 and self._has_free_rows(own):
            return own
        if own >= 0 and self._is_open(own + 1):
            return own + 1
        if runs := self._open_runs():
            return self._entry(max(runs, key=len))
        return max(range(len(self._bounds) - 1), key=self._num_free)

    def _open_runs(self) -> list[list[int]]:
        """Windows with free rows in which nobody is, as runs of neighbours."""
        runs: list[list[int]] = []
        for window in filter(self._is_open, range(len(self._bounds) - 1)):
            if runs and runs[-1][-1] == window - 1:
                runs[-1].append(window)
            else:
                runs.append([window])
        return runs

    def _entry(self, run: list[int]) -> int:
        # Whoever is in the window before the run goes on into it: leave that group the first half.
        is_approached = run[0] - 1 in self._window_of.values()
        return run[len(run) // 2] if is_approached else run[0]

    def _is_open(self, window: int) -> bool:
        exists = window < len(self._bounds) - 1
        return exists and window not in self._window_of.values() and self._has_free_rows(window)

    def _has_free_rows(self, window: int) -> bool:
        start, stop = self._gap_in(window)
        return start < stop

    def _gap_in(self, window: int) -> Span:
        """The first free rows of a window, an empty span where it has none."""
        start, stop = self._bounds[window : window + 2]
        return self._taken.gap(start, stop) or (stop, stop)

    def _num_free(self, window: int) -> int:
        start, stop = self._bounds[window : window + 2]
        return sum(last - first for first, last in self._taken.gaps(start, stop))

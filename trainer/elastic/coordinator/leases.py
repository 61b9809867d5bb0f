"""Leases: which rows of which epoch each group may train, so that every row is trained once.

A group has a *lane* for each of its ranks: rows that this rank reads, in a window of their own as
long as there are enough, so that no window is decoded by all. A row is free, leased to one group,
or done: trained by a committed sync, or skipped on purpose. A lease never spans epochs.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import TypeVar

from trainer.coordination.messages import EpochRows, Lease, Ledger
from trainer.data.position import Span, Spans
from trainer.data.reader import lease_windows, open_source
from trainer.protocol.worker_config import FoundData
from trainer.spec.job import JobSpec
from trainer.storage import Location

Lane = tuple[int, int]
"""A group, and the number of a lane of it."""
Key = TypeVar("Key", bound=Hashable)
# Groups whose speeds differ by less get leases of one length: times are noisy.
_ALIKE = 1.25
_MIN_LENGTH, _MAX_LENGTH = 0.5, 2.0


def lease_lengths(speeds: Mapping[Key, float]) -> dict[Key, float]:
    """How long the next lease of each group is, so that all reach the sync at about one time.

    `speeds` are in rows per second, 0 where none is known yet. A length is in usual leases, on
    average 1 unless a bound was met: a group that is very slow would otherwise take no part, and
    one that is very fast drift away from the others before each sync.
    """
    known = [speed for speed in speeds.values() if speed]
    if not known or max(known) < _ALIKE * min(known):
        return dict.fromkeys(speeds, 1.0)
    mean = statistics.fmean(known)
    return {
        group: min(max((speed or mean) / mean, _MIN_LENGTH), _MAX_LENGTH)
        for group, speed in speeds.items()
    }


class OpenEpoch:
    """An epoch's rows, by their place in its order. Rows that are leased or done are *taken*.

    A lane is *in* the window in which the newest rows that it took end. A window is *open* where
    nobody is in it and it has free rows.
    """

    def __init__(self, bounds: Sequence[int], done: Iterable[Span] = ()) -> None:
        """`bounds` are the row bounds of the windows: 0, ..., number of rows."""
        self.done = Spans(done)
        self._taken = Spans(self.done.spans)
        self._bounds = tuple(int(bound) for bound in bounds)
        self._window_of: dict[Lane, int] = {}
        self._num_lanes_in: Counter[int] = Counter()
        self._open = Spans()
        self._runs: list[tuple[int, Span]] = []  # heap of open windows in a row; some are no more
        for window in range(len(self._bounds) - 1):
            self._update(window)

    @property
    def _num_rows(self) -> int:
        return self._bounds[-1]

    @property
    def is_complete(self) -> bool:
        return self.done.spans == ((0, self._num_rows),)

    def is_free(self, start: int, stop: int) -> bool:
        """Whether rows [start, stop) are of this epoch, and none of them is taken."""
        return stop <= self._num_rows and self._taken.gap(start, stop) == (start, stop)

    def take(self, group: int, num_rows: int, num_lanes: int = 1) -> tuple[Span, ...]:
        """Up to `num_rows` rows for `group`, as neighbours in each lane; less near the end."""
        found: list[Span] = []
        for lane in range(num_lanes):
            first, last = (num_rows * place // num_lanes for place in (lane, lane + 1))
            span = self._take((group, lane), last - first) if first < last else None
            if span and found and found[-1][1] == span[0]:
                found[-1] = found[-1][0], span[1]
            elif span:
                found.append(span)
        return tuple(found)

    def _take(self, lane: Lane, num_rows: int) -> Span | None:
        """Up to `num_rows` neighbouring rows for `lane`; None where none are free."""
        if self._taken.gap(0, self._num_rows) is None:
            return None
        window = self._choose_window(lane)
        start, _ = self._taken.gap(*self._bounds[window : window + 2]) or (0, 0)
        wanted = start + num_rows
        while self._bounds[window + 1] < wanted and self._is_open(window + 1):
            window += 1
        _, stop = self._taken.gap(start, min(wanted, self._bounds[window + 1])) or (0, start)
        self._claim(lane, (start, stop))
        return start, stop

    def claim(self, group: int, spans: Iterable[Span]) -> None:
        """Give free rows, as `take` gave them, to `group`."""
        for lane, span in enumerate(spans):
            self._claim((group, lane), span)

    def _claim(self, lane: Lane, span: Span) -> None:
        self._taken.add(*span)
        windows = self._windows_of(*span)
        if self._window_of.get(lane) != windows[-1]:
            self._leave(lane)
            self._window_of[lane] = windows[-1]
            self._num_lanes_in[windows[-1]] += 1
        for window in windows:
            self._update(window)

    def release(self, start: int, stop: int) -> None:
        self._taken.remove(start, stop)
        for window in self._windows_of(start, stop):
            self._update(window)

    def leave(self, group: int) -> None:
        """The lanes of `group` are in no window any more."""
        for lane in [lane for lane in self._window_of if lane[0] == group]:
            self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        window = self._window_of.pop(lane, None)
        if window is not None:
            self._num_lanes_in[window] -= 1
            self._update(window)

    def _windows_of(self, start: int, stop: int) -> range:
        first, last = (bisect_right(self._bounds, row) - 1 for row in (start, stop - 1))
        return range(first, last + 1)

    def _update(self, window: int) -> None:
        """Whether a window is open may have changed."""
        is_open = not self._num_lanes_in[window] and self._has_free_rows(window)
        if is_open == self._is_open(window):
            return
        (self._open.add if is_open else self._open.remove)(window, window + 1)
        for run in {self._open.run_at(place) for place in (window - 1, window, window + 1)}:
            if run:
                heappush(self._runs, (run[0] - run[1], run))

    def _longest_run(self) -> Span | None:
        """The most open windows in a row, the first of several; None where none is open."""
        while self._runs:
            _, run = self._runs[0]
            if self._open.run_at(run[0]) == run:
                return run
            heappop(self._runs)
        return None

    def _choose_window(self, lane: Lane) -> int:
        """A window with free rows, of which there must be one."""
        own = self._window_of.get(lane, -1)
        if own >= 0 and self._has_free_rows(own):
            return own
        if own >= 0 and self._is_open(own + 1):
            return own + 1
        if run := self._longest_run():
            return self._entry(*run)
        occupied = (window for window, num_lanes in self._num_lanes_in.items() if num_lanes)
        return max(sorted(occupied), key=self._num_free)

    def _entry(self, first: int, last: int) -> int:
        # Whoever is in the window before the run goes on into it: leave that lane the first half.
        is_approached = self._num_lanes_in[first - 1] > 0
        return (first + last) // 2 if is_approached else first

    def _is_open(self, window: int) -> bool:
        return self._open.gap(window, window + 1) is None

    def _has_free_rows(self, window: int) -> bool:
        return self._taken.gap(*self._bounds[window : window + 2]) is not None

    def _num_free(self, window: int) -> int:
        gaps = self._taken.gaps(*self._bounds[window : window + 2])
        return sum(last - first for first, last in gaps)


class LeaseError(Exception):
    """A lease that nobody holds, or a ledger about other data than the book's."""


class LeaseBook:
    """The leases of a run, and which rows are done.

    A lane keeps to its own window of the epoch's order and goes on into the next one while that
    is nobody's; then it takes a free window, and at last shares one.
    """

    def __init__(
        self,
        num_rows: int,
        epochs: int,
        rows_per_lease: int,
        max_rows: int | None = None,
        windows: Sequence[int] | Callable[[int], Sequence[int]] = (),
        num_lanes: int = 1,
        rows_per_step: int = 1,
    ) -> None:
        """`num_rows` are the rows of one epoch; the run has `epochs`, or ends at `max_rows`.

        A group takes `rows_per_step` at once, and leases are of whole steps. Skipped rows count
        towards `max_rows` as trained ones do. `windows` are row bounds for all epochs (0, ...,
        number of rows), or give those of an epoch; none stand for one window.
        """
        self._num_rows = num_rows
        self._epochs = epochs
        self._rows_per_lease = rows_per_lease
        self._num_lanes, self._rows_per_step = num_lanes, rows_per_step
        whole_run = epochs * num_rows
        self._max_rows = whole_run if max_rows is None else min(whole_run, max_rows)
        whole_epoch = (0, num_rows)
        self._windows = windows if callable(windows) else lambda _: windows or whole_epoch
        self._next_id = 0
        self.restore(Ledger())

    @classmethod
    def of(cls, spec: JobSpec, found: FoundData | None = None) -> LeaseBook:
        """That of a fresh run, leased by the (least) sync interval of a group.

        Reads the metadata of its data; raises a `DataError`.
        """
        data, training, parallelism = spec.data, spec.training, spec.parallelism
        contents = found.contents[data.split.train] if found else None
        source = open_source(spec, Location.parse(data.path) / data.split.train, contents=contents)
        rows_per_step = parallelism.world_size * data.batch_size
        return cls(
            num_rows=source.num_rows,
            epochs=training.epochs,
            rows_per_lease=parallelism.sync.intervals[0] * parallelism.group_size * data.batch_size,
            max_rows=None if training.max_steps is None else training.max_steps * rows_per_step,
            windows=lease_windows(source, spec),
            num_lanes=parallelism.group_size,
            rows_per_step=parallelism.group_size * data.batch_size,
        )

    def restore(self, ledger: Ledger) -> None:
        """Start over from `ledger`, with nothing leased; see `adopt`.

        Raises `LeaseError` where it is about other data.
        """
        self._leases: dict[int, tuple[int, Lease]] = {}
        self._held: defaultdict[int, dict[int, Lease]] = defaultdict(dict)  # by group
        self._num_rows_leased = 0
        self.epoch = ledger.epoch  # that is leased now
        self._rows_trained, self._rows_skipped = ledger.rows_trained, ledger.rows_skipped
        self._open = {each.epoch: self._begin(each.epoch, each.done) for each in ledger.open_epochs}
        self._close_epochs()

    def _begin(self, epoch: int, done: Iterable[Span] = ()) -> OpenEpoch:
        opened = OpenEpoch(self._windows(epoch), done)
        last_row = max((stop for _, stop in opened.done.spans), default=0)
        if last_row > self._num_rows:
            raise LeaseError(
                f"rows up to {last_row} of epoch {epoch} are done, but the training split has "
                f"{self._num_rows}: the data has changed; bring it back, or start a new job"
            )
        return opened

    @property
    def num_rows_left(self) -> int:
        """Rows that the run has still to train, those leased out included."""
        done = sum(len(each.done) for each in self._open.values())
        return max(0, self._max_rows - self.epoch * self._num_rows - done)

    def entered_in(self, ledger: Ledger) -> Ledger:
        """`ledger` with the rows as they are in this book, otherwise unchanged."""
        begun = (EpochRows(epoch=n, done=self._open[n].done.spans) for n in sorted(self._open))
        rows = {
            "epoch": self.epoch,
            "open_epochs": tuple(rows for rows in begun if rows.done),
            "rows_trained": self._rows_trained,
            "rows_skipped": self._rows_skipped,
        }
        return ledger.model_copy(update=rows)

    def lease(self, group: int, length: float = 1.0) -> Lease | None:
        """Lease the next rows to `group`; None where none are free, now or for good.

        An epoch begins when all rows of the last are done. `length` is as of `lease_lengths`.
        """
        num_steps = max(1, round(length * self._rows_per_lease / self._rows_per_step))
        wanted = num_steps * self._rows_per_step
        num_rows = min(wanted, self.num_rows_left - self._num_rows_leased)
        if num_rows <= 0:
            return None
        spans = self._opened(self.epoch).take(group, num_rows, self._num_lanes)
        if not spans:
            return None
        lease = Lease(id=self._next_id, epoch=self.epoch, spans=spans)
        self._enter(group, lease)
        return lease

    def _opened(self, epoch: int) -> OpenEpoch:
        if epoch not in self._open:
            self._open[epoch] = self._begin(epoch)
        return self._open[epoch]

    def _enter(self, group: int, lease: Lease) -> None:
        self._leases[lease.id] = group, lease
        self._held[group][lease.id] = lease
        self._num_rows_leased += lease.num_rows
        self._next_id = max(self._next_id, lease.id + 1)

    def _leave(self, lease_id: int) -> Lease:
        """Nobody holds this lease any more."""
        group, lease = self._leases.pop(lease_id)
        del self._held[group][lease_id]
        self._num_rows_leased -= lease.num_rows
        return lease

    def held(self, group: int) -> tuple[Lease, ...]:
        """What `group` holds, in the order to train it."""
        return tuple(self._held[group].values())

    def adopt(self, leases: Iterable[Lease], group: int) -> tuple[Lease, ...]:
        """Take over leases that `group` holds since before this book; returns those it may train.

        Left out is a lease with a row that is done, another's, or not of this run. No new lease
        will have the id of one given here. Harmless when repeated, as every rank tells the same.
        """
        accepted = []
        for lease in leases:
            self._next_id = max(self._next_id, lease.id + 1)
            if lease.id not in self._leases and self._is_free(lease):
                self._opened(lease.epoch).claim(group, lease.spans)
                self._enter(group, lease)
            if self._leases.get(lease.id) == (group, lease):
                accepted.append(lease)
        return tuple(accepted)

    def _is_free(self, lease: Lease) -> bool:
        is_in_run = self.epoch <= lease.epoch < self._epochs
        return is_in_run and all(self._opened(lease.epoch).is_free(*span) for span in lease.spans)

    def commit(self, ids: Iterable[int]) -> None:
        """The rows of these leases were trained. Raises `LeaseError`."""
        for lease_id in ids:
            self._rows_trained += self._finish(lease_id).num_rows
        self._close_epochs()

    def skip(self, lease_id: int) -> Lease:
        """Leave a lease's rows out for good, since they spoil the model. Raises `LeaseError`."""
        lease = self._finish(lease_id)
        self._rows_skipped += lease.num_rows
        self._close_epochs()
        return lease

    def _finish(self, lease_id: int) -> Lease:
        if lease_id not in self._leases:
            raise LeaseError(
                f"nobody holds lease {lease_id}: it was done or taken back before; a group that "
                "still trains it has missed a verdict and must ask for its leases"
            )
        lease = self._leave(lease_id)
        for span in lease.spans:
            self._open[lease.epoch].done.add(*span)
        return lease

    def _close_epochs(self) -> None:
        while self.epoch in self._open and self._open[self.epoch].is_complete:
            del self._open[self.epoch]
            self.epoch += 1

    def give_back(self, group: int) -> int:
        """Free all that `group` holds, since it is lost or leaves; returns how many rows."""
        returned = self.held(group)
        for lease in returned:
            self._leave(lease.id)
            for span in lease.spans:
                self._open[lease.epoch].release(*span)
        for each in self._open.values():
            each.leave(group)
        return sum(lease.num_rows for lease in returned)

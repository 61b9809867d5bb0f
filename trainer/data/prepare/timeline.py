"""What came before what: time splits and the strictly earlier rows of a group.

Pure numpy on arrays of one entry per rating. Rows with an equal timestamp are never earlier than
one another, so nothing that is known only at the moment of a rating leaks into its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray

Split = Literal["global", "per_user"]


def earlier_ranges(group: IntArray, time: IntArray) -> tuple[IntArray, IntArray]:
    """Ranges `[start, end)` of the rows of the same group with a strictly smaller time.

    Rows must be sorted by (group, time); both results have one entry per row.
    """
    rows = np.arange(len(group), dtype=np.int64)
    new_group = np.ones(len(group), dtype=bool)
    new_group[1:] = group[1:] != group[:-1]
    new_time = new_group.copy()
    new_time[1:] |= time[1:] != time[:-1]
    starts = np.maximum.accumulate(np.where(new_group, rows, 0))
    ends = np.maximum.accumulate(np.where(new_time, rows, 0))
    return starts, ends


def range_sums(values: NDArray, starts: IntArray, ends: IntArray) -> NDArray[np.float64]:
    """Sum of `values[starts[i]:ends[i]]` for every i, in float64."""
    totals = np.zeros(len(values) + 1)
    np.cumsum(values, out=totals[1:])
    return totals[ends] - totals[starts]


def mark_validation(
    user: IntArray, time: IntArray, split: Split, fraction: float
) -> NDArray[np.bool_]:
    """Mark the last `fraction` of all rows by time, or of each user's rows, rounded down.

    Rows must be sorted by (user, time). A user with too few rows for one stays in training.
    """
    num_rows = len(user)
    if split == "global":
        marked = np.zeros(num_rows, dtype=bool)
        by_time = np.lexsort((user, time))
        marked[by_time[num_rows - int(num_rows * fraction) :]] = True
        return marked
    begins = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    counts = np.diff(np.r_[begins, num_rows])
    first_held_out = begins + counts - (counts * fraction).astype(np.int64)
    return np.arange(num_rows) >= np.repeat(first_held_out, counts)


def order_by(*keys: IntArray) -> IntArray:
    """Stable order of rows by the first key, then the second, and so on; keys hold integers.

    Keys that fit into 63 bits together are sorted as one, several times as fast as one by one.
    """
    shifted = [key - key.min() if len(key) else key for key in keys]
    bits = [int(key.max()).bit_length() if len(key) else 0 for key in shifted]
    if sum(bits) > 63:
        return np.lexsort(keys[::-1])
    packed = np.zeros(len(keys[0]), dtype=np.int64)
    for key, width in zip(shifted, bits, strict=True):
        packed <<= width
        packed |= key
    return np.argsort(packed, kind="stable")


@dataclass(frozen=True)
class Cut:
    """Where a global split by time lies: later rows are held out, earlier ones train.

    Of the rows at `time` itself the first `num_training` train, in order of (user, movie).
    """

    time: int
    num_training: int

    def mark(self, time: IntArray, num_before: int) -> NDArray[np.bool_]:
        """Mark held-out rows of a slice; `num_before` rows at the cut's time lie before it."""
        marked = time > self.time
        ties = np.flatnonzero(time == self.time)
        marked[ties[max(0, self.num_training - num_before) :]] = True
        return marked


_BINS_BITS = 16


def find_cut(times: Callable[[], Iterable[IntArray]], num_held_out: int) -> Cut:
    """The cut that holds out the last `num_held_out` rows of all slices.

    `times()` gives the slices anew each time it is called: every pass counts the rows in 2^16
    bins of time and the next one looks into the bin where the cut lies.
    """
    low = min(int(slice_.min()) for slice_ in times() if len(slice_))
    high = max(int(slice_.max()) for slice_ in times() if len(slice_))
    if not num_held_out:
        return Cut(high + 1, 0)
    wanted = num_held_out
    while True:
        shift = max(0, (high - low).bit_length() - _BINS_BITS)
        counts = np.zeros(((high - low) >> shift) + 1, dtype=np.int64)
        for slice_ in times():
            inside = slice_[(slice_ >= low) & (slice_ <= high)]
            counts += np.bincount((inside - low) >> shift, minlength=len(counts))
        from_last = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_last, wanted))
        chosen = len(counts) - 1 - place
        wanted -= int(from_last[place] - counts[chosen])
        if shift == 0:
            return Cut(low + chosen, int(counts[chosen]) - wanted)
        low, high = low + (chosen << shift), low + ((chosen + 1) << shift) - 1

"""What came before what: time splits and the strictly earlier rows of a group.

Pure numpy on arrays of one entry per rating. Rows with an equal timestamp are never earlier than
one another, so nothing that is known only at the moment of a rating leaks into its features.
"""

from __future__ import annotations

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
    starts, _ = earlier_ranges(user, time)
    _, user_number, counts = np.unique(user, return_inverse=True, return_counts=True)
    num_training = counts - (counts * fraction).astype(np.int64)
    return np.arange(num_rows) - starts >= num_training[user_number]

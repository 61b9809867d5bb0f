"""The order of an epoch's rows: a function of (seed, epoch) and the row groups, of nothing else.

Row groups are permuted, then cut into windows of neighbouring groups; rows are shuffled inside a
window. So an epoch is well mixed while only one window has to be in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.ragged import IntArray, offsets_of

# Keeps the random streams of group order and of each window's rows apart.
_GROUP_STREAM, _ROW_STREAM = 0, 1


@dataclass(frozen=True)
class Window:
    """Some row groups of an epoch, one after the other, and the order of their rows.

    `row_order[i]` is the place, in the concatenated groups, of the window's i-th row.
    """

    row_groups: tuple[int, ...]
    row_order: IntArray


class EpochOrder:
    """The windows of one epoch. Rows are numbered 0 .. num_rows - 1 in the epoch's order."""

    def __init__(
        self,
        group_rows: Sequence[int] | IntArray,
        *,
        window_rows: int,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`group_rows` holds the rows of each row group; a window has at least `window_rows`."""
        self._key = (seed, epoch)
        self._shuffle = shuffle
        self._group_rows = np.asarray(group_rows, dtype=np.int64)
        groups = self._permutation(len(group_rows), _GROUP_STREAM)
        self._windows = _cut(groups, self._group_rows, window_rows)
        self._starts = offsets_of(
            np.array([self._group_rows[window].sum() for window in self._windows], dtype=np.int64)
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """First row of each window, and the number of rows at the end."""
        return tuple(self._starts.tolist())

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return len(self._windows)

    def window(self, number: int) -> Window:
        """The window `number`, with its rows shuffled."""
        num_rows = int(self._starts[number + 1] - self._starts[number])
        return Window(
            row_groups=tuple(int(group) for group in self._windows[number]),
            row_order=self._permutation(num_rows, _ROW_STREAM, number),
        )

    def pieces(self, rows: range) -> list[tuple[int, slice]]:
        """Cut consecutive rows of the epoch at window bounds: (window, slice of its rows)."""
        first, last = np.searchsorted(self._starts, [rows.start, rows.stop - 1], side="right") - 1
        return [
            (
                number,
                slice(
                    max(0, rows.start - int(self._starts[number])),
                    min(rows.stop, int(self._starts[number + 1])) - int(self._starts[number]),
                ),
            )
            for number in range(int(first), int(last) + 1)
        ]

    def _permutation(self, size: int, *stream: int) -> IntArray:
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        return np.random.default_rng([*self._key, *stream]).permutation(size)


def _cut(groups: IntArray, group_rows: IntArray, window_rows: int) -> list[IntArray]:
    """Cut the permuted groups as soon as a window has `window_rows` rows."""
    windows, begin, num_rows = [], 0, 0
    for position, group in enumerate(groups):
        num_rows += int(group_rows[group])
        if num_rows >= window_rows:
            windows.append(groups[begin : position + 1])
            begin, num_rows = position + 1, 0
    if begin < len(groups):
        windows.append(groups[begin:])
    return windows

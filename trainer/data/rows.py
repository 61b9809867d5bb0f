"""Decoded rows in numpy, gathered by row without a Python loop.

`Rows.take` picks rows in any order, all sparse features in one ragged gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, offsets_of, ragged_positions

FloatArray = NDArray[np.float32]
_Values = TypeVar("_Values", IntArray, FloatArray)


@dataclass(frozen=True)
class Rows:
    """n decoded rows. F sparse features, pooled ones before sequences; D dense ones; K labels.

    dense [n, D], label (normalised), offset and scale [n, K], row_weight [n]; `starts` and
    `lengths` [F, n] are the ranges of each feature and row in the flat `ids`; `weights` has one
    for each id, or is None where no feature is weighted. `faults` [n] says which rows are bad, and
    by which number of a `FaultLog`; None where bad rows raise.
    """

    dense: FloatArray
    label: FloatArray
    offset: FloatArray
    scale: FloatArray
    row_weight: FloatArray
    ids: IntArray
    starts: IntArray
    lengths: IntArray
    weights: FloatArray | None = None
    faults: FaultArray | None = None

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: IntArray) -> Rows:
        """Gather `rows` in that order; the ids come out packed feature by feature."""
        lengths = np.empty((len(self.lengths), len(rows)), dtype=np.int64)
        places = [self._places(feature, rows, taken) for feature, taken in enumerate(lengths)]
        return Rows(
            dense=self.dense[rows],
            label=self.label[rows],
            offset=self.offset[rows],
            scale=self.scale[rows],
            row_weight=self.row_weight[rows],
            ids=_gather(self.ids, places),
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
            weights=None if self.weights is None else _gather(self.weights, places),
            faults=None if self.faults is None else self.faults[rows],
        )

    def _places(self, feature: int, rows: IntArray, taken: IntArray) -> tuple[int, IntArray]:
        """Where the ids of one feature of `rows` lie: a start, and places counted from there.

        `taken` [len(rows)] is filled with their numbers.
        """
        starts, lengths = self.starts[feature], self.lengths[feature]
        first = int(starts[0])
        # One id in each row, one after the other, as most features are: no need to count.
        if starts[-1] - first == len(starts) - 1 and (lengths == 1).all():
            taken.fill(1)
            return first, rows
        taken[:] = lengths[rows]
        return first, ragged_positions(starts[rows] - first, taken)

    def slice(self, first: int, stop: int) -> Rows:
        """Rows `first` to `stop` (excluded, at least one) of packed rows, as `take` gives them."""
        begins, last = self.starts[:, first], stop - 1
        ends = self.starts[:, last] + self.lengths[:, last]
        spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
        shifts = offsets_of(ends - begins)[:-1] - begins
        return Rows(
            dense=self.dense[first:stop],
            label=self.label[first:stop],
            offset=self.offset[first:stop],
            scale=self.scale[first:stop],
            row_weight=self.row_weight[first:stop],
            ids=np.concatenate([self.ids[begin:end] for begin, end in spans]),
            starts=self.starts[:, first:stop] + shifts[:, None],
            lengths=self.lengths[:, first:stop],
            weights=None
            if self.weights is None
            else np.concatenate([self.weights[begin:end] for begin, end in spans]),
            faults=None if self.faults is None else self.faults[first:stop],
        )


def _gather(values: _Values, places: Sequence[tuple[int, IntArray]]) -> _Values:
    """Values at places counted from each start, one after the other."""
    gathered = np.empty(sum(len(positions) for _, positions in places), dtype=values.dtype)
    filled = 0
    for start, positions in places:
        # Places are within the values, and with "clip" nothing is copied on the way.
        target = gathered[filled : filled + len(positions)]
        np.take(values[start:], positions, out=target, mode="clip")
        filled += len(positions)
    return gathered


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, one after the other, packed feature by feature."""
    if len(parts) == 1:
        return parts[0]
    bases = offsets_of(np.array([len(part.ids) for part in parts]))
    weights = [part.weights for part in parts if part.weights is not None]
    faults = [part.faults for part in parts if part.faults is not None]
    joined = Rows(
        dense=np.concatenate([part.dense for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        row_weight=np.concatenate([part.row_weight for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        starts=np.concatenate(
            [part.starts + base for part, base in zip(parts, bases, strict=False)], axis=1
        ),
        lengths=np.concatenate([part.lengths for part in parts], axis=1),
        weights=np.concatenate(weights) if weights else None,
        faults=np.concatenate(faults) if faults else None,
    )
    return joined.take(np.arange(len(joined)))

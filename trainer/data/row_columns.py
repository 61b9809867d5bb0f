"""Decoded rows: shuffled a window at once, then cut into batches as slices.

`Rows` holds the same in flat arrays of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, offsets_of
from trainer.data.rows import FloatArray, Rows
from trainer.data.sparse_ids import IdLists, SparseIds, concat_ids


@dataclass(frozen=True)
class RowColumns:
    """n decoded rows; the features of `sparse` are the pooled ones before sequences.

    Other fields are as in `Rows`.
    """

    dense: FloatArray
    label: FloatArray
    offset: FloatArray
    scale: FloatArray
    row_weight: FloatArray
    sparse: SparseIds
    faults: FaultArray | None = None

    def __len__(self) -> int:
        return len(self.label)

    @classmethod
    def of(cls, rows: Rows) -> RowColumns:
        """The same as packed `rows`, as `Rows.take` gives them."""
        ends = np.cumsum(rows.lengths.sum(axis=1))[:-1]
        ids = np.split(rows.ids, ends)
        weights = [None] * len(ids) if rows.weights is None else np.split(rows.weights, ends)
        features = zip(ids, map(offsets_of, rows.lengths), weights, strict=True)
        return cls(
            dense=rows.dense,
            label=rows.label,
            offset=rows.offset,
            scale=rows.scale,
            row_weight=rows.row_weight,
            sparse=SparseIds.of_lists(tuple(IdLists(*parts) for parts in features), len(rows)),
            faults=rows.faults,
        )

    def take(self, rows: IntArray) -> RowColumns:
        """Gather `rows` in that order."""
        return RowColumns(
            dense=self.dense.take(rows, axis=0),
            label=self.label.take(rows, axis=0),
            offset=self.offset.take(rows, axis=0),
            scale=self.scale.take(rows, axis=0),
            row_weight=self.row_weight.take(rows, axis=0),
            sparse=self.sparse.take(rows),
            faults=None if self.faults is None else self.faults[rows],
        )

    def slice(self, first: int, stop: int) -> RowColumns:
        """Rows `first` to `stop` (excluded), without a copy."""
        return RowColumns(
            dense=self.dense[first:stop],
            label=self.label[first:stop],
            offset=self.offset[first:stop],
            scale=self.scale[first:stop],
            row_weight=self.row_weight[first:stop],
            sparse=self.sparse.slice(first, stop),
            faults=None if self.faults is None else self.faults[first:stop],
        )

    def rows(self) -> Rows:
        """The same rows in flat arrays, packed feature by feature."""
        lengths = self.sparse.lengths().astype(np.int64)
        return Rows(
            dense=self.dense,
            label=self.label,
            offset=self.offset,
            scale=self.scale,
            row_weight=self.row_weight,
            ids=self.sparse.packed(),
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
            weights=self.sparse.weights() if self.sparse.is_weighted else None,
            faults=self.faults,
        )


def concat_columns(parts: Sequence[RowColumns]) -> RowColumns:
    """Rows of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    faults = [part.faults for part in parts if part.faults is not None]
    return RowColumns(
        dense=np.concatenate([part.dense for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        row_weight=np.concatenate([part.row_weight for part in parts]),
        sparse=concat_ids([part.sparse for part in parts]),
        faults=np.concatenate(faults) if faults else None,
    )

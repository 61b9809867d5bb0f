"""Decoded rows feature by feature: shuffled a window at once, then cut into batches as slices.

Most features have one id in each row; those need neither lengths nor offsets, which is what makes
this fast. `Rows` holds the same in flat arrays of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, last_items, offsets_of, ragged_positions
from trainer.data.rows import FloatArray, Rows


@dataclass(frozen=True)
class IdColumn:
    """Ids of one feature in n rows.

    Row i has `ids[offsets[i]:offsets[i + 1]]`, offsets [n + 1] beginning with 0; without offsets it
    has one id, `ids[i]`. `weights`, if any, are as many as ids.
    """

    ids: IntArray
    offsets: IntArray | None = None
    weights: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    @property
    def is_single(self) -> bool:
        """Whether each row has one id, without a weight."""
        return self.offsets is None and self.weights is None

    @property
    def lengths(self) -> IntArray:
        """Number of ids in each row."""
        if self.offsets is None:
            return np.ones(len(self.ids), dtype=np.int64)
        return np.diff(self.offsets)

    def take(self, rows: IntArray) -> IdColumn:
        """The ids of `rows`, in that order."""
        if self.offsets is None:
            return self._at(rows, None)
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        return self._at(ragged_positions(starts, lengths), offsets_of(lengths))

    def slice(self, first: int, stop: int) -> IdColumn:
        """The ids of rows `first` to `stop` (excluded), without a copy."""
        if self.offsets is None:
            begin, end, offsets = first, stop, None
        else:
            begin, end = int(self.offsets[first]), int(self.offsets[stop])
            offsets = self.offsets[first : stop + 1] - begin
        weights = None if self.weights is None else self.weights[begin:end]
        return IdColumn(self.ids[begin:end], offsets, weights)

    def last(self, limit: int) -> IdColumn:
        """The last `limit` ids of each row."""
        if self.offsets is None or (np.diff(self.offsets) <= limit).all():
            return self
        starts, lengths = last_items(self.offsets, limit)
        return self._at(ragged_positions(starts, lengths), offsets_of(lengths))

    def _at(self, places: IntArray, offsets: IntArray | None) -> IdColumn:
        weights = None if self.weights is None else self.weights.take(places)
        return IdColumn(self.ids.take(places), offsets, weights)

    @property
    def some_weights(self) -> FloatArray:
        """A weight for each id, 1 where there are none."""
        return np.ones(len(self.ids), np.float32) if self.weights is None else self.weights


@dataclass(frozen=True)
class RowColumns:
    """n decoded rows; `features` are the sparse ones, pooled before sequences.

    Other fields are as in `Rows`.
    """

    dense: FloatArray
    label: FloatArray
    offset: FloatArray
    scale: FloatArray
    row_weight: FloatArray
    features: tuple[IdColumn, ...]
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
            features=tuple(IdColumn(*parts) for parts in features),
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
            features=self._features(rows),
            faults=None if self.faults is None else self.faults[rows],
        )

    def _features(self, rows: IntArray) -> tuple[IdColumn, ...]:
        """Those of `rows`; one block for all single ids, as many small ones cost page faults."""
        singles = [feature.is_single for feature in self.features]
        blocks = iter(np.empty((sum(singles), len(rows)), dtype=np.int64))
        return tuple(
            # Row numbers are valid, and with "clip" nothing is buffered on the way to `out`.
            IdColumn(np.take(feature.ids, rows, out=next(blocks), mode="clip"))
            if is_single
            else feature.take(rows)
            for feature, is_single in zip(self.features, singles, strict=True)
        )

    def slice(self, first: int, stop: int) -> RowColumns:
        """Rows `first` to `stop` (excluded), without a copy."""
        return RowColumns(
            dense=self.dense[first:stop],
            label=self.label[first:stop],
            offset=self.offset[first:stop],
            scale=self.scale[first:stop],
            row_weight=self.row_weight[first:stop],
            features=tuple(feature.slice(first, stop) for feature in self.features),
            faults=None if self.faults is None else self.faults[first:stop],
        )

    def rows(self) -> Rows:
        """The same rows in flat arrays, packed feature by feature."""
        lengths = np.stack([feature.lengths for feature in self.features])
        is_weighted = any(feature.weights is not None for feature in self.features)
        weights = [feature.some_weights for feature in self.features] if is_weighted else None
        return Rows(
            dense=self.dense,
            label=self.label,
            offset=self.offset,
            scale=self.scale,
            row_weight=self.row_weight,
            ids=np.concatenate([feature.ids for feature in self.features]),
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
            weights=np.concatenate(weights) if weights else None,
            faults=self.faults,
        )


def concat_columns(parts: Sequence[RowColumns]) -> RowColumns:
    """Rows of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    faults = [part.faults for part in parts if part.faults is not None]
    by_feature = zip(*(part.features for part in parts), strict=True)
    return RowColumns(
        dense=np.concatenate([part.dense for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        row_weight=np.concatenate([part.row_weight for part in parts]),
        features=tuple(_concat_ids(columns) for columns in by_feature),
        faults=np.concatenate(faults) if faults else None,
    )


def _concat_ids(parts: Sequence[IdColumn]) -> IdColumn:
    weights = [part.weights for part in parts if part.weights is not None]
    is_ragged = any(part.offsets is not None for part in parts)
    lengths = [part.lengths for part in parts] if is_ragged else None
    return IdColumn(
        ids=np.concatenate([part.ids for part in parts]),
        offsets=offsets_of(np.concatenate(lengths)) if lengths else None,
        weights=np.concatenate(weights) if weights else None,
    )

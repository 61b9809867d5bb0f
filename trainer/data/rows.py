"""Decoded rows in numpy, gathered by row without a Python loop.

`Rows.take` picks rows in any order, all sparse features in one ragged gather.

Most features have one id in each row; theirs lie row by row in one matrix, so that shuffling
fetches a row's ids together, and a batch transposes what it holds. Those of other features lie
feature by feature. torch is imported by the first list that is shuffled: a coordinator and a driver
read the splits, too, and need none.

`Rows` holds the same in flat arrays of all features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, last_items, offsets_of, ragged_positions

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float32]


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
        lengths = self.lengths[:, rows]
        flat = ragged_positions(self.starts[:, rows].ravel(), lengths.ravel())
        return Rows(
            dense=self.dense[rows],
            label=self.label[rows],
            offset=self.offset[rows],
            scale=self.scale[rows],
            row_weight=self.row_weight[rows],
            ids=self.ids[flat],
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
            weights=None if self.weights is None else self.weights[flat],
            faults=None if self.faults is None else self.faults[rows],
        )


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


# Ids of sparse features in many rows, laid out to be shuffled and cut into batches fast.

IdMatrix = NDArray[Any]


@dataclass(frozen=True)
class IdLists:
    """Ids of one feature in n rows.

    Row i has `ids[offsets[i]:offsets[i + 1]]`, offsets [n + 1] beginning with 0. `weights`, if
    any, are as many as ids.
    """

    ids: IntArray
    offsets: IntArray
    weights: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Number of ids in each row."""
        return np.diff(self.offsets)

    def take(self, rows: IntArray) -> IdLists:
        """The ids of `rows`, in that order."""
        import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
        import torch

        lengths, ids, weights = torch.ops.fbgemm.permute_1D_sparse_data(
            torch.from_numpy(rows.astype(np.int32)),
            torch.from_numpy(self.lengths),
            _tensor_of(self.ids),
            None if self.weights is None else _tensor_of(self.weights),
            None,
        )
        offsets = offsets_of(lengths.numpy())
        return IdLists(ids.numpy(), offsets, None if weights is None else weights.numpy())

    def slice(self, first: int, stop: int) -> IdLists:
        """The ids of rows `first` to `stop` (excluded), without a copy."""
        begin, end = int(self.offsets[first]), int(self.offsets[stop])
        weights = None if self.weights is None else self.weights[begin:end]
        return IdLists(self.ids[begin:end], self.offsets[first : stop + 1] - begin, weights)

    def last(self, limit: int) -> IdLists:
        """The last `limit` ids of each row."""
        if (self.lengths <= limit).all():
            return self
        starts, lengths = last_items(self.offsets, limit)
        places = ragged_positions(starts, lengths)
        weights = None if self.weights is None else self.weights.take(places)
        return IdLists(self.ids.take(places), offsets_of(lengths), weights)

    @property
    def some_weights(self) -> FloatArray:
        """A weight for each id, 1 where there are none."""
        return np.ones(len(self.ids), np.float32) if self.weights is None else self.weights


@dataclass(frozen=True)
class SparseIds:
    """Ids of F features in n rows, in the order of `is_single` [F].

    Features with one id in each row are the columns of `singles` [n, S], int32 where their tables
    allow it, as narrow ids are shuffled faster; all others are in `lists`.
    """

    is_single: tuple[bool, ...]
    singles: IdMatrix
    lists: tuple[IdLists, ...]

    @classmethod
    def of_lists(cls, lists: tuple[IdLists, ...], num_rows: int) -> SparseIds:
        """Features with any number of ids in each of `num_rows` rows."""
        return cls((False,) * len(lists), np.empty((num_rows, 0), np.int64), lists)

    @property
    def is_weighted(self) -> bool:
        """Whether any feature has weights."""
        return any(lists.weights is not None for lists in self.lists)

    def take(self, rows: IntArray) -> SparseIds:
        """Gather `rows` in that order."""
        lists = tuple(lists.take(rows) for lists in self.lists)
        return SparseIds(self.is_single, self.singles.take(rows, axis=0), lists)

    def slice(self, first: int, stop: int) -> SparseIds:
        """Rows `first` to `stop` (excluded), without a copy."""
        lists = tuple(lists.slice(first, stop) for lists in self.lists)
        return SparseIds(self.is_single, self.singles[first:stop], lists)

    def first(self, count: int) -> SparseIds:
        """The first `count` features."""
        singles = sum(self.is_single[:count])
        lists = self.lists[: count - singles]
        return SparseIds(self.is_single[:count], self.singles[:, :singles], lists)

    def after(self, count: int) -> SparseIds:
        """The features after the first `count`."""
        singles = sum(self.is_single[:count])
        lists = self.lists[count - singles :]
        return SparseIds(self.is_single[count:], self.singles[:, singles:], lists)

    def packed(self) -> IntArray:
        """All ids, feature by feature."""
        parts = [run.ids if isinstance(run, IdLists) else run for run in self._runs()]
        ids = np.empty(sum(part.size for part in parts), dtype=np.int64)
        begin = 0
        for part in parts:
            # Transposed and widened in one pass.
            np.copyto(ids[begin : begin + part.size].reshape(part.shape), part)
            begin += part.size
        return ids

    def weights(self) -> FloatArray:
        """A weight for each of the `packed` ids, 1 where there are none."""
        parts = [
            run.some_weights if isinstance(run, IdLists) else np.ones(run.size, np.float32)
            for run in self._runs()
        ]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def lengths(self) -> NDArray[np.int32]:
        """Number of ids of each feature and row [F, n]."""
        lengths = np.ones((len(self.is_single), len(self.singles)), dtype=np.int32)
        places = [place for place, is_single in enumerate(self.is_single) if not is_single]
        for place, lists in zip(places, self.lists, strict=True):
            np.subtract(lists.offsets[1:], lists.offsets[:-1], out=lengths[place], casting="unsafe")
        return lengths

    def _runs(self) -> Iterator[IdMatrix | IdLists]:
        """Neighbouring single features as a matrix [run, n], each other feature by itself."""
        column, lists = 0, iter(self.lists)
        for is_single, run in groupby(self.is_single):
            size = len(list(run))
            if is_single:
                yield self.singles[:, column : column + size].T
                column += size
            else:
                yield from islice(lists, size)


def concat_ids(parts: Sequence[SparseIds]) -> SparseIds:
    """Ids of several parts, one after the other; all have the same features."""
    by_feature = zip(*(part.lists for part in parts), strict=True)
    return SparseIds(
        is_single=parts[0].is_single,
        singles=np.concatenate([part.singles for part in parts]),
        lists=tuple(concat_lists(lists) for lists in by_feature),
    )


def concat_lists(parts: Sequence[IdLists]) -> IdLists:
    """Lists of several parts, one after the other; of no parts, those of no rows."""
    if len(parts) == 1:
        return parts[0]
    nothing = np.empty(0, np.int64)
    weights = [part.weights for part in parts if part.weights is not None]
    return IdLists(
        ids=np.concatenate([nothing, *(part.ids for part in parts)]),
        offsets=offsets_of(np.concatenate([nothing, *(part.lengths for part in parts)])),
        weights=np.concatenate(weights) if weights else None,
    )


def _tensor_of(values: NDArray) -> torch.Tensor:
    """The same memory, to be read only: what Arrow has decoded must not be written to."""
    import torch

    return torch.from_dlpack(pa.array(values))


# Decoded rows: shuffled a window at once, then cut into batches as slices.


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

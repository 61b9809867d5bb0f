"""Decoded rows in numpy: shuffled a window at once, then cut into batches as slices, or picked.

Most features have one id in each row; theirs lie row by row in one matrix, so that shuffling
fetches a row's ids together, and a batch transposes what it holds. Those of other features lie
feature by feature. torch is imported by the first list that is shuffled: a coordinator and a driver
read the splits, too, and need none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, offsets_of, ragged_positions

if TYPE_CHECKING:
    import torch

_FEW_SHARE = 0.04  # of the rows: so few are picked one by one
FloatArray = NDArray[np.float32]
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
        return np.diff(self.offsets)

    def take(self, rows: IntArray) -> IdLists:
        if len(rows) < _FEW_SHARE * len(self):  # else it pays to go through all lengths
            starts = self.offsets.take(rows)
            return self._at(starts, self.offsets.take(rows + 1) - starts)
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
        begin, end = int(self.offsets[first]), int(self.offsets[stop])
        weights = None if self.weights is None else self.weights[begin:end]
        return IdLists(self.ids[begin:end], self.offsets[first : stop + 1] - begin, weights)

    def last(self, limit: int) -> IdLists:
        if (self.lengths <= limit).all():
            return self
        lengths = np.minimum(self.lengths, limit)
        return self._at(self.offsets[1:] - lengths, lengths)

    def _at(self, starts: IntArray, lengths: IntArray) -> IdLists:
        """The lists of these lengths that start there."""
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

    def take(self, rows: IntArray) -> SparseIds:
        lists = tuple(lists.take(rows) for lists in self.lists)
        return SparseIds(self.is_single, self.singles.take(rows, axis=0), lists)

    def slice(self, first: int, stop: int) -> SparseIds:
        """Rows `first` to `stop` (excluded), without a copy."""
        lists = tuple(lists.slice(first, stop) for lists in self.lists)
        return SparseIds(self.is_single, self.singles[first:stop], lists)

    def split(self, count: int) -> tuple[SparseIds, SparseIds]:
        """The first `count` features, and those after them."""
        kinds, singles = self.is_single, sum(self.is_single[:count])
        lists = count - singles
        return (
            SparseIds(kinds[:count], self.singles[:, :singles], self.lists[:lists]),
            SparseIds(kinds[count:], self.singles[:, singles:], self.lists[lists:]),
        )

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


def concat_lists(parts: Sequence[IdLists]) -> IdLists:
    """Lists of several parts, one after the other; all or none have weights."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.weights for part in parts if part.weights is not None]
    return IdLists(
        ids=np.concatenate([part.ids for part in parts]),
        offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
        weights=np.concatenate(weights) if weights else None,
    )


def _tensor_of(values: NDArray) -> torch.Tensor:
    """The same memory, to be read only: what Arrow has decoded must not be written to."""
    import torch

    return torch.from_dlpack(pa.array(values))


@dataclass(frozen=True)
class Rows:
    """n decoded rows: D dense features, K labels.

    dense [n, D], label (normalised), offset and scale [n, K], row_weight [n]; the features of
    `sparse` are the pooled ones before sequences. `faults` [n] says which rows are bad, and by
    which number of a `FaultLog`; None where bad rows raise.
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

    def take(self, rows: IntArray) -> Rows:
        arrays = {name: array.take(rows, axis=0) for name, array in self.arrays.items()}
        return replace(self, sparse=self.sparse.take(rows), **arrays)

    def slice(self, first: int, stop: int) -> Rows:
        """Rows `first` to `stop` (excluded), without a copy."""
        arrays = {name: array[first:stop] for name, array in self.arrays.items()}
        return replace(self, sparse=self.sparse.slice(first, stop), **arrays)

    @property
    def arrays(self) -> dict[str, NDArray]:
        """All but the ids, by field, each with one entry per row."""
        found = {name: array for name, array in vars(self).items() if array is not None}
        del found["sparse"]
        return found


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, one after the other; all have the same fields and features."""
    if len(parts) == 1:
        return parts[0]
    arrays = {
        name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays
    }
    ids = [part.sparse for part in parts]
    sparse = SparseIds(
        is_single=ids[0].is_single,
        singles=np.concatenate([each.singles for each in ids]),
        lists=tuple(map(concat_lists, zip(*(each.lists for each in ids), strict=True))),
    )
    return replace(parts[0], sparse=sparse, **arrays)

"""Rows of a shard, wherever they are: in one tensor, or in a table behind a cache.

    FlatRows     a tensor [n, ...], in HBM or host memory
    CachedRows   a table of kernel `fused_uvm_caching`: in host memory that the GPU can address, its
                 most recently used rows in HBM

FBGEMM moves the rows that a forward pass looks up into the cache, as far as they have room there,
and back when others need it. A row that is cached counts there alone, whatever the table holds; all
others count in the table. So a row is read and written where it is at that moment. Nothing moves by
it, and the slots that FBGEMM found for a batch stay right. Who works on whole tables flushes first,
and drops the caches where it wrote (`TwoDParallel.flush_caches`). Optimizer state is never cached:
FBGEMM keeps that of rows in HBM and that of elements in host memory.
"""

from __future__ import annotations

from typing import Protocol

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)


class RowStore(Protocol):
    """Rows of a tensor [n, ...], by their numbers int64 [k]; None stands for all."""

    @property
    def tensor(self) -> torch.Tensor:
        """Their shape, dtype and device; what it holds may be out of date."""

    def part(self, rows: slice) -> RowStore:
        """Some of the rows, numbered from 0."""

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rows [k, ...], in `out` if given; where all are asked for, perhaps live."""

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Set the rows, each named once, to `values` [k, ...]."""


class FlatRows:
    """The rows of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def part(self, rows: slice) -> FlatRows:
        return FlatRows(self.tensor[rows])

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rows is not None:
            return torch.index_select(self.tensor, 0, rows, out=out)
        return self.tensor if out is None else out.copy_(self.tensor)

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        if rows is None:
            self.tensor.copy_(values)
        else:
            self.tensor.index_copy_(0, rows, values)


class CachedRows:
    """Rows of a table behind the cache of its kernel, whose cached tables have their rows numbered
    one after the other; that of the first is `first`.

    Writes, and forward passes, come from one thread. Another one may read meanwhile, on the same
    stream: rows that forward passes move between its operations are read again. (What comes back to
    its old slot is not seen to have moved; that takes two passes that fill a set of 32 slots.)
    """

    def __init__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, tensor: torch.Tensor, first: int
    ) -> None:
        self.tensor = tensor
        self._kernel = kernel
        self._first = first
        # The rows of the widest cached table fill a row of the cache.
        self._cache = kernel.lxu_cache_weights[:, : tensor.shape[1]]
        assert self._cache.dtype == tensor.dtype, "TorchRec caches rows in the table's precision"

    def part(self, rows: slice) -> CachedRows:
        start, _, _ = rows.indices(len(self.tensor))
        return CachedRows(self._kernel, self.tensor[rows], self._first + start)

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self._all() if rows is None else rows
        if out is None:
            out = self.tensor.new_empty(rows.numel(), self.tensor.shape[1])
        places = torch.arange(rows.numel(), device=rows.device)
        while places.numel():
            wanted = rows[places]
            slots = self._slots(wanted)
            is_cached = slots >= 0
            out.index_copy_(0, places[is_cached], self._cache[slots[is_cached]])
            out.index_copy_(0, places[~is_cached], self.tensor[wanted[~is_cached]])
            places = places[self._slots(wanted) != slots]
        return out

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        rows = self._all() if rows is None else rows
        values = values.to(self.tensor.device)
        slots = self._slots(rows)
        is_cached = slots >= 0
        self._cache.index_copy_(0, slots[is_cached], values[is_cached])
        self.tensor.index_copy_(0, rows[~is_cached], values[~is_cached])

    def _slots(self, rows: torch.Tensor) -> torch.Tensor:
        """Which row of the cache holds each of `rows`, int64 [k]; -1 where none does."""
        # On CUDA only: for the CPU FBGEMM has an operator of that name that answers at random.
        slots: torch.Tensor = torch.ops.fbgemm.lxu_cache_lookup(
            rows + self._first, self._kernel.lxu_cache_state, self._kernel.total_cache_hash_size
        )
        return slots.long()

    def _all(self) -> torch.Tensor:
        return torch.arange(len(self.tensor), device=self.tensor.device)


def weight_rows(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, index: int, weight: torch.Tensor
) -> RowStore:
    """The rows of table number `index` of `kernel`, whose weights [rows, columns] are `weight`."""
    if kernel.weights_physical_placements[index] != EmbeddingLocation.MANAGED_CACHING:
        return FlatRows(weight)
    feature = kernel.feature_table_map.index(index)
    return CachedRows(kernel, weight, int(kernel.cache_hash_size_cumsum[feature]))

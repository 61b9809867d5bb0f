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

import functools
import logging
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

logger = logging.getLogger(__name__)


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
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def part(self, rows: slice) -> FlatRows:
        return FlatRows(self.tensor[rows])

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rows is None:
            return self.tensor if out is None else out.copy_(self.tensor)
        if kernels := self.kernels(*([] if out is None else [out])):
            if out is None:
                out = self.tensor.new_empty(len(rows), *self.tensor.shape[1:])
            kernels.gather(self.tensor, rows, out)
            return out
        return torch.index_select(self.tensor, 0, rows, out=out)

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        if rows is None:
            self.tensor.copy_(values)
        elif self.tensor.is_cuda:
            self.tensor.index_copy_(0, rows, values)
        else:  # where that copies element by element
            assert values.dtype == self.tensor.dtype, "items are bytes, which are not converted"
            assert values.shape == (len(rows), *self.tensor.shape[1:]), "an item for each row"
            _as_items(self.tensor)[rows.numpy()] = _as_items(values)

    def move(self, rows: torch.Tensor, snapshot: torch.Tensor, mean: torch.Tensor) -> bool:
        """Set the rows to mean + (row - snapshot) in one pass, where a kernel can; whether it did.

        The arithmetic is that of `trainer.parallel.sync.apply_difference`.
        """
        if kernels := self.kernels(snapshot, mean):
            kernels.land(self.tensor, rows, snapshot, mean)
        return kernels is not None

    def kernels(self, *values: torch.Tensor) -> ModuleType | None:
        """`trainer.parallel.row_kernels`, where they take single rows of this tensor."""
        kernels = _row_kernels(self.tensor.device) if self.tensor.is_cuda else None
        return kernels if kernels and kernels.can_take(self.tensor, *values) else None


@functools.cache
def _row_kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, after a trial; None, with a warning, where they cannot be compiled."""
    try:
        # Only torch's build for CUDA brings Triton along.
        from trainer.parallel import row_kernels

        trial = torch.zeros(2, 1, device=device)
        row_kernels.gather(trial, torch.zeros(1, dtype=torch.int64, device=device), trial[1:])
    except Exception as error:  # whatever it is, PyTorch's kernels do as well
        logger.warning(
            "syncs take PyTorch's kernels, which are slower, as Triton cannot compile its own on "
            "this host: install a C compiler (gcc) on the hosts of workers, and let "
            "TRITON_CACHE_DIR name a folder that they may write to: %s",
            error,
        )
        return None
    return row_kernels


def _as_items(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """A tensor [n, ...] in host memory, of at least an element: n items, a row's bytes each."""
    rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
    in_bytes = rows.view(torch.uint8).numpy()
    return in_bytes.view(np.dtype((np.void, in_bytes.shape[1])))[:, 0]


class CachedRows:
    """Rows of a table behind the cache of its kernel, whose cached tables have their rows numbered
    one after the other; that of the first is `first`.

    Writes, forward passes and reads of single rows come from one thread, and never read a size on
    the host. Another thread may read all rows meanwhile, on the same stream: those that forward
    passes move between its operations are read again. (What comes back to its old slot is not seen
    to have moved; that takes two passes that fill a set of 32 slots.)
    """

    def __init__(
        self, kernel: SplitTableBatchedEmbeddingBagsCodegen, tensor: torch.Tensor, first: int
    ) -> None:
        self.tensor = tensor
        self._kernel = kernel
        self.first = first
        # The rows of the widest cached table fill a row of the cache.
        self._cache = kernel.lxu_cache_weights[:, : tensor.shape[1]]
        assert self._cache.dtype == tensor.dtype, "TorchRec caches rows in the table's precision"

    def part(self, rows: slice) -> CachedRows:
        start, _, _ = rows.indices(len(self.tensor))
        return CachedRows(self._kernel, self.tensor[rows], self.first + start)

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rows is not None:
            return self.at(self.slots(rows + self.first), rows, self.tensor, out)
        if out is None:
            out = torch.empty_like(self.tensor)
        places = self._all()
        while places.numel():
            linear = places + self.first
            slots = self.slots(linear)
            out.index_copy_(0, places, self.at(slots, places, self.tensor))
            places = places[self.slots(linear) != slots]
        return out

    def at(
        self,
        slots: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rows [k, ...] in these `slots` of the cache, or with these numbers in `table`."""
        is_cached = slots >= 0
        # In the stead of what is in the other place one row is read, which is quick.
        in_table = table.index_select(0, torch.where(is_cached, 0, rows))
        in_cache = self._cache.index_select(0, slots.clamp(min=0))
        return torch.where(is_cached[:, None], in_cache, in_table, out=out)

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        rows = self._all() if rows is None else rows
        values = values.to(self.tensor.device)
        slots = self.slots(rows + self.first)
        is_cached = slots >= 0
        _write_some(self._cache, slots, values, is_cached)
        _write_some(self.tensor, rows, values, ~is_cached)

    def slots(self, linear: torch.Tensor) -> torch.Tensor:
        """Which row of the cache holds each row, int64 [k], by its number there; -1 if none."""
        # On CUDA only: for the CPU FBGEMM has an operator of that name that answers at random.
        slots: torch.Tensor = torch.ops.fbgemm.lxu_cache_lookup(
            linear, self._kernel.lxu_cache_state, self._kernel.total_cache_hash_size
        )
        return slots.long()

    def _all(self) -> torch.Tensor:
        return torch.arange(len(self.tensor), device=self.tensor.device)


def _write_some(
    tensor: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, is_meant: torch.Tensor
) -> None:
    """Set those of `rows` that are meant, without reading on the host how many there are.

    The others repeat the first that is, or where none is write to a row what it holds.
    """
    if not rows.numel():
        return
    first = is_meant.int().argmax(0, keepdim=True)
    is_any = is_meant.index_select(0, first)
    place = torch.where(is_any, rows.index_select(0, first), 0)
    held = tensor.index_select(0, place)
    value = torch.where(is_any[:, None], values.index_select(0, first), held)
    tensor.index_copy_(
        0,
        torch.where(is_meant, rows, place),
        torch.where(is_meant[:, None], values, value),
    )


class JoinedRows:
    """Rows of one table, or of several in one storage, by numbers over all of them.

    Those of table i begin at `first[i]`. They are read at once, whatever tables they are of, and
    may be written where each begins at a multiple of their width and none is cached, or where
    there is one table.
    """

    def __init__(self, stores: Sequence[RowStore], first: Sequence[int]) -> None:
        tensors = [store.tensor for store in stores]
        self.tensor = tensors[0]
        self._only = (stores[0], first[0]) if len(stores) == 1 else None
        width = self.width = self.tensor[0].numel()
        offsets = [tensor.storage_offset() for tensor in tensors]
        # Tables of other widths may lie between, so rows are counted in what divides them all.
        unit = math.gcd(width, *offsets)
        num_elements = self.tensor.untyped_storage().nbytes() // self.tensor.itemsize
        self._rows = self.tensor.as_strided(
            ((num_elements - width) // unit + 1, *self.tensor.shape[1:]),
            (unit, *self.tensor.stride()[1:]),
            0,
        )
        self._step = width // unit
        device = self.tensor.device
        self._first = torch.tensor(first, device=device)
        starts = zip(offsets, first, strict=True)
        self._starts = torch.tensor([o // unit - f * self._step for o, f in starts], device=device)
        cached = [store for store in stores if isinstance(store, CachedRows)]
        self._cached = cached[0] if cached else None
        self._linear = torch.tensor(
            [store.first - f for store, f in zip(cached, first, strict=False)], device=device
        )

    @staticmethod
    def are_alike(stores: Sequence[RowStore], others: Sequence[RowStore]) -> bool:
        """Whether rows of both can be written at once, each of `stores` with that of `others`."""
        pairs = list(zip(stores, others, strict=False))
        return len(stores) == len(others) and all(
            isinstance(each, FlatRows)
            and each.tensor.numel()
            and each.tensor.storage_offset() % each.tensor[0].numel() == 0
            and each.tensor.shape[1:] == pair[0].tensor.shape[1:]
            and each.tensor.untyped_storage().data_ptr()
            == pair[0].tensor.untyped_storage().data_ptr()
            for pair in pairs
            for each in pair
        )

    def part(self, rows: slice) -> RowStore:
        raise TypeError("rows of several tables have numbers, and are not those of a range")

    def read(
        self, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert rows is not None, "rows of several tables are named by their numbers"
        store, places = self.placed(rows)
        if store is not self:
            return store.read(places, out)
        assert self._cached
        table, places = self._places(rows)
        slots = self._cached.slots(rows + self._linear[table])
        return self._cached.at(slots, places, self._rows, out)

    def write(self, values: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        assert rows is not None, "rows of several tables are named by their numbers"
        store, places = self.placed(rows)
        assert store is not self, "rows of several tables are written where none is cached"
        store.write(values, places)

    def placed(self, numbers: torch.Tensor) -> tuple[RowStore, torch.Tensor]:
        """A store of these rows and their numbers there, for who reads or writes them often.

        Rows of several tables of which some are cached stay as they are.
        """
        if self._only is not None:
            store, first = self._only
            return store, numbers - first
        if self._cached is not None:
            return self, numbers
        return FlatRows(self._rows), self._places(numbers)[1]

    def _places(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, row of `_rows`) of each number."""
        table = torch.searchsorted(self._first, numbers, right=True) - 1
        return table, numbers * self._step + self._starts[table]


def weight_rows(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, index: int, weight: torch.Tensor
) -> RowStore:
    """The rows of table number `index` of `kernel`, whose weights [rows, columns] are `weight`."""
    if kernel.weights_physical_placements[index] != EmbeddingLocation.MANAGED_CACHING:
        return FlatRows(weight)
    feature = kernel.feature_table_map.index(index)
    return CachedRows(kernel, weight, int(kernel.cache_hash_size_cumsum[feature]))

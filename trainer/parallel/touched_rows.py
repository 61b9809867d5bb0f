"""Which rows the lookups touched since the last sync, and what the replicas last agreed on.

A fused optimizer changes the rows that were looked up and no others. So after a sync the replicas
of a shard differ only in rows that some replica looked up since, and averaging those is the whole
work. Every row of this rank's shards has a number (`RowNumbers`), and one bit says whether it was
touched; hooks on the FBGEMM kernels set the bits, and `unite` forms the union over the replicas.

Changes that travel in bf16 or fp16 need their base. `RowBase` saves a row's values when it is first
touched in a window, before they change; a row that this rank did not touch still holds them.
`TableBase` keeps a second copy of every table instead, for mode full: as much memory as the tables
(and their element-wise moments) take. Only fp32 matrices travel as changes: tables and element-wise
moments. Moments travel in bf16 even where weights travel in fp16, whose range squared gradients
leave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from trainer.parallel.collectives import Block, ReplicaCollectives
from trainer.parallel.model import TableShard
from trainer.parallel.row_store import RowStore


class RowNumbers:
    """Numbers the rows of all shards of this rank: shard by shard, rows in order.

    A rank's column shards of one table are shards of their own here, with rows of their own.
    """

    def __init__(self, shards: Sequence[TableShard], device: torch.device) -> None:
        self.shards = list(shards)
        self.device = device
        sizes = [shard.weight.shape[0] for shard in self.shards]
        self.first = [0, *accumulate(sizes)][:-1]
        self.num_rows = sum(sizes)
        self._ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int64, device=device)

    def by_shard(self, numbers: torch.Tensor) -> Iterator[tuple[TableShard, torch.Tensor]]:
        """(shard, its local rows) of sorted row `numbers`, int64 [n]; empty ones left out."""
        start = 0
        ends = torch.searchsorted(numbers, self._ends).tolist()
        for shard, first, end in zip(self.shards, self.first, ends, strict=True):
            if end > start:
                yield shard, numbers[start:end] - first
            start = end

    def density(self, rows: torch.Tensor | None) -> float:
        """The share of all rows that `rows` are; None stands for all."""
        return 1.0 if rows is None else rows.numel() / max(1, self.num_rows)


def looked_up(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows that `indices` [n] mean, int64 [n], counted over the tables of `kernel` in order.

    `offsets` [features * B + 1] bound the bags, feature by feature, B bags each.
    """
    if not indices.numel():
        return indices.long()
    feature_starts = kernel.hash_size_cumsum[:-1]
    bounds = offsets[:: (offsets.numel() - 1) // feature_starts.numel()]
    starts = feature_starts.repeat_interleave(bounds.diff(), output_size=indices.numel())
    return indices + starts


class TouchedRows:
    """One bit for each row of this rank, set when a training step looks the row up.

    `on_first_touch` gets the row numbers (int64, sorted) of rows about to change for the first
    time since `clear`, while they still hold their old values.
    """

    def __init__(
        self, numbers: RowNumbers, on_first_touch: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.bits = torch.zeros(numbers.num_rows, dtype=torch.bool, device=numbers.device)
        self._on_first_touch = on_first_touch
        self._hooks = [
            # Afterwards, since FBGEMM first repairs indices that are out of range.
            shard.kernel.register_forward_hook(
                functools.partial(self._mark_lookups, first), with_kwargs=True
            )
            for shard, first in zip(numbers.shards, numbers.first, strict=True)
            if shard.kernel_index == 0  # the tables of a kernel follow each other
        ]

    def _mark_lookups(
        self, first: int, kernel: Any, args: Any, inputs: dict[str, Any], out: Any
    ) -> None:
        if not (kernel.training and torch.is_grad_enabled()):
            return
        assert inputs.get("batch_size_per_feature_per_rank") is None, "batches are of one size"
        with torch.no_grad():
            numbers = first + looked_up(kernel, inputs["indices"], inputs["offsets"])
            if self._on_first_touch is not None:
                fresh = numbers[~self.bits[numbers]].unique()
                if fresh.numel():
                    self._on_first_touch(fresh)
            self.bits.index_fill_(0, numbers, True)

    def clear(self) -> None:
        self.bits.zero_()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def unite(bits: torch.Tensor, replicas: ReplicaCollectives) -> None:
    """Make `bits`, bool [n], those that any replica has set. Collective.

    Each of the M replicas unites 1/M of them and hands that to the others. Packed, this sends
    2 (M - 1) / M * n / 8 bytes whatever is set, and nothing is read on the host.
    """
    if not bits.numel():
        return
    parts = replicas.exchange(pack_bits(bits, replicas.num_replicas)).unbind(0)
    united = replicas.gather(functools.reduce(torch.bitwise_or, parts))
    bits.copy_(unpack_bits(united.view(-1), bits.numel()))


def pack_bits(bits: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """bool [n] as uint8 [ceil(n / 8)], or more up to a `multiple`: place p is bit p % 8 of byte
    p // 8."""
    padding = bits.new_zeros(-bits.numel() % (8 * multiple))
    columns = torch.cat([bits, padding]).view(torch.uint8).view(-1, 8).unbind(1)
    packed = torch.zeros_like(columns[0])
    for bit, column in enumerate(columns):
        packed |= column << bit
    return packed


def unpack_bits(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """What `pack_bits` packed, bool [num_bits]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).view(torch.bool).view(-1)[:num_bits]


class SyncBase:
    """Makes blocks that know what the replicas last agreed on.

    This one is for tensors that all travel as they are, so nothing needs to be kept.
    """

    def block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """The `rows` of a tensor of a shard, ready to travel."""
        return Block(store, rows)

    def landed(self, blocks: Sequence[Block]) -> None:
        """The replicas now agree on the bases of `blocks`, found after their snapshot."""

    def begin_window(self) -> None:
        """The blocks of a sync are made: what is touched from here on belongs to the next."""

    def renew(self) -> None:
        """All rows are equal on all replicas now, whatever happened to them."""
        self.begin_window()


def wires(
    shards: Sequence[TableShard], weight_wire: torch.dtype, include_moments: bool
) -> dict[int, tuple[RowStore, torch.dtype]]:
    """Tensors of `shards` that travel as changes, each with its dtype on the way, by address."""
    found = [(shard.rows[0], weight_wire) for shard in shards]
    if include_moments:
        moments = (moment for shard in shards for moment in shard.rows[1:])
        found += [(moment, torch.bfloat16) for moment in moments]
    return {
        store.tensor.data_ptr(): (store, wire)
        for store, wire in found
        if store.tensor.dtype == torch.float32 and store.tensor.dim() == 2 and store.tensor.numel()
    }


class RowBase(SyncBase):
    """Bases of the rows touched in this window."""

    def __init__(
        self, numbers: RowNumbers, tensors: dict[int, tuple[RowStore, torch.dtype]]
    ) -> None:
        self._numbers = numbers
        self._tensors = tensors
        self._saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def save(self, row_numbers: torch.Tensor) -> None:
        """Save the values of rows (int64, sorted numbers) that are about to change."""
        for shard, rows in self._numbers.by_shard(row_numbers):
            for store in shard.rows:
                key = store.tensor.data_ptr()
                if key in self._tensors:
                    self._saved.setdefault(key, []).append((rows, store.read(rows)))

    def block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """The `rows` of a tensor of a shard; they must hold all that were touched."""
        key = store.tensor.data_ptr()
        _, wire = self._tensors.get(key, (store, None))
        if wire is None:
            return Block(store, rows)
        assert rows is not None, "rows of tables that travel as changes are always listed"
        base = store.read(rows)
        for saved_rows, values in self._saved.get(key, []):
            base[torch.searchsorted(rows, saved_rows)] = values
        return Block(store, rows, base, wire)

    def landed(self, blocks: Sequence[Block]) -> None:
        """Rows touched between a round's snapshot and its landing have its mean as their base."""
        for block in blocks:
            if block.base is None or block.rows is None:
                continue
            for saved_rows, values in self._saved.get(block.tensor.data_ptr(), []):
                place = torch.searchsorted(block.rows, saved_rows)
                place.clamp_(max=block.num_rows - 1)
                hit = block.rows[place] == saved_rows
                values[hit] = block.base[place[hit]]

    def begin_window(self) -> None:
        self._saved.clear()


class TableBase(SyncBase):
    """Bases of whole tables, as second copies: blocks have views of these, which get the means."""

    def __init__(self, tensors: dict[int, tuple[RowStore, torch.dtype]]) -> None:
        self._tensors = tensors
        self._copies = {key: torch.empty_like(each.tensor) for key, (each, _) in tensors.items()}
        self.renew()

    def block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """All rows of a tensor of a shard."""
        key = store.tensor.data_ptr()
        if key not in self._tensors:
            return Block(store, rows)
        return Block(store, rows, self._copies[key], self._tensors[key][1])

    def renew(self) -> None:
        for key, (store, _) in self._tensors.items():
            store.read(out=self._copies[key])

"""Which rows the lookups touched since the last sync, and what the replicas last agreed on.

A fused optimizer changes the rows that were looked up and no others. So after a sync the replicas
of a shard differ only in rows that some replica looked up since, and averaging those is the whole
work. Every row of this rank's shards has a number (`RowNumbers`), and one bit says whether it was
touched; hooks on the FBGEMM kernels set the bits, and `unite` forms the union over the replicas.

Changes that travel in bf16 or fp16 need their base. `RowBase` saves a row's values when it is first
touched in a window, before they change; a row that this rank did not touch still holds them.
Neither bits nor bases make the host wait for a GPU in a step.
`TableBase` keeps a second copy of every table instead, for mode full: as much memory as the tables
(and their element-wise moments) take. Only fp32 matrices travel as changes: tables and element-wise
moments. Moments travel in bf16 even where weights travel in fp16, whose range squared gradients
leave.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from trainer.parallel.collectives import Block, ReplicaCollectives, run_exchange
from trainer.parallel.model import TableShard
from trainer.parallel.row_store import FlatRows, JoinedRows, RowStore

# What is not kept is written too, as the host does not know of it: to places of its own, and to as
# many as this, as a GPU's writes to one place wait for each other.
_NUM_UNKEPT = 1024


@dataclass(frozen=True)
class Rows:
    """Some rows of a rank: their `numbers`, int64 and sorted, and `bounds`, which the host knows:
    those of run i of shards (`RowNumbers`) are at places bounds[i] to bounds[i + 1].
    """

    numbers: torch.Tensor
    bounds: list[int]


class RowNumbers:
    """Numbers the rows of all shards of this rank: shard by shard, rows in order.

    A rank's column shards of one table are shards of their own here, with rows of their own.
    Shards that follow each other and are stored alike are a run: what is done to their rows is done
    at once, so that it takes no longer with more tables. `runs` has the stores of each.
    """

    def __init__(self, shards: Sequence[TableShard], device: torch.device) -> None:
        self.shards = list(shards)
        self.device = device
        sizes = [shard.weight.shape[0] for shard in self.shards]
        self.first = [0, *accumulate(sizes)][:-1]
        self.num_rows = sum(sizes)
        runs: list[list[int]] = []
        for index, shard in enumerate(self.shards):
            if runs and JoinedRows.are_alike(self.shards[runs[-1][0]].rows, shard.rows):
                runs[-1].append(index)
            elif sizes[index]:
                runs.append([index])
        self.runs = [
            [
                JoinedRows(stores, [self.first[index] for index in run])
                for stores in zip(*(self.shards[index].rows for index in run), strict=True)
            ]
            for run in runs
        ]
        self._sizes = [sum(sizes[index] for index in run) for run in runs]
        self._run_bounds = [0, *accumulate(self._sizes)]
        self.ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int64, device=device)

    def of_bits(self, bits: torch.Tensor) -> Rows:
        """The rows whose `bits`, bool [num_rows], are set. One read on the host, of `bounds`."""
        if not bits.is_cuda:  # NumPy is up to ten times as fast there
            numbers = torch.from_numpy(np.flatnonzero(bits.numpy()))
            return Rows(numbers, np.searchsorted(numbers.numpy(), self._run_bounds).tolist())
        counts = [of_run.count_nonzero() for of_run in bits.split(self._sizes)]
        bounds = torch.stack([self.ends.new_zeros(()), *counts]).cumsum(0).tolist()
        return Rows(torch.nonzero_static(bits, size=bounds[-1]).view(-1), bounds)

    def none(self) -> Rows:
        numbers = torch.empty(0, dtype=torch.int64, device=self.device)
        return Rows(numbers, [0] * (len(self.runs) + 1))

    def by_run(self, rows: Rows) -> Iterator[tuple[list[JoinedRows], torch.Tensor]]:
        """(its stores, numbers) of each run that has some of `rows`."""
        for stores, bounds in zip(self.runs, pairwise(rows.bounds), strict=True):
            numbers = rows.numbers[slice(*bounds)]
            if numbers.numel():
                yield stores, numbers

    def counts(self, rows: Rows | None) -> torch.Tensor:
        """How many of `rows` each shard has, int64 [shards]; None stands for all."""
        ends = self.ends if rows is None else torch.searchsorted(rows.numbers, self.ends)
        return ends.diff(prepend=ends.new_zeros(1))

    def density(self, rows: Rows | None) -> float:
        """The share of all rows that `rows` are; None stands for all."""
        return 1.0 if rows is None else rows.numbers.numel() / max(1, self.num_rows)


def looked_up(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Rows that `indices` [n] mean, int64 [n], counted over the tables of `kernel` in order.

    `offsets` [features * B + 1] bound the bags, feature by feature, B bags each. On GPUs an index
    of -1, which FBGEMM takes for a row that was pruned, gives the number behind the last row.
    """
    if not indices.numel():
        return indices.long()
    if indices.is_cuda:  # one launch; on CPUs this operator answers at random
        found: torch.Tensor = torch.ops.fbgemm.linearize_cache_indices(
            kernel.hash_size_cumsum, indices, offsets
        )
        return found
    feature_starts = kernel.hash_size_cumsum[:-1]
    bounds = offsets[:: (offsets.numel() - 1) // feature_starts.numel()]
    starts = feature_starts.repeat_interleave(bounds.diff(), output_size=indices.numel())
    return indices + starts


class TouchedRows:
    """One bit for each row of this rank, set when a training step looks the row up.

    `on_first_touch` gets a kernel, as the number of its first row, and numbers of its rows (int64
    [n]) before these change: those that change for the first time since `clear`, and on GPUs all
    that were looked up, as often as they were, as the host would wait to learn which are new.
    """

    def __init__(
        self,
        numbers: RowNumbers,
        on_first_touch: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        # One more, for what is no row.
        self._marks = torch.zeros(numbers.num_rows + 1, dtype=torch.bool, device=numbers.device)
        self.bits = self._marks[:-1]
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
        if not torch.is_grad_enabled():  # rows change in whichever mode a user's network has tables
            return
        assert inputs.get("batch_size_per_feature_per_rank") is None, "batches are of one size"
        with torch.no_grad():
            numbers = looked_up(kernel, inputs["indices"], inputs["offsets"])
            numbers = numbers + first if first else numbers
            if self._on_first_touch is not None:
                self._on_first_touch(first, self._worth_saving(numbers))
            self._marks.index_fill_(0, numbers, True)

    def _worth_saving(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if numbers.is_cuda else numbers[~self.bits[numbers]].unique()

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
    packed = pack_bits(bits, replicas.num_replicas)
    union = functools.partial(functools.reduce, torch.bitwise_or)
    replicas.own_part(packed).copy_(run_exchange(replicas.reduce_scatter(packed, union)))
    run_exchange(replicas.all_gather(packed))
    bits.copy_(unpack_bits(packed, bits.numel()))


def pack_bits(bits: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """bool [n] as uint8 [ceil(n / 8)], or more up to a `multiple`: place p is bit p % 8 of byte
    p // 8."""
    padding = bits.new_zeros(-bits.numel() % (8 * multiple))
    if not bits.is_cuda:
        packed_bits = np.packbits(torch.cat([bits, padding]).numpy(), bitorder="little")
        return torch.from_numpy(packed_bits)
    octets = torch.cat([bits, padding]).view(torch.uint8).view(-1, 8)
    return (octets << _shifts(bits.device)).sum(1, dtype=torch.uint8)


@functools.cache
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def unpack_bits(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """What `pack_bits` packed, bool [num_bits]."""
    if not packed.is_cuda:
        bits = np.unpackbits(packed.numpy(), count=num_bits, bitorder="little")
        return torch.from_numpy(bits.view(bool))
    octets = packed[:, None] >> _shifts(packed.device) & 1
    return octets.view(torch.bool).view(-1)[:num_bits]


class RowLog:
    """What rows held before they changed: of those shards of a kernel that are stored alike.

    `stores` are the tensors of each shard, by its place in `numbers`. `place_of`, int32 [rows], and
    shared by logs, says where a row's values are in `values`, [places, columns] for each tensor of
    a shard; -1 where it is not saved. Both end in `_NUM_UNKEPT` more, for what is not kept.

    No size is read on the host: of n rows given those that are saved already, or twice, are copied
    too. So there are places for each lookup of a window, but for no more rows than there are; to
    begin with `num_steps` times those of the first step.
    """

    def __init__(
        self,
        numbers: RowNumbers,
        stores: Mapping[int, Sequence[RowStore]],
        place_of: torch.Tensor,
        num_steps: int,
    ) -> None:
        first = [numbers.first[shard] for shard in stores]
        self._rows = [JoinedRows(each, first) for each in zip(*stores.values(), strict=True)]
        self._first, self._ends, self._num_steps = first[0], numbers.ends, num_steps
        self._num_rows = sum(len(of_shard[0].tensor) for of_shard in stores.values())
        # The last is for numbers of no row.
        is_here = [shard in stores for shard in range(len(numbers.shards) + 1)]
        self._is_here = torch.tensor(is_here, device=numbers.device)
        self._tensors = {  # place in `values` by address
            store.tensor.data_ptr(): index
            for of_shard in stores.values()
            for index, store in enumerate(of_shard)
        }
        self._place_of = place_of
        self._values: list[torch.Tensor] = []
        self._num_places = self._num_given = 0
        self._num_saved = torch.zeros((), dtype=torch.int64, device=numbers.device)

    def clear(self) -> None:
        """Forget what was saved. `place_of` is for the caller to clear."""
        self._num_given = 0
        self._num_saved.zero_()

    def next_window(self, place_of: torch.Tensor) -> RowLog:
        """An empty one beside this."""
        log = copy.copy(self)
        log._place_of, log._values, log._num_given = place_of, [], 0
        log._num_saved = torch.zeros_like(self._num_saved)
        return log

    def numbers(self) -> torch.Tensor:
        """Of the rows that are saved here, read on the host."""
        numbers = (self._place_of[:-_NUM_UNKEPT] >= 0).nonzero().view(-1)
        shard = torch.searchsorted(self._ends, numbers, right=True)
        return numbers[self._is_here[shard]]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._tensors

    def save(self, numbers: torch.Tensor, source: RowLog | None = None) -> None:
        """Save the rows of these numbers, int64 [n], as they are now, or as they are in `source`.

        Of others, of which `numbers` may have some, nothing is kept.
        """
        if not numbers.numel():
            return
        self._make_room(numbers.numel())
        if source is None and numbers.is_cuda and self._save_by_kernels(numbers):
            return
        place_of = self._place_of
        shard = torch.searchsorted(self._ends, numbers, right=True)
        is_new = (place_of[numbers] < 0) & self._is_here[shard]
        # Each writes its turn to its row; whose turn is there in the end stands for the others.
        turns = torch.arange(numbers.numel(), dtype=place_of.dtype, device=place_of.device)
        spread = turns % _NUM_UNKEPT
        unkept = spread + (len(place_of) - _NUM_UNKEPT)
        place_of.scatter_(0, torch.where(is_new, numbers, unkept), turns)
        is_kept = is_new & (place_of[numbers] == turns)
        counts = is_kept.cumsum(0)
        places = torch.where(is_kept, self._num_saved + counts - 1, spread + self._num_places)
        place_of.scatter_(0, torch.where(is_kept, numbers, unkept), places.to(place_of.dtype))
        self._num_saved += counts[-1]
        wanted = torch.where(is_kept, numbers, self._first)
        for index, values in enumerate(self._values):
            if source is None:
                rows = self._rows[index].read(wanted)
            else:
                rows = source._values[index][source._place_of[wanted].clamp(min=0)]
            values.index_copy_(0, places, rows)

    def _save_by_kernels(self, numbers: torch.Tensor) -> bool:
        """As `save`, where the Triton kernels can: two launches in the stead of some 30."""
        placed = [rows.placed(numbers) for rows in self._rows]
        found = [
            store.kernels(values) if isinstance(store, FlatRows) else None
            for (store, _), values in zip(placed, self._values, strict=True)
        ]
        if (kernels := found[0]) is None or None in found:
            return False
        shard = torch.searchsorted(self._ends, numbers, right=True)
        wanted = torch.where(self._is_here[shard], numbers, -1)
        places = kernels.claim(self._place_of, wanted, self._num_saved)
        for (store, rows), values in zip(placed, self._values, strict=True):
            kernels.save(store.tensor, rows, places, values)
        return True

    def _make_room(self, num_given: int) -> None:
        """Have places for so many more rows."""
        self._num_given += num_given
        needed, before = min(self._num_given, self._num_rows), self._values
        if before and needed <= self._num_places:
            return
        expected = needed * 5 // 4 if self._num_places else needed * self._num_steps
        if needed > self._num_places:
            self._num_places = min(expected, self._num_rows)
        num_places = self._num_places + _NUM_UNKEPT
        self._values = [rows.tensor.new_empty(num_places, rows.width) for rows in self._rows]
        for new, old in zip(self._values, before, strict=False):
            new[: len(old) - _NUM_UNKEPT] = old[:-_NUM_UNKEPT]

    def base(self, store: RowStore, numbers: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers as they were saved, or as they are where they were not."""
        live = store.read(numbers)
        if not self._values:
            return live
        values = self._values[self._tensors[store.tensor.data_ptr()]]
        places = self._place_of[numbers]
        saved = values.index_select(0, places.clamp(min=0))
        return torch.where((places >= 0)[:, None], saved, live, out=live)

    def agree(self, block: Block) -> None:
        """Take the bases of a block for what its rows held, where they are saved."""
        if not self._values:
            return
        assert block.rows is not None and block.base is not None
        values = self._values[self._tensors[block.tensor.data_ptr()]]
        places = self._place_of[block.rows].long()
        spread = torch.arange(len(places), device=places.device) % _NUM_UNKEPT
        unkept = spread + (len(values) - _NUM_UNKEPT)
        values.index_copy_(0, torch.where(places >= 0, places, unkept), block.base)


@dataclass(frozen=True)
class Window:
    """What was saved between two syncs: logs by the number of their kernel's first row."""

    place_of: torch.Tensor
    logs: dict[int, list[RowLog]]


class SyncBase:
    """Makes blocks that know what the replicas last agreed on.

    This one is for tensors that all travel as they are, so nothing needs to be kept.
    """

    def block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """A tensor of a shard, or of a run that of its rows which have numbers `rows`."""
        return Block(store, rows)

    def landed(self, blocks: Sequence[Block]) -> None:
        """The replicas now agree on the bases of `blocks`, found after their snapshot."""

    def begin_window(self, is_kept: bool = False) -> Window | None:
        """The blocks of a sync are made: what is touched from here on belongs to the next.

        Returns, where they are to be kept, the bases of the window that has ended, for
        `resume_window`.
        """
        return None

    def resume_window(self, ended: Window | None) -> None:
        """The sync before came to nothing: its window, with these bases, goes on."""

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
    """Bases of the rows touched in this window, as a rule of `num_steps` steps."""

    def __init__(
        self,
        numbers: RowNumbers,
        tensors: dict[int, tuple[RowStore, torch.dtype]],
        num_steps: int = 1,
    ) -> None:
        self._numbers = numbers
        self._wires = {address: wire for address, (_, wire) in tensors.items()}
        self._window = self._make_window(num_steps)

    def _make_window(self, num_steps: int) -> Window:
        """A log for the shards of each kernel whose tensors have the same storages and widths."""
        alike: dict[tuple[Any, ...], dict[int, list[RowStore]]] = {}
        kernel = 0
        for index, shard in enumerate(self._numbers.shards):
            kernel = kernel if shard.kernel_index else self._numbers.first[index]
            stores = [each for each in shard.rows if each.tensor.data_ptr() in self._wires]
            places = [
                (t.untyped_storage().data_ptr(), t.shape[1])
                for t in (each.tensor for each in stores)
            ]
            if stores:
                alike.setdefault((kernel, *places), {})[index] = stores
        size, device = self._numbers.num_rows + _NUM_UNKEPT, self._numbers.device
        window = Window(torch.full((size,), -1, dtype=torch.int32, device=device), {})
        for (kernel, *_), of_shards in alike.items():
            log = RowLog(self._numbers, of_shards, window.place_of, num_steps)
            window.logs.setdefault(kernel, []).append(log)
        return window

    def save(self, kernel: int, row_numbers: torch.Tensor) -> None:
        """Save rows (by number) of the kernel whose first row is `kernel`, before they change."""
        for log in self._window.logs.get(kernel, []):
            log.save(row_numbers)

    def block(self, store: RowStore, rows: torch.Tensor | None) -> Block:
        """As `SyncBase.block`; `rows` must hold all that were touched."""
        log = self._log_of(store.tensor)
        if log is None:
            return Block(store, rows)
        assert rows is not None, "rows of tables that travel as changes are always listed"
        return Block(store, rows, log.base(store, rows), self._wires[store.tensor.data_ptr()])

    def _log_of(self, tensor: torch.Tensor) -> RowLog | None:
        return next((log for log in self._all_logs() if tensor in log), None)

    def _all_logs(self) -> Iterator[RowLog]:
        return chain.from_iterable(self._window.logs.values())

    def landed(self, blocks: Sequence[Block]) -> None:
        """Rows touched between a round's snapshot and its landing have its mean as their base."""
        for block in blocks:
            log = self._log_of(block.tensor)
            if log is not None:
                log.agree(block)

    def begin_window(self, is_kept: bool = False) -> Window | None:
        if not is_kept:
            self._window.place_of.fill_(-1)
            for log in self._all_logs():
                log.clear()
            return None
        ended = self._window
        place_of = torch.full_like(ended.place_of, -1)
        logs = {k: [log.next_window(place_of) for log in logs] for k, logs in ended.logs.items()}
        self._window = Window(place_of, logs)
        return ended

    def resume_window(self, ended: Window | None) -> None:
        assert ended is not None, "it is what `begin_window` returned"
        newer, self._window = self._window, ended
        for kernel, logs in ended.logs.items():
            for log, since in zip(logs, newer.logs[kernel], strict=True):
                log.save(since.numbers(), since)


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

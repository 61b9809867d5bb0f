"""Means over a replica group, summed in a fixed order, so that the replicas end bitwise equal; and
the numbers of a report over all ranks.

Each of the M ranks sums 1/M of the elements (all-to-all), in fp32 and pair by pair in rank order,
and hands the means to the others (all-gather): the bytes of a ring all-reduce, 2 (M - 1) / M of
the elements. A stock all-reduce sums in an order that depends on where an element lies; here the
mean of an element depends on its M values alone. So a row has the same mean whether it travels
alone or with its whole table, and for M a power of two the mean of M equal values is that value.
Replicas may weigh differently; those of weight 0 get the means without counting in them.

Replicas of several hosts exchange in two levels where R of them, a power of two, are on each: sums
are formed inside each host, then across hosts, and the means go back the same way. The sums of a
host are partial sums of the pairs above, and travel in fp32, so the means are the same to the bit.
Of n elements of e bytes (fp32 4, fp16 and bf16 2) a host sends to others, where an all-gather is a
ring,

    one level    n / M * (R (M - R) e + (M - 1) e)      all-to-all, all-gather
    two levels   n / M * (M - R) (max(4, e) + e)

which is less for every R from 2 on, in half precision too: 0.35 of it for fp32 on 2 hosts x 4.

Two replicas may send all they have to each other instead, and form the mean where it is used: as
many bytes, in one exchange and with fewer passes over memory (`ReplicaCollectives.gathers`).

What is no floating-point number (counters, flags) has no mean: there the first replica that counts
gives its values to all.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from trainer.parallel.row_store import FlatRows, RowStore

_T = TypeVar("_T")
# Bytes exchanged at a time, and how many such exchanges are under way: while one is on its
# way to other hosts, others are summed inside of this one. Gloo's threads take turns with each, so
# that small ones cost more; larger ones leave the processor's cache. NCCL is faster with more, and
# the host launches the kernels of each.
_CHUNKS = {"cpu": (2 * 2**20, 8), "cuda": (256 * 2**20, 2)}


def pairwise_sum(parts: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Sum over the first dimension of [M, n], as float [n], in at least fp32.

    Neighbours are added first, then neighbouring sums, and so on. For M a power of two the sum of
    M equal values is exact that way, which a sum in a row is not (3 w may need one bit more).

    Part i counts `weights[i]` times, parts of weight 0 not at all, whatever they hold. Weights are
    divided by the largest, so that equal ones change no bit of the plain sum.
    """
    sums = list(parts.to(torch.promote_types(parts.dtype, torch.float32)).unbind(0))
    if weights is not None:
        most = max(weights)
        weighted = zip(sums, weights, strict=True)
        sums = [part if w == most else part * (w / most) for part, w in weighted if w]
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + (sums[-1:] if len(sums) % 2 else [])
    return sums[0]


def in_background(
    task: Callable[[], _T], name: str, device: torch.device | None = None
) -> Future[_T]:
    """Run `task` in a thread with that name; a future with its result or error.

    `device` is that of the tensors and events that the task deals with, if any.
    """
    done: Future[_T] = Future()

    def run() -> None:
        try:
            if device is not None and device.type == "cuda":
                torch.cuda.set_device(device)  # or this thread takes memory of GPU 0, too
            done.set_result(task())
        except BaseException as error:  # whatever it is, whoever asks for the result raises it
            done.set_exception(error)

    # A daemon: a rank that fails must not wait at its exit for a peer that never answers.
    threading.Thread(target=run, name=name, daemon=True).start()
    return done


@dataclass(frozen=True)
class Part:
    """Numbers of this rank in a report.

    `sums`, float64 [k], are added up over the ranks, and of `peaks` [j] the highest counts. `read`
    makes values out of both, which it gets on the host.
    """

    sums: torch.Tensor
    read: Callable[[torch.Tensor, torch.Tensor], dict[str, float]]
    peaks: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


def reduce_parts(parts: Sequence[Part], device: torch.device) -> dict[str, float]:
    """What `parts` make of the numbers of all ranks, each of which gives the same parts.

    Collective over all ranks: two all-reduces of sum(k) and sum(j) numbers, however many ranks
    there are, and one read on the host.
    """
    found = _joined(parts, device)
    _all_reduce(parts, found)
    return _read(parts, found.cpu())


class PendingParts:
    """As `reduce_parts`, but a thread waits for the other ranks, on a gloo `group` of its own.

    Made by all ranks of the group in turn. Read it before its parts are made anew.
    """

    def __init__(
        self, parts: Sequence[Part], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        self._parts = parts
        is_cuda = device.type == "cuda"
        self._found = _joined(parts, torch.device("cpu"), pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        if self._copied is not None:
            self._copied.record()
        self._done = in_background(partial(self._reduce, group), "report", device)

    def _reduce(self, group: dist.ProcessGroup) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        _all_reduce(self._parts, self._found, group)

    def read(self, timeout_s: float | None = None) -> dict[str, float]:
        """What the parts make of the numbers; raises what the exchange raised, or TimeoutError."""
        self._done.result(timeout_s)
        return _read(self._parts, self._found)


def _joined(parts: Sequence[Part], device: torch.device, pin_memory: bool = False) -> torch.Tensor:
    """All sums, then all peaks, copied to `device` behind what its stream is doing.

    The host does not wait: numbers from a GPU are there once the stream is, if in pinned memory.
    """
    numbers = [*(part.sums for part in parts), *(part.peaks for part in parts)]
    sizes = [len(each) for each in numbers]
    joined = torch.empty(sum(sizes), dtype=torch.float64, device=device, pin_memory=pin_memory)
    for place, each in zip(joined.split(sizes), numbers, strict=True):
        place.copy_(each, non_blocking=True)
    return joined


def _all_reduce(
    parts: Sequence[Part], found: torch.Tensor, group: dist.ProcessGroup | None = None
) -> None:
    num_sums = sum(len(part.sums) for part in parts)
    works = [
        dist.all_reduce(found[:num_sums], group=group, async_op=True),
        dist.all_reduce(found[num_sums:], dist.ReduceOp.MAX, group=group, async_op=True),
    ]
    for work in works:
        work.wait()


def _read(parts: Sequence[Part], found: torch.Tensor) -> dict[str, float]:
    sizes = [len(part.sums) for part in parts], [len(part.peaks) for part in parts]
    sums_of, peaks_of = found.split([sum(each) for each in sizes])
    values: dict[str, float] = {}
    for part, *numbers in zip(
        parts, sums_of.split(sizes[0]), peaks_of.split(sizes[1]), strict=True
    ):
        values |= part.read(*numbers)
    return values


Exchange = Generator[None, None, _T]
"""Something is on its way whenever it stops; it is over when it ends."""


def run_exchange(exchange: Exchange[_T]) -> _T:
    """Wait for one."""
    while True:
        try:
            next(exchange)
        except StopIteration as end:
            result: _T = end.value
            return result


def run_exchanges(
    items: Iterable[_T], exchange: Callable[[_T, int], Exchange[None]], num_at_once: int
) -> None:
    """Wait for the exchange of each item, in the slot given, one of `num_at_once` under way.

    Each goes on in its turn. Turns are the same on all replicas. Exchanges that stop equally often
    end in order.
    """
    running = deque[Exchange[None]]()
    waiting = (exchange(item, index % num_at_once) for index, item in enumerate(items))
    while True:
        running.extend(islice(waiting, num_at_once - len(running)))
        if not running:
            return
        first = running.popleft()
        if next(first, True) is None:
            running.append(first)


class ReplicaGroup(Protocol):
    """What a sync needs of a process group. Both exchanges may be over at once, and give None."""

    def size(self) -> int:
        """M, the number of replicas."""

    def rank(self) -> int:
        """This replica's place among them."""

    def all_gather(self, out: torch.Tensor) -> Exchange[None] | None:
        """Fill `out` [M * n], where this replica's part is in its place, with the others' parts.

        Collective.
        """

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> Exchange[None] | None:
        """Write part r of rank i's `parts` [M * n] to part i of rank r's `out`. Collective."""


class WorldReplicaGroup:
    """A replica group inside the world of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def size(self) -> int:
        return self._group.size()

    def rank(self) -> int:
        return self._group.rank()

    def all_gather(self, out: torch.Tensor) -> Exchange[None]:
        size, rank = self.size(), self.rank()
        parts = out.view(size, -1)
        if out.is_cuda:
            yield from _over(
                dist.all_gather_single(out, parts[rank], group=self._group, async_op=True)
            )
            return
        # Gloo's own all-gather fills memory of its own, fresh at every call, and copies that.
        after, before = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            sent, received = parts[(rank - step) % size], parts[(before - step) % size]
            yield from _over(
                dist.isend(sent, group=self._group, group_dst=after),
                dist.irecv(received, group=self._group, group_src=before),
            )

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> Exchange[None]:
        yield from _over(dist.all_to_all_single(out, parts, group=self._group, async_op=True))


def _over(*works: dist.Work | None) -> Exchange[None]:
    yield
    for work in works:
        assert work is not None, "the rank is in its own group"
        work.wait()


class Buffers:
    """Flat memory by key and dtype, which is used again, and grows to the most that was asked for.

    Memory that is freed and taken anew at every sync costs more than what is written to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[Hashable, torch.dtype], torch.Tensor] = {}

    def take(self, key: Hashable, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] with whatever it holds, until the key is taken again."""
        found = self._buffers.get((key, dtype))
        if found is None or found.numel() < numel:
            found = torch.empty(numel, dtype=dtype, device=self._device)
            self._buffers[key, dtype] = found
        return found[:numel]


@dataclass(frozen=True)
class Block:
    """Rows of a contiguous store [n, ...]: those of `rows` (int64, sorted), or all when None.
    Of `JoinedRows` the tensor is that of the first table, and rows have numbers over all shards.

    With `wire` (bf16 or fp16) what travels is the change against `base`, [num_rows, ...]: what
    all replicas last agreed on, so that small updates are not rounded away against large weights.
    """

    store: RowStore
    rows: torch.Tensor | None = None
    base: torch.Tensor | None = None
    wire: torch.dtype | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self.store.tensor

    @property
    def num_rows(self) -> int:
        return self.tensor.shape[0] if self.rows is None else self.rows.numel()

    @property
    def row_numel(self) -> int:
        return math.prod(self.tensor.shape[1:])

    @property
    def numel(self) -> int:
        return self.num_rows * self.row_numel

    def read_into(self, flat: torch.Tensor) -> None:
        """Copy the rows into `flat`, of `numel` elements."""
        self.store.read(self.rows, out=flat.view(self.num_rows, *self.tensor.shape[1:]))

    def write(self, flat: torch.Tensor) -> None:
        self.store.write(flat.view(self.num_rows, *self.tensor.shape[1:]), self.rows)

    def agree(self, mean: torch.Tensor) -> None:
        """Note that all replicas now agree on `mean`, flat."""
        if self.base is not None:
            self.base.view(-1).copy_(mean)

    def split(self, max_numel: int) -> Iterator[Block]:
        """The block in pieces of at most `max_numel` elements (but at least a row)."""
        step = max(1, max_numel // max(1, self.row_numel))
        for start in range(0, self.num_rows, step):
            part = slice(start, start + step)
            base = None if self.base is None else self.base[part]
            if self.rows is None:
                yield Block(self.store.part(part), None, base, self.wire)
            else:
                yield Block(self.store, self.rows[part], base, self.wire)


class ReplicaCollectives:
    """The collectives of a sync over one replica group, by default of replicas of equal weight.

    `levels` is that group; or one of the replicas on this rank's host, and one of those that have
    its place on each host. Weights are for one level only.

    `num_bytes` counts what this rank sends; `num_overflows` the syncs in which fp32 travelled in
    the stead of fp16, because a change was too large for that on some replica.
    """

    def __init__(
        self,
        levels: Sequence[ReplicaGroup],
        device: torch.device,
        weights: Sequence[float] | None = None,
    ) -> None:
        assert weights is None or len(levels) == 1, "a host's sum does not say what it weighs"
        self._levels = levels
        self._weights = weights
        self.num_replicas = math.prod(group.size() for group in levels)
        self.device = device
        self.chunk_bytes, self.num_at_once = _CHUNKS[device.type]
        self._buffers = Buffers(device)
        self.num_bytes = 0
        self.num_overflows = 0

    def add_costs(self, other: ReplicaCollectives) -> None:
        """Take those of `other`."""
        num_bytes, num_overflows = other.take_costs()
        self.num_bytes += num_bytes
        self.num_overflows += num_overflows

    def take_costs(self) -> tuple[int, int]:
        taken = self.num_bytes, self.num_overflows
        self.num_bytes = self.num_overflows = 0
        return taken

    def reduce_scatter(
        self, flat: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor], slot: int = 0
    ) -> Exchange[torch.Tensor]:
        """This rank's 1/M of what the replicas' `flat` [n], n a multiple of M, come to. Collective.

        `combine` makes [m] of the [k, m] of the k replicas of a level. It may be in memory that the
        next exchange in `slot` takes: as many as are under way have one each.
        """
        part = flat
        for level, group in enumerate(self._levels):
            received = self._buffers.take((slot, level), part.numel(), part.dtype)
            yield from group.all_to_all(received, part) or ()
            parts = received.view(group.size(), -1)
            self.num_bytes += (group.size() - 1) * parts[0].nbytes
            part = combine(parts)
        return part

    def own_part(self, out: torch.Tensor) -> torch.Tensor:
        """Where in `out` [n] this rank's 1/M belongs."""
        for group in self._levels:
            out = out.view(group.size(), -1)[group.rank()]
        return out

    def all_gather(self, out: torch.Tensor) -> Exchange[None]:
        """Fill `out` [n], which has this rank's part in its place, with the others'. Collective."""
        parts = []
        for group in self._levels:
            parts.append(out)
            out = out.view(group.size(), -1)[group.rank()]
        for group, part in zip(reversed(self._levels), reversed(parts), strict=True):
            yield from group.all_gather(part) or ()
            self.num_bytes += (group.size() - 1) * part.nbytes // group.size()

    def average(self, flat: torch.Tensor, out: torch.Tensor, slot: int = 0) -> Exchange[None]:
        """Write the mean of the replicas' `flat` [n], n a multiple of M, into `out`. Collective.

        `out` may be `flat` itself.
        """
        total = yield from self.reduce_scatter(flat, self._sum, slot)
        self._divide(total, self.own_part(out))
        yield from self.all_gather(out)

    def mean(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` [n], into which the mean of `values` [2, n] of two replicas is written."""
        if values.dtype == torch.float32:  # without memory of its own
            return torch.add(*values, out=out).div_(2)
        self._divide(self._sum(values), out)
        return out

    def _sum(self, parts: torch.Tensor) -> torch.Tensor:
        if parts.is_floating_point():
            return pairwise_sum(parts, self._weights)
        return parts[next(i for i, weight in enumerate(self._weights or [1.0]) if weight)]

    def _divide(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """Write the mean into `out` whose sum is `total`."""
        if total.is_floating_point():
            weights = self._weights or [1.0] * self.num_replicas
            assert max(weights) > 0, "a mean needs a replica that counts"
            torch.div(total, sum(weights) / max(weights), out=out)
        else:
            out.copy_(total)

    def gathers(self, batch: Batch) -> bool:
        """Whether means of `batch` are best formed where they are used (see `average_batch`).

        Not on GPUs, where a sum is a kernel of its own, which would read twice as much, and not of
        independent groups, which weigh their replicas.
        """
        is_plain = batch.wire is None and self._weights is None
        return is_plain and self.num_replicas == 2 and self.device.type == "cpu"

    def average_batch(
        self,
        batch: Batch,
        values: torch.Tensor,
        out: torch.Tensor,
        in_fp32: bool = False,
        slot: int = 0,
    ) -> Exchange[None]:
        """Write the mean of the replicas' `values` of `batch`, packed, into `out`. Collective.

        `out` may be `values`; or, where `gathers` says so, those of all replicas, flat, of which
        `values` are this one's: they get those of the others. What `any_overflow` says of the
        batches of a sync is `in_fp32`.
        """
        if out.numel() > values.numel():
            yield from self.all_gather(out)
            return
        if batch.wire is None or (in_fp32 and batch.wire == torch.float16):
            yield from self.average(values, out, slot)
            return
        base = batch.pack_base(self._buffers, slot)
        change = (values - base).to(batch.wire)
        yield from self.average(change, change, slot)
        torch.add(base, change, out=out)

    def any_overflow(self, batches: Sequence[Batch], values: Sequence[torch.Tensor] = ()) -> bool:
        """Whether a change that is to travel in fp16 is too large on some replica. Collective.

        `values` of the batches are packed where they are not given. The answer is read on the host,
        once for a sync, and only where something travels in fp16.
        """
        flags = []
        for index, batch in enumerate(batches):
            if batch.wire == torch.float16:
                found = values[index] if values else batch.pack(self._buffers)
                change = found - batch.pack_base(self._buffers)
                flags.append(change.to(batch.wire).isfinite().all().logical_not())
        if not flags:
            return False
        found = torch.empty(self.num_replicas, dtype=torch.uint8, device=self.device)
        self.own_part(found).copy_(torch.stack(flags).any())
        run_exchange(self.all_gather(found))
        is_any = bool(found.any())
        self.num_overflows += is_any
        return is_any

    def batches(self, blocks: Iterable[Block], max_bytes: int | None = None) -> Iterator[Batch]:
        """`blocks` in portions of at most `max_bytes`, but at least a row, split where larger.

        By default so much is exchanged at a time, padded to a multiple of M elements.
        """
        waiting: dict[tuple[torch.dtype, torch.dtype | None], list[Block]] = {}
        waiting_numel: Counter[tuple[torch.dtype, torch.dtype | None]] = Counter()
        for whole in blocks:
            key = (whole.tensor.dtype, whole.wire)
            max_numel = (max_bytes or self.chunk_bytes) // whole.tensor.itemsize
            for block in whole.split(max_numel):
                if waiting_numel[key] + block.numel > max_numel and key in waiting:
                    yield Batch(waiting.pop(key), self.num_replicas)
                    del waiting_numel[key]
                waiting.setdefault(key, []).append(block)
                waiting_numel[key] += block.numel
        yield from (Batch(batch, self.num_replicas) for batch in waiting.values())

    def average_in_place(self, blocks: Iterable[Block]) -> None:
        """Write the mean of the replicas into every row of `blocks`. Collective.

        Large whole tensors are averaged where they lie; everything else is packed on the way.
        """
        pieces: list[torch.Tensor] = []
        packed: list[Block] = []
        for block in blocks:
            is_flat = block.wire is None and isinstance(block.store, FlatRows)
            if block.rows is None and is_flat:
                found, block = self._bulk_of(block)
                pieces += found
            packed.append(block)
        run_exchanges(
            pieces, lambda piece, slot: self.average(piece, piece, slot), self.num_at_once
        )
        batches = list(self.batches(packed))
        in_fp32 = self.any_overflow(batches)
        run_exchanges(batches, partial(self._average_in_place, in_fp32), self.num_at_once)

    def _average_in_place(self, in_fp32: bool, batch: Batch, slot: int) -> Exchange[None]:
        values = batch.pack(self._buffers, ("values", slot))
        yield from self.average_batch(batch, values, values, in_fp32, slot)
        for block, part in batch.unpack(values):
            block.write(part)
            block.agree(part)

    def _bulk_of(self, block: Block) -> tuple[list[torch.Tensor], Block]:
        """Chunks of a large tensor, and its end, which does not fill one.

        Small tensors are left whole: packed, they share a message.
        """
        flat = block.tensor.view(-1)
        chunk = self.chunk_bytes // flat.itemsize // self.num_replicas * self.num_replicas
        bulk = flat.numel() // chunk * chunk
        return list(flat[:bulk].split(chunk)) if bulk else [], Block(FlatRows(flat[bulk:]))


class Batch:
    """Blocks of one dtype and wire, packed end to end into what one exchange averages."""

    def __init__(self, blocks: Sequence[Block], multiple: int) -> None:
        self.blocks = list(blocks)
        self.wire = self.blocks[0].wire
        self.numel = sum(block.numel for block in self.blocks)
        self._multiple = multiple

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].tensor.dtype

    def pack(self, buffers: Buffers, key: Hashable = "values") -> torch.Tensor:
        """The blocks' rows as they are now, flat, with zeros up to a multiple of M."""
        return self.pack_into(self.buffer(buffers, key))

    def pack_into(self, flat: torch.Tensor) -> torch.Tensor:
        """As `pack`, into `flat`."""
        flat[self.numel :] = 0
        for block, part in self.unpack(flat):
            block.read_into(part)
        return flat

    def pack_base(self, buffers: Buffers, slot: int = 0) -> torch.Tensor:
        """The blocks' bases, flat, likewise."""
        flat = self.buffer(buffers, ("base", slot))
        flat[self.numel :] = 0
        for block, part in self.unpack(flat):
            assert block.base is not None, "what travels as a change has a base"
            part.copy_(block.base.view(-1))
        return flat

    def unpack(self, flat: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        end = 0
        for block in self.blocks:
            start, end = end, end + block.numel
            yield block, flat[start:end]

    def buffer(self, buffers: Buffers, key: Hashable, num_copies: int = 1) -> torch.Tensor:
        """Flat memory for what `pack` fills, so many times."""
        padding = -self.numel % self._multiple
        return buffers.take(key, num_copies * (self.numel + padding), self.dtype)

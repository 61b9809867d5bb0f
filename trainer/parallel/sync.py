"""Sync: averaging the replicas of every shard over its replica group, by the policy of the spec.

Collectives, all on the *replica group* of the rank:

    touched_rows   1. all-to-all and all-gather: which rows any replica touched, a bit each
                   2. all-to-all and all-gather: means of the union's rows, with their moments
    full           all-to-all and all-gather: means of every row, with their moments
    dtype fp16     before step 2 an all-gather of one byte: does a change overflow?

Where all hosts have equally many replicas, a power of two, these exchange inside hosts, then across
(`trainer.parallel.collectives`), in two groups that the replica group is cut into.

What is always averaged whole (`extra`) goes along with the rows. Means are formed in fp32 and in a
fixed order (`trainer.parallel.collectives`), so all replicas end bitwise equal, and touched_rows
gives what full gives: bitwise for M a power of two; otherwise full lets rows that nobody touched
drift by a rounding, which touched_rows does not.

With `overlap` and `optimizer_state: delayed` the means are formed by a thread (CUDA: on a side
stream) on a second process group over the same ranks, so that its collectives never interleave with
those of the training steps; only step 1 stays on the replica group. They are of a snapshot and are
applied later (docs/design/sync.md says when): each value becomes mean + (current - snapshot). Where
nothing changed since the snapshot that is exactly the mean, so such rows end bitwise equal; the
others keep what they learned meanwhile and are averaged again at the next sync.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from trainer.parallel.collectives import (
    Block,
    Buffers,
    Exchange,
    ReplicaCollectives,
    WorldReplicaGroup,
    in_background,
    run_exchanges,
)
from trainer.parallel.mesh import form_groups, form_replica_levels
from trainer.parallel.model import TwoDParallel
from trainer.parallel.row_store import FlatRows, JoinedRows, RowStore
from trainer.parallel.touched_rows import (
    RowBase,
    RowNumbers,
    Rows,
    SyncBase,
    TableBase,
    TouchedRows,
    unite,
    wires,
)
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import SyncSpec

logger = logging.getLogger(__name__)
Extra = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]
# So much is read, changed and written at a time, so that it stays in a processor's cache meanwhile.
_CACHE_BYTES = 2**20
_WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class SyncReport:
    """Price of one sync on this rank.

    `num_bytes` is what the rank sent (an all-reduce of n bytes would send 2 (M - 1) / M n), with
    what landed, and flushes sent, since the sync before. `density` is the share of this rank's rows
    that were averaged, `num_rows` their number in each of its shards, int64 [shards].
    """

    num_bytes: int
    density: float = 1.0
    num_rows: torch.Tensor | None = field(default=None, compare=False)


class Sync:
    """Keeps the replicas of a rank's shards together. All ranks call the same methods in turn.

    This is the sync for M = 1, where there is one replica and nothing to do. `is_exact` says
    whether a sync leaves all replicas equal as `flush` does: moments too, in full precision.
    """

    is_exact = True

    def __call__(self) -> SyncReport:
        """One sync by the policy. Collective over the replica group."""
        return SyncReport(0)

    def tick(self) -> None:
        """A step has ended: wait for what overlapped with training until now, and apply it."""

    def finish(self) -> None:
        """Wait for what still overlaps with training and apply it, as before validation."""

    def flush(self) -> None:
        """Make all replicas equal, moments too, in full precision. Before a save. Collective."""

    def renew(self) -> None:
        """Take the replicas as they are for equal: after something else has made them so."""

    def reset(self) -> None:
        """Begin anew from replicas that are equal: after a load, before training goes on."""

    def close(self) -> None:
        """Remove the hooks, if any."""


def exact_sync(spec: JobSpec, warn: Callable[[str], None]) -> SyncSpec:
    """The policy of `spec` in a mode that is exact; `warn` is told when that is another one."""
    sync, optimizer = spec.parallelism.sync, spec.optimizer.sparse
    if sync.mode == "full" or not optimizer.changes_untouched_rows:
        return sync
    warn(
        "parallelism.sync.mode touched_rows is off: optimizer.sparse.weight_decay "
        f"({optimizer.weight_decay:g}) changes every row at each step, so every sync averages "
        "all rows; set it to 0 to sync touched rows only"
    )
    return sync.model_copy(update={"mode": "full"})


def build_sync(
    model: TwoDParallel,
    spec: JobSpec,
    *,
    extra: Extra | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> Sync:
    """The sync that `spec` asks for, over equal replicas. Collective over all ranks.

    `extra` gives (weights, optimizer states) that are averaged whole at each sync, always as they
    are: contiguous, shaped alike on all replicas, the same tensors each time. `warn` is called, on
    one rank of those concerned, when a sync falls back to something else.
    """
    if model.groups.layout.num_replicas == 1:
        return Sync()
    sync = exact_sync(spec, warn if model.groups.rank == 0 else logger.debug)
    return ReplicaSync(model, sync, extra or (lambda: ([], [])), warn)


class ReplicaSync(Sync):
    """Averages the rows that need it over the replica group.

    Where it says rows, None stands for all of them.
    """

    def __init__(
        self, model: TwoDParallel, spec: SyncSpec, extra: Extra, warn: Callable[[str], None]
    ) -> None:
        device = model.groups.device
        self._spec = spec
        self.is_exact = spec.is_always_exact and not spec.overlap
        self._extra = extra
        levels = form_replica_levels(model.groups) or (model.groups.replica_group,)
        self._replicas = ReplicaCollectives([*map(WorldReplicaGroup, levels)], device)
        self._numbers = RowNumbers(model.table_shards(), device)
        is_first = dist.get_rank(model.groups.replica_group) == 0
        self._overflows = OverflowWarning(warn if is_first else logger.warning)
        self._base, self._touched = watched(self._numbers, spec)
        # Rows whose moments differ between replicas as the policy does not average them.
        self._stale: torch.Tensor | None = None
        if self._touched and spec.optimizer_state == "never":
            self._stale = torch.zeros_like(self._touched.bits)
        self._background: SyncThread | None = None
        if spec.overlap or spec.optimizer_state == "delayed":
            self._background = SyncThread(device)
            groups = model.groups
            levels = form_replica_levels(groups) or (
                form_groups(groups.mesh.replica_groups, groups.rank, groups.timeout),
            )
            self._in_background = ReplicaCollectives([*map(WorldReplicaGroup, levels)], device)
        self._buffers, self._moment_buffers = Buffers(device), Buffers(device)
        self._pending: DeferredSync | None = None  # lands when its steps have ended
        self._pending_moments: DeferredSync | None = None  # lands at the next sync

    @torch.no_grad()
    def __call__(self) -> SyncReport:
        self._land_all()
        rows = self._take_union()
        numbers, (weights, states) = self._numbers, self._extra()
        blocks = [*blocks_of(numbers, rows, weight_of, self._base.block), *whole(weights)]
        moments = [*blocks_of(numbers, rows, moments_of, self._base.block)]
        self._base.begin_window()
        if self._spec.optimizer_state != "never":
            blocks += whole(states)  # never delayed by a sync: see `check_overlap`
        if self._spec.optimizer_state == "every":
            blocks += moments
        elif self._spec.optimizer_state == "delayed":
            num_steps = self._spec.intervals[0]
            self._pending_moments = self._defer(moments, self._moment_buffers, num_steps)
        if self._spec.overlap:
            self._pending = self._defer(blocks, self._buffers, self._spec.overlap_steps)
        else:
            self._replicas.average_in_place(blocks)
        return self._report(rows)

    def tick(self) -> None:
        if self._pending and self._pending.has_started_all:
            self.finish()
        for deferred in (self._pending_moments, self._pending):
            if deferred is not None:
                deferred.start()

    @torch.no_grad()
    def finish(self) -> None:
        if self._pending is None:
            return
        self._base.landed(self._pending.land())
        self._pending = None

    @torch.no_grad()
    def flush(self) -> None:
        self._land_all()
        rows = self._take_union()
        numbers, (weights, states) = self._numbers, self._extra()
        blocks = [*blocks_of(numbers, rows, weight_of, Block), *whole(weights)]
        moment_rows = self._take_stale(rows)
        blocks += [*blocks_of(numbers, moment_rows, moments_of, Block), *whole(states)]
        self._replicas.average_in_place(blocks)
        self._base.renew()

    def renew(self) -> None:
        self._base.renew()

    def reset(self) -> None:
        assert not (self._pending or self._pending_moments), "training has not begun"
        if self._touched:
            self._touched.clear()
        if self._stale is not None:
            self._stale.zero_()
        self._base.renew()

    def close(self) -> None:
        if self._touched:
            self._touched.close()

    def _defer(self, blocks: Iterable[Block], buffers: Buffers, num_steps: int) -> DeferredSync:
        assert self._background, "only a policy with a background defers means"
        pending = PendingSync(blocks, self._in_background, buffers)
        return DeferredSync(pending, self._background, num_steps)

    def _land_all(self) -> None:
        """Apply what is pending. Costs are counted when nothing is under way in the background."""
        self.finish()
        if self._pending_moments is not None:
            self._pending_moments.land()
            self._pending_moments = None
        if self._background:
            self._replicas.add_costs(self._in_background)

    def _take_union(self) -> Rows | None:
        """Rows that any replica touched; they count as untouched from here on. Collective."""
        if self._touched is None:
            return None
        unite(self._touched.bits, self._replicas)
        if self._stale is not None:
            self._stale |= self._touched.bits
        rows = self._numbers.of_bits(self._touched.bits)
        self._touched.clear()
        # A row that travels as a change needs its base, which is kept for single rows only.
        may_be_whole = self._spec.dtype == "fp32"
        is_dense = self._numbers.density(rows) > self._spec.full_above
        return None if may_be_whole and is_dense else rows

    def _take_stale(self, rows: Rows | None) -> Rows | None:
        """Rows whose moments differ when `rows` were touched; they count as equal from here on."""
        if self._stale is None:
            return rows
        if rows is not None:
            rows = self._numbers.of_bits(self._stale)
        self._stale.zero_()
        return rows

    def _report(self, rows: Rows | None) -> SyncReport:
        num_bytes, num_overflows = self._replicas.take_costs()
        self._overflows.count(num_overflows)
        numbers = self._numbers
        return SyncReport(num_bytes, numbers.density(rows), numbers.counts(rows))


def watched(numbers: RowNumbers, spec: SyncSpec) -> tuple[SyncBase, TouchedRows | None]:
    """What the replicas agree on, and the rows touched since then, as far as the policy needs."""
    tensors = {}
    if spec.dtype in _WIRES:
        tensors = wires(numbers.shards, _WIRES[spec.dtype], spec.optimizer_state == "every")
    if spec.mode == "full":
        return TableBase(tensors) if tensors else SyncBase(), None
    rows = RowBase(numbers, tensors, spec.intervals[0]) if tensors else None
    return rows or SyncBase(), TouchedRows(numbers, rows.save if rows else None)


def weight_of(stores: Sequence[RowStore]) -> Sequence[RowStore]:
    return stores[:1]


def moments_of(stores: Sequence[RowStore]) -> Sequence[RowStore]:
    return stores[1:]


def whole(tensors: Iterable[torch.Tensor]) -> Iterator[Block]:
    """A block of all of each tensor."""
    return (Block(FlatRows(tensor)) for tensor in tensors)


def blocks_of(
    numbers: RowNumbers,
    rows: Rows | None,
    of: Callable[[Sequence[RowStore]], Sequence[RowStore]],
    block: Callable[[RowStore, torch.Tensor | None], Block],
) -> Iterator[Block]:
    """A `block` of each tensor that is meant `of` every shard; of every run, where it is `rows`."""
    if rows is None:
        for shard in numbers.shards:
            yield from (block(store, None) for store in of(shard.rows))
        return
    for stores, numbers_of_run in numbers.by_run(rows):
        for store in of(stores):
            found = block(store, numbers_of_run)
            # Where a block has bases, these are found by its numbers.
            if found.base is None and isinstance(store, JoinedRows):
                found = Block(*store.placed(numbers_of_run))
            yield found


class OverflowWarning:
    """Warns of changes too large for fp16: the first time, then at 10, 100, 1000, ... syncs."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._num_syncs = 0
        self._warn_at = 1

    def count(self, num_overflows: int) -> None:
        """Count a sync, of which some had to travel in fp32 if `num_overflows`."""
        if not num_overflows:
            return
        self._num_syncs += 1
        if self._num_syncs < self._warn_at:
            return
        self._warn_at *= 10
        self._warn(
            "parallelism.sync.dtype fp16: a change since the last sync was too large for fp16 on "
            "some copy, so all of the sync travelled in fp32 (nothing is lost); syncs with "
            f"such changes so far: {self._num_syncs}. Use bf16, a lower optimizer.sparse.lr, or "
            "sync more often"
        )


def apply_difference(
    current: torch.Tensor, snapshot: torch.Tensor, mean: torch.Tensor
) -> torch.Tensor:
    """`mean` plus what changed since `snapshot`: exactly `mean` where nothing did.

    All of one shape and dtype; computed in at least fp32, in `current` where that is so precise. Of
    what is no floating-point number, what changed since the snapshot stays as it is. A second
    moment stays non-negative where `trainer.spec.validation.check_overlap` lets it come late.
    """
    if not current.is_floating_point():
        return torch.where(current == snapshot, mean, current)
    moved = current.to(torch.promote_types(current.dtype, torch.float32))
    return moved.sub_(snapshot).add_(mean).to(current.dtype)


class SyncThread:
    """Runs functions in the background of the training step, in the order submitted."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._newest: Future[None] | None = None

    def submit(self, task: Callable[[], None]) -> Callable[[], None]:
        """Start `task`; the function returned waits for it and raises what it raised."""
        if self._stream is not None:
            return self._queue_on(self._stream, task)
        before = self._newest

        def run() -> None:
            if before is not None:
                wait([before])
            task()

        self._newest = in_background(run, "sync")
        return self._newest.result

    @staticmethod
    def _queue_on(stream: torch.cuda.Stream, task: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            task()
        return lambda: torch.cuda.current_stream(stream.device).wait_stream(stream)


class PendingSync:
    """Blocks whose means are formed, and applied later; where training goes on, with a snapshot.

    Takes memory for the means, and as much for the snapshot, which is in `buffers`: a sync that is
    pending has them to itself.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        replicas: ReplicaCollectives,
        buffers: Buffers | None = None,
        trains_on: bool = True,
    ) -> None:
        self.replicas = replicas
        self._buffers = buffers or Buffers(replicas.device)
        self._batches = list(replicas.batches(blocks))
        is_cuda = replicas.device.type == "cuda"
        self._landing_bytes = None if is_cuda else min(_CACHE_BYTES, replicas.chunk_bytes)
        self._snapshots: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []  # or all replicas' values, of which they are made
        for index, batch in enumerate(self._batches if trains_on else []):
            is_gathered = replicas.gathers(batch)
            out = batch.buffer(self._buffers, ("mean", index), 2 if is_gathered else 1)
            if is_gathered:
                snapshot = replicas.own_part(out)
            else:
                snapshot = batch.buffer(self._buffers, ("snapshot", index))
            self._snapshots.append(batch.pack_into(snapshot))
            self.means.append(out)
        self.num_formed = 0
        self._in_fp32 = False

    @torch.no_grad()
    def form_means(self, share: float = 1.0) -> None:
        """Form the means of the first `share` of the batches, where they are not yet. Collective.

        The same share on all replicas.
        """
        if not self.num_formed:
            self._in_fp32 = self.replicas.any_overflow(self._batches, self._snapshots)
        missing = range(self.num_formed, math.ceil(share * len(self._batches)))
        run_exchanges(missing, self._form_mean, self.replicas.num_at_once)
        self.num_formed = missing.stop

    def _form_mean(self, index: int, slot: int) -> Exchange[None]:
        batch = self._batches[index]
        if not self._snapshots:
            self.means.append(batch.pack(self._buffers, ("mean", index)))
        mean = self.means[index]
        values = self._snapshots[index] if self._snapshots else mean
        yield from self.replicas.average_batch(batch, values, mean, self._in_fp32, slot)

    def land(self) -> list[Block]:
        """Apply the means; the blocks that it was about, in pieces."""
        for index, (batch, means) in enumerate(zip(self._batches, self.means, strict=True)):
            start, parts = 0, iter([batch])
            if self._landing_bytes is not None:
                parts = self.replicas.batches(batch.blocks, self._landing_bytes)
            for part in parts:
                place = slice(start, start := start + part.numel)
                then = (self._snapshots[index] if self._snapshots else means)[place]
                pairs = zip(part.unpack(then), part.unpack(self._mean(index, place)), strict=True)
                for (block, snapshot), (_, mean) in pairs:
                    if self._snapshots:
                        self._move(block, snapshot, mean)
                    else:
                        block.write(mean)
                    block.agree(mean)
        return [block for batch in self._batches for block in batch.blocks]

    def _mean(self, index: int, place: slice) -> torch.Tensor:
        """The mean of a batch at `place`."""
        means = self.means[index]
        if not self._snapshots or means.numel() == self._snapshots[index].numel():
            return means[place]
        values = means.view(self.replicas.num_replicas, -1)[:, place]
        return self.replicas.mean(values, self._buffers.take("mean", values.shape[1], means.dtype))

    def _move(self, block: Block, snapshot: torch.Tensor, mean: torch.Tensor) -> None:
        """Apply what `mean`, flat, says of `block` against its values at the `snapshot`."""
        if isinstance(block.store, FlatRows) and block.rows is not None:
            shape = block.num_rows, *block.tensor.shape[1:]
            if block.store.move(block.rows, snapshot.view(shape), mean.view(shape)):
                return
        current = self._buffers.take("current", block.numel, block.tensor.dtype)
        block.read_into(current)
        block.write(apply_difference(current, snapshot, mean))


class DeferredSync:
    """A pending sync whose means `background` forms while training goes on: an equal portion in
    each of `num_steps` steps, the first at once.
    """

    def __init__(self, pending: PendingSync, background: SyncThread, num_steps: int) -> None:
        self._pending = pending
        self._background, self._num_steps = background, num_steps
        self._num_started = 0
        self._wait: Callable[[], None] = lambda: None
        self.start()

    @property
    def has_started_all(self) -> bool:
        """Whether the last of its steps has begun, after which it is to land."""
        return self._num_started == self._num_steps

    def start(self, num_portions: int = 1) -> None:
        """Start so many more portions, or what is left."""
        if self.has_started_all:
            return
        self._num_started = min(self._num_started + num_portions, self._num_steps)
        before, share = self._wait, self._num_started / self._num_steps

        def form() -> None:
            before()  # raises what it raised: the other replicas would not take part in the rest
            self._pending.form_means(share)

        self._wait = self._background.submit(form)

    def land(self) -> list[Block]:
        """Wait until all means are there, what has not begun included, and apply them; the blocks.

        Raises what was raised.
        """
        self.start(self._num_steps)
        self._wait()
        return self._pending.land()

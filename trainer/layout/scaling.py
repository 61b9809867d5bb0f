"""What a spec asks of a rank; its job at several sizes, and its layouts compared, on a cluster.

Pure arithmetic over the spec, no torch: nothing is measured, and no table is placed by TorchRec.
Where a table may be whole or split, all that may are whole, each on the rank with fewest lookups
(the largest first), or all are split by rows; the faster of the two counts, if it fits. A pooled
table split by rows sends partial sums for all samples of the group: L times as many bytes. The
imbalance is that of whole tables; ids of split ones are taken as even, and ids as distinct.

The network is counted from the spec's layers; a `module` of the user's own counts as nothing.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.layout.choice import Choice, candidates, choose, need_of
from trainer.layout.cost import (
    MAX_GPUS,
    Cluster,
    ClusterError,
    Cost,
    MemoryUse,
    StepTime,
    Workload,
    cost_of,
)
from trainer.layout.layout import Layout, LayoutError
from trainer.spec.job import JobSpec
from trainer.spec.model import InteractionSpec
from trainer.spec.tables import NUM_BYTES, EmbeddingTableSpec

# Sync intervals to compare, beside the spec's own.
_SYNC_INTERVALS = (1, 4, 16, 64)
_FLOAT_BYTES = 4
_ID_BYTES = 8
# A lookup reads a row, and its backward pass reads and writes it and its optimizer state.
_WEIGHT_PASSES, _STATE_PASSES = 3, 2
# A weight multiplies and adds once forward and twice backward.
_FLOPS_PER_WEIGHT = 6
# Vectors and activations are kept with their gradients.
_WITH_GRADIENT = 2
_NUM_DENSE_MOMENTS = {"adam": 2, "adagrad": 1, "sgd": 0}
_VECTORS_OF_HISTORY = 2


@dataclass(frozen=True)
class ScalingRow:
    """One size of a job: what it would do on T GPUs; `samples_per_s` is None out of memory.

    `scaling_factor` is over the smallest size of the same kind (one copy, or several) that fits.
    `memory_share` is the peak of HBM with what the allocator keeps in reserve, and may be above 1.
    """

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    num_hosts: int
    fits: bool
    samples_per_s: float | None
    scaling_factor: float | None
    memory_share: float
    lookup_imbalance: float
    step: StepTime
    peak: MemoryUse
    mean: MemoryUse


def scaling_sizes(text: str) -> tuple[int, ...]:
    """Numbers of GPUs of `256..4096`, doubling; raises `ClusterError` with what is wrong."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    if found is None:
        raise ClusterError(f"{text!r} is no range of GPUs: write it as 256..4096")
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most <= MAX_GPUS:
        raise ClusterError(
            f"{text!r}: the first number must be at least 1 and at most the second, and that at "
            f"most {MAX_GPUS}"
        )
    doubled = (least << power for power in itertools.count())
    return tuple(itertools.takewhile(lambda size: size <= most, doubled))


def scaling_of(spec: JobSpec, cluster: Cluster, sizes: Sequence[int]) -> tuple[ScalingRow, ...]:
    """Full model parallelism at each size, then the layout of the spec, or that `auto` takes.

    Table sizes must be known. Raises `ClusterError` for sizes that the cluster does not have, and
    `SpecError` for those that the spec does not allow.
    """
    one_copy: list[tuple[Workload, Cost]] = []
    copies: list[tuple[Workload, Cost]] = []
    for size in sizes:
        num_hosts = cluster.hosts_for(size)
        one_copy.append(_fastest(spec, Layout(size, size, "intra_host"), cluster))
        sized = _at_size(spec, cluster, size, num_hosts)
        if sized is not None:
            copies.append(_fastest(*sized, cluster))
    return (*_rows(one_copy, cluster), *_rows(copies, cluster))


def _at_size(
    spec: JobSpec, cluster: Cluster, world_size: int, num_hosts: int
) -> tuple[JobSpec, Layout] | None:
    """The spec and its layout on T GPUs; None where there is one copy, or `auto` finds no room."""
    given = spec.parallelism.shard_group_size
    if given != "auto" and given >= world_size:
        return None
    sized = spec.with_workers(world_size)
    hosts = (min(world_size, cluster.gpus_per_host),) * num_hosts
    try:
        layout = choose(need_of(sized, hosts, cluster.hbm_bytes)).layout
    except LayoutError:
        if not sized.parallelism.is_resolved:
            return None
        layout = Layout(world_size, sized.parallelism.group_size, sized.parallelism.placement)
    if layout.num_replicas == 1:
        return None
    return sized.with_layout(layout.shard_group_size, layout.placement), layout


def _fastest(spec: JobSpec, layout: Layout, cluster: Cluster) -> tuple[Workload, Cost]:
    return _fastest_of(_between_syncs(spec, layout), spec, layout, cluster)


def _between_syncs(spec: JobSpec, layout: Layout) -> list[Workload]:
    """What there is to do beside syncs, with tables whole and with tables split."""
    return [_unsynced(spec, layout, is_split) for is_split in (False, True)]


def _fastest_of(
    unsynced: Sequence[Workload], spec: JobSpec, layout: Layout, cluster: Cluster
) -> tuple[Workload, Cost]:
    """The fastest that fits, with the spec's syncs; what needs least where none does."""
    tried = []
    for each in unsynced:
        workload = _with_sync(each, spec) if layout.num_replicas > 1 else each
        tried.append((workload, cost_of(workload, layout, cluster)))
    fitting = [each for each in tried if each[1].fits]
    if fitting:
        return max(fitting, key=lambda each: each[1].samples_per_s)
    return min(tried, key=lambda each: each[1].peak.needed_bytes)


def _rows(found: Sequence[tuple[Workload, Cost]], cluster: Cluster) -> Iterator[ScalingRow]:
    first = next((cost.samples_per_s for _, cost in found if cost.fits), None)
    for workload, cost in found:
        layout = cost.layout
        yield ScalingRow(
            **vars(layout),
            num_replicas=layout.num_replicas,
            num_hosts=cluster.hosts_for(layout.world_size),
            fits=cost.fits,
            samples_per_s=cost.samples_per_s if cost.fits else None,
            scaling_factor=cost.samples_per_s / first if cost.fits and first else None,
            memory_share=cost.peak.total_bytes / cluster.hbm_bytes,
            lookup_imbalance=workload.lookup_imbalance,
            step=cost.step,
            peak=cost.peak,
            mean=cost.mean,
        )


# ---- layouts of one size, side by side


@dataclass(frozen=True)
class Candidate:
    """A layout with a sync interval, and what it is worth.

    `rows_at_risk` are the most that a lost host undoes: of one group since a sync where groups are
    failure domains, else of all workers since a checkpoint. `is_chosen` marks what the spec and
    `auto` take, `is_on_front` what no other beats in speed, memory and survivability at once.
    """

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    sync_every_steps: int
    failure_domain: str
    num_hosts_survived: int
    rows_at_risk: int
    fits: bool
    samples_per_s: float
    memory_share: float
    step: StepTime
    is_chosen: bool = False
    is_on_front: bool = False

    def is_beaten_by(self, other: Candidate) -> bool:
        """Whether another is at least as good in everything and better in something."""
        mine, its = self._merits, other._merits
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    @property
    def _merits(self) -> tuple[float, ...]:
        survived = (self.num_hosts_survived, -self.rows_at_risk)
        # No estimate is better than to three digits.
        return (float(f"{self.samples_per_s:.3g}"), -self.memory_share, *survived)


def candidates_of(spec: JobSpec, cluster: Cluster) -> tuple[str, tuple[Candidate, ...]]:
    """Layouts of the spec's T workers that survive what they must, those that fit first, by speed;
    and why one of them is chosen.

    L and the placement are free whatever the spec says. Raises `ClusterError` where the cluster
    does not have T GPUs, and `LayoutError` where no layout survives what it must.
    """
    world_size = spec.parallelism.world_size
    hosts = (min(world_size, cluster.gpus_per_host),) * cluster.hosts_for(world_size)
    sized = spec.with_workers(world_size)
    need = need_of(sized, hosts, cluster.hbm_bytes)
    chosen = choose(need)

    def is_same(choice: Choice) -> bool:
        return (choice.layout, choice.group_hosts) == (chosen.layout, chosen.group_hosts)

    # The cost says what has room.
    free = replace(need, shard_group_size=None, placement=None, worker_table_bytes=None)
    found = [
        replace(each, is_chosen=is_own and is_same(choice))
        for choice in candidates(free)
        if choice.layout.world_size == world_size
        and choice.num_hosts_survived >= need.survive_hosts
        for is_own, each in _at_intervals(sized, choice, cluster)
    ]
    fitting = [each for each in found if each.fits]
    marked = [
        replace(each, is_on_front=each.fits and not any(map(each.is_beaten_by, fitting)))
        for each in found
    ]
    best_first = sorted(marked, key=lambda each: (not each.fits, -each.samples_per_s))
    return _why(chosen, best_first), tuple(best_first)


def _why(chosen: Choice, best_first: Sequence[Candidate]) -> str:
    """The choice's reason, and what the estimate says of it beside the fastest."""
    own = next((each for each in best_first if each.is_chosen), None)
    if own is None:
        return chosen.reason
    if not own.fits:
        return f"{chosen.reason}; by the estimate it runs out of memory"
    rivals = [each for each in best_first if each.sync_every_steps == own.sync_every_steps]
    fastest = next(each for each in rivals if each.fits)
    if fastest.samples_per_s <= own.samples_per_s:
        return f"{chosen.reason}; by the estimate none is faster with this sync interval"
    more = fastest.samples_per_s / own.samples_per_s - 1
    return (
        f"{chosen.reason}; by the estimate {fastest.num_replicas} x {fastest.shard_group_size} "
        f"{fastest.placement} is {more:.0%} faster with this sync interval"
    )


def _at_intervals(
    spec: JobSpec, choice: Choice, cluster: Cluster
) -> Iterator[tuple[bool, Candidate]]:
    """A layout at several sync intervals, with whether that is the spec's own."""
    layout, batch = choice.layout, spec.data.batch_size
    own = spec.parallelism.sync.every_steps
    intervals = sorted({own, *_SYNC_INTERVALS}) if layout.num_replicas > 1 else [own]
    if spec.parallelism.sync.overlap:  # which is set for its interval
        intervals = [own]
    laid_out = spec
    if layout.num_replicas > 1:
        laid_out = spec.with_layout(layout.shard_group_size, layout.placement)
    unsynced = _between_syncs(laid_out, layout)
    for every_steps in intervals:
        sync = laid_out.parallelism.sync.model_copy(update={"every_steps": every_steps})
        parallelism = laid_out.parallelism.model_copy(update={"sync": sync})
        at_interval = laid_out.model_copy(update={"parallelism": parallelism})
        _, cost = _fastest_of(unsynced, at_interval, layout, cluster)
        rows_at_risk = spec.checkpoint.every_steps * layout.world_size * batch
        if choice.failure_domain == "replica_group":
            rows_at_risk = every_steps * layout.shard_group_size * batch
        yield (
            every_steps == own,
            Candidate(
                **vars(layout),
                num_replicas=layout.num_replicas,
                sync_every_steps=every_steps,
                failure_domain=choice.failure_domain,
                num_hosts_survived=choice.num_hosts_survived,
                rows_at_risk=rows_at_risk,
                fits=cost.fits,
                samples_per_s=cost.samples_per_s,
                memory_share=cost.peak.total_bytes / cluster.hbm_bytes,
                step=cost.step,
            ),
        )


# ---- a spec as a workload


@dataclass(frozen=True)
class _TableLoad:
    """One table as a sample sees it, in bytes; `held` is what one copy of it takes."""

    is_split: bool
    is_everywhere: bool
    is_pooled: bool
    weights: int
    state: int
    num_ids: float
    lookup: float
    output: int
    sent: int

    @property
    def held(self) -> int:
        return self.weights + self.state


def workload_of(spec: JobSpec, layout: Layout, *, is_split: bool) -> Workload:
    """What the spec asks of the ranks of a layout; `is_split` splits the tables that may be.

    Where there are several copies the spec is one of T workers with that layout.
    """
    workload = _unsynced(spec, layout, is_split)
    return _with_sync(workload, spec) if layout.num_replicas > 1 else workload


def _unsynced(spec: JobSpec, layout: Layout, is_split: bool) -> Workload:
    size = layout.shard_group_size
    loads = [_load_of(spec, table, size, is_split) for table in spec.embedding_tables]
    exchanged = [load for load in loads if not load.is_everywhere]
    lookup_imbalance, table_imbalance = _imbalances(exchanged, size)
    # What every rank holds whole counts L times: a rank is taken to have an L-th of the sum.
    copies = {load: size if load.is_everywhere else 1 for load in loads}
    partial = {load: size if load.is_split and load.is_pooled else 1 for load in exchanged}
    vectors = sum(load.output for load in loads)
    network = _Network.of(spec)
    weight_bytes = network.num_weights * _FLOAT_BYTES
    return Workload(
        batch_size=spec.data.batch_size,
        table_bytes=sum(load.weights * copies[load] for load in loads),
        optimizer_bytes=sum(load.state * copies[load] for load in loads),
        synced_bytes=0,
        lookup_bytes=sum(load.lookup for load in loads),
        dense_flops=network.flops,
        precision=spec.training.dense_precision,
        input_bytes=sum(load.num_ids * _ID_BYTES for load in exchanged),
        output_bytes=sum(load.sent * partial[load] for load in exchanged),
        lookup_activation_bytes=_WITH_GRADIENT
        * sum(load.output * partial[load] for load in exchanged),
        dense_activation_bytes=_WITH_GRADIENT * (vectors + network.num_activations * _FLOAT_BYTES),
        dense_bytes=weight_bytes * (2 + _NUM_DENSE_MOMENTS[spec.optimizer.dense.name]),
        dense_gradient_bytes=weight_bytes,
        lookup_imbalance=lookup_imbalance,
        table_imbalance=table_imbalance,
    )


def _with_sync(workload: Workload, spec: JobSpec) -> Workload:
    sync = spec.parallelism.sync
    at_sync = spec.parallelism.dense_policy == "at_sync"
    return replace(
        workload,
        synced_bytes=sum(_synced_bytes(spec, table) for table in spec.embedding_tables),
        sync_buffer_bytes=sum(map(spec.sync_bytes, spec.embedding_tables)),
        sync_every_steps=sync.every_steps,
        overlap_steps=sync.overlap_steps,
        dense_every_steps=sync.every_steps if at_sync else 1,
    )


def _load_of(spec: JobSpec, table: EmbeddingTableSpec, size: int, is_split: bool) -> _TableLoad:
    types, dim = set(table.constraints.sharding_types), table.embedding_dim
    may_be_whole = bool(types & {"table_wise", "column_wise"})
    may_be_split = bool(types & {"row_wise", "table_row_wise", "grid_shard"})
    features = spec.features_of_tables[table.name]
    is_pooled = not any(each.is_sequence for each in features)
    num_vectors = sum(1 if is_pooled else each.length_limit for each in features)
    num_samples = spec.data.batch_size * spec.parallelism.world_size
    num_ids = spec.lookups_per_step(table) / num_samples
    table_bytes = spec.size_bytes(table)
    assert isinstance(table.num_embeddings, int) and table_bytes is not None
    weights = table.num_embeddings * dim * NUM_BYTES[table.data_type]
    state_bytes = spec.optimizer.sparse.state_bytes_per_row(dim)
    row_bytes = _WEIGHT_PASSES * dim * NUM_BYTES[table.data_type] + _STATE_PASSES * state_bytes
    precisions = spec.parallelism.all_to_all
    return _TableLoad(
        is_split=size > 1 and may_be_split and (is_split or not may_be_whole),
        is_everywhere=types == {"data_parallel"},
        is_pooled=is_pooled,
        weights=weights,
        state=table_bytes - weights,
        num_ids=num_ids,
        lookup=num_ids * row_bytes,
        output=num_vectors * dim * _FLOAT_BYTES,
        sent=num_vectors * dim * (NUM_BYTES[precisions.forward] + NUM_BYTES[precisions.backward]),
    )


def _imbalances(loads: Sequence[_TableLoad], size: int) -> tuple[float, float]:
    """Largest share over mean, of lookups and of bytes, once whole tables have their ranks."""
    whole = [load for load in loads if not load.is_split]
    ranks = [(0.0, 0)] * min(size, max(1, len(whole)))
    for load in sorted(whole, key=lambda load: (load.lookup, load.held), reverse=True):
        lookup, held = ranks[0]
        heapq.heapreplace(ranks, (lookup + load.lookup, held + load.held))
    lookups, bytes_held = sum(load.lookup for load in loads), sum(load.held for load in loads)
    even_lookups = sum(load.lookup for load in loads if load.is_split) / size
    even_bytes = sum(load.held for load in loads if load.is_split) / size
    return (
        (max(lookup for lookup, _ in ranks) + even_lookups) * size / lookups if lookups else 1.0,
        (max(held for _, held in ranks) + even_bytes) * size / bytes_held if bytes_held else 1.0,
    )


def _synced_bytes(spec: JobSpec, table: EmbeddingTableSpec) -> float:
    """Bytes of one copy of a table that a sync averages, if no id comes twice."""
    sync, optimizer = spec.parallelism.sync, spec.optimizer.sparse
    assert isinstance(table.num_embeddings, int)
    num_rows = table.num_embeddings
    num_lookups = sync.every_steps * spec.lookups_per_step(table)
    is_full = sync.mode == "full" or optimizer.changes_untouched_rows
    if not is_full and num_lookups <= sync.full_above * num_rows:
        num_rows = num_lookups
    row_bytes = table.embedding_dim * NUM_BYTES[sync.dtype]
    if sync.optimizer_state != "never":
        row_bytes += optimizer.state_bytes_per_row(table.embedding_dim)
    return num_rows * row_bytes


@dataclass(frozen=True)
class _Network:
    """Weights of the dense part; operations and numbers kept for one sample."""

    num_weights: int
    flops: int
    num_activations: int

    @classmethod
    def of(cls, spec: JobSpec) -> _Network:
        """As `trainer.models.networks` builds it."""
        model, dim = spec.model, spec.embedding_tables[0].embedding_dim
        if model.module is not None:
            return cls(0, 0, 0)
        transformer = model.transformer
        # The history is read by the encoder instead of being one vector of its own.
        num_vectors = len(spec.sparse_features)
        num_vectors += _VECTORS_OF_HISTORY - 1 if transformer else 0
        crossed = (num_vectors + 1) * dim
        layers = list(itertools.pairwise([len(spec.dense_features), *model.dense_arch.layer_sizes]))
        if model.arch == "dlrm":
            crossed = dim + num_vectors * (num_vectors + 1) // 2
        else:
            cross = model.interaction_arch or InteractionSpec()
            low_rank = [(crossed, cross.low_rank_dim), (cross.low_rank_dim, crossed)]
            layers += low_rank * cross.num_layers
        layers += itertools.pairwise([crossed, *model.over_arch.layer_sizes])
        counted = sum(inputs * outputs for inputs, outputs in layers)
        activations = sum(outputs for _, outputs in layers)
        if transformer is None:
            return cls(counted, _FLOPS_PER_WEIGHT * counted, activations)
        limits = {each.name: each.length_limit for each in spec.sequence_features}
        length = limits[transformer.sequence] + 1
        block = 4 * dim * dim + 2 * dim * transformer.feedforward_dim
        encoder = 2 * dim * dim + transformer.num_layers * block
        kept = (6 * dim + transformer.feedforward_dim) * transformer.num_layers * length
        flops = _FLOPS_PER_WEIGHT * (counted + length * encoder)
        return cls(counted + encoder, flops, activations + kept)

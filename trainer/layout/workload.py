"""What a spec asks of the ranks of one sharding group: bytes, operations, and who has most of them.

Pure arithmetic over the spec, no torch. How tables are sharded is TorchRec's to say (`GroupPlan`,
made by `trainer.parallel.group_planner`); without it tables up to a load that is given are whole,
each on the rank with fewest lookups (the largest first), and the others split by rows. Ids
count as distinct, those of split tables as even. A pooled table split by rows sends partial sums
for all samples of the group: as many times the bytes as it has parts.

The network is counted from the spec's layers; a `module` of the user's own counts as nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel

from trainer.layout.cost import Workload
from trainer.layout.layout import Layout
from trainer.spec.job import JobSpec
from trainer.spec.model import InteractionSpec
from trainer.spec.tables import NUM_BYTES, EmbeddingTableSpec

_FLOAT_BYTES = 4
_ID_BYTES = 8
DATA_PARALLEL = "data_parallel"
_WHOLE = frozenset({"table_wise", "column_wise"})
_SPLIT = frozenset({"row_wise", "table_row_wise", "grid_shard"})
# A lookup reads a row, and its backward pass reads and writes it and its optimizer state.
_WEIGHT_PASSES, _STATE_PASSES = 3, 2
# A weight multiplies and adds once forward and twice backward.
_FLOPS_PER_WEIGHT = 6
# Vectors and activations are kept with their gradients.
_WITH_GRADIENT = 2
_VECTORS_OF_HISTORY = 2
# As FBGEMM's cache begins by default, and before the planner enlarges it.
_LEAST_CACHED = {"fused_uvm_caching": 0.2, "auto": 0.01}


class GroupTopology(BaseModel, extra="forbid", frozen=True):
    """What TorchRec's planner is told of one sharding group of L ranks.

    `memory_bytes` is a worker's, on its device; `host_memory_bytes` its share of the host's, where
    that is another. `ranks_per_host` is None where hosts hold unequal numbers of the group's ranks.
    """

    shard_group_size: int
    ranks_per_host: int | None
    device: str
    memory_bytes: int
    host_memory_bytes: int = 0
    memory_bytes_per_s: float
    intra_host_bytes_per_s: float
    inter_host_bytes_per_s: float


def ranks_per_host_anywhere(size: int, gpus_per_host: int) -> int | None:
    """`GroupTopology.ranks_per_host` of a sharding group that may lie anywhere, and has to be
    planned as all others are: that of one alone on its hosts."""
    most = min(size, gpus_per_host)
    return None if size % most else most


class TablePlacement(BaseModel, extra="forbid", frozen=True):
    """How one table is sharded; `ranks` are positions in the group, None for all of them.

    `row_parts` are the parts that its rows are in, of which each has partial sums for all samples.
    `load_factor` is the share of rows that a cache in GPU memory has room for, 1 without one.
    """

    name: str
    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...] | None
    row_parts: int = 1
    load_factor: float = 1.0


class RankLoad(BaseModel, extra="forbid", frozen=True):
    """What one rank of a group holds of the tables, in bytes, and what it does in a step.

    `lookup_bytes`, `input_bytes` and `output_bytes` are those of all samples of its group.
    """

    tables_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    sync_bytes: float = 0.0
    lookup_bytes: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0


class GroupPlan(BaseModel, extra="forbid", frozen=True):
    """TorchRec's plan of one sharding group: tables in the spec's order, loads by position.

    Where there is none, `obstacle` says why, and the rest is empty.
    """

    tables: tuple[TablePlacement, ...] = ()
    ranks: tuple[RankLoad, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True)
class TableLoad:
    """One table as a sample sees it, in bytes; `held` is what one copy of it takes.

    One that `is_everywhere` has a dense gradient, which DDP averages, and `beside` of what is kept
    to update it.
    """

    row_parts: int
    is_everywhere: bool
    is_pooled: bool
    weights: int
    state: int
    beside: int
    num_ids: float
    lookup: float
    output: int
    sent: int

    @property
    def held(self) -> int:
        return self.weights + self.kept

    @property
    def kept(self) -> int:
        """Optimizer state, and what else updates take."""
        return self.state + (self.beside if self.is_everywhere else 0)

    @property
    def gradient(self) -> int:
        return self.weights if self.is_everywhere else 0

    @property
    def copies_sent(self) -> int:
        """How often a vector is sent: each part of a pooled table has sums of its own."""
        return self.row_parts if self.is_pooled else 1


def workload_of(
    spec: JobSpec,
    layout: Layout,
    *,
    most_load: float,
    is_cached: bool,
    whole: Sequence[TableLoad],
) -> Workload:
    """What the spec asks of the ranks of a layout, without syncs.

    Tables that may be whole are up to `most_load`, the larger one of their shares of bytes and of
    lookups, where 1 is that of one rank. `is_cached` leaves as many weights in host memory as
    the spec allows; time counts them as if they were not. `whole` is `whole_loads` of the spec.
    """
    size = layout.shard_group_size
    shares = rank_shares([(load.held, load.lookup) for load in whole], size)
    loads = [
        _laid_out(table, load, size, share > most_load)
        for table, load, share in zip(spec.embedding_tables, whole, shares, strict=True)
    ]
    if is_cached:
        loads = [
            replace(load, weights=round(load.weights * least_cached(spec, table)))
            for load, table in zip(loads, spec.embedding_tables, strict=True)
        ]
    lookup_imbalance, table_imbalance = _imbalances(loads, size)
    return replace(
        _of_loads(spec, loads, size),
        lookup_imbalance=lookup_imbalance,
        table_imbalance=table_imbalance,
    )


def least_cached(spec: JobSpec, table: EmbeddingTableSpec) -> float:
    """The least share of a table's rows in GPU memory."""
    kernel = spec.kernel_of(table)
    given = table.constraints.cache_load_factor or spec.parallelism.planner.cache_load_factor
    return 1.0 if kernel == "fused" else given or _LEAST_CACHED[kernel]


def planned(spec: JobSpec, layout: Layout, plan: GroupPlan) -> Workload:
    """`workload_of` with the tables as TorchRec sharded them."""
    loads = [
        table_load(spec, table, where.row_parts, is_everywhere=where.sharding_type == DATA_PARALLEL)
        for table, where in zip(spec.embedding_tables, plan.tables, strict=True)
    ]
    return replace(
        _of_loads(spec, loads, layout.shard_group_size),
        lookup_imbalance=_over_mean([rank.lookup_bytes for rank in plan.ranks]),
        table_imbalance=_over_mean(
            [rank.tables_bytes + rank.optimizer_bytes for rank in plan.ranks]
        ),
    )


def _over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _of_loads(spec: JobSpec, loads: Sequence[TableLoad], size: int) -> Workload:
    exchanged = [load for load in loads if not load.is_everywhere]
    vectors = sum(load.output for load in loads)
    network = Network.of(spec)
    weight_bytes = network.num_weights * _FLOAT_BYTES
    accumulate_steps = spec.training.accumulate_steps
    # Weights, gradients, moments; what accumulates is apart from what is averaged.
    num_dense = 2 + spec.optimizer.dense.num_moments + (accumulate_steps > 1)
    return Workload(
        batch_size=spec.data.batch_size,
        # What every rank holds whole counts L times: a rank is taken to have an L-th of the sum.
        table_bytes=sum(load.weights * (size if load.is_everywhere else 1) for load in loads),
        optimizer_bytes=sum(load.kept * (size if load.is_everywhere else 1) for load in loads),
        synced_bytes=0,
        lookup_bytes=sum(load.lookup for load in loads),
        dense_flops=network.flops,
        precision=spec.training.dense_precision,
        input_bytes=sum(load.num_ids * _ID_BYTES for load in exchanged),
        output_bytes=sum(load.sent * load.copies_sent for load in exchanged),
        lookup_activation_bytes=_WITH_GRADIENT
        * sum(load.output * load.copies_sent for load in exchanged),
        dense_activation_bytes=_WITH_GRADIENT * (vectors + network.num_activations * _FLOAT_BYTES),
        dense_bytes=weight_bytes * num_dense,
        dense_gradient_bytes=weight_bytes + sum(load.gradient for load in loads),
        dense_every_steps=accumulate_steps,
    )


@dataclass(frozen=True)
class SyncSums:
    """Bytes of one copy of all tables that a sync averages, and that it holds beside them."""

    synced_bytes: float
    buffer_bytes: float

    @classmethod
    def of(cls, spec: JobSpec) -> SyncSums:
        """Those of the spec's syncs; of its layout only the failure domain matters."""
        synced = 0
        for table in spec.embedding_tables:
            assert isinstance(table.num_embeddings, int)
            rows = synced_rows(spec, table, table.num_embeddings)
            synced += rows * synced_row_bytes(spec, table)
        return cls(synced, sum(map(spec.sync_bytes, spec.embedding_tables)))


def with_sync(workload: Workload, spec: JobSpec, sums: SyncSums | None = None) -> Workload:
    """A workload with what the spec's syncs ask for; where those are tuned, as it begins."""
    sync, sums = spec.parallelism.sync, sums or SyncSums.of(spec)
    at_sync, every_steps = spec.parallelism.dense_policy == "at_sync", sync.intervals[0]
    return replace(
        workload,
        synced_bytes=sums.synced_bytes,
        sync_buffer_bytes=sums.buffer_bytes,
        sync_every_steps=every_steps,
        overlap_steps=sync.overlap_steps,
        dense_every_steps=every_steps if at_sync else workload.dense_every_steps,
    )


def whole_loads(spec: JobSpec) -> tuple[TableLoad, ...]:
    """The tables as they are whole; what depends on their layout is the same for every L."""
    return tuple(table_load(spec, table, 1) for table in spec.embedding_tables)


def rank_shares(loads: Sequence[tuple[float, float]], size: int) -> list[float]:
    """For (bytes, lookups) of each table the larger one of their shares; 1 is what a rank has."""
    held, looked_up = (sum(each) / size or 1.0 for each in zip(*loads, strict=True))
    return [max(load[0] / held, load[1] / looked_up) for load in loads]


def _laid_out(table: EmbeddingTableSpec, load: TableLoad, size: int, is_split: bool) -> TableLoad:
    """A table that is whole, or split over all ranks, as it may be."""
    types = table.constraints.sharding_types
    if types == (DATA_PARALLEL,):
        return replace(load, is_everywhere=True)
    may_be_whole = not _WHOLE.isdisjoint(types)
    is_in_parts = not _SPLIT.isdisjoint(types) and (is_split or not may_be_whole)
    return replace(load, row_parts=size) if is_in_parts and size > 1 else load


def table_load(
    spec: JobSpec, table: EmbeddingTableSpec, row_parts: int, *, is_everywhere: bool = False
) -> TableLoad:
    """A table whose rows are in so many parts, or all on every rank."""
    dim = table.embedding_dim
    features = spec.features_of_tables[table.name]
    is_pooled = not any(each.is_sequence for each in features)
    num_vectors = sum(1 if is_pooled else each.length_limit for each in features)
    num_samples = spec.data.batch_size * spec.parallelism.world_size
    num_ids = spec.lookups_per_step(table) / num_samples
    table_bytes = spec.size_bytes(table)
    assert isinstance(table.num_embeddings, int) and table_bytes is not None
    weights = table.num_embeddings * dim * NUM_BYTES[table.data_type]
    precisions = spec.parallelism.all_to_all
    return TableLoad(
        row_parts=row_parts,
        is_everywhere=is_everywhere,
        is_pooled=is_pooled,
        weights=weights,
        state=table_bytes - weights,
        beside=bytes_beside(table),
        num_ids=num_ids,
        lookup=num_ids * _row_bytes(spec, table, dim),
        output=num_vectors * dim * _FLOAT_BYTES,
        sent=num_vectors * dim * (NUM_BYTES[precisions.forward] + NUM_BYTES[precisions.backward]),
    )


def bytes_beside(table: EmbeddingTableSpec) -> int:
    """What a table that is whole on every rank has beside weights and optimizer state: a gradient,
    and of half precision a float32 copy of both (`DataParallelTables`)."""
    assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
    weight_bytes = NUM_BYTES[table.data_type]
    copy_bytes = 2 * _FLOAT_BYTES if weight_bytes < _FLOAT_BYTES else 0
    return table.num_embeddings * table.embedding_dim * (weight_bytes + copy_bytes)


def _row_bytes(spec: JobSpec, table: EmbeddingTableSpec, num_columns: int) -> int:
    """What a lookup of one row reads and writes of so many of its columns."""
    state_bytes = spec.optimizer.sparse.state_bytes_per_row(num_columns)
    return _WEIGHT_PASSES * num_columns * NUM_BYTES[table.data_type] + _STATE_PASSES * state_bytes


Shard = tuple[int, int, int]
"""(position of the rank, rows, columns) of one shard."""


def rank_loads(
    spec: JobSpec,
    size: int,
    placements: Sequence[TablePlacement],
    shards: Mapping[str, Sequence[Shard]],
) -> tuple[RankLoad, ...]:
    """What each of `size` ranks holds and does, from the shards of each table.

    Of the weights of a cached table only the cached share counts, which is in GPU memory.
    """
    totals = [dict.fromkeys(RankLoad.model_fields, 0.0) for _ in range(size)]
    group_samples = spec.data.batch_size * size
    is_state_by_row = spec.optimizer.sparse.is_state_by_row
    for table, where in zip(spec.embedding_tables, placements, strict=True):
        is_everywhere = where.sharding_type == DATA_PARALLEL
        load = table_load(spec, table, where.row_parts, is_everywhere=is_everywhere)
        sync_bytes = spec.sync_bytes(table)
        samples = spec.data.batch_size if is_everywhere else group_samples
        assert isinstance(table.num_embeddings, int)
        for position, rows, columns in shards[table.name]:
            row_share, column_share = rows / table.num_embeddings, columns / table.embedding_dim
            share = row_share * column_share
            ids = samples * load.num_ids * row_share
            vectors = column_share * (1.0 if load.is_pooled else row_share)
            rank = totals[position]
            rank["tables_bytes"] += load.weights * share * where.load_factor
            rank["optimizer_bytes"] += load.kept * (row_share if is_state_by_row else share)
            rank["sync_bytes"] += sync_bytes * share
            rank["lookup_bytes"] += ids * _row_bytes(spec, table, columns)
            if not is_everywhere:
                rank["input_bytes"] += ids * _ID_BYTES
                rank["output_bytes"] += samples * load.output * vectors
    return tuple(RankLoad(**each) for each in totals)


def _imbalances(loads: Sequence[TableLoad], size: int) -> tuple[float, float]:
    """Largest share over mean, of lookups and of bytes, once whole tables have their ranks."""
    loads = [load for load in loads if not load.is_everywhere]
    whole = [load for load in loads if load.row_parts == 1]
    ranks = [(0.0, 0)] * min(size, max(1, len(whole)))
    for load in sorted(whole, key=lambda load: (load.lookup, load.held), reverse=True):
        lookup, held = ranks[0]
        heapq.heapreplace(ranks, (lookup + load.lookup, held + load.held))
    lookups, bytes_held = sum(load.lookup for load in loads), sum(load.held for load in loads)
    even_lookups = sum(load.lookup for load in loads if load.row_parts > 1) / size
    even_bytes = sum(load.held for load in loads if load.row_parts > 1) / size
    return (
        (max(lookup for lookup, _ in ranks) + even_lookups) * size / lookups if lookups else 1.0,
        (max(held for _, held in ranks) + even_bytes) * size / bytes_held if bytes_held else 1.0,
    )


def synced_rows(spec: JobSpec, table: EmbeddingTableSpec, num_rows: int) -> int:
    """Rows of a table of `num_rows` that a sync averages, if no id comes twice."""
    sync = spec.parallelism.sync
    num_lookups = sync.intervals[0] * spec.lookups_per_step(table)
    is_full = spec.syncs_every_row or num_lookups > sync.full_above * num_rows
    return num_rows if is_full else num_lookups


def synced_row_bytes(spec: JobSpec, table: EmbeddingTableSpec) -> int:
    """Bytes of a row, with its optimizer state, that a sync averages."""
    sync = spec.parallelism.sync
    row_bytes = table.embedding_dim * NUM_BYTES[sync.dtype]
    if sync.optimizer_state != "never":
        row_bytes += spec.optimizer.sparse.state_bytes_per_row(table.embedding_dim)
    return row_bytes


@dataclass(frozen=True)
class Network:
    """Weights of the dense part; operations and numbers kept for one sample."""

    num_weights: int
    flops: int
    num_activations: int

    @classmethod
    def of(cls, spec: JobSpec) -> Network:
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

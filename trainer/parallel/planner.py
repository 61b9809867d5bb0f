"""Sharding plans: TorchRec's planner inside one sharding group, its topology, a bandwidth probe.

The planner runs on rank 0 only and its answer, a plan or why there is none (`PlanError`), is
given to all ranks: a rank that failed alone would leave the others waiting. All sharding groups
get the same plan, so the topology describes the poorest worker of any group. Groups that are
failure domains plan for themselves, at different times, wherever they lie: they reckon with the
bandwidths, full hosts and, on CPUs, memory in the description of the cluster, which are the same
for all. Plans number shards by position in the group; `place_plan` maps them to ranks.

On GPUs a table may be in host memory with a cache of its rows in HBM (`fused_uvm_caching`). Where
the spec leaves that open, TorchRec keeps in HBM what fits and shares what is left among the caches.

The probe (`parallelism.planner.bandwidths: measured`) times, on all workers at once as in training,

    memory       a copy inside each worker's memory
    intra_host   pairs of a sharding group's ranks on one host that swap a buffer
    inter_host   the same with pairs on different hosts

with sends and receives between those pairs and one gather of the results, all on the *global
group*. It takes about 0.1 s on CPU.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import logging
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torch.utils.benchmark import Timer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.proposers import (
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    CollectiveType,
    GeneralizedCommsBandwidth,
    HardwareConfig,
    KernelConfig,
    PlannerError,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import (
    CacheParams,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from trainer.layout.choice import size_text
from trainer.layout.cost import Cluster
from trainer.layout.hosts import host_memory_bytes
from trainer.layout.workload import (
    DATA_PARALLEL,
    GroupPlan,
    TablePlacement,
    bytes_beside,
    least_cached,
    rank_loads,
    rank_shares,
    ranks_per_host_anywhere,
    table_load,
)
from trainer.parallel.mesh import MeshGroups
from trainer.protocol import events
from trainer.spec.job import JobSpec
from trainer.spec.tables import NUM_BYTES, EmbeddingTableSpec, has_empty_block

logger = logging.getLogger(__name__)
Constraints = dict[str, ParameterConstraints]
_NUM_REPEATS = 3
# A GPU moves a small buffer before it has got going; a shaped network takes long over a large one.
_LINK_BYTES = {"cpu": 2**19, "cuda": 2**24}
_MEMORY_BYTES = {"cpu": 2**25, "cuda": 2**28}
# Sharding types that split a table over the ranks of one host.
_NODE_SHARDING_TYPES = frozenset({"table_row_wise", "grid_shard"})
_CACHING = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
_KERNELS = {
    "fused": [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value],
    "fused_uvm_caching": [_CACHING],
}
_KERNELS["auto"] = _KERNELS["fused"] + _KERNELS["fused_uvm_caching"]
# Shards x tables that TorchRec's search looks at in a second or so.
_MAX_SEARCH = 40_000
# Plans that it tries in a grid, where there are no more of them.
_MAX_GRID = 500
# Shards of split tables beyond that, and the loads up to which tables are whole, tried in turn.
_MAX_SHARDS = 8_000
_MOST_LOADS = (1.0, 0.25)
# In order of preference.
_SPLITTING = ("row_wise", "table_row_wise", "grid_shard")
_WHOLE = ("table_wise", "column_wise", "data_parallel")


class PlanError(ValueError):
    """No sharding plan is possible; the message says what is missing and what would help."""


def make_plan(
    model: nn.Module,
    spec: JobSpec,
    groups: MeshGroups,
    table_sharders: list[ModuleSharder[nn.Module]],
    cluster: Cluster | None = None,
) -> ShardingPlan:
    """Plan one sharding group on rank 0 and give it to all. Collective over the global group.

    `cluster` is what is known of the hosts. Raises `PlanError` on every rank.
    """
    bandwidths = None
    if spec.parallelism.planner.bandwidths == "measured":
        if spec.parallelism.failure_domain == "job":
            bandwidths = measure_bandwidths(groups)
        elif cluster is not None:
            bandwidths = Bandwidths.of(cluster.hbm_bytes_per_s, *cluster.host_links)
    size, ranks_per_host, num_on_host = groups.layout.shard_group_size, groups.ranks_per_host, None
    if spec.parallelism.failure_domain == "replica_group":
        # Another group may be spread otherwise, as this one may be in another life; and others
        # have their share of a host's memory.
        most = cluster.gpus_per_host if cluster else size
        ranks_per_host = ranks_per_host_anywhere(size, most)
        num_on_host = min(most, spec.parallelism.world_size)
    if num_on_host is not None and cluster is not None and groups.device.type == "cpu":
        # The least share of any host, by which the driver has chosen the layout.
        device_bytes = host_bytes = cluster.hbm_bytes
    else:
        device_bytes, host_bytes = least_memory_bytes(groups, num_on_host)
    device_bytes = spec.resources.memory_bytes_per_worker or device_bytes
    answer: list[ShardingPlan | str | None] = [None]
    if groups.rank == 0:
        try:
            answer[0] = plan_group(
                model,
                spec,
                table_sharders,
                size,
                ranks_per_host,
                groups.device.type,
                (device_bytes, host_bytes),
                bandwidths,
            )
        except PlanError as error:  # the other ranks wait for an answer
            answer[0] = str(error)
    # Of a thousand tables and more that takes longer than a collective may.
    dist.broadcast_object_list(answer, src=0, group=groups.long_timeout_group)
    if not isinstance(answer[0], ShardingPlan):
        raise PlanError(answer[0])
    for table, (_, share) in kernels_of(answer[0]).items():
        if share < 1 and groups.rank == 0:
            logger.info("table %s: in host memory, %.1f%% of its rows cached", table, 100 * share)
    return answer[0]


def plan_group(
    model: nn.Module,
    spec: JobSpec,
    table_sharders: list[ModuleSharder[nn.Module]],
    size: int,
    ranks_per_host: int | None,
    device_type: str,
    memory_bytes: tuple[int, int],
    bandwidths: Bandwidths | None,
) -> ShardingPlan:
    """TorchRec's plan of one sharding group; raises `PlanError`, whatever failed.

    `memory_bytes` are each worker's, of its device and of its host: the spec says how much of them
    tables may take. For the other arguments see `topology_of`.

    Its search takes time like shards x tables, minutes from some hundred tables on. Beyond
    `_MAX_SEARCH` of them each table has the one way that `narrowed` gives it, and TorchRec places
    them.
    """
    kept = 1 - spec.parallelism.planner.storage_reservation
    usable_bytes, host_bytes = (int(each * kept) for each in memory_bytes)
    try:
        constraints = table_constraints(spec, ranks_per_host, device_type)
        topology = topology_of(
            size, ranks_per_host, device_type, (usable_bytes, host_bytes), bandwidths
        )
        search = partial(_search, model, spec, table_sharders, topology)
        if _num_shards(constraints, size) * len(constraints) <= _MAX_SEARCH:
            return search(constraints, proposers(constraints))
        for most_load in _MOST_LOADS:
            narrow = narrowed(spec, constraints, size, usable_bytes, most_load)
            found = proposers(narrow) if spec.may_cache else [GreedyProposer()]
            try:
                return search(narrow, found)
            except PlannerError as error:
                why_not = error
        raise why_not
    except PlannerError as error:
        raise PlanError(_why_not(spec, usable_bytes, error)) from error
    except PlanError:
        raise
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
        raise PlanError(f"TorchRec's planner failed on this spec with {error!r}") from error


def _search(
    model: nn.Module,
    spec: JobSpec,
    table_sharders: list[ModuleSharder[nn.Module]],
    topology: Topology,
    constraints: Constraints,
    proposers: list[Proposer],
) -> ShardingPlan:
    estimators = [
        PerfEstimator(topology, constraints),
        StorageEstimator(spec, topology, constraints),
    ]
    batch_size = spec.data.batch_size
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        constraints=constraints,
        enumerator=Enumerator(topology, batch_size, constraints, estimators),
        proposer=proposers,
        # The topology is what our own reservation leaves: TorchRec's spares GPUs only.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=[NoopEmbeddingStats()],
    )
    # The method itself: what is around it writes out all tables, for a log that nobody reads.
    plan: ShardingPlan = inspect.unwrap(type(planner).plan)(planner, model, table_sharders)
    return plan


def _num_shards(constraints: Constraints, size: int) -> int:
    types = [name for each in constraints.values() for name in each.sharding_types or ()]
    return sum(size if name in _SPLITTING else 1 for name in types)


def narrowed(
    spec: JobSpec, constraints: Constraints, size: int, usable_bytes: int, most_load: float
) -> Constraints:
    """One sharding type for each table, whole where that may be and its load is small.

    Load is a table's share of the group's bytes or lookups, whichever is more, where 1 is that of
    one rank. Tables are split by load, largest first, as long as `_MAX_SHARDS` allow; those of more
    than half of a rank's memory always are.
    """
    tables = {table.name: table_load(spec, table, 1) for table in spec.embedding_tables}
    sync_bytes = map(spec.sync_bytes, spec.embedding_tables)
    held = {name: tables[name].held + each for name, each in zip(tables, sync_bytes, strict=True)}
    shares = rank_shares([(held[name], tables[name].lookup) for name in tables], size)
    loads = {
        name: math.inf if 2 * held[name] > usable_bytes else share
        for name, share in zip(tables, shares, strict=True)
    }
    num_left, found = _MAX_SHARDS, {}
    for name in sorted(constraints, key=loads.__getitem__, reverse=True):
        types = constraints[name].sharding_types or []
        splitting = [each for each in _SPLITTING if each in types]
        whole = [each for each in _WHOLE if each in types]
        is_wanted = loads[name] == math.inf or (loads[name] > most_load and num_left >= size)
        (sharding_type, *_) = splitting + whole if is_wanted else whole + splitting
        num_left -= size if sharding_type in splitting else 1
        found[name] = replace(constraints[name], sharding_types=[sharding_type])
    return {name: found[name] for name in constraints}


class _Shard(Shard):
    """A shard whose copies, of which TorchRec makes one for each plan that is better than those
    before, have in common what is never changed in place: all but the rank."""

    def __deepcopy__(self, memo: object) -> _Shard:
        return _Shard(self.size, self.offset, self.storage, self.perf, self.rank)


class Enumerator(EmbeddingEnumerator):
    """TorchRec's, with the ways of a table in the order of its constraints: the stock order is that
    of a set of strings, another in each process, and decides between ways that are equally good."""

    def _filter_sharding_types(self, name: str, *args: Any) -> list[str]:
        found = super()._filter_sharding_types(name, *args)
        return sorted(found, key=self._constraints[name].sharding_types.index)

    def _filter_compute_kernels(self, name: str, *args: Any) -> list[str]:
        return sorted(super()._filter_compute_kernels(name, *args))


class PerfEstimator(ShardEstimator):
    """TorchRec's estimate of what a shard takes in time, made once for all of a size."""

    def __init__(self, topology: Topology, constraints: Constraints) -> None:
        self._estimator = EmbeddingPerfEstimatorFactory.create(
            DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=constraints
        )

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        shards = [option.shards for option in sharding_options]
        for option in sharding_options:
            option.shards = list({tuple(shard.size): shard for shard in option.shards}.values())
        self._estimator.estimate(sharding_options, sharder_data_map)
        for option, every in zip(sharding_options, shards, strict=True):
            perfs = {tuple(shard.size): shard.perf for shard in option.shards}
            option.shards = [
                _Shard(shard.size, shard.offset, shard.storage, perfs[tuple(shard.size)])
                for shard in every
            ]


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate of what a shard takes, and what that leaves out: its optimizer state, its
    share of what a sync holds of its table, and a data-parallel table's dense gradient (and copy).

    A column shard has the state of its rows for itself. Of a cached table, whose weights are in
    host memory (twice where checkpoints are written from a copy), HBM holds the cache, what syncs
    hold, and the optimizer state of rows; that of elements is with the weights.
    """

    def __init__(self, spec: JobSpec, topology: Topology, constraints: Constraints) -> None:
        super().__init__(topology, constraints)
        self._spec = spec
        self._tables = {table.name: table for table in spec.embedding_tables}

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            for shard in option.shards:
                assert shard.storage is not None, "estimated above"
                shard.storage = self._completed(option, shard.size, shard.storage)

    def _completed(self, option: ShardingOption, size: Sequence[int], taken: Storage) -> Storage:
        spec, table = self._spec, self._tables[option.name]
        assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
        weights = table.num_embeddings * table.embedding_dim * NUM_BYTES[table.data_type]
        row_share = size[0] / table.num_embeddings
        share = row_share * size[1] / table.embedding_dim
        is_by_row = spec.optimizer.sparse.is_state_by_row
        state = ((spec.size_bytes(table) or weights) - weights) * (
            row_share if is_by_row else share
        )
        sync_bytes = spec.sync_bytes(table) * share
        if option.compute_kernel == _CACHING:
            in_host = weights * share + (0 if is_by_row else state)
            num_copies = 2 if spec.checkpoint.asynchronous else 1
            in_hbm = sync_bytes + (state if is_by_row else 0)
            return Storage(math.ceil(taken.hbm + in_hbm), math.ceil(num_copies * in_host))
        beside = bytes_beside(table) if option.sharding_type == DATA_PARALLEL else 0
        more = math.ceil(state + sync_bytes + beside)
        return taken + (Storage(hbm=more, ddr=0) if taken.hbm else Storage(hbm=0, ddr=more))


def table_constraints(
    spec: JobSpec, ranks_per_host: int | None, device_type: str = "cpu"
) -> Constraints:
    """What the planner may do with each table, by table name.

    Sharding types that cannot work are left out: see `obstacle`. Raises `PlanError` for a table
    that allows no other, or is to be cached where there is no GPU.
    """
    constraints = {}
    for table in spec.embedding_tables:
        obstacles = {
            name: obstacle(name, table, spec, ranks_per_host)
            for name in table.constraints.sharding_types
        }
        possible = [name for name, reason in obstacles.items() if reason is None]
        if not possible:
            reasons = "; ".join(f"{name} {reason}" for name, reason in obstacles.items())
            raise PlanError(
                f"table '{table.name}' cannot be sharded in any way that it allows: {reasons}. "
                "Add table_wise to its constraints.sharding_types in embedding_tables"
            )
        features = spec.features_of_tables.get(table.name, [])
        kernel = spec.kernel_of(table)
        if device_type != "cuda" and kernel == "fused_uvm_caching":
            raise PlanError(
                f"table '{table.name}' is to be cached in GPU memory (compute_kernel "
                f"{kernel}), which FBGEMM does on CUDA only, and these workers train on "
                f"{device_type}; set compute_kernel to auto or fused, or resources.device to cuda"
            )
        kernel = kernel if device_type == "cuda" else "fused"
        constraints[table.name] = ParameterConstraints(
            sharding_types=possible,
            compute_kernels=_KERNELS[kernel],
            cache_params=None if kernel == "fused" else cache_params(spec, table),
            min_partition=table.constraints.min_partition,
            pooling_factors=spec.lookups_per_row(table),
            is_weighted=any(f.weights_column for f in features if not f.is_sequence),
        )
    return constraints


def proposers(constraints: Constraints) -> list[Proposer]:
    """TorchRec's own, and one that enlarges caches where it may."""
    grid = GridSearchProposer(max_proposals=_MAX_GRID)
    stock = [grid, GreedyProposer(), GreedyProposer(False), UniformProposer()]
    caches = [each.cache_params for each in constraints.values() if each.cache_params]
    may_grow = any(cache.stats for cache in caches)
    return [*stock, EmbeddingOffloadScaleupProposer()] if may_grow else stock


def cache_params(spec: JobSpec, table: EmbeddingTableSpec) -> CacheParams:
    """The cache of a table, if it gets one; the planner enlarges those that come with statistics.

    FBGEMM loads what is missing in the forward pass: the pipeline has no stage that prefetches.
    """
    load_factor = least_cached(spec, table)
    given = table.constraints.cache_load_factor or spec.parallelism.planner.cache_load_factor
    if given is not None or spec.kernel_of(table) != "auto":
        return CacheParams(load_factor=load_factor)
    assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
    num_lookups = spec.lookups_per_step(table) // spec.parallelism.num_replicas
    # By Zipf's law row k is looked up in proportion to 1/k, so k rows take log(k) of the lookups.
    hits = torch.linspace(0, table.num_embeddings, 101).log1p().diff()
    misses = 1 - hits.cumsum(0) / hits.sum()
    statistics = EmbeddingOffloadStats(
        misses.mean().item(), min(num_lookups, table.num_embeddings), hits, table.num_embeddings
    )
    return CacheParams(load_factor=load_factor, stats=statistics)


def obstacle(
    sharding_type: str, table: EmbeddingTableSpec, spec: JobSpec, ranks_per_host: int | None
) -> str | None:
    """Why `table` cannot be sharded this way, as the end of a sentence; None when it can.

    `ranks_per_host` is None where hosts hold unequal numbers of a sharding group's ranks.
    """
    parts = spec.parallelism.shard_group_size
    rows = table.num_embeddings
    assert isinstance(parts, int) and isinstance(rows, int), "sizes must be resolved first"
    if table.dynamic is not None and sharding_type != "row_wise":
        return "is not how TorchRec shards dynamic tables"
    if sharding_type == DATA_PARALLEL and spec.kernel_of(table) == _CACHING:
        return f"has no cache (compute_kernel {_CACHING})"
    if sharding_type in _NODE_SHARDING_TYPES:
        if ranks_per_host is None:
            return "needs equally many ranks of a sharding group on each host"
        parts = ranks_per_host
    elif sharding_type != "row_wise":
        return None
    # FBGEMM's CPU kernels read past the end of a list when their last table is empty.
    if has_empty_block(rows, parts):
        return f"would leave some of {parts} workers without any of its {rows} rows"
    return None


def _why_not(spec: JobSpec, usable_bytes: int, error: PlannerError) -> str:
    """Why no plan fits and what would help, for the author of the spec."""
    tables = spec.embedding_tables
    sizes = {table.name: (spec.size_bytes(table) or 0) + spec.sync_bytes(table) for table in tables}
    largest = max(sizes, key=sizes.__getitem__)
    size = spec.parallelism.shard_group_size
    memory = (
        f"the tables, their optimizer state and what syncs hold take "
        f"{size_text(sum(sizes.values()))} (the largest, '{largest}', "
        f"{size_text(sizes[largest])}), and ids and activations come on top; a sharding group of "
        f"{size} workers has {size_text(usable_bytes)} on each after "
        f"{spec.parallelism.planner.storage_reservation:.0%} is kept back "
        "(parallelism.planner.storage_reservation)"
    )
    advice = (
        "raise parallelism.shard_group_size or resources.memory_bytes_per_worker, lower "
        "data.batch_size or the max_length of sequences, store tables in fp16, allow more sharding "
        "types, such as row_wise, which splits one table over all workers, or, on GPUs, keep "
        "tables in host memory (parallelism.planner.compute_kernel auto)"
    )
    # Its last line names the shard that found no place; estimated times would only distract.
    detail = re.sub(r"perf: Perf\(.*?\), ", "", str(error).strip().splitlines()[-1].strip())
    return f"no sharding plan fits: {memory}; {advice}. The planner says: {detail}"


def place_plan(plan: ShardingPlan, placements: Sequence[str]) -> ShardingPlan:
    """Copy of `plan` whose shard s lives at `placements[s]`, as in "rank:3/cpu".

    On CPU a placement must not carry a device index, on CUDA it must: "rank:3/cuda:1".
    """
    placed = copy.deepcopy(plan)
    devices = [_remote_device(placement) for placement in placements]
    for parameter in _parameters(placed).values():
        parameter.ranks = [devices[shard].rank() for shard in parameter.ranks or ()]
        for shard in _shards(parameter):
            shard.placement = devices[_position(shard)]
    return placed


def node_size(plan: ShardingPlan) -> int | None:
    """Over how many ranks of a host tables are split, the same for all; None where none is so."""
    return next(
        (
            len({shard.shard_offsets[0] for shard in _shards(each)})
            for each in _parameters(plan).values()
            if each.sharding_type in _NODE_SHARDING_TYPES
        ),
        None,
    )


def table_plans(plan: ShardingPlan, spec: JobSpec) -> list[events.TablePlan]:
    """How each table is sharded, in spec order, with positions inside the sharding group."""
    parameters = _parameters(plan)
    return [_table_plan(table, parameters[table.name], spec) for table in spec.embedding_tables]


def plans_digest(tables: Sequence[events.TablePlan]) -> str:
    """A checksum of which rows and columns of which tables each rank of a sharding group holds."""
    decisive = [each.model_dump_json() for each in tables]
    return hashlib.sha256("".join(decisive).encode()).hexdigest()


def kernels_of(plan: ShardingPlan) -> dict[str, tuple[str, float]]:
    """(compute kernel, share of the rows in GPU memory: 1 unless it is cached) by table."""
    return {
        table: (
            parameter.compute_kernel,
            parameter.cache_params.load_factor if parameter.compute_kernel == _CACHING else 1.0,
        )
        for table, parameter in _parameters(plan).items()
    }


def group_plan_of(plan: ShardingPlan, spec: JobSpec, size: int) -> GroupPlan:
    """The plan of one sharding group of `size` ranks as the cost model reads it."""
    kernels, tables = kernels_of(plan), table_plans(plan, spec)
    placements = tuple(_placement(table, *kernels[table.name], size) for table in tables)
    shards = {
        table.name: [(each.position, each.num_rows, each.num_columns) for each in table.shards]
        or [(place, table.num_embeddings, table.embedding_dim) for place in range(size)]
        for table in tables
    }
    return GroupPlan(tables=placements, ranks=rank_loads(spec, size, placements, shards))


def _placement(
    table: events.TablePlan, kernel: str, load_factor: float, size: int
) -> TablePlacement:
    ranks = tuple(dict.fromkeys(shard.position for shard in table.shards))
    return TablePlacement(
        name=table.name,
        sharding_type=table.sharding_type,
        compute_kernel=kernel,
        ranks=ranks if 0 < len(ranks) < size else None,
        row_parts=len({shard.row_offset for shard in table.shards}) or 1,
        load_factor=load_factor,
    )


def _parameters(plan: ShardingPlan) -> dict[str, Any]:
    return {
        table: parameter
        for module_plan in plan.plan.values()
        for table, parameter in module_plan.items()
    }


def _table_plan(
    table: EmbeddingTableSpec, parameter: ParameterSharding, spec: JobSpec
) -> events.TablePlan:
    assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
    return events.TablePlan(
        name=table.name,
        sharding_type=parameter.sharding_type,
        data_type=table.data_type,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        size_bytes=spec.size_bytes(table) or 0,
        shards=[
            events.TablePlan.Shard(
                position=_position(shard),
                row_offset=shard.shard_offsets[0],
                column_offset=shard.shard_offsets[1],
                num_rows=shard.shard_sizes[0],
                num_columns=shard.shard_sizes[1],
            )
            for shard in _shards(parameter)
        ],
    )


def _shards(parameter: ParameterSharding) -> list[ShardMetadata]:
    """The shards of a table; none of a data-parallel one."""
    spec = parameter.sharding_spec
    return spec.shards if isinstance(spec, EnumerableShardingSpec) else []


def _position(shard: ShardMetadata) -> int:
    position = shard.placement.rank() if shard.placement else None
    assert position is not None, "the planner places every shard"
    return position


@dataclass(frozen=True)
class Bandwidths(GeneralizedCommsBandwidth):
    """Bytes per millisecond and worker, the unit of TorchRec's cost model.

    A link is None where no two ranks share one; the other then stands for it. The stock model
    multiplies the link between hosts by the workers of a host for an all-reduce (a network card for
    each GPU). What is measured here, and what a cluster's description says, is what one worker gets
    while all others are busy too, so no such factor belongs to it.
    """

    memory: float
    intra_host: float | None = None
    inter_host: float | None = None

    @classmethod
    def of(cls, memory: float, intra_host: float, inter_host: float) -> Bandwidths:
        """Those given in bytes/s."""
        return cls(memory / 1000, intra_host / 1000, inter_host / 1000)

    @property
    def intra_host_bw(self) -> float:
        return self.intra_host or self.inter_host or 0.0

    @property
    def inter_host_bw(self) -> float:
        return self.inter_host or self.intra_host or 0.0

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """The slowest link that a collective over `world_size` ranks must use."""
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw


def measure_bandwidths(groups: MeshGroups) -> Bandwidths:
    """Medians over all workers, equal on every rank. Collective over the global group."""
    hosts = [groups.sites[rank].host for rank in groups.sharding_ranks]
    mine = Bandwidths(
        memory=_memory_bandwidth(groups.device),
        intra_host=_link_bandwidth(groups, partners(hosts, same_host=True)),
        inter_host=_link_bandwidth(groups, partners(hosts, same_host=False)),
    )
    everyone: list[Bandwidths] = [mine] * groups.layout.world_size
    dist.all_gather_object(everyone, mine, group=groups.global_group)
    return median_bandwidths(everyone)


def partners(hosts: Sequence[str], *, same_host: bool) -> dict[int, int]:
    """Disjoint pairs of positions on the same host, or on different ones; both ways round.

    `hosts[p]` is the host of position p. Positions for which nobody is left have no entry.
    """
    found: dict[int, int] = {}
    for first, second in itertools.combinations(range(len(hosts)), 2):
        is_free = first not in found and second not in found
        if is_free and (hosts[first] == hosts[second]) == same_host:
            found[first], found[second] = second, first
    return found


def median_bandwidths(measured: Sequence[Bandwidths]) -> Bandwidths:
    """Median of each kind over the workers that measured it."""
    kinds = zip(*map(astuple, measured), strict=True)
    known = [[value for value in values if value is not None] for values in kinds]
    return Bandwidths(*(statistics.median(values) if values else None for values in known))


def _memory_bandwidth(device: torch.device) -> float:
    source = torch.zeros(_MEMORY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    time_ms = _time_ms(lambda: target.copy_(source))
    return 2 * source.nbytes / time_ms  # each byte is read and written


def _link_bandwidth(groups: MeshGroups, pairs: dict[int, int]) -> float | None:
    # NCCL forms its links in the first call, which all ranks of a group must take part in.
    dist.barrier(groups.global_group)
    if groups.shard_index not in pairs:
        return None
    peer = groups.sharding_ranks[pairs[groups.shard_index]]
    sent = torch.zeros(_LINK_BYTES[groups.device.type], dtype=torch.uint8, device=groups.device)
    received = torch.empty_like(sent)

    def swap() -> None:
        group = groups.global_group
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, received, peer, group),
            ]
        )
        for request in requests:
            request.wait()

    return sent.nbytes / _time_ms(swap)


def _time_ms(action: Callable[[], object]) -> float:
    """Median time of an action that was warmed up, which pays for allocation and connections."""
    timer = Timer("action()", globals={"action": action}, num_threads=torch.get_num_threads())
    return 1000 * statistics.median(timer.timeit(1).mean for _ in range(_NUM_REPEATS))


def topology_of(
    shard_group_size: int,
    ranks_per_host: int | None,
    device_type: str,
    usable_bytes: tuple[int, int],
    bandwidths: Bandwidths | None = None,
) -> Topology:
    """Topology of one sharding group; `usable_bytes` for tables are each worker's, on its device
    and, where that is a GPU, in host memory.

    Without `bandwidths`, or where no two workers share a kind of link, TorchRec's own numbers
    stand. `ranks_per_host` is None where hosts hold unequal numbers of the group's ranks.
    """
    is_cpu = device_type == "cpu"
    on_device, on_host = usable_bytes
    memory_bw = bandwidths.memory if bandwidths else None
    links = bandwidths if bandwidths and bandwidths.intra_host_bw else None
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=shard_group_size,
            # Unequal hosts: every link counts as one between hosts.
            local_world_size=ranks_per_host or 1,
            hbm_cap_bytes=None if is_cpu else on_device,
            ddr_cap_bytes=on_device if is_cpu else on_host,
        ),
        HardwareConfig(
            hbm_mem_bw=None if is_cpu else memory_bw,
            ddr_mem_bw=memory_bw if is_cpu else None,
        ),
        KernelConfig(
            compute_device=device_type,
            use_hardware_based_bandwidth=bandwidths is not None,
            generalized_comms_bandwidths=links,
        ),
    )


def least_memory_bytes(groups: MeshGroups, num_on_host: int | None = None) -> tuple[int, int]:
    """Least memory of any worker: of its device, and of its host. Collective over the global group.

    On CPUs these are the same. A host is shared by those of `groups`, or by `num_on_host` workers
    where groups plan for themselves: a little more or less that one measures must not show then.
    """
    # Of its host's memory it has a share.
    sites, own = groups.sites, groups.sites[groups.rank].host
    num_here = max(num_on_host or 1, sum(site.host == own for site in sites))
    all_bytes, _ = host_memory_bytes()
    mine = all_bytes // num_here, all_bytes // num_here
    if groups.device.type == "cuda":
        # What NCCL, the dense part and others hold is gone.
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(groups.device)
        if num_on_host is not None:
            # Of GPUs of one type the same, unless a worker holds more than that before its tables.
            free_bytes = min(free_bytes, total_bytes - total_bytes // 16) // 2**30 * 2**30
            all_bytes = all_bytes // 2**30 * 2**30
        mine = free_bytes, all_bytes // num_here
    everyone = [mine] * groups.layout.world_size
    dist.all_gather_object(everyone, mine, group=groups.global_group)
    device, host = map(min, zip(*everyone, strict=True))
    return device, host

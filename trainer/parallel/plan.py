"""Sharding plans: TorchRec's planner inside one sharding group, then placed on its ranks.

The planner runs on rank 0 only and its answer, a plan or the reason why there is none, is given
to all ranks: what it measures differs from rank to rank, and a rank that failed alone would leave
the others waiting for it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan, ShardMetadata

from trainer import events
from trainer.parallel.bandwidth import measure_bandwidths
from trainer.parallel.groups import MeshGroups
from trainer.parallel.topology import least_memory_bytes, topology_of
from trainer.spec import EmbeddingTableSpec, JobSpec

# Sharding types that split a table over the ranks of one host.
_NODE_SHARDING_TYPES = frozenset({"table_row_wise", "grid_shard"})


class PlanError(ValueError):
    """No sharding plan is possible; the message says what is missing and what would help."""


def make_plan(
    model: nn.Module,
    spec: JobSpec,
    groups: MeshGroups,
    table_sharders: list[ModuleSharder[nn.Module]],
) -> ShardingPlan:
    """Plan one sharding group on rank 0 and give it to all. Collective over the global group.

    The plan numbers shards by position in the group, 0 to L - 1; `place_plan` maps them to ranks.
    Raises `PlanError` on every rank.
    """
    planner_spec = spec.parallelism.planner
    memory_bytes = spec.resources.memory_bytes_per_worker or least_memory_bytes(groups)
    usable_bytes = int(memory_bytes * (1 - planner_spec.storage_reservation))
    bandwidths = measure_bandwidths(groups) if planner_spec.bandwidths == "measured" else None
    constraints = table_constraints(spec, groups.ranks_per_host)
    answer: list[ShardingPlan | str | None] = [None]
    if groups.rank == 0:
        # Tables and what the sync keeps of them have the same size and lie on the same ranks.
        table_bytes = usable_bytes // (1 + spec.num_sync_copies)
        topology = topology_of(groups, table_bytes, bandwidths)
        try:
            answer[0] = _planner(spec, topology, constraints).plan(model, table_sharders)
        except PlannerError as error:
            answer[0] = _why_not(spec, usable_bytes, error)
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
            # Whatever it is, the other ranks wait for an answer.
            answer[0] = f"TorchRec's planner failed on this spec with {error!r}"
    dist.broadcast_object_list(answer, src=0, group=groups.global_group)
    if not isinstance(answer[0], ShardingPlan):
        raise PlanError(answer[0])
    return answer[0]


def _planner(
    spec: JobSpec, topology: Topology, constraints: dict[str, ParameterConstraints]
) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=spec.data.batch_size,
        constraints=constraints,
        # The topology holds what is left after our own reservation: TorchRec's spares GPUs only.
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )


def table_constraints(spec: JobSpec, ranks_per_host: int | None) -> dict[str, ParameterConstraints]:
    """What the planner may do with each table, by table name.

    Sharding types that cannot work are left out: see `obstacle`. Raises `PlanError` for a table
    that allows no other.
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
        constraints[table.name] = _constraints_of(table, possible, spec)
    return constraints


def obstacle(
    sharding_type: str, table: EmbeddingTableSpec, spec: JobSpec, ranks_per_host: int | None
) -> str | None:
    """Why `table` cannot be sharded this way, as the end of a sentence; None when it can.

    `ranks_per_host` is None where hosts hold unequal numbers of a sharding group's ranks.
    """
    parts = spec.parallelism.shard_group_size
    rows = table.num_embeddings
    assert isinstance(parts, int) and isinstance(rows, int), "sizes must be resolved first"
    if sharding_type in _NODE_SHARDING_TYPES:
        if ranks_per_host is None:
            return "needs equally many ranks of a sharding group on each host"
        parts = ranks_per_host
    elif sharding_type != "row_wise":
        return None
    # FBGEMM's CPU kernels read past the end of a list when their last table is empty.
    if math.ceil(rows / parts) * (parts - 1) >= rows:
        return f"would leave some of {parts} workers without any of its {rows} rows"
    return None


def _constraints_of(
    table: EmbeddingTableSpec, sharding_types: Sequence[str], spec: JobSpec
) -> ParameterConstraints:
    features = [feature for feature in spec.sparse_features if feature.table == table.name]
    pooling_factor = table.constraints.pooling_factor
    return ParameterConstraints(
        sharding_types=list(sharding_types),
        # Rows cached outside the table (UVM caching) would escape the sync.
        compute_kernels=[EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value],
        min_partition=table.constraints.min_partition,
        pooling_factors=[pooling_factor or 1.0] * len(features),
        is_weighted=any(f.weights_column for f in features if not f.is_sequence),
    )


def _why_not(spec: JobSpec, usable_bytes: int, error: PlannerError) -> str:
    """A sentence for the person who wrote the spec."""
    num_copies = 1 + spec.num_sync_copies
    sizes = {t.name: _size_bytes(t, spec) * num_copies for t in spec.embedding_tables}
    largest = max(sizes, key=sizes.__getitem__)
    size = spec.parallelism.shard_group_size
    memory = (
        f"the tables, their optimizer state and sync copies take {_gib(sum(sizes.values()))} (the "
        f"largest, '{largest}', {_gib(sizes[largest])}), and ids and activations come on top; a "
        f"sharding group of {size} workers has {_gib(usable_bytes)} on each after "
        f"{spec.parallelism.planner.storage_reservation:.0%} is kept back "
        "(parallelism.planner.storage_reservation)"
    )
    advice = (
        "raise parallelism.shard_group_size or resources.memory_bytes_per_worker, store tables in "
        "fp16, or allow more sharding types, such as row_wise, which splits one table over all "
        "workers"
    )
    # Its last line names the shard that found no place; estimated times would only distract.
    detail = re.sub(r"perf: Perf\(.*?\), ", "", str(error).strip().splitlines()[-1].strip())
    return f"no sharding plan fits: {memory}; {advice}. The planner says: {detail}"


def _size_bytes(table: EmbeddingTableSpec, spec: JobSpec) -> int:
    """Weights, optimizer state and ids of one whole copy."""
    size = spec.size_bytes(table)
    assert size is not None, "num_embeddings must be resolved first"
    return size


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def place_plan(plan: ShardingPlan, placements: Sequence[str]) -> ShardingPlan:
    """Copy of `plan` whose shard s lives at `placements[s]`, as in "rank:3/cpu".

    On CPU a placement must not carry a device index, on CUDA it must: "rank:3/cuda:1".
    """
    placed = copy.deepcopy(plan)
    for module_plan in placed.plan.values():
        for parameter in module_plan.values():
            _place_parameter(parameter, placements)
    return placed


def _place_parameter(parameter: ParameterSharding, placements: Sequence[str]) -> None:
    devices = [_remote_device(placement) for placement in placements]
    parameter.ranks = [devices[shard].rank() for shard in parameter.ranks or ()]
    spec = parameter.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        return
    for shard in spec.shards:
        shard.placement = devices[_position(shard)]


def uses_node_groups(plan: ShardingPlan) -> bool:
    """Whether any table is split over the ranks of a host."""
    return not _NODE_SHARDING_TYPES.isdisjoint(chosen_sharding(plan).values())


def chosen_sharding(plan: ShardingPlan) -> dict[str, str]:
    """Sharding type of each table, by table name."""
    return {table: parameter.sharding_type for table, parameter in _parameters(plan).items()}


def table_plans(plan: ShardingPlan, spec: JobSpec) -> list[events.TablePlan]:
    """How each table is sharded, in spec order, with positions inside the sharding group.

    A data-parallel table has one whole shard at every position.
    """
    parameters = _parameters(plan)
    return [_table_plan(table, parameters[table.name], spec) for table in spec.embedding_tables]


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
    whole = [table.num_embeddings, table.embedding_dim]
    rectangles = _rectangles(parameter) or [
        (position, [0, 0], whole) for position in range(spec.parallelism.group_size)
    ]
    return events.TablePlan(
        name=table.name,
        sharding_type=parameter.sharding_type,
        data_type=table.data_type,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        size_bytes=_size_bytes(table, spec),
        shards=[
            events.TablePlan.Shard(
                position=position,
                row_offset=offsets[0],
                column_offset=offsets[1],
                num_rows=sizes[0],
                num_columns=sizes[1],
            )
            for position, offsets, sizes in rectangles
        ],
    )


def _rectangles(parameter: ParameterSharding) -> list[tuple[int, list[int], list[int]]]:
    """(position, offsets, sizes) of each shard; none for a data-parallel table."""
    spec = parameter.sharding_spec
    shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else []
    return [(_position(shard), shard.shard_offsets, shard.shard_sizes) for shard in shards]


def _position(shard: ShardMetadata) -> int:
    position = shard.placement.rank() if shard.placement else None
    assert position is not None, "the planner places every shard"
    return position

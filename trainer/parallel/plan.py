"""Sharding plans: TorchRec's planner inside one sharding group, then placed on its ranks.

The planner runs on rank 0 only and its answer, a plan or the reason why there is none, is given
to all ranks: a rank that fails alone would leave the others waiting for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan

from trainer.parallel.groups import MeshGroups
from trainer.spec import EmbeddingTableSpec, JobSpec


class PlanError(ValueError):
    """No sharding plan fits; the message says what is missing and which settings would help."""


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
    answer: list[ShardingPlan | str | None] = [None]
    if groups.rank == 0:
        answer[0] = _plan_or_reason(model, spec, groups, table_sharders)
    dist.broadcast_object_list(answer, src=0, group=groups.global_group)
    if not isinstance(answer[0], ShardingPlan):
        raise PlanError(answer[0])
    return answer[0]


def _plan_or_reason(
    model: nn.Module,
    spec: JobSpec,
    groups: MeshGroups,
    table_sharders: list[ModuleSharder[nn.Module]],
) -> ShardingPlan | str:
    size = groups.layout.shard_group_size
    topology = Topology(
        world_size=size,
        local_world_size=size,
        compute_device=groups.device.type,
        hbm_cap=device_memory_bytes(groups.device),
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=spec.data.batch_size,
        constraints={t.name: _constraints_of(t, spec) for t in spec.embedding_tables},
        storage_reservation=FixedPercentageStorageReservation(
            spec.parallelism.planner.storage_reservation
        ),
    )
    try:
        return planner.plan(model, table_sharders)
    except PlannerError as error:
        return str(error)


def _constraints_of(table: EmbeddingTableSpec, spec: JobSpec) -> ParameterConstraints:
    limits = table.constraints
    num_features = sum(feature.table == table.name for feature in spec.sparse_features)
    return ParameterConstraints(
        sharding_types=list(limits.sharding_types),
        # Rows cached outside the table (UVM caching) would escape the sync.
        compute_kernels=[EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value],
        min_partition=limits.min_partition,
        pooling_factors=[limits.pooling_factor or 1.0] * num_features,
    )


def device_memory_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None on CPU, where the planner's own default stands."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


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
        position = shard.placement.rank() if shard.placement else None
        assert position is not None, "the planner places every shard"
        shard.placement = devices[position]


def chosen_sharding(plan: ShardingPlan) -> dict[str, str]:
    """Sharding type of each table, by table name."""
    return {
        table: parameter.sharding_type
        for module_plan in plan.plan.values()
        for table, parameter in module_plan.items()
    }

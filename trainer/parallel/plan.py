"""Sharding plans: TorchRec's planner inside one sharding group, then placed on its ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan

from trainer.parallel.groups import MeshGroups
from trainer.spec import EmbeddingTableSpec

SHARDING_TYPES = ("row_wise", "table_wise")
# Share of each device's memory kept for the dense part, activations and collectives.
RESERVED_SHARE = 0.15


class TableSharder(EmbeddingBagCollectionSharder):
    """EmbeddingBagCollection sharder that offers row-wise on CPU too.

    The stock sharder hides row-wise sharding from the planner on CPU, though it works there.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that this version trains, whatever the device."""
        return list(SHARDING_TYPES)


def sharders(fused_params: dict[str, Any]) -> list[ModuleSharder[nn.Module]]:
    """Sharders of every embedding module that a model may hold."""
    return [TableSharder(fused_params=fused_params)]


def make_plan(
    model: nn.Module,
    tables: Sequence[EmbeddingTableSpec],
    groups: MeshGroups,
    table_sharders: list[ModuleSharder[nn.Module]],
) -> ShardingPlan:
    """Plan one sharding group on rank 0 and give it to all. Collective over the global group.

    The plan numbers shards by position in the group, 0 to L - 1; `place_plan` maps them to ranks.
    """
    size = groups.layout.shard_group_size
    topology = Topology(
        world_size=size,
        local_world_size=size,
        compute_device=groups.device.type,
        hbm_cap=device_memory_bytes(groups.device),
    )
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=list(table.constraints.sharding_types),
            # Rows cached outside the table (UVM caching) would escape the sync.
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        )
        for table in tables
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_SHARE),
    )
    return planner.collective_plan(model, table_sharders, groups.global_group)


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

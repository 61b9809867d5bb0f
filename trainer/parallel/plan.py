"""Sharding plans: TorchRec's planner inside one sharding group, then placed on its ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
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
    topology = Topology(world_size=size, local_world_size=size, compute_device=groups.device.type)
    constraints = {
        table.name: ParameterConstraints(sharding_types=list(table.constraints.sharding_types))
        for table in tables
    }
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=RESERVED_SHARE),
    )
    return planner.collective_plan(model, table_sharders, groups.global_group)


def place_plan(plan: ShardingPlan, ranks: Sequence[int], device_type: str) -> ShardingPlan:
    """Copy of `plan` whose shard s lives on global rank `ranks[s]`.

    On CPU a placement must not carry a device index ("rank:3/cpu"), on CUDA it must.
    """
    placed = copy.deepcopy(plan)
    for module_plan in placed.plan.values():
        for parameter in module_plan.values():
            _place_parameter(parameter, ranks, device_type)
    return placed


def _place_parameter(parameter: ParameterSharding, ranks: Sequence[int], device_type: str) -> None:
    parameter.ranks = [ranks[shard] for shard in parameter.ranks or ()]
    spec = parameter.sharding_spec
    if not isinstance(spec, EnumerableShardingSpec):
        return
    for shard in spec.shards:
        planned = shard.placement
        position = planned.rank() if planned else None
        assert planned is not None and position is not None, "the planner places every shard"
        index = f":{planned.device().index}" if device_type != "cpu" else ""
        shard.placement = _remote_device(f"rank:{ranks[position]}/{device_type}{index}")


def chosen_sharding(plan: ShardingPlan) -> dict[str, str]:
    """Sharding type of each table, by table name."""
    return {
        table: parameter.sharding_type
        for module_plan in plan.plan.values()
        for table, parameter in module_plan.items()
    }

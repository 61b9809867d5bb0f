"""2D sparse parallelism: DistributedModelParallel over a ("replicate", "shard") mesh.

    sharding group 0:  rank a [shard 0]   rank b [shard 1]  ...   lookups: all-to-all inside
    sharding group 1:  rank c [shard 0]   rank d [shard 1]  ...   lookups: all-to-all inside
                            |                  |
                     replica group 0     replica group 1          sync: averages the copies

TorchRec's own DMPCollection refuses CPU; this wrapper is device-neutral. It builds the mesh from
the true topology, places a copy of the plan on this rank's sharding group and leaves the rest to
TorchRec. Averaging the copies is the business of `trainer.parallel.sync`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingEnv2D,
    ShardingPlan,
    ShardingType,
)

from trainer.parallel.groups import MeshGroups
from trainer.parallel.plan import place_plan


class MeshShardingEnv(ShardingEnv2D):
    """ShardingEnv2D that finds a rank's shard in the mesh instead of computing it.

    The stock class derives it from the rank number, which only holds when ranks are numbered
    host by host; a cluster promises no such thing.
    """

    def __init__(self, groups: MeshGroups) -> None:
        super().__init__(
            sharding_pg=groups.sharding_group,
            replica_pg=groups.replica_group,
            global_pg=groups.global_group,
            device_mesh=groups.device_mesh,
            use_inter_host_allreduce=groups.layout.placement == "inter_host",
        )
        self._shard_of = {
            rank: shard for group in groups.mesh.sharding_groups for shard, rank in enumerate(group)
        }

    def remap_rank(self, rank: int, sharding_type: ShardingType) -> int:
        """Position of global `rank` in its sharding group, from 0 to L - 1."""
        return self._shard_of[rank]


class TwoDParallel(DistributedModelParallel):
    """A TorchRec model whose tables are sharded inside L ranks and replicated over M groups.

    Collective: every rank builds it with the same `plan` (made for one sharding group). Copies
    start equal: the tables of each replica group are broadcast from its first rank, the dense
    parameters by DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: MeshGroups,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> None:
        self.groups = groups
        super().__init__(
            module,
            env=MeshShardingEnv(groups),
            device=groups.device,
            plan=place_plan(plan, groups.sharding_placements),
            sharders=sharders,
        )
        self.broadcast_tables()

    @torch.no_grad()
    def broadcast_tables(self) -> None:
        """Make all copies of every shard equal to that of the replica group's first rank."""
        source = dist.get_process_group_ranks(self.groups.replica_group)[0]
        for kernel in self.embedding_kernels():
            for weight in kernel.split_embedding_weights():
                dist.broadcast(weight, source, group=self.groups.replica_group)

    def embedding_kernels(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM kernels that hold this rank's shards, in module order."""
        return list(_kernels(self._dmp_wrapped_module))

    def shard_weights(self) -> list[torch.Tensor]:
        """This rank's shards: one [local_rows, embedding_dim] view for each local table."""
        return [w for kernel in self.embedding_kernels() for w in kernel.split_embedding_weights()]

    def shard_moments(self) -> list[torch.Tensor]:
        """Optimizer state of this rank's shards (row-wise AdaGrad: one float a row), as views."""
        return [
            state
            for kernel in self.embedding_kernels()
            for states in kernel.get_optimizer_state()
            for state in states.values()
        ]


def _kernels(module: nn.Module) -> Iterator[SplitTableBatchedEmbeddingBagsCodegen]:
    if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
        yield module
    # TorchRec keeps its lookups in plain lists, which nn.Module.children does not see.
    for lookup in getattr(module, "_lookups", ()):
        yield from _kernels(lookup)
    for child in module.children():
        yield from _kernels(child)

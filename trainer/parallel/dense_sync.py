"""`parallelism.dense: at_sync`: the dense part, data parallel in each sharding group on its own.

With `every_step` DDP averages dense gradients over all T ranks, so no group can be a step ahead of
another. With `at_sync` it averages them over the L ranks of the sharding group, and the M copies of
the dense part drift apart until a sync averages them as it does the tables (local SGD). Between
two syncs no collective then crosses the sharding groups. The gradient is a mean over L ranks
instead of T: its expectation stays, its variance is M times as high.

Collectives: one broadcast of the dense part over the *global group* when the model is built;
afterwards DDP's on the *sharding group* only. The averaging itself is the sync's business
(`trainer.parallel.sync`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv

from trainer.parallel.groups import MeshGroups


class GroupDataParallelWrapper(DefaultDataParallelWrapper):
    """Wraps the dense part by DDP over this rank's sharding group instead of over all ranks."""

    def __init__(self, groups: MeshGroups) -> None:
        super().__init__()
        self._groups = groups

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Start all copies equal, then wrap. Collective over the global group.

        DDP itself only makes the ranks of its own group equal, and there are M of those.
        """
        group = self._groups.global_group
        source = dist.get_process_group_ranks(group)[0]
        with torch.no_grad():
            for _, tensor in dense_part(dmp.module):
                dist.broadcast(tensor, source, group=group)
        group_env = ShardingEnv.from_process_group(self._groups.sharding_group)
        super().wrap(dmp, group_env, device)


def dense_part(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, without those of sharded embedding modules.

    `module` is the bare one (`DistributedModelParallel.module`), not wrapped by DDP.
    """
    if isinstance(module, ShardedModule):
        return
    yield from module.named_parameters(prefix, recurse=False)
    yield from module.named_buffers(prefix, recurse=False)
    for name, child in module.named_children():
        yield from dense_part(child, f"{prefix}.{name}" if prefix else name)

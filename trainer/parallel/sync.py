"""Sync: averaging the copies of every shard over its replica group.

Collectives, all on the *replica group* of the rank: one coalesced all-reduce (AVG) of the shard
weights, and one of the optimizer state when the policy includes it. Nothing runs on the sharding
group or the global group. Afterwards all copies are bitwise equal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.parallel.two_d import TwoDParallel
from trainer.spec import SyncSpec


@dataclass(frozen=True)
class SyncReport:
    """Price of one sync on this rank: wall time and bytes handed to the all-reduce."""

    time_s: float
    num_bytes: int


def is_sync_step(step: int, spec: SyncSpec) -> bool:
    """Whether the copies are averaged after `step` (counted from 1)."""
    return step % spec.every_steps == 0


class FullSync:
    """Averages every row of every shard over the replica group."""

    def __init__(self, model: TwoDParallel, spec: SyncSpec) -> None:
        self._group = model.groups.replica_group
        self._num_replicas = model.groups.layout.num_replicas
        self._tensors = model.shard_weights()
        if spec.optimizer_state == "every":
            self._tensors += model.shard_moments()

    @torch.no_grad()
    def __call__(self) -> SyncReport:
        """Average now. Collective over the replica group; a no-op when M is 1."""
        started = time.perf_counter()
        if self._num_replicas == 1:
            return SyncReport(0.0, 0)
        for tensors in _by_dtype(self._tensors):
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
            self._group.allreduce_coalesced(tensors, options).wait()
        if self._tensors and self._tensors[0].is_cuda:
            torch.cuda.synchronize(self._tensors[0].device)
        num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        return SyncReport(time.perf_counter() - started, num_bytes)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by dtype: a coalesced all-reduce takes one dtype only."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())

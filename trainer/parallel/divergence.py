"""Divergence guard: compares the replicas that a sync has made equal.

A flipped bit, a faulty link or a bug leaves a shard's replicas different, and averaging then hides
it. Every K syncs each rank sums the bits of what it holds into one number for each shard, data
parallel table and dense parameter, and compares these with the ranks that hold the same: its
replica group, and all ranks for what is whole on each. A fault in what a sync is about to average
goes into all replicas alike and cannot be seen.

Replicas are bitwise equal only right after a sync that has been applied: with overlapped syncs the
caller flushes first. Optimizer state is compared when every sync averages it.

Collectives of a check: an all-gather of 8 bytes for each shard on the *replica group*, one of 8
bytes for each whole table and parameter on the *global group*, and an all-reduce of a flag there,
so that all ranks act alike; when replicas differ, also an all-gather of the findings on the global
group and, with `rebroadcast`, a broadcast of what differs on the group that compared it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer

from trainer.coordination.detection import DivergentShard, differing_copies
from trainer.parallel.model import TwoDParallel, as_real, dense_part
from trainer.spec.parallelism import DivergenceCheckSpec

# Elements summed at a time: bounds the temporary memory (8 bytes each), fits a CPU's cache, and
# keeps the launches on a GPU few.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
# Odd, so that multiplying by it loses no bit modulo 2^64 (Knuth's MMIX generator).
_STRIDE = 6364136223846793005
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# What has one checksum: the tensors of one shard, or of one whole table or parameter.
_Entry = tuple[str, tuple[torch.Tensor, ...]]


class DivergenceGuard:
    """Compares the replicas of everything that is held more than once, every `every_syncs` syncs.

    `compare_state` says whether the optimizer state is equal after a sync too. `optimizer` holds
    the state of data-parallel tables and dense parameters.
    """

    def __init__(
        self,
        model: TwoDParallel,
        spec: DivergenceCheckSpec,
        optimizer: CombinedOptimizer,
        compare_state: bool,
    ) -> None:
        self.action = spec.action
        self._every_syncs = spec.every_syncs
        self._model = model
        self._optimizer = optimizer
        self._compare_state = compare_state
        self._groups = model.groups
        self._num_syncs = 0

    def is_due_after_sync(self) -> bool:
        """Count a sync; whether a check follows it. An overlapped sync must be flushed before."""
        self._num_syncs += 1
        return self._num_syncs % self._every_syncs == 0

    @torch.no_grad()
    def check(self) -> list[DivergentShard]:
        """What differs anywhere, the same list on every rank. Collective over the global group.

        With action `rebroadcast` the copies are equal again afterwards; with `fail` it is for the
        caller to raise `DivergenceError`.
        """
        groups = self._groups
        self._model.flush_caches()
        shards = self._compare(list(self._shards()), groups.replica_group, groups.shard_index)
        # Whole on every rank, so two replica groups that each agree may still differ.
        whole = self._compare(list(self._whole()), groups.global_group, 0)
        if shards:
            self._model.drop_caches()
        return self._gather_findings([*shards, *whole])

    def _shards(self) -> Iterator[_Entry]:
        for shard in self._model.table_shards():
            yield shard.table, shard.tensors if self._compare_state else (shard.weight,)

    def _whole(self) -> Iterator[_Entry]:
        states = self._optimizer.state if self._compare_state else {}
        whole = [*self._model.data_parallel_tables().items(), *dense_part(self._model.module)]
        for name, tensor in whole:
            # Buffers are each rank's own: the running statistics of a BatchNorm, say.
            if not isinstance(tensor, nn.Parameter):
                continue
            # Step counters have no dimension; torch keeps them on the CPU.
            state = states.get(tensor, {}).values()
            of_rows = (v for v in state if isinstance(v, torch.Tensor) and v.dim())
            yield name, tuple(map(as_real, (tensor, *of_rows)))

    def _compare(
        self, entries: list[_Entry], group: dist.ProcessGroup, position: int
    ) -> list[DivergentShard]:
        """Entries whose copies in `group` differ, repaired if asked. Collective over `group`."""
        if not entries:
            return []
        ranks = dist.get_process_group_ranks(group)
        mine = torch.stack([checksum(tensors) for _, tensors in entries])
        everyone = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(everyone, mine, group=group)
        found = []
        for (name, tensors), sums in zip(entries, torch.stack(everyone).T.tolist(), strict=True):
            if copies := differing_copies(sums):
                differing = tuple(ranks[copy] for copy in copies)
                found.append(DivergentShard(name, position, differing))
                if self.action == "rebroadcast":
                    source = next(rank for rank in ranks if rank not in differing)
                    for tensor in (each.detach() for each in tensors):
                        values = tensor.contiguous()  # NCCL takes nothing else
                        dist.broadcast(values, source, group=group)
                        tensor.copy_(values)
        return found

    def _gather_findings(self, mine: list[DivergentShard]) -> list[DivergentShard]:
        """What any rank found. Collective over the global group; costly only if anything is."""
        group = self._groups.global_group
        flag = torch.tensor([len(mine)], device=self._groups.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if not flag.item():
            return []
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        # The ranks of a replica group found the same, and a table may have several column shards.
        found = {each for findings in everyone for each in findings}
        return sorted(found, key=lambda each: (each.table, each.shard, each.ranks))


def checksum(tensors: Sequence[torch.Tensor], keep: torch.Tensor | None = None) -> torch.Tensor:
    """A number (int64 scalar) that depends on every bit of `tensors` and on its place.

    With `keep`, bool [rows], on that of these rows alone.

    Each element's bits are multiplied by an odd random number of its position in a chunk, and the
    sums of chunks are chained, all modulo 2^64: one flipped bit always changes the result, other
    changes (rows swapped, say) escape with a probability of about 2^-63. Integer sums do not depend
    on their order, so equal bits give equal numbers on every rank. Takes half a megabyte of
    temporary memory on a CPU and 32 on a GPU, whatever the size of a (contiguous) tensor.
    """
    first, *_ = tensors
    multipliers = _multipliers(first.device)
    total = torch.zeros((), dtype=torch.int64, device=first.device)
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
        for number, chunk in enumerate(bits.split(multipliers.numel())):
            if keep is not None:
                start = number * multipliers.numel()
                places = torch.arange(start, start + chunk.numel(), device=chunk.device)
                chunk = chunk * keep[places // tensor[:1].numel()]
            total = total * _STRIDE + (chunk * multipliers[: chunk.numel()]).sum()
    return total


@functools.cache
def _multipliers(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    numbers = torch.randint(
        bounds.min, bounds.max, (_CHUNK[device.type],), generator=generator, dtype=torch.int64
    )
    return (numbers | 1).to(device)

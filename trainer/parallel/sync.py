"""Sync: averaging the copies of every shard over its replica group, by the policy of the spec.

Collectives, all on the *replica group* of the rank; nothing runs on the sharding group or on the
global group:

    touched_rows   1. all-gather: how many rows each copy touched
                   2. all-gather: which ones (places, or all bits where that is shorter)
                   3. all-to-all and all-gather: means of the union's rows, with their moments
    full           all-to-all and all-gather: means of every row, with their moments
    dtype fp16     before each exchange an all-gather of one byte: does a change overflow?

With `overlap` and `optimizer_state: delayed` the means are formed on a second process group over
the ranks of the replica group, the *background group*, by a thread (CUDA: on a side stream), while
the training step uses the others; only steps 1 and 2 stay on the replica group.

What is always averaged whole (`extra`) goes along with the rows. Means are formed in fp32 and in a
fixed order (`trainer.parallel.averaging`), so all copies end bitwise equal, and touched_rows gives
what full gives: bitwise for M a power of two; otherwise full lets rows that nobody touched drift
by a rounding, which touched_rows does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from trainer.parallel.replica_sync import Extra, Mode, NoSync, ReplicaSync, Sync, SyncReport
from trainer.parallel.two_d import TwoDParallel
from trainer.spec import JobSpec, SparseOptimizerSpec, SyncSpec

logger = logging.getLogger(__name__)

__all__ = ["Sync", "SyncReport", "build_sync", "is_sync_step", "mode_for"]


def is_sync_step(step: int, spec: SyncSpec) -> bool:
    """Whether the copies are averaged after `step` (counted from 1)."""
    return step % spec.every_steps == 0


def mode_for(sync: SyncSpec, optimizer: SparseOptimizerSpec) -> tuple[Mode, str | None]:
    """The mode that is exact for `optimizer`, and a warning when it is not the one asked for."""
    if sync.mode == "touched_rows" and optimizer.changes_untouched_rows:
        return "full", (
            "parallelism.sync.mode touched_rows is off: optimizer.sparse.weight_decay "
            f"({optimizer.weight_decay:g}) changes every row at each step, so every sync averages "
            "all rows; set it to 0 to sync touched rows only"
        )
    return sync.mode, None


def build_sync(
    model: TwoDParallel,
    spec: JobSpec,
    *,
    extra: Extra | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> Sync:
    """The sync that `spec` asks for, over equal copies. Collective over all ranks.

    `extra` gives (weights, optimizer states) that are averaged whole at each sync, always as they
    are: contiguous, shaped alike on all copies, the same tensors each time. `warn` hears, on one
    rank of those concerned, when a sync falls back to something else.
    """
    if model.groups.layout.num_replicas == 1:
        return NoSync()
    mode, warning = mode_for(spec.parallelism.sync, spec.optimizer.sparse)
    if warning and model.groups.rank == 0:
        warn(warning)
    sync = spec.parallelism.sync.model_copy(update={"mode": mode})
    return ReplicaSync(model, sync, extra or _nothing, warn)


def _nothing() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [], []

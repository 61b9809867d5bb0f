"""How evenly the work lies on the ranks: lookups, rows updated, and the phases of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from trainer.parallel.phases import LOCAL_PHASES, Phase
from trainer.parallel.two_d import TwoDParallel


class LookupCounter:
    """Counts the ids that this rank's shards look up, and the distinct rows they update.

    Lookups cost memory reads, distinct rows cost gradient writes: with skewed ids the two are
    balanced differently over the ranks. Distinct rows are counted only while `sampling`, because
    that needs a sort of the ids. `counts` is (ids, distinct rows) since the last report.
    """

    def __init__(self, model: TwoDParallel) -> None:
        self.sampling = False
        self.counts = (0, 0)
        self._handles = [
            kernel.register_forward_pre_hook(self._count, with_kwargs=True)
            for kernel in model.embedding_kernels()
        ]

    def _count(self, kernel: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (self.sampling and kernel.training):
            return
        indices = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets = kwargs["offsets"] if "offsets" in kwargs else args[1]
        num_ids, num_rows = self.counts
        distinct = _num_distinct_rows(kernel, indices, offsets)
        self.counts = (num_ids + indices.numel(), num_rows + distinct)

    @torch.no_grad()
    def imbalance(self, device: torch.device) -> dict[str, float]:
        """Max over mean across all ranks since the last call (1 is perfect). Collective."""
        lookups, rows = across_ranks(self.counts, device).unbind(1)
        self.counts = (0, 0)
        return {"balance/lookup": _imbalance(lookups), "balance/gradient": _imbalance(rows)}


def across_ranks(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Every rank's `values`, [T, len(values)] float64 on the host. Collective: one all-gather."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    gathered = mine.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_single(gathered, mine)
    return gathered.view(-1, len(values)).cpu()


def _imbalance(values: torch.Tensor) -> float:
    """Max over mean; 1 where there is nothing to balance."""
    mean = values.mean().item()
    return values.max().item() / mean if mean else 1.0


def phase_metrics(mine: Mapping[Phase, float], device: torch.device) -> dict[str, float]:
    """Mean over the ranks of the seconds per step that each phase took here. Collective.

    `balance/step` is max over mean across the ranks of the time that a step spends in phases in
    which no rank waits for another.
    """
    gathered = across_ranks(list(mine.values()), device)
    metrics = {f"phase/{p}_s": m for p, m in zip(mine, gathered.mean(0).tolist(), strict=True)}
    local = [index for index, phase in enumerate(mine) if phase in LOCAL_PHASES]
    return metrics | {"balance/step": _imbalance(gathered[:, local].sum(1))}


def _num_distinct_rows(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, indices: torch.Tensor, offsets: torch.Tensor
) -> int:
    """Distinct (table, row) pairs in one lookup; features of one table are counted together."""
    tables = kernel.feature_table_map
    bags_per_feature = (offsets.numel() - 1) // len(tables)
    bounds = offsets[::bags_per_feature].tolist() if bags_per_feature else [0] * (len(tables) + 1)
    num_rows = 0
    for table in sorted(set(tables)):
        parts = [indices[bounds[f] : bounds[f + 1]] for f, t in enumerate(tables) if t == table]
        num_rows += torch.cat(parts).unique().numel()
    return num_rows

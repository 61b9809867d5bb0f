"""What each rank's rows are of a step's mean, where rows do not all count alike.

Every rank takes the weighted mean over its own rows, and the gradients of all ranks are averaged
alike. With `data.weight_column`, or with rows left out as quarantined, the ranks of a step hold
unequal sums of weights: a row would count by whom it shares a rank with. Rank r's loss is therefore
scaled by w_r T / sum(w), which makes the average over T ranks the mean over all rows of the step.
Where gradients accumulate, sum(w) is also what the step counts in its window, of which an epoch's
last step may be a small part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.data.batches import Batch
from trainer.spec import JobSpec

# Keeps the shares of ranks whose rows all have weight 0 from being NaN.
_LEAST_WEIGHT = torch.finfo(torch.float32).tiny


class RankShares:
    """Sums the weights of a step over the ranks of `group` beside the forward pass."""

    def __init__(self, spec: JobSpec, group: dist.ProcessGroup) -> None:
        self._is_accumulating = spec.training.accumulate_steps > 1
        has_weights = spec.data.weight_column is not None or spec.data.on_bad_rows == "quarantine"
        self.is_on = has_weights or self._is_accumulating
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._work: dist.Work | None = None

    def begin(self, batch: Batch) -> None:
        """Start summing the weights of a step's rows. Collective where `is_on`."""
        if not self.is_on:
            return
        self._own = batch.weight.sum()
        self._total = self._own.clone()
        self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    def scaled(
        self, loss: torch.Tensor, weigh: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """`loss`, the mean over this rank's rows of the step begun, as it counts in the average.

        `weigh` is told what the step counts in its window, if gradients accumulate.
        """
        if self._work is None:
            return loss
        self._work.wait()
        self._work = None
        if weigh is not None and self._is_accumulating:
            weigh(self._total)
        return loss * (self._own * self._num_ranks / self._total.clamp(min=_LEAST_WEIGHT))

    @property
    def total(self) -> torch.Tensor:
        """Sum of the weights of the newest step's rows over all ranks, float32 []."""
        return self._total

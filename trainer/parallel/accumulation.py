"""Gradients of several batches as those of one: their mean, weighted by what each batch weighs.

Backward passes add gradients up, each the mean over its batch's rows. With S = sum(w_i g_i) and w
the weight of the newest batch, what is held is S / w: before a batch of weight w' adds its own
gradient, that is scaled by w / w'. Divided by sum(w_i) / w it is the mean over all rows. Batches of
equal weight are added as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradients = Sequence[torch.Tensor]


class Window:
    """The batches since the last step of the dense part. Nothing waits for the device."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._newest: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add(self, held: Gradients, weight: torch.Tensor) -> None:
        """Make room in the gradients held for those of a batch: call it before its backward pass.

        `weight` is the sum of its rows' weights over all ranks, a scalar. A batch that weighs 0 has
        gradients of 0.
        """
        weight = weight.detach().double()
        self.num_batches += 1
        if self._newest is None or self._total is None:
            self._newest, self._total = weight, weight
            return
        counts = weight > 0
        scale = torch.where(counts, self._newest / weight, 1.0)
        if held:
            torch._foreach_mul_(list(held), scale.to(held[0].dtype))
        self._newest = torch.where(counts, weight, self._newest)
        self._total = self._total + weight

    def close(self, held: Gradients) -> None:
        """Make the gradients held the weighted mean, and begin anew."""
        if self._newest is not None and self._total is not None and held:
            share = torch.where(self._newest > 0, self._total / self._newest, 1.0)
            torch._foreach_div_(list(held), share.to(held[0].dtype))
        self.num_batches, self._newest, self._total = 0, None, None

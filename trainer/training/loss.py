"""Guard against non-finite losses, and the weighting of the loss over the ranks.

No later step recovers from a NaN, so none is saved: the job fails, or goes back to its newest
checkpoint and leaves out the rows since the loss was last finite (`training.on_non_finite`). A
finite loss may have a NaN gradient, as of sqrt at 0. What a step looked up may not be looked up
again for long, so the gradients of lookups are seen in each step; what a rank holds whole stays
NaN, and is seen where the guard is read, which is never between accumulated gradients.

Every rank takes the weighted mean over its own rows, and the gradients of all ranks are averaged
alike. With `data.weight_column`, or with rows quarantined, the ranks of a step hold unequal sums of
weights. Rank r's loss is therefore scaled by w_r T / sum(w), which makes the average over T ranks
the mean over all rows of the step. Where gradients accumulate, sum(w) is also what the step counts
in its window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainer.data.batches import Batch
from trainer.data.position import DataPosition, EpochSpans, SkippedRows, rows_between
from trainer.failures import NonFiniteLoss, NonFiniteRows
from trainer.models.networks import LEAST_WEIGHT
from trainer.parallel.collectives import Part
from trainer.parallel.model import TwoDParallel, as_real
from trainer.protocol import events
from trainer.protocol.run_dir import RunDir
from trainer.spec.job import JobSpec

_REASON = "the loss or a gradient became NaN or infinite"
NON_FINITE_ADVICE = (
    "lower optimizer.sparse.lr or optimizer.dense.lr, look for outliers in the data and, in a "
    "module of your own, for roots, logarithms and quotients of 0, or leave such rows out with "
    "training.on_non_finite: skip"
)


class NonFiniteLossGuard:
    """Sums losses and gradients of one rank, and checks those of all ranks at reports and saves.

    Sums are finite where all that was added is. One that is not is found by the first `part` after
    the step that made it so.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: RunDir,
        rows_per_epoch: int,
        device: torch.device,
        emit: Callable[[events.Event], None],
    ) -> None:
        """`emit` writes events; it does so on one rank only, which also keeps the file."""
        self._policy = spec.training.on_non_finite
        self._path = run_dir.skipped_rows_path
        self._rows_per_epoch = rows_per_epoch
        self._emit = emit
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._total = 0.0
        self._finite_at = DataPosition()
        self._whole: list[torch.Tensor] = []  # weights that this rank holds whole
        self._has_trained = False  # since the last part
        self._max_gradient = spec.optimizer.sparse.max_gradient

    def begin_at(self, position: DataPosition) -> None:
        """Training starts from a good state at `position`."""
        self._sum.zero_()
        self._has_trained = False
        self._finite_at = position

    def watch(self, model: TwoDParallel) -> None:
        """Count what `model` learns, too; its optimizers are there."""
        parameters = (p for _, p in in_backward_optimizer_filter(model.named_parameters()))
        self._whole = [as_real(p.detach()) for p in parameters if p.requires_grad]
        for kernel in model.embedding_kernels():
            dims = kernel.feature_dims.to(self._sum.device)
            width = math.gcd(*dims.tolist())
            # The feature of each `width` columns of what the kernel looks up.
            features = torch.arange(len(dims), device=dims.device).repeat_interleave(dims // width)
            # Less than their mean, so that no sum of finite numbers overflows.
            scale = features.new_full((width,), 0.5 / width, dtype=torch.float32)
            watch = partial(self._watch_lookup, features, scale)
            kernel.register_forward_hook(watch, with_kwargs=True)

    def _watch_lookup(
        self,
        features: torch.Tensor,
        scale: torch.Tensor,
        kernel: Any,
        _: Any,
        inputs: dict[str, Any],
        looked_up: torch.Tensor,
    ) -> None:
        """Add the gradient of what a kernel `looked_up`, [B, columns], or [n, D] of sequences."""

        def add(gradient: torch.Tensor) -> None:
            if self._max_gradient is not None:  # FBGEMM makes this of what is infinite, too
                gradient = gradient.clamp(-self._max_gradient, self._max_gradient)
            sums = gradient.reshape(-1, len(scale)).mv(scale)
            if not kernel.is_nobag:  # no row learns from the gradient of a bag without ids
                offsets = inputs["offsets"]
                is_empty = (offsets[1:] == offsets[:-1]).view(-1, len(gradient))
                if len(is_empty) < len(features):
                    is_empty = is_empty.index_select(0, features)
                sums.view(len(gradient), -1).masked_fill_(is_empty.t(), 0.0)
            self._sum += sums.sum(dtype=torch.float64)

        if looked_up.requires_grad:
            looked_up.register_hook(add)

    def add(self, loss: torch.Tensor) -> None:
        """Count the loss of a step, a scalar."""
        self._sum += loss
        self._has_trained = True

    def part(self) -> Part:
        """What was added since the last part, for `check` of the state that it led to."""
        if self._whole and self._has_trained:
            totals = [weights.sum(dtype=torch.float64) for weights in self._whole]
            self._sum += torch.stack(totals).sum()
        self._has_trained = False
        taken = self._sum[None].clone()
        self._sum.zero_()
        return Part(taken, self._read)

    def _read(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        self._total = sums.item()
        return {}

    def check(self, position: DataPosition, step: int, is_first_rank: bool) -> None:
        """Raise on every rank when something was not finite in the newest `part` that was read.

        The part was made at `position`, after `step`. Raises `NonFiniteRows`, the rows since the
        last good state being noted, or `NonFiniteLoss`.
        """
        if math.isfinite(self._total):
            self._finite_at = position
            return
        message = f"the training loss or a gradient became {self._total} by step {step}; "
        if self._policy == "skip":
            rows = rows_between(self._finite_at, position, self._rows_per_epoch)
            if is_first_rank:
                self._record_skipped(rows)
            num_rows = sum(stop - start for _, spans in rows for start, stop in spans)
            message += f"its {num_rows} rows are left out, from the newest checkpoint on"
            raise NonFiniteRows(message)
        raise NonFiniteLoss(message + NON_FINITE_ADVICE)

    def _record_skipped(self, rows: list[EpochSpans]) -> None:
        SkippedRows.read(self._path).with_rows(rows).write(self._path)
        for epoch, spans in rows:
            self._emit(
                events.RowsSkipped(
                    time=time.time(),
                    epoch=epoch,
                    start=spans[0][0],
                    stop=spans[-1][1],
                    num_rows=sum(stop - start for start, stop in spans),
                    reason=_REASON,
                )
            )


class LossWeighting:
    """Sums the weights of a step over the ranks of `group` beside the forward pass.

    `total` is the sum of the newest step, float32 [].
    """

    def __init__(self, spec: JobSpec, group: dist.ProcessGroup) -> None:
        self._is_accumulating = spec.training.accumulate_steps > 1
        self.is_on = spec.data.has_row_weights or self._is_accumulating
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._work: dist.Work | None = None

    def begin(self, batch: Batch) -> None:
        """Start summing the weights of a step's rows. Collective where `is_on`."""
        if not self.is_on:
            return
        self._own = batch.weight.sum()
        self.total = self._own.clone()
        self._work = dist.all_reduce(self.total, group=self._group, async_op=True)

    def scaled(self, loss: torch.Tensor, weigh: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """`loss`, the mean over this rank's rows of the step begun, as it counts in the average.

        `weigh` is told what the step counts in its window, if gradients accumulate.
        """
        if self._work is None:
            return loss
        self._work.wait()
        self._work = None
        if self._is_accumulating:
            weigh(self.total)
        return loss * (self._own * self._num_ranks / self.total.clamp(min=LEAST_WEIGHT))

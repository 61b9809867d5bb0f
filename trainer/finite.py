"""Notices a loss that became NaN or infinite, on whichever rank, or that explodes.

From a NaN no later step comes back, so none is saved. The job fails, or goes back to its newest
checkpoint and leaves out the rows since the loss was last finite (`training.on_non_finite`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping

import torch

from trainer import events
from trainer.balance import across_ranks
from trainer.data.position import DataPosition
from trainer.elastic.detect import LossPolicy, LossWatch
from trainer.elastic.skipped_rows import EpochSpans, SkippedRows, rows_between
from trainer.failures import NonFiniteLoss, RowsPoisoned
from trainer.run_dir import RunDir
from trainer.spec import JobSpec

_REASON = "the loss became NaN or infinite"

_TRAIN_NE = re.compile(r"train/(\w+/)?ne")


class FiniteGuard:
    """Sums the losses of one rank and looks at all ranks' sums when asked to."""

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
        self._finite_at = DataPosition()
        self._watch = LossWatch(LossPolicy())

    def judge(self, values: Mapping[str, float]) -> None:
        """Raise `NonFiniteLoss` where the reported entropy, equal on all ranks, explodes."""
        # Of several tasks, the worst: `train/TASK/ne`.
        found = [value for name, value in values.items() if _TRAIN_NE.fullmatch(name)]
        decision = self._watch.judge_ne(max(found, default=math.nan))
        if decision.action == "fail":
            raise NonFiniteLoss(
                f"{decision.cause}: the model unlearns; lower optimizer.sparse.lr or "
                "optimizer.dense.lr, or add a warm-up (optimizer.schedule)"
            )

    def begin_at(self, position: DataPosition) -> None:
        """Training starts from a good state at `position`."""
        self._sum.zero_()
        self._finite_at = position

    def add(self, loss: torch.Tensor) -> None:
        """Count the loss of a step, a scalar."""
        self._sum += loss

    def check(self, position: DataPosition, step: int, is_first_rank: bool) -> None:
        """Raise on every rank when a loss since the last call was not finite. Collective.

        Raises `RowsPoisoned`, the rows since then being noted, or `NonFiniteLoss`.
        """
        sums = across_ranks([self._sum.item()], self._sum.device)
        if bool(sums.isfinite().all()):
            self.begin_at(position)
            return
        message = f"the training loss became {sums.sum().item()} by step {step}; "
        if self._policy == "skip":
            rows = rows_between(self._finite_at, position, self._rows_per_epoch)
            if is_first_rank:
                self._note(rows)
            num_rows = sum(stop - start for _, spans in rows for start, stop in spans)
            message += f"its {num_rows} rows are left out, from the newest checkpoint on"
            raise RowsPoisoned(message)
        raise NonFiniteLoss(
            message + "lower optimizer.sparse.lr or optimizer.dense.lr, look for outliers in the "
            "data, or leave such rows out with training.on_non_finite: skip"
        )

    def _note(self, rows: list[EpochSpans]) -> None:
        SkippedRows.read(self._path).with_rows(rows).write(self._path)
        for epoch, spans in rows:
            for start, stop in spans:
                self._emit(
                    events.RowsSkipped(
                        time=time.time(), epoch=epoch, start=start, stop=stop, reason=_REASON
                    )
                )

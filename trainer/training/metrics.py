"""What a run measures: task metrics (torchrec.metrics), balance over the ranks, early stopping.

Names of reported values: `train/loss`, `train/rmse`, `validation/rmse` (of several tasks
`train/TASK/rmse`; `loss` is the weighted sum over the tasks), `speed/rows_per_s`,
`speed/steps_per_s`, `sync/time_s`, `sync/bytes`, `sync/density`, `data/wait_s`, `phase/NAME_s` (the
phases of `trainer.training.profiling`), `balance/lookup`, `balance/gradient`, `balance/step`. Times
are seconds per step, except `sync/time_s`, which is seconds per sync; phases are means over the
ranks.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.coordination.messages import EarlyStoppingState
from trainer.data.batches import Batch
from trainer.data.quarantine import QuarantinedRows, most_quarantined
from trainer.parallel.model import TwoDParallel
from trainer.parallel.touched_rows import looked_up
from trainer.protocol import events
from trainer.protocol.events import Phase
from trainer.spec.job import JobSpec
from trainer.spec.model import TaskSpec
from trainer.spec.training import EarlyStoppingSpec
from trainer.training.profiling import LOCAL_PHASES


@contextmanager
def without(package: str) -> Iterator[None]:
    """Imports inside do not find `package`, unless it is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


# torchmetrics imports matplotlib where it is installed, for two seconds, and draws nothing here.
with without("matplotlib"):
    from torchrec.metrics.auc import AUCMetric
    from torchrec.metrics.calibration import CalibrationMetric
    from torchrec.metrics.mae import MAEMetric
    from torchrec.metrics.metrics_config import RecTaskInfo
    from torchrec.metrics.mse import MSEMetric
    from torchrec.metrics.ne import NEMetric
    from torchrec.metrics.rec_metric import RecMetric
# metric of the spec -> (class, key of its value over everything since the last reset, options)
_METRICS: dict[str, tuple[type[RecMetric], str, dict[str, Any]]] = {
    "rmse": (MSEMetric, "mse-{task}|local_lifetime_rmse", {}),
    "mae": (MAEMetric, "mae-{task}|local_lifetime_mae", {}),
    "ne": (NEMetric, "ne-{task}|local_lifetime_ne", {}),
    "auc": (AUCMetric, "auc-{task}|window_auc", {}),
    "calibration": (CalibrationMetric, "calibration-{task}|local_lifetime_calibration", {}),
    "logloss": (NEMetric, "ne-{task}|local_lifetime_logloss", {"include_logloss": True}),
}
# TorchRec's log loss is in bits, ours in nats as the training loss is.
_UNITS = {"logloss": math.log(2)}
# Labels went through their normalisation and back in float32.
_LABEL_TOLERANCE = 1e-5


class TaskMeter:
    """Loss and metrics of all tasks, over all ranks, since the last `compute`.

    A step only keeps its outputs; the metrics see them all at once at the report, and their sums
    travel in one all-reduce instead of several for each metric. `state` and `load_state` carry what
    came in since the last report over to another run, at any number of ranks.

    The names of one task's metrics have no prefix, those of several begin with `TASK/`. Every
    metric weighs rows by `Batch.weight`.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        batch_size: int,
        window_rows: int,
        device: torch.device | None = None,
    ) -> None:
        self._kept: list[tuple[torch.Tensor, ...]] = []
        # Sums of weighted losses and of weights that the metrics have taken in.
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._is_binary = torch.tensor([task.loss == "bce" for task in tasks], device=device)
        self._tasks = {
            f"{task.name}/" if len(tasks) > 1 else "": _TaskMetrics(
                task, batch_size, window_rows, self._losses.device
            )
            for task in tasks
        }

    @torch.no_grad()
    def update(self, batch: Batch, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        """Take in one batch; `outputs` is [B, K] as the model gave it. Rows of weight 0 are out."""
        weighted_loss = loss.detach() * batch.weight.sum()
        labels = batch.label * batch.label_scale + batch.label_offset
        values = outputs * batch.label_scale + batch.label_offset
        predictions = torch.where(self._is_binary, torch.sigmoid(outputs), values)
        self._kept.append((predictions, labels, batch.weight, weighted_loss[None]))

    @torch.no_grad()
    def compute(self, prefix: str) -> dict[str, float]:
        """Values since the last call, named `PREFIX/NAME`, and start over. Collective.

        No values where no row that counts came in: an error of 0 would look like a perfect model.
        """
        self._update_metrics()
        _all_reduce(list(self._sums().values()))
        values = {}
        if self._losses[1]:
            values[f"{prefix}/loss"] = (self._losses[0] / self._losses[1]).item()
            for name, task in self._tasks.items():
                values |= {f"{prefix}/{name}{key}": value for key, value in task.compute().items()}
        self._losses.zero_()
        for task in self._tasks.values():
            task.reset()
        return values

    @torch.no_grad()
    def state(self) -> dict[str, torch.Tensor]:
        """What came in on all ranks since the last `compute`, on the host. Collective.

        Sums as float64, and for AUC the rows themselves: predictions, labels and weights [3, rows].
        """
        self._update_metrics()
        sums = {name: value.clone() for name, value in self._sums().items()}
        _all_reduce(list(sums.values()))
        # How many rows came in is known to all ranks alike by the sum of their weights only.
        if sums["loss"][1]:
            for name, task in self._tasks.items():
                if task.has_auc:
                    sums[f"{name}auc"] = _gather_columns(task.auc_rows())
        return {name: value.cpu() for name, value in sums.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, as some number of ranks had it; a metric it lacks starts anew.

        Rank 0 takes the sums, and the ranks share the rows.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for name, value in self._sums().items():
            if rank == 0 and name in state:
                value.copy_(state[name])
        for name, task in self._tasks.items():
            if task.has_auc and f"{name}auc" in state:
                # Rows of weight 0 make all shares equal.
                rows = state[f"{name}auc"]
                rows = nn.functional.pad(rows, (0, -rows.shape[1] % world_size))
                task.update("auc", *rows[:, rank::world_size].to(self._losses.device))

    def _sums(self) -> dict[str, torch.Tensor]:
        """Every state that is a sum over rows, by name: views of what the metrics hold."""
        tasks = self._tasks.items()
        return {"loss": self._losses} | {
            f"{prefix}{name}": value for prefix, task in tasks for name, value in task.sums()
        }

    def _update_metrics(self) -> None:
        """Pass the kept batches to the metrics."""
        if not self._kept:
            return
        predictions, labels, weights, losses = map(torch.cat, zip(*self._kept, strict=True))
        self._kept.clear()
        self._losses += torch.stack([losses.double().sum(), weights.double().sum()])
        for k, task in enumerate(self._tasks.values()):
            task.take_in(predictions[:, k], labels[:, k], weights)


class _TaskMetrics:
    """The metrics of one task, from torchrec.metrics."""

    def __init__(
        self, task: TaskSpec, batch_size: int, window_rows: int, device: torch.device
    ) -> None:
        self._name = task.name
        self._threshold = task.auc_threshold
        self._metrics: dict[str, RecMetric] = {}
        for name in task.metric_names:
            kind, _, options = _METRICS[name]
            self._metrics[name] = kind(
                world_size=dist.get_world_size(),
                my_rank=dist.get_rank(),
                batch_size=batch_size,
                tasks=[RecTaskInfo(name=task.name)],
                window_size=window_rows,
                compute_on_all_ranks=True,
                **options,
            ).to(device)

    @property
    def has_auc(self) -> bool:
        """Whether AUC is wanted, which keeps all rows."""
        return "auc" in self._metrics

    def take_in(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """Rows in the label's own unit, [n] each."""
        for name in self._metrics:
            wanted = self._is_positive(labels) if name == "auc" else labels
            self.update(name, predictions, wanted, weights)

    def _is_positive(self, labels: torch.Tensor) -> torch.Tensor:
        """1 where AUC takes a row for positive, else 0."""
        if self._threshold is None:
            return labels
        tolerance = _LABEL_TOLERANCE * max(1.0, abs(self._threshold))
        return (labels >= self._threshold - tolerance).to(labels.dtype)

    def update(
        self, name: str, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> None:
        task = self._name
        self._metrics[name].update(
            predictions={task: predictions}, labels={task: labels}, weights={task: weights}
        )

    def compute(self) -> dict[str, float]:
        """Values by metric; the sums are those of all ranks. Collective for AUC."""
        values = {}
        for name, metric in self._metrics.items():
            # AUC keeps whole lists, which it gathers by itself.
            found = metric.compute() if name == "auc" else metric.local_compute()
            key = _METRICS[name][1].format(task=self._name)
            values[name] = found[key].item() * _UNITS.get(name, 1.0)
        return values

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state that is a sum over rows, by `METRIC.STATE`."""
        for name, metric in self._metrics.items():
            if name == "auc":
                continue
            for computation in metric._metrics_computations:
                for state in computation._defaults:  # torchmetrics 1.0.3 has no public list
                    yield f"{name}.{state}", getattr(computation, state)

    def auc_rows(self) -> torch.Tensor:
        """Predictions, labels and weights of this rank since the last report, [3, rows]."""
        (computation,) = self._metrics["auc"]._metrics_computations
        names = ("predictions", "labels", "weights")
        return torch.cat([torch.cat(getattr(computation, name), dim=1) for name in names])


def _gather_columns(columns: torch.Tensor) -> torch.Tensor:
    """All ranks' `columns` [3, n] beside each other: [3, T n]. Collective: one all-gather."""
    gathered = columns.new_empty(dist.get_world_size() * columns.numel())
    dist.all_gather_single(gathered, columns.flatten())
    return gathered.view(-1, *columns.shape).transpose(0, 1).flatten(1)


def _all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sum float64 `tensors` over all ranks, in place, in one collective."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


class LookupCounter:
    """Counts the ids that this rank's shards look up, and the distinct rows they update.

    Lookups cost memory reads, distinct rows cost gradient writes: with skewed ids the two are
    balanced differently over the ranks. Distinct rows are counted only while `sampling`, because
    that needs a sort of the ids. `counts` is (ids, distinct rows) since the last report.
    """

    def __init__(self, model: TwoDParallel) -> None:
        self.sampling = False
        self.counts = (0, 0)
        for kernel in model.embedding_kernels():
            kernel.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, kernel: Any, args: Any, inputs: dict[str, Any]) -> None:
        if self.sampling and kernel.training:
            rows = looked_up(kernel, inputs["indices"], inputs["offsets"])
            num_ids, num_rows = self.counts
            self.counts = (num_ids + rows.numel(), num_rows + rows.unique().numel())

    @torch.no_grad()
    def imbalance(self, device: torch.device) -> dict[str, float]:
        """Max over mean across all ranks since the last call (1 is perfect). Collective."""
        lookups, rows = gather_across_ranks(self.counts, device).unbind(1)
        self.counts = (0, 0)
        return {"balance/lookup": _imbalance(lookups), "balance/gradient": _imbalance(rows)}


def gather_across_ranks(values: Sequence[float], device: torch.device) -> torch.Tensor:
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
    gathered = gather_across_ranks(list(mine.values()), device)
    metrics = {f"phase/{p}_s": m for p, m in zip(mine, gathered.mean(0).tolist(), strict=True)}
    local = [index for index, phase in enumerate(mine) if phase in LOCAL_PHASES]
    return metrics | {"balance/step": _imbalance(gathered[:, local].sum(1))}


class QuarantineReporter:
    """Counts the rows that one rank left out (`data.on_bad_rows: quarantine`), for each report."""

    def __init__(
        self, spec: JobSpec, device: torch.device, emit: Callable[[events.Event], None]
    ) -> None:
        self._is_on = spec.data.on_bad_rows == "quarantine"
        self._device = device
        self._emit = emit
        self._found: QuarantinedRows = Counter()
        self.has_validated = False

    def add(self, found: QuarantinedRows) -> None:
        self._found.update(found)

    def add_held_out(self, found: QuarantinedRows) -> None:
        """Count what a batch of a validation left out: all read the same rows, the first counts."""
        if not self.has_validated:
            self.add(found)

    def report(self) -> dict[str, float]:
        """Rows left out since the last call, over all ranks; an event for each file and reason.

        Nothing where bad rows end the job. Collective otherwise.
        """
        if not self._is_on:
            return {}
        counts = gather_across_ranks([self._found.total()], self._device)
        for (file, reason), count in most_quarantined(self._found).items():
            self._emit(
                events.RowsQuarantined(time=time.time(), file=file, reason=reason, count=count)
            )
        self._found.clear()
        return {"data/quarantined_rows": counts.sum().item()}


def is_better(metric: str, value: float, best: float | None, min_delta: float = 0.0) -> bool:
    """Whether `value` of `metric` beats `best` by more than `min_delta`.

    None: nothing to beat yet; NaN never wins. The name may begin with a task's, `TASK/auc`.
    """
    if value != value:
        return False
    if best is None:
        return True
    return _distance(metric, value) < _distance(metric, best) - min_delta


def _distance(metric: str, value: float) -> float:
    """How far from perfect: lower is better."""
    name = metric.rpartition("/")[2]
    if name == "auc":
        return 1.0 - value
    return abs(value - 1.0) if name == "calibration" else value


def after_validation(
    plateau: EarlyStoppingState | None, metric: str, value: float, spec: EarlyStoppingSpec
) -> EarlyStoppingState:
    """Early stopping state after a validation that found `value` of `metric`.

    A NaN is no gain, not even as the first value.
    """
    plateau = plateau or EarlyStoppingState()
    if is_better(metric, value, plateau.best, spec.min_delta):
        return EarlyStoppingState(best=value)
    return EarlyStoppingState(best=plateau.best, num_validations=plateau.num_validations + 1)


def is_over(plateau: EarlyStoppingState | None, spec: EarlyStoppingSpec | None) -> bool:
    """Whether training ends here."""
    return bool(spec and plateau and plateau.num_validations >= spec.patience)

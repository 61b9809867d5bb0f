"""What a run measures: task metrics (torchrec.metrics) and speed; `trainer.balance` has the rest.

Names of reported values: `train/loss`, `train/rmse`, `validation/rmse` (of several tasks
`train/TASK/rmse`; `loss` is the weighted sum over the tasks), `speed/rows_per_s`,
`speed/steps_per_s`, `sync/time_s`, `sync/bytes`, `sync/density`, `data/wait_s`, `phase/NAME_s` (the
phases of `trainer.parallel.phases`), `balance/lookup`, `balance/gradient`, `balance/step`. Times
are seconds per step, except `sync/time_s`, which is seconds per sync; phases are means over the
ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.mae import MAEMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.mse import MSEMetric
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecMetric

from trainer.data.batches import Batch
from trainer.parallel.phases import PhaseTimes
from trainer.parallel.sync import SyncReport
from trainer.spec import TaskSpec

# metric of the spec -> (class, key of its value over everything since the last reset, options)
_METRICS: dict[str, tuple[type[RecMetric], str, dict[str, Any]]] = {
    "rmse": (MSEMetric, "mse-{task}|{local}lifetime_rmse", {}),
    "mae": (MAEMetric, "mae-{task}|{local}lifetime_mae", {}),
    "ne": (NEMetric, "ne-{task}|{local}lifetime_ne", {}),
    "auc": (AUCMetric, "auc-{task}|{local}window_auc", {}),
    "calibration": (CalibrationMetric, "calibration-{task}|{local}lifetime_calibration", {}),
    "logloss": (NEMetric, "ne-{task}|{local}lifetime_logloss", {"include_logloss": True}),
}
# TorchRec's log loss is in bits, ours in nats as the training loss is.
_UNITS = {"logloss": math.log(2)}
# Labels went through their normalisation and back in float32.
_LABEL_TOLERANCE = 1e-5


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


class TaskMeter:
    """Loss and metrics of all tasks, over all ranks, since the last `compute`.

    A step only keeps its outputs; the metrics see them all at once at the report, and their sums
    travel in one all-reduce. Left to themselves the metrics would sync state by state, with
    several collectives each. `state` and `load_state` carry what came in since the last report
    over to another run, at any number of ranks.

    The names of one task's metrics have no prefix, those of several begin with `TASK/`. Every
    metric weighs rows by `Batch.weight`.
    """

    def __init__(self, tasks: Sequence[TaskSpec], batch_size: int, window_rows: int) -> None:
        self._kept: list[tuple[torch.Tensor, ...]] = []
        # Sums of weighted losses and of weights that the metrics have taken in.
        self._losses = torch.zeros(2, dtype=torch.float64)
        self._is_binary = torch.tensor([task.loss == "bce" for task in tasks])
        self._tasks = {
            f"{task.name}/" if len(tasks) > 1 else "": _TaskMetrics(task, batch_size, window_rows)
            for task in tasks
        }

    def to(self, device: torch.device) -> TaskMeter:
        """Move the state to the device of the batches."""
        self._is_binary = self._is_binary.to(device)
        for task in self._tasks.values():
            task.to(device)
        self._losses = self._losses.to(device)
        return self

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
        self._hand_over()
        _all_reduce(list(self._sums().values()))
        if not self._losses[1]:
            self._start_over()
            return {}
        values = {f"{prefix}/loss": (self._losses[0] / self._losses[1]).item()}
        for name, task in self._tasks.items():
            values |= {f"{prefix}/{name}{key}": value for key, value in task.compute().items()}
        self._losses.zero_()
        return values

    def _start_over(self) -> None:
        self._losses.zero_()
        for task in self._tasks.values():
            task.reset()

    @torch.no_grad()
    def state(self) -> dict[str, torch.Tensor]:
        """What came in on all ranks since the last `compute`, on the host. Collective.

        Sums as float64, and for AUC the rows themselves: predictions, labels and weights [3, rows].
        """
        self._hand_over()
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

    def _hand_over(self) -> None:
        """Give the metrics what was kept."""
        if not self._kept:
            return
        predictions, labels, weights, losses = map(torch.cat, zip(*self._kept, strict=True))
        self._kept.clear()
        self._losses += torch.stack([losses.double().sum(), weights.double().sum()])
        for k, task in enumerate(self._tasks.values()):
            task.take_in(predictions[:, k], labels[:, k], weights)


class _TaskMetrics:
    """The metrics of one task, from torchrec.metrics."""

    def __init__(self, task: TaskSpec, batch_size: int, window_rows: int) -> None:
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
            )

    @property
    def has_auc(self) -> bool:
        """Whether AUC is wanted, which keeps all rows."""
        return "auc" in self._metrics

    def to(self, device: torch.device) -> None:
        """Move the state."""
        for metric in self._metrics.values():
            metric.to(device)

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
        """Rows for one metric, as it wants its labels."""
        task = self._name
        self._metrics[name].update(
            predictions={task: predictions}, labels={task: labels}, weights={task: weights}
        )

    def compute(self) -> dict[str, float]:
        """Values by metric, and start over; the sums are those of all ranks. Collective for AUC."""
        values = {}
        for name, metric in self._metrics.items():
            # AUC keeps whole lists, which it gathers by itself.
            found = metric.compute() if name == "auc" else metric.local_compute()
            local = "" if name == "auc" else "local_"
            key = _METRICS[name][1].format(task=self._name, local=local)
            values[name] = found[key].item() * _UNITS.get(name, 1.0)
            metric.reset()
        return values

    def reset(self) -> None:
        """Start over."""
        for metric in self._metrics.values():
            metric.reset()

    def sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state that is a sum over rows, by `METRIC.STATE`."""
        for name, metric in self._metrics.items():
            if name != "auc":
                yield from ((f"{name}.{state}", value) for state, value in _states(metric))

    def auc_rows(self) -> torch.Tensor:
        """Predictions, labels and weights of this rank since the last report, [3, rows]."""
        (computation,) = self._metrics["auc"]._metrics_computations
        names = ("predictions", "labels", "weights")
        return torch.cat([torch.cat(getattr(computation, name), dim=1) for name in names])


def _states(metric: RecMetric) -> Iterator[tuple[str, torch.Tensor]]:
    """Every state of `metric` by its name; all of them are sums over rows."""
    for computation in metric._metrics_computations:
        for name in computation._defaults:  # torchmetrics 1.0.3 has no public list of its states
            yield name, getattr(computation, name)


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


class Speedometer:
    """Rows and steps per second between reports. Sums what each step spent on sync and waiting.

    It starts, stops and counts `phases` along with itself.
    """

    def __init__(
        self,
        rows_per_step: int,
        phases: PhaseTimes[Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phases = phases
        self._rows_per_step = rows_per_step
        self._clock = clock
        self._is_paused = False
        self.restart()

    def restart(self) -> None:
        """Start a new window now, forgetting what was measured."""
        self.phases.restart()
        self._started = self._clock()
        self._paused_s = 0.0
        self._num_steps = self._num_syncs = self._sync_bytes = 0
        self._sync_s = self._sync_density = self._wait_s = 0.0

    def step(self, wait_s: float) -> None:
        """Count one step that waited `wait_s` for its batch."""
        self._num_steps += 1
        self._wait_s += wait_s
        self.phases.step()

    def sync(self, report: SyncReport) -> None:
        """Count one sync."""
        self._num_syncs += 1
        self._sync_s += report.time_s
        self._sync_bytes += report.num_bytes
        self._sync_density += report.density

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out time that is not training (validation, checkpoints, traces); may be nested."""
        started, is_outermost = self._clock(), not self._is_paused
        self._is_paused = True
        with self.phases.paused():
            yield
        if is_outermost:
            self._is_paused = False
            self._paused_s += self._clock() - started

    def read(self) -> dict[str, float]:
        """Values of this window; starts the next one."""
        elapsed_s = max(self._clock() - self._started - self._paused_s, 1e-9)
        steps_per_s = self._num_steps / elapsed_s
        values = {
            "speed/steps_per_s": steps_per_s,
            "speed/rows_per_s": steps_per_s * self._rows_per_step,
            "data/wait_s": self._wait_s / max(self._num_steps, 1),
        }
        if self._num_syncs:
            values["sync/time_s"] = self._sync_s / self._num_syncs
            values["sync/bytes"] = self._sync_bytes / self._num_syncs
            values["sync/density"] = self._sync_density / self._num_syncs
        self.restart()
        return values

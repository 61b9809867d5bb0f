"""What a run measures: task metrics (torchrec.metrics), speed, and balance over the ranks.

Names of reported values: `train/loss`, `train/rmse`, `validation/rmse`, `speed/rows_per_s`,
`speed/steps_per_s`, `sync/time_s`, `sync/bytes`, `sync/density`, `data/wait_s`, `phase/NAME_s` (the
phases of `trainer.parallel.phases`), `balance/lookup`, `balance/gradient`, `balance/step`. Times
are seconds per step, except `sync/time_s`, which is seconds per sync; phases are means over the
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.mae import MAEMetric
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.mse import MSEMetric
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.rec_metric import RecMetric

from trainer.data.batches import Batch
from trainer.parallel.phases import LOCAL_PHASES, Phase, PhaseTimes
from trainer.parallel.sync import SyncReport
from trainer.parallel.two_d import TwoDParallel
from trainer.spec import TaskSpec

# metric of the spec -> (class, key of its value over everything since the last reset)
_METRICS: dict[str, tuple[type[RecMetric], str]] = {
    "rmse": (MSEMetric, "mse-{task}|{local}lifetime_rmse"),
    "mae": (MAEMetric, "mae-{task}|{local}lifetime_mae"),
    "ne": (NEMetric, "ne-{task}|{local}lifetime_ne"),
    "auc": (AUCMetric, "auc-{task}|{local}window_auc"),
}
LOWER_IS_BETTER = {"rmse": True, "mae": True, "ne": True, "auc": False, "loss": True}


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Whether `value` of `metric` beats `best` (None: nothing to beat yet; NaN never wins)."""
    if value != value:
        return False
    if best is None:
        return True
    return value < best if LOWER_IS_BETTER[metric] else value > best


class TaskMeter:
    """Loss and metrics of one task, over all ranks, since the last `compute`.

    A step only keeps its outputs; the metrics see them all at once at the report, and their sums
    travel in one all-reduce. Left to themselves the metrics would sync state by state, with
    several collectives each. `state` and `load_state` carry what came in since the last report
    over to another run, at any number of ranks.
    """

    def __init__(self, task: TaskSpec, batch_size: int, window_rows: int) -> None:
        self._task = task
        self._kept: list[tuple[torch.Tensor, ...]] = []
        # Sums of weighted losses and of weights that the metrics have taken in.
        self._losses = torch.zeros(2, dtype=torch.float64)
        self._metrics = {
            name: _METRICS[name][0](
                world_size=dist.get_world_size(),
                my_rank=dist.get_rank(),
                batch_size=batch_size,
                tasks=[RecTaskInfo(name=task.name)],
                window_size=window_rows,
                compute_on_all_ranks=True,
            )
            for name in task.metric_names
        }

    def to(self, device: torch.device) -> TaskMeter:
        """Move the state to the device of the batches."""
        for metric in self._metrics.values():
            metric.to(device)
        self._losses = self._losses.to(device)
        return self

    @torch.no_grad()
    def update(self, batch: Batch, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        """Take in one batch; `outputs` is [B, 1] as the model gave it. Rows of weight 0 are out."""
        predictions, labels = self._in_label_unit(batch, outputs[:, 0])
        weighted_loss = loss.detach() * batch.weight.sum()
        self._kept.append((predictions, labels, batch.weight, weighted_loss[None]))

    def _in_label_unit(
        self, batch: Batch, outputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._task.loss == "bce":
            return torch.sigmoid(outputs), batch.label[:, 0]
        scale, offset = batch.label_scale[:, 0], batch.label_offset[:, 0]
        return outputs * scale + offset, batch.label[:, 0] * scale + offset

    @torch.no_grad()
    def compute(self, prefix: str) -> dict[str, float]:
        """Values since the last call, named `PREFIX/NAME`, and start over. Collective."""
        self._hand_over()
        _all_reduce([self._losses, *self._summed().values()])
        values = {f"{prefix}/loss": (self._losses[0] / self._losses[1]).item()}
        for name, metric in self._metrics.items():
            # AUC keeps whole lists, which it gathers by itself.
            found = metric.compute() if name == "auc" else metric.local_compute()
            local = "" if name == "auc" else "local_"
            values[f"{prefix}/{name}"] = found[self._key(name, local)].item()
            metric.reset()
        self._losses.zero_()
        return values

    @torch.no_grad()
    def state(self) -> dict[str, torch.Tensor]:
        """What came in on all ranks since the last `compute`, on the host. Collective.

        Sums as float64, and for AUC the rows themselves: predictions, labels and weights [3, rows].
        """
        self._hand_over()
        sums = {name: value.clone() for name, value in self._sums().items()}
        _all_reduce(list(sums.values()))
        if "auc" in self._metrics and sums["loss"][1]:
            sums["auc"] = _gather_columns(self._auc_rows())
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
        if "auc" in self._metrics and "auc" in state:
            # Rows of weight 0 make all shares equal.
            rows = nn.functional.pad(state["auc"], (0, -state["auc"].shape[1] % world_size))
            self._take_in("auc", *rows[:, rank::world_size].to(self._losses.device))

    def _sums(self) -> dict[str, torch.Tensor]:
        """Every state that is a sum over rows, by name: views of what the metrics hold."""
        return {"loss": self._losses, **self._summed()}

    def _summed(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{state}": value
            for name, metric in self._metrics.items()
            if name != "auc"
            for state, value in _states(metric)
        }

    def _auc_rows(self) -> torch.Tensor:
        """Predictions, labels and weights of this rank since the last report, [3, rows]."""
        (computation,) = self._metrics["auc"]._metrics_computations
        names = ("predictions", "labels", "weights")
        return torch.cat([torch.cat(getattr(computation, name), dim=1) for name in names])

    def _hand_over(self) -> None:
        """Give the metrics what was kept."""
        if not self._kept:
            return
        predictions, labels, weights, losses = map(torch.cat, zip(*self._kept, strict=True))
        self._kept.clear()
        self._losses += torch.stack([losses.double().sum(), weights.double().sum()])
        for name in self._metrics:
            self._take_in(name, predictions, labels, weights)

    def _take_in(
        self, name: str, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> None:
        task = self._task.name
        self._metrics[name].update(
            predictions={task: predictions}, labels={task: labels}, weights={task: weights}
        )

    def _key(self, metric: str, local: str) -> str:
        return _METRICS[metric][1].format(task=self._task.name, local=local)


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

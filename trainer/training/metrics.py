"""What a run measures: task metrics (torchrec.metrics), balance over the ranks, early stopping.

The names of what is reported are in `trainer.protocol.events.METRICS`.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.coordination.messages import EarlyStoppingState
from trainer.data.batches import Batch
from trainer.data.quarantine import QuarantinedRows, check_share, most_quarantined
from trainer.layout.hosts import host_memory_bytes
from trainer.parallel.collectives import Part, reduce_parts
from trainer.parallel.mesh import MeshGroups
from trainer.parallel.model import TableShard, TwoDParallel
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
    "calibration": (CalibrationMetric, "calibration-{task}|local_lifetime_calibration", {}),
    "logloss": (NEMetric, "ne-{task}|local_lifetime_logloss", {"include_logloss": True}),
}
# TorchRec's log loss is in bits, ours in nats as the training loss is.
_UNITS = {"logloss": math.log(2)}
# AUC counts rows in bins of one width in sign(x) log(1 + 1000 |x|), where x is a score less the
# threshold, which reach up to so much: each is 0.3 % of x wide, and near 0 a millionth.
_AUC_BINS, _AUC_FACTOR, _AUC_LIMIT = 2**14, 1000.0, 23.0
# Rows whose outputs are kept until the metrics see them.
_MAX_KEPT_ROWS = 2**20
# Labels went through their normalisation and back in float32.
_LABEL_TOLERANCE = 1e-5


class TaskMeter:
    """Loss and metrics of all tasks, over all ranks, since the last `compute`.

    A step only keeps its outputs; the metrics see them all at once at the report, or when they are
    very many, and their sums travel together. `state` and `load_state` carry what came in since the
    last report over to another run, at any number of ranks.

    The names of one task's metrics have no prefix, those of several begin with `TASK/`. Every
    metric weighs rows by `Batch.weight`.
    """

    def __init__(
        self, tasks: Sequence[TaskSpec], batch_size: int, device: torch.device | None = None
    ) -> None:
        self._kept: list[tuple[torch.Tensor, ...]] = []
        self._num_kept = 0  # rows
        # Sums of weighted losses and of weights that the metrics have taken in.
        self._losses = torch.zeros(2, dtype=torch.float64, device=device)
        self._is_binary = torch.tensor([task.is_binary for task in tasks], device=device)

        def metrics_on(device: torch.device) -> dict[str, _TaskMetrics]:
            names = (f"{task.name}/" if len(tasks) > 1 else "" for task in tasks)
            each = (_TaskMetrics(task, batch_size, device) for task in tasks)
            return dict(zip(names, each, strict=True))

        self._tasks = metrics_on(self._losses.device)
        # Make values of the sums of all ranks, which come to the host: no device is waited for.
        self._totals = metrics_on(torch.device("cpu"))

    @torch.no_grad()
    def update(self, batch: Batch, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        """Take in one batch; `outputs` is [B, K] as the model gave it. Rows of weight 0 are out."""
        rows = (outputs.detach(), batch.label, batch.label_scale, batch.label_offset, batch.weight)
        self._kept.append((*rows, loss.detach().expand(len(outputs))))
        self._num_kept += len(outputs)
        if self._num_kept >= _MAX_KEPT_ROWS:
            self._update_metrics()

    def compute(self, prefix: str) -> dict[str, float]:
        """As `part`, by itself. Collective."""
        return reduce_parts([self.part(prefix)], self._losses.device)

    @torch.no_grad()
    def part(self, prefix: str) -> Part:
        """Values since the last part, named `PREFIX/NAME`.

        No values where no row that counts came in: an error of 0 would look like a perfect model.
        """
        self._update_metrics()
        taken = self._flat_sums()
        self._losses.zero_()
        for task in self._tasks.values():
            task.reset()
        return Part(taken, lambda totals, _: self._read(prefix, totals))

    @torch.no_grad()
    def _read(self, prefix: str, totals: torch.Tensor) -> dict[str, float]:
        found = self._split(totals)
        loss, weight = found["loss"].tolist()
        if not weight:
            return {}
        values = {f"{prefix}/loss": loss / weight}
        for prefix_of_task, task in self._totals.items():
            for name, total in task.sums():
                total.copy_(found[prefix_of_task + name])
            named = task.compute().items()
            values |= {f"{prefix}/{prefix_of_task}{name}": value for name, value in named}
        return values

    def _flat_sums(self) -> torch.Tensor:
        """All sums, one after the other."""
        return torch.cat([value.flatten() for value in self._sums().values()])

    def _split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """`flat` sums by name."""
        own = self._sums()
        parts = flat.split([value.numel() for value in own.values()])
        named = zip(own.items(), parts, strict=True)
        return {name: part.view_as(value) for (name, value), part in named}

    @torch.no_grad()
    def state(self) -> dict[str, torch.Tensor]:
        """Sums, float64 on the host, of what came in on all ranks since the last report.

        Collective.
        """
        self._update_metrics()
        flat = self._flat_sums()
        dist.all_reduce(flat)
        return {name: value.cpu() for name, value in self._split(flat).items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`, as some number of ranks had it: rank 0 takes the sums.

        A metric that it lacks starts anew.
        """
        for name, value in self._sums().items():
            if dist.get_rank() == 0 and name in state:
                value.copy_(state[name])

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
        outputs, normalised, scale, offset, weights, losses = map(
            torch.cat, zip(*self._kept, strict=True)
        )
        self._kept.clear()
        self._num_kept = 0
        # Normalised labels of `bce` are the classes, and its outputs logits.
        scores, labels = (
            torch.where(self._is_binary, each, each * scale + offset)
            for each in (outputs, normalised)
        )
        # Whatever they hold; a weight of 0 makes NaN of what is infinite.
        counts = weights[:, None] > 0
        scores, labels = (torch.where(counts, each, 0) for each in (scores, labels))
        # A float32 sigmoid is 1 from a logit of 17 on.
        predictions = torch.where(self._is_binary, torch.sigmoid(scores.double()), scores)
        losses = torch.where(weights > 0, losses, 0).double() * weights
        self._losses += torch.stack([losses.sum(), weights.double().sum()])
        for k, task in enumerate(self._tasks.values()):
            task.take_in(predictions[:, k], scores[:, k], labels[:, k], weights)


class _TaskMetrics:
    """The metrics of one task: AUC from bins, all others from torchrec.metrics."""

    def __init__(self, task: TaskSpec, batch_size: int, device: torch.device) -> None:
        self._name = task.name
        self._threshold = task.auc_threshold
        self._metrics: dict[str, RecMetric] = {}
        has_auc = "auc" in task.metric_names
        # Weights of negative and of positive rows by bin.
        self._auc = (
            torch.zeros(2, _AUC_BINS, dtype=torch.float64, device=device) if has_auc else None
        )
        for name in task.metric_names:
            if name == "auc":
                continue
            kind, _, options = _METRICS[name]
            self._metrics[name] = kind(
                world_size=dist.get_world_size(),
                my_rank=dist.get_rank(),
                batch_size=batch_size,
                tasks=[RecTaskInfo(name=task.name)],
                window_size=batch_size * dist.get_world_size(),  # only the lifetime is read
                compute_on_all_ranks=True,
                **options,
            ).to(device)

    def take_in(
        self,
        predictions: torch.Tensor,
        scores: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Rows in the label's own unit, [n] each; `scores` may be any that sort them alike."""
        task = self._name
        for metric in self._metrics.values():
            metric.update(
                predictions={task: predictions}, labels={task: labels}, weights={task: weights}
            )
        if self._auc is not None:
            distances = scores.double() - (self._threshold or 0.0)
            threshold = 1.0 if self._threshold is None else self._threshold
            least = threshold - _LABEL_TOLERANCE * max(1.0, abs(threshold))
            places = _bins_of(distances) + _AUC_BINS * (labels >= least)
            # Rows without a score stand in no order: as of the other metrics there is no value.
            weights = weights.double().where(~scores.isnan(), torch.nan)
            self._auc.view(-1).index_add_(0, places, weights)

    def compute(self) -> dict[str, float]:
        """Values by metric; the sums are those of all ranks.

        None where what it is divided by is 0: no `ne` or `auc` of rows of one class, and no
        `calibration` without a positive row.
        """
        values = {}
        if self._auc is not None and self._auc.any(1).all():
            values["auc"] = _auc_of(self._auc)
        for name, metric in self._metrics.items():
            (seen,) = metric._metrics_computations
            if name == "ne" and not min(seen.pos_labels.item(), seen.neg_labels.item()) > 0:
                continue
            if name == "calibration" and not seen.calibration_denom.item() > 0:
                continue
            key = _METRICS[name][1].format(task=self._name)
            values[name] = metric.local_compute()[key].item() * _UNITS.get(name, 1.0)
        return values

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()
        if self._auc is not None:
            self._auc.zero_()

    def sums(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every state, each of which is a sum over rows, by `METRIC.STATE`."""
        for name, metric in self._metrics.items():
            for computation in metric._metrics_computations:
                for state in computation._defaults:  # torchmetrics 1.0.3 has no public list
                    yield f"{name}.{state}", getattr(computation, state)
        if self._auc is not None:
            yield "auc.bins", self._auc


def _bins_of(scores: torch.Tensor) -> torch.Tensor:
    """The bin of each score: a higher one is in no lower bin."""
    places = (_AUC_FACTOR * scores.double()).nan_to_num()
    places = places.sign() * places.abs().log1p() + _AUC_LIMIT
    return (places * (_AUC_BINS / (2 * _AUC_LIMIT))).long().clamp(0, _AUC_BINS - 1)


def _auc_of(bins: torch.Tensor) -> float:
    """Share of pairs of a negative and a positive row in the right order; half of those in one bin.

    `bins` [2, n] are the weights of both kinds, of which there are some.
    """
    negatives, positives = bins
    below = negatives.cumsum(0) - negatives / 2
    return (positives @ below / (negatives.sum() * positives.sum())).item()


class LookupCounter:
    """Counts what this rank's shards look up, the distinct rows they update, and the rows synced.

    Lookups cost memory reads, distinct rows cost gradient writes: with skewed ids the two are
    balanced differently over the ranks. Both are counted only while `sampling`, as distinct rows
    need a sort of the ids; so is how often the hottest rows of each table are looked up. No host
    waits for a device, and a report has four numbers a table.

    Of more tables than `_MAX_TABLES` those are told of that the first report with lookups has the
    most of: the same ones from then on, so that their curves have no gaps.
    """

    def __init__(self, model: TwoDParallel, dims: Mapping[str, int]) -> None:
        """`dims` has the columns of each table, in the same order on every rank."""
        self.sampling = False
        device = model.groups.device
        # (ids, distinct rows) since the last report.
        self._counts = torch.zeros(2, dtype=torch.float64, device=device)
        self._dims = dims
        self._told = frozenset(dims if len(dims) <= _MAX_TABLES else ())
        # Of each table (lookups, those of its hottest rows), and (rows in syncs, all rows).
        self._by_table = torch.zeros(len(self._dims), 2, dtype=torch.float64, device=device)
        self._synced = torch.zeros_like(self._by_table)
        self._shards = model.table_shards()
        self._tables = self._numbers(self._shards).to(device)
        self._num_rows = torch.tensor([len(each.weight) for each in self._shards], device=device)
        for kernel in model.embedding_kernels():
            shards = [shard for shard in self._shards if shard.kernel is kernel]
            count = partial(self._count, self._places(shards, device))
            kernel.register_forward_pre_hook(count, with_kwargs=True)

    def _places(self, shards: Sequence[TableShard], device: torch.device) -> _KernelTables:
        """Where the rows of a kernel's tables end, and which tables these are."""
        sizes = torch.tensor([len(shard.weight) for shard in shards])
        # A table that is split by columns is looked up in each of its parts.
        parts = [shard.weight.shape[1] / self._dims[shard.table] for shard in shards]
        return (
            sizes.cumsum(0).to(device),
            self._numbers(shards).to(device),
            torch.tensor(parts, dtype=torch.float64, device=device)[:, None],
        )

    def _numbers(self, shards: Sequence[TableShard]) -> torch.Tensor:
        numbers = {table: number for number, table in enumerate(self._dims)}
        return torch.tensor([numbers[shard.table] for shard in shards], dtype=torch.int64)

    def _count(self, places: _KernelTables, kernel: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Rows are updated in whichever mode a user's network has its tables.
        if not (self.sampling and torch.is_grad_enabled() and inputs["indices"].numel()):
            return
        rows = looked_up(kernel, inputs["indices"], inputs["offsets"]).sort().values
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        self._counts[0] += rows.numel()
        self._counts[1] += is_first.sum()
        ends, tables, parts = places
        found = parts * lookups_by_table(rows, is_first, ends)
        self._by_table.index_add_(0, tables, found)

    def add_sync(self, num_rows: torch.Tensor | None) -> None:
        """Count a sync of so many rows of each of this rank's shards, int64 [shards]."""
        if num_rows is not None:
            found = torch.stack([num_rows, self._num_rows], dim=1).double()
            self._synced.index_add_(0, self._tables, found)

    def parts(self) -> list[Part]:
        """Max over mean across the ranks since the last report (1 is perfect); and by table."""
        mine, by_table, synced = self._counts.clone(), self._by_table.clone(), self._synced.clone()
        for counts in (self._counts, self._by_table, self._synced):
            counts.zero_()
        return [
            Part(mine, self._read, peaks=mine),
            Part(by_table.flatten(), self._read_tables),
            Part(synced.flatten(), self._read_synced),
        ]

    @staticmethod
    def _read(sums: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
        lookups, rows = imbalance(sums, peaks).tolist()
        return {"balance/lookup": lookups, "balance/gradient": rows}

    def _read_tables(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        counts = dict(zip(self._dims, sums.view(-1, 2).tolist(), strict=True))
        if not self._told and sums.any():
            by_lookups = sorted(counts, key=lambda table: -counts[table][0])
            self._told = frozenset(by_lookups[:_MAX_TABLES])
        found = {}
        for table, (lookups, hottest) in counts.items():
            if lookups and table in self._told:
                found[f"table/{table}/lookups"] = lookups
                found[f"table/{table}/hottest"] = hottest / lookups
        return found

    def _read_synced(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        shares = zip(self._dims, sums.view(-1, 2).tolist(), strict=True)
        told = ((table, rows / of) for table, (rows, of) in shares if of and table in self._told)
        return {f"table/{table}/synced": share for table, share in told}


# Of a kernel: the ends of its tables' rows, int64 [tables]; their numbers, int64 [tables]; the
# part of their columns that is here, float64 [tables, 1].
_KernelTables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# A job may have 2000 metrics, of which a table has three.
_MAX_TABLES = 200
# Of the rows that a step looks up in a table, those that are called its hottest.
_HOTTEST_SHARE = 0.01


def lookups_by_table(
    rows: torch.Tensor, is_first: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Lookups of each table, and those of its hottest rows, float64 [tables, 2].

    `rows` int64 [n] are sorted, `is_first` says which are not as the one before, and `ends` int64
    [tables] where the rows of tables end. The hottest are the hundredth of the distinct rows that
    is looked up most, at least one. Every size is known to the host.
    """
    num, num_tables = rows.numel(), ends.numel()
    table = torch.bucketize(rows, ends, right=True)
    ones = torch.ones_like(rows, dtype=torch.float64)
    run = is_first.cumsum(0) - 1
    heat = torch.zeros_like(rows).index_add_(0, run, torch.ones_like(rows))[run]
    # Each distinct row once, by its first lookup; the other lookups come last, as of no table.
    of_row = torch.where(is_first, table, num_tables)
    order = (of_row * (num + 1) + num - heat).argsort()
    of_row, heat = of_row[order], heat[order]
    num_rows = ones.new_zeros(num_tables + 1).index_add_(0, of_row, ones)
    rank = torch.arange(num, device=rows.device) - (num_rows.cumsum(0) - num_rows)[of_row]
    is_hottest = rank < (num_rows * _HOTTEST_SHARE).ceil()[of_row]
    found = ones.new_zeros(num_tables + 1, 2)
    found[:, 0].index_add_(0, table, ones)
    found[:, 1].index_add_(0, of_row, heat * is_hottest.double())
    return found[:-1]


def imbalance(sums: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Max over mean of numbers of all ranks, by their sums and peaks; 1 where all are 0."""
    means = sums / dist.get_world_size()
    return torch.where(means > 0, peaks / means, 1.0)


def memory_part(groups: MeshGroups) -> Part:
    """The most bytes that any rank has taken so far: of host memory, and of its GPU's.

    `memory/host_used_share` is that of the fullest host, or container, whoever uses it: at 1 the
    system kills processes there. Of a GPU's memory what tensors took, what PyTorch held for them,
    and what is taken now by whatever (NCCL, FBGEMM's caches, other processes); and how often
    PyTorch had to give back what it held before it got more, which is slow. `NAME/p` is the most of
    the ranks at position p of their sharding groups, which hold the same shards: L numbers, however
    many ranks there are.
    """
    status = Path("/proc/self/status").read_text()
    (resident,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    found: dict[str, float] = {"memory/peak_rss_bytes": 1024 * int(resident)}
    total_bytes, free_bytes = host_memory_bytes()
    found["memory/host_used_share"] = 1 - free_bytes / total_bytes
    if groups.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(groups.device)
        found["memory/peak_allocated_bytes"] = torch.cuda.max_memory_allocated(groups.device)
        found["memory/peak_reserved_bytes"] = torch.cuda.max_memory_reserved(groups.device)
        found["memory/gpu_used_bytes"] = total - free
        found["memory/alloc_retries"] = torch.cuda.memory_stats(groups.device)["num_alloc_retries"]
    size = len(groups.sharding_ranks)
    for name in _BY_POSITION if size <= _MAX_POSITIONS else ():
        if name in found:
            mine = {f"{name}/{position}": 0 for position in range(size)}
            found |= mine | {f"{name}/{groups.shard_index}": found[name]}
    return Part(
        torch.empty(0, dtype=torch.float64),
        lambda _, peaks: dict(zip(found, peaks.tolist(), strict=True)),
        peaks=torch.tensor(list(found.values()), dtype=torch.float64),
    )


_BY_POSITION = ("memory/peak_rss_bytes", "memory/peak_allocated_bytes")
# A job may have 2000 metrics.
_MAX_POSITIONS = 256


def phase_part(mine: Mapping[Phase, float], groups: MeshGroups) -> Part:
    """Mean over the ranks of the seconds per step that each phase took here.

    `balance/step` is max over mean across the ranks of the time that a step spends in phases in
    which no rank waits for another, `balance/lookup_time` that of lookups alone, and
    `phase/lookup_s/p` the most of the ranks at position p of their sharding groups.
    """
    local = sum((s for phase, s in mine.items() if phase in LOCAL_PHASES), start=0.0)
    alone = torch.tensor([local, mine["lookup"]], dtype=torch.float64)
    seconds = torch.tensor(list(mine.values()), dtype=torch.float64)
    size = len(groups.sharding_ranks)
    lookups = torch.zeros(size if size <= _MAX_POSITIONS else 0, dtype=torch.float64)
    if len(lookups):
        lookups[groups.shard_index] = mine["lookup"]

    def read(sums: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
        means = (sums[:-2] / dist.get_world_size()).tolist()
        values = {f"phase/{phase}_s": mean for phase, mean in zip(mine, means, strict=True)}
        step, lookup = imbalance(sums[-2:], peaks[:2]).tolist()
        values |= {"balance/step": step, "balance/lookup_time": lookup}
        return values | {f"phase/lookup_s/{p}": s for p, s in enumerate(peaks[2:].tolist())}

    return Part(torch.cat([seconds, alone]), read, peaks=torch.cat([alone, lookups]))


class QuarantineReporter:
    """Counts the rows that one rank left out (`data.on_bad_rows: quarantine`), for each report."""

    def __init__(
        self,
        spec: JobSpec,
        num_rows: tuple[int, int],
        emit: Callable[[events.Event], None],
    ) -> None:
        """`num_rows` are those of the training and of the validation split."""
        self._is_on = spec.data.on_bad_rows == "quarantine"
        self._max_share = spec.data.max_bad_share
        self._num_rows, self._num_held_out = num_rows
        self._emit = emit
        self._epochs: set[int] = set()
        self._is_first_epoch = True
        self._untold: QuarantinedRows = Counter()
        self._found: QuarantinedRows = Counter()
        self._held_out: QuarantinedRows = Counter()
        self._named: QuarantinedRows = Counter()  # in the newest report
        self._totals = torch.zeros(2, dtype=torch.float64)
        self._num_validations = 0
        self.num_held_out = 0
        """Rows that this rank left out in the newest validation."""

    def add(self, found: QuarantinedRows) -> None:
        self._found.update(found)
        if self._is_first_epoch:
            self._untold.update(found)

    def begin_epoch(self, epoch: int) -> None:
        """Rows of `epoch` come from now on, or go on to come."""
        self._epochs.add(epoch)
        self._is_first_epoch = epoch == 0

    def begin_validation(self) -> None:
        self._num_validations += 1
        self.num_held_out = 0

    def add_held_out(self, found: QuarantinedRows) -> None:
        """Count what a batch of a validation left out; all read the same rows, reports have the
        first."""
        self.num_held_out += found.total()
        if self._num_validations == 1:
            self._held_out.update(found)
            self._untold.update(found)

    def parts(self) -> Iterator[Part]:
        """Rows left out since the last report, over all ranks; none where bad rows end the job.

        Writes an event for each file and reason, of the first epoch. Reading raises
        `TooManyBadRowsError` on every rank where more than `data.max_bad_share` are left out, on
        average over the epochs.
        """
        if not self._is_on:
            return
        mine = [self._found.total(), self._held_out.total()]
        found = self._newest()
        self._found.clear()
        self._held_out.clear()
        self._named = found
        for (file, reason), count in most_quarantined(self._untold).items():
            self._emit(
                events.RowsQuarantined(time=time.time(), file=file, reason=reason, count=count)
            )
        self._untold.clear()
        yield Part(torch.tensor(mine, dtype=torch.float64), self._read)

    def _read(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        self._totals += sums
        num_trained, num_held_out = map(int, self._totals.tolist())
        self.check(num_trained, num_held_out, max(1, len(self._epochs)))
        return {"data/quarantined_rows": sums.sum().item()}

    def check(self, num_trained: int = 0, num_held_out: int = 0, num_epochs: int = 1) -> None:
        """Raise `TooManyBadRowsError` where all ranks left out too many rows.

        They are those of so many epochs, and of one validation.
        """
        most = (num_trained, self._num_rows * num_epochs), (num_held_out, self._num_held_out)
        for num_bad, num_rows in most:
            check_share(num_bad, num_rows, self._max_share, self._newest() or self._named)

    def _newest(self) -> QuarantinedRows:
        """Left out since the last report."""
        return self._found + self._held_out


def is_better(metric: str, value: float, best: float | None, min_delta: float = 0.0) -> bool:
    """Whether `value` of `metric` beats `best` by more than `min_delta`.

    None: nothing to beat yet; NaN never wins. The name may begin with a task's, `TASK/auc`.
    """
    if value != value:
        return False
    if best is None:
        return True
    return distance(metric, value) < distance(metric, best) - min_delta


def distance(metric: str, value: float) -> float:
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

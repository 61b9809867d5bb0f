"""What every rank of the 2D benchmark runs: build one side, warm up, time windows of steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.benchmarks.peers.stock_1d import CPU, StockTrainer
from tests.benchmarks.prepare_child import memory_bytes
from tests.benchmarks.two_d_workload import IN_1D, TwoDLayout, spec_of
from tests.benchmarks.workload import zipf_batches
from tests.harness.emulated import sent_bytes
from trainer.data.batches import Batch
from trainer.layout.layout import WorkerSite
from trainer.parallel.collectives import reduce_parts
from trainer.parallel.mesh import build_groups
from trainer.parallel.model import TableShard
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import build_sync
from trainer.spec.job import JobSpec
from trainer.training.metrics import LookupCounter
from trainer.training.pipeline import StepPipeline
from trainer.training.profiling import HostClock, PhaseTimes
from trainer.training.worker import layout_of

NUM_BATCHES = 32  # the steps take turns with them
_COLLECTIVE_TIMEOUT_S = 120
_NUM_SYNCS = 3
_TOTAL_STEPS = 1_000_000  # of the schedule, which is constant


@dataclass(frozen=True)
class Schedule:
    """How long one measurement is, in steps: a warm-up, then windows timed one by one."""

    warmup_steps: int
    num_windows: int
    steps_per_window: int

    @property
    def num_steps(self) -> int:
        """All timed steps."""
        return self.num_windows * self.steps_per_window


@dataclass(frozen=True)
class RankResult:
    """What one rank measured. `link_bytes` is what its whole host sent over the link."""

    window_s: tuple[float, ...]
    sync_s: float
    link_bytes: int
    peak_bytes: int
    lookup_imbalance: float


class TwoDTrainer:
    """Our engine; `is_ahead` False leaves its steps without a pipeline."""

    def __init__(
        self,
        site: WorkerSite,
        spec: JobSpec,
        is_ahead: bool | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._spec = spec
        groups = build_groups(layout_of(spec), device, _COLLECTIVE_TIMEOUT_S, host=site.host)
        self._model, _ = build_parallel_model(spec, groups)
        self._optimizers = Optimizers(self._model, spec)
        self._pipeline = StepPipeline(self._model, PhaseTimes(HostClock()))
        self._pipeline.is_ahead = is_ahead
        dense_at_sync = spec.parallelism.dense_policy == "at_sync"
        self._sync = build_sync(
            self._model,
            spec,
            extra=lambda: self._optimizers.synced_whole(dense=dense_at_sync),
        )
        self.sync_s = 0.0

    def embedding_kernels(self) -> list[Any]:
        """FBGEMM kernels that hold this rank's shards."""
        return self._model.embedding_kernels()

    def table_shards(self) -> list[TableShard]:
        """This rank's shards."""
        return self._model.table_shards()

    def train(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Train a step, and sync when it is due, for each item that is taken."""
        stream = self._pipeline.over((batch, None) for batch in batches)
        for step, (batch, _) in enumerate(stream, start=1):
            self._optimizers.begin_step(step, _TOTAL_STEPS)
            loss, _ = self._pipeline.forward(batch)
            loss.backward()
            self._optimizers.step()
            started = time.perf_counter()
            self._sync.tick()
            if step % self._spec.parallelism.sync.every_steps == 0:
                self._sync()
            self.sync_s += time.perf_counter() - started
            yield


def measure(site: WorkerSite, side: TwoDLayout | str, schedule: Schedule) -> RankResult:
    """Measure one side on this rank: a layout of ours, or a variant of stock TorchRec by name."""
    if isinstance(side, TwoDLayout):
        trainer = TwoDTrainer(site, spec_of(side))
    else:
        trainer = StockTrainer(side)
    steps = trainer.train(cycle(zipf_batches(IN_1D, site.rank, NUM_BATCHES)))
    imbalance = _warm_up(trainer, steps, schedule)
    dist.barrier()
    sync_s, link_bytes = trainer.sync_s, sent_bytes()
    window_s = time_windows(steps, schedule)
    dist.barrier()  # so that the other ranks of the host have sent theirs
    return RankResult(
        window_s=window_s,
        sync_s=trainer.sync_s - sync_s,
        link_bytes=sent_bytes() - link_bytes,
        peak_bytes=memory_bytes("VmHWM"),
        lookup_imbalance=imbalance,
    )


def measure_sync(site: WorkerSite, is_by_host: bool) -> tuple[float, int]:
    """(seconds, bytes that its host sent to others) of a full sync of as many copies as ranks.

    Medians of a few. It goes by hosts, or, as before, in one level.
    """
    spec = spec_of(TwoDLayout(dist.get_world_size(), "inter_host", "full", every_steps=1))
    groups = build_groups(layout_of(spec), CPU, _COLLECTIVE_TIMEOUT_S, host=site.host)
    model, _ = build_parallel_model(spec, groups)
    if is_by_host:
        sync = build_sync(model, spec)
    else:
        with patch("trainer.parallel.sync.form_replica_levels", return_value=()):
            sync = build_sync(model, spec)
    seconds, sent = [], []
    for _ in range(_NUM_SYNCS):
        dist.barrier()
        started, before = time.perf_counter(), sent_bytes()
        sync()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        sent.append(sent_bytes() - before)
    return statistics.median(seconds), round(statistics.median(sent))


def _warm_up(
    trainer: TwoDTrainer | StockTrainer, steps: Iterator[None], schedule: Schedule
) -> float:
    """Run the warm-up steps; max over mean across ranks of the ids that were looked up."""
    model = SimpleNamespace(
        embedding_kernels=trainer.embedding_kernels,
        table_shards=list,
        groups=SimpleNamespace(device=torch.device("cpu")),
    )
    counter = LookupCounter(model, dims={})
    counter.sampling = True
    take(steps, schedule.warmup_steps)
    counter.sampling = False
    return reduce_parts(counter.parts()[:1], torch.device("cpu"))["balance/lookup"]


def time_windows(
    steps: Iterator[None], schedule: Schedule, settle: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Seconds of each window on this rank; `settle` waits for its device."""
    settle()
    marks = [time.perf_counter()]
    for _ in range(schedule.num_windows):
        take(steps, schedule.steps_per_window)
        settle()
        marks.append(time.perf_counter())
    return tuple(end - start for start, end in pairwise(marks))


def take(steps: Iterator[None], num_steps: int) -> None:
    """Train so many steps."""
    for _ in islice(steps, num_steps):
        pass


def summary(
    results: Sequence[RankResult], schedule: Schedule, rows_per_step: int
) -> dict[str, float]:
    """The measurement of all ranks as one row of the table."""
    rows = rows_per_step * schedule.steps_per_window
    # A window is over when its last rank is.
    window_s = [max(times) for times in zip(*(each.window_s for each in results), strict=True)]
    samples_per_s = [rows / time_s for time_s in window_s]
    return {
        "samples_per_s": statistics.median(samples_per_s),
        "samples_per_s_min": min(samples_per_s),
        "samples_per_s_max": max(samples_per_s),
        "peak_bytes": max(each.peak_bytes for each in results),
        "lookup_imbalance": results[0].lookup_imbalance,
        "link_bytes_per_step": max(each.link_bytes for each in results) / schedule.num_steps,
        "sync_s_per_step": max(each.sync_s for each in results) / schedule.num_steps,
    }

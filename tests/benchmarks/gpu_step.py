"""On one GPU: pipelined steps over TorchRec's pipeline, and a sync's kernels over a plain copy.

python -m tests.benchmarks.gpu_step --json FILE

`over_stock_pipeline` trains the same DLRM on the same batches as stock TorchRec does under
`TrainPipelineSparseDist`, both at T = 1. `sync_kernels` packs, averages and applies touched rows of
tables that M copies would hold, all of them in this process, and compares its time with that of a
copy of as many bytes as it has to read and write. Nothing crosses a network. `cached_over_hbm`
trains with the tables in host memory behind a cache of a fifth of their rows, over all in HBM.
`session_over_bare` trains the demo's DLRM in a whole session, with reader, metrics and reports,
over a bare TorchRec script, pipelined, whose batches are in memory.
`of_no_sync` syncs touched rows every 16 steps with copies in this process, over not at all.

Skips with a message where there is no CUDA; `SHARDLOOM_BENCH_DEVICE=cpu` tries the code there.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.benchmarks.peers.bare_torchrec import epoch_of_batches, steps_of
from tests.benchmarks.peers.stock_1d import StockTrainer
from tests.benchmarks.report import BenchmarkReport, BenchmarkSkipped, Goal, Values, main, run_pairs
from tests.benchmarks.two_d_train import Schedule, TwoDTrainer, take, time_windows
from tests.benchmarks.workload import (
    NUM_RATINGS,
    Workload,
    clicks_spec,
    job_document,
    prepared_ratings,
    resolved_spec,
    zipf_batches,
)
from tests.harness.sessions import config_of, open_session, told
from tests.harness.small_model import pinned
from trainer.data.batches import Batch
from trainer.layout.layout import WorkerSite
from trainer.parallel.collectives import Block, ReplicaCollectives
from trainer.parallel.sync import PendingSync, ReplicaSync, blocks_of, weight_of
from trainer.parallel.touched_rows import RowNumbers
from trainer.protocol.events import Metrics
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import SyncSpec
from trainer.training.worker import train

NAME = "gpu_step"
PAIRS = 5
DEVICE = torch.device(os.environ.get("SHARDLOOM_BENCH_DEVICE", "cuda"))
IS_CUDA = DEVICE.type == "cuda"
WORKLOAD = Workload(
    1,
    1,
    table_rows=1_000_000 if IS_CUDA else 10_000,
    global_batch_size=8192 if IS_CUDA else 64,
)
SYNC = SyncSpec(every_steps=16, overlap=8)
SCHEDULE = Schedule(
    warmup_steps=2 * SYNC.every_steps if IS_CUDA else 10,
    num_windows=5,
    steps_per_window=2 * SYNC.every_steps if IS_CUDA else 2,
)
NUM_BATCHES = 8
SESSION_STEPS = 400 if IS_CUDA else 40  # of which the last half is timed
NUM_COPIES = 2
TOUCHED_SHARE = 0.1
NUM_REPEATS = 5
CACHE_LOAD_FACTOR = 0.2
GOALS = [
    Goal("over_stock_pipeline", "rows_per_s", "rows/s", 0.98, "higher", "TrainPipelineSparseDist"),
    Goal("sync_kernels", "sync_s", "s", 1.5, "lower", "a copy of as many bytes"),
    Goal("cached_over_hbm", "cached_rows_per_s", "rows/s", 0.6, "higher", "all tables in HBM"),
    Goal("session_over_bare", "session_rows_per_s", "rows/s", 0.97, "higher", "bare TorchRec"),
    Goal("of_no_sync", "synced_rows_per_s", "rows/s", 0.95, "higher", "no sync"),
]


class VirtualCopies:
    """A replica group of `num_copies` in this process, which all hold what this one gives."""

    def __init__(self, num_copies: int) -> None:
        self._num_copies = num_copies

    def size(self) -> int:
        return self._num_copies

    def rank(self) -> int:
        return 0

    def all_gather(self, out: torch.Tensor) -> None:
        """Every copy gives the first part."""
        first, *others = out.view(self._num_copies, -1)
        for other in others:
            other.copy_(first)

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        """Every copy gives the first of `parts`."""
        first = parts.view(self._num_copies, -1)[0]
        for copy in out.view(self._num_copies, -1):
            copy.copy_(first)


def run(num_pairs: int) -> BenchmarkReport:
    if IS_CUDA and not torch.cuda.is_available():
        raise BenchmarkSkipped("needs a CUDA GPU: torch.cuda.is_available() is False")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    backend = "nccl" if IS_CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with prepared_ratings(10 * NUM_RATINGS if IS_CUDA else NUM_RATINGS) as data:
            spec = session_spec(data)
            runs = run_pairs(num_pairs, partial(measure_ours, spec), partial(measure_peers, spec))
    finally:
        dist.destroy_process_group()
    return BenchmarkReport(NAME, _settings(), GOALS, runs)


def measure_ours(spec: JobSpec) -> Values:
    """Our pipelined steps, with tables in HBM and cached, and our sync."""
    trainer = our_trainer()
    cached = {"compute_kernel": "fused_uvm_caching", "cache_load_factor": CACHE_LOAD_FACTOR}
    return {
        "rows_per_s": rows_per_s(trainer),
        "sync_s": _timed(partial(sync, touched_blocks(trainer))),
        "cached_rows_per_s": rows_per_s(our_trainer(cached if IS_CUDA else {})),
        "synced_rows_per_s": rows_per_s(SyncedTrainer(SYNC)),
        "session_rows_per_s": session_rows_per_s(spec),
    }


def our_trainer(planner: dict[str, Any] | None = None) -> TwoDTrainer:
    spec = clicks_spec(WORKLOAD, "gpu-step", planner=planner or {})
    return TwoDTrainer(WorkerSite(0, "host", 0), spec, device=DEVICE)


class SyncedTrainer(TwoDTrainer):
    """Ours with a sync, of which the other replicas are `VirtualCopies`."""

    def __init__(self, sync: SyncSpec) -> None:
        spec = clicks_spec(WORKLOAD, "gpu-step")
        super().__init__(WorkerSite(0, "host", 0), spec, device=DEVICE)
        parallelism = spec.parallelism.model_copy(update={"sync": sync})
        self._spec = spec.model_copy(update={"parallelism": parallelism})
        with patch(
            "trainer.parallel.sync.WorldReplicaGroup", lambda group: VirtualCopies(NUM_COPIES)
        ):
            self._sync = ReplicaSync(
                self._model, sync, lambda: self._optimizers.synced_whole(dense=False), print
            )


def measure_peers(spec: JobSpec) -> Values:
    """TorchRec's steps, our own in HBM, and a copy of what a sync reads and writes.

    Of n bytes of values it reads and writes n each to pack them, 1/M more in the mean of what
    arrives, n each to gather; to land it reads the current values, snapshot and means, and writes
    the new values: 9 n, half of them read by the copy.
    """
    trainer = our_trainer()
    num_values = sum(block.numel for block in touched_blocks(trainer))
    source = torch.zeros(num_values * 9 // 2, device=DEVICE)
    target = torch.empty_like(source)
    copy_s = _timed(lambda: target.copy_(source))
    unsynced_rows_per_s = rows_per_s(trainer)
    return {
        "rows_per_s": rows_per_s(StockTrainer("pipelined", WORKLOAD, DEVICE)),
        "sync_s": copy_s,
        "cached_rows_per_s": unsynced_rows_per_s,
        "synced_rows_per_s": unsynced_rows_per_s,
        "session_rows_per_s": bare_rows_per_s(spec),
    }


def rows_per_s(trainer: TwoDTrainer | StockTrainer) -> float:
    """By the median window."""
    steps = trainer.train(cycle(_batches()))
    take(steps, SCHEDULE.warmup_steps)
    step_s = statistics.median(time_windows(steps, SCHEDULE, _settle)) / SCHEDULE.steps_per_window
    return WORKLOAD.global_batch_size / step_s


def session_spec(data: Path) -> JobSpec:
    """The demo's job on one worker."""
    overrides = [
        f"data.batch_size={WORKLOAD.batch_size}",
        "parallelism.workers=1",
        "parallelism.shard_group_size=1",
        f"resources.device={DEVICE.type}",
        "training.epochs=1000",
        f"training.max_steps={SESSION_STEPS}",
        f"training.report_every_steps={SESSION_STEPS // 8}",
        f"checkpoint.every_steps={SESSION_STEPS}",
    ]
    return resolved_spec(job_document("gpu-step", data, overrides))


def session_rows_per_s(spec: JobSpec) -> float:
    """A session's, by the times of its own reports."""
    with TemporaryDirectory() as folder:
        train(open_session(config_of(spec, Path(folder))))
        time_of_step = {
            report.step: report.time
            for report in told(Path(folder), Metrics)
            if "speed/rows_per_s" in report.values  # not of the save after the last step
        }
    seconds = time_of_step[SESSION_STEPS] - time_of_step[SESSION_STEPS // 2]
    return SESSION_STEPS // 2 * WORKLOAD.batch_size / seconds


def bare_rows_per_s(spec: JobSpec) -> float:
    """The peer's, in the same steps."""
    batches = epoch_of_batches(spec, rank=0, world_size=1)
    batches = [pinned(batch) for batch in batches] if IS_CUDA else batches
    steps = steps_of(spec, cycle(batches), is_pipelined=True, device=DEVICE)
    take(steps, SESSION_STEPS // 2)
    _settle()
    started = time.perf_counter()
    take(steps, SESSION_STEPS // 2)
    _settle()
    return SESSION_STEPS // 2 * WORKLOAD.batch_size / (time.perf_counter() - started)


@functools.cache
def _batches() -> list[Batch]:
    batches = zipf_batches(WORKLOAD, 0, NUM_BATCHES)
    return [pinned(batch) for batch in batches] if IS_CUDA else batches


def touched_blocks(trainer: TwoDTrainer) -> list[Block]:
    """What a sync averages of the weights when some rows of every table were touched."""
    numbers = RowNumbers(trainer.table_shards(), DEVICE)
    generator = torch.Generator().manual_seed(0)
    bits = torch.rand(numbers.num_rows, generator=generator) < TOUCHED_SHARE
    rows = numbers.of_bits(bits.to(DEVICE))
    return list(blocks_of(numbers, rows, weight_of, Block))


def sync(blocks: list[Block]) -> None:
    """Snapshot, averages and landing."""
    pending = PendingSync(blocks, ReplicaCollectives([VirtualCopies(NUM_COPIES)], DEVICE))
    pending.form_means()
    pending.land()


def _timed(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some runs, after one more."""
    times_s = []
    work()
    for _ in range(NUM_REPEATS):
        _settle()
        started = time.perf_counter()
        work()
        _settle()
        times_s.append(time.perf_counter() - started)
    return min(times_s)


def _settle() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def _settings() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if IS_CUDA else "cpu",
        "batch_size": WORKLOAD.batch_size,
        "tables": f"{WORKLOAD.num_tables} x {WORKLOAD.table_rows} x {WORKLOAD.embedding_dim} fp32",
        "touched_share": TOUCHED_SHARE,
        "virtual_copies": NUM_COPIES,
        "cache_load_factor": CACHE_LOAD_FACTOR,
        "sync": f"every {SYNC.every_steps} steps, overlap {SYNC.overlap_steps}",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

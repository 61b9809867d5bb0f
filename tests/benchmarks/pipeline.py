"""Pipelined steps over the plain loop, and over TorchRec's own pipeline, in 1D on two hosts.

python -m tests.benchmarks.pipeline --json FILE

Two gloo ranks, on network namespaces that a link of 1 Gbit/s and 1 ms joins, train the same DLRM on
the same small batches, where the exchange of ids is a good part of a step: by our pipeline, by our
plain loop, and by stock TorchRec under `TrainPipelineSparseDist`. All three run the same steps in
the order of the pairs. Each rank has a core to itself, as two that share one use it while the other
waits for the link, and leave nothing to gain.

Needs root; skips with a message where hosts cannot be emulated.
"""

from __future__ import annotations

import statistics
import sys
from itertools import cycle
from typing import Any, Literal

import torch.distributed as dist

from tests.benchmarks.peers.stock_1d import StockTrainer
from tests.benchmarks.report import BenchmarkReport, Goal, Values, main, run_pairs
from tests.benchmarks.two_d import NUM_HOSTS, emulated_ranks
from tests.benchmarks.two_d_train import NUM_BATCHES, Schedule, TwoDTrainer, take, time_windows
from tests.benchmarks.workload import Workload, clicks_spec, zipf_batches
from tests.harness.emulated import Link
from tests.harness.host_ranks import HostRanks
from trainer.layout.layout import WorkerSite

NAME = "pipeline"
PAIRS = 3
LINK = Link(rate_bits_per_s=10**9, delay_ms=1)
RANKS_PER_HOST = 1
WORLD_SIZE = NUM_HOSTS * RANKS_PER_HOST
WORKLOAD = Workload(
    WORLD_SIZE,
    WORLD_SIZE,
    table_rows=50_000,
    embedding_dim=16,
    global_batch_size=WORLD_SIZE * 512,
    ids_per_feature=8,
)
SCHEDULE = Schedule(warmup_steps=10, num_windows=5, steps_per_window=20)
GOALS = [
    Goal("over_plain_loop", "over_plain", "rows/s", 1.15, "higher", "our steps, not pipelined"),
    Goal("over_stock_pipeline", "over_stock", "rows/s", 0.98, "higher", "TrainPipelineSparseDist"),
]
Way = Literal["pipelined", "plain", "stock"]


def run(num_pairs: int) -> BenchmarkReport:
    """Measure. Raises `BenchmarkError` when a side cannot run."""
    with emulated_ranks(RANKS_PER_HOST, LINK) as ranks:
        runs = run_pairs(num_pairs, lambda: _ours(ranks), lambda: _peers(ranks))
    return BenchmarkReport(NAME, _settings(), GOALS, runs)


def _ours(ranks: HostRanks) -> Values:
    rows_per_s = _rows_per_s(ranks, "pipelined")
    return {"over_plain": rows_per_s, "over_stock": rows_per_s}


def _peers(ranks: HostRanks) -> Values:
    return {"over_plain": _rows_per_s(ranks, "plain"), "over_stock": _rows_per_s(ranks, "stock")}


def _rows_per_s(ranks: HostRanks, way: Way) -> float:
    """The median window of the slowest rank."""
    window_s = zip(*ranks.call(measure, way), strict=True)
    step_s = statistics.median(map(max, window_s)) / SCHEDULE.steps_per_window
    return WORKLOAD.global_batch_size / step_s


def measure(site: WorkerSite, way: Way) -> tuple[float, ...]:
    """Seconds of each window on this rank."""
    if way == "stock":
        trainer = StockTrainer("pipelined", WORKLOAD)
    else:
        spec = clicks_spec(WORKLOAD, NAME)
        trainer = TwoDTrainer(site, spec, is_ahead=None if way == "pipelined" else False)
    steps = trainer.train(cycle(zipf_batches(WORKLOAD, site.rank, NUM_BATCHES)))
    take(steps, SCHEDULE.warmup_steps)
    dist.barrier()
    return time_windows(steps, SCHEDULE)


def _settings() -> dict[str, Any]:
    return {
        "world_size": WORLD_SIZE,
        "hosts": NUM_HOSTS,
        "link_bits_per_s": LINK.rate_bits_per_s,
        "link_delay_ms": LINK.delay_ms,
        "backend": "gloo",
        "batch_size_per_rank": WORKLOAD.batch_size,
        "tables": f"{WORKLOAD.num_tables} x {WORKLOAD.table_rows} x {WORKLOAD.embedding_dim} fp32",
        "ids_per_feature": WORKLOAD.ids_per_feature,
        "steps": [SCHEDULE.warmup_steps, SCHEDULE.num_steps],
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

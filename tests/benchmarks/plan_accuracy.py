"""What the planner predicts against what is measured: memory of a rank, and which layout is faster;
and how long its answers take.

python -m tests.benchmarks.plan_accuracy --json FILE [--only-times]

Eight gloo ranks on two emulated hosts, as in `two_d`, train the same small DLRM in several layouts,
one after the other. The prediction is told what the engine's own probe finds on these ranks (speed
of memory and links, all ranks busy at once), the speed of a matrix product, and what a process
takes before it has a model; the rest is the cost model and its profile of CPUs over TorchRec's plan
of the group.

`memory_error`: the largest relative error of the peak memory of a layout's fullest rank, of the
process in all. `spearman`: correlation of the order by predicted with that by measured samples/s.
There is no peer.

Plans are asked of a service over REST, each for the first time. `small_plan_s`: seconds of the
slowest of those of 3 to 400 tables; `large_plan_s`: of 4,000 tables of 12 TB, which one group of
256 ranks holds. `cold_plan_s`, which has no goal: of the first one, asked for as soon as the
service is up, so that torch is being loaded still.

Needs root but for `--only-times`; skips where hosts cannot be emulated. Run it on a machine that
does nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import polars
import torch
import torch.distributed as dist

from tests.benchmarks.prepare_child import memory_bytes
from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Run,
    log,
    parser_of,
    tell,
)
from tests.benchmarks.two_d import LINK, NUM_HOSTS, RANKS_PER_HOST, emulated_ranks
from tests.benchmarks.two_d_train import TwoDTrainer, take
from tests.benchmarks.workload import Workload, clicks_spec, zipf_batches
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port
from trainer.layout.cost import cpu_cluster
from trainer.layout.layout import WorkerSite
from trainer.layout.plans import Comparer, Option, PlanSite
from trainer.parallel.group_planner import group_plan
from trainer.parallel.mesh import build_groups
from trainer.parallel.planner import measure_bandwidths
from trainer.spec.job import JobSpec
from trainer.training.worker import layout_of

NAME = "plan_accuracy"
WORLD_SIZE = NUM_HOSTS * RANKS_PER_HOST
WORKLOAD = Workload(WORLD_SIZE, WORLD_SIZE, table_rows=50_000, global_batch_size=1024 * WORLD_SIZE)
NUM_BATCHES = 4
WARM_UP_STEPS = 2
STEPS = 16  # a whole sync interval of every layout
_COLLECTIVE_TIMEOUT_S = 120
# Memory that is freed leaves the process, so that one layout's does not hide in the next one's.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**18)}
PEER = "measured"
GOALS = [
    Goal("memory_error", "memory_error", "", 0.10, "lower", PEER),
    Goal("spearman", "spearman", "", 0.8, "higher", PEER),
]
TIME_GOALS = [
    Goal("small_plan_s", "small_plan_s", "s", 2, "lower", "a second"),
    Goal("large_plan_s", "large_plan_s", "s", 20, "lower", "a second"),
]


@dataclass(frozen=True)
class Case:
    """A layout of the eight ranks and its syncs."""

    num_replicas: int
    placement: str = "intra_host"
    every_steps: int = 1
    mode: str = "touched_rows"

    @property
    def label(self) -> str:
        if self.num_replicas == 1:
            return "one copy"
        return f"M={self.num_replicas} {self.placement} {self.mode} N={self.every_steps}"

    def spec(self) -> JobSpec:
        parallelism: dict[str, Any] = {"placement": self.placement}
        if self.num_replicas > 1:
            sync = {"every_steps": self.every_steps, "mode": self.mode}
            parallelism |= {"sync": sync, "dense": "every_step"}
        size = WORLD_SIZE // self.num_replicas
        return clicks_spec(
            Workload(**(asdict(WORKLOAD) | {"shard_group_size": size})), "plan", **parallelism
        )


CASES = (
    Case(1),
    Case(2, "inter_host", 1),
    Case(2, "inter_host", 16),
    Case(2, "intra_host", 1),
    Case(2, "intra_host", 16),
    Case(4, "inter_host", 1),
    Case(4, "inter_host", 16),
    Case(4, "intra_host", 16),
    Case(8, "inter_host", 16),
    Case(2, "inter_host", 4, "full"),
)


@dataclass(frozen=True)
class Measured:
    """What one rank measured of a layout; `before_bytes` is what the process took before."""

    step_s: float
    before_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Machine:
    """Bytes and operations a second of one rank while all are busy."""

    memory: float
    intra_host: float
    inter_host: float
    flops: float


def measure(site: WorkerSite, cases: Sequence[Case]) -> tuple[Machine, list[Measured]]:
    """What every rank does: probe the machine, then train each layout."""
    batches = zipf_batches(WORKLOAD, site.rank, NUM_BATCHES)
    machine = _probe(site)
    return machine, [_train(site, case, batches) for case in cases]


def _probe(site: WorkerSite) -> Machine:
    groups = build_groups(
        layout_of(Case(1).spec()), torch.device("cpu"), _COLLECTIVE_TIMEOUT_S, host=site.host
    )
    found = measure_bandwidths(groups)
    left, right = torch.rand(1024, 512), torch.rand(512, 64)
    dist.barrier()
    started, repeats = time.perf_counter(), 50
    for _ in range(repeats):
        left @ right
    product_s = (time.perf_counter() - started) / repeats
    assert found.intra_host and found.inter_host, "there are two hosts with several ranks"
    return Machine(
        memory=1000 * found.memory,
        intra_host=1000 * found.intra_host,
        inter_host=1000 * found.inter_host,
        flops=2 * left.numel() * right.shape[1] / product_s,
    )


def _train(site: WorkerSite, case: Case, batches: list[Any]) -> Measured:
    _release_memory()
    before_bytes = memory_bytes("VmRSS")
    trainer = TwoDTrainer(site, case.spec())
    steps = trainer.train(cycle(batches))
    take(steps, WARM_UP_STEPS)
    dist.barrier()
    started = time.perf_counter()
    take(steps, STEPS)
    dist.barrier()
    return Measured((time.perf_counter() - started) / STEPS, before_bytes, memory_bytes("VmHWM"))


def _release_memory() -> None:
    """Give freed memory back, and let the peak begin anew."""
    gc.collect()
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def predict(case: Case, machine: Machine, before_bytes: int) -> tuple[float, int]:
    """(samples/s, peak bytes of the fullest rank) that the planner says."""
    cluster = replace(
        cpu_cluster(RANKS_PER_HOST, 2**32),
        num_hosts=NUM_HOSTS,
        hbm_bytes_per_s=machine.memory,
        intra_host_bytes_per_s=machine.intra_host,
        inter_host_bytes_per_s=machine.inter_host,
        fp32_flops_per_s=machine.flops,
        tf32_flops_per_s=machine.flops,
        bf16_flops_per_s=machine.flops,
        process_bytes=before_bytes,
    )
    spec = case.spec()
    comparer = Comparer(spec, PlanSite.of_profile(cluster, spec), only_own_sync=True)
    option = _option(comparer, case)
    comparer.add(option.topology, group_plan(option.spec, option.topology))
    found = _option(comparer, case).candidate
    return found.samples_per_s, round(found.peak.needed_bytes)


def _option(comparer: Comparer, case: Case) -> Option:
    """The layout of a case: every copy of it on as many hosts as there are ranks for."""
    return next(
        each
        for each in comparer.result().options
        if each.candidate.num_replicas == case.num_replicas
        and (case.num_replicas == 1 or each.candidate.placement == case.placement)
    )


@dataclass(frozen=True)
class Question:
    """A plan to ask for: tables of which the k-th has `rows` / sqrt(k), on workers of a cluster."""

    num_tables: int
    rows: int
    workers: int
    cluster: str

    def body(self) -> dict[str, Any]:
        """Of the request."""
        names = [f"table_{index}" for index in range(self.num_tables)]
        lists = [{"name": name, "type": "id_list", "table": name} for name in names]
        common = {"embedding_dim": 128, "constraints": {"pooling_factor": 20.0}}
        tables = [
            {"name": name, "num_embeddings": max(1000, int(self.rows / math.sqrt(index))), **common}
            for index, name in enumerate(names, start=1)
        ]
        spec = {
            "name": "plan",
            "data": {"path": "unused", "label": {"column": "click"}, "batch_size": 1024},
            "features": [{"name": "age", "type": "dense"}, *lists],
            "embedding_tables": tables,
            "model": {"module": "own:Network", "tasks": [{"name": "click", "loss": "bce"}]},
            "parallelism": {
                "workers": self.workers,
                "shard_group_size": "auto",
                "placement": "auto",
            },
        }
        return {"spec": spec, "cluster": self.cluster, "time_limit_s": 600}


FIRST = Question(2, 10_000, 8, "4xCPU-8GB x 2")
SMALL = (
    Question(3, 100_000, 8, "4xCPU-8GB x 2"),
    Question(8, 1_000_000, 64, "8xH100-80GB x 8"),
    Question(26, 10_000_000, 64, "8xH100-80GB x 8"),
    Question(100, 20_000_000, 64, "8xH100-80GB x 8"),
    Question(400, 20_000_000, 128, "8xH100-80GB x 16"),
)
LARGE = Question(4000, 180_000_000, 256, "8xH100-80GB x 32")


def plan_times() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What a service's answers took, one by one, and the values of the goals."""
    settings = {"SHARDLOOM_KEEP_PLANNER": "true"}
    with (
        TemporaryDirectory(prefix="shardloom-bench-") as home,
        ServiceProcess(Path(home), free_port(), settings) as service,
        httpx.Client(base_url=service.url, timeout=600) as http,
    ):
        rows = [_asked(http, question) for question in (FIRST, *SMALL, LARGE)]
    cold_s, *small_s, large_s = (row["seconds"] for row in rows)
    values = {"small_plan_s": max(small_s), "large_plan_s": large_s, "cold_plan_s": cold_s}
    return rows, values


def _asked(http: httpx.Client, question: Question) -> dict[str, Any]:
    body = question.body()
    started = time.perf_counter()
    answer = http.post("/v1/plans", json=body)
    seconds = time.perf_counter() - started
    if answer.is_error or not answer.json()["recommended"]:
        raise BenchmarkError(f"no plan of {question}: {answer.text[:1000]}")
    found = answer.json()
    best, candidates = found["recommended"]["candidate"], found["candidates"]
    return {
        "tables": question.num_tables,
        "table bytes": found["table_bytes"],
        "cluster": question.cluster,
        "seconds": round(seconds, 2),
        "recommended": f"{best['num_replicas']} x {best['shard_group_size']}",
        "candidates": len(candidates),
        "planned by TorchRec": sum(each["is_planned"] for each in candidates),
    }


def times_report() -> BenchmarkReport:
    """Ask for the plans alone; raises `BenchmarkError`."""
    rows, values = plan_times()
    return BenchmarkReport(NAME, {}, TIME_GOALS, _runs(values), rows)


def _runs(values: Mapping[str, float]) -> list[Run]:
    return [Run(0, "ours", values), Run(0, "peer", dict.fromkeys(values, 1.0))]


def report() -> BenchmarkReport:
    """Time plans, measure all layouts, then predict them. Raises `BenchmarkSkipped` and
    `BenchmarkError`."""
    asked, times = plan_times()
    with emulated_ranks(RANKS_PER_HOST) as ranks:
        os.environ.update(MALLOC)  # in place of two_d's
        of_ranks = ranks.call(measure, CASES)
    machine = Machine(
        *(
            statistics.median(column)
            for column in zip(*(vars(each).values() for each, _ in of_ranks), strict=True)
        )
    )
    log(f"a rank has {asdict(machine)}")
    rows = [
        _row(case, machine, [measured[index] for _, measured in of_ranks])
        for index, case in enumerate(CASES)
    ]
    settings = {
        "world_size": WORLD_SIZE,
        "hosts": NUM_HOSTS,
        "link_bits_per_s": LINK.rate_bits_per_s,
        "batch_size_per_rank": WORKLOAD.batch_size,
        "tables": f"{WORKLOAD.num_tables} x {WORKLOAD.table_rows} x {WORKLOAD.embedding_dim} fp32",
        "steps": STEPS,
        "a_rank_attains": asdict(machine),
        "plans": asked,
    }
    return BenchmarkReport(NAME, settings, GOALS + TIME_GOALS, _runs(_values(rows) | times), rows)


def _row(case: Case, machine: Machine, ranks: Sequence[Measured]) -> dict[str, Any]:
    fullest = max(ranks, key=lambda each: each.peak_bytes)
    samples_per_s, peak_bytes = predict(case, machine, fullest.before_bytes)
    return {
        "layout": case.label,
        "samples/s": round(WORKLOAD.global_batch_size / max(each.step_s for each in ranks)),
        "predicted samples/s": round(samples_per_s),
        "peak MB": round(fullest.peak_bytes / 1e6),
        "predicted peak MB": round(peak_bytes / 1e6),
    }


def _values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    table = polars.DataFrame(rows)
    order = polars.corr("samples/s", "predicted samples/s", method="spearman")
    return {
        "memory_error": max(abs(row["predicted peak MB"] / row["peak MB"] - 1) for row in rows),
        "spearman": float(table.select(order).item()),
    }


def main() -> int:
    """Command line; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--only-times", action="store_true", help="ask for plans, train nothing")
    options = parser.parse_args()
    return tell(options.json, times_report if options.only_times else report)


if __name__ == "__main__":
    sys.exit(main())

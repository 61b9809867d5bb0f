"""What the sparse sync benchmark runs on every rank: training, our syncs, and TorchRec's.

Criteo-shaped: 26 tables, one id a row and table drawn by Zipf's law. Whatever is timed starts at a
barrier and counts until the slowest rank is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.workload import Workload, clicks_spec, zipf_batches
from tests.harness.small_model import build_trained, take_step, with_sync
from trainer.data.batches import Batch
from trainer.layout.layout import Layout
from trainer.parallel.collectives import ReplicaCollectives, WorldReplicaGroup
from trainer.parallel.mesh import build_groups
from trainer.parallel.sync import Sync, SyncReport, build_sync
from trainer.parallel.touched_rows import unite

NUM_BATCHES = 17  # odd, so that in turns both sides get every batch
SEED = 2026


@dataclass(frozen=True)
class Price:
    """One sync: seconds of the slowest rank, bytes that rank 0 sent, share of rows averaged."""

    time_s: float
    num_bytes: float
    density: float


class Training:
    """The workload being trained on this rank."""

    def __init__(self, workload: Workload) -> None:
        layout = Layout(workload.world_size, workload.shard_group_size, "intra_host")
        self.spec = clicks_spec(workload, "sparse-sync", planner={"bandwidths": "default"})
        self.groups = build_groups(layout, torch.device("cpu"), timeout_s=120, host="host")
        self.model, self.optimizers = build_trained(self.spec, self.groups)
        self._batches: Iterator[Batch] = cycle(
            zipf_batches(workload, self.groups.rank, NUM_BATCHES)
        )

    def train(self, num_steps: int) -> None:
        """Take some steps."""
        for _ in range(num_steps):
            take_step(self.model, self.optimizers, next(self._batches), 1, 1)

    def sync(self, **changes: Any) -> Sync:
        """A sync by the default policy but for `changes`."""
        return build_sync(self.model, with_sync(self.spec, **changes))

    def stock_sync(self) -> SyncReport:
        """What DMPCollection.sync does: all-reduce AVG of all weights, then of all states."""
        group = self.groups.replica_group
        shards = self.model.table_shards()
        weights = [shard.weight for shard in shards]
        moments = [state for shard in shards for state in shard.states.values()]
        for each in (weights, moments):
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
            group.allreduce_coalesced(each, options).wait()
        payload_bytes = sum(tensor.nbytes for tensor in (*weights, *moments))
        # What a ring sends, and any all-reduce must.
        return SyncReport(2 * (group.size() - 1) * payload_bytes // group.size())


def slowest_s(function: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds until the slowest rank is done, this rank's result)."""
    dist.barrier()
    started = time.perf_counter()
    result = function()
    elapsed = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item(), result


def _priced(sync: Callable[[], SyncReport]) -> Price:
    time_s, report = slowest_s(sync)
    return Price(time_s, report.num_bytes, report.density)


def measure_syncs(
    workload: Workload, num_steps: tuple[int, ...], num_pairs: int
) -> dict[int, list[tuple[Price, Price]]]:
    """(ours, stock) after each number of steps, `num_pairs` times; who is first alternates."""
    training = Training(workload)
    ours = training.sync()
    training.train(1)
    ours()
    measured: dict[int, list[tuple[Price, Price]]] = {steps: [] for steps in num_steps}
    for pair in range(num_pairs):
        for steps, prices in measured.items():
            training.train(steps)
            if pair % 2:
                stock, mine = _priced(training.stock_sync), _priced(ours)
            else:
                mine, stock = _priced(ours), _priced(training.stock_sync)
            prices.append((mine, stock))
    ours.close()
    return measured


def measure_stalls(
    workload: Workload, every_steps: int, num_pairs: int
) -> list[tuple[float, float]]:
    """Seconds for which training stands still at (our sync that overlaps, stock one), in turn.

    Ours is begun, and applied after `every_steps` steps, for which its averages may take. Each does
    so once before: what is taken at the first sync stays.
    """
    training = Training(workload)
    ours = training.sync(every_steps=every_steps, overlap=every_steps)
    training.train(every_steps)
    measured = []
    for _ in range(1 + num_pairs):
        begin_s, _ = slowest_s(ours)
        for _ in range(every_steps - 1):
            training.train(1)
            ours.tick()
        training.train(1)
        end_s, _ = slowest_s(ours.tick)
        stock_s, _ = slowest_s(training.stock_sync)
        ours.reset()
        training.train(every_steps)
        measured.append((begin_s + end_s, stock_s))
    ours.close()
    return measured[1:]


def measure_union(num_rows: int) -> int:
    """Bytes that a rank sends so that all, each a copy, know which rows any of them touched."""
    replicas = ReplicaCollectives([WorldReplicaGroup(dist.group.WORLD)], torch.device("cpu"))
    unite(torch.rand(num_rows) < 0.1, replicas)
    return replicas.num_bytes


def measure_tracking(workload: Workload, num_pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step (with the tracker, without), `num_pairs` times in turn.

    Both follow on the same: a tracker is made, and has touched its memory.
    """
    training = Training(workload)
    training.train(2)
    measured = []
    for pair in range(num_pairs):
        seconds = {}
        for tracked in (True, False) if pair % 2 else (False, True):
            sync = training.sync()
            sync.reset()
            if not tracked:
                sync.close()
            seconds[tracked], _ = slowest_s(lambda: training.train(1))
            if tracked:
                sync.close()
        measured.append((seconds[True], seconds[False]))
    return measured


def measure_densities(
    workload: Workload, densities: tuple[float, ...], num_repeats: int
) -> list[tuple[float, float, float, float]]:
    """(density, seconds by touched rows, by our full sync, by the stock one), the fastest each."""
    training = Training(workload)
    touched = training.sync(mode="touched_rows", full_above=1.0)
    full = training.sync(mode="full")
    rows = []
    for density in densities:
        sparse_s = []
        for _ in range(num_repeats):
            _touch(training, density)
            sparse_s.append(_priced(touched).time_s)
        full_s = min(_priced(full).time_s for _ in range(num_repeats))
        stock_s = min(_priced(training.stock_sync).time_s for _ in range(num_repeats))
        rows.append((density, min(sparse_s), full_s, stock_s))
    touched.close()
    return rows


def _touch(training: Training, density: float) -> None:
    """Look up `density` of the rows of every table, the same on all copies, one bag a table."""
    generator = torch.Generator().manual_seed(SEED)
    for kernel in training.model.embedding_kernels():
        ids, lengths = [], [0]
        for table in kernel.feature_table_map:
            num_rows = kernel.embedding_specs[table][0]
            ids.append(torch.randperm(num_rows, generator=generator)[: int(density * num_rows)])
            lengths.append(ids[-1].numel())
        kernel(indices=torch.cat(ids), offsets=torch.tensor(lengths).cumsum(0))

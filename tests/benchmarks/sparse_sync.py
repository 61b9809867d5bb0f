"""Bytes and time of a touched-rows sync, over TorchRec's full all-reduce.

python -m tests.benchmarks.sparse_sync --json FILE

Both sides average the copies of the same tables in the same processes, after the same training
steps. The peer is what DMPCollection.sync does: one coalesced all-reduce AVG of all weights over
the replica group, one of all optimizer states. Bytes are those that a rank sends; an all-reduce of
n bytes sends 2 (M - 1) / M n. Other parts measure for how long training stands still where a sync
overlaps with it, what tracking costs a step, what 16 copies send to know the touched rows over what
four send, and how the time of a sync grows with the share of rows touched, to find from where on a
full sync is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tests.benchmarks import sparse_sync_ranks as ranks
from tests.benchmarks.report import BenchmarkReport, Goal, Run, Side, log, main
from tests.benchmarks.workload import Workload
from tests.harness.ranks import run_ranks

NAME = "sparse_sync"
PAIRS = 3
TWO_COPIES = Workload(world_size=4, shard_group_size=2)
FOUR_COPIES = Workload(world_size=4, shard_group_size=1)
STEPS = (1, 16)
DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
TRACKING_PAIRS = 25  # steps with and without the tracker, for each pair asked for
TIMEOUT_S = 900
STOCK = "TorchRec's sync: all-reduce AVG of all weights and optimizer states"
UNION_COPIES = (16, 4)
UNION_ROWS = TWO_COPIES.num_tables * TWO_COPIES.table_rows // TWO_COPIES.shard_group_size
UNTRACKED = "the same steps without the tracker"


def _goal(key: str, unit: str, goal: float, peer_name: str = STOCK) -> Goal:
    return Goal(key, key, unit, goal, "lower", peer_name)


GOALS = (
    _goal("bytes", "B", 0.0167),
    _goal("time", "s", 0.05),
    _goal("bytes_n16", "B", 0.1),
    _goal("time_n16", "s", 0.3),
    _goal("bytes_m4", "B", 0.0167),
    _goal("time_m4", "s", 0.05),
    _goal("stall", "s", 0.05),
    _goal("tracking_overhead", "s", 1.02, UNTRACKED),
    Goal("union_m16_over_m4", "union_bytes", "B", 1.3, "lower", "four copies"),
)


def run(num_pairs: int) -> BenchmarkReport:
    """Measure; raises `AssertionError` when a rank fails."""
    two = _on_ranks(ranks.measure_syncs, TWO_COPIES, STEPS, num_pairs)
    four = _on_ranks(ranks.measure_syncs, FOUR_COPIES, STEPS[:1], num_pairs)
    stalls = _on_ranks(ranks.measure_stalls, TWO_COPIES, STEPS[1], num_pairs)
    tracking = _on_ranks(ranks.measure_tracking, TWO_COPIES, num_pairs * TRACKING_PAIRS)
    densities = _on_ranks(ranks.measure_densities, TWO_COPIES, DENSITIES, 2)
    unions = [
        run_ranks(ranks.measure_union, copies, UNION_ROWS, fresh=True)[0] for copies in UNION_COPIES
    ]
    prices = {"": two[1], "_n16": two[16], "_m4": four[1]}
    runs = [
        each
        for pair in range(num_pairs)
        for each in _runs_of(pair, prices, stalls[pair], tracking[pair::num_pairs], unions)
    ]
    shares = {f"density{suffix}": pairs[0][0].density for suffix, pairs in prices.items()}
    settings = _settings() | shares | {"crossover_density": crossover(densities)}
    return BenchmarkReport(NAME, settings, GOALS, runs, _rows(densities))


def _on_ranks(function: Any, workload: Workload, *args: Any) -> Any:
    log(f"{function.__name__}: {workload.world_size} ranks, {workload.num_replicas} copies")
    return run_ranks(function, workload.world_size, workload, *args, timeout_s=TIMEOUT_S)[0]


def _runs_of(
    pair: int,
    prices: dict[str, list[tuple[ranks.Price, ranks.Price]]],
    stall_s: tuple[float, float],
    steps_s: Sequence[tuple[float, float]],
    union_bytes: Sequence[float],
) -> list[Run]:
    """Both sides of one pair, all that they measured put together."""
    runs = []
    sides: tuple[Side, Side] = ("ours", "peer")
    for index, side in enumerate(sides):
        values = {
            "tracking_overhead": median(seconds[index] for seconds in steps_s),
            "stall": stall_s[index],
            "union_bytes": union_bytes[index],
        }
        for suffix, pairs in prices.items():
            values[f"bytes{suffix}"] = pairs[pair][index].num_bytes
            values[f"time{suffix}"] = pairs[pair][index].time_s
        runs.append(Run(pair, side, values))
    return runs


def crossover(densities: Sequence[tuple[float, float, float, float]]) -> float | None:
    """Share of rows from which on our full sync is faster, between two measured; None: never."""
    before: tuple[float, float] | None = None
    for density, sparse_s, full_s, _ in densities:
        excess_s = sparse_s - full_s
        if excess_s >= 0:
            if before is None:
                return density
            share = -before[1] / (excess_s - before[1])
            return round(before[0] + share * (density - before[0]), 3)
        before = density, excess_s
    return None


def _rows(densities: Sequence[tuple[float, float, float, float]]) -> list[dict[str, float]]:
    return [
        {
            "density": density,
            "touched_rows_s": round(sparse_s, 4),
            "full_s": round(full_s, 4),
            "stock_s": round(stock_s, 4),
        }
        for density, sparse_s, full_s, stock_s in densities
    ]


def _settings() -> dict[str, Any]:
    return {
        "two_copies": asdict(TWO_COPIES),
        "four_copies": asdict(FOUR_COPIES),
        "steps_between_syncs": {"bytes": 1, "bytes_n16": 16, "bytes_m4": 1, "stall": 16},
        "optimizer": "row_wise_adagrad, moments averaged at every sync",
        "sharding": "table_wise",
        "backend": "gloo, one thread a rank",
        "bytes": "sent by a rank; an all-reduce of n bytes sends 2 (M - 1) / M n",
        "time": "until the slowest rank is done",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

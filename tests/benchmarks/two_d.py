"""2D sparse parallelism against stock 1D TorchRec on two emulated hosts, as in the paper's table 1.

python -m tests.benchmarks.two_d --json FILE

Eight gloo ranks, four on each of two network namespaces that a 1 Gbit/s link joins. The survey
measures every variant of stock TorchRec in 1D and every 2D layout once: samples per second, peak
memory, lookup imbalance, bytes over the link. Then the best of each side is measured again, in
pairs that take turns; only these decide the ratio. Both sides train the same model on the same
batches and compute in fp32; stock 1D may send embeddings in fp16, and ours what syncs move. What
the ratio is made of averages dense gradients at every step; rows that do otherwise say so, and stay
outside of it.

What is left of the sync is a ratio of its own: copies that are averaged every 16 steps, while they
train on, over the same copies never averaged, and over those of stock TorchRec, which stand still
meanwhile (`over_stock_2d`). So is a full sync of eight copies that goes by hosts
(`trainer.parallel.collectives`), over the same without regard to hosts.

Needs root; skips with a message where hosts cannot be emulated. Timings are the wall clock's: the
ranks share this machine's cores, so run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.benchmarks.peers.stock_1d import STOCK_2D, STOCK_2D_SYNC_STEPS, VARIANTS
from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    BenchmarkSkipped,
    Goal,
    Run,
    log,
    main,
    run_pairs,
)
from tests.benchmarks.two_d_train import Schedule, measure, measure_sync, summary
from tests.benchmarks.two_d_workload import BATCH_SIZE, IN_1D, WORLD_SIZE, TwoDLayout
from tests.benchmarks.workload import OVER_LAYERS
from tests.harness.emulated import EmulatedHosts, EmulationError, Link, missing_requirement
from tests.harness.host_ranks import HostRanks

NAME = "two_d"
NUM_HOSTS = 2
RANKS_PER_HOST = WORLD_SIZE // NUM_HOSTS
LINK = Link(rate_bits_per_s=10**9)
PAIRS = 4
_RARELY = 16  # steps from sync to sync; as many are measured where there is none
GOAL = Goal(
    "best_2d_over_1d", "samples_per_s", "samples/s", 1.25, "higher", "best stock TorchRec 1D"
)
NO_SYNC = "the same copies without a sync"
SYNC_GOAL = Goal("of_no_sync", "synced_samples_per_s", "samples/s", 0.95, "higher", NO_SYNC)
STOCK_GOAL = Goal(
    "over_stock_2d", "stock_2d_samples_per_s", "samples/s", 1.3, "higher", "stock TorchRec 2D, M=2"
)
ONE_LEVEL = "the same sync in one level"
HOST_GOALS = (
    Goal("sync_by_host", "host_sync_s", "s", 0.4, "lower", ONE_LEVEL),
    Goal("bytes_by_host", "host_sync_bytes", "B", 0.4, "lower", ONE_LEVEL),
)
# Both sides: freed memory stays with the process, or each step gives pages back and faults them in.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(10**9), "MALLOC_MMAP_THRESHOLD_": str(10**9)}

Side = TwoDLayout | str


def layouts() -> list[TwoDLayout]:
    """Every 2D layout of the table: M, placement, what a sync moves, and how often."""
    plain = [
        TwoDLayout(num_replicas, placement, mode, every_steps)
        for num_replicas in (2, 4)
        for placement in ("intra_host", "inter_host")
        for mode in ("full", "touched_rows")
        for every_steps in (1, _RARELY)
    ]
    overlapped = [
        TwoDLayout(num_replicas, "inter_host", "touched_rows", _RARELY, overlap=_RARELY)
        for num_replicas in (2, 4)
    ]
    half = [replace(each, sync_dtype="fp16") for each in overlapped]
    # Measured too, but no 1D row does the same arithmetic.
    beyond = [replace(overlapped[0], dense="at_sync")]
    unsynced = [TwoDLayout(num_replicas, "inter_host", "none", 1) for num_replicas in (2, 4)]
    return plain + overlapped + half + beyond + unsynced


def is_comparable(side: Side) -> bool:
    """Whether a side may be the one that the ratio is made of."""
    return side.is_comparable if isinstance(side, TwoDLayout) else True


def label_of(side: Side) -> str:
    """Name of a side's row in the table."""
    return side.label if isinstance(side, TwoDLayout) else f"1D {side}"


def schedule_of(side: Side) -> Schedule:
    """How long to measure a side. A window holds whole sync intervals, so that all are alike."""
    every_steps = 1
    if isinstance(side, TwoDLayout):
        every_steps = _RARELY if side.mode == "none" else side.every_steps
    elif side == STOCK_2D:
        every_steps = STOCK_2D_SYNC_STEPS
    if every_steps > 1:
        # The first window begins after a sync has landed which overlapped with the steps behind it:
        # only the first takes memory that the kernel has yet to clear.
        return Schedule(3 + 2 * every_steps, num_windows=2, steps_per_window=every_steps)
    is_slow = side == "row_wise" or (isinstance(side, TwoDLayout) and side.mode == "full")
    if is_slow:  # seconds a step
        return Schedule(warmup_steps=1, num_windows=3, steps_per_window=1)
    return Schedule(warmup_steps=3, num_windows=3, steps_per_window=3)


@contextmanager
def emulated_ranks(ranks_per_host: int, link: Link = LINK) -> Iterator[HostRanks]:
    """Ranks on two hosts that `link` joins.

    Raises `BenchmarkSkipped` where hosts cannot be emulated.
    """
    if missing := missing_requirement():
        raise BenchmarkSkipped(missing)
    os.environ.update(MALLOC, PYTHONWARNINGS="ignore")  # of the ranks
    try:
        with EmulatedHosts(NUM_HOSTS, link) as hosts:
            yield HostRanks(hosts, ranks_per_host)
    except EmulationError as error:
        raise BenchmarkError(str(error)) from error


def run(num_pairs: int) -> BenchmarkReport:
    """Measure all. Raises `BenchmarkError` when a side cannot run."""
    with emulated_ranks(RANKS_PER_HOST) as ranks:
        stock, ours = survey(ranks, VARIANTS), survey(ranks, layouts())
        best_stock, best_ours = best_of(stock), best_of(ours)
        log(f"pairs: {label_of(best_ours)} against {label_of(best_stock)}")
        runs = run_pairs(
            num_pairs, lambda: _measure(ranks, best_ours), lambda: _measure(ranks, best_stock)
        )
        synced = TwoDLayout(2, "inter_host", "touched_rows", _RARELY, overlap=_RARELY)
        unsynced = TwoDLayout(2, "inter_host", "none", 1)
        log(f"pairs: {label_of(synced)} against {label_of(unsynced)} and stock TorchRec's 2D")
        sync_runs = run_pairs(
            num_pairs,
            lambda: _speeds(ranks, synced, synced),
            lambda: _speeds(ranks, unsynced, STOCK_2D),
        )
        host_runs = run_pairs(
            num_pairs, lambda: _sync_prices(ranks, True), lambda: _sync_prices(ranks, False)
        )
    settings = _settings() | {"ours": label_of(best_ours), "peer": label_of(best_stock)}
    merged = [
        Run(each.pair, each.side, each.values | more.values | last.values)
        for each, more, last in zip(runs, sync_runs, host_runs, strict=True)
    ]
    return BenchmarkReport(
        NAME,
        settings,
        [GOAL, SYNC_GOAL, STOCK_GOAL, *HOST_GOALS],
        merged,
        table_rows(stock | ours, best_stock),
    )


def _speeds(ranks: HostRanks, side: Side, stock_side: Side) -> Mapping[str, float]:
    """What the two goals of a sync compare; one measurement where both compare the same."""
    speed = {each: _measure(ranks, each)["samples_per_s"] for each in {side, stock_side}}
    return {SYNC_GOAL.measured: speed[side], STOCK_GOAL.measured: speed[stock_side]}


def _sync_prices(ranks: HostRanks, is_by_host: bool) -> Mapping[str, float]:
    prices = ranks.call(measure_sync, is_by_host)
    sync_s, sent_bytes = map(max, zip(*prices, strict=True))
    return dict(zip((goal.measured for goal in HOST_GOALS), (sync_s, sent_bytes), strict=True))


def survey(ranks: HostRanks, sides: Sequence[Side]) -> dict[Side, Mapping[str, float]]:
    """Measure each side once."""
    measured: dict[Side, Mapping[str, float]] = {}
    for side in sides:
        measured[side] = _measure(ranks, side)
        log(f"{label_of(side)}: {measured[side]['samples_per_s']:.0f} samples/s")
    return measured


def _measure(ranks: HostRanks, side: Side) -> Mapping[str, float]:
    schedule = schedule_of(side)
    results = ranks.call(measure, side, schedule)
    return summary(results, schedule, rows_per_step=BATCH_SIZE * WORLD_SIZE)


def best_of(measured: Mapping[Side, Mapping[str, float]]) -> Side:
    """The fastest of the sides that can be compared."""
    comparable = filter(is_comparable, measured)
    return max(comparable, key=lambda side: measured[side]["samples_per_s"])


def table_rows(measured: Mapping[Side, Mapping[str, float]], base: Side) -> list[dict[str, Any]]:
    """The survey shaped like the paper's table 1, speeds relative to `base`."""
    base_speed = measured[base]["samples_per_s"]
    return [
        {
            "configuration": label_of(side),
            "samples/s": round(values["samples_per_s"]),
            "of 1D": round(values["samples_per_s"] / base_speed, 3),
            "windows": [
                round(values["samples_per_s_min"]),
                round(values["samples_per_s_max"]),
            ],
            "peak MB": round(values["peak_bytes"] / 1e6),
            "imbalance": round(values["lookup_imbalance"], 3),
            "link MB/step": round(values["link_bytes_per_step"] / 1e6, 2),
            "sync ms/step": round(values["sync_s_per_step"] * 1e3, 1),
        }
        for side, values in measured.items()
    ]


def _settings() -> dict[str, Any]:
    return {
        "world_size": WORLD_SIZE,
        "hosts": NUM_HOSTS,
        "link_bits_per_s": LINK.rate_bits_per_s,
        "backend": "gloo",
        "batch_size_per_rank": BATCH_SIZE,
        "tables": f"{IN_1D.num_tables} x {IN_1D.table_rows} x {IN_1D.embedding_dim} fp32, "
        "one id a row and table",
        "zipf_exponent": IN_1D.zipf_exponent,
        "model": f"DLRM, dense layers {IN_1D.dense_layers}, over layers {OVER_LAYERS}",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

"""Preparing MovieLens ratings: ours end to end against pandas on a slice, scaled up.

python -m tests.benchmarks.prepare --json FILE

Both read generated ratings, movies and tags in the proportions of MovieLens and write the same
columns as Parquet, each in a process of its own. Ours prepares all ratings; pandas, which would
take hours and more memory than most machines have, a generated slice with its share of movies and
tags. Its time is scaled by the number of ratings, its memory likewise but for what the process
holds after its imports. Linear is in its favour, as it also sorts.

The peer of the ratios is the published method. A second one, pandas used carefully, is measured
once and shown beside it (see `prepare_pandas`).
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import (
    BenchmarkReport,
    Goal,
    Values,
    main,
    run_child,
    run_module,
    run_pairs,
)

NUM_RATINGS, SLICE_RATINGS, SEED = 32_000_000, 300_000, 0
PAIRS = 2
_PEER = "the published pandas method on a slice, scaled"
GOALS = (
    Goal("speed", "rows_per_s", "rows/s", 10.0, "higher", _PEER),
    Goal("memory", "peak_bytes", "bytes", 0.25, "lower", _PEER),
)
_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class Cost:
    """What one preparation took: seconds without start-up, bytes at the peak and before it."""

    wall_s: float
    peak_bytes: int
    base_bytes: int

    def scaled(self, factor: float) -> Cost:
        """The cost of `factor` times the rows; what the process began with is there once."""
        grown = (self.peak_bytes - self.base_bytes) * factor
        return Cost(self.wall_s * factor, round(self.base_bytes + grown), self.base_bytes)

    def values(self, num_rows: int) -> dict[str, float]:
        """As a benchmark's report holds it, for `num_rows` rows."""
        return {
            "wall_s": self.wall_s,
            "rows_per_s": num_rows / self.wall_s,
            "peak_bytes": float(self.peak_bytes),
        }


def prepare_once(method: str, source: Path, folder: Path) -> Cost:
    """Prepare `source` with `method` in a process of its own, and throw the result away."""
    out = folder / f"out-{method}"
    try:
        return Cost(**run_module("prepare_child", method, source, out))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def generate(folder: Path, num_ratings: int) -> Path:
    """A folder of generated csv files, made in a process of its own so that its memory goes."""
    source = folder / f"csv-{num_ratings}"
    program = Path(sys.executable).with_name("shardloom")
    command = [str(program), "data", "generate", "movielens", str(source)]
    numbers = ["--ratings", str(num_ratings), "--seed", str(SEED)]
    run_child(*command, *numbers, what=f"generating {num_ratings} ratings")
    return source


def run(num_pairs: int) -> BenchmarkReport:
    with TemporaryDirectory(prefix="shardloom-bench-prepare-") as name:
        folder = Path(name)
        whole, part = generate(folder, NUM_RATINGS), generate(folder, SLICE_RATINGS)

        def peer(method: str) -> dict[str, float]:
            cost = prepare_once(method, part, folder).scaled(NUM_RATINGS / SLICE_RATINGS)
            return cost.values(NUM_RATINGS)

        runs = run_pairs(
            num_pairs,
            ours=lambda: prepare_once("ours", whole, folder).values(NUM_RATINGS),
            peer=lambda: peer("published"),
        )
        careful = peer("careful")
    rows = [
        *(_row(f"{run.side}, pair {run.pair + 1}", run.values) for run in runs),
        _row("pandas used carefully", careful),
    ]
    settings = {"ratings": NUM_RATINGS, "slice_ratings": SLICE_RATINGS, "seed": SEED}
    return BenchmarkReport("prepare", settings, GOALS, runs, rows)


def _row(name: str, values: Values) -> dict[str, Any]:
    return {
        "what": name,
        "seconds": round(values["wall_s"], 1),
        "rows/s": round(values["rows_per_s"]),
        "peak GB": round(values["peak_bytes"] / _BYTES_PER_GB, 2),
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

"""Quality of the MovieLens model on ml-latest-small against a mean, biases and factorisation.

python -m tests.benchmarks.quality --json FILE [--seeds N] [--source DIR]

Everybody fits the same ratings (each user's first nine tenths by time) and predicts the same held
out ones. What both sides are tuned to (`quality_settings`) was found on the fitted ratings only,
but the held-out ones were looked at three times: after the first look two feature columns were added
on the evidence of the fitted ratings, after the second the peer got more factors (see
deploy/modelling.md). `rmse_gain` is how many stars our RMSE lies below that of the best peer, both
means over the seeds; its spread is that of single seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.quality_data import SOURCE, Fold, make_fold, read_ratings
from tests.benchmarks.quality_ours import job_spec, rmse_by_epoch, single_rank
from tests.benchmarks.quality_peers import bias_rmse, factor_rmse_by_epoch, mean_rmse
from tests.benchmarks.quality_settings import BIAS, DATA, FACTORS, OURS, SPEC
from tests.benchmarks.report import (
    BenchmarkError,
    Ratio,
    describe_machine,
    end_on_signal,
    log,
    table_of,
    write_json,
)

NAME = "quality"
OUR_NAME = "ours"
GOAL_STARS = 0.01

Results = Mapping[str, Sequence[float]]


def measure(fold: Fold, num_seeds: int) -> dict[str, list[float]]:
    """Held-out RMSE in stars by model, one for each seed. Needs `single_rank`."""
    results: dict[str, list[float]] = {
        "global mean": [mean_rmse(fold)] * num_seeds,
        "user + movie bias": [bias_rmse(fold, BIAS)] * num_seeds,
        "matrix factorisation": [],
        OUR_NAME: [],
    }
    for seed in range(num_seeds):
        results["matrix factorisation"].append([*factor_rmse_by_epoch(fold, FACTORS, seed)][-1])
        spec = job_spec(SPEC, fold.prepared, [*OURS, f"training.seed={seed}"])
        results[OUR_NAME].append(rmse_by_epoch(spec)[-1])
        log(f"seed {seed + 1}/{num_seeds}: " + _line_of(results, seed))
    return results


def _line_of(results: Results, seed: int) -> str:
    return ", ".join(f"{name} {values[seed]:.4f}" for name, values in results.items())


def gain_of(results: Results) -> Ratio:
    """How far ours lies below the peer with the lowest mean RMSE, in stars."""
    peers = {name: values for name, values in results.items() if name != OUR_NAME}
    best = min(peers, key=lambda name: fmean(peers[name]))
    ours = results[OUR_NAME]
    of_seeds = [theirs - mine for theirs, mine in zip(peers[best], ours, strict=True)]
    return Ratio(
        value=fmean(peers[best]) - fmean(ours),
        goal=GOAL_STARS,
        better="higher",
        ours=fmean(ours),
        peer=fmean(peers[best]),
        peer_name=best,
        unit="stars RMSE",
        spread=[min(of_seeds), max(of_seeds)],
    )


def document_of(
    results: Results, settings: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """The report as the JSON file holds it."""
    return {
        "benchmark": NAME,
        "machine": dict(machine),
        "settings": dict(settings),
        "ratios": {"rmse_gain": gain_of(results)},
        "runs": [
            {"seed": seed, "model": name, "rmse": value}
            for name, values in results.items()
            for seed, value in enumerate(values)
        ],
    }


def results_table(results: Results) -> Table:
    """Mean and deviation over seeds of every model."""
    table = Table("model", "RMSE", "deviation", "seeds", title="held-out RMSE in stars")
    for name, values in results.items():
        deviation = stdev(values) if len(values) > 1 else 0.0
        table.add_row(name, f"{fmean(values):.4f}", f"{deviation:.4f}", str(len(values)))
    return table


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when it measured, whatever came out; 1 when it could not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model (default 3)")
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    end_on_signal()
    machine = describe_machine()
    try:
        with tempfile.TemporaryDirectory(prefix="shardloom-quality-") as folder, single_rank():
            fold = make_fold(options.source, read_ratings(options.source), Path(folder), DATA)
            results = measure(fold, options.seeds)
    except BenchmarkError as error:
        log(f"the benchmark failed: {error}")
        return 1
    settings = {
        "spec": SPEC.name,
        "spec_sha256": hashlib.sha256(SPEC.read_bytes()).hexdigest(),
        "overrides": list(OURS),
        "data": DATA.model_dump(),
        "factors": vars(FACTORS),
        "num_fitted": len(fold.fit),
        "num_held_out": len(fold.held_out),
        "num_seeds": options.seeds,
    }
    document = document_of(results, settings, machine)
    if options.json:
        write_json(options.json, document)
    Console().print(results_table(results))
    Console().print(table_of(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

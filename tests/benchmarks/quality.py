"""Quality of the MovieLens model on ml-latest-small against a mean, biases and factorisation.

python -m tests.benchmarks.quality --json FILE [--seeds N] [--source DIR]

Everybody fits the same ratings (each user's first nine tenths by time) and predicts the same held
out ones. `rmse_gain` is how many stars our RMSE lies below that of the best peer, both means over
the seeds; its spread is that of single seeds. Beside it stands how far it may be chance of which
users there are (`gain_interval`). That says nothing of how both sides were tuned, and how often the
held-out ratings were looked at: docs/model-quality.md does.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from tests.benchmarks.quality_data import SOURCE, FloatArray, Fold, make_fold, read_ratings
from tests.benchmarks.quality_ours import held_out_errors, job_spec, single_rank
from tests.benchmarks.quality_peers import (
    FactorSettings,
    bias_errors,
    factor_errors,
    mean_errors,
)
from tests.benchmarks.report import (
    BenchmarkError,
    Ratio,
    log,
    measure_and_tell,
    parser_of,
    table_of,
)
from trainer.data.ragged import IntArray
from trainer.datasets.movielens.prepare import MovieLensOptions

NAME = "quality"
OUR_NAME = "ours"
GOAL_STARS = 0.01
LEVEL = 0.95
_BOOTSTRAP_DRAWS = 2000
_BOOTSTRAP_SEED = 0

# What both sides were tuned to.
SPEC = Path(__file__).parents[2] / "examples" / "movielens-transformer.yaml"
DATA = MovieLensOptions()
# What the example does on four ranks of 128 rows, one rank does on 512.
OURS = ("data.batch_size=512",)
FACTORS = FactorSettings()

Results = Mapping[str, Sequence[float]]
Squares = Mapping[str, Sequence[FloatArray]]


def measure(fold: Fold, num_seeds: int) -> dict[str, list[FloatArray]]:
    """Squared held-out errors summed by user, of each model and seed. Needs `single_rank`."""
    held_out = fold.held_out.user

    def by_user(errors: FloatArray, user: IntArray = held_out) -> FloatArray:
        return squares_by_user(user, errors, fold.num_users)

    squares: dict[str, list[FloatArray]] = {
        "global mean": [by_user(mean_errors(fold))] * num_seeds,
        "user + movie bias": [by_user(bias_errors(fold))] * num_seeds,
        "matrix factorisation": [],
        OUR_NAME: [],
    }
    for seed in range(num_seeds):
        squares["matrix factorisation"].append(by_user(factor_errors(fold, FACTORS, seed)))
        spec = job_spec(SPEC, fold.prepared, [*OURS, f"training.seed={seed}"])
        user, errors = held_out_errors(spec)
        if not np.array_equal(np.sort(user), np.sort(held_out)):
            raise BenchmarkError("the session held out ratings of other users than the peers")
        squares[OUR_NAME].append(by_user(errors, user))
        done = {name: [values[seed]] for name, values in squares.items()}
        line = ", ".join(f"{n} {own[0]:.4f}" for n, own in rmse_by_model(done, fold).items())
        log(f"seed {seed + 1}/{num_seeds}: " + line)
    return squares


def squares_by_user(user: IntArray, errors: FloatArray, num_users: int) -> FloatArray:
    """Sum of the squared errors of each user, [num_users]."""
    return np.bincount(user, errors**2, minlength=num_users)


def rmse_of(squares: FloatArray, num_rows: IntArray) -> float:
    return float(np.sqrt(squares.sum() / num_rows.sum()))


def gain_interval(
    peer: Sequence[FloatArray], ours: Sequence[FloatArray], num_rows: IntArray
) -> list[float]:
    """Ends of the interval of mean RMSE over seeds of the peer less that of ours, in stars.

    A paired bootstrap over users: they are drawn with replacement, all held-out ratings of a user
    together and the same users for both sides (Efron and Tibshirani 1993, chapters 6 and 13:
    percentile interval).

    `peer` and `ours` hold `squares_by_user` for each seed; `num_rows` is [num_users].
    """
    rng = np.random.default_rng(_BOOTSTRAP_SEED)
    num_users = len(num_rows)
    drawn = rng.multinomial(num_users, np.full(num_users, 1 / num_users), size=_BOOTSTRAP_DRAWS)
    gains = _means(drawn, peer, num_rows) - _means(drawn, ours, num_rows)
    tail = (1 - LEVEL) / 2
    return [float(end) for end in np.quantile(gains, [tail, 1 - tail])]


def _means(drawn: IntArray, squares: Sequence[FloatArray], num_rows: IntArray) -> FloatArray:
    """Mean RMSE over seeds for each draw; `drawn` is how often each user came, [draws, users]."""
    counts = drawn @ num_rows
    return np.mean([np.sqrt(drawn @ each / counts) for each in squares], axis=0)


def rows_by_user(fold: Fold) -> IntArray:
    return np.bincount(fold.held_out.user, minlength=fold.num_users)


def rmse_by_model(squares: Squares, fold: Fold) -> dict[str, list[float]]:
    """Held-out RMSE in stars by model, one for each seed."""
    num_rows = rows_by_user(fold)
    return {name: [rmse_of(each, num_rows) for each in own] for name, own in squares.items()}


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
    results: Results,
    interval: Sequence[float],
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The report as the JSON file holds it; `interval` is that of `rmse_gain`."""
    return {
        "benchmark": NAME,
        "machine": dict(machine),
        "settings": dict(settings),
        "ratios": {"rmse_gain": gain_of(results)},
        "user_bootstrap": {"rmse_gain": list(interval), "level": LEVEL},
        "runs": [
            {"seed": seed, "model": name, "rmse": value}
            for name, values in results.items()
            for seed, value in enumerate(values)
        ],
    }


def results_table(results: Results) -> Table:
    table = Table("model", "RMSE", "deviation", "seeds", title="held-out RMSE in stars")
    for name, values in results.items():
        deviation = stdev(values) if len(values) > 1 else 0.0
        table.add_row(name, f"{fmean(values):.4f}", f"{deviation:.4f}", str(len(values)))
    return table


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model (default 3)")
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="DIR")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    return measure_and_tell(
        options.json, lambda machine: run(options.source, options.seeds, machine)
    )


def run(
    source: Path, num_seeds: int, machine: Mapping[str, Any]
) -> tuple[dict[str, Any], list[RenderableType]]:
    ratings = read_ratings(source)
    with tempfile.TemporaryDirectory(prefix="shardloom-quality-") as folder, single_rank():
        fold = make_fold(source, ratings, Path(folder), DATA)
        squares = measure(fold, num_seeds)
    settings = {
        "spec": SPEC.name,
        "spec_sha256": hashlib.sha256(SPEC.read_bytes()).hexdigest(),
        "overrides": list(OURS),
        "data": DATA.model_dump(),
        "factors": vars(FACTORS),
        "num_fitted": len(fold.fit),
        "num_held_out": len(fold.held_out),
        "num_seeds": num_seeds,
    }
    results = rmse_by_model(squares, fold)
    best = gain_of(results)["peer_name"]
    interval = gain_interval(squares[best], squares[OUR_NAME], rows_by_user(fold))
    document = document_of(results, interval, settings, machine)
    low, high = interval
    chance = f"rmse_gain over users drawn anew: {low:.4f} to {high:.4f} ({LEVEL:.0%})"
    return document, [results_table(results), table_of(document), chance]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The search behind the settings of the quality benchmark: random, logged, on the tuning fold.

python -m tests.benchmarks.quality_search peer|ours --log FILE [--trials N] [--source DIR]

A search draws trials from the side's own space with a fixed seed, and then tries the best few again
with two more seeds; the best mean over three seeds wins. Every trial is a line of the log, and a
search goes on where its log ends; the log's first line says of which side, spec and data it is, and
another search refuses it. The test part is not read. How the settings in use were found, which was
not by one such search alone, is told in `quality_settings` and docs/model-quality.md.

The factorisation may stop after any epoch (its rates do not know the end); our learning rates
decay to the last epoch, so the number of epochs is among what is drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tests.benchmarks.quality_data import SOURCE, Fold, make_fold, read_ratings, tuning_ratings
from tests.benchmarks.quality_ours import job_spec, rmse_by_epoch, single_rank
from tests.benchmarks.quality_peers import FactorSettings, factor_errors_by_epoch, rmse
from tests.benchmarks.quality_settings import DATA, OURS, SPEC
from tests.benchmarks.report import BenchmarkError, end_on_signal, log
from trainer.datasets.movielens.prepare import VERSION as PREPARE_VERSION

_SEED = 0
_NUM_FINALISTS = 5
_FINAL_SEEDS = (0, 1, 2)

Space = Mapping[str, tuple[Any, ...]]
Settings = dict[str, Any]
Curve = list[float]

PEER_SPACE: Space = {
    "num_factors": (128, 256, 512),
    "lr": (0.02, 0.04, 0.06, 0.09),
    "lr_decay": (0.93, 0.88, 0.8, 0.7),
    "factor_l2": (0.01, 0.02, 0.035, 0.05),
    "bias_l2": (0.0003, 0.001, 0.005),
    "init_std": (0.01, 0.03, 0.05),
    "batch_size": (64, 128, 256),
    "num_epochs": (25,),
}
OUR_SPACE: Space = {
    "training.epochs": (3, 4),
    "model.transformer.dropout": (0.1, 0.2, 0.3),
    "optimizer.sparse.lr": (0.03, 0.05, 0.08),
    "optimizer.sparse.weight_decay": (0.2, 0.35, 0.5),
    "optimizer.dense.lr": (0.001, 0.002),
    "optimizer.dense.weight_decay": (0.0001, 0.001),
}


@dataclass(frozen=True)
class Side:
    """How one side is tried: its space, its held-out RMSE by epoch, and which epochs may end it."""

    name: str
    space: Space
    measure: Callable[[Fold, Settings, int], Curve]
    stops_anywhere: bool

    def best(self, curve: Curve) -> tuple[float, int]:
        """(RMSE, number of epochs) that a curve is worth."""
        last = len(curve) - 1
        epoch = min(range(len(curve)), key=curve.__getitem__) if self.stops_anywhere else last
        return curve[epoch], epoch + 1


def draw(space: Space, num_trials: int) -> Iterator[Settings]:
    """`num_trials` settings, each value drawn by itself; always the same ones."""
    rng = np.random.default_rng(_SEED)
    for _ in range(num_trials):
        yield {name: values[rng.integers(len(values))] for name, values in space.items()}


def _peer_curve(fold: Fold, settings: Settings, seed: int) -> Curve:
    errors_by_epoch = factor_errors_by_epoch(fold, FactorSettings(**settings), seed)
    return [rmse(errors) for errors in errors_by_epoch]


def _our_curve(fold: Fold, settings: Settings, seed: int) -> Curve:
    drawn = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    spec = job_spec(SPEC, fold.prepared, [*OURS, *drawn, f"training.seed={seed}"])
    return rmse_by_epoch(spec)


SIDES = {
    "peer": Side("peer", PEER_SPACE, _peer_curve, stops_anywhere=True),
    "ours": Side("ours", OUR_SPACE, _our_curve, stops_anywhere=False),
}


class Search:
    """Trials of one side, written down as they come; what the log has already is not repeated."""

    def __init__(self, side: Side, fold: Fold, log_path: Path) -> None:
        self._side, self._fold, self._log_path = side, fold, log_path
        known = read_log(log_path, header_of(side.name))
        self._curves: dict[str, Curve] = {_key(t["settings"], t["seed"]): t["curve"] for t in known}

    def run(self, num_trials: int) -> tuple[Settings, float, int]:
        """(settings, mean RMSE over seeds, epochs) of the best among the best of one seed."""
        drawn = list(draw(self._side.space, num_trials))
        worth = [self._side.best(self.trial(settings, _SEED))[0] for settings in drawn]
        finalists = [drawn[i] for i in np.argsort(worth)[:_NUM_FINALISTS]]
        results = [(settings, *self.over_seeds(settings)) for settings in finalists]
        return min(results, key=lambda result: result[1])

    def trial(self, settings: Settings, seed: int) -> Curve:
        """Held-out RMSE by epoch, measured and logged where the log does not have it."""
        key = _key(settings, seed)
        if key not in self._curves:
            self._curves[key] = self._measure(settings, seed)
        return self._curves[key]

    def _measure(self, settings: Settings, seed: int) -> Curve:
        curve = [round(each, 5) for each in self._side.measure(self._fold, settings, seed)]
        best, epochs = self._side.best(curve)
        line = {"side": self._side.name, "seed": seed, "validation_rmse": best, "epochs": epochs}
        with self._log_path.open("a") as file:
            file.write(json.dumps(line | {"settings": settings, "curve": curve}) + "\n")
        log(f"{best:.5f} after {epochs} of {len(curve)} epochs, seed {seed}: {settings}")
        return curve

    def over_seeds(self, settings: Settings) -> tuple[float, int]:
        """(mean RMSE, epochs) with all seeds stopping after the same epoch."""
        curves = [self.trial(settings, seed) for seed in _FINAL_SEEDS]
        rmse, epochs = self._side.best([fmean(values) for values in zip(*curves, strict=True)])
        log(f"mean over seeds {rmse:.5f} after {epochs} epochs: {settings}")
        return rmse, epochs


def header_of(side: str) -> dict[str, Any]:
    """What a trial's result depends on besides its settings and seed."""
    return {
        "side": side,
        "spec_sha256": hashlib.sha256(SPEC.read_bytes()).hexdigest(),
        "overrides": list(OURS),
        "data": DATA.model_dump(),
        "prepare_version": PREPARE_VERSION,
    }


def read_log(path: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trials of a log that begins with `header`; a new log is begun with it.

    Raises `BenchmarkError` where the log is of another search.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        path.write_text(json.dumps(header) + "\n")
        return []
    if json.loads(lines[0]) != header:
        raise BenchmarkError(
            f"{path} is of another side, spec, data or version of prepare; name a new --log"
        )
    return [json.loads(line) for line in lines[1:]]


def _key(settings: Settings, seed: int) -> str:
    return json.dumps([settings, seed], sort_keys=True)


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="continued")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="DIR")
    options = parser.parse_args(arguments)
    end_on_signal()
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardloom-quality-"))
            ratings = tuning_ratings(read_ratings(options.source))
            fold = make_fold(options.source, ratings, Path(folder), DATA)
            stack.enter_context(single_rank())
            search = Search(SIDES[options.side], fold, options.log)
            settings, rmse, epochs = search.run(options.trials)
    except BenchmarkError as error:
        log(f"the search failed: {error}")
        return 1
    log(f"chosen: {rmse:.5f} after {epochs} epochs: {settings}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

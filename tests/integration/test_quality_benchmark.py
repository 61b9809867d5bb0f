"""The quality benchmark end to end: a real session and its peers on a few generated ratings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.benchmarks.quality import OUR_NAME
from trainer.datasets.movielens.synthetic import generate_movielens


def test_it_measures_every_model_on_the_same_rows(tmp_path):
    source, report = tmp_path / "csv", tmp_path / "report.json"
    generate_movielens(source, num_ratings=4000, seed=5)
    arguments = ["--source", str(source), "--seeds", "1", "--json", str(report)]
    command = [sys.executable, "-m", "tests.benchmarks.quality", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(report.read_text())
    rmse = {run["model"]: run["rmse"] for run in document["runs"]}
    assert len(rmse) == 4
    assert all(0.3 < value < 1.5 for value in rmse.values())
    gain = document["ratios"]["rmse_gain"]
    best = min(value for name, value in rmse.items() if name != OUR_NAME)
    assert gain["value"] == pytest.approx(best - rmse[OUR_NAME])
    low, high = document["user_bootstrap"]["rmse_gain"]
    assert low < gain["value"] < high
    assert document["settings"]["num_held_out"] < document["settings"]["num_fitted"] / 5

"""The loader benchmark: the sides make the same tensors, and what makes its ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.loader import (
    WAIT_GOAL,
    best_peer,
    check_sums,
    rows_of,
    speed_goal,
    with_waits,
)
from tests.benchmarks.loader_child import checksum, measure, ours
from tests.benchmarks.loader_data import BATCH_SIZE, spec_over, write_rows
from tests.benchmarks.loader_session import EMBEDDING_DIM, model_spec
from tests.benchmarks.peers.pandas_loader import epochs_over
from tests.benchmarks.report import BenchmarkError, Run, ratio_of

SURVEY = {
    "ours": {"rows_per_s": 900.0, "checksum": [4, 1]},
    "ray_data": {"rows_per_s": 30.0, "checksum": [4, 1]},
    "pandas_frames": {"rows_per_s": 300.0, "checksum": [4, 1]},
    "ray_data_unshuffled": {"rows_per_s": 500.0, "checksum": [4, 1]},
    "pandas_rows": {"rows_per_s": 2.0, "checksum": [1, 1]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    assert write_rows(folder, 2, 2 * BATCH_SIZE) == 4 * BATCH_SIZE
    return folder


def test_ours_and_pandas_make_the_same_tensors(folder):
    wanted = checksum(ours(folder))
    assert wanted[0] == 4 * BATCH_SIZE
    variants = epochs_over(folder)
    assert checksum(variants["pandas_frames"]) == wanted
    assert checksum(variants["pandas_rows"])[0] == 2 * BATCH_SIZE, "one file, row by row"


def test_every_batch_of_the_clock_is_counted(folder):
    found = measure(ours(folder))
    assert found["num_batches"] == 4
    assert found["rows_per_s"] == pytest.approx(4 * BATCH_SIZE / found["wall_s"])


def test_the_session_trains_a_larger_model_on_the_same_rows(folder):
    spec = model_spec(folder)
    assert {table.embedding_dim for table in spec.embedding_tables} == {EMBEDDING_DIM}
    assert spec.features == spec_over(folder).features


def test_other_tensors_and_missing_rows_stop_the_benchmark():
    check_sums(SURVEY, 4)
    with pytest.raises(BenchmarkError, match="pandas_frames made other tensors"):
        check_sums(SURVEY | {"pandas_frames": {"checksum": [4, 2]}}, 4)
    with pytest.raises(BenchmarkError, match="batches of 4 rows, not 5"):
        check_sums(SURVEY, 5)


def test_the_ratio_is_against_the_fastest_peer_that_does_the_same():
    assert best_peer(SURVEY) == "pandas_frames"
    assert speed_goal("pandas_frames").peer_name == "DataLoader over pandas frames"
    assert [row["ours is faster"] for row in rows_of(SURVEY)][:2] == ["1.00 times", "30.00 times"]


def test_the_wait_is_a_share_of_the_step():
    runs = [Run(0, "ours", {"rows_per_s": 9.0}), Run(0, "peer", {"rows_per_s": 3.0})]
    found = with_waits(runs, [{"wait_s": 0.01, "step_s": 0.5}])
    assert ratio_of(WAIT_GOAL, found)["value"] == pytest.approx(0.02)
    assert ratio_of(speed_goal("pandas_frames"), found)["value"] == 3.0

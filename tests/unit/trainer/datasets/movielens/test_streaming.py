"""Preparing in many units: the rows of one unit, mixed users, going on after an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.harness.files import digest
from tests.unit.trainer.datasets.movielens.test_features import TIMED, last_of_all
from trainer.data.manifest import load_manifest
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.datasets.movielens.rows import COLUMN_TYPES
from trainer.datasets.movielens.statistics import Moments, find_cut, mark_validation

IN_UNITS = MovieLensOptions(unit_rows=300, num_partitions=5, row_group_rows=64)


def rows_of(out: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(out / split / "*.parquet")


def copied(csv_folder: Path, to: Path, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Path:
    """A copy of the csv folder whose ratings went through `change`."""
    shutil.copytree(csv_folder, to)
    change(pl.read_csv(csv_folder / "ratings.csv")).write_csv(to / "ratings.csv")
    return to


@pytest.fixture(scope="module")
def whole(csv_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare_movielens(csv_folder, out, options=IN_UNITS)
    return out


@pytest.mark.parametrize("split", ["per_user", "global"])
def test_many_units_give_the_rows_of_one(csv_folder, tmp_path, split):
    options = IN_UNITS.model_copy(update={"split": split})
    at_once = options.model_copy(update={"unit_rows": 10**6})
    one = prepare_movielens(csv_folder, tmp_path / "one", options=at_once)
    many = prepare_movielens(csv_folder, tmp_path / "many", options=options)
    assert many.statistics == pytest.approx(one.statistics)
    assert (many.vocab_sizes, many.counts) == (one.vocab_sizes, one.counts)
    for part in ("train", "validation"):
        key = ["user_id", "timestamp", "movie_id"]
        frames = [rows_of(tmp_path / out, part).sort(key) for out in ("one", "many")]
        assert_frame_equal(*frames, rel_tol=1e-5, abs_tol=1e-5)


def test_the_order_of_the_lines_does_not_matter(csv_folder, whole, tmp_path):
    source = copied(
        csv_folder, tmp_path / "csv", lambda rows: rows.sample(fraction=1, shuffle=True, seed=1)
    )
    prepare_movielens(source, tmp_path / "out", options=IN_UNITS)
    assert digest(tmp_path / "out") == digest(whole)


def test_later_stars_change_no_feature_of_earlier_rows(csv_folder, whole, tmp_path):
    since = pl.read_csv(csv_folder / "ratings.csv")["timestamp"].median()

    # A swap among training rows keeps the one thing fitted on all stars: their moments.
    def swap_later(ratings: pl.DataFrame) -> pl.DataFrame:
        ratings = ratings.sort("userId", "timestamp", "movieId")
        held_out = mark_validation(ratings["userId"].to_numpy(), IN_UNITS.validation_fraction)
        movable = (ratings["timestamp"] >= since).to_numpy() & ~held_out
        stars = ratings["rating"].to_numpy().copy()
        stars[movable] = np.random.default_rng(0).permutation(stars[movable])
        return ratings.with_columns(rating=pl.Series(stars))

    prepare_movielens(
        copied(csv_folder, tmp_path / "csv", swap_later), tmp_path / "out", options=IN_UNITS
    )
    frames = [
        pl.concat([rows_of(out, part) for part in ("train", "validation")]).sort(
            "user_id", "timestamp", "movie_id"
        )
        for out in (whole, tmp_path / "out")
    ]
    assert not frames[0].equals(frames[1])
    one, other = (frame.filter(pl.col("timestamp") <= since) for frame in frames)
    # What others say of a movie is from all of training.
    for name in COLUMN_TYPES.keys() - {"rating", "movie_others_mean", "movie_others_count"}:
        if COLUMN_TYPES[name] == "float32":
            assert one[name].to_list() == pytest.approx(other[name].to_list(), abs=1e-3), name
        else:
            assert one[name].to_list() == other[name].to_list(), name


def test_files_are_of_equal_size_and_their_users_are_mixed(whole):
    train = load_manifest(whole).splits["train"]
    sizes = [file.num_rows for file in train.files]
    assert len(sizes) == 5 and max(sizes) - min(sizes) <= 1
    assert all(file.num_row_groups == -(-file.num_rows // 64) for file in train.files)
    # Neighbours in a file share a user no more than chance has it.
    shared, expected = 0.0, 0.0
    for file in train.files:
        user = pl.read_parquet(whole / file.path)["user_id"].to_numpy()
        share = np.unique(user, return_counts=True)[1] / len(user)
        shared += float((user[1:] == user[:-1]).mean())
        expected += float((share**2).sum())
    assert shared < 1.5 * expected


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    csv_folder, whole, tmp_path, before_parts, killed_at
):
    with killed_at("result/", 4):
        prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert not (tmp_path / "out").exists()
    written: list[str] = []
    with before_parts(written.append):
        prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    num_files = sum(len(split.files) for split in load_manifest(whole).splits.values())
    files = [name for name in written if name.startswith("result/") and "/part-" in name]
    assert len(files) == num_files - 3
    assert digest(tmp_path / "out") == digest(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_input_starts_anew(csv_folder, tmp_path, killed_at):
    source = shutil.copytree(csv_folder, tmp_path / "csv")
    with killed_at("result/", 4):
        prepare_movielens(source, tmp_path / "out", options=IN_UNITS)
    ratings = pl.read_csv(source / "ratings.csv").with_columns(rating=pl.lit(3.0))
    ratings.write_csv(source / "ratings.csv")
    for out in ("out", "fresh"):
        prepare_movielens(source, tmp_path / out, options=IN_UNITS)
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


@given(TIMED, st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.integers(1, 4), st.integers(0, 40))
def test_a_cut_over_units_marks_what_a_sort_of_all_rows_would(events, fraction, num_units, scale):
    time = np.array([time << scale for _, time in events])
    units = np.array_split(time, num_units)
    cut = find_cut(lambda: units, int(len(events) * fraction))
    before = np.cumsum([0, *(int((unit == cut.time).sum()) for unit in units)])
    marks = [cut.mark(unit, before[number]) for number, unit in enumerate(units)]
    expected = last_of_all(time, fraction)
    assert np.concatenate(marks).tolist() == expected.tolist()


@given(st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=8), min_size=1))
def test_moments_of_parts_add_up_to_those_of_the_whole(parts):
    total = sum((Moments.of(np.array(part, dtype=float)) for part in parts), Moments())
    whole = Moments.of(np.array([value for part in parts for value in part], dtype=float))
    assert total.count == whole.count
    assert total.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-6)
    assert total.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-3)

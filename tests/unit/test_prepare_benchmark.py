"""The prepare benchmark: pandas does the same work, and its cost is scaled fairly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from tests.benchmarks import prepare_pandas
from tests.benchmarks.prepare import Cost, Settings, parse
from trainer.data.prepare.generate import generate_movielens
from trainer.data.prepare.movielens import prepare_movielens

LISTS = ["genres", "tokens", "history_movies", "history_liked", "history_disliked"]
NUMBERS = ["year", "movie_age", "movie_popularity", "movie_past_mean", "user_activity"]
OTHERS = ["movie_others_mean", "movie_others_count"]
LABELS = ["user_past_mean", "user_genre_past_mean", "rating", "user_mean", "user_scale"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "csv"
    generate_movielens(folder, num_ratings=3000, seed=4)
    # One rating at a time: at equal times pandas takes rows in order, and ours do not see another.
    path = folder / "ratings.csv"
    ratings = pl.read_csv(path).sort("timestamp")
    times = ratings["timestamp"].to_numpy() + np.arange(len(ratings))
    ratings.with_columns(timestamp=pl.Series(times)).write_csv(path)
    return folder


@pytest.fixture(scope="module")
def ours(source, tmp_path_factory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("prepare") / "ours"
    prepare_movielens(source, out)
    return comparable(out / "train" / "*.parquet", out / "validation" / "*.parquet")


def comparable(*patterns: Path) -> pd.DataFrame:
    frames = [pl.read_parquet(pattern) for pattern in patterns]
    held_out = [pl.lit(number).alias("part") for number in range(len(frames))]
    marked = [frame.with_columns(part) for frame, part in zip(frames, held_out, strict=True)]
    columns = marked[0].columns
    return pl.concat([f.select(columns) for f in marked]).sort("timestamp").to_pandas()


@pytest.mark.parametrize("style", ["published", "careful"])
def test_pandas_makes_the_columns_that_ours_makes(source, ours, tmp_path, style):
    prepare_pandas.prepare(source, tmp_path / "out", style=style)
    peer = comparable(tmp_path / "out" / "train.parquet", tmp_path / "out" / "validation.parquet")
    for column in ["part", "user_id", "movie_id", "timestamp"]:
        assert (peer[column] == ours[column]).all(), column
    for column in LISTS:
        assert [*map(list, peer[column])] == [*map(list, ours[column])], column
    for column in NUMBERS + OTHERS + LABELS:
        np.testing.assert_allclose(peer[column], ours[column], atol=2e-4, err_msg=column)
    for mine, theirs in zip(ours["history_ratings"], peer["history_ratings"], strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-5)


def test_what_a_process_begins_with_is_not_scaled():
    scaled = Cost(wall_s=2.0, peak_bytes=300, base_bytes=100).scaled(10)
    assert scaled == Cost(wall_s=20.0, peak_bytes=2100, base_bytes=100)
    assert scaled.values(40)["rows_per_s"] == pytest.approx(2.0)


def test_a_slice_cannot_be_larger_than_the_whole():
    assert Settings(ratings=10, slice_ratings=20).problem()
    assert Settings().problem() is None
    with pytest.raises(SystemExit):
        parse(["--ratings", "10", "--slice-ratings", "20"])
    assert parse(["--ratings", "50", "--slice-ratings", "20"]).settings.ratings == 50

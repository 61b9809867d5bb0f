"""The generator: format, skew, structure worth learning, same seed same bytes."""

from __future__ import annotations

import polars as pl
import pytest

from trainer.data.errors import OutputExistsError
from trainer.data.manifest import load_manifest
from trainer.data.prepare.generate import generate_movielens


@pytest.fixture(scope="module")
def ratings(tmp_path_factory) -> pl.DataFrame:
    folder = tmp_path_factory.mktemp("generate") / "csv"
    generate_movielens(folder, num_ratings=20_000, seed=1)
    return pl.read_csv(folder / "ratings.csv")


def test_every_rating_is_a_distinct_pair_in_half_stars(ratings):
    assert len(ratings) == 20_000
    assert ratings.select("userId", "movieId").is_duplicated().sum() == 0
    assert set(ratings["rating"].unique()) == {half / 2 for half in range(1, 11)}


def test_popularity_and_activity_are_skewed(ratings):
    for column, share in (("movieId", 0.3), ("userId", 0.25)):
        counts = ratings.group_by(column).len()["len"].sort(descending=True)
        top_tenth = counts.head(len(counts) // 10).sum()
        assert top_tenth / counts.sum() > share


def test_sizes_follow_the_real_small_set(ratings):
    assert ratings["userId"].n_unique() == pytest.approx(134, abs=10)
    assert ratings["movieId"].n_unique() > 1200


def test_users_rate_over_time(ratings):
    spans = ratings.group_by("userId").agg(pl.col("timestamp").n_unique(), pl.len())
    assert (spans["timestamp"] / spans["len"]).mean() > 0.95


@pytest.mark.parametrize("num_ratings", [1, 10, 300])
def test_small_sets_can_be_made(tmp_path, num_ratings):
    generate_movielens(tmp_path / "csv", num_ratings=num_ratings, seed=0)
    assert len(pl.read_csv(tmp_path / "csv" / "ratings.csv")) == num_ratings


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path):
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        generate_movielens(tmp_path / name, num_ratings=500, seed=seed)
    for file in ("ratings.csv", "movies.csv", "tags.csv"):
        one, two, three = ((tmp_path / n / file).read_bytes() for n in ("one", "two", "three"))
        assert one == two
        assert one != three


def test_the_bias_predictor_beats_the_global_mean(prepared):
    statistics = load_manifest(prepared).statistics
    assert (
        statistics["baseline_user_movie_bias_rmse"] < 0.97 * statistics["baseline_global_mean_rmse"]
    )


def test_bad_requests_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        generate_movielens(tmp_path / "csv", num_ratings=0, seed=0)
    generate_movielens(tmp_path / "csv", num_ratings=5, seed=0)
    with pytest.raises(OutputExistsError):
        generate_movielens(tmp_path / "csv", num_ratings=5, seed=0)

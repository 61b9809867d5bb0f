"""The generator: format, skew, structure worth learning, same seed same bytes."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from trainer.data.errors import OutputExistsError
from trainer.data.manifest import load_manifest
from trainer.data.prepare import generate
from trainer.data.prepare.generate import TEACHER_NAME, Sizes, generate_movielens
from trainer.data.prepare.movielens_teacher import NOISE_STD, StarsScore, observed_stars


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


def test_many_chunks_make_one_file_with_all_pairs_distinct(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_CHUNK_ROWS", 300)
    generate_movielens(tmp_path / "csv", num_ratings=5000, seed=2)
    ratings = pl.read_csv(tmp_path / "csv" / "ratings.csv")
    assert len(ratings) == 5000
    assert ratings.select("userId", "movieId").is_duplicated().sum() == 0
    assert ratings["userId"].is_sorted()
    tags = pl.read_csv(tmp_path / "csv" / "tags.csv")
    assert len(tags) == Sizes.of(5000).tags
    assert tags.join(ratings, on=["userId", "movieId"], how="anti").is_empty()


def test_sizes_beyond_the_small_set_lead_to_those_of_ml_32m():
    sizes = Sizes.of(32_000_204)
    assert sizes.users == pytest.approx(200_948, rel=0.1)
    assert sizes.movies == pytest.approx(87_585, rel=0.01)
    assert sizes.tags == pytest.approx(2_000_072, rel=0.05)


def test_the_irreducible_error_is_what_is_left_when_the_truth_is_known():
    rng = np.random.default_rng(0)
    expected = rng.normal(3.5, 0.8, 2000)
    score = StarsScore()
    score.add(expected, observed_stars(rng, expected))
    # The best predictor is the mean of the stars that the same truth gives again and again.
    draws = np.stack([observed_stars(rng, expected) for _ in range(400)])
    assert score.irreducible_rmse == pytest.approx(np.sqrt(draws.var(0).mean()), rel=0.01)
    assert score.measured_rmse == pytest.approx(score.irreducible_rmse, rel=0.05)
    # Clipping hides noise of extreme ratings, rounding adds a little to the others.
    assert 0.8 * NOISE_STD < score.irreducible_rmse < 1.1 * NOISE_STD


def test_the_teacher_is_written_and_below_simple_predictors(csv_folder, prepared):
    teacher = json.loads((csv_folder / TEACHER_NAME).read_text())
    assert teacher["sizes"]["ratings"] == 2000
    assert teacher["measured_rmse"] == pytest.approx(teacher["irreducible_rmse"], rel=0.1)
    statistics = load_manifest(prepared).statistics
    assert teacher["irreducible_rmse"] < 0.95 * statistics["baseline_user_movie_bias_rmse"]

"""The generator: format, skew, structure worth learning, same seed same bytes."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from trainer.data.manifest import load_manifest
from trainer.datasets.movielens import synthetic
from trainer.datasets.movielens.synthetic import (
    TEACHER_NAME,
    Sizes,
    generate_movielens,
    observed_stars,
    remaining_variance,
)
from trainer.errors import OutputExistsError


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path):
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        generate_movielens(tmp_path / name, num_ratings=500, seed=seed)
    for file in ("ratings.csv", "movies.csv", "tags.csv"):
        one, two, three = ((tmp_path / n / file).read_bytes() for n in ("one", "two", "three"))
        assert one == two
        assert one != three


def test_small_sets_can_be_made(tmp_path):
    for num_ratings in (1, 10, 300):
        generate_movielens(tmp_path / str(num_ratings), num_ratings=num_ratings, seed=0)
        assert len(pl.read_csv(tmp_path / str(num_ratings) / "ratings.csv")) == num_ratings
    with pytest.raises(OutputExistsError):
        generate_movielens(tmp_path / "1", num_ratings=5, seed=0)


def test_many_chunks_make_one_file_of_distinct_and_skewed_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "_CHUNK_ROWS", 300)
    generate_movielens(tmp_path / "csv", num_ratings=5000, seed=2)
    ratings = pl.read_csv(tmp_path / "csv" / "ratings.csv")
    assert len(ratings) == 5000
    assert ratings.select("userId", "movieId").is_duplicated().sum() == 0
    assert set(ratings["rating"].unique()) == {half / 2 for half in range(1, 11)}
    assert ratings["userId"].is_sorted()
    rated = ratings.group_by("movieId").len()["len"].sort(descending=True)
    assert rated.head(len(rated) // 10).sum() > 0.3 * rated.sum()
    tags = pl.read_csv(tmp_path / "csv" / "tags.csv")
    assert len(tags) == Sizes.of(5000).tags
    assert tags.join(ratings, on=["userId", "movieId"], how="anti").is_empty()


def test_sizes_beyond_the_small_set_lead_to_those_of_ml_32m():
    sizes = Sizes.of(32_000_204)
    assert sizes.users == pytest.approx(200_948, rel=0.1)
    assert sizes.movies == pytest.approx(87_585, rel=0.01)
    assert sizes.tags == pytest.approx(2_000_072, rel=0.05)


def test_the_irreducible_error_is_what_is_left_when_the_truth_is_known(csv_folder, prepared):
    rng = np.random.default_rng(0)
    expected = rng.normal(3.5, 0.8, 2000)
    # The best predictor is the mean of the stars that the same truth gives again and again.
    draws = np.stack([observed_stars(rng, expected) for _ in range(400)])
    assert remaining_variance(expected).mean() == pytest.approx(draws.var(0).mean(), rel=0.02)
    teacher = json.loads((csv_folder / TEACHER_NAME).read_text())
    assert teacher["sizes"]["ratings"] == 2000
    baselines = load_manifest(prepared).statistics
    bias_rmse = baselines["baseline_user_movie_bias_rmse"]
    assert teacher["irreducible_rmse"] < 0.95 * bias_rmse
    assert bias_rmse < 0.97 * baselines["baseline_global_mean_rmse"]

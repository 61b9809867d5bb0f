"""Preparing MovieLens folders: contents, no leaks, determinism, refusals."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from tests.conftest import REPO
from tests.unit.trainer.datasets.movielens.test_source import write_folder, write_tags
from tests.unit.trainer.datasets.movielens.test_streaming import copied, rows_of
from trainer.data.manifest import Manifest, load_manifest
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.errors import (
    BadValueError,
    ColumnError,
    CorruptFileError,
    SourceMissingError,
    TooFewRowsError,
)

REAL_DATA = REPO.parent / "shared" / "data" / "ml-latest-small"


def raw_ids(out: Path, name: str) -> dict[int, int]:
    return dict(pl.read_parquet(out / "vocab" / f"{name}.parquet").rows())


def file_hashes(manifest: Manifest, split: str) -> list[str]:
    return [file.sha256 for file in manifest.splits[split].files]


def residual(
    rating: tuple[int, int, float], own: list[tuple[int, int, float]], global_mean: float
) -> float:
    """Stars of a rating of `own` (time, movie, stars) minus the mean of those before it."""
    before = [stars for time, _, stars in own if time < rating[0]]
    return rating[2] - (sum(before) + 5 * global_mean) / (len(before) + 5)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """Two users, four movies; user 2 rates two movies at the same second."""
    folder = write_folder(tmp_path / "tiny")
    write_tags(folder, ["1,10,Heist fun,150\n", "1,20,heist,999\n", "2,30,Late,2500\n"])
    return folder


TINY_OPTIONS = MovieLensOptions(validation_fraction=0.25, min_token_count=1)


def test_every_rating_becomes_one_row_in_parts_that_follow_the_options(csv_folder, prepared):
    manifest = load_manifest(prepared)
    frames = {name: rows_of(prepared, name) for name in ("train", "validation")}
    assert {name: split.num_rows for name, split in manifest.splits.items()} == {
        name: len(frame) for name, frame in frames.items()
    }
    total = pl.concat(frames.values())
    source = pl.read_csv(csv_folder / "ratings.csv")
    assert len(total) == len(source)
    assert total["rating"].sum() == pytest.approx(source["rating"].sum())
    files = manifest.splits["train"].files
    assert [file.path for file in files] == [f"train/part-0000{i}.parquet" for i in range(3)]
    assert all(file.num_row_groups == -(-file.num_rows // 128) for file in files)


def test_histories_are_the_strictly_earlier_ratings_of_the_user(csv_folder, prepared):
    users, movies = raw_ids(prepared, "user_id"), raw_ids(prepared, "movie_id")
    index_of = {raw: index for index, raw in movies.items()}
    by_user: dict[int, list[tuple[int, int, float]]] = {}
    for user, movie, stars, time in pl.read_csv(csv_folder / "ratings.csv").rows():
        by_user.setdefault(user, []).append((time, movie, stars))
    global_mean = load_manifest(prepared).statistics["global_mean"]
    for split in ("train", "validation"):
        for row in rows_of(prepared, split).sample(150, seed=1).to_dicts():
            own = sorted(by_user[users[row["user_id"]]])
            earlier = [rating for rating in own if rating[0] < row["timestamp"]]
            ids = [index_of.get(movie, 0) for _, movie, _ in earlier]
            residuals = [residual(rating, own, global_mean) for rating in earlier]
            liked = [i for i, r in zip(ids, residuals, strict=True) if r > 0]
            disliked = [i for i, r in zip(ids, residuals, strict=True) if r < 0]
            assert row["history_movies"] == ids[-10:]
            assert row["history_ratings"] == pytest.approx(residuals[-10:], abs=1e-4)
            assert row["history_liked"] == liked[-10:]
            assert row["history_disliked"] == disliked[-10:]


@pytest.mark.parametrize("split", ["global", "per_user"])
def test_validation_ratings_change_nothing_that_is_trained_on(csv_folder, tmp_path, split):
    options = MovieLensOptions(split=split, num_partitions=2)
    before = prepare_movielens(csv_folder, tmp_path / "before", options=options)
    held_out = rows_of(tmp_path / "before", "validation")
    first_held_out = held_out["timestamp"].min()
    users = raw_ids(tmp_path / "before", "user_id")
    begins = {
        users.get(user): time
        for user, time in held_out.group_by("user_id").agg(pl.col("timestamp").min()).rows()
    }

    def turn_around(ratings: pl.DataFrame) -> pl.DataFrame:
        own = pl.col("userId").replace_strict(begins, default=10**12)
        late = pl.col("timestamp") > (pl.lit(first_held_out) if split == "global" else own)
        turned = pl.when(late).then(5.5 - pl.col("rating")).otherwise(pl.col("rating"))
        return ratings.with_columns(rating=turned)

    changed = copied(csv_folder, tmp_path / "changed", turn_around)
    after = prepare_movielens(changed, tmp_path / "after", options=options)
    assert file_hashes(before, "validation") != file_hashes(after, "validation")
    assert file_hashes(before, "train") == file_hashes(after, "train")
    assert before.vocab_sizes == after.vocab_sizes
    assert before.statistics["global_mean"] == after.statistics["global_mean"]


def test_only_tags_from_training_time_become_tokens(tiny, tmp_path):
    prepare_movielens(tiny, tmp_path / "out", options=TINY_OPTIONS)
    tokens = set(raw_ids(tmp_path / "out", "tokens").values())
    assert {"heist", "fun", "ocean's", "night"} <= tokens
    assert "2001" not in tokens
    # A movie that only validation has seen has no id.
    assert sorted(raw_ids(tmp_path / "out", "movie_id").values()) == [10, 20, 30]
    assert load_manifest(tmp_path / "out").vocab_sizes["history_liked"] == 4
    # User 1's validation begins at 400, so the tag at 999 leaves movie 20 without "heist".
    night = rows_of(tmp_path / "out", "train").filter(pl.col("movie_id") == 2)
    words = raw_ids(tmp_path / "out", "tokens")
    assert {words[token] for token in night["tokens"][0]} == {"night", "the"}


def test_missing_years_and_genres_are_neutral(tiny, tmp_path):
    prepare_movielens(tiny, tmp_path / "out", options=TINY_OPTIONS)
    untitled = rows_of(tmp_path / "out", "train").filter(pl.col("movie_id") == 3)
    statistics = load_manifest(tmp_path / "out").statistics
    for name in ("year", "movie_age"):
        assert untitled[name].to_list() == pytest.approx([statistics[f"{name}_mean"]] * 2)
    assert untitled["genres"].to_list() == [[], []]


def test_a_user_who_always_gives_the_same_stars_has_a_positive_scale(tiny, tmp_path):
    lines = ["userId,movieId,rating,timestamp", *(f"1,{m},3,{m}" for m in (10, 20, 30, 40))]
    (tiny / "ratings.csv").write_text("\n".join(lines) + "\n")
    prepare_movielens(tiny, tmp_path / "out", options=TINY_OPTIONS)
    assert (rows_of(tmp_path / "out", "train")["user_scale"] > 0).all()


def test_dense_columns_are_stored_as_they_are_with_their_moments_over_training(prepared):
    train, statistics = rows_of(prepared, "train"), load_manifest(prepared).statistics
    names = [name.removesuffix("_std") for name in statistics if name != "global_std"]
    names = [name for name in names if f"{name}_std" in statistics]
    assert len(names) == 9 and train["year"].is_between(1900, 2030).all()
    for name in names:
        assert train[name].mean() == pytest.approx(statistics[f"{name}_mean"], abs=1e-4)
        assert train[name].std(ddof=0) == pytest.approx(statistics[f"{name}_std"], rel=1e-4)


def test_a_fault_leaves_nothing_behind(tiny, tmp_path):
    with pytest.raises(TooFewRowsError, match="leave no validation"):
        prepare_movielens(tiny, tmp_path / "out", options=MovieLensOptions())
    (tiny / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,10,nine,100\n")
    with pytest.raises(BadValueError, match=r"ratings\.csv, line 2, column 'rating': 'nine'"):
        prepare_movielens(tiny, tmp_path / "out")
    with (tiny / "movies.csv").open("a") as file:
        file.write("20,Again (1999),Drama\n")
    with pytest.raises(BadValueError, match=r"movies\.csv, line 6, column 'movieId': 20"):
        prepare_movielens(tiny, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_missing_folder_file_or_column_is_named(tiny, tmp_path):
    with pytest.raises(SourceMissingError, match="not a folder"):
        prepare_movielens(tmp_path / "nowhere", tmp_path / "out")
    (tiny / "movies.csv").write_text("movieId,name,genres\n1,a,b\n")
    with pytest.raises(ColumnError, match="'title' is missing"):
        prepare_movielens(tiny, tmp_path / "out")
    (tiny / "movies.csv").unlink()
    with pytest.raises(SourceMissingError, match=r"movies\.csv"):
        prepare_movielens(tiny, tmp_path / "out")
    (tiny / "ratings.csv").write_text("")
    with pytest.raises(CorruptFileError, match="empty"):
        prepare_movielens(tiny, tmp_path / "out")


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"{REAL_DATA} is not on this machine")
def test_the_real_small_set_prepares_with_known_baselines(tmp_path):
    manifest = prepare_movielens(REAL_DATA, tmp_path / "out")
    assert sum(split.num_rows for split in manifest.splits.values()) == 100_004
    assert manifest.statistics["baseline_global_mean_rmse"] == pytest.approx(1.066, abs=0.005)
    assert manifest.statistics["baseline_user_movie_bias_rmse"] == pytest.approx(0.906, abs=0.01)

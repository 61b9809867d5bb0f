"""Rows of the quality benchmark: ml-latest-small, cut in three by time within each user.

The last tenth of each user's ratings is held out. What models are tuned to was found without it, on
the last tenth of the rest.

Prepared histories go up to the moment of a rating, those of held-out rows too, which the peers
cannot use: matrix factorisation knows the fitted ratings only. So that both know the same, all
held-out ratings of a user get one timestamp, just after the user's fitted ratings. No held-out
rating is then in the past of another one.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tests.benchmarks.report import BenchmarkError
from trainer.data.ragged import IntArray
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.datasets.movielens.statistics import mark_validation

SOURCE = Path(__file__).parents[3] / "shared" / "data" / "ml-latest-small"
HELD_OUT_FRACTION = 0.1
_FILES = ("ratings.csv", "movies.csv", "tags.csv")

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Stars:
    """n ratings: index of user and movie (int64), stars (float64), each of shape [n]."""

    user: IntArray
    movie: IntArray
    stars: FloatArray

    def __len__(self) -> int:
        return len(self.stars)


@dataclass(frozen=True)
class Fold:
    """Ratings to fit and ratings held out, for the peers; `prepared` is the folder for us.

    Indices are below `num_users` and `num_movies`, which count both parts.
    """

    fit: Stars
    held_out: Stars
    num_users: int
    num_movies: int
    prepared: Path


def read_ratings(source: Path) -> pl.DataFrame:
    """ratings.csv of `source`, sorted by user, time and movie; `BenchmarkError` where it lacks."""
    missing = [name for name in _FILES if not (source / name).is_file()]
    if missing:
        raise BenchmarkError(
            f"{source} lacks {', '.join(missing)}; the quality benchmark needs ml-latest-small "
            "there, or its folder named with --source"
        )
    return pl.read_csv(source / "ratings.csv").sort("userId", "timestamp", "movieId")


def held_out_rows(ratings: pl.DataFrame) -> NDArray[np.bool_]:
    """Which of the sorted ratings are each user's last tenth, [n]."""
    return mark_validation(ratings["userId"].to_numpy(), HELD_OUT_FRACTION)


def make_fold(source: Path, ratings: pl.DataFrame, folder: Path, options: MovieLensOptions) -> Fold:
    """Prepare `ratings` (sorted) in the new `folder`, their last tenth per user held out.

    Movies and tags come from `source`; `options` other than the split are the caller's.
    """
    held_out = held_out_rows(ratings)
    csv, prepared = folder / "csv", folder / "prepared"
    csv.mkdir(parents=True)
    hide_from_each_other(ratings, held_out).write_csv(csv / "ratings.csv")
    for name in _FILES[1:]:
        shutil.copy(source / name, csv / name)
    cut = {"split": "per_user", "validation_fraction": HELD_OUT_FRACTION}
    manifest = prepare_movielens(csv, prepared, options=options.model_copy(update=cut))
    if manifest.splits["validation"].num_rows != held_out.sum():
        raise BenchmarkError(f"{prepared} holds other rows out than the peers' split")
    stars = _stars_of(ratings)
    return Fold(
        fit=_rows_of(stars, ~held_out),
        held_out=_rows_of(stars, held_out),
        num_users=int(stars.user.max()) + 1,
        num_movies=int(stars.movie.max()) + 1,
        prepared=prepared,
    )


def hide_from_each_other(ratings: pl.DataFrame, held_out: NDArray[np.bool_]) -> pl.DataFrame:
    """`ratings` with one timestamp for all held-out rows of a user, after the user's others."""
    time, is_held_out = pl.col("timestamp"), pl.col("is_held_out")
    after_fitted = time.filter(~is_held_out).max().over("userId") + 1
    first = time.filter(is_held_out).min().over("userId")
    moment = pl.when(is_held_out).then(pl.max_horizontal(first, after_fitted)).otherwise(time)
    marked = ratings.with_columns(pl.Series("is_held_out", held_out))
    return marked.with_columns(moment.alias("timestamp")).drop("is_held_out")


def _stars_of(ratings: pl.DataFrame) -> Stars:
    _, user = np.unique(ratings["userId"].to_numpy(), return_inverse=True)
    _, movie = np.unique(ratings["movieId"].to_numpy(), return_inverse=True)
    return Stars(user, movie, ratings["rating"].to_numpy().astype(np.float64))


def _rows_of(stars: Stars, chosen: NDArray[np.bool_]) -> Stars:
    return Stars(stars.user[chosen], stars.movie[chosen], stars.stars[chosen])

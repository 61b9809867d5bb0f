"""MovieLens csv folders (ml-latest-small, ml-latest, ml-32m) to a prepared Parquet folder.

One row per rating. The model learns `(rating - user_mean) / user_scale`. Nothing leaks: what is
fitted (vocabularies, label statistics, tags) comes from the training part only, and what a feature
counts or averages (histories, popularity, past means) from rows with a strictly smaller timestamp.

Per-rating numbers stay in memory (about 100 bytes a rating); the lists, which are much larger, are
gathered one output part at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from rich.console import Console
from rich.progress import Progress

from trainer.data.errors import BadValueError, SourceMissingError, TooFewRowsError
from trainer.data.manifest import Manifest, write_manifest
from trainer.data.prepare.catalogue import describe_movies, encode_catalogue
from trainer.data.prepare.csv_reader import integer, number, read_csv, text
from trainer.data.prepare.past import Ratings
from trainer.data.prepare.rating_rows import COLUMN_TYPES, RowBuilder
from trainer.data.prepare.statistics import bias_baseline_rmse, fit_users, rmse
from trainer.data.prepare.timeline import Split, mark_validation
from trainer.data.prepare.vocabulary import Vocabulary, fit_vocabulary
from trainer.data.prepare.writer import staged_folder, write_split

_NO_TAGS = pl.DataFrame(
    schema={"userId": pl.Int64, "movieId": pl.Int64, "tag": pl.String, "timestamp": pl.Int64}
)
_SHUFFLE_SEED = 0


class MovieLensOptions(BaseModel):
    """How to prepare. `validation_fraction` is of all ratings, or of each user's, by time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Split = "per_user"
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    history_length: PositiveInt = 10
    min_token_count: PositiveInt = 2
    max_tokens: PositiveInt = 20_000
    max_tokens_per_movie: PositiveInt = 24
    num_partitions: PositiveInt = 4
    row_group_rows: PositiveInt = 8192


def prepare_movielens(
    source: Path,
    out: Path,
    *,
    options: MovieLensOptions | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Read the csv folder `source` and write the prepared folder `out`, all or nothing.

    Shows progress on stderr where that is a terminal. Raises a `DataError` that names file, line
    and column of a bad value.
    """
    options = options or MovieLensOptions()
    with (
        staged_folder(out, overwrite=overwrite) as folder,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        steps = progress.add_task("reading csv files", total=4)
        ratings, movies, tags = _read_source(source, options)
        progress.update(steps, advance=1, description="fitting vocabularies")
        vocabularies, builder = _fit(ratings, movies, tags, options)
        progress.update(steps, advance=1, description="measuring baselines")
        statistics = _statistics(ratings, builder)
        progress.update(steps, advance=1, description="writing Parquet")
        manifest = _write(folder, vocabularies, builder, options, statistics)
        progress.update(steps, advance=1, description="done")
    return manifest


def _read_source(
    source: Path, options: MovieLensOptions
) -> tuple[Ratings, pl.DataFrame, pl.DataFrame]:
    if not source.is_dir():
        raise SourceMissingError(
            f"{source} is not a folder; name the folder that holds ratings.csv"
        )
    frame = read_csv(
        source / "ratings.csv",
        [
            integer("userId"),
            integer("movieId"),
            number("rating", above=0, at_most=5),
            integer("timestamp"),
        ],
    ).sort("userId", "timestamp", "movieId")
    movies = _read_movies(source / "movies.csv")
    user, timestamp = frame["userId"].to_numpy(), frame["timestamp"].to_numpy()
    is_validation = mark_validation(user, timestamp, options.split, options.validation_fraction)
    if not is_validation.any() or is_validation.all():
        raise TooFewRowsError(
            f"{source / 'ratings.csv'}: {len(frame)} ratings leave no validation or no training "
            f"rows with split {options.split!r} at fraction {options.validation_fraction:g}; "
            "use more ratings, another fraction or another split"
        )
    ratings = Ratings(
        user=user,
        movie=frame["movieId"].to_numpy(),
        stars=frame["rating"].to_numpy(),
        timestamp=timestamp,
        is_validation=is_validation,
    )
    return ratings, movies, _training_tags(_read_tags(source / "tags.csv"), ratings, options.split)


def _read_movies(path: Path) -> pl.DataFrame:
    movies = read_csv(path, [integer("movieId"), text("title"), text("genres")])
    repeated = movies["movieId"].is_duplicated().arg_true()
    if len(repeated):
        last = repeated[-1]
        movie_id = movies["movieId"][last]
        raise BadValueError(
            path, f"line {last + 2}", "movieId", movie_id, "unique: it stands twice"
        )
    return movies


def _read_tags(path: Path) -> pl.DataFrame:
    if not path.exists():
        return _NO_TAGS
    columns = [integer("userId"), integer("movieId"), text("tag"), integer("timestamp")]
    return read_csv(path, columns)


def _training_tags(tags: pl.DataFrame, ratings: Ratings, split: Split) -> pl.DataFrame:
    """Tags given before validation began: for everybody, or for the tag's own user."""
    held_out = pl.DataFrame(
        {
            "userId": ratings.user[ratings.is_validation],
            "begin": ratings.timestamp[ratings.is_validation],
        }
    )
    if split == "global":
        return tags.filter(pl.col("timestamp") < held_out["begin"].min())
    begins = held_out.group_by("userId").agg(pl.col("begin").min())
    dated = tags.join(begins, on="userId", how="left", maintain_order="left")
    return dated.filter(pl.col("begin").is_null() | (pl.col("timestamp") < pl.col("begin"))).drop(
        "begin"
    )


def _fit(
    ratings: Ratings, movies: pl.DataFrame, tags: pl.DataFrame, options: MovieLensOptions
) -> tuple[dict[str, Vocabulary], RowBuilder]:
    training = ~ratings.is_validation
    users = fit_vocabulary("user_id", pl.Series(ratings.user[training]))
    rated = fit_vocabulary("movie_id", pl.Series(ratings.movie[training]))
    described = describe_movies(
        movies, tags, pl.Series("movieId", ratings.movie), options.max_tokens_per_movie
    )
    seen = described.filter(pl.col("movieId").is_in(rated.values.implode()))
    genres = fit_vocabulary("genres", seen["genres"].explode().drop_nulls())
    tokens = fit_vocabulary(
        "tokens",
        seen["tokens"].explode().drop_nulls(),
        min_count=options.min_token_count,
        max_size=options.max_tokens,
    )
    user_index = users.encode(pl.Series(ratings.user))
    builder = RowBuilder(
        ratings=ratings,
        user_index=user_index,
        movie_index=rated.encode(pl.Series(ratings.movie)),
        catalogue=encode_catalogue(described, genres, tokens),
        users=fit_users(user_index[training], ratings.stars[training], users.size),
        history_length=options.history_length,
    )
    return {v.name: v for v in (users, rated, genres, tokens)}, builder


def _statistics(ratings: Ratings, builder: RowBuilder) -> dict[str, float]:
    held_out = ratings.stars[ratings.is_validation]
    return {
        "global_mean": builder.users.global_mean,
        "global_std": builder.users.global_std,
        "baseline_global_mean_rmse": rmse(held_out - builder.users.global_mean),
        "baseline_user_movie_bias_rmse": bias_baseline_rmse(
            builder.user_index, builder.movie_index, ratings.stars, ratings.is_validation
        ),
    }


def _write(
    folder: Path,
    vocabularies: dict[str, Vocabulary],
    builder: RowBuilder,
    options: MovieLensOptions,
    statistics: dict[str, float],
) -> Manifest:
    for vocabulary in vocabularies.values():
        vocabulary.write(folder)
    sizes = {name: vocabulary.size for name, vocabulary in vocabularies.items()}
    movies = sizes["movie_id"]
    histories = {name: movies for name in COLUMN_TYPES if name.startswith("history_")}
    del histories["history_ratings"]
    layout: dict[str, Any] = {
        "num_partitions": options.num_partitions,
        "row_group_rows": options.row_group_rows,
    }
    is_validation = builder.ratings.is_validation
    # Loaders shuffle within windows of neighbouring rows, so neighbours must not share a user.
    training = np.random.default_rng(_SHUFFLE_SEED).permutation(np.flatnonzero(~is_validation))
    manifest = Manifest(
        source="movielens",
        splits={
            "train": write_split(folder, "train", training, builder.build, **layout),
            "validation": write_split(
                folder, "validation", np.flatnonzero(is_validation), builder.build, **layout
            ),
        },
        columns=COLUMN_TYPES,
        vocab_sizes={**sizes, **histories},
        options=options.model_dump(),
        statistics=statistics,
    )
    write_manifest(folder, manifest)
    return manifest

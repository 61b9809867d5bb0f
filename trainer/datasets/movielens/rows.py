"""Prepared rows of units of users: dense features, lists, labels.

Histories of movies need ratings of all units, so they are exchanged through files: every unit
writes its rows in the order of movies; then movies are cut into ranges of about `range_rows`
ratings, and for each range the rows of all units are gathered, their histories computed in the
order of time, and written in the same order for the units to read back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.ragged import IntArray, offsets_of, ragged_positions
from trainer.datasets.io.journal import Advance, Facts
from trainer.datasets.io.staging import (
    Columns,
    Staging,
    columns_of,
    gather_rows,
    map_columns,
    write_columns,
)
from trainer.datasets.movielens.features import (
    MovieFolds,
    MovieHistory,
    UserHistory,
    fold_of,
    genre_affinity,
    history_scale,
    movie_history,
    user_history,
)
from trainer.datasets.movielens.options import MovieLensOptions
from trainer.datasets.movielens.source import Catalogue
from trainer.datasets.movielens.statistics import (
    Moments,
    Ratings,
    RatingStatistics,
    Units,
)

COLUMN_TYPES = {
    "user_id": "int64",
    "movie_id": "int64",
    "genres": "list<int64>",
    "tokens": "list<int64>",
    "history_movies": "list<int64>",
    "history_ratings": "list<float32>",
    "history_liked": "list<int64>",
    "history_disliked": "list<int64>",
    "year": "float32",
    "movie_age": "float32",
    "movie_popularity": "float32",
    "movie_past_mean": "float32",
    "movie_others_mean": "float32",
    "movie_others_count": "float32",
    "user_activity": "float32",
    "user_past_mean": "float32",
    "user_genre_past_mean": "float32",
    "rating": "float32",
    "user_mean": "float32",
    "user_scale": "float32",
    "timestamp": "int64",
}
_ARROW_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "list<int64>": pa.list_(pa.int64()),
    "list<float32>": pa.list_(pa.float32()),
}
SCHEMA = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in COLUMN_TYPES.items()])
_SECONDS_PER_YEAR = 365.25 * 86400
_UNIX_EPOCH_YEAR = 1970


def dense_of_users(
    ratings: Ratings, history: UserHistory, catalogue: Catalogue
) -> dict[str, NDArray]:
    """Dense features that need a user's ratings only; NaN where the movie's year is unknown.

    `ratings.movie` holds positions in `catalogue`.
    """
    year = catalogue.year[ratings.movie]
    rated_in = _UNIX_EPOCH_YEAR + ratings.timestamp / _SECONDS_PER_YEAR
    genres = catalogue.genres.take(ratings.movie)
    return {
        "year": year.astype(np.float64),
        "movie_age": np.log1p(np.maximum(rated_in - year, 0)),
        "user_activity": np.log1p(history.user_count),
        "user_past_mean": history.user_mean,
        "user_genre_past_mean": genre_affinity(history, ratings.timestamp, genres),
    }


def dense_of_movies(history: MovieHistory) -> dict[str, NDArray]:
    """Dense features that need a movie's ratings by anybody."""
    return {"movie_popularity": np.log1p(history.count), "movie_past_mean": history.mean}


@dataclass(frozen=True)
class RowBuilder:
    """Builds Arrow tables of the prepared rows of some users.

    `ratings.movie` holds positions in `catalogue`. All arrays have one entry per rating:
    `movie_index` (of the vocabulary) and the columns that are no lists, `numbers`.
    """

    ratings: Ratings
    history: UserHistory
    movie_index: IntArray
    catalogue: Catalogue
    numbers: Mapping[str, NDArray]
    history_length: int

    def build(self, rows: IntArray) -> pa.Table:
        columns = {name: values[rows] for name, values in self.numbers.items()}
        return pa.table(columns | self._lists(rows), schema=SCHEMA)

    @cached_property
    def _residual(self) -> NDArray[np.float32]:
        return self.history.residual.astype(np.float32)

    @cached_property
    def _chosen(self) -> dict[str, tuple[IntArray, IntArray]]:
        """By column: movies of the rows it is about, and how many come before each row [n + 1]."""
        meant = {"history_liked": self._residual > 0, "history_disliked": self._residual < 0}
        return {
            name: (self.movie_index[rows], np.r_[0, np.cumsum(rows)])
            for name, rows in meant.items()
        }

    def _lists(self, rows: IntArray) -> dict[str, pa.ListArray]:
        movies = self.ratings.movie[rows]
        starts, ends = self.history.starts[rows], self.history.ends[rows]
        recent = np.maximum(starts, ends - self.history_length)
        found = {
            "genres": self.catalogue.genres.take(movies),
            "tokens": self.catalogue.tokens.take(movies),
            "history_movies": _lists_at(self.movie_index, recent, ends),
            "history_ratings": _lists_at(self._residual, recent, ends),
        }
        for name, (values, before) in self._chosen.items():
            first, last = before[starts], before[ends]
            found[name] = _lists_at(values, np.maximum(first, last - self.history_length), last)
        return found


def _lists_at(values: NDArray, starts: IntArray, ends: IntArray) -> pa.ListArray:
    """Lists `values[starts[i]:ends[i]]` for every i."""
    lengths = ends - starts
    offsets = offsets_of(lengths).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values[ragged_positions(starts, lengths)])


def cut_movies(rows_of_movie: IntArray, range_rows: int) -> IntArray:
    """First movie number of each range of about `range_rows` rows, and the number of movies."""
    num_ranges = max(1, round(int(rows_of_movie.sum()) / range_rows))
    before = np.cumsum(rows_of_movie) - rows_of_movie
    starts = np.searchsorted(before, np.arange(num_ranges) * range_rows)
    starts[0] = 0
    return np.unique(np.append(starts, len(rows_of_movie)))


class MovieExchange:
    """Histories of movies, written once and read unit by unit.

    `moments` are those of the training rows' features.
    """

    def __init__(
        self, by_movie: Sequence[Path], bounds: IntArray, staging: Staging, advance: Advance
    ) -> None:
        """Compute the histories, range by range.

        `by_movie` are the files of `Fitted.write_by_movie`, `bounds` those of `cut_movies`.
        """
        self._by_movie = by_movie
        # Row of unit u where range m begins: [units, ranges + 1].
        self._cuts = np.array(
            [np.searchsorted(map_columns(path)["movie"], bounds) for path in by_movie]
        )
        self._histories: list[Path] = []
        self.moments = defaultdict[str, Moments](Moments)
        for number in range(self._cuts.shape[1] - 1):
            make = partial(self._compute_range, number=number)
            path, facts = staging.scratch(f"movie_past/{number:05d}.arrow", make)
            self._histories.append(path)
            for name, moments in facts.items():
                self.moments[name] += Moments(**moments)
            advance(float(np.diff(self._cuts[:, number : number + 2]).sum()))

    def history(self, unit: int) -> MovieHistory:
        """Histories of the movies of a unit's rows, in the unit's own order."""
        order = map_columns(self._by_movie[unit])["order"]
        count, mean = np.empty(len(order)), np.empty(len(order))
        for number, path in enumerate(self._histories):
            begin, end = self._cuts[unit, number : number + 2]
            histories = map_columns(path)
            # The rows of the units before this one come first.
            place = int((self._cuts[:unit, number + 1] - self._cuts[:unit, number]).sum())
            count[order[begin:end]] = histories["count"][place : place + end - begin]
            mean[order[begin:end]] = histories["mean"][place : place + end - begin]
        return MovieHistory(count, mean)

    def _compute_range(self, path: Path, number: int) -> Facts:
        names = ("movie", "timestamp", "residual", "is_training")
        rows = columns_of(
            gather_rows(self._by_movie, self._cuts[:, number : number + 2]).select(names)
        )
        is_training = rows["is_training"].astype(bool)
        history = movie_history(rows["movie"], rows["timestamp"], rows["residual"], is_training)
        write_columns(
            path, {"count": history.count.astype(np.int32), "mean": history.mean.astype(np.float32)}
        )
        return {
            name: asdict(Moments.of(values[is_training]))
            for name, values in dense_of_movies(history).items()
        }


SplitName = Literal["train", "validation"]
_SHUFFLE_SEED = 0
# A file may begin in one unit and end in the next.
_UNITS_IN_MEMORY = 2


@dataclass(frozen=True)
class Fitted:
    """What was fitted on the training part; the indices map numbers to those of vocabularies."""

    units: Units
    statistics: RatingStatistics
    catalogue: Catalogue
    user_index: IntArray
    movie_index: IntArray
    options: MovieLensOptions

    def user_history(self, ratings: Ratings) -> UserHistory:
        return user_history(ratings, self.statistics.overall.mean)

    def write_by_movie(self, path: Path, unit: int) -> Facts:
        """Put a unit's rows aside by movie; gives moments of its users' dense features."""
        ratings = self.units.load(unit)
        history = self.user_history(ratings)
        training = ~ratings.is_validation
        order = np.argsort(ratings.movie, kind="stable")
        columns: Columns = {
            "order": order.astype(np.int32),
            "movie": ratings.movie[order],
            "timestamp": ratings.timestamp[order],
            "residual": history.residual[order].astype(np.float32),
            "is_training": training[order].astype(np.uint8),
            "fold": fold_of(ratings.user[order]),
        }
        write_columns(path, columns)
        dense = dense_of_users(ratings, history, self.catalogue)
        return {name: vars(Moments.of(values[training])) for name, values in dense.items()}


@dataclass(frozen=True)
class UnitRows:
    """Prepared rows of any unit, in the order in which they are written.

    `moments` are those of each dense feature over the training rows.
    """

    fitted: Fitted
    exchange: MovieExchange
    folds: MovieFolds
    moments: Mapping[str, Moments]

    @property
    def statistics(self) -> dict[str, float]:
        """By which a spec's `transform: standardise` shifts and scales each dense feature."""
        found: dict[str, float] = {}
        for name, moments in sorted(self.moments.items()):
            found |= {f"{name}_mean": moments.mean, f"{name}_std": moments.std}
        return found

    @cached_property
    def _unit(self) -> Callable[[int], tuple[RowBuilder, dict[SplitName, IntArray]]]:
        return lru_cache(_UNITS_IN_MEMORY)(self._make_unit)

    def build(self, split: SplitName, unit: int, rows: slice) -> pa.Table:
        """Some rows of the part of a unit that is in `split`."""
        builder, orders = self._unit(unit)
        return builder.build(orders[split][rows])

    def _make_unit(self, unit: int) -> tuple[RowBuilder, dict[SplitName, IntArray]]:
        fitted = self.fitted
        ratings = fitted.units.load(unit)
        history = fitted.user_history(ratings)
        scale = history_scale(ratings, history, fitted.statistics.overall)
        dense = dense_of_users(ratings, history, fitted.catalogue)
        dense |= dense_of_movies(self.exchange.history(unit))
        dense |= self.folds.dense(ratings.movie, fold_of(ratings.user))
        movie_index = fitted.movie_index[ratings.movie]
        numbers: dict[str, NDArray] = {
            "user_id": fitted.user_index[ratings.user],
            "movie_id": movie_index,
            **{
                name: np.where(np.isnan(values), self.moments[name].mean, values)
                for name, values in dense.items()
            },
            "rating": ratings.stars.astype(np.float32),
            "user_mean": history.user_mean.astype(np.float32),
            "user_scale": scale.astype(np.float32),
            "timestamp": ratings.timestamp,
        }
        builder = RowBuilder(
            ratings, history, movie_index, fitted.catalogue, numbers, fitted.options.history_length
        )
        # Loaders shuffle within windows of neighbouring rows: neighbours must not share a user.
        random = np.random.default_rng([_SHUFFLE_SEED, unit])
        training = random.permutation(np.flatnonzero(~ratings.is_validation))
        return builder, {"train": training, "validation": np.flatnonzero(ratings.is_validation)}

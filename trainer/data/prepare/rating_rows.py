"""The columns of a prepared rating: numbers for all rows of a unit at once, lists for a few."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.past import MoviePast, Ratings, UserPast
from trainer.data.prepare.taste import look_back_at_kinds
from trainer.data.ragged import IntArray, Ragged, gather

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


def dense_of_users(ratings: Ratings, past: UserPast, catalogue: Catalogue) -> dict[str, NDArray]:
    """Dense features, before they are standardised, that need a user's ratings only.

    `ratings.movie` holds positions in `catalogue`.
    """
    year = catalogue.year[ratings.movie]
    rated_in = _UNIX_EPOCH_YEAR + ratings.timestamp / _SECONDS_PER_YEAR
    genres = catalogue.genres.take(ratings.movie)
    return {
        "year": year.astype(np.float64),
        "movie_age": np.log1p(np.maximum(rated_in - year, 0)),
        "user_activity": np.log1p(past.user_count),
        "user_past_mean": past.user_mean,
        "user_genre_past_mean": look_back_at_kinds(past, ratings.timestamp, genres),
    }


def dense_of_movies(past: MoviePast) -> dict[str, NDArray]:
    """Dense features, before they are standardised, that need a movie's ratings by anybody."""
    return {"movie_popularity": np.log1p(past.count), "movie_past_mean": past.mean}


@dataclass(frozen=True)
class RowBuilder:
    """Builds Arrow tables of the prepared rows of some users.

    `ratings.movie` holds positions in `catalogue`. All arrays have one entry per rating:
    `user_index`, `movie_index` (of the vocabularies), `offset` and `scale` (of the label, stars)
    and `dense` (standardised features).
    """

    ratings: Ratings
    past: UserPast
    user_index: IntArray
    movie_index: IntArray
    catalogue: Catalogue
    offset: NDArray
    scale: NDArray
    dense: dict[str, NDArray[np.float32]]
    history_length: int

    def build(self, rows: IntArray) -> pa.Table:
        """The prepared columns of `rows`, in that order."""
        columns = {name: pa.array(values[rows]) for name, values in self._numbers.items()}
        columns |= {name: _list_array(lists) for name, lists in self._lists(rows).items()}
        return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    @cached_property
    def _numbers(self) -> dict[str, NDArray]:
        return {
            "user_id": self.user_index,
            "movie_id": self.movie_index,
            **self.dense,
            "rating": self.ratings.stars.astype(np.float32),
            "user_mean": self.offset.astype(np.float32),
            "user_scale": self.scale.astype(np.float32),
            "timestamp": self.ratings.timestamp,
        }

    @cached_property
    def _residual(self) -> NDArray[np.float32]:
        return self.past.residual.astype(np.float32)

    @cached_property
    def _liked(self) -> _Chosen:
        return _Chosen.of(self._residual > 0, self.movie_index)

    @cached_property
    def _disliked(self) -> _Chosen:
        return _Chosen.of(self._residual < 0, self.movie_index)

    def _lists(self, rows: IntArray) -> dict[str, Ragged]:
        movies = self.ratings.movie[rows]
        starts, ends = self.past.starts[rows], self.past.ends[rows]
        recent = np.maximum(starts, ends - self.history_length)
        return {
            "genres": self.catalogue.genres.take(movies),
            "tokens": self.catalogue.tokens.take(movies),
            "history_movies": gather(self.movie_index, recent, ends),
            "history_ratings": gather(self._residual, recent, ends),
            "history_liked": self._liked.last(starts, ends, self.history_length),
            "history_disliked": self._disliked.last(starts, ends, self.history_length),
        }


@dataclass(frozen=True)
class _Chosen:
    """The values of some rows, and how many such rows come before each row [n + 1]."""

    values: IntArray
    before: IntArray

    @classmethod
    def of(cls, chosen: NDArray[np.bool_], values: IntArray) -> _Chosen:
        before = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(chosen, out=before[1:])
        return cls(values[chosen], before)

    def last(self, starts: IntArray, ends: IntArray, limit: int) -> Ragged:
        """The last `limit` chosen values of each range of rows, oldest first."""
        first, last = self.before[starts], self.before[ends]
        return gather(self.values, np.maximum(first, last - limit), last)


def _list_array(lists: Ragged) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values)
    )

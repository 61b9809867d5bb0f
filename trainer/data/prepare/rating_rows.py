"""The columns of a prepared rating: numbers for every row at once, lists for one part at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.statistics import FloatArray, UserStatistics, standardise
from trainer.data.prepare.timeline import earlier_ranges, range_sums
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
    "user_activity": "float32",
    "user_past_mean": "float32",
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
# Ratings that "as the average" is worth in a past mean.
_PAST_PRIOR_ROWS = 5.0


@dataclass(frozen=True)
class Ratings:
    """All ratings, sorted by (user, timestamp, movie); raw ids, Unix seconds, stars."""

    user: IntArray
    movie: IntArray
    stars: FloatArray
    timestamp: IntArray
    is_validation: NDArray[np.bool_]


@dataclass(frozen=True)
class RowBuilder:
    """Builds Arrow tables of prepared rows. `user_index`, `movie_index`: vocabulary indices [n]."""

    ratings: Ratings
    user_index: IntArray
    movie_index: IntArray
    catalogue: Catalogue
    users: UserStatistics
    history_length: int

    def build(self, rows: IntArray) -> pa.Table:
        """The prepared columns of `rows`, in that order."""
        columns = {name: pa.array(values[rows]) for name, values in self._numbers.items()}
        columns |= {name: _list_array(lists) for name, lists in self._lists(rows).items()}
        return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    @cached_property
    def normalised(self) -> NDArray[np.float32]:
        """What the model learns: (rating - user_mean) / user_scale, shape [n]."""
        mean, scale = self.users.mean[self.user_index], self.users.scale[self.user_index]
        return ((self.ratings.stars - mean) / scale).astype(np.float32)

    @cached_property
    def _earlier(self) -> tuple[IntArray, IntArray]:
        return earlier_ranges(self.ratings.user, self.ratings.timestamp)

    @cached_property
    def _movie_position(self) -> IntArray:
        return np.searchsorted(self.catalogue.ids, self.ratings.movie)

    @cached_property
    def _numbers(self) -> dict[str, NDArray]:
        training = ~self.ratings.is_validation
        starts, ends = self._earlier
        past = range_sums(self.normalised, starts, ends) / (ends - starts + _PAST_PRIOR_ROWS)
        year = self.catalogue.year[self._movie_position].astype(np.float64)
        rated_in = _UNIX_EPOCH_YEAR + self.ratings.timestamp / _SECONDS_PER_YEAR
        dense = {
            "year": year,
            "movie_age": np.log1p(np.maximum(rated_in - year, 0)),
            "movie_popularity": self._movie_popularity(),
            "movie_past_mean": self._movie_past_mean(),
            "user_activity": np.log1p(ends - starts),
            "user_past_mean": past,
        }
        return {
            "user_id": self.user_index,
            "movie_id": self.movie_index,
            **{name: standardise(values, training) for name, values in dense.items()},
            "rating": self.ratings.stars.astype(np.float32),
            "user_mean": self.users.mean[self.user_index].astype(np.float32),
            "user_scale": self.users.scale[self.user_index].astype(np.float32),
            "timestamp": self.ratings.timestamp,
        }

    def _movie_popularity(self) -> FloatArray:
        """Log of the movie's number of training ratings."""
        in_training = self.movie_index[~self.ratings.is_validation]
        counts = np.bincount(in_training, minlength=int(self.movie_index.max()) + 1)
        return np.log1p(counts[self.movie_index])

    def _movie_past_mean(self) -> FloatArray:
        """Damped mean of the movie's strictly earlier training ratings, each normalised."""
        order = np.lexsort((self.ratings.timestamp, self.ratings.movie))
        starts, ends = earlier_ranges(self.ratings.movie[order], self.ratings.timestamp[order])
        is_training = ~self.ratings.is_validation[order]
        total = range_sums(self.normalised[order] * is_training, starts, ends)
        count = range_sums(is_training, starts, ends)
        result = np.empty(len(order))
        result[order] = total / (count + _PAST_PRIOR_ROWS)
        return result

    def _lists(self, rows: IntArray) -> dict[str, Ragged]:
        movies = self._movie_position[rows]
        starts, ends = self._earlier[0][rows], self._earlier[1][rows]
        recent = np.maximum(starts, ends - self.history_length)
        return {
            "genres": self.catalogue.genres.take(movies),
            "tokens": self.catalogue.tokens.take(movies),
            "history_movies": gather(self.movie_index, recent, ends),
            "history_ratings": gather(self.normalised, recent, ends),
            "history_liked": self._recent_among(self.normalised > 0, starts, ends),
            "history_disliked": self._recent_among(self.normalised < 0, starts, ends),
        }

    def _recent_among(self, chosen: NDArray[np.bool_], starts: IntArray, ends: IntArray) -> Ragged:
        """The last `history_length` chosen movies of each range, oldest first."""
        before = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(chosen, out=before[1:])
        first, last = before[starts], before[ends]
        return gather(self.movie_index[chosen], np.maximum(first, last - self.history_length), last)


def _list_array(lists: Ragged) -> pa.Array:
    return pa.ListArray.from_arrays(
        pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values)
    )

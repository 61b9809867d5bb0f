"""The columns of a prepared rating: numbers for every row at once, lists for one part at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.past import Past, Ratings, look_back
from trainer.data.prepare.statistics import UserStatistics, standardise
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
    def _past(self) -> Past:
        return look_back(self.ratings, self.users.global_mean)

    @cached_property
    def _movie_position(self) -> IntArray:
        return np.searchsorted(self.catalogue.ids, self.ratings.movie)

    @cached_property
    def _numbers(self) -> dict[str, NDArray]:
        training = ~self.ratings.is_validation
        year = self.catalogue.year[self._movie_position].astype(np.float64)
        rated_in = _UNIX_EPOCH_YEAR + self.ratings.timestamp / _SECONDS_PER_YEAR
        dense = {
            "year": year,
            "movie_age": np.log1p(np.maximum(rated_in - year, 0)),
            "movie_popularity": np.log1p(self._past.movie_count),
            "movie_past_mean": self._past.movie_mean,
            "user_activity": np.log1p(self._past.user_count),
            "user_past_mean": self._past.user_mean,
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

    def _lists(self, rows: IntArray) -> dict[str, Ragged]:
        movies = self._movie_position[rows]
        starts, ends = self._past.starts[rows], self._past.ends[rows]
        residual = self._past.residual.astype(np.float32)
        recent = np.maximum(starts, ends - self.history_length)
        return {
            "genres": self.catalogue.genres.take(movies),
            "tokens": self.catalogue.tokens.take(movies),
            "history_movies": gather(self.movie_index, recent, ends),
            "history_ratings": gather(residual, recent, ends),
            "history_liked": self._recent_among(residual > 0, starts, ends),
            "history_disliked": self._recent_among(residual < 0, starts, ends),
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

"""Features of a rating that come from other ratings: of its user, of its movie, of its genres.

Histories and means come from rows with a strictly smaller timestamp, so no rating has a part in its
own features or in those of an earlier one. A mean over all of a user's ratings would: it holds the
row itself, and the differences from it sum to 0, so the history would give away the rest.

`MovieFolds` is the exception (target encoding out of fold, as in Pargent et al. 2022). Histories
know little of a movie that was rated early, though by the end of training much is known. So users
are dealt to a few folds, and a row sees the training ratings of its movie by users of the other
folds, early and late. Leave these features out of a spec to judge a model as of each moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.datasets.io.staging import Columns
from trainer.datasets.movielens.statistics import (
    FloatArray,
    Moments,
    Ratings,
    earlier_ranges,
    order_by,
    range_sums,
)

_NUM_FOLDS = 5
# Ratings that the prior is worth in a mean.
_PRIOR_ROWS = 5.0
_MIN_SCALE_RATIO = 0.25


def fold_of(user: IntArray) -> NDArray[np.uint8]:
    """Fold of each user number, shape [n]."""
    return (user % _NUM_FOLDS).astype(np.uint8)


class MovieFolds:
    """Sum of residuals and number of training ratings by each fold's users, of each movie."""

    def __init__(self, units: Iterable[Columns], num_movies: int) -> None:
        """`units` are those of `Fitted.write_by_movie`."""
        count = np.zeros(num_movies * _NUM_FOLDS, dtype=np.int64)
        total = np.zeros(num_movies * _NUM_FOLDS)
        for rows in units:
            is_training = rows["is_training"] > 0
            place = (rows["movie"].astype(np.int64) * _NUM_FOLDS + rows["fold"])[is_training]
            count += np.bincount(place, minlength=len(count))
            total += np.bincount(place, rows["residual"][is_training], minlength=len(total))
        self._count, self._total = (each.reshape(-1, _NUM_FOLDS) for each in (count, total))

    def dense(self, movie: IntArray, fold: NDArray[np.uint8]) -> dict[str, FloatArray]:
        count = self._count.sum(axis=1)[movie] - self._count[movie, fold]
        total = self._total.sum(axis=1)[movie] - self._total[movie, fold]
        return {
            "movie_others_mean": total / (count + _PRIOR_ROWS),
            "movie_others_count": np.log1p(count),
        }


@dataclass(frozen=True)
class UserHistory:
    """What came before each of n ratings by the same user; every array has shape [n].

    The earlier rows of the same user are `[starts, ends)`, and `user_mean` is the mean of their
    stars, leaning on the global one. `residual` is the rating's own stars minus `user_mean`: a
    feature of later rows only.
    """

    starts: IntArray
    ends: IntArray
    user_mean: FloatArray
    residual: FloatArray

    @property
    def user_count(self) -> IntArray:
        return self.ends - self.starts


@dataclass(frozen=True)
class MovieHistory:
    """Number, and mean residual leaning on 0, of the training ratings before each of n ratings."""

    count: FloatArray
    mean: FloatArray


def user_history(ratings: Ratings, global_mean: float) -> UserHistory:
    """Gather what each user did before; `global_mean` (stars) is for users without."""
    starts, ends = earlier_ranges(ratings.user, ratings.timestamp)
    total = range_sums(ratings.stars, starts, ends)
    user_mean = (total + _PRIOR_ROWS * global_mean) / (ends - starts + _PRIOR_ROWS)
    return UserHistory(starts, ends, user_mean, ratings.stars - user_mean)


def history_scale(ratings: Ratings, history: UserHistory, overall: Moments) -> FloatArray:
    """Spread of the user's stars before each rating, leaning on the overall one; above 0."""
    total = range_sums(ratings.stars, history.starts, history.ends)
    squares = range_sums(ratings.stars**2, history.starts, history.ends)
    count, mean = history.user_count, history.user_mean
    deviations = np.maximum(squares - 2 * mean * total + count * mean**2, 0)
    variance = (deviations + _PRIOR_ROWS * overall.std**2) / (count + _PRIOR_ROWS)
    # Somebody who always gives the same stars must not blow up the label of the first exception.
    return np.maximum(np.sqrt(variance), _MIN_SCALE_RATIO * overall.std)


def movie_history(
    movie: IntArray, timestamp: IntArray, residual: FloatArray, is_training: NDArray[np.bool_]
) -> MovieHistory:
    """Gather what came before of each movie; the rows may stand in any order."""
    order = order_by(movie, timestamp)
    starts, ends = earlier_ranges(movie[order], timestamp[order])
    count, mean = np.empty(len(order)), np.empty(len(order))
    count[order] = range_sums(is_training[order], starts, ends)
    mean[order] = range_sums(residual[order] * is_training[order], starts, ends)
    return MovieHistory(count, mean / (count + _PRIOR_ROWS))


def genre_affinity(history: UserHistory, timestamp: IntArray, kinds: pa.ListArray) -> FloatArray:
    """Mean residual of the user's earlier ratings of each row's kinds, leaning on 0; shape [n].

    `kinds` has the kinds (genres, say) of each row's movie, as indices. Each kind of the row counts
    alike, whatever the number of earlier ratings; a row without kinds gets 0. Rows are those of
    `history`, sorted by (user, timestamp), and like there only a smaller timestamp is earlier.
    """
    lengths = kinds.value_lengths().to_numpy()
    rows = np.repeat(np.arange(len(timestamp)), lengths)
    kind = kinds.flatten().to_numpy()
    # `starts` is the user's first row, so it tells users apart. Rows stay in order of time.
    num_kinds = int(kind.max()) + 1 if len(kind) else 1
    group = history.starts[rows] * num_kinds + kind
    order = order_by(group)
    by_kind = rows[order]
    starts, ends = earlier_ranges(group[order], timestamp[by_kind])
    mean = np.empty(len(order))
    mean[order] = range_sums(history.residual[by_kind], starts, ends) / (
        ends - starts + _PRIOR_ROWS
    )
    sums = np.bincount(rows, mean, minlength=len(timestamp))
    return sums / np.maximum(lengths, 1)

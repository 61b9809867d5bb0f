"""What was known of a user and a movie at the moment of a rating.

Everything here comes from rows with a strictly smaller timestamp, so no rating has a part in its
own features or in those of an earlier one. A mean over all of a user's ratings would: it holds the
row itself, and the differences from it sum to 0, so the past would give away the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.prepare.statistics import FloatArray
from trainer.data.prepare.timeline import earlier_ranges, range_sums
from trainer.data.ragged import IntArray

# Ratings that the prior is worth in a mean over earlier ratings.
_PRIOR_ROWS = 5.0


@dataclass(frozen=True)
class Ratings:
    """All ratings, sorted by (user, timestamp, movie); raw ids, Unix seconds, stars."""

    user: IntArray
    movie: IntArray
    stars: FloatArray
    timestamp: IntArray
    is_validation: NDArray[np.bool_]


@dataclass(frozen=True)
class Past:
    """What came before each of n ratings; every array has shape [n].

    The earlier rows of the same user are `[starts, ends)`, and `user_mean` is the mean of their
    stars, leaning on the global one. `residual` is the rating's own stars minus `user_mean`: a
    feature of later rows only. `movie_count` and `movie_mean` are over earlier training ratings of
    the movie by anybody, the latter of their residuals, leaning on 0.
    """

    starts: IntArray
    ends: IntArray
    user_mean: FloatArray
    residual: FloatArray
    movie_count: FloatArray
    movie_mean: FloatArray

    @property
    def user_count(self) -> IntArray:
        """Number of earlier ratings of the same user."""
        return self.ends - self.starts


def look_back(ratings: Ratings, global_mean: float) -> Past:
    """Gather the past of every rating; `global_mean` in stars stands in for users without one."""
    starts, ends = earlier_ranges(ratings.user, ratings.timestamp)
    total = range_sums(ratings.stars, starts, ends)
    user_mean = (total + _PRIOR_ROWS * global_mean) / (ends - starts + _PRIOR_ROWS)
    residual = ratings.stars - user_mean
    movie_count, movie_mean = _look_back_at_movies(ratings, residual)
    return Past(starts, ends, user_mean, residual, movie_count, movie_mean)


def _look_back_at_movies(ratings: Ratings, residual: FloatArray) -> tuple[FloatArray, FloatArray]:
    order = np.lexsort((ratings.timestamp, ratings.movie))
    starts, ends = earlier_ranges(ratings.movie[order], ratings.timestamp[order])
    is_training = ~ratings.is_validation[order]
    count, mean = np.empty(len(order)), np.empty(len(order))
    count[order] = range_sums(is_training, starts, ends)
    mean[order] = range_sums(residual[order] * is_training, starts, ends)
    return count, mean / (count + _PRIOR_ROWS)

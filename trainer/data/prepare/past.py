"""What was known of a user and a movie at the moment of a rating.

Everything here comes from rows with a strictly smaller timestamp, so no rating has a part in its
own features or in those of an earlier one. A mean over all of a user's ratings would: it holds the
row itself, and the differences from it sum to 0, so the past would give away the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.prepare.statistics import FloatArray, Moments, past_scale
from trainer.data.prepare.timeline import earlier_ranges, order_by, range_sums
from trainer.data.ragged import IntArray

# Ratings that the prior is worth in a mean over earlier ratings.
_PRIOR_ROWS = 5.0


@dataclass(frozen=True)
class Ratings:
    """All ratings of some users, sorted by (user, timestamp, movie).

    `user` and `movie` are any numbers that tell users and movies apart; `timestamp` is in Unix
    seconds, `stars` as given.
    """

    user: IntArray
    movie: IntArray
    stars: FloatArray
    timestamp: IntArray
    is_validation: NDArray[np.bool_]


@dataclass(frozen=True)
class UserPast:
    """What came before each of n ratings by the same user; every array has shape [n].

    The earlier rows of the same user are `[starts, ends)`, and `user_mean` is the mean of their
    stars, leaning on the global one. `residual` is the rating's own stars minus `user_mean`: a
    feature of later rows only. `is_seen` marks rows that may be part of a later row's past.
    """

    starts: IntArray
    ends: IntArray
    user_mean: FloatArray
    residual: FloatArray
    is_seen: NDArray[np.bool_]

    @property
    def user_count(self) -> IntArray:
        """Number of earlier ratings of the same user."""
        return self.ends - self.starts


@dataclass(frozen=True)
class MoviePast:
    """What came before each of n ratings of the same movie; both arrays have shape [n].

    `count` and `mean` are over earlier training ratings by anybody, the latter of their residuals,
    leaning on 0.
    """

    count: FloatArray
    mean: FloatArray


def look_back_at_users(
    ratings: Ratings, global_mean: float, *, hide_validation: bool = False
) -> UserPast:
    """Gather what each user did before; `global_mean` (stars) stands in for users without past.

    With `hide_validation` no held-out row is part of a past, as when all of them are predicted at
    the moment training ends; held-out rows must be the last ones of their users.
    """
    starts, ends = earlier_ranges(ratings.user, ratings.timestamp)
    is_seen = np.ones(len(ends), dtype=bool)
    if hide_validation:
        is_seen = ~ratings.is_validation
        num_seen_before = np.r_[0, np.cumsum(is_seen)]
        ends = starts + num_seen_before[ends] - num_seen_before[starts]
    total = range_sums(ratings.stars, starts, ends)
    user_mean = (total + _PRIOR_ROWS * global_mean) / (ends - starts + _PRIOR_ROWS)
    return UserPast(starts, ends, user_mean, ratings.stars - user_mean, is_seen)


def scale_of_the_past(ratings: Ratings, past: UserPast, overall: Moments) -> FloatArray:
    """Spread of each rating's earlier stars by the same user, leaning on the overall one."""
    total = range_sums(ratings.stars, past.starts, past.ends)
    squares = range_sums(ratings.stars**2, past.starts, past.ends)
    return past_scale(past.user_count, total, squares, past.user_mean, overall)


def look_back_at_movies(
    movie: IntArray, timestamp: IntArray, residual: FloatArray, is_training: NDArray[np.bool_]
) -> MoviePast:
    """Gather what came before of each movie; the rows may stand in any order."""
    order = order_by(movie, timestamp)
    starts, ends = earlier_ranges(movie[order], timestamp[order])
    count, mean = np.empty(len(order)), np.empty(len(order))
    count[order] = range_sums(is_training[order], starts, ends)
    mean[order] = range_sums(residual[order] * is_training[order], starts, ends)
    return MoviePast(count, mean / (count + _PRIOR_ROWS))

"""Statistics of the ratings of a MovieLens folder, and its time splits. Pure numpy.

`RatingStatistics` sweeps twice over the units: counts, means and the times when users' held-out
ratings begin; then the errors of two simple predictors that users compare with. What is fitted
comes from the training part only. Rows with an equal timestamp are never earlier than one another,
so nothing that is known only at the moment of a rating leaks into its features.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.data.transforms import Moments
from trainer.datasets.io.staging import map_columns
from trainer.datasets.movielens.options import Split

FloatArray = NDArray[np.float64]
# Damping of the bias predictor that users compare with.
_BIAS_PRIOR_ROWS = 5.0


def earlier_ranges(group: IntArray, time: IntArray) -> tuple[IntArray, IntArray]:
    """Ranges `[start, end)` of the rows of the same group with a strictly smaller time.

    Rows must be sorted by (group, time), groups are numbers from 0 on; both results have one entry
    per row.
    """
    rows = np.arange(len(group), dtype=np.int64)
    is_new = np.diff(group, prepend=-1) != 0
    is_later = is_new | (np.diff(time, prepend=0) != 0)
    starts = np.maximum.accumulate(np.where(is_new, rows, 0))
    ends = np.maximum.accumulate(np.where(is_later, rows, 0))
    return starts, ends


def range_sums(values: NDArray, starts: IntArray, ends: IntArray) -> NDArray[np.float64]:
    """Sum of `values[starts[i]:ends[i]]` for every i, in float64."""
    totals = np.zeros(len(values) + 1)
    np.cumsum(values, out=totals[1:])
    return totals[ends] - totals[starts]


def mark_validation(user: IntArray, fraction: float) -> NDArray[np.bool_]:
    """Mark the last `fraction` of each user's rows, rounded down, of rows by user and time.

    A user with too few rows for one stays in training.
    """
    _, begins, counts = np.unique(user, return_index=True, return_counts=True)
    first_held_out = begins + counts - (counts * fraction).astype(np.int64)
    return np.arange(len(user)) >= np.repeat(first_held_out, counts)


def order_by(*keys: IntArray) -> IntArray:
    """Stable order of rows by the first key, then the second, and so on; keys hold integers.

    Keys that fit into 63 bits together are sorted as one, several times as fast as one by one.
    """
    shifted = [key - key.min() if len(key) else key for key in keys]
    bits = [int(key.max()).bit_length() if len(key) else 0 for key in shifted]
    if sum(bits) > 63:
        return np.lexsort(keys[::-1])
    packed = np.zeros(len(keys[0]), dtype=np.int64)
    for key, width in zip(shifted, bits, strict=True):
        packed <<= width
        packed |= key
    return np.argsort(packed, kind="stable")


@dataclass(frozen=True)
class Cut:
    """Where a global split by time lies: later rows are held out, earlier ones train.

    Of the rows at `time` itself the first `num_training` train, in order of (user, movie).
    """

    time: int
    num_training: int

    def mark(self, time: IntArray, num_before: int) -> NDArray[np.bool_]:
        """Mark held-out rows of a slice; `num_before` rows at the cut's time lie before it."""
        marked = time > self.time
        ties = np.flatnonzero(time == self.time)
        marked[ties[max(0, self.num_training - num_before) :]] = True
        return marked


def find_cut(times: Callable[[], Iterable[IntArray]], num_held_out: int) -> Cut:
    """The cut that holds out the last `num_held_out` rows of all slices.

    `times()` gives the slices anew each time it is called, once for each halving of their range.
    """

    def num_later(time: int) -> int:
        return sum(int((slice_ > time).sum()) for slice_ in times())

    low = min(int(slice_.min()) for slice_ in times() if len(slice_))
    high = max(int(slice_.max()) for slice_ in times() if len(slice_))
    # The first time that fewer rows are later than; none for no rows.
    time = bisect_left(range(low, high + 1), True, key=lambda time: num_later(time) < num_held_out)
    return Cut(low + time, num_later(low + time - 1) - num_held_out)


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


NEVER = np.iinfo(np.int64).max


class Units:
    """The sorted units of `write_unit`, with held-out rows marked as they are loaded."""

    def __init__(
        self, paths: Sequence[Path], users: Sequence[range], split: Split, fraction: float
    ) -> None:
        self.users = tuple(users)
        self._paths = paths
        self._fraction = fraction
        self._cut: Cut | None = None
        self._num_before: IntArray = np.zeros(len(paths) + 1, dtype=np.int64)
        if split == "global":
            num_rows = sum(len(time) for time in self._times())
            self._cut = find_cut(self._times, int(num_rows * fraction))
            at_cut = [int((time == self._cut.time).sum()) for time in self._times()]
            self._num_before = np.cumsum([0, *at_cut])

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, number: int) -> Ratings:
        """The ratings of unit `number`; `user` and `movie` hold numbers."""
        columns = map_columns(self._paths[number])
        user, time = columns["user"], columns["timestamp"]
        if self._cut is None:
            held_out = mark_validation(user, self._fraction)
        else:
            held_out = self._cut.mark(time, self._num_before[number])
        stars = columns["stars"].astype(np.float64)
        return Ratings(user, columns["movie"], stars, time, held_out)

    def _times(self) -> Iterable[IntArray]:
        return (map_columns(path)["timestamp"] for path in self._paths)


class RatingStatistics:
    """Counts and fits over all units.

    `overall` are the moments of the training stars. `num_training` and `num_held_out` have one
    entry per unit; `rows_of_movie` counts all rows and `training_rows_of_movie` those of training,
    per movie number; `training_rows_of_user` per user number. `begins` is the timestamp of each
    user's first held-out row, `NEVER` for none. `global_mean_rmse` and `bias_rmse` are errors over
    the held-out rows: of the mean, and of mean + movie bias + user bias.
    """

    def __init__(self, units: Units, num_users: int, num_movies: int) -> None:
        """Sweep over the units; users and movies have numbers below `num_users`, `num_movies`."""
        self.overall = Moments()
        self.num_training: IntArray = np.zeros(len(units), dtype=np.int64)
        self.num_held_out: IntArray = np.zeros(len(units), dtype=np.int64)
        self.rows_of_movie: IntArray = np.zeros(num_movies, dtype=np.int64)
        self.training_rows_of_movie: IntArray = np.zeros(num_movies, dtype=np.int64)
        self.training_rows_of_user: IntArray = np.zeros(num_users, dtype=np.int64)
        self.begins: IntArray = np.full(num_users, NEVER)
        stars_of_movie = np.zeros(num_movies)
        for number, users in enumerate(units.users):
            stars_of_movie += self._count(number, units.load(number), users)
        bias = stars_of_movie - self.overall.mean * self.training_rows_of_movie
        bias /= self.training_rows_of_movie + _BIAS_PRIOR_ROWS
        errors = [
            _squared_errors(units.load(number), users, self.overall.mean, bias)
            for number, users in enumerate(units.users)
        ]
        mean_errors = np.sum(errors, axis=0) / max(1, self.num_held_out.sum())
        self.global_mean_rmse, self.bias_rmse = np.sqrt(mean_errors).tolist()

    def _count(self, number: int, unit: Ratings, users: range) -> NDArray:
        """Take a unit in; gives the sum of its training stars per movie."""
        training, num_movies = ~unit.is_validation, len(self.rows_of_movie)
        stars, movie = unit.stars[training], unit.movie[training]
        self.overall += Moments.of(stars)
        self.num_training[number] = len(stars)
        self.num_held_out[number] = len(training) - len(stars)
        self.rows_of_movie += np.bincount(unit.movie, minlength=num_movies)
        self.training_rows_of_movie += np.bincount(movie, minlength=num_movies)
        own = slice(users.start, users.stop)
        self.training_rows_of_user[own] = np.bincount(
            unit.user[training] - users.start, minlength=len(users)
        )
        # Sorted by user and time, so that a user's first held-out row is the first that is met.
        held_out = unit.user[unit.is_validation]
        first = np.flatnonzero(np.diff(held_out, prepend=-1))
        self.begins[held_out[first]] = unit.timestamp[unit.is_validation][first]
        return np.bincount(movie, stars, minlength=num_movies)


def _squared_errors(
    unit: Ratings, users: range, mean: float, movie_bias: FloatArray
) -> tuple[float, float]:
    """Sums over the held-out rows: predicting the mean, and mean + movie bias + user bias."""
    training, user = ~unit.is_validation, unit.user - users.start
    residual = unit.stars - mean - movie_bias[unit.movie]
    count = np.bincount(user[training], minlength=len(users))
    total = np.bincount(user[training], residual[training], minlength=len(users))
    user_bias = total / (count + _BIAS_PRIOR_ROWS)
    errors = (residual - user_bias[user])[unit.is_validation]
    constant = (unit.stars - mean)[unit.is_validation]
    return float(constant @ constant), float(errors @ errors)

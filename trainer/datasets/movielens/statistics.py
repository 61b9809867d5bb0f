"""Statistics of the ratings of a MovieLens folder, and its time splits. Pure numpy.

`compute_statistics` sweeps twice over the units: counts, means and the times when users' held-out
ratings begin; then the errors of two simple predictors that users compare with. What is fitted
comes from the training part only. Rows with an equal timestamp are never earlier than one another,
so nothing that is known only at the moment of a rating leaks into its features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.datasets.io.staging import map_columns

FloatArray = NDArray[np.float64]
# Ratings that the global mean and spread are worth against a user's own.
_USER_PRIOR_ROWS = 5.0
_MIN_SCALE_RATIO = 0.25
# Damping of the bias predictor that users compare with.
BIAS_PRIOR_ROWS = 5.0
# Below it a column is constant but for rounding, which must not be blown up.
_MIN_SPREAD = 1e-9


@dataclass(frozen=True)
class UserStatistics:
    """Mean and scale of the stars per user, shrunk toward the global ones; scales are above 0."""

    mean: FloatArray
    scale: FloatArray


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of values; they add up without cancellation.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: NDArray) -> Moments:
        """The moments of the finite values of an array."""
        known = values[np.isfinite(values)].astype(np.float64, copy=False)
        if not len(known):
            return cls()
        mean = float(known.mean())
        return cls(len(known), mean, float(((known - mean) ** 2).sum()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        between = gap**2 * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def std(self) -> float:
        """Population standard deviation; 1 where the values are all alike but for rounding."""
        spread = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return spread if spread > _MIN_SPREAD else 1.0

    def standardise(self, values: NDArray) -> NDArray[np.float32]:
        """Shift and scale values by these moments; NaN (missing) becomes 0."""
        return np.nan_to_num((values - self.mean) / self.std).astype(np.float32)


def fit_users(
    user: IntArray, stars: FloatArray, num_users: int, overall: Moments | None = None
) -> UserStatistics:
    """Fit on training rows; `user` holds numbers below `num_users`.

    `overall` are the moments of all stars, where `stars` are only some of them.
    """
    overall = overall or Moments.of(stars)
    global_mean, global_std = overall.mean, overall.std
    count = np.bincount(user, minlength=num_users)
    total = np.bincount(user, stars, minlength=num_users)
    mean = (total + _USER_PRIOR_ROWS * global_mean) / (count + _USER_PRIOR_ROWS)
    squares = np.bincount(user, (stars - mean[user]) ** 2, minlength=num_users)
    variance = (squares + _USER_PRIOR_ROWS * global_std**2) / (count + _USER_PRIOR_ROWS)
    # Somebody who always gives the same stars must not blow up the label of the first exception.
    scale = np.maximum(np.sqrt(variance), _MIN_SCALE_RATIO * global_std)
    return UserStatistics(mean, scale)


def past_scale(
    count: IntArray, total: FloatArray, squares: FloatArray, mean: FloatArray, overall: Moments
) -> FloatArray:
    """Scale of the stars of each row's earlier rows around `mean`; every value is above 0.

    `count`, `total` and `squares` are the number, sum and sum of squares of the earlier stars.
    """
    deviations = np.maximum(squares - 2 * mean * total + count * mean**2, 0)
    variance = (deviations + _USER_PRIOR_ROWS * overall.std**2) / (count + _USER_PRIOR_ROWS)
    return np.maximum(np.sqrt(variance), _MIN_SCALE_RATIO * overall.std)


def damped_means(group: IntArray, values: FloatArray, num_groups: int) -> FloatArray:
    """Mean per group, leaning on 0, for the bias predictor that users compare with."""
    count = np.bincount(group, minlength=num_groups)
    return np.bincount(group, values, minlength=num_groups) / (count + BIAS_PRIOR_ROWS)


Split = Literal["global", "per_user"]


def earlier_ranges(group: IntArray, time: IntArray) -> tuple[IntArray, IntArray]:
    """Ranges `[start, end)` of the rows of the same group with a strictly smaller time.

    Rows must be sorted by (group, time); both results have one entry per row.
    """
    rows = np.arange(len(group), dtype=np.int64)
    new_group = np.ones(len(group), dtype=bool)
    new_group[1:] = group[1:] != group[:-1]
    new_time = new_group.copy()
    new_time[1:] |= time[1:] != time[:-1]
    starts = np.maximum.accumulate(np.where(new_group, rows, 0))
    ends = np.maximum.accumulate(np.where(new_time, rows, 0))
    return starts, ends


def range_sums(values: NDArray, starts: IntArray, ends: IntArray) -> NDArray[np.float64]:
    """Sum of `values[starts[i]:ends[i]]` for every i, in float64."""
    totals = np.zeros(len(values) + 1)
    np.cumsum(values, out=totals[1:])
    return totals[ends] - totals[starts]


def mark_validation(
    user: IntArray, time: IntArray, split: Split, fraction: float
) -> NDArray[np.bool_]:
    """Mark the last `fraction` of all rows by time, or of each user's rows, rounded down.

    Rows must be sorted by (user, time). A user with too few rows for one stays in training.
    """
    num_rows = len(user)
    if split == "global":
        marked = np.zeros(num_rows, dtype=bool)
        by_time = np.lexsort((user, time))
        marked[by_time[num_rows - int(num_rows * fraction) :]] = True
        return marked
    begins = np.flatnonzero(np.r_[True, user[1:] != user[:-1]])
    counts = np.diff(np.r_[begins, num_rows])
    first_held_out = begins + counts - (counts * fraction).astype(np.int64)
    return np.arange(num_rows) >= np.repeat(first_held_out, counts)


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


_BINS_BITS = 16


def find_cut(times: Callable[[], Iterable[IntArray]], num_held_out: int) -> Cut:
    """The cut that holds out the last `num_held_out` rows of all slices.

    `times()` gives the slices anew each time it is called: every pass counts the rows in 2^16
    bins of time and the next one looks into the bin where the cut lies.
    """
    low = min(int(slice_.min()) for slice_ in times() if len(slice_))
    high = max(int(slice_.max()) for slice_ in times() if len(slice_))
    if not num_held_out:
        return Cut(high + 1, 0)
    wanted = num_held_out
    while True:
        shift = max(0, (high - low).bit_length() - _BINS_BITS)
        counts = np.zeros(((high - low) >> shift) + 1, dtype=np.int64)
        for slice_ in times():
            inside = slice_[(slice_ >= low) & (slice_ <= high)]
            counts += np.bincount((inside - low) >> shift, minlength=len(counts))
        from_last = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_last, wanted))
        chosen = len(counts) - 1 - place
        wanted -= int(from_last[place] - counts[chosen])
        if shift == 0:
            return Cut(low + chosen, int(counts[chosen]) - wanted)
        low, high = low + (chosen << shift), low + ((chosen + 1) << shift) - 1


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
            self._find_cut()

    def __len__(self) -> int:
        return len(self._paths)

    def load(self, number: int) -> Ratings:
        """The ratings of unit `number`; `user` and `movie` hold numbers."""
        columns = map_columns(self._paths[number])
        return Ratings(
            user=columns["user"],
            movie=columns["movie"],
            stars=columns["stars"].astype(np.float64),
            timestamp=columns["timestamp"],
            is_validation=self._mark(number, columns["user"], columns["timestamp"]),
        )

    def __iter__(self) -> Iterator[Ratings]:
        return (self.load(number) for number in range(len(self)))

    def _mark(self, number: int, user: IntArray, time: IntArray) -> NDArray[np.bool_]:
        if self._cut is None:
            return mark_validation(user, time, "per_user", self._fraction)
        return self._cut.mark(time, self._num_before[number])

    def _times(self) -> Iterable[IntArray]:
        return (map_columns(path)["timestamp"] for path in self._paths)

    def _find_cut(self) -> None:
        num_rows = sum(len(time) for time in self._times())
        self._cut = find_cut(self._times, int(num_rows * self._fraction))
        at_cut = [int((time == self._cut.time).sum()) for time in self._times()]
        self._num_before = np.cumsum([0, *at_cut])


@dataclass(frozen=True)
class RatingStatistics:
    """Counts and fits over all units.

    `overall` are the moments of the training stars. `num_training` and `num_held_out` have one
    entry per unit; `rows_of_movie` counts all rows and `training_rows_of_movie` those of training,
    per movie number; `training_rows_of_user` per user number. `begins` is the timestamp of each
    user's first held-out row, `NEVER` for none.
    """

    overall: Moments
    num_training: IntArray
    num_held_out: IntArray
    rows_of_movie: IntArray
    training_rows_of_movie: IntArray
    training_rows_of_user: IntArray
    begins: IntArray
    global_mean_rmse: float
    bias_rmse: float


class _Counts:
    """The first sweep, as it goes on."""

    def __init__(self, num_users: int, num_movies: int) -> None:
        self.overall = Moments()
        self.num_training: list[int] = []
        self.num_held_out: list[int] = []
        self.rows_of_movie = np.zeros(num_movies, dtype=np.int64)
        self.training_rows_of_movie = np.zeros(num_movies, dtype=np.int64)
        self.training_stars_of_movie = np.zeros(num_movies)
        self.training_rows_of_user = np.zeros(num_users, dtype=np.int64)
        self.begins = np.full(num_users, NEVER)

    def add(self, unit: Ratings, users: range) -> None:
        training = ~unit.is_validation
        stars, movie = unit.stars[training], unit.movie[training]
        num_movies = len(self.rows_of_movie)
        self.overall += Moments.of(stars)
        self.num_training.append(len(stars))
        self.num_held_out.append(len(training) - len(stars))
        self.rows_of_movie += np.bincount(unit.movie, minlength=num_movies)
        self.training_rows_of_movie += np.bincount(movie, minlength=num_movies)
        self.training_stars_of_movie += np.bincount(movie, stars, minlength=num_movies)
        own = slice(users.start, users.stop)
        self.training_rows_of_user[own] = np.bincount(
            unit.user[training] - users.start, minlength=len(users)
        )
        # Sorted by user and time, so that a user's first held-out row is the first that is met.
        held_out = unit.user[unit.is_validation]
        first = np.flatnonzero(np.diff(held_out, prepend=-1))
        self.begins[held_out[first]] = unit.timestamp[unit.is_validation][first]

    def movie_bias(self) -> FloatArray:
        """Mean of each movie's training stars minus the overall mean, damped."""
        total = self.training_stars_of_movie - self.overall.mean * self.training_rows_of_movie
        return total / (self.training_rows_of_movie + BIAS_PRIOR_ROWS)


def compute_statistics(units: Units, num_users: int, num_movies: int) -> RatingStatistics:
    """Sweep over the units; users and movies have numbers below `num_users`, `num_movies`."""
    counts = _Counts(num_users, num_movies)
    for number, users in enumerate(units.users):
        counts.add(units.load(number), users)
    errors = [
        _squared_errors(units.load(number), users, counts.overall.mean, counts.movie_bias())
        for number, users in enumerate(units.users)
    ]
    num_held_out = sum(counts.num_held_out)
    constant, biases = np.sqrt(np.sum(errors, axis=0) / max(1, num_held_out)).tolist()
    return RatingStatistics(
        overall=counts.overall,
        num_training=np.array(counts.num_training),
        num_held_out=np.array(counts.num_held_out),
        rows_of_movie=counts.rows_of_movie,
        training_rows_of_movie=counts.training_rows_of_movie,
        training_rows_of_user=counts.training_rows_of_user,
        begins=counts.begins,
        global_mean_rmse=constant,
        bias_rmse=biases,
    )


def _squared_errors(
    unit: Ratings, users: range, mean: float, movie_bias: FloatArray
) -> tuple[float, float]:
    """Sums over the held-out rows: predicting the mean, and mean + movie bias + user bias."""
    training, user = ~unit.is_validation, unit.user - users.start
    residual = unit.stars - mean - movie_bias[unit.movie]
    user_bias = damped_means(user[training], residual[training], len(users))
    errors = (residual - user_bias[user])[unit.is_validation]
    constant = (unit.stars - mean)[unit.is_validation]
    return float(constant @ constant), float(errors @ errors)

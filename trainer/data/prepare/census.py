"""What has to be known of all ratings before the first row can be written.

Two sweeps over the units: counts, means and the moments when users' held-out ratings begin; then
the errors of two simple predictors that users compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.prepare.past import Ratings
from trainer.data.prepare.spill import map_columns
from trainer.data.prepare.statistics import BIAS_PRIOR_ROWS, FloatArray, Moments, damped_means
from trainer.data.prepare.timeline import Cut, Split, find_cut, mark_validation
from trainer.data.ragged import IntArray

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
class Census:
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


def take_census(units: Units, num_users: int, num_movies: int) -> Census:
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
    return Census(
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

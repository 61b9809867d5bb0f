"""Means, scales and simple predictors, to be fitted on the training part only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray

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
    """Mean and scale of the stars, per index of the user vocabulary; index 0 has the global ones.

    Shrunk toward the global values by a prior of a few ratings; every scale is above 0.
    """

    mean: FloatArray
    scale: FloatArray
    global_mean: float
    global_std: float


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
    return UserStatistics(mean, scale, global_mean, global_std)


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

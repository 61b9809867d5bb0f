"""Means, scales and simple predictors, all fitted on the training part only."""

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
_BIAS_PRIOR_ROWS = 5.0
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


def fit_users(user: IntArray, stars: FloatArray, num_users: int) -> UserStatistics:
    """Fit on training rows; `user` holds vocabulary indices below `num_users`."""
    global_mean = float(stars.mean())
    global_std = float(stars.std()) or 1.0
    count = np.bincount(user, minlength=num_users)
    total = np.bincount(user, stars, minlength=num_users)
    mean = (total + _USER_PRIOR_ROWS * global_mean) / (count + _USER_PRIOR_ROWS)
    squares = np.bincount(user, (stars - mean[user]) ** 2, minlength=num_users)
    variance = (squares + _USER_PRIOR_ROWS * global_std**2) / (count + _USER_PRIOR_ROWS)
    # Somebody who always gives the same stars must not blow up the label of the first exception.
    scale = np.maximum(np.sqrt(variance), _MIN_SCALE_RATIO * global_std)
    return UserStatistics(mean, scale, global_mean, global_std)


def rmse(errors: FloatArray) -> float:
    """Root of the mean square; NaN for no errors."""
    return float(np.sqrt(np.mean(errors**2))) if len(errors) else float("nan")


def bias_baseline_rmse(
    user: IntArray, movie: IntArray, stars: FloatArray, is_validation: NDArray[np.bool_]
) -> float:
    """Validation RMSE, in stars, of global mean + movie bias + user bias, damped.

    `user` and `movie` hold vocabulary indices; index 0 (never seen in training) gets no bias.
    """
    training = ~is_validation
    mean = stars[training].mean()
    movie_bias = _damped_means(movie[training], stars[training] - mean, int(movie.max()) + 1)
    residual = stars[training] - mean - movie_bias[movie[training]]
    user_bias = _damped_means(user[training], residual, int(user.max()) + 1)
    errors = stars - mean - movie_bias[movie] - user_bias[user]
    return rmse(errors[is_validation])


def _damped_means(group: IntArray, values: FloatArray, num_groups: int) -> FloatArray:
    count = np.bincount(group, minlength=num_groups)
    return np.bincount(group, values, minlength=num_groups) / (count + _BIAS_PRIOR_ROWS)


def standardise(values: FloatArray, training: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Shift and scale to mean 0 and spread 1 over the training rows; NaN (missing) becomes 0.

    A column that is constant over them is only shifted.
    """
    fitted = values[training]
    if not np.isfinite(fitted).any():
        return np.nan_to_num(values).astype(np.float32)
    spread = np.nanstd(fitted)
    scale = spread if spread > _MIN_SPREAD else 1.0
    return np.nan_to_num((values - np.nanmean(fitted)) / scale).astype(np.float32)

"""The known truth behind made-up ratings, and how far below it no predictor can get.

stars = round to halves and clip to [0.5, 5] of: mean + user bias + movie bias + user factors .
movie factors + normal noise. Who knows everything but the noise predicts the mean of the rounded
stars; the root mean square of what remains is the irreducible error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray

FloatArray = NDArray[np.float64]

NUM_FACTORS = 8
MEAN_STARS = 3.5
USER_BIAS_STD = 0.4
MOVIE_BIAS_STD = 0.45
AFFINITY_STD = 0.45
NOISE_STD = 0.7

_LEVELS = np.arange(1, 11) / 2
_GRID = np.arange(-6.0, 13.0, 0.005)


def expected_stars(
    rng: np.random.Generator,
    user: IntArray,
    num_users: int,
    movie_bias: FloatArray,
    movie_factors: FloatArray,
) -> FloatArray:
    """Stars before noise and rounding, shape [n]; draws the users' biases and factors.

    `user` [n] is below `num_users`; `movie_bias` [n] and `movie_factors` [n, NUM_FACTORS] are
    those of each rating's movie.
    """
    factors = rng.normal(size=(num_users, NUM_FACTORS))
    bias = rng.normal(scale=USER_BIAS_STD, size=num_users)
    affinity = np.einsum("rf,rf->r", factors[user], movie_factors)
    return MEAN_STARS + bias[user] + movie_bias + affinity * AFFINITY_STD / np.sqrt(NUM_FACTORS)


def observed_stars(rng: np.random.Generator, expected: FloatArray) -> FloatArray:
    """Stars as a user gives them: with noise, in halves from 0.5 to 5."""
    noisy = expected + rng.normal(scale=NOISE_STD, size=len(expected))
    return np.clip(np.round(noisy * 2) / 2, 0.5, 5.0)


@dataclass
class StarsScore:
    """Sums over ratings, to tell how well the truth itself predicts them."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    variance: float = 0.0
    squared_errors: float = 0.0
    _table: tuple[FloatArray, FloatArray] = field(default_factory=lambda: _rounded_moments())

    def add(self, expected: FloatArray, stars: FloatArray) -> None:
        """Count ratings with these stars before noise, and these after."""
        mean, variance = (np.interp(expected, _GRID, values) for values in self._table)
        self.count += len(stars)
        self.total += float(stars.sum())
        self.squares += float(stars @ stars)
        self.variance += float(variance.sum())
        self.squared_errors += float(((stars - mean) ** 2).sum())

    @property
    def irreducible_rmse(self) -> float:
        """Expected error, in stars, of the best predictor there can be."""
        return math.sqrt(self.variance / self.count)

    @property
    def measured_rmse(self) -> float:
        """Error of that predictor on the very ratings that were made."""
        return math.sqrt(self.squared_errors / self.count)

    @property
    def global_mean_rmse(self) -> float:
        """Error of predicting the mean of all ratings."""
        mean = self.total / self.count
        return math.sqrt(max(0.0, self.squares / self.count - mean**2))


def _rounded_moments() -> tuple[FloatArray, FloatArray]:
    """Mean and variance of the rounded and clipped stars, for each point of the grid."""
    edges = (_LEVELS[:-1] + 0.25)[None, :]
    below = _normal_cdf((edges - _GRID[:, None]) / NOISE_STD)
    chance = np.diff(below, axis=1, prepend=0, append=1)
    mean = chance @ _LEVELS
    return mean, chance @ _LEVELS**2 - mean**2


def _normal_cdf(values: FloatArray) -> FloatArray:
    return 0.5 * (1 + np.vectorize(math.erf)(values / math.sqrt(2)))

"""What the quality benchmark compares with: a mean, biases, and biased matrix factorisation.

    global mean      stars = m
    bias             stars = m + b_u + c_i
    factorisation    stars = m + b_u + c_i + p_u . q_i

Biases are damped means, fitted in turn (Koren 2008, section 2.1). The factorisation is Funk's SVD
with biases (Koren, Bell, Volinsky 2009): stochastic gradient descent on the squared error with L2
on every parameter that a rating looks up, in small batches instead of rating by rating.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests.benchmarks.quality_data import FloatArray, Fold, Stars
from trainer.data.ragged import IntArray

_MIN_STARS, _MAX_STARS = 0.5, 5.0
_BIAS_ROUNDS = 10
# How many ratings a bias of 0 is worth in the mean of a user and of a movie, as tuned.
_USER_PRIOR, _MOVIE_PRIOR = 5.0, 3.0


@dataclass(frozen=True)
class FactorSettings:
    """How the factorisation is trained, as tuned.

    `init_std` is the spread of p and q at the start, `lr_decay` what the rate is multiplied by
    after each epoch.
    """

    num_factors: int = 512
    lr: float = 0.04
    lr_decay: float = 0.88
    factor_l2: float = 0.02
    bias_l2: float = 0.001
    init_std: float = 0.01
    batch_size: int = 256
    num_epochs: int = 12


def mean_errors(fold: Fold) -> FloatArray:
    """Errors of the fitted ratings' mean, one for each held-out rating."""
    return fold.held_out.stars - fold.fit.stars.mean()


def bias_errors(fold: Fold) -> FloatArray:
    """Errors of mean, user bias and movie bias, one for each held-out rating."""
    fit, held_out = fold.fit, fold.held_out
    mean = fit.stars.mean()
    of_user, of_movie = np.zeros(fold.num_users), np.zeros(fold.num_movies)
    for _ in range(_BIAS_ROUNDS):
        rest = fit.stars - mean - of_user[fit.user]
        of_movie = _damped_means(fit.movie, rest, fold.num_movies, _MOVIE_PRIOR)
        rest = fit.stars - mean - of_movie[fit.movie]
        of_user = _damped_means(fit.user, rest, fold.num_users, _USER_PRIOR)
    return _clipped_errors(held_out, mean + of_user[held_out.user] + of_movie[held_out.movie])


def _damped_means(group: IntArray, values: FloatArray, num_groups: int, prior: float) -> FloatArray:
    count = np.bincount(group, minlength=num_groups)
    return np.bincount(group, values, minlength=num_groups) / (count + prior)


def factor_errors(fold: Fold, settings: FactorSettings, seed: int) -> FloatArray:
    """Errors of the factorisation after its last epoch, one for each held-out rating."""
    model = _Factorisation(fold, settings, seed)
    for _ in range(settings.num_epochs):
        model.train_epoch()
    return model.held_out_errors()


class _Factorisation:
    """Parameters of the factorisation and one way to improve them."""

    def __init__(self, fold: Fold, settings: FactorSettings, seed: int) -> None:
        self._fold, self._settings = fold, settings
        self._draw = torch.Generator().manual_seed(seed)
        self._mean = float(fold.fit.stars.mean())
        self._lr = settings.lr
        self._users = self._start(fold.num_users, fold.fit.user)
        self._movies = self._start(fold.num_movies, fold.fit.movie)
        self._fit = tuple(
            torch.from_numpy(each) for each in (fold.fit.user, fold.fit.movie, fold.fit.stars)
        )

    def _start(self, num_rows: int, fitted: IntArray) -> torch.Tensor:
        """[num_rows, 1 + factors], the bias first; 0 for rows that are not among `fitted`."""
        shape = (num_rows, 1 + self._settings.num_factors)
        rows = torch.randn(shape, generator=self._draw, dtype=torch.float64)
        rows *= self._settings.init_std
        rows[:, 0] = 0
        rows[np.bincount(fitted, minlength=num_rows) == 0] = 0
        return rows

    def train_epoch(self) -> None:
        order = torch.randperm(len(self._fold.fit), generator=self._draw)
        for rows in order.split(self._settings.batch_size):
            self._train_batch(*(each[rows] for each in self._fit))
        self._lr *= self._settings.lr_decay

    def _train_batch(self, user: torch.Tensor, movie: torch.Tensor, stars: torch.Tensor) -> None:
        settings = self._settings
        p, q = self._users[user], self._movies[movie]
        error = (stars - self._predict(p, q)).unsqueeze(1)
        one = torch.ones_like(error)
        l2 = torch.full((p.shape[1],), settings.factor_l2, dtype=p.dtype)
        l2[0] = settings.bias_l2
        step_p = error * torch.cat([one, q[:, 1:]], dim=1) - l2 * p
        step_q = error * torch.cat([one, p[:, 1:]], dim=1) - l2 * q
        self._users.index_add_(0, user, step_p, alpha=self._lr)
        self._movies.index_add_(0, movie, step_q, alpha=self._lr)

    def _predict(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return self._mean + p[:, 0] + q[:, 0] + (p[:, 1:] * q[:, 1:]).sum(dim=1)

    def held_out_errors(self) -> FloatArray:
        """Errors on the held-out ratings; unknown movies get no bias and no factors."""
        held_out = self._fold.held_out
        predicted = self._predict(
            self._users[torch.from_numpy(held_out.user)],
            self._movies[torch.from_numpy(held_out.movie)],
        )
        return _clipped_errors(held_out, predicted.numpy())


def _clipped_errors(held_out: Stars, predicted: FloatArray) -> FloatArray:
    return held_out.stars - np.clip(predicted, _MIN_STARS, _MAX_STARS)

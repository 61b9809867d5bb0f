"""What other users thought of a movie, early and late, without a word of the user's own.

Means over the past alone (`past.py`) know little of a movie that was rated early, though by the
end of training much is known, and a factorisation or an embedding uses all of it. A mean over all
training ratings would hold the row's own rating. So users are dealt to a few folds, and a row sees
the training ratings of its movie by users of the other folds (target encoding out of fold, as in
Pargent et al. 2022). Held-out ratings have no part in it. Unlike all other features this one is not
limited to what came before: leave it out of a spec to judge a model as of each moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.prepare.spill import map_columns
from trainer.data.prepare.statistics import FloatArray, Moments
from trainer.data.ragged import IntArray

_NUM_FOLDS = 5
# Ratings that the prior is worth in a mean.
_PRIOR_ROWS = 5.0


def fold_of(user: IntArray) -> NDArray[np.uint8]:
    """Fold of each user number, shape [n]."""
    return (user % _NUM_FOLDS).astype(np.uint8)


@dataclass(frozen=True)
class MovieFolds:
    """Sum of residuals and number of training ratings, [movies, folds] each."""

    total: FloatArray
    count: IntArray

    @classmethod
    def empty(cls, num_movies: int) -> MovieFolds:
        """Nothing known yet."""
        shape = (num_movies, _NUM_FOLDS)
        return cls(np.zeros(shape), np.zeros(shape, dtype=np.int64))

    def add(
        self,
        movie: IntArray,
        fold: NDArray[np.uint8],
        residual: NDArray,
        is_training: NDArray[np.bool_],
    ) -> None:
        """Take in some ratings; those that are not for training count nothing."""
        place = (movie.astype(np.int64) * _NUM_FOLDS + fold)[is_training]
        first, last = (int(place.min()), int(place.max()) + 1) if len(place) else (0, 0)
        counts = np.bincount(place - first, minlength=last - first)
        sums = np.bincount(place - first, residual[is_training], minlength=last - first)
        self.count.reshape(-1)[first:last] += counts
        self.total.reshape(-1)[first:last] += sums

    def dense(self, movie: IntArray, fold: NDArray[np.uint8]) -> dict[str, FloatArray]:
        """Dense features of some ratings, before they are standardised."""
        count = self.count.sum(axis=1)[movie] - self.count[movie, fold]
        total = self.total.sum(axis=1)[movie] - self.total[movie, fold]
        return {
            "movie_others_mean": total / (count + _PRIOR_ROWS),
            "movie_others_count": np.log1p(count),
        }


def gather_folds(
    by_movie: Sequence[Path], num_movies: int
) -> tuple[MovieFolds, dict[str, Moments]]:
    """The folds of all units' rows as `write_by_movie` put them aside, and training moments."""
    folds = MovieFolds.empty(num_movies)
    for path in by_movie:
        rows = map_columns(path)
        is_training = rows["is_training"].astype(bool)
        folds.add(rows["movie"], rows["fold"], rows["residual"], is_training)
    moments: dict[str, Moments] = {}
    for path in by_movie:
        rows = map_columns(path)
        is_training = rows["is_training"].astype(bool)
        for name, values in folds.dense(rows["movie"], rows["fold"]).items():
            moments[name] = moments.get(name, Moments()) + Moments.of(values[is_training])
    return folds, moments

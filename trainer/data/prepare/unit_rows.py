"""Everything that the rows of one unit of users are built from, gathered when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from trainer.data.prepare.catalogue import Catalogue
from trainer.data.prepare.census import Census, Units
from trainer.data.prepare.journal import Facts
from trainer.data.prepare.movie_folds import MovieFolds, fold_of
from trainer.data.prepare.movie_past import MovieExchange, write_by_movie
from trainer.data.prepare.past import Ratings, UserPast, look_back_at_users, scale_of_the_past
from trainer.data.prepare.rating_rows import RowBuilder, dense_of_movies, dense_of_users
from trainer.data.prepare.statistics import FloatArray, Moments, fit_users
from trainer.data.ragged import IntArray

UserMean = Literal["past", "training"]
ValidationPast = Literal["all", "training"]
SplitName = Literal["train", "validation"]

_SHUFFLE_SEED = 0
# A file may begin in one unit and end in the next.
_UNITS_IN_MEMORY = 2


@dataclass(frozen=True)
class Fitted:
    """What was fitted on the training part.

    `user_index` and `movie_index` map numbers to vocabulary indices; `user_mean` says what the
    label is taken relative to: the user's earlier ratings, or all of the user's training ratings;
    `validation_past` which of a user's earlier ratings a held-out row may look back at.
    """

    units: Units
    census: Census
    catalogue: Catalogue
    user_index: IntArray
    movie_index: IntArray
    user_mean: UserMean
    history_length: int
    validation_past: ValidationPast = "all"

    def look_back(self, ratings: Ratings) -> UserPast:
        """What each user did before each rating."""
        return look_back_at_users(
            ratings, self.census.overall.mean, hide_validation=self.validation_past == "training"
        )

    def write_by_movie(self, path: Path, unit: int) -> Facts:
        """Put a unit aside for the exchange; gives moments of its users' dense features."""
        ratings = self.units.load(unit)
        past = self.look_back(ratings)
        write_by_movie(path, ratings, past)
        dense = dense_of_users(ratings, past, self.catalogue)
        training = ~ratings.is_validation
        return {name: vars(Moments.of(values[training])) for name, values in dense.items()}


class UnitRows:
    """Prepared rows of any unit, in the order in which they are written."""

    def __init__(
        self,
        fitted: Fitted,
        exchange: MovieExchange,
        folds: MovieFolds,
        moments: Mapping[str, Moments],
    ) -> None:
        """`moments` are those of each dense feature over the training rows."""
        self._fitted = fitted
        self._exchange = exchange
        self._folds = folds
        self._moments = moments
        self._builder = lru_cache(_UNITS_IN_MEMORY)(self._make_builder)
        self._order = lru_cache(2 * _UNITS_IN_MEMORY)(self._make_order)

    def build(self, split: SplitName, unit: int, start: int, end: int) -> pa.Table:
        """Rows `[start, end)` of the part of a unit that is in `split`."""
        return self._builder(unit).build(self._order(split, unit)[start:end])

    def _make_order(self, split: SplitName, unit: int) -> IntArray:
        is_validation = self._builder(unit).ratings.is_validation
        if split == "validation":
            return np.flatnonzero(is_validation)
        # Loaders shuffle within windows of neighbouring rows: neighbours must not share a user.
        random = np.random.default_rng([_SHUFFLE_SEED, unit])
        return random.permutation(np.flatnonzero(~is_validation))

    def _make_builder(self, unit: int) -> RowBuilder:
        fitted = self._fitted
        ratings = fitted.units.load(unit)
        past = fitted.look_back(ratings)
        offset, scale = self._label_units(unit, ratings, past)
        dense = dense_of_users(ratings, past, fitted.catalogue)
        dense |= dense_of_movies(self._exchange.past_of(unit))
        dense |= self._folds.dense(ratings.movie, fold_of(ratings.user))
        return RowBuilder(
            ratings=ratings,
            past=past,
            user_index=fitted.user_index[ratings.user],
            movie_index=fitted.movie_index[ratings.movie],
            catalogue=fitted.catalogue,
            offset=offset,
            scale=scale,
            dense={name: self._moments[name].standardise(dense[name]) for name in dense},
            history_length=fitted.history_length,
        )

    def _label_units(
        self, unit: int, ratings: Ratings, past: UserPast
    ) -> tuple[FloatArray, FloatArray]:
        """Offset and scale of every row's label, in stars."""
        overall = self._fitted.census.overall
        if self._fitted.user_mean == "past":
            return past.user_mean, scale_of_the_past(ratings, past, overall)
        users, training = self._fitted.units.users[unit], ~ratings.is_validation
        user = ratings.user - users.start
        own = fit_users(user[training], ratings.stars[training], len(users), overall)
        return own.mean[user], own.scale[user]

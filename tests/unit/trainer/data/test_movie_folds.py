"""What others thought of a movie: a slow loop agrees, and the user's own rating has no part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.prepare.movie_folds import MovieFolds, fold_of, gather_folds
from trainer.data.prepare.movie_past import write_by_movie
from trainer.data.prepare.past import Ratings, UserPast

NUM_MOVIES = 4
ratings_of_all = st.lists(
    st.tuples(
        st.integers(0, 11),  # user
        st.integers(0, NUM_MOVIES - 1),
        st.floats(-2, 2),  # residual
        st.booleans(),  # for training
    ),
    min_size=1,
    max_size=40,
)


def columns_of(rows) -> tuple[np.ndarray, ...]:
    user, movie, residual, is_training = (np.array(each) for each in zip(*rows, strict=True))
    return user, movie, residual, is_training


@given(ratings_of_all)
def test_a_row_sees_training_ratings_by_users_of_other_folds(rows):
    user, movie, residual, is_training = columns_of(rows)
    fold = fold_of(user)
    folds = MovieFolds.empty(NUM_MOVIES)
    half = len(rows) // 2
    for part in (slice(0, half), slice(half, None)):
        folds.add(movie[part], fold[part], residual[part], is_training[part])
    dense = folds.dense(movie, fold)
    for row in range(len(rows)):
        others = is_training & (movie == movie[row]) & (fold != fold[row])
        expected = residual[others].sum() / (others.sum() + 5)
        assert dense["movie_others_mean"][row] == pytest.approx(expected, abs=1e-9)
        assert dense["movie_others_count"][row] == pytest.approx(np.log1p(others.sum()))


@given(ratings_of_all, st.data())
def test_neither_the_users_own_nor_held_out_ratings_change_it(rows, data):
    user, movie, residual, is_training = columns_of(rows)
    fold = fold_of(user)
    row = data.draw(st.integers(0, len(rows) - 1))
    hidden = (user == user[row]) | ~is_training
    values = []
    for changed in (residual, np.where(hidden, -residual, residual)):
        folds = MovieFolds.empty(NUM_MOVIES)
        folds.add(movie, fold, changed, is_training)
        values.append(folds.dense(movie, fold)["movie_others_mean"][row])
    assert values[0] == pytest.approx(values[1], abs=1e-12)


def test_units_on_disk_give_the_same_as_rows_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    folds, paths = MovieFolds.empty(NUM_MOVIES), []
    values = []
    for unit in range(3):
        user, movie = rng.integers(unit * 10, unit * 10 + 10, 50), rng.integers(0, NUM_MOVIES, 50)
        stars, is_validation = rng.normal(size=50).astype(np.float32), rng.random(50) < 0.2
        ratings = Ratings(user, movie, stars, np.arange(50), is_validation)
        nothing = np.zeros(50, dtype=np.int64)
        past = UserPast(nothing, nothing, stars, stars, ~is_validation)
        paths.append(tmp_path / f"{unit}.arrow")
        write_by_movie(paths[-1], ratings, past)
        folds.add(movie, fold_of(user), stars, ~is_validation)
        values.append((movie, fold_of(user), ~is_validation))
    found, moments = gather_folds(paths, NUM_MOVIES)
    np.testing.assert_allclose(found.total, folds.total, rtol=1e-5)
    np.testing.assert_array_equal(found.count, folds.count)
    means = [folds.dense(m, f)["movie_others_mean"][training] for m, f, training in values]
    assert moments["movie_others_mean"].mean == pytest.approx(np.concatenate(means).mean())

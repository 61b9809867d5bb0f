"""Features of a rating, against slow loops: never from itself or from the future."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.datasets.movielens.features import (
    MovieFolds,
    UserHistory,
    fold_of,
    genre_affinity,
    history_scale,
    movie_history,
    user_history,
)
from trainer.datasets.movielens.statistics import (
    Moments,
    Ratings,
    mark_validation,
)

GLOBAL_MEAN = 3.5
STARS = st.integers(1, 10).map(lambda halves: halves / 2)
# (user, time, movie), unique and sorted; few users, times and movies, so that ties are common.
EVENTS = st.sets(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 3)), min_size=4, max_size=40
).map(sorted)


def last_of_all(time: np.ndarray, fraction: float) -> np.ndarray:
    """Marks the last rows by time, of rows by user and time."""
    marked = np.zeros(len(time), dtype=bool)
    order = np.argsort(time, kind="stable")
    marked[order[len(time) - int(len(time) * fraction) :]] = True
    return marked


@st.composite
def ratings_of_all(draw) -> Ratings:
    """Ratings of a few users; the last ones by time are held out, globally or per user."""
    user, time, movie = np.array(draw(EVENTS)).T
    stars = draw(st.lists(STARS, min_size=len(user), max_size=len(user)))
    held_out = draw(st.sampled_from([mark_validation(user, 0.25), last_of_all(time, 0.25)]))
    return Ratings(user, movie, np.array(stars), time, held_out)


@given(ratings_of_all())
def test_the_past_is_what_a_loop_would_find(ratings):
    history = user_history(ratings, GLOBAL_MEAN)
    movies = movie_history(
        ratings.movie, ratings.timestamp, history.residual, ~ratings.is_validation
    )
    scale = history_scale(ratings, history, Moments(10, GLOBAL_MEAN, 10.0))
    columns = zip(ratings.user, ratings.movie, ratings.timestamp, strict=True)
    for row, (user, movie, time) in enumerate(columns):
        earlier = ratings.timestamp < time
        own = ratings.stars[earlier & (ratings.user == user)]
        assert history.user_mean[row] == pytest.approx((own.sum() + 5 * 3.5) / (len(own) + 5))
        assert history.residual[row] == pytest.approx(ratings.stars[row] - history.user_mean[row])
        assert history.user_count[row] == len(own)
        squares = ((own - history.user_mean[row]) ** 2).sum() + 5 * 1.0
        assert scale[row] == pytest.approx(np.sqrt(squares / (len(own) + 5)))
        same_movie = earlier & (ratings.movie == movie) & ~ratings.is_validation
        residuals = history.residual[same_movie]
        assert movies.count[row] == len(residuals)
        assert movies.mean[row] == pytest.approx(residuals.sum() / (len(residuals) + 5))


def test_moments_leave_out_what_is_missing_and_a_scale_blows_up_no_rounding():
    nan = float("nan")
    for values, moments in (
        ([2.0, 4.0, nan], (3.0, 1.0)),
        ([0.1 + 0.2, 0.3], (0.3, 1.0)),
        ([nan, nan], (0.0, 1.0)),
    ):
        found = Moments.of(np.array(values))
        assert (found.mean, found.std) == pytest.approx(moments)


NUM_MOVIES = 4
FOLD_RATINGS = st.lists(
    st.tuples(
        st.integers(0, 11),  # user
        st.integers(0, NUM_MOVIES - 1),
        st.floats(-2, 2),  # residual
        st.booleans(),  # for training
    ),
    min_size=1,
    max_size=40,
)


@given(FOLD_RATINGS)
def test_a_row_sees_training_ratings_by_users_of_other_folds(rows):
    user, movie, residual, is_training = (np.array(each) for each in zip(*rows, strict=True))
    fold = fold_of(user)
    columns = {"movie": movie, "fold": fold, "residual": residual, "is_training": is_training}
    half = len(rows) // 2
    parts = (slice(0, half), slice(half, None))
    units = [{name: values[part] for name, values in columns.items()} for part in parts]
    dense = MovieFolds(units, NUM_MOVIES).dense(movie, fold)
    for row in range(len(rows)):
        others = is_training & (movie == movie[row]) & (fold != fold[row])
        expected = residual[others].sum() / (others.sum() + 5)
        assert dense["movie_others_mean"][row] == pytest.approx(expected, abs=1e-9)
        assert dense["movie_others_count"][row] == pytest.approx(np.log1p(others.sum()))


rows_of_users = st.lists(
    st.tuples(
        st.integers(0, 2),  # user
        st.integers(0, 5),  # time
        st.sampled_from([1.0, 3.0, 5.0]),
        st.lists(st.integers(0, 3), max_size=3, unique=True),
    ),
    min_size=1,
    max_size=25,
)


def past_of(rows) -> tuple[UserHistory, np.ndarray, pa.ListArray]:
    user, time, stars, kinds = zip(*sorted(rows, key=lambda r: (r[0], r[1], r[3])), strict=True)
    ratings = Ratings(
        user=np.array(user),
        movie=np.arange(len(rows)),
        stars=np.array(stars),
        timestamp=np.array(time),
        is_validation=np.zeros(len(rows), dtype=bool),
    )
    history = user_history(ratings, global_mean=3.0)
    return history, ratings.timestamp, pa.array(kinds, pa.list_(pa.int64()))


@given(rows_of_users)
def test_the_taste_for_a_movie_is_the_mean_over_its_kinds_of_damped_means_of_earlier_rows(rows):
    history, time, kinds = past_of(rows)
    lists = kinds.to_pylist()
    expected = []
    for row, own in enumerate(lists):
        means = []
        is_earlier = (history.starts == history.starts[row]) & (time < time[row])
        for kind in own:
            earlier = [history.residual[i] for i in np.flatnonzero(is_earlier) if kind in lists[i]]
            means.append(sum(earlier) / (len(earlier) + 5))
        expected.append(np.mean(means) if means else 0.0)
    assert genre_affinity(history, time, kinds) == pytest.approx(expected, abs=1e-9)


TIMED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=40).map(
    sorted
)


@given(TIMED, st.sampled_from([0.1, 0.25, 0.5]))
def test_a_split_holds_out_the_last_ratings_of_each_user(events, fraction):
    user, time = np.array(events).T
    held_out = mark_validation(user, fraction)
    for one in np.unique(user):
        own = user == one
        # A user with too few ratings stays in training.
        assert held_out[own].sum() == int(own.sum() * fraction)
        if held_out[own].any():
            assert time[own & held_out].min() >= time[own & ~held_out].max()

"""A rating's features come from strictly earlier ratings: never from itself or a later one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.prepare.catalogue import count_tag_words, describe_movies, encode_catalogue
from trainer.data.prepare.movie_folds import MovieFolds, fold_of
from trainer.data.prepare.past import (
    MoviePast,
    Ratings,
    UserPast,
    look_back_at_movies,
    look_back_at_users,
    scale_of_the_past,
)
from trainer.data.prepare.rating_rows import (
    COLUMN_TYPES,
    RowBuilder,
    dense_of_movies,
    dense_of_users,
)
from trainer.data.prepare.statistics import Moments
from trainer.data.prepare.timeline import mark_validation
from trainer.data.prepare.vocabulary import fit_vocabulary

GLOBAL_MEAN = 3.5
STARS = st.integers(1, 10).map(lambda halves: halves / 2)
# (user, time, movie), unique and sorted; few users, times and movies, so that ties are common.
EVENTS = st.sets(
    st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 3)), min_size=4, max_size=40
).map(sorted)
NOT_FEATURES = {"rating", "user_mean", "user_scale"}
# What others say of a movie is from all of training (see test_movie_folds.py).
NOT_OF_THE_PAST = {"movie_others_mean", "movie_others_count"}


def look_back(ratings: Ratings, global_mean: float) -> tuple[UserPast, MoviePast]:
    """What was known of user and movie at each rating."""
    past = look_back_at_users(ratings, global_mean)
    movies = look_back_at_movies(
        ratings.movie, ratings.timestamp, past.residual, ~ratings.is_validation
    )
    return past, movies


@st.composite
def ratings_of_all(draw) -> Ratings:
    """Ratings of a few users; the last ones by time are held out, globally or per user."""
    user, time, movie = np.array(draw(EVENTS)).T
    stars = draw(st.lists(STARS, min_size=len(user), max_size=len(user)))
    split = draw(st.sampled_from(["global", "per_user"]))
    held_out = mark_validation(user, time, split, 0.25)
    return Ratings(user, movie, np.array(stars), time, held_out)


def own_features(ratings: Ratings) -> dict[str, np.ndarray]:
    """What of the past a row's own features and the offset and scale of its label are made of."""
    past, movies = look_back(ratings, GLOBAL_MEAN)
    return {
        "user_count": past.user_count,
        "user_mean": past.user_mean,
        "user_scale": scale_of_the_past(ratings, past, Moments(10, GLOBAL_MEAN, 10.0)),
        "movie_count": movies.count,
        "movie_mean": movies.mean,
    }


@given(ratings_of_all(), st.data())
def test_changing_a_rating_changes_no_feature_of_itself_or_of_earlier_rows(ratings, data):
    changed_row = data.draw(st.integers(0, len(ratings.stars) - 1))
    stars = ratings.stars.copy()
    stars[changed_row] = data.draw(STARS)
    before = own_features(ratings)
    after = own_features(replace(ratings, stars=stars))
    not_later = ratings.timestamp <= ratings.timestamp[changed_row]
    for name, values in before.items():
        assert after[name][not_later] == pytest.approx(values[not_later], abs=1e-9), name


@given(ratings_of_all())
def test_removing_what_is_not_earlier_changes_no_feature(ratings):
    for row in range(len(ratings.stars)):
        kept = ratings.timestamp < ratings.timestamp[row]
        kept[row] = True
        seen = Ratings(*(getattr(ratings, name)[kept] for name in Ratings.__annotations__))
        whole, cut = own_features(ratings), own_features(seen)
        place = int(kept[:row].sum())
        for name, values in whole.items():
            assert cut[name][place] == pytest.approx(values[row], abs=1e-9), name


@given(ratings_of_all())
def test_the_past_is_what_a_loop_would_find(ratings):
    past, movies = look_back(ratings, GLOBAL_MEAN)
    columns = zip(ratings.user, ratings.movie, ratings.timestamp, strict=True)
    for row, (user, movie, time) in enumerate(columns):
        earlier = ratings.timestamp < time
        own = ratings.stars[earlier & (ratings.user == user)]
        assert past.user_mean[row] == pytest.approx((own.sum() + 5 * 3.5) / (len(own) + 5))
        assert past.residual[row] == pytest.approx(ratings.stars[row] - past.user_mean[row])
        same_movie = earlier & (ratings.movie == movie) & ~ratings.is_validation
        residuals = past.residual[same_movie]
        assert movies.count[row] == len(residuals)
        assert movies.mean[row] == pytest.approx(residuals.sum() / (len(residuals) + 5))


@given(ratings_of_all())
def test_held_out_ratings_can_be_hidden_from_every_past(ratings):
    past = look_back_at_users(ratings, GLOBAL_MEAN, hide_validation=True)
    for row, time in enumerate(ratings.timestamp):
        same_user = ratings.user == ratings.user[row]
        seen = same_user & (ratings.timestamp < time) & ~ratings.is_validation
        assert list(range(past.starts[row], past.ends[row])) == np.flatnonzero(seen).tolist()
        stars = ratings.stars[seen]
        assert past.user_mean[row] == pytest.approx((stars.sum() + 5 * 3.5) / (len(stars) + 5))


def test_a_user_without_a_past_is_as_the_global_mean():
    one = Ratings(*(np.array([value]) for value in (7, 1, 5.0, 100, False)))
    past, movies = look_back(one, GLOBAL_MEAN)
    assert past.user_mean.tolist() == [GLOBAL_MEAN]
    assert past.residual.tolist() == [1.5]
    assert movies.mean.tolist() == [0]


def build(ratings: Ratings) -> pl.DataFrame:
    """All prepared columns of all rows, in the order of `ratings`."""
    every_movie = pl.Series("movieId", np.unique(ratings.movie))
    movies = pl.DataFrame(
        {"movieId": every_movie, "title": ["A Night (1999)"] * len(every_movie), "genres": "Drama"}
    )
    tags = pl.DataFrame(schema={"movieId": pl.Int64, "tag": pl.String})
    words = count_tag_words(tags)
    described = describe_movies(movies, words, every_movie, max_tokens_per_movie=4)
    training = ~ratings.is_validation
    users = fit_vocabulary("user_id", pl.Series(ratings.user[training]))
    rated = fit_vocabulary("movie_id", pl.Series(ratings.movie[training]))
    words = [
        fit_vocabulary(name, described[name].explode().drop_nulls())
        for name in ("genres", "tokens")
    ]
    past, movie_past = look_back(ratings, float(ratings.stars[training].mean()))
    catalogue = encode_catalogue(described, *words)
    position = np.searchsorted(catalogue.ids, ratings.movie)
    movie_index = rated.encode(pl.Series(ratings.movie))
    ratings = replace(ratings, movie=position)
    dense = dense_of_users(ratings, past, catalogue) | dense_of_movies(movie_past)
    folds, fold = MovieFolds.empty(len(every_movie)), fold_of(ratings.user)
    folds.add(position, fold, past.residual, training)
    dense |= folds.dense(position, fold)
    builder = RowBuilder(
        ratings=ratings,
        past=past,
        user_index=users.encode(pl.Series(ratings.user)),
        movie_index=movie_index,
        catalogue=catalogue,
        offset=past.user_mean,
        scale=scale_of_the_past(ratings, past, Moments.of(ratings.stars[training])),
        dense={name: Moments.of(v[training]).standardise(v) for name, v in dense.items()},
        history_length=3,
    )
    return pl.DataFrame(builder.build(np.arange(len(ratings.user))))


def restandardised(values: np.ndarray) -> np.ndarray:
    """The same values whatever shift and scale they were stored with."""
    centred = values - values.mean()
    return centred / spread if (spread := centred.std()) > 1e-4 else np.zeros(len(values))


@settings(deadline=None)
@given(ratings_of_all(), st.data())
def test_swapping_later_ratings_changes_no_feature_column_of_earlier_rows(ratings, data):
    # A swap among training rows keeps the one thing fitted on all stars: their global mean.
    since = data.draw(st.sampled_from(np.unique(ratings.timestamp).tolist()))
    movable = np.flatnonzero((ratings.timestamp >= since) & ~ratings.is_validation)
    stars = ratings.stars.copy()
    stars[movable] = stars[data.draw(st.permutations(movable.tolist()))]
    early = ratings.timestamp <= since
    before = build(ratings).filter(early)
    after = build(replace(ratings, stars=stars)).filter(early)
    for name in COLUMN_TYPES.keys() - NOT_FEATURES - NOT_OF_THE_PAST:
        if COLUMN_TYPES[name] == "float32":
            one, other = (restandardised(frame[name].to_numpy()) for frame in (before, after))
            assert one == pytest.approx(other, abs=1e-2), name
        else:
            assert before[name].to_list() == after[name].to_list(), name


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 4.0, 6.0], [-1.0, 1.0, 3.0]),
        ([0.1 + 0.2, 0.3, 5.3], [0.0, 0.0, 5.0]),
        ([float("nan"), float("nan"), 2.0], [0.0, 0.0, 2.0]),
    ],
    ids=["spread", "constant but for rounding", "missing"],
)
def test_standardising_fits_the_training_rows_and_blows_up_no_rounding(values, expected):
    training = np.array([True, True, False])
    column = np.array(values)
    found = Moments.of(column[training]).standardise(column)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)

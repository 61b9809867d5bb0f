"""Made-up ratings in the MovieLens csv format, so that everything can be tried without a download.

A latent-factor model: stars = mean + user bias + movie bias + user factors . movie factors + noise,
rounded to halves. Movies are drawn by a Zipf law, users by a log-normal activity; a movie's factors
follow its genres, and so do the words of its title and tags. The same seed gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.prepare.writer import staged_folder
from trainer.data.ragged import IntArray, offsets_of

FloatArray = NDArray[np.float64]

# Users and movies per rating in ml-latest-small, and floors that leave room for distinct pairs.
_USERS_PER_RATING = 671 / 100_004
_MOVIES_PER_RATING = 9_125 / 100_004
_MIN_USERS = 20
_MIN_PAIRS_PER_RATING = 10


def _words(text: str) -> NDArray[np.str_]:
    return np.array(text.split())


_GENRES = _words(
    "Action Adventure Animation Children Comedy Crime Documentary Drama Fantasy Film-Noir Horror "
    "Musical Mystery Romance Sci-Fi Thriller War Western"
)
_TITLE_WORDS = _words(
    "Night River Empire Garden Stranger Road Winter Machine Heart Shadow Island Return Secret City "
    "Storm Letter Glass Train House Summer Voice Crown Mirror Ghost Mountain Promise Silence Fire "
    "Daughter King Moon Harbor Desert Dance Wolf Star Border Memory Thief Bridge"
)
_TAG_WORDS = _words(
    "gripping slow clever funny dark visual overlong classic quirky moving violent tense"
)
_NUM_FACTORS = 8
_MEAN_STARS = 3.5
_USER_BIAS_STD = 0.4
_MOVIE_BIAS_STD = 0.45
_FACTOR_STD = 0.45
_NOISE_STD = 0.7
_ZIPF_EXPONENT = 0.9
_TAGS_PER_RATING = 0.013
_FIRST_TIME_S = 820_454_400
_LAST_TIME_S = 1_451_606_400
_MEAN_GAP_S = 3600.0


@dataclass(frozen=True)
class _Movies:
    """Genre membership [n, genres], factors [n, factors], bias [n], raw ids [n], titles [n]."""

    genres: NDArray[np.bool_]
    factors: FloatArray
    bias: FloatArray
    ids: IntArray
    titles: NDArray[np.str_]


def generate_movielens(out: Path, *, num_ratings: int, seed: int, overwrite: bool = False) -> None:
    """Write ratings.csv, movies.csv and tags.csv to the new folder `out`.

    Numbers of users and movies follow from `num_ratings` as in ml-latest-small (671 and 9125 for
    100 004 ratings), with floors for small sets. Raises `OutputExistsError`, or ValueError for
    `num_ratings` below 1.
    """
    if num_ratings < 1:
        raise ValueError(f"num_ratings must be at least 1, got {num_ratings}")
    rng = np.random.default_rng(seed)
    num_users = max(_MIN_USERS, round(num_ratings * _USERS_PER_RATING))
    min_movies = -(-_MIN_PAIRS_PER_RATING * num_ratings // num_users)
    movies = _make_movies(rng, max(min_movies, round(num_ratings * _MOVIES_PER_RATING)))
    user, movie = _draw_pairs(rng, num_ratings, num_users, len(movies.ids))
    ratings = pl.DataFrame(
        {
            "userId": user + 1,
            "movieId": movies.ids[movie],
            "rating": _draw_stars(rng, user, movie, movies),
            "timestamp": _draw_times(rng, user),
        }
    )
    with staged_folder(out, overwrite=overwrite, proof="ratings.csv") as folder:
        _movies_frame(movies).write_csv(folder / "movies.csv")
        _draw_tags(rng, ratings, movie, movies).write_csv(folder / "tags.csv")
        ratings.sort("userId", "movieId").write_csv(folder / "ratings.csv")


def _make_movies(rng: np.random.Generator, num_movies: int) -> _Movies:
    genres = np.zeros((num_movies, len(_GENRES)), dtype=bool)
    # Three draws with repetition give one to three genres.
    drawn = rng.choice(len(_GENRES), (num_movies, 3), p=_zipf(len(_GENRES)))
    genres[np.arange(num_movies)[:, None], drawn] = True
    genre_factors = rng.normal(size=(len(_GENRES), _NUM_FACTORS))
    factors = genres @ genre_factors / genres.sum(1, keepdims=True)
    factors += rng.normal(size=factors.shape)
    return _Movies(
        genres=genres,
        factors=factors / factors.std(),
        bias=rng.normal(scale=_MOVIE_BIAS_STD, size=num_movies),
        ids=np.cumsum(rng.integers(1, 5, num_movies)),
        titles=_make_titles(rng, drawn[:, 0]),
    )


def _make_titles(rng: np.random.Generator, genre: IntArray) -> NDArray[np.str_]:
    """ "The Night Garden (1994)"; the first word leans on the movie's genre."""
    leaning = (genre * 3 + rng.integers(0, 6, len(genre))) % len(_TITLE_WORDS)
    any_word = rng.integers(0, len(_TITLE_WORDS), len(genre))
    years = 2015 - np.minimum(rng.exponential(15, len(genre)).astype(np.int64), 95)
    words = np.char.add(np.char.add(_TITLE_WORDS[leaning], " "), _TITLE_WORDS[any_word])
    return np.char.add(np.char.add("The ", words), np.char.mod(" (%d)", years))


def _zipf(size: int) -> FloatArray:
    weights = np.arange(1, size + 1) ** -_ZIPF_EXPONENT
    return weights / weights.sum()


def _draw_pairs(
    rng: np.random.Generator, num_ratings: int, num_users: int, num_movies: int
) -> tuple[IntArray, IntArray]:
    """Distinct (user, movie) pairs, sorted by user; active users and popular movies come often."""
    activity = rng.lognormal(sigma=1.0, size=num_users)
    activity /= activity.sum()
    popularity = rng.permutation(_zipf(num_movies))
    pairs = np.empty(0, dtype=np.int64)
    while len(pairs) < num_ratings:
        user = rng.choice(num_users, num_ratings, p=activity)
        movie = rng.choice(num_movies, num_ratings, p=popularity)
        drawn = np.concatenate([pairs, user * num_movies + movie])
        _, first = np.unique(drawn, return_index=True)
        pairs = drawn[np.sort(first)][:num_ratings]
    user, movie = np.divmod(pairs, num_movies)
    order = np.argsort(user, kind="stable")
    return user[order], movie[order]


def _draw_stars(
    rng: np.random.Generator, user: IntArray, movie: IntArray, movies: _Movies
) -> FloatArray:
    num_users = int(user.max()) + 1
    user_factors = rng.normal(size=(num_users, _NUM_FACTORS))
    affinity = np.einsum("rf,rf->r", user_factors[user], movies.factors[movie])
    stars = (
        _MEAN_STARS
        + rng.normal(scale=_USER_BIAS_STD, size=num_users)[user]
        + movies.bias[movie]
        + affinity * _FACTOR_STD / np.sqrt(_NUM_FACTORS)
        + rng.normal(scale=_NOISE_STD, size=len(user))
    )
    return np.clip(np.round(stars * 2) / 2, 0.5, 5.0)


def _draw_times(rng: np.random.Generator, user: IntArray) -> IntArray:
    """Unix seconds: each user begins some day and rates on, with exponential gaps."""
    counts = np.bincount(user)
    gaps = rng.exponential(_MEAN_GAP_S, len(user))
    elapsed = np.cumsum(gaps)
    begins = offsets_of(counts)[:-1]
    first = np.repeat(elapsed[np.minimum(begins, len(user) - 1)], counts)
    joined = rng.integers(_FIRST_TIME_S, _LAST_TIME_S, len(counts))
    times = np.repeat(joined, counts) + (elapsed - first).astype(np.int64)
    # Within a user the order of movies must not follow from the order of drawing.
    shuffled = np.lexsort((rng.random(len(user)), user))
    return times[shuffled]


def _movies_frame(movies: _Movies) -> pl.DataFrame:
    counts = movies.genres.sum(1)
    names = pl.Series(_GENRES[np.nonzero(movies.genres)[1]])
    owner = pl.Series(np.repeat(movies.ids, counts))
    joined = (
        pl.DataFrame({"movieId": owner, "genre": names})
        .group_by("movieId", maintain_order=True)
        .agg(pl.col("genre").str.join("|").alias("genres"))
    )
    return pl.DataFrame({"movieId": movies.ids, "title": movies.titles, "genres": joined["genres"]})


def _draw_tags(
    rng: np.random.Generator, ratings: pl.DataFrame, movie: IntArray, movies: _Movies
) -> pl.DataFrame:
    """Tags of one or two words, put on a few of the ratings a minute after them."""
    num_tags = max(1, int(len(ratings) * _TAGS_PER_RATING))
    rows = np.sort(rng.choice(len(ratings), num_tags, replace=False))
    main_genre = movies.genres[movie[rows]].argmax(1)
    word = _TAG_WORDS[(main_genre + rng.integers(0, 3, num_tags)) % len(_TAG_WORDS)]
    genre = np.char.add(" ", np.char.lower(_GENRES[main_genre]))
    tag = np.char.add(word, np.where(rng.random(num_tags) < 0.5, genre, ""))
    tagged = ratings[rows]
    return pl.DataFrame(
        {
            "userId": tagged["userId"],
            "movieId": tagged["movieId"],
            "tag": tag,
            "timestamp": tagged["timestamp"] + 60,
        }
    )

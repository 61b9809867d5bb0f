"""Synthetic ratings in MovieLens' csv format, with a known irreducible error.

stars = round to halves and clip to [0.5, 5] of: mean + user bias + movie bias + user factors .
movie factors + normal noise. The best predictor gives the mean of the rounded stars; the root mean
square of what remains is the irreducible error, which goes to `teacher.json`. Movies are drawn by a
Zipf law, users by a log-normal activity; a movie's factors follow its genres, and so do the words
of its title and tags. Users are made in chunks, so that memory does not grow with the number of
ratings. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.ragged import IntArray, offsets_of
from trainer.datasets.io.journal import Advance, progress_bars
from trainer.datasets.io.staging import staged_folder
from trainer.datasets.movielens.source import cut_users

FloatArray = NDArray[np.float64]
NUM_FACTORS = 8
MEAN_STARS = 3.5
USER_BIAS_STD = 0.4
MOVIE_BIAS_STD = 0.45
AFFINITY_STD = 0.45
NOISE_STD = 0.7
_LEVELS = np.arange(1, 11) / 2
_GRID = np.arange(-6.0, 13.0, 0.005)


def observed_stars(rng: np.random.Generator, expected: FloatArray) -> FloatArray:
    """Stars as a user gives them: with noise, in halves from 0.5 to 5."""
    noisy = expected + rng.normal(scale=NOISE_STD, size=len(expected))
    return np.clip(np.round(noisy * 2) / 2, 0.5, 5.0)


def remaining_variance(expected: FloatArray) -> FloatArray:
    """Variance of the stars that are given where these are expected before noise."""
    return np.interp(expected, _GRID, _variance_on_grid())


@cache
def _variance_on_grid() -> FloatArray:
    """Variance of the rounded and clipped stars, for each point of the grid."""
    edges = (_LEVELS[:-1] + 0.25)[None, :]
    deviations = (edges - _GRID[:, None]) / NOISE_STD
    below = 0.5 * (1 + np.vectorize(math.erf)(deviations / math.sqrt(2)))
    chance = np.diff(below, axis=1, prepend=0, append=1)
    return chance @ _LEVELS**2 - (chance @ _LEVELS) ** 2


# ml-latest-small. Up to its size users, movies and tags are in proportion to ratings; beyond it
# movies and tags follow powers that lead to ml-32m (200 948, 87 585 and 2 000 072).
_SMALL_RATINGS, _SMALL_USERS, _SMALL_MOVIES = 100_004, 671, 9_125
_SMALL_TAGS_PER_RATING, _MAX_TAGS_PER_RATING = 0.013, 0.0625
_MOVIES_POWER, _TAGS_POWER = 0.392, 1.273
# Floors that leave room for distinct pairs of user and movie.
_MIN_USERS = 20
_MIN_PAIRS_PER_RATING = 10
TEACHER_NAME = "teacher.json"
_CHUNK_ROWS = 1 << 20
# Draws by popularity before what is missing is drawn evenly.
_POPULAR_ROUNDS = 12


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
_ZIPF_EXPONENT = 0.9
_FIRST_TIME_S = 820_454_400
_LAST_TIME_S = 1_451_606_400
_MEAN_GAP_S = 3600.0


@dataclass(frozen=True)
class _Movies:
    """Genre membership [n, genres], factors [n, factors], bias [n], raw ids [n], titles [n].

    `by_rank` [n] are movies from the most to the least popular, `rank_cdf` [n] the chance of being
    of that rank or a better one.
    """

    genres: NDArray[np.bool_]
    factors: FloatArray
    bias: FloatArray
    ids: IntArray
    titles: NDArray[np.str_]
    by_rank: IntArray
    rank_cdf: FloatArray


@dataclass(frozen=True)
class Sizes:
    ratings: int
    users: int
    movies: int
    tags: int

    @classmethod
    def of(cls, num_ratings: int) -> Sizes:
        """Numbers of users, movies and tags that go with a number of ratings."""
        growth = num_ratings / _SMALL_RATINGS
        users = max(_MIN_USERS, round(_SMALL_USERS * growth))
        movies = _SMALL_MOVIES * growth ** (_MOVIES_POWER if growth > 1 else 1)
        floor = -(-_MIN_PAIRS_PER_RATING * num_ratings // users)
        per_rating = _SMALL_TAGS_PER_RATING * max(1, growth) ** (_TAGS_POWER - 1)
        tags = max(1, int(num_ratings * min(per_rating, _MAX_TAGS_PER_RATING)))
        return cls(num_ratings, users, max(floor, round(movies)), tags)


def generate_movielens(
    out: str | Path, *, num_ratings: int, seed: int, overwrite: bool = False
) -> float:
    """Write ratings.csv, movies.csv, tags.csv and teacher.json to the new local folder `out`.

    Gives the error, in stars, of the best predictor there can be.

    Numbers of users, movies and tags follow from `num_ratings` as in ml-latest-small and ml-32m,
    with floors for small sets. Raises `OutputExistsError`, or `StorageError` for a remote `out`.
    """
    sizes = Sizes.of(num_ratings)
    movies = _make_movies(np.random.default_rng([seed, 0]), sizes.movies)
    with (
        staged_folder(out, overwrite=overwrite, proof="ratings.csv") as folder,
        progress_bars() as progress,
    ):
        task = progress.add_task("generating ratings", total=num_ratings)
        _movies_frame(movies).write_csv(folder / "movies.csv")
        variance = _write_ratings(folder, sizes, seed, movies, partial(progress.advance, task))
        irreducible_rmse = math.sqrt(variance / num_ratings)
        _write_teacher(folder / TEACHER_NAME, sizes, seed, irreducible_rmse)
    return irreducible_rmse


def _write_ratings(
    folder: Path, sizes: Sizes, seed: int, movies: _Movies, advance: Advance
) -> float:
    """Write ratings.csv and tags.csv, one chunk of users after the other.

    Gives the sum over ratings of the variance that is left to one who knows the teacher.
    """
    variance = 0.0
    counts = _ratings_per_user(np.random.default_rng([seed, 1]), sizes)
    with (folder / "ratings.csv").open("wb") as ratings, (folder / "tags.csv").open("wb") as tags:
        for number, users in enumerate(cut_users(counts, _CHUNK_ROWS)):
            rng = np.random.default_rng([seed, 2, number])
            made, own_variance = _make_ratings(rng, users, counts, movies)
            variance += own_variance
            before, after = (int(counts[:user].sum()) for user in (users.start, users.stop))
            num_tags = sizes.tags * after // sizes.ratings - sizes.tags * before // sizes.ratings
            drawn = _draw_tags(rng, made, num_tags, movies)
            made.drop("movie").write_csv(ratings, include_header=number == 0)
            drawn.write_csv(tags, include_header=number == 0)
            advance(after - before)
    return variance


def _write_teacher(path: Path, sizes: Sizes, seed: int, irreducible_rmse: float) -> None:
    document = {
        "formula": "stars = clip(round_to_halves(mean + user_bias + movie_bias + user_factors . "
        "movie_factors * affinity_std / sqrt(num_factors) + noise), 0.5, 5)",
        "parameters": {
            "mean": MEAN_STARS,
            "user_bias_std": USER_BIAS_STD,
            "movie_bias_std": MOVIE_BIAS_STD,
            "affinity_std": AFFINITY_STD,
            "num_factors": NUM_FACTORS,
            "noise_std": NOISE_STD,
        },
        "sizes": vars(sizes),
        "seed": seed,
        "irreducible_rmse": irreducible_rmse,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def _make_movies(rng: np.random.Generator, num_movies: int) -> _Movies:
    genres = np.zeros((num_movies, len(_GENRES)), dtype=bool)
    # Three draws with repetition give one to three genres.
    drawn = rng.choice(len(_GENRES), (num_movies, 3), p=_zipf(len(_GENRES)))
    genres[np.arange(num_movies)[:, None], drawn] = True
    genre_factors = rng.normal(size=(len(_GENRES), NUM_FACTORS))
    factors = genres @ genre_factors / genres.sum(1, keepdims=True)
    factors += rng.normal(size=factors.shape)
    return _Movies(
        genres=genres,
        factors=factors / factors.std(),
        bias=rng.normal(scale=MOVIE_BIAS_STD, size=num_movies),
        ids=np.cumsum(rng.integers(1, 5, num_movies)),
        titles=_make_titles(rng, drawn[:, 0]),
        by_rank=rng.permutation(num_movies),
        rank_cdf=np.cumsum(_zipf(num_movies)),
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


def _ratings_per_user(rng: np.random.Generator, sizes: Sizes) -> IntArray:
    """Ratings of each user, in sum those of `sizes`; nobody rates more than half of the movies."""
    activity = rng.lognormal(sigma=1.0, size=sizes.users)
    most = max(1, sizes.movies // 2)
    counts = np.minimum((sizes.ratings * activity / activity.sum()).astype(np.int64), most)
    while (missing := sizes.ratings - int(counts.sum())) > 0:
        free = rng.permutation(np.flatnonzero(counts < most))
        counts[free[:missing]] += 1
    return counts


def _make_ratings(
    rng: np.random.Generator, users: range, counts: IntArray, movies: _Movies
) -> tuple[pl.DataFrame, float]:
    """The ratings of some users as in ratings.csv, and `movie`, the place in `movies`.

    With the sum of the variance that is left of them.
    """
    user, movie = _draw_pairs(rng, counts[users.start : users.stop], movies)
    factors = rng.normal(size=(len(users), NUM_FACTORS))
    bias = rng.normal(scale=USER_BIAS_STD, size=len(users))
    affinity = np.einsum("rf,rf->r", factors[user], movies.factors[movie])
    expected = MEAN_STARS + bias[user] + movies.bias[movie]
    expected = expected + affinity * AFFINITY_STD / np.sqrt(NUM_FACTORS)
    ratings = pl.DataFrame(
        {
            "userId": user + users.start + 1,
            "movieId": movies.ids[movie],
            "rating": observed_stars(rng, expected),
            "timestamp": _draw_times(rng, user),
            "movie": movie,
        }
    )
    return ratings, float(remaining_variance(expected).sum())


def _draw_pairs(
    rng: np.random.Generator, counts: IntArray, movies: _Movies
) -> tuple[IntArray, IntArray]:
    """Distinct movies for each user, popular ones more often; sorted by (user, movie)."""
    num_movies = len(movies.ids)
    pairs, missing, num_rounds = np.empty(0, dtype=np.int64), counts, 0
    while missing.any():
        user = np.repeat(np.arange(len(counts)), missing)
        chance = rng.random(len(user))
        if num_rounds < _POPULAR_ROUNDS:
            rank = np.searchsorted(movies.rank_cdf, chance)
            movie = movies.by_rank[np.minimum(rank, num_movies - 1)]
        else:
            movie = (chance * num_movies).astype(np.int64)
        pairs = np.sort(np.concatenate([pairs, user * num_movies + movie]))
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        missing = counts - np.bincount(pairs // num_movies, minlength=len(counts))
        num_rounds += 1
    user, movie = np.divmod(pairs, num_movies)
    return user, movie


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
    rng: np.random.Generator, ratings: pl.DataFrame, num_tags: int, movies: _Movies
) -> pl.DataFrame:
    """Tags of one or two words, put on a few of the ratings a minute after them."""
    rows = np.sort(rng.choice(len(ratings), num_tags, replace=False))
    tagged = ratings[rows]
    main_genre = movies.genres[tagged["movie"].to_numpy()].argmax(1)
    word = _TAG_WORDS[(main_genre + rng.integers(0, 3, num_tags)) % len(_TAG_WORDS)]
    genre = np.char.add(" ", np.char.lower(_GENRES[main_genre]))
    tag = np.char.add(word, np.where(rng.random(num_tags) < 0.5, genre, ""))
    return tagged.select("userId", "movieId", pl.Series("tag", tag), pl.col("timestamp") + 60)

"""The peer of the prepare benchmark: MovieLens features the way published notebooks make them.

After the published MovieLens-32M design (github.com/funktor/recsys, data_generator.py and README):
vocabularies are dictionaries counted in Python and put on by `apply`, movies are merged in, users
are grouped, and what somebody rated before is gathered row by row; its author names an hour for
the latter. The columns are those that `shardloom data prepare movielens` writes.

There are two styles. `published` is the above, with `iterrows` as the loop. `careful` is what
somebody who knows pandas would make of it: maps instead of `apply`, and loops over plain lists
where pandas has no operation on columns. Cumulative sums are by column in both.

Rows at one timestamp are taken in order here, where ours are never in the past of one another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

Style = Literal["published", "careful"]

_PRIOR_ROWS = 5.0
_NUM_FOLDS = 5
_MIN_SCALE_RATIO = 0.25
_WORD = r"[^\W_]+(?:['\u2019][^\W\d_]+)*"
_YEAR = r"\((\d{4})\)\s*$"
_NO_GENRES = "(no genres listed)"
_SECONDS_PER_YEAR = 365.25 * 86400
# As `MovieLensOptions` has them.
_VALIDATION_FRACTION = 0.1
_HISTORY_LENGTH = 10
_MIN_COUNT, _MAX_TOKENS, _MAX_OF_MOVIE = 2, 20_000, 24


def prepare(source: Path, out: Path, style: Style) -> None:
    """Write `train` and `validation` of the csv folder `source` to the folder `out` as Parquet."""
    ratings = pd.read_csv(source / "ratings.csv").sort_values(["userId", "timestamp", "movieId"])
    ratings = ratings.reset_index(drop=True)
    ratings["is_validation"] = _last_of_each_user(ratings)
    tags = _earlier_tags(pd.read_csv(source / "tags.csv"), ratings)
    movies = _describe_movies(pd.read_csv(source / "movies.csv"), tags)
    movies = _with_indices(movies, ratings, style)
    frame = ratings.merge(movies, on="movieId", how="left")
    frame = _with_user_labels(frame)
    frame = _with_past(frame)
    frame = _with_histories(frame, style)
    frame = _with_known_numbers(frame)
    _write(frame, out)


def _last_of_each_user(ratings: pd.DataFrame) -> pd.Series:
    by_user = ratings.groupby("userId")["movieId"]
    count = by_user.transform("size")
    return by_user.cumcount() >= count - (count * _VALIDATION_FRACTION).astype(int)


def _earlier_tags(tags: pd.DataFrame, ratings: pd.DataFrame) -> pd.DataFrame:
    begins = ratings[ratings["is_validation"]].groupby("userId")["timestamp"].min()
    begin = tags["userId"].map(begins)
    return tags[begin.isna() | (tags["timestamp"] < begin)]


def _describe_movies(movies: pd.DataFrame, tags: pd.DataFrame) -> pd.DataFrame:
    title = movies["title"].str.replace(_YEAR, "", regex=True)
    movies["year"] = pd.to_numeric(movies["title"].str.extract(_YEAR)[0])
    movies["genres"] = movies["genres"].str.split("|")
    movies["genres"] = movies["genres"].apply(lambda g: [x for x in g if x != _NO_GENRES])
    title_words = title.str.lower().str.findall(_WORD)
    words = tags.assign(word=tags["tag"].str.lower().str.findall(_WORD)).explode("word")
    counts = words.groupby(["movieId", "word"]).size().rename("n").reset_index()
    counts = counts.sort_values(["movieId", "n", "word"], ascending=[True, False, True])
    of_movie = counts.groupby("movieId")["word"].apply(list)
    tag_words = movies["movieId"].map(of_movie)
    movies["tokens"] = [
        list(dict.fromkeys([*first, *(then if isinstance(then, list) else [])]))[:_MAX_OF_MOVIE]
        for first, then in zip(title_words, tag_words, strict=True)
    ]
    return movies.drop(columns="title")


def _with_indices(movies: pd.DataFrame, ratings: pd.DataFrame, style: Style) -> pd.DataFrame:
    training = ratings[~ratings["is_validation"]]
    users, rated = _index_of(training["userId"]), _index_of(training["movieId"])
    ratings["user_id"] = _encode(ratings["userId"], users, style)
    ratings["movie_id"] = _encode(ratings["movieId"], rated, style)
    seen = movies[movies["movieId"].isin(rated)]
    genres = _index_of(seen["genres"].explode().dropna())
    tokens = _index_of(_frequent(seen["tokens"].explode().dropna()))
    movies["genres"] = movies["genres"].apply(lambda words: [genres.get(w, 0) for w in words])
    movies["tokens"] = movies["tokens"].apply(lambda words: [tokens.get(w, 0) for w in words])
    return movies


def _index_of(values: pd.Series) -> dict:
    return {value: index for index, value in enumerate(sorted(values.unique()), start=1)}


def _encode(values: pd.Series, index: dict, style: Style) -> pd.Series:
    if style == "careful":
        return values.map(index).fillna(0).astype(int)
    return values.apply(lambda value: index.get(value, 0))


def _frequent(words: pd.Series) -> pd.Series:
    counts = words.value_counts().rename_axis("word").reset_index(name="n")
    counts = counts[counts["n"] >= _MIN_COUNT].sort_values(["n", "word"], ascending=[False, True])
    return counts["word"].head(_MAX_TOKENS)


def _with_user_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and spread of the user's earlier stars, leaning on those of everybody."""
    training = frame.loc[~frame["is_validation"], "rating"]
    mean, std = training.mean(), training.std(ddof=0)
    by_user = frame.groupby("userId")["rating"]
    earlier = by_user.cumcount()
    total = by_user.cumsum() - frame["rating"]
    frame["user_mean"] = (total + _PRIOR_ROWS * mean) / (earlier + _PRIOR_ROWS)
    stars2 = frame["rating"] ** 2
    squares = stars2.groupby(frame["userId"]).cumsum() - stars2
    deviation = squares - 2 * frame["user_mean"] * total + earlier * frame["user_mean"] ** 2
    variance = (deviation.clip(lower=0) + _PRIOR_ROWS * std**2) / (earlier + _PRIOR_ROWS)
    frame["user_scale"] = np.sqrt(variance).clip(lower=_MIN_SCALE_RATIO * std)
    return frame


def _with_past(frame: pd.DataFrame) -> pd.DataFrame:
    """What was known of user and movie just before each rating."""
    frame["user_past_mean"] = frame["user_mean"]
    frame["residual"] = frame["rating"] - frame["user_past_mean"]
    frame["user_activity"] = np.log1p(frame.groupby("userId").cumcount())
    frame["user_genre_past_mean"] = _genre_past_mean(frame)
    by_time = frame.sort_values(["movieId", "timestamp"], kind="stable")
    counted = (~by_time["is_validation"]).astype(float)
    count = counted.groupby(by_time["movieId"]).cumsum() - counted
    worth = by_time["residual"] * counted
    total = worth.groupby(by_time["movieId"]).cumsum() - worth
    frame["movie_popularity"] = np.log1p(count)
    frame["movie_past_mean"] = total / (count + _PRIOR_ROWS)
    _add_others(frame)
    rated_in = 1970 + frame["timestamp"] / _SECONDS_PER_YEAR
    frame["movie_age"] = np.log1p((rated_in - frame["year"]).clip(lower=0))
    return frame


def _add_others(frame: pd.DataFrame) -> None:
    """What the users of the other folds thought of the movie."""
    number = frame["userId"].rank(method="dense").astype(int) - 1
    training = frame[["movieId", "residual"]].assign(fold=number % _NUM_FOLDS)
    training = training[~frame["is_validation"]]
    of_movie = training.groupby("movieId")["residual"].agg(["sum", "size"])
    own = training.groupby(["movieId", "fold"])["residual"].agg(["sum", "size"])
    whole = frame[["movieId"]].assign(fold=number % _NUM_FOLDS)
    whole = whole.merge(of_movie, on="movieId", how="left")
    whole = whole.merge(own, on=["movieId", "fold"], how="left", suffixes=("", "_own")).fillna(0)
    count = whole["size"] - whole["size_own"]
    frame["movie_others_mean"] = (whole["sum"] - whole["sum_own"]) / (count + _PRIOR_ROWS)
    frame["movie_others_count"] = np.log1p(count)


def _genre_past_mean(frame: pd.DataFrame) -> pd.Series:
    """Mean over the movie's genres of how the user liked earlier movies of each."""
    rows = frame[["userId", "genres", "residual"]].explode("genres").reset_index()
    of_genre = rows.groupby(["userId", "genres"])["residual"]
    earlier = of_genre.cumsum() - rows["residual"]
    rows["mean"] = earlier / (of_genre.cumcount() + _PRIOR_ROWS)
    return rows.groupby("index")["mean"].mean().fillna(0)


def _with_histories(frame: pd.DataFrame, style: Style) -> pd.DataFrame:
    """The user's earlier movies and ratings, row by row."""
    histories = frame.groupby("userId", group_keys=False)[["movie_id", "residual"]].apply(
        lambda user: _histories_of(user, style)
    )
    return frame.join(histories)


def _histories_of(user: pd.DataFrame, style: Style) -> pd.DataFrame:
    movies: list[int] = []
    residuals: list[float] = []
    liked: list[int] = []
    disliked: list[int] = []
    rows = []
    for movie, residual in _pairs_of(user, style):
        rows.append([each[-_HISTORY_LENGTH:] for each in (movies, residuals, liked, disliked)])
        movies.append(movie)
        residuals.append(residual)
        if residual > 0:
            liked.append(movie)
        elif residual < 0:
            disliked.append(movie)
    names = ["history_movies", "history_ratings", "history_liked", "history_disliked"]
    return pd.DataFrame(rows, columns=names, index=user.index)


def _pairs_of(user: pd.DataFrame, style: Style) -> Iterable[tuple[int, float]]:
    if style == "careful":
        return zip(user["movie_id"].tolist(), user["residual"].tolist(), strict=True)
    return ((int(row["movie_id"]), row["residual"]) for _, row in user.iterrows())


def _with_known_numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Movies without a year have the mean of the training rows, and so has their age."""
    for name in ["year", "movie_age"]:
        frame[name] = frame[name].fillna(frame.loc[~frame["is_validation"], name].mean())
    return frame


def _write(frame: pd.DataFrame, out: Path) -> None:
    out.mkdir(parents=True)
    left_out = ["userId", "movieId", "is_validation", "residual"]
    held_out = frame["is_validation"]
    training = frame[~held_out].sample(frac=1, random_state=0)
    for name, part in (("train", training), ("validation", frame[held_out])):
        part.drop(columns=left_out).to_parquet(out / f"{name}.parquet", index=False)

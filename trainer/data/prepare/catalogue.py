"""What is known of each movie: genres, release year and description tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.prepare.vocabulary import Vocabulary
from trainer.data.ragged import IntArray, Ragged, offsets_of

_YEAR = r"\((\d{4})\)\s*$"
# A word keeps its apostrophe: "ocean's" is one token, not "ocean" and "s".
_WORD = r"[\p{L}\p{N}]+(?:['\u2019]\p{L}+)*"
_NO_GENRES = "(no genres listed)"


@dataclass(frozen=True)
class Catalogue:
    """Movies in ascending order of `ids`; every array has one entry per movie.

    `year` is NaN where the title names none.
    """

    ids: IntArray
    year: NDArray[np.float32]
    genres: Ragged
    tokens: Ragged


def describe_movies(
    movies: pl.DataFrame, tag_words: pl.DataFrame, every_id: pl.Series, max_tokens_per_movie: int
) -> pl.DataFrame:
    """One row per movie of `every_id` (distinct, ascending), in that order.

    `tag_words` are those of `count_tag_words`.

    Columns are `movieId`, `year`, `genres` and `tokens`. Tokens are the distinct words of the
    title, then those of its tags, most used first.
    """
    described = (
        every_id.alias("movieId")
        .to_frame()
        .join(movies, on="movieId", how="left", maintain_order="left")
        .select(
            "movieId",
            pl.col("title").str.extract(_YEAR).cast(pl.Float32).alias("year"),
            pl.col("genres")
            .str.split("|")
            .list.eval(pl.element().filter(~pl.element().is_in([_NO_GENRES, ""])))
            .fill_null([]),
            _words(pl.col("title").str.replace(_YEAR, "")).alias("title_words"),
        )
    )
    return (
        described.join(_most_used_first(tag_words), on="movieId", how="left", maintain_order="left")
        .with_columns(
            pl.concat_list(pl.col("title_words", "tag_words").fill_null([]))
            .list.unique(maintain_order=True)
            .list.head(max_tokens_per_movie)
            .alias("tokens")
        )
        .drop("title_words", "tag_words")
    )


def _words(column: pl.Expr) -> pl.Expr:
    return column.str.to_lowercase().str.extract_all(_WORD)


def count_tag_words(tags: pl.DataFrame) -> pl.DataFrame:
    """Number of tags of each movie that hold each word: `movieId`, `word`, `len`."""
    words = tags.select("movieId", _words(pl.col("tag")).alias("word"))
    return words.explode("word").drop_nulls().group_by("movieId", "word").len()


def add_tag_words(one: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """The counts of two sets of tags together."""
    return pl.concat([one, other]).group_by("movieId", "word").agg(pl.col("len").sum())


def _most_used_first(tag_words: pl.DataFrame) -> pl.DataFrame:
    """Words of each movie's tags, those of most tags first: `movieId`, `tag_words`."""
    return (
        tag_words.sort(["movieId", "len", "word"], descending=[False, True, False])
        .group_by("movieId", maintain_order=True)
        .agg(pl.col("word").alias("tag_words"))
    )


def encode_catalogue(described: pl.DataFrame, genres: Vocabulary, tokens: Vocabulary) -> Catalogue:
    """Turn the words of `describe_movies` into indices."""
    return Catalogue(
        ids=described["movieId"].to_numpy(),
        year=described["year"].fill_null(float("nan")).to_numpy(),
        genres=_encode_lists(described["genres"], genres),
        tokens=_encode_lists(described["tokens"], tokens),
    )


def _encode_lists(lists: pl.Series, vocabulary: Vocabulary) -> Ragged:
    lengths = lists.list.len().to_numpy().astype(np.int64)
    # Empty lists would explode to one null each.
    values = lists.filter(lists.list.len() > 0).explode()
    return Ragged(vocabulary.encode(values), offsets_of(lengths))

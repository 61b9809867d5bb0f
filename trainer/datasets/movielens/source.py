"""The files of a MovieLens folder: ratings in units of whole users, movies and tags as a catalogue.

ratings.csv is read in blocks, each of which is sorted by user and stored. Then users, in ascending
order of their ids, are cut into units of about `unit_rows` ratings; a unit gathers its users' rows
from all blocks and sorts them by (user, timestamp, movie). Faults are named by file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.ragged import IntArray, offsets_of
from trainer.data.transforms import VocabularyEncoder
from trainer.datasets.io.csv_reader import (
    BlockReader,
    CsvColumn,
    LineBlock,
    integer,
    timestamp,
)
from trainer.datasets.io.journal import Advance, Facts
from trainer.datasets.io.staging import (
    Columns,
    Staging,
    columns_of,
    gather_rows,
    map_columns,
    write_columns,
)
from trainer.datasets.movielens.options import Split
from trainer.datasets.movielens.statistics import NEVER, order_by
from trainer.errors import BadValueError
from trainer.storage import Location

_YEAR = r"\(([0-9]{4})\)\s*$"
# A word keeps its apostrophe: "ocean's" is one token, not "ocean" and "s".
_WORD = r"[\p{L}\p{N}]+(?:['\u2019]\p{L}+)*"
_NO_GENRES = "(no genres listed)"


@dataclass(frozen=True)
class Catalogue:
    """Movies in ascending order of their ids; every array has one entry per movie.

    `year` is NaN where the title names none.
    """

    year: NDArray[np.float32]
    genres: pa.ListArray
    tokens: pa.ListArray


def describe_movies(
    movies: pl.DataFrame, tag_words: pl.DataFrame, every_id: pl.Series, max_tokens_per_movie: int
) -> pl.DataFrame:
    """`movieId`, `year`, `genres` and `tokens` of the movies `every_id` (distinct, ascending).

    Tokens are the distinct words of the title, then those of its tags (`count_tag_words`), most
    used first.
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
    most_used_first = (
        tag_words.sort(["movieId", "len", "word"], descending=[False, True, False])
        .group_by("movieId", maintain_order=True)
        .agg(pl.col("word").alias("tag_words"))
    )
    return (
        described.join(most_used_first, on="movieId", how="left", maintain_order="left")
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


def encode_catalogue(
    described: pl.DataFrame, genres: VocabularyEncoder, tokens: VocabularyEncoder
) -> Catalogue:
    """Turn the words of `describe_movies` into indices."""
    return Catalogue(
        year=described["year"].fill_null(float("nan")).to_numpy(),
        genres=_encode_lists(described["genres"], genres),
        tokens=_encode_lists(described["tokens"], tokens),
    )


def _encode_lists(lists: pl.Series, vocabulary: VocabularyEncoder) -> pa.ListArray:
    offsets = offsets_of(lists.list.len().to_numpy().astype(np.int64)).astype(np.int32)
    ids = vocabulary.encode(lists.explode(empty_as_null=False).to_arrow())
    return pa.ListArray.from_arrays(offsets, ids)


RATING_COLUMNS = (
    integer("userId"),
    integer("movieId"),
    CsvColumn("rating", "a number", (0, 5), "a number above 0 and at most 5"),
    timestamp("timestamp"),
)


@dataclass(frozen=True)
class Blocks:
    """The blocks of the csv file, and who and what is in them.

    `users` and `movies` are distinct raw ids in ascending order, `rows_per_user` as long as
    `users`. A file without `has_line_end` may have been cut short, inside its last number.
    """

    paths: tuple[Path, ...]
    users: IntArray
    rows_per_user: IntArray
    movies: IntArray
    has_line_end: bool


def read_blocks(reader: BlockReader, staging: Staging, advance: Advance) -> Blocks:
    """Put all rows aside, block by block; `advance` is told the bytes that were read."""
    paths: list[Path] = []
    has_line_end = True
    for block in reader.blocks():

        def make(path: Path, block: LineBlock = block) -> None:
            write_columns(path, _sorted_by_user(reader.parse(block)))

        path, _ = staging.scratch(f"blocks/{len(paths):05d}.arrow", make)
        advance(len(block.lines))
        paths.append(path)
        has_line_end = block.lines.endswith(b"\n")
    return _index(paths, has_line_end)


def _sorted_by_user(frame: pl.DataFrame) -> Columns:
    stars = pl.col("rating").cast(pl.Float32)
    rows = frame.select(user="userId", movie="movieId", stars=stars, timestamp="timestamp")
    if not rows["user"].is_sorted():
        # Stable: of two ratings at the same second the later one in the file stays the later.
        rows = rows.sort("user", maintain_order=True)
    return {column.name: column.to_numpy() for column in rows}


def _index(paths: Sequence[Path], has_line_end: bool) -> Blocks:
    users, counts, movies = [], [], []
    for path in paths:
        block = map_columns(path)
        own, num_rows = np.unique(block["user"], return_counts=True)
        users.append(own)
        counts.append(num_rows)
        movies.append(pl.Series(block["movie"]).unique().to_numpy())
    distinct, place = np.unique(np.concatenate(users), return_inverse=True)
    rows = np.bincount(place, np.concatenate(counts)).astype(np.int64)
    return Blocks(tuple(paths), distinct, rows, np.unique(np.concatenate(movies)), has_line_end)


def cut_users(rows_per_user: IntArray, unit_rows: int) -> list[range]:
    """Cut users, by number, into units of about `unit_rows` rows and at least one user."""
    num_rows = int(rows_per_user.sum())
    num_units = max(1, round(num_rows / unit_rows))
    rows_before = np.cumsum(rows_per_user) - rows_per_user
    unit_of_user = rows_before * num_units // max(1, num_rows)
    begins = np.flatnonzero(np.diff(unit_of_user, prepend=-1)).tolist()
    return [range(*ends) for ends in pairwise([*begins, len(rows_per_user)])]


def write_unit(path: Path, blocks: Blocks, users: range, movie_ids: IntArray) -> Facts:
    """Gather and sort the rows of a unit's users, and write them with numbers in place of ids.

    A user's number is that in `blocks.users`, a movie's its place in the ascending `movie_ids`. Of
    several ratings of a movie by a user the latest counts, of the same second the later line.
    """
    rows = _gather(blocks, users)
    user = np.searchsorted(blocks.users[users.start : users.stop], rows["user"])
    movie = np.searchsorted(movie_ids, rows["movie"])
    order = order_by(user, rows["timestamp"], movie)
    user, movie = user[order], movie[order]
    # The rating stands again in a later row.
    repeated = ~pl.Series(user * len(movie_ids) + movie).is_last_distinct().to_numpy()
    columns = {
        "user": (user + users.start).astype(np.int32),
        "movie": movie.astype(np.int32),
        "stars": rows["stars"][order],
        "timestamp": rows["timestamp"][order],
    }
    write_columns(path, {name: values[~repeated] for name, values in columns.items()})
    return {"num_repeated": int(repeated.sum())}


def _gather(blocks: Blocks, users: range) -> Columns:
    first, last = blocks.users[users.start], blocks.users[users.stop - 1]
    of_blocks = (map_columns(path)["user"] for path in blocks.paths)
    bounds = [np.array([u.searchsorted(first), u.searchsorted(last, "right")]) for u in of_blocks]
    return columns_of(gather_rows(blocks.paths, bounds))


# Taken apart, the words of a block need many times its size.
_TAG_BLOCK_BYTES = 8 * 1024 * 1024
_TAG_SCHEMA = {"movieId": pl.Int64, "tag": pl.String}
_TAG_COLUMNS = (integer("userId"), integer("movieId"), CsvColumn("tag"), timestamp("timestamp"))


def read_movies(location: Location) -> pl.DataFrame:
    """`movieId`, `title` and `genres` of movies.csv; raises `BadValueError` where an id repeats."""
    columns = [integer("movieId"), CsvColumn("title"), CsvColumn("genres")]
    movies = BlockReader(location, columns).read()
    repeated = movies["movieId"].is_duplicated().arg_true()
    if len(repeated):
        last = repeated[-1]
        movie_id = movies["movieId"][last]
        raise BadValueError(
            str(location), f"line {last + 2}", "movieId", movie_id, "unique: it stands twice"
        )
    return movies


def read_tag_words(
    location: Location, users: IntArray, begins: IntArray, split: Split
) -> tuple[pl.DataFrame, int]:
    """Count the words of tags.csv, as `count_tag_words` does, and its tags; none without a file.

    Only tags given before validation began count: for everybody, or for the tag's own user.
    `begins` is the timestamp of the first held-out row of each of the raw ids `users`.
    """
    total, num_tags = count_tag_words(pl.DataFrame(schema=_TAG_SCHEMA)), 0
    if not location.exists():
        return total, num_tags
    reader = BlockReader(location, _TAG_COLUMNS, block_bytes=_TAG_BLOCK_BYTES, may_lack_rows=True)
    for block in reader.blocks():
        tags = _training_tags(reader.parse(block), users, begins, split)
        counted = pl.concat([total, count_tag_words(tags)])
        total = counted.group_by("movieId", "word").agg(pl.col("len").sum())
        num_tags += len(tags)
    return total, num_tags


def _training_tags(
    tags: pl.DataFrame, users: IntArray, begins: IntArray, split: Split
) -> pl.DataFrame:
    if split == "global":
        return tags.filter(pl.col("timestamp") < int(begins.min()))
    own = pl.DataFrame({"userId": users, "begin": begins})
    dated = tags.join(own, on="userId", how="left")
    return dated.filter(pl.col("timestamp") < pl.col("begin").fill_null(NEVER))

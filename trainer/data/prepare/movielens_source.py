"""The files of a MovieLens folder other than the ratings: movies and tags."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from trainer.data.errors import BadValueError
from trainer.data.prepare.catalogue import add_tag_words, count_tag_words
from trainer.data.prepare.census import NEVER
from trainer.data.prepare.csv_blocks import BlockReader
from trainer.data.prepare.csv_reader import integer, read_csv, text, timestamp
from trainer.data.prepare.timeline import Split
from trainer.data.prepare.units import DuplicateRating
from trainer.data.ragged import IntArray
from trainer.data.storage import Location

# Taken apart, the words of a block need many times its size.
_TAG_BLOCK_BYTES = 8 * 1024 * 1024
_TAG_SCHEMA = {"movieId": pl.Int64, "tag": pl.String}
_TAG_COLUMNS = (integer("userId"), integer("movieId"), text("tag"), timestamp("timestamp"))


def read_movies(location: Location, delimiter: str) -> pl.DataFrame:
    """`movieId`, `title` and `genres` of movies.csv; raises `BadValueError` where an id repeats."""
    movies = read_csv(
        location, [integer("movieId"), text("title"), text("genres")], delimiter=delimiter
    )
    repeated = movies["movieId"].is_duplicated().arg_true()
    if len(repeated):
        last = repeated[-1]
        movie_id = movies["movieId"][last]
        raise BadValueError(
            str(location), f"line {last + 2}", "movieId", movie_id, "unique: it stands twice"
        )
    return movies


@dataclass(frozen=True)
class TagWords:
    """The words of tags from training time.

    `counts` has `movieId`, `word` and `len`, the number of tags that hold it; `num_tags` were read.
    """

    counts: pl.DataFrame
    num_tags: int


def read_tag_words(
    location: Location, delimiter: str, users: IntArray, begins: IntArray, split: Split
) -> TagWords:
    """Count the words of tags.csv, block by block; none where there is no such file.

    Only tags given before validation began count: for everybody, or for the tag's own user.
    `begins` is the timestamp of the first held-out row of each of the raw ids `users`.
    """
    total, num_tags = count_tag_words(pl.DataFrame(schema=_TAG_SCHEMA)), 0
    if not location.exists():
        return TagWords(total, num_tags)
    reader = BlockReader(
        location,
        _TAG_COLUMNS,
        delimiter=delimiter,
        block_bytes=_TAG_BLOCK_BYTES,
        may_lack_rows=True,
    )
    start, line = reader.first, 2
    while start < reader.size_bytes:
        block, frame = reader.read(start, line)
        tags = _training_tags(frame, users, begins, split)
        total = add_tag_words(total, count_tag_words(tags))
        num_tags += len(tags)
        start, line = block.end, block.next_line
    return TagWords(total, num_tags)


def _training_tags(
    tags: pl.DataFrame, users: IntArray, begins: IntArray, split: Split
) -> pl.DataFrame:
    if split == "global":
        return tags.filter(pl.col("timestamp") < int(begins.min()))
    own = pl.DataFrame({"userId": users, "begin": begins})
    dated = tags.join(own, on="userId", how="left")
    return dated.filter(pl.col("timestamp") < pl.col("begin").fill_null(NEVER))


def name_duplicate(
    location: Location, reader: BlockReader, found: DuplicateRating
) -> BadValueError:
    """Say on which lines of the ratings a duplicate stands; reads the file again."""
    lines: list[int] = []
    start, line = reader.first, 2
    wanted = (pl.col("userId") == found.user) & (pl.col("movieId") == found.movie)
    while start < reader.size_bytes and len(lines) < 2:
        block, frame = reader.read(start, line)
        rows = frame.with_row_index().filter(wanted)["index"]
        lines += [line + row for row in rows]
        start, line = block.end, block.next_line
    return BadValueError(
        str(location),
        f"line {lines[1]}",
        "movieId",
        found.movie,
        f"rated once by user {found.user}: line {lines[0]} rates it too; remove one of them or "
        "keep the latest with --on-duplicate last",
    )

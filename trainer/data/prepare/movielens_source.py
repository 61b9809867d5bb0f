"""The files of a MovieLens folder other than the ratings: movies and tags."""

from __future__ import annotations

import polars as pl

from trainer.data.errors import BadValueError
from trainer.data.prepare.census import NEVER
from trainer.data.prepare.csv_blocks import BlockReader
from trainer.data.prepare.csv_reader import integer, read_csv, text
from trainer.data.prepare.timeline import Split
from trainer.data.prepare.units import DuplicateRating
from trainer.data.ragged import IntArray
from trainer.data.storage import Location

_NO_TAGS = pl.DataFrame(
    schema={"userId": pl.Int64, "movieId": pl.Int64, "tag": pl.String, "timestamp": pl.Int64}
)


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


def read_tags(location: Location, delimiter: str) -> pl.DataFrame:
    """`userId`, `movieId`, `tag` and `timestamp` of tags.csv; no rows where there is no file."""
    if not location.exists():
        return _NO_TAGS
    columns = [integer("userId"), integer("movieId"), text("tag"), integer("timestamp")]
    return read_csv(location, columns, delimiter=delimiter)


def training_tags(
    tags: pl.DataFrame, users: IntArray, begins: IntArray, split: Split
) -> pl.DataFrame:
    """Tags given before validation began: for everybody, or for the tag's own user.

    `begins` is the timestamp of the first held-out row of each of the raw ids `users`.
    """
    if split == "global":
        return tags.filter(pl.col("timestamp") < int(begins.min()))
    own = pl.DataFrame({"userId": users, "begin": begins})
    dated = tags.join(own, on="userId", how="left", maintain_order="left")
    before = pl.col("timestamp") < pl.col("begin").fill_null(NEVER)
    return dated.filter(before).drop("begin")


def name_duplicate(
    location: Location, reader: BlockReader, found: DuplicateRating
) -> BadValueError:
    """Say on which lines of the ratings a duplicate stands; reads the file again."""
    lines, start, line = [], reader.first, 2
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

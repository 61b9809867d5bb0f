"""Ratings of any number, in units of whole users that fit into memory.

The csv file is read in blocks, each of which is sorted by user and put aside. Then users, in
ascending order of their ids, are cut into units of about `unit_rows` ratings; a unit gathers its
users' rows from all blocks and puts them in the order of (user, timestamp, movie).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.prepare.csv_blocks import BlockReader
from trainer.data.prepare.csv_reader import integer, number, timestamp
from trainer.data.prepare.journal import Facts
from trainer.data.prepare.progress import Advance
from trainer.data.prepare.spill import Columns, map_columns, write_columns
from trainer.data.prepare.staging import Staging
from trainer.data.prepare.timeline import order_by
from trainer.data.ragged import IntArray

OnDuplicate = Literal["fail", "last"]
RATING_COLUMNS = (
    integer("userId"),
    integer("movieId"),
    number("rating", above=0, at_most=5),
    timestamp("timestamp"),
)
_LARGEST_TABLE = 1 << 22


class DuplicateRating(Exception):
    """A user rated a movie twice, and that was not to be; raw ids."""

    def __init__(self, user: int, movie: int) -> None:
        super().__init__(f"user {user} rated movie {movie} more than once")
        self.user = user
        self.movie = movie


@dataclass(frozen=True)
class Blocks:
    """The blocks of the csv file, and who and what is in them.

    `users` and `movies` are distinct raw ids in ascending order, `rows_per_user` as long as
    `users`.
    """

    paths: tuple[Path, ...]
    users: IntArray
    rows_per_user: IntArray
    movies: IntArray


def read_blocks(reader: BlockReader, staging: Staging, advance: Advance) -> Blocks:
    """Put all rows aside, block by block; `advance` is told the bytes that were read."""
    paths: list[Path] = []
    start, line = reader.first, 2
    while start < reader.size_bytes:

        def make(path: Path, start: int = start, line: int = line) -> Facts:
            block, frame = reader.read(start, line)
            write_columns(path, _sorted_by_user(frame))
            return {"end": block.end, "next_line": block.next_line}

        path, facts = staging.scratch(f"blocks/{len(paths):05d}.arrow", make)
        advance(facts["end"] - start)
        start, line = facts["end"], facts["next_line"]
        paths.append(path)
    return _index(paths)


def _sorted_by_user(frame: pl.DataFrame) -> Columns:
    user = frame["userId"].to_numpy()
    if (user[1:] < user[:-1]).any():
        # Stable: of two ratings at the same second the later one in the file stays the later.
        frame = frame.sort("userId", maintain_order=True)
    return {
        "user": frame["userId"].to_numpy(),
        "movie": frame["movieId"].to_numpy(),
        "stars": frame["rating"].cast(pl.Float32).to_numpy(),
        "timestamp": frame["timestamp"].to_numpy(),
    }


def _index(paths: Sequence[Path]) -> Blocks:
    users, counts, movies = [], [], []
    for path in paths:
        block = map_columns(path)
        begins = np.flatnonzero(np.r_[True, block["user"][1:] != block["user"][:-1]])
        users.append(block["user"][begins])
        counts.append(np.diff(np.r_[begins, len(block["user"])]))
        movies.append(pl.Series(block["movie"]).unique().to_numpy())
    distinct, place = np.unique(np.concatenate(users), return_inverse=True)
    rows = np.bincount(place, np.concatenate(counts)).astype(np.int64)
    return Blocks(tuple(paths), distinct, rows, np.unique(np.concatenate(movies)))


def cut_users(rows_per_user: IntArray, unit_rows: int) -> list[range]:
    """Cut users, by number, into units of about `unit_rows` rows and at least one user."""
    num_rows = int(rows_per_user.sum())
    num_units = max(1, round(num_rows / unit_rows))
    rows_before = np.cumsum(rows_per_user) - rows_per_user
    unit_of_user = rows_before * num_units // max(1, num_rows)
    begins = np.flatnonzero(np.r_[True, unit_of_user[1:] != unit_of_user[:-1]]).tolist()
    return [range(*ends) for ends in zip(begins, [*begins[1:], len(rows_per_user)], strict=True)]


def write_unit(
    path: Path, blocks: Blocks, users: range, movie_ids: IntArray, on_duplicate: OnDuplicate
) -> Facts:
    """Gather and sort the rows of a unit's users, and write them with numbers in place of ids.

    A user's number is that in `blocks.users`, a movie's its place in the ascending `movie_ids`.
    Raises `DuplicateRating`.
    """
    rows = _gather(blocks, users)
    user = np.searchsorted(blocks.users[users.start : users.stop], rows["user"])
    movie = _places(rows["movie"], movie_ids)
    order = order_by(user, rows["timestamp"], movie)
    user, movie = user[order], movie[order]
    repeated = _repeated(user, movie, len(movie_ids))
    if repeated.any() and on_duplicate == "fail":
        first = int(repeated.argmax())
        own = int(blocks.users[users.start + user[first]])
        raise DuplicateRating(own, int(movie_ids[movie[first]]))
    kept = ~repeated
    columns = {
        "user": (user + users.start).astype(np.int32),
        "movie": movie.astype(np.int32),
        "stars": rows["stars"][order],
        "timestamp": rows["timestamp"][order],
    }
    if repeated.any():
        columns = {name: values[kept] for name, values in columns.items()}
    write_columns(path, columns)
    return {"num_rows": int(kept.sum()), "num_repeated": int(repeated.sum())}


def _gather(blocks: Blocks, users: range) -> Columns:
    pieces = []
    first, last = blocks.users[users.start], blocks.users[users.stop - 1]
    for path in blocks.paths:
        block = map_columns(path)
        start = int(np.searchsorted(block["user"], first))
        end = int(np.searchsorted(block["user"], last, side="right"))
        if end > start:
            pieces.append({name: values[start:end] for name, values in block.items()})
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _places(values: IntArray, ascending: IntArray) -> IntArray:
    """Place of each value among `ascending`, in which it must be; by table where ids are small."""
    largest = int(ascending[-1])
    if largest > _LARGEST_TABLE:
        return np.searchsorted(ascending, values)
    table = np.zeros(largest + 1, dtype=np.int64)
    table[ascending] = np.arange(len(ascending))
    return table[values]


def _repeated(user: IntArray, movie: IntArray, num_movies: int) -> NDArray[np.bool_]:
    """Mark rows of a (user, movie) that stands again in a later row."""
    pair = user * num_movies + movie
    marked = np.zeros(len(pair), dtype=bool)
    ascending = np.sort(pair)
    if (ascending[1:] == ascending[:-1]).any():
        order = np.argsort(pair, kind="stable")
        again = pair[order[1:]] == pair[order[:-1]]
        marked[order[:-1][again]] = True
    return marked

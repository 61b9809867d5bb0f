"""Rows of units to the Parquet files of a split, each file a part of its own.

Rows of a unit are shuffled, units follow one another, and the whole is cut into files of equal
size. Memory is that of a unit or two and of one batch of rows, lists included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.ragged import IntArray

_GROUPS_PER_BATCH = 8
# Lists of ids hold almost as many values as a row group has rows: packing their differences takes
# half the time of a dictionary to write, two thirds to read, and is smaller.
_DICTIONARY_COLUMNS = frozenset({"user_id", "movie_id", "genres", "year", "rating"})

# Prepared rows of a split: (unit, first row, last row + 1) in the unit's order to tables.
BuildRows = Callable[[int, int, int], pa.Table]


@dataclass(frozen=True)
class Partition:
    """One file: rows `[start, end)` of some units, counted in each unit's own order."""

    slices: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows in the file."""
        return sum(end - start for _, start, end in self.slices)


def cut_partitions(
    rows_of_units: Sequence[int] | IntArray, num_partitions: int, row_group_rows: int
) -> list[Partition]:
    """Cut the rows of all units into at most `num_partitions` files of equal size.

    Fewer where a file would not fill one row group.
    """
    ends = np.cumsum(rows_of_units)
    num_rows = int(ends[-1])
    num_files = min(num_partitions, max(1, num_rows // row_group_rows))
    cuts = [num_rows * number // num_files for number in range(num_files + 1)]
    starts = ends - rows_of_units
    return [
        Partition(
            tuple(
                (unit, max(first - int(start), 0), min(last, int(end)) - int(start))
                for unit, (start, end) in enumerate(zip(starts, ends, strict=True))
                if start < last and end > first
            )
        )
        for first, last in pairwise(cuts)
    ]


def write_partition(
    path: Path, partition: Partition, build: BuildRows, schema: pa.Schema, row_group_rows: int
) -> None:
    """Write one Parquet file in full row groups; the next batch is built while one is written."""
    with (
        pq.ParquetWriter(path, schema, compression="zstd", **_encodings(schema)) as writer,
        ThreadPoolExecutor(max_workers=1) as thread,
    ):
        pending: Future | None = None
        for batch in _full_groups(_batches(partition, build, row_group_rows), row_group_rows):
            if pending:
                pending.result()
            pending = thread.submit(writer.write_table, batch, row_group_size=row_group_rows)
        if pending:
            pending.result()


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    leaves = {
        field.name: f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
    }
    packed = [
        leaves[field.name]
        for field in schema
        if field.type == pa.list_(pa.int64()) and field.name not in _DICTIONARY_COLUMNS
    ]
    return {
        "use_dictionary": [leaves[name] for name in leaves if name in _DICTIONARY_COLUMNS],
        "column_encoding": dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
    }


def _batches(partition: Partition, build: BuildRows, row_group_rows: int) -> Iterator[pa.Table]:
    size = _GROUPS_PER_BATCH * row_group_rows
    for unit, start, end in partition.slices:
        for first in range(start, end, size):
            yield build(unit, first, min(first + size, end))


def _full_groups(batches: Iterator[pa.Table], row_group_rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of whole row groups; only the last table may end in a short one."""
    rest: pa.Table | None = None
    for batch in batches:
        rest = batch if rest is None else pa.concat_tables([rest, batch])
        full = len(rest) // row_group_rows * row_group_rows
        if full:
            yield rest.slice(0, full)
            rest = rest.slice(full)
    if rest is not None and len(rest):
        yield rest

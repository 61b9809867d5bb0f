"""Raw Criteo ids to table rows: by a vocabulary of the frequent ones, or by hashing.

Id 0 means unknown: too rare, never seen in training, or (hashing only) not given. In a vocabulary
the empty cell is a value like any other, because that nothing was given says something too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trainer.data.prepare.criteo_format import MAX_RAW_ID, MISSING
from trainer.data.prepare.vocabulary import UNKNOWN
from trainer.data.ragged import IntArray
from trainer.data.transforms import HashEncoder

# Distinct values that are counted at once; more are counted in several passes over the column.
MAX_COUNTED = 8_000_000
_HEX_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_NUM_HEX_DIGITS = 8


class IdEncoder(Protocol):
    """Turns the raw ids of one column into ids below `size`."""

    @property
    def size(self) -> int:
        """Number of ids, id 0 included."""

    def encode(self, raw: IntArray) -> IntArray:
        """Ids [n] of raw ids [n]."""


@dataclass(frozen=True)
class KnownIds:
    """The raw id at position i of `values` (ascending) has id i + 1; all others are unknown.

    `counts` says how often each was seen in training.
    """

    values: IntArray
    counts: IntArray

    @property
    def size(self) -> int:
        """Number of ids, the unknown one included."""
        return len(self.values) + 1

    def encode(self, raw: IntArray) -> IntArray:
        """Ids of raw ids; 0 where the vocabulary lacks one."""
        if not len(self.values):
            return np.full(len(raw), UNKNOWN, dtype=np.int64)
        # Sorted needles find their places in the cache; a column repeats few values very often.
        distinct, places = np.unique(raw, return_inverse=True)
        positions = np.searchsorted(self.values, distinct)
        found = self.values[np.minimum(positions, len(self.values) - 1)] == distinct
        return np.where(found, positions + 1, UNKNOWN)[places]

    def write(self, path: Path) -> None:
        """Write `index`, `value` and `count`; the value is hexadecimal, empty for not given."""
        texts = pl.Series("value", hex_texts(self.values)).fill_null("")
        index = np.arange(1, self.size, dtype=np.int64)
        pl.DataFrame({"index": index, "value": texts, "count": self.counts}).write_parquet(path)


@dataclass(frozen=True)
class HashedIds:
    """Hashes to 1 ... size - 1; what was not given is 0.

    The hash is that of a feature's `hashing` (`transforms.HashEncoder`) of the number.
    """

    size: int
    seed: int

    def encode(self, raw: IntArray) -> IntArray:
        """Ids of raw ids."""
        return HashEncoder(self.size, self.seed).encode(pa.array(raw, mask=raw == MISSING))


def hex_texts(raw: IntArray) -> pa.StringArray:
    """Raw ids as 8 lower-case hexadecimal digits, null for `MISSING`."""
    shifts = np.arange(_NUM_HEX_DIGITS - 1, -1, -1) * 4
    digits = _HEX_DIGITS[(raw[:, None] >> shifts) & 15]
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * _NUM_HEX_DIGITS
    texts = pa.StringArray.from_buffers(len(raw), pa.py_buffer(offsets), pa.py_buffer(digits))
    return pc.if_else(pa.array(raw != MISSING), texts, pa.scalar(None, pa.string()))


def frequent_values(
    read: Callable[[], Iterable[IntArray]],
    *,
    min_count: int,
    max_values: int,
    max_counted: int = MAX_COUNTED,
) -> KnownIds:
    """The values seen at least `min_count` times, the `max_values` most frequent of them.

    `read` gives the column in parts, anew at each call. Ties go to the smaller value. At most about
    `max_counted` values, or one part if that is more, are counted in memory at once.
    """
    kept = _count_range(read, (MISSING, MAX_RAW_ID + 1), min_count, max_counted)
    kept = kept.sort(["count", "value"], descending=[True, False]).head(max_values).sort("value")
    return KnownIds(kept["value"].to_numpy(), kept["count"].to_numpy())


def _count_range(
    read: Callable[[], Iterable[IntArray]],
    bounds: tuple[int, int],
    min_count: int,
    max_counted: int,
) -> pl.DataFrame:
    """`value` and `count` of values in [low, high); halves of the range where they are too many."""
    low, high = bounds
    total, pending = _NO_COUNTS, [_NO_COUNTS]
    for part in read():
        inside = part[(part >= low) & (part < high)]
        counts = pl.Series("value", inside, pl.Int64).value_counts(name="count")
        pending.append(counts.cast(_NO_COUNTS.schema))
        # Merging when as much has come as is there keeps the work linear.
        if sum(map(len, pending)) > max(len(total), max_counted // 8):
            total, pending = _merge(total, pending), []
        if len(total) > max_counted and high - low > 1:
            middle = (low + high) // 2
            halves = ((low, middle), (middle, high))
            return pl.concat([_count_range(read, h, min_count, max_counted) for h in halves])
    return _merge(total, pending).filter(pl.col("count") >= min_count)


def _merge(total: pl.DataFrame, pending: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([total, *pending]).group_by("value").agg(pl.col("count").sum())


_NO_COUNTS = pl.DataFrame(schema={"value": pl.Int64, "count": pl.Int64})

"""Raw Criteo ids to table rows: by a vocabulary of the frequent ones, or by hashing.

Id 0 means unknown: too rare, never seen in training, or (hashing only) not given. In a vocabulary
the empty cell is a value like any other, because that nothing was given says something too.

Shuffling more rows than memory holds takes two steps. Each run of input rows is scattered over
buckets at random and written; later each bucket is gathered from all runs and shuffled by itself.
A run is a numpy file of shape [41, n], 4 bytes a cell: label, 13 float32, 26 raw ids and one word
whose bit c says that id c was not given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.ragged import IntArray, offsets_of
from trainer.data.transforms import MISSING_ID, HashEncoder, VocabularyEncoder
from trainer.datasets.criteo.reader import (
    MAX_RAW_ID,
    MISSING,
    NUM_CATEGORICAL,
    NUM_DENSE,
    RawClicks,
    by_column,
)
from trainer.datasets.io.journal import Facts
from trainer.datasets.io.staging import write_partition

# Distinct values that are counted at once; more are counted in several passes over the column.
MAX_COUNTED = 8_000_000
_NUM_HEX_DIGITS = 8
IdEncoder = VocabularyEncoder | HashEncoder


def encode_ids(encoder: IdEncoder, raw: IntArray) -> IntArray:
    """Table rows of raw ids; what was not given is 0 by hashing, in a vocabulary a value of it."""
    is_missing = raw == MISSING if isinstance(encoder, HashEncoder) else None
    return encoder.encode(pa.array(raw, mask=is_missing))


def stored_vocabulary(known: pl.DataFrame) -> pl.DataFrame:
    """`known` as `index`, `value` and `count`; values hexadecimal, empty for not given."""
    texts = pl.Series("value", hex_texts(known["value"].to_numpy())).fill_null("")
    index = pl.Series("index", np.arange(1, len(known) + 1))
    return pl.DataFrame([index, texts, known["count"]])


def hex_texts(raw: IntArray) -> pa.StringArray:
    """Raw ids as 8 lower-case hexadecimal digits, null for `MISSING`."""
    digits = raw.astype(">u4").tobytes().hex().encode()
    offsets = np.arange(len(raw) + 1, dtype=np.int32) * _NUM_HEX_DIGITS
    texts = pa.StringArray.from_buffers(len(raw), pa.py_buffer(offsets), pa.py_buffer(digits))
    return pc.if_else(pa.array(raw != MISSING), texts, pa.scalar(None, pa.string()))


def frequent_values(
    read: Callable[[], Iterable[IntArray]],
    *,
    min_count: int,
    max_values: int,
) -> pl.DataFrame:
    """Each `value` seen at least `min_count` times and its `count`; values ascend.

    Of more than `max_values` the most frequent ones; ties go to the smaller value. `read` gives the
    column in parts, anew at each call. At most about `MAX_COUNTED` values, or one part if that is
    more, are counted in memory at once.
    """
    kept = _count_range(read, (MISSING, MAX_RAW_ID + 1), min_count)
    return kept.sort(["count", "value"], descending=[True, False]).head(max_values).sort("value")


def _count_range(
    read: Callable[[], Iterable[IntArray]],
    bounds: tuple[int, int],
    min_count: int,
) -> pl.DataFrame:
    """`value` and `count` of values in [low, high); halves of the range where they are too many."""
    low, high = bounds
    total, pending = _NO_COUNTS, [_NO_COUNTS]
    for part in read():
        inside = part[(part >= low) & (part < high)]
        counts = pl.Series("value", inside, pl.Int64).value_counts(name="count")
        pending.append(counts.cast(_NO_COUNTS.schema))
        # Merging when as much has come as is there keeps the work linear.
        if sum(map(len, pending)) > max(len(total), MAX_COUNTED // 8):
            total, pending = _merge(total, pending), []
        if len(total) > MAX_COUNTED and high - low > 1:
            middle = (low + high) // 2
            halves = ((low, middle), (middle, high))
            return pl.concat([_count_range(read, h, min_count) for h in halves])
    return _merge(total, pending).filter(pl.col("count") >= min_count)


def _merge(total: pl.DataFrame, pending: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([total, *pending]).group_by("value").agg(pl.col("count").sum())


_NO_COUNTS = pl.DataFrame(schema={"value": pl.Int64, "count": pl.Int64})

Cells = NDArray[np.uint32]
_FIRST_ID = 1 + NUM_DENSE
_MISSING_BITS = _FIRST_ID + NUM_CATEGORICAL
_NUM_CELLS = _MISSING_BITS + 1


@dataclass(frozen=True)
class Buckets:
    """Where rows go: of the first `num_training` lines to random buckets, of later ones in order.

    Training buckets come first. A run's draws depend on `seed` and the run's number alone.
    """

    num_training: int
    num_validation: int
    training_buckets: int
    validation_buckets: int
    seed: int

    @property
    def total(self) -> int:
        return self.training_buckets + self.validation_buckets

    def place(self, run: int, line: IntArray) -> IntArray:
        """Bucket [n] of the rows of a run, whose lines are `line` [n], counted over all files."""
        drawn = np.random.default_rng([self.seed, 0, run]).integers(
            0, self.training_buckets, len(line)
        )
        later = (line - self.num_training) * self.validation_buckets // self.num_validation
        return np.where(line < self.num_training, drawn, self.training_buckets + later)


def pack(clicks: RawClicks, dense: NDArray[np.float32]) -> Cells:
    """Rows as cells [41, n]; `dense` [n, 13] are the transformed counts."""
    cells = np.empty((_NUM_CELLS, len(clicks)), dtype=np.uint32)
    cells[0] = clicks.label
    cells[1:_FIRST_ID] = np.ascontiguousarray(dense.T, dtype=np.float32).view(np.uint32)
    missing = clicks.ids.T == MISSING
    cells[_FIRST_ID:_MISSING_BITS] = np.where(missing, 0, clicks.ids.T)
    bits = np.left_shift(missing, np.arange(NUM_CATEGORICAL)[:, None]).sum(0)
    cells[_MISSING_BITS] = bits
    return cells


def ids_of(cells: Cells, column: int) -> IntArray:
    """Raw ids [n] of a categorical column, numbered from 0; `MISSING` where not given."""
    is_missing = (cells[_MISSING_BITS] >> np.uint32(column)) & 1
    return np.where(is_missing, MISSING, cells[_FIRST_ID + column].astype(np.int64))


def write_run(path: Path, cells: Cells, bucket: IntArray, num_buckets: int) -> list[int]:
    """Write `cells` in order of their bucket; gives the buckets' offsets [num_buckets + 1]."""
    order = np.argsort(bucket, kind="stable")
    with path.open("wb") as file:
        np.save(file, cells[:, order])
    return offsets_of(np.bincount(bucket, minlength=num_buckets)).tolist()


@dataclass(frozen=True)
class Runs:
    """All runs of a preparation, in input order; cells are read from disk as they are asked for.

    `offsets` [runs, buckets + 1] are those that `write_run` gave.
    """

    paths: Sequence[Path]
    offsets: IntArray

    def ids(self, column: int, num_buckets: int) -> Iterator[IntArray]:
        """Raw ids of a column, run by run, of the rows in the first `num_buckets` buckets."""
        for path, end in zip(self.paths, self.offsets[:, num_buckets], strict=True):
            yield ids_of(np.load(path, mmap_mode="r")[:, :end], column)

    def bucket(self, number: int) -> Cells:
        """All rows of a bucket, in input order."""
        bounds = self.offsets[:, number : number + 2]
        parts = [
            np.load(path, mmap_mode="r")[:, start:end]
            for path, (start, end) in zip(self.paths, bounds, strict=True)
        ]
        return np.concatenate(parts, axis=1)


COLUMN_TYPES = by_column("float32", "float32", "int64")
SCHEMA = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMN_TYPES.items()])
_ENCODED_ROWS = 131_072


def transform_counts(counts: NDArray, *, keep_sign: bool) -> NDArray[np.float32]:
    """log(1 + count) of counts [n, 13]; NaN (not given) becomes 0.

    A negative count becomes 0, as in the DLRM reference, or with `keep_sign` -log(1 - count).
    """
    given = np.nan_to_num(counts)
    sizes = np.abs(given) if keep_sign else np.maximum(given, 0)
    logarithms = np.log1p(sizes)
    return (np.copysign(logarithms, given) if keep_sign else logarithms).astype(np.float32)


def entropy(rate: float) -> float:
    """Log loss, in nats, of predicting `rate` for clicks that come at that rate."""
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


@dataclass(frozen=True)
class PartitionWriter:
    """Writes partitions of prepared rows. `encoders` [26] turn raw ids into table rows."""

    runs: Runs
    buckets: Buckets
    encoders: Sequence[IdEncoder]
    row_group_rows: int

    def write(self, buckets: Sequence[int], path: Path) -> Facts:
        """Write all rows of `buckets`; gives the file's contents and numbers `clicks`, `unknown`.

        Memory is that of one bucket twice.
        """
        counts = {"clicks": 0, "unknown": 0}
        tables = (table for bucket in buckets for table in self._tables(bucket, counts))
        return write_partition(path, SCHEMA, tables, self.row_group_rows) | counts

    def _tables(self, bucket: int, counts: dict[str, int]) -> Iterator[pa.Table]:
        """Whole row groups, the last one may be short; what they hold is added to `counts`."""
        cells = self.runs.bucket(bucket)
        if bucket < self.buckets.training_buckets:
            rng = np.random.default_rng([self.buckets.seed, 1, bucket])
            cells = cells[:, rng.permutation(cells.shape[1])]
        counts["clicks"] += int(cells[0].sum())
        step = max(1, _ENCODED_ROWS // self.row_group_rows) * self.row_group_rows
        for start in range(0, cells.shape[1], step):
            part = cells[:, start : start + step]
            ids = [
                encode_ids(each, ids_of(part, column)) for column, each in enumerate(self.encoders)
            ]
            counts["unknown"] += sum(int((column == MISSING_ID).sum()) for column in ids)
            dense = part[1:_FIRST_ID].view(np.float32)
            yield pa.table([part[0].astype(np.float32), *dense, *ids], schema=SCHEMA)

"""Raw Criteo ids to table rows: by a vocabulary of the frequent ones, or by hashing.

Id 0 means unknown: too rare, never seen in training, or (hashing only) not given. In a vocabulary
the empty cell is a value like any other, because that nothing was given says something too.

Shuffling more rows than memory holds takes two steps. Each run of input rows is scattered over
buckets at random and written; later each bucket is gathered from all runs and shuffled by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.ragged import IntArray, offsets_of
from trainer.data.transforms import MISSING_ID, HashEncoder, VocabularyEncoder
from trainer.datasets.criteo.reader import DENSE_NAMES, LABEL, MAX_RAW_ID, MISSING, by_column
from trainer.datasets.io.journal import Facts
from trainer.datasets.io.staging import gather_rows, map_rows, write_columns, write_partition

# Distinct values that are counted at once; more are counted in several passes over the column.
MAX_COUNTED = 8_000_000
_NUM_HEX_DIGITS = 8
IdEncoder = VocabularyEncoder | HashEncoder


def encode_ids(encoder: IdEncoder, column: pl.Series) -> IntArray:
    """Table rows of raw ids; what was not given is 0 by hashing, in a vocabulary a value of it."""
    is_hashed = isinstance(encoder, HashEncoder)
    return encoder.encode(column.to_arrow() if is_hashed else pa.array(ids_of(column)))


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


def ids_of(column: pl.Series) -> IntArray:
    """Raw ids of a categorical column, `MISSING` for null."""
    return column.cast(pl.Int64).fill_null(MISSING).to_numpy()


def write_run(path: Path, rows: pl.DataFrame, bucket: IntArray, num_buckets: int) -> list[int]:
    """Write `rows` in order of their bucket; gives the buckets' offsets [num_buckets + 1]."""
    ordered = rows[np.argsort(bucket, kind="stable")]
    write_columns(path, {column.name: column.to_arrow() for column in ordered})
    return offsets_of(np.bincount(bucket, minlength=num_buckets)).tolist()


@dataclass(frozen=True)
class Runs:
    """All runs of a preparation, in input order; rows are read from disk as they are asked for.

    `offsets` [runs, buckets + 1] are those that `write_run` gave.
    """

    paths: Sequence[Path]
    offsets: IntArray

    def ids(self, column: str, num_buckets: int) -> Iterator[IntArray]:
        """Raw ids of a column, run by run, of the rows in the first `num_buckets` buckets."""
        for path, end in zip(self.paths, self.offsets[:, num_buckets], strict=True):
            yield ids_of(pl.Series(map_rows(path)[column][:end]))

    def bucket(self, number: int) -> pl.DataFrame:
        """All rows of a bucket, in input order."""
        return pl.DataFrame(gather_rows(self.paths, self.offsets[:, number : number + 2]))


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


def with_dense(rows: pl.DataFrame, *, keep_sign: bool) -> pl.DataFrame:
    """Rows of `parse_lines` with transformed counts."""
    counts = rows.select(pl.col(DENSE_NAMES).cast(pl.Float64)).to_numpy()
    dense = transform_counts(counts, keep_sign=keep_sign)
    return rows.with_columns(pl.DataFrame(dense, schema=DENSE_NAMES).get_columns())


def entropy(rate: float) -> float:
    """Log loss, in nats, of predicting `rate` for clicks that come at that rate."""
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


@dataclass(frozen=True)
class PartitionWriter:
    """Writes partitions of prepared rows. `encoders` turn a column's raw ids into table rows."""

    runs: Runs
    buckets: Buckets
    encoders: Mapping[str, IdEncoder]
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
        rows = self.runs.bucket(bucket)
        if bucket < self.buckets.training_buckets:
            rng = np.random.default_rng([self.buckets.seed, 1, bucket])
            rows = rows[rng.permutation(len(rows))]
        counts["clicks"] += int(rows[LABEL].sum())
        step = max(1, _ENCODED_ROWS // self.row_group_rows) * self.row_group_rows
        for part in rows.iter_slices(step):
            ids = {name: encode_ids(encoder, part[name]) for name, encoder in self.encoders.items()}
            counts["unknown"] += sum(int((column == MISSING_ID).sum()) for column in ids.values())
            numbers = part.select(pl.col(LABEL, *DENSE_NAMES).cast(pl.Float32)).to_dict()
            yield pa.table({n: c.to_arrow() for n, c in numbers.items()} | ids, schema=SCHEMA)

"""Raw Criteo ids to table rows: by a vocabulary of the frequent ones, or by hashing.

Id 0 means unknown: too rare, never seen in training, or (hashing only) not given. In a vocabulary
the empty cell is a value like any other, because that nothing was given says something too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.data.transforms import MISSING_ID, HashEncoder, VocabularyEncoder
from trainer.datasets.criteo.reader import DENSE_NAMES, LABEL, MAX_RAW_ID, MISSING, by_column

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


def ids_of(column: pl.Series) -> IntArray:
    """Raw ids of a categorical column, `MISSING` for null."""
    return column.cast(pl.Int64).fill_null(MISSING).to_numpy()


COLUMN_TYPES = by_column("float32", "float32", "int64")
SCHEMA = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMN_TYPES.items()])


def transform_counts(counts: NDArray, *, keep_sign: bool) -> NDArray[np.float32]:
    """log(1 + count) of counts [n, 13]; NaN (not given) becomes 0.

    A negative count becomes 0, as in the DLRM reference, or with `keep_sign` -log(1 - count).
    """
    given = np.nan_to_num(counts)
    sizes = np.abs(given) if keep_sign else np.maximum(given, 0)
    logarithms = np.log1p(sizes)
    return (np.copysign(logarithms, given) if keep_sign else logarithms).astype(np.float32)


def with_dense(rows: pl.DataFrame, *, keep_sign: bool) -> pl.DataFrame:
    counts = rows.select(pl.col(DENSE_NAMES).cast(pl.Float64)).to_numpy()
    dense = transform_counts(counts, keep_sign=keep_sign)
    return rows.with_columns(pl.DataFrame(dense, schema=DENSE_NAMES).get_columns())


def entropy(rate: float) -> float:
    """Log loss, in nats, of predicting `rate` for clicks that come at that rate."""
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def encode_rows(
    encoders: Mapping[str, IdEncoder], rows: pl.DataFrame
) -> tuple[pa.Table, dict[str, int]]:
    """Rows of `with_dense` as they are stored; how many are clicks, how many ids are unknown."""
    ids = {name: encode_ids(encoder, rows[name]) for name, encoder in encoders.items()}
    numbers = rows.select(pl.col(LABEL, *DENSE_NAMES).cast(pl.Float32)).to_dict()
    counts = {
        "clicks": int(rows[LABEL].sum()),
        "unknown": sum(int((column == MISSING_ID).sum()) for column in ids.values()),
    }
    return pa.table({n: c.to_arrow() for n, c in numbers.items()} | ids, schema=SCHEMA), counts

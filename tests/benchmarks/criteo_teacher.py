"""The first rows of a real Criteo file, for benchmarks that also run on generated rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from trainer.data.prepare.criteo_teacher import (
    NUM_CATEGORICAL,
    NUM_DENSE,
    ClickRows,
    Teacher,
    log_transform,
    table_sizes,
)

__all__ = [
    "NUM_CATEGORICAL",
    "NUM_DENSE",
    "ClickRows",
    "CriteoFormatError",
    "Teacher",
    "read_criteo",
    "table_sizes",
]


class CriteoFormatError(Exception):
    """A file is not in Criteo's format or is too short; the message says which and what to do."""


def read_criteo(path: Path, sizes: Sequence[int], num_rows: int) -> ClickRows:
    """The first `num_rows` rows of a Criteo TSV: label, 13 integers, 26 hexadecimal ids.

    Dense values go through `log_transform`; an id is its hexadecimal number modulo the table's
    size, a missing one is 0. Raises `CriteoFormatError`.
    """
    columns = 1 + NUM_DENSE + NUM_CATEGORICAL
    schema = {f"c{i}": pl.Int64 if i <= NUM_DENSE else pl.String for i in range(columns)}
    try:
        frame = pl.read_csv(path, separator="\t", has_header=False, schema=schema, n_rows=num_rows)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise CriteoFormatError(
            f"{path} is no Criteo TSV (label, {NUM_DENSE} integers, {NUM_CATEGORICAL} hexadecimal "
            f"ids, no header): {error}"
        ) from error
    if len(frame) < num_rows:
        raise CriteoFormatError(
            f"{path} has {len(frame)} rows, {num_rows} are needed; take fewer steps or smaller "
            "batches"
        )
    return _rows_of(frame, sizes)


def _rows_of(frame: pl.DataFrame, sizes: Sequence[int]) -> ClickRows:
    names = frame.columns
    dense = frame.select(pl.col(names[1 : 1 + NUM_DENSE]).fill_null(0)).to_numpy()
    hashed = [
        pl.col(name).str.to_integer(base=16, strict=False).fill_null(0) % size
        for name, size in zip(names[1 + NUM_DENSE :], sizes, strict=True)
    ]
    ids = frame.select(hashed).to_numpy().astype(np.int64)
    label = frame[names[0]].to_numpy().astype(np.float32)
    return ClickRows(log_transform(dense), ids, label, None)

"""Vocabularies: raw values to dense indices, 0 meaning unknown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from trainer.data.ragged import IntArray

UNKNOWN = 0


@dataclass(frozen=True)
class Vocabulary:
    """Distinct values in ascending order; the value at position i has index i + 1."""

    name: str
    values: pl.Series

    @property
    def size(self) -> int:
        return len(self.values) + 1

    def encode(self, values: pl.Series) -> IntArray:
        """Index of each value; 0 where it was not seen in training."""
        if self.values.is_empty():
            return np.full(len(values), UNKNOWN, dtype=np.int64)
        positions = self.values.search_sorted(values).to_numpy().astype(np.int64)
        found = self.values.gather(np.minimum(positions, len(self.values) - 1)) == values
        return np.where(found.to_numpy(), positions + 1, UNKNOWN)

    def write_file(self, path: Path) -> None:
        frame = pl.DataFrame(
            {"index": np.arange(1, self.size, dtype=np.int64), "value": self.values}
        )
        frame.write_parquet(path)


def fit_vocabulary(
    name: str, values: pl.Series, *, min_count: int = 1, max_size: int | None = None
) -> Vocabulary:
    """Keep values seen at least `min_count` times, the `max_size` most frequent of them.

    Ties in frequency go to the smaller value, so that the result depends on the values alone.
    """
    counts = values.alias("value").value_counts(name="count")
    kept = counts.filter(pl.col("count") >= min_count).sort(
        ["count", "value"], descending=[True, False]
    )
    if max_size is not None:
        kept = kept.head(max_size)
    return Vocabulary(name, kept["value"].sort())

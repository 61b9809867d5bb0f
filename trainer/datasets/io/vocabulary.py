"""Vocabularies in the making: raw values to dense indices, 0 meaning unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.transforms import VocabularyEncoder


def vocabulary_of(values: pl.Series | NDArray) -> VocabularyEncoder:
    """The value at position i of `values` (distinct, ascending) has index i + 1."""
    index = np.arange(1, len(values) + 1, dtype=np.int64)
    return VocabularyEncoder(pl.Series("value", values), index, len(values) + 1)


def write_vocabulary(path: Path, vocabulary: VocabularyEncoder) -> None:
    pl.DataFrame({"index": vocabulary.ids, "value": vocabulary.values}).write_parquet(path)


def fit_vocabulary(
    values: pl.Series, *, min_count: int = 1, max_size: int | None = None
) -> VocabularyEncoder:
    """Keep values seen at least `min_count` times, the `max_size` most frequent of them.

    Ties in frequency go to the smaller value, so that the result depends on the values alone.
    """
    counts = values.alias("value").value_counts(name="count")
    kept = counts.filter(pl.col("count") >= min_count).sort(
        ["count", "value"], descending=[True, False]
    )
    return vocabulary_of(kept["value"].head(max_size or len(kept)).sort())

"""What `shardloom data prepare criteo` and `generate criteo` are told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt

from trainer.datasets.io.options import LineOptions


class CriteoOptions(LineOptions, frozen=True):
    """Recorded in the manifest."""

    ids: Literal["vocabulary", "hashing"] = "vocabulary"
    """An id for each frequent value, or hashed ids."""
    min_count: PositiveInt = 10
    """Rarer values are unknown (id 0)."""
    max_ids: Annotated[int, Field(ge=1, le=2**31)] = 10_000_000
    """Largest vocabulary of a column."""
    num_hash_buckets: Annotated[int, Field(ge=2, le=2**31)] = 1_000_000
    """Ids of a column with --ids hashing."""
    negatives: Literal["zero", "keep_sign"] = "zero"
    """Negative counts: 0, or -log(1 - count)."""


class CriteoGeneratorOptions(
    BaseModel, extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True
):
    """Recorded in `teacher.json`."""

    num_rows: Annotated[int, Field(alias="rows", ge=10)] = 100_000
    """Number of rows."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The same seed gives the same files."""
    zipf_exponent: Annotated[float, Field(alias="zipf", ge=0.01)] = 1.05
    """Exponent of the ids' Zipf law."""
    max_ids: PositiveInt = 100_000
    """Values of a column; Criteo has up to 10 million."""
    num_days: Annotated[PositiveInt, Field(alias="days")] = 1
    """Files: train.txt, or day_0, ..."""
    gzip: bool = False
    """Compress the files."""

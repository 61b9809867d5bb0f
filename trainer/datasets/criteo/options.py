"""What `shardloom data prepare criteo` and `generate criteo` are told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt


class CriteoOptions(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """Recorded in the manifest.

    The last three bound memory: bytes of text at a time, blocks in a run, rows in a bucket.
    """

    split: Literal["last_fraction", "last_file"] = "last_fraction"
    """Validate on the last rows or the last file (day)."""
    validation_fraction: Annotated[float, Field(ge=0.00001, le=0.999)] = 0.1
    """Share to validate on, with --split last_fraction."""
    num_partitions: PositiveInt = 32
    """Files per split."""
    row_group_rows: PositiveInt = 8192
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Of the order of training rows, and of hashes."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    """A line that cannot be read ends it all, or is left out and counted."""
    max_bad_lines: Annotated[float, Field(ge=1e-9)] = 0.01
    """Most lines to skip: below 1 a share of each file's lines, else a number."""
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
    block_bytes: PositiveInt = 32 * 1024 * 1024
    run_blocks: PositiveInt = 8
    bucket_rows: PositiveInt = 2_000_000


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

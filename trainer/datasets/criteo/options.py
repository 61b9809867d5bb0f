"""What `shardloom data prepare criteo` and `generate criteo` are told.

Fields with a description are options of the command; the others are for callers in Python.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt


class CriteoOptions(BaseModel, extra="forbid", frozen=True):
    """Recorded in the manifest.

    The last three bound memory: bytes of text read at a time, blocks in a run, rows in a bucket.
    """

    ids: Annotated[
        Literal["vocabulary", "hashing"],
        Field(description="An id for each frequent value, or hashed ids."),
    ] = "vocabulary"
    min_count: Annotated[int, Field(ge=1, description="Rarer values are unknown (id 0).")] = 10
    max_ids: Annotated[
        int, Field(ge=1, le=2**31, description="Largest vocabulary of a column.")
    ] = 10_000_000
    num_hash_buckets: Annotated[
        int, Field(ge=2, le=2**31, description="Ids of a column with --ids hashing.")
    ] = 1_000_000
    negatives: Annotated[
        Literal["zero", "keep_sign"],
        Field(description="Negative counts: 0, or -log(1 - count)."),
    ] = "zero"
    split: Annotated[
        Literal["last_fraction", "last_file"],
        Field(description="Validate on the last rows or the last file (day)."),
    ] = "last_fraction"
    validation_fraction: Annotated[
        float,
        Field(
            ge=0.00001, le=0.999, description="Share to validate on, with --split last_fraction."
        ),
    ] = 0.1
    num_partitions: Annotated[int, Field(ge=1, description="Files per split.")] = 32
    row_group_rows: PositiveInt = 8192
    seed: Annotated[
        int,
        Field(ge=0, le=2**32 - 1, description="Of the order of training rows, and of hashes."),
    ] = 0
    on_bad_line: Annotated[
        Literal["fail", "skip"],
        Field(description="A line that cannot be read ends it all, or is left out and counted."),
    ] = "fail"
    max_bad_lines: Annotated[
        float,
        Field(
            ge=1e-9,
            description="Most lines to skip: below 1 a share of each file's lines, else a number.",
        ),
    ] = 0.01
    block_bytes: PositiveInt = 32 * 1024 * 1024
    run_blocks: PositiveInt = 8
    bucket_rows: PositiveInt = 2_000_000


class CriteoGeneratorOptions(BaseModel, extra="forbid", frozen=True):
    """Recorded in `teacher.json`."""

    num_rows: Annotated[int, Field(ge=10, description="Number of rows.")] = 100_000
    format: Annotated[
        Literal["tsv", "parquet"],
        Field(description="Raw files for `prepare criteo`, or a prepared folder."),
    ] = "parquet"
    seed: Annotated[int, Field(ge=0, description="The same seed gives the same files.")] = 0
    zipf_exponent: Annotated[
        float, Field(ge=0.01, description="Exponent of the ids' Zipf law.")
    ] = 1.05
    max_ids: Annotated[
        int, Field(ge=1, description="Values of a column; Criteo has up to 10 million.")
    ] = 100_000
    num_days: Annotated[int, Field(ge=1, description="Raw files: train.txt, or day_0, ...")] = 1
    gzip: Annotated[bool, Field(description="Compress the raw files.")] = False
    num_partitions: Annotated[int, Field(ge=1, description="Parquet files per split.")] = 32
    row_group_rows: PositiveInt = 8192

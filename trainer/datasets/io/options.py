"""What every preparation of files of lines is told; `datasets/parameters.py` makes CLI options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt


class LineOptions(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """The last three bound memory: bytes of text at a time, blocks in a run, rows in a bucket."""

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
    block_bytes: PositiveInt = 32 * 1024 * 1024
    run_blocks: PositiveInt = 8
    bucket_rows: PositiveInt = 2_000_000

"""How to prepare Criteo files, and where their rows go, before any is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from trainer.data.errors import TooFewRowsError
from trainer.data.prepare.criteo_runs import Buckets, Runs


class CriteoOptions(BaseModel):
    """How to prepare Criteo files; recorded in the manifest.

    `ids`: `vocabulary` gives each value seen `min_count` times in training an id of its own, at
    most `max_ids` a column; `hashing` maps values to `num_hash_buckets` ids. `split`: validation is
    the last `validation_fraction` of all rows, or the whole last file (the last day).
    `on_bad_line`: a line that cannot be read is a fault, or left out, up to `max_bad_lines`: below
    1 a share of each file's lines, else a number of lines in all.
    The last three bound memory: bytes of text read at a time, blocks in a run, rows in a bucket.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: Literal["vocabulary", "hashing"] = "vocabulary"
    min_count: PositiveInt = 10
    max_ids: PositiveInt = 10_000_000
    num_hash_buckets: Annotated[int, Field(ge=2, le=2**31)] = 1_000_000
    negatives: Literal["zero", "keep_sign"] = "zero"
    split: Literal["last_fraction", "last_file"] = "last_fraction"
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    num_partitions: PositiveInt = 32
    row_group_rows: PositiveInt = 8192
    seed: Annotated[int, Field(ge=0)] = 0
    on_bad_line: Literal["fail", "skip"] = "fail"
    max_bad_lines: PositiveFloat = 0.01
    block_bytes: PositiveInt = 32 * 1024 * 1024
    run_blocks: PositiveInt = 8
    bucket_rows: PositiveInt = 2_000_000


def check_rows_left(runs: Runs, buckets: Buckets) -> None:
    """Raise `TooFewRowsError` where all lines of a split were left out."""
    num_training = int(runs.offsets[:, buckets.training_buckets].sum())
    num_rows = int(runs.offsets[:, -1].sum())
    if not 0 < num_training < num_rows:
        raise TooFewRowsError(
            f"{num_training} training rows and {num_rows - num_training} validation rows are left "
            "without the bad lines; mend the files or choose another --validation-fraction"
        )


def plan_buckets(lines: Sequence[int], options: CriteoOptions, names: Sequence[str]) -> Buckets:
    """Where validation begins and how many buckets there are, from the files' numbers of lines.

    Every partition has the same number of buckets. Raises `TooFewRowsError`.
    """
    total = sum(lines)
    if options.split == "last_file":
        if len(lines) < 2:
            raise TooFewRowsError(
                f"{names[0]}: the only file cannot be the validation part; name more files or "
                "choose --split last_fraction"
            )
        num_validation = lines[-1]
    else:
        num_validation = int(total * options.validation_fraction)
    if not 0 < num_validation < total:
        raise TooFewRowsError(
            f"{', '.join(names)}: {total} rows leave no validation or no training rows with "
            f"fraction {options.validation_fraction:g}; use more rows or another fraction"
        )
    return Buckets(
        num_training=total - num_validation,
        num_validation=num_validation,
        training_buckets=_num_buckets(total - num_validation, options),
        validation_buckets=_num_buckets(num_validation, options),
        seed=options.seed,
    )


def _num_buckets(num_rows: int, options: CriteoOptions) -> int:
    """Files are no smaller than a row group and of equally many buckets, none of them too large."""
    num_parts = min(options.num_partitions, max(1, num_rows // options.row_group_rows))
    return num_parts * -(-num_rows // (num_parts * options.bucket_rows))

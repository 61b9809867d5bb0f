"""Writing a prepared folder all or nothing, as partitioned Parquet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.errors import OutputExistsError
from trainer.data.manifest import MANIFEST_NAME, SplitEntry, describe_file
from trainer.data.ragged import IntArray


@contextmanager
def staged_folder(out: Path, *, overwrite: bool, proof: str = MANIFEST_NAME) -> Iterator[Path]:
    """Yield an empty sibling of `out` that takes its name when the block ends well.

    An existing `out` is replaced only with `overwrite`, and only if it is empty or holds the file
    `proof`, so that a mistyped path costs nobody their files. Raises `OutputExistsError`.
    """
    check_replaceable(out, overwrite=overwrite, proof=proof)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.partial-{os.getpid()}")
    retired = out.with_name(f".{out.name}.old-{os.getpid()}")
    staging.mkdir()
    try:
        yield staging
        if out.exists():
            out.rename(retired)
        staging.rename(out)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(out: Path, *, overwrite: bool, proof: str = MANIFEST_NAME) -> None:
    """Raise `OutputExistsError` unless `out` is free, or ours to replace and `overwrite` is set."""
    if not out.exists():
        return
    if not overwrite:
        raise OutputExistsError(f"{out} exists; choose another folder or add --overwrite")
    if not out.is_dir() or (any(out.iterdir()) and not (out / proof).is_file()):
        raise OutputExistsError(
            f"{out} holds no {proof}, so it is not ours to overwrite; remove it"
        )


def write_split(
    folder: Path,
    name: str,
    rows: IntArray,
    build: Callable[[IntArray], pa.Table],
    *,
    num_partitions: int,
    row_group_rows: int,
) -> SplitEntry:
    """Write `build(part of rows)` to `folder/name/part-NNNNN.parquet`, one part at a time.

    At most `num_partitions` files, fewer where a file would not fill one row group; `rows` is
    split evenly and in order. Memory is that of one part.
    """
    (folder / name).mkdir()
    num_parts = min(num_partitions, max(1, len(rows) // row_group_rows))
    files = []
    for index, part in enumerate(np.array_split(rows, num_parts)):
        path = folder / name / f"part-{index:05d}.parquet"
        pq.write_table(build(part), path, compression="zstd", row_group_size=row_group_rows)
        files.append(describe_file(path, folder))
    return SplitEntry(num_rows=len(rows), files=tuple(files))

"""Writing a folder all or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.data.errors import OutputExistsError
from trainer.data.manifest import MANIFEST_NAME


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

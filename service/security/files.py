"""Whether a file is where its name says, and folders for nobody else's eyes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may look into; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, all links resolved, is one of the roots or lies below one.

    The roots may be reached by links themselves.
    """
    real = os.path.realpath(path)
    return any(_is_inside(real, os.path.realpath(root)) for root in roots)


def _is_inside(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)

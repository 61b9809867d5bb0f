"""Whether a file is where its name says. Pure but for the links that it follows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, all links resolved, is one of the roots or lies below one.

    The roots may be reached by links themselves.
    """
    real = os.path.realpath(path)
    return any(_is_inside(real, os.path.realpath(root)) for root in roots)


def _is_inside(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)

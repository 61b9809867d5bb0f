"""Which files below a remote folder are ours: the only ones that may be replaced or deleted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_NAME = "uploads.txt"
_UNFINISHED_NAME = f".{_NAME}.unfinished"
UPLOADS_NAMES = (_NAME, _UNFINISHED_NAME)


class Uploads:
    """Paths relative to the remote folder, one a line of `uploads.txt` in the working folder.

    A path is noted before its file is uploaded. The list outlives the journal: work with other
    options still knows what the work before it left at the same place.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> frozenset[str]:
        """All paths noted."""
        path = self._folder / _NAME
        return frozenset(path.read_text("utf-8").splitlines()) if path.is_file() else frozenset()

    def add(self, names: Iterable[str]) -> None:
        """Note paths; they are on the disk when this returns, all or none."""
        unfinished = self._folder / _UNFINISHED_NAME
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in sorted({*self.names(), *names}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._folder / _NAME)

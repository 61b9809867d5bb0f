"""Rows that cannot be used and are left out: which ones, of which file, and why."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.errors import TooManyBadRowsError

FaultArray = NDArray[np.int32]
FilesOf = Callable[[IntArray], list[tuple[str, IntArray]]]
_MAX_LISTED = 10
OTHERS = "other files or reasons"
QuarantinedRows = Counter[tuple[str, str]]
"""How many rows are left out, by file and reason."""


class FaultLog:
    """Numbers for pairs of file and reason, from 1 on; 0 says that a row is fine.

    For several threads.
    """

    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def code(self, file: str, reason: str) -> int:
        with self._lock:
            return self._codes.setdefault((file, reason), len(self._codes) + 1)

    def count(self, faults: FaultArray) -> QuarantinedRows:
        """What the marked ones of `faults` [n] are."""
        with self._lock:
            codes = dict(self._codes)
        counts = np.bincount(faults, minlength=len(codes) + 1)
        return Counter({key: int(counts[code]) for key, code in codes.items() if counts[code]})


class FaultMarks:
    """The bad ones of some rows; a row keeps the first fault that is found in it."""

    def __init__(self, rows: IntArray, log: FaultLog, files_of: FilesOf) -> None:
        """`rows` are numbers over all files, which `files_of` sorts by file."""
        self.faults: FaultArray = np.zeros(len(rows), dtype=np.int32)
        self._rows = rows
        self._log = log
        self._files_of = files_of

    def add(self, places: IntArray, reason: str) -> None:
        """Mark places in the rows, which may repeat."""
        fresh = np.unique(places[self.faults[places] == 0])
        for path, found in self._files_of(self._rows[fresh]):
            self.faults[fresh[found]] = self._log.code(path, reason)


def check_share(num_bad: int, num_rows: int, max_share: float, found: QuarantinedRows) -> None:
    """Raise `TooManyBadRowsError` where `num_bad` of `num_rows` rows are too many.

    `found` are some of them, to name the commonest.
    """
    if num_bad <= max_share * num_rows:
        return
    mostly = "".join(f"; mostly {file}: {why}" for (file, why), _ in found.most_common(1))
    raise TooManyBadRowsError(
        f"{num_bad:,} of {num_rows:,} rows cannot be used, more than the share {max_share:g} that "
        f"data.max_bad_share lets be left out{mostly}. Mend the data, or raise data.max_bad_share"
    )


def most_quarantined(counts: QuarantinedRows) -> QuarantinedRows:
    """The commonest of `counts`, the most first, and all others together."""
    listed = Counter(dict(counts.most_common(_MAX_LISTED)))
    if rest := counts.total() - listed.total():
        listed[OTHERS, OTHERS] = rest
    return listed

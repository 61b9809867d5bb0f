"""Criteo lines that cannot be read, left out and counted where `--on-bad-line skip` says so.

A faulty block is halved until its faulty lines are found: good lines are parsed in bulk all the
same, and few bad ones among many cost little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer.data.errors import CorruptFileError, TooManyBadRowsError
from trainer.data.prepare.criteo_format import (
    LineFault,
    RawClicks,
    line_fault,
    try_parse,
    with_plain_ends,
)
from trainer.data.ragged import IntArray

NUM_SHOWN = 5
# A faulty block of no more lines is gone through line by line, which takes as long as a few dozen
# calls of the parser: halving further would cost more where faults are spread.
_FEW_LINES = 4096

_Part = tuple[RawClicks, IntArray]


@dataclass
class BadLines:
    """What was left out: how many lines of each kind of fault, and the first few in words."""

    num_of_kind: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of lines."""
        return self.num_of_kind.total()

    def add(self, fault: LineFault) -> None:
        """Count one more line."""
        self.num_of_kind[fault.kind] += 1
        if len(self.shown) < NUM_SHOWN:
            self.shown.append(str(fault.error))

    def merge(self, facts: dict[str, Any]) -> None:
        """Count what `facts` gave of later lines."""
        self.num_of_kind.update(facts["num_of_kind"])
        self.shown = [*self.shown, *facts["shown"]][:NUM_SHOWN]

    def facts(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"num_of_kind": dict(sorted(self.num_of_kind.items())), "shown": self.shown}

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_of_kind.items()))


def parse_good_lines(
    block: bytes, source: str, first_line: int, bad: BadLines
) -> tuple[RawClicks, IntArray]:
    """Parse the good lines of a block and count the others in `bad`.

    Gives the rows, and which line of the block each is, from 0. Raises `CorruptFileError` where
    lines cannot be read though none of them is at fault.
    """
    finder = _Finder(source, first_line, bad)
    parts = list(finder.good_parts(with_plain_ends(block), 0))
    if not parts:
        return _NOTHING, np.zeros(0, dtype=np.int64)
    clicks = RawClicks(
        label=np.concatenate([part.label for part, _ in parts]),
        counts=np.concatenate([part.counts for part, _ in parts]),
        ids=np.concatenate([part.ids for part, _ in parts]),
    )
    return clicks, np.concatenate([line for _, line in parts])


_NOTHING = RawClicks(
    np.zeros(0, dtype=np.uint8), np.zeros((0, 13)), np.zeros((0, 26), dtype=np.int64)
)


@dataclass(frozen=True)
class _Finder:
    source: str
    first_line: int
    bad: BadLines

    def good_parts(self, lines: bytes, start: int) -> Iterator[_Part]:
        """The rows of `lines`, which begin at line `start` of the block, in parts."""
        found = try_parse(lines)
        if isinstance(found, RawClicks):
            yield found, np.arange(start, start + len(found))
            return
        num_lines = lines.count(b"\n") + (not lines.endswith(b"\n"))
        middle = lines.find(b"\n", len(lines) // 2) + 1
        if num_lines <= _FEW_LINES or not 0 < middle < len(lines):
            yield from self._line_by_line(lines, start, found)
            return
        yield from self.good_parts(lines[:middle], start)
        yield from self.good_parts(lines[middle:], start + lines.count(b"\n", 0, middle))

    def _line_by_line(self, lines: bytes, start: int, cause: str) -> Iterator[_Part]:
        good, numbers = [], []
        for number, line in enumerate(lines.removesuffix(b"\n").split(b"\n"), start):
            fault = line_fault(line, self.source, self.first_line + number)
            if fault is None:
                good.append(line)
                numbers.append(number)
            else:
                self.bad.add(fault)
        if not good:
            return
        found = try_parse(b"\n".join(good) + b"\n")
        if isinstance(found, str):
            place = f"{self.source}, at or after line {self.first_line + start}"
            raise CorruptFileError(f"{place}: cannot be read: {cause}")
        yield found, np.array(numbers, dtype=np.int64)


def check_bound(source: str, num_lines: int, bad: BadLines, others: int, bound: float) -> None:
    """Raise `TooManyBadRowsError` where more lines are left out than may be.

    `bad` is of the `num_lines` lines of the file `source`, `others` were left out of files before.
    A `bound` below 1 is a share of each file's lines, another the number in all files. A file
    without a good line is refused whatever the bound.
    """
    is_share = bound < 1
    if bad.total == num_lines:
        wanted = "not one can be read; is it a Criteo file?"
    elif is_share and bad.total > bound * num_lines:
        wanted = f"more than the share {bound:g} that --max-bad-lines lets be left out"
    elif not is_share and bad.total + others > bound:
        wanted = f"with {others} of other files more than the {bound:.0f} of --max-bad-lines"
    else:
        return
    raise TooManyBadRowsError(
        f"{source}: {bad.total} of its {num_lines} lines are bad ({bad}), {wanted}. The first: "
        f"{bad.shown[0]}"
    )

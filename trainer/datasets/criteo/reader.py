"""Reading Criteo files (`train.txt`, `day_0` to `day_23`): plain or compressed, local or remote.

Tab-separated without a header: a label, 13 integers and 26 hexadecimal ids; any integer or id may
be empty. The lines of a block are checked by one pattern and parsed at once; only bad ones are
looked at cell by cell, to say what is wrong. Raises a `DataError` that names file and line.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import polars as pl

from trainer.errors import BadValueError, CorruptFileError, DataError

Value = TypeVar("Value")
NUM_DENSE = 13
# Distinct values per categorical column of the Criteo display advertising set.
CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
NUM_CATEGORICAL = len(CARDINALITIES)

LABEL = "label"
DENSE_NAMES = tuple(f"int_{number}" for number in range(NUM_DENSE))
ID_NAMES = tuple(f"cat_{number}" for number in range(NUM_CATEGORICAL))
NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL


def by_column(label: Value, count: Value, raw_id: Value) -> dict[str, Value]:
    """What holds for the label, for each of the counts and for each of the ids, by column."""
    return {LABEL: label, **dict.fromkeys(DENSE_NAMES, count), **dict.fromkeys(ID_NAMES, raw_id)}


SCHEMA = by_column(pl.Int64(), pl.Int64(), pl.String())
# A raw id that was not given. It sorts before every other and is counted like any other.
MISSING = -1
MAX_RAW_ID = 0xFFFF_FFFF
_Rule = tuple[str, str, re.Pattern[str]]
# What Polars takes for a number, leading blanks and zeros included.
_LABEL: _Rule = ("label", "0 or 1", re.compile(r" *(?:\+?0*[01]|-0+)"))
_INTEGER = re.compile(r" *(?:[+-]?0*[0-9]{1,18})?")
_COUNT: _Rule = ("count", "an integer of at most 18 digits or empty", _INTEGER)
_HEXADECIMAL = re.compile(r"(?:\+?0*[0-9a-fA-F]{1,8}|-0+)?")
_ID: _Rule = ("id", "a hexadecimal id of 1 to 8 digits or empty", _HEXADECIMAL)
_WANTED = by_column(_LABEL, _COUNT, _ID)
# A line without fault, all of it at once: many times faster than cell by cell.
_GOOD_LINE = r"\A" + "\t".join(cell.pattern for *_, cell in _WANTED.values()) + r"\z"
_OTHER_DELIMITERS = {",": "commas", ";": "semicolons", " ": "blanks", "|": "bars"}


def _rows_of(block: bytes) -> pl.DataFrame:
    """Parse whole good lines that end in plain line feeds; there may be none."""
    rows = pl.read_csv(
        io.BytesIO(block),
        separator="\t",
        has_header=False,
        quote_char=None,
        schema=SCHEMA,
        raise_if_empty=False,
    )
    ids = pl.col(ID_NAMES).str.to_integer(base=16, dtype=pl.Int64)
    return rows.with_columns(pl.col(LABEL).cast(pl.UInt8), ids.cast(pl.UInt32))


def _fault_of(line: bytes, source: str, number: int) -> tuple[str, DataError]:
    """The first fault of a bad line without its end, in a word and as an error."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        cause = (
            f"{source}, line {number}: byte {error.start + 1} of the line "
            f"(0x{line[error.start]:02x}) is not UTF-8; is this a text file, and was it copied "
            "in binary mode?"
        )
        return "encoding", CorruptFileError(cause)
    cells = text.split("\t")
    if len(cells) != NUM_COLUMNS:
        cause = f"{source}, line {number}: {_column_fault(text, len(cells))}"
        return "columns" if text.strip() else "empty", CorruptFileError(cause)
    name, cell = next(
        (name, cell)
        for cell, (name, (_, _, pattern)) in zip(cells, _WANTED.items(), strict=True)
        if not pattern.fullmatch(cell)
    )
    kind, wanted, _ = _WANTED[name]
    if number == 1 and name == LABEL and cell and not cell.isdigit():
        wanted += "; Criteo's files have no header: remove the first line"
    return kind, BadValueError(source, f"line {number}", name, cell, wanted)


def _column_fault(text: str, num_cells: int) -> str:
    wanted = (
        f"{num_cells} tab-separated columns, not {NUM_COLUMNS} (label, {NUM_DENSE} integers, "
        f"{NUM_CATEGORICAL} hexadecimal ids)"
    )
    if not text.strip():
        return "empty; remove empty lines"
    if num_cells == NUM_COLUMNS - 1:
        return f"{wanted}; is it the test part, which has no labels?"
    for delimiter, name in _OTHER_DELIMITERS.items():
        if len(text.split(delimiter)) == NUM_COLUMNS:
            return f"{wanted}; it is separated by {name}: replace them by tabs"
    return f"{wanted}; was the file cut or edited?"


_NUM_SHOWN = 5


@dataclass
class BadLines:
    """Skipped lines: how many of each kind of fault, and the first few in words; JSON values."""

    num_of_kind: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.num_of_kind.total()

    def add(self, kind: str, error: DataError) -> None:
        self.num_of_kind[kind] += 1
        if len(self.shown) < _NUM_SHOWN:
            self.shown.append(str(error))

    def merge(self, later: Mapping[str, Any]) -> None:
        """Count what `vars` gives of later lines."""
        self.num_of_kind.update(later["num_of_kind"])
        self.shown = [*self.shown, *later["shown"]][:_NUM_SHOWN]

    @property
    def counts(self) -> dict[str, int]:
        """What the manifest says of them."""
        kinds = {f"bad_lines_{kind}": n for kind, n in sorted(self.num_of_kind.items())}
        return {"bad_lines": self.total, **kinds}

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.num_of_kind.items()))


def parse_lines(
    block: bytes, source: str, first_line: int, bad: BadLines | None = None
) -> pl.DataFrame:
    """Parse whole lines: rows with counts int64 and ids uint32, null where empty.

    `line` is the line of the block that a row is, from 0. `source` and `first_line` (from 1) name
    lines in errors. Lines at fault are counted in `bad`; without it the first of them raises
    `BadValueError` or `CorruptFileError`.
    """
    block = block.replace(b"\r\n", b"\n")
    if first_line == 1:
        block = block.removeprefix(codecs.BOM_UTF8)
    text = block.decode(errors="replace").removesuffix("\n")
    is_good = pl.Series([text]).str.split("\n").explode().str.contains(_GOOD_LINE).to_numpy()
    good = np.flatnonzero(is_good)
    if len(good) < len(is_good):
        lines = block.split(b"\n")
        for number in np.flatnonzero(~is_good):
            kind, error = _fault_of(lines[number], source, first_line + int(number))
            if bad is None:
                raise error
            bad.add(kind, error)
        block = b"".join(lines[number] + b"\n" for number in good)
    return _rows_of(block).with_columns(pl.Series("line", good))

"""Criteo's file format: tab-separated, no header; a label, 13 integers and 26 hexadecimal ids.

Both the Kaggle file (`train.txt`) and the Terabyte files (`day_0` to `day_23`) look like this. Any
integer or id may be empty. Blocks of whole lines are parsed at once; only a block that is found to
be faulty is read again line by line, to say where.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trainer.data.errors import BadValueError, CorruptFileError, DataError
from trainer.data.prepare.criteo_teacher import NUM_CATEGORICAL, NUM_DENSE

LABEL = "label"
DENSE_NAMES = tuple(f"int_{number}" for number in range(NUM_DENSE))
ID_NAMES = tuple(f"cat_{number}" for number in range(NUM_CATEGORICAL))
NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
SCHEMA: dict[str, type[pl.DataType]] = {
    LABEL: pl.Int64,
    **dict.fromkeys(DENSE_NAMES, pl.Int64),
    **dict.fromkeys(ID_NAMES, pl.String),
}
# A raw id that was not given. It sorts before every other and is counted like any other.
MISSING = -1
MAX_RAW_ID = 0xFFFF_FFFF
_COUNT = ("an integer of 64 bits or empty", re.compile(r"([+-]?[0-9]{1,18})?"))
_ID = ("a hexadecimal id of 1 to 8 digits or empty", re.compile(r"([0-9a-fA-F]{1,8})?"))
_WANTED = {
    LABEL: ("0 or 1", re.compile(r"[01]")),
    **dict.fromkeys(DENSE_NAMES, _COUNT),
    **dict.fromkeys(ID_NAMES, _ID),
}
# A line without fault, all of it at once: many times faster than cell by cell.
_GOOD_LINE = re.compile("\t".join(f"(?:{cell.pattern})" for _, cell in _WANTED.values()).encode())
_OTHER_DELIMITERS = {",": "commas", ";": "semicolons", " ": "blanks", "|": "bars"}


@dataclass(frozen=True)
class RawClicks:
    """N lines: label [N] uint8; counts float64 [N, 13], NaN where empty; ids int64 [N, 26].

    Ids are the hexadecimal numbers, `MISSING` where empty.
    """

    label: NDArray[np.uint8]
    counts: NDArray[np.float64]
    ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.label)


def parse_lines(block: bytes, source: str, first_line: int) -> RawClicks:
    """Parse whole lines; `source` and `first_line` (from 1) name them in errors.

    Raises `BadValueError`, or `CorruptFileError` where a line has another number of columns.
    """
    block = with_plain_ends(block)
    found = try_parse(block)
    if isinstance(found, str):
        raise locate_fault(block, source, first_line, found)
    return found


def with_plain_ends(block: bytes) -> bytes:
    """The lines without the carriage returns of Windows."""
    return block.replace(b"\r\n", b"\n") if b"\r" in block else block


def try_parse(block: bytes) -> RawClicks | str:
    """Parse whole lines that end in plain line feeds; a text where one of them is at fault."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if not block.isascii() or block.count(b"\t") != num_lines * (NUM_COLUMNS - 1):
        return "other bytes or columns than wanted"
    try:
        frame = pl.read_csv(
            io.BytesIO(block), separator="\t", has_header=False, quote_char=None, schema=SCHEMA
        )
    except pl.exceptions.PolarsError as error:
        return str(error)
    clicks = _clicks_of(frame) if len(frame) == num_lines else None
    return "other lines or values than wanted" if clicks is None else clicks


def _clicks_of(frame: pl.DataFrame) -> RawClicks | None:
    """The frame as numbers; None where a label or an id is no such thing."""
    label = frame[LABEL]
    ids = frame.select(pl.col(ID_NAMES).str.to_integer(base=16, strict=False, dtype=pl.Int64))
    given = frame.select(pl.col(ID_NAMES).is_not_null().sum()).row(0)
    understood = ids.select(pl.col(ID_NAMES).is_between(0, MAX_RAW_ID).sum()).row(0)
    if label.null_count() or not label.is_between(0, 1).all() or given != understood:
        return None
    return RawClicks(
        label=label.to_numpy().astype(np.uint8),
        counts=frame.select(pl.col(DENSE_NAMES).cast(pl.Float64)).fill_null(np.nan).to_numpy(),
        ids=ids.fill_null(MISSING).to_numpy(),
    )


def locate_fault(block: bytes, source: str, first_line: int, cause: str = "") -> DataError:
    """The first fault of a block, line by line: slow, and only used to name a known fault."""
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first_line):
        if (fault := line_fault(line, source, number)) is not None:
            return fault.error
    return CorruptFileError(f"{source}, at or after line {first_line}: cannot be read: {cause}")


Kind = Literal["encoding", "empty", "columns", "label", "count", "id"]


@dataclass(frozen=True)
class LineFault:
    """What is wrong with a line, in a word and in the words of an error."""

    kind: Kind
    error: DataError


def line_fault(line: bytes, source: str, number: int) -> LineFault | None:
    """The first fault of a line without its end; None where it is good."""
    return None if _GOOD_LINE.fullmatch(line) else _fault_of(line, source, number)


def _fault_of(line: bytes, source: str, number: int) -> LineFault | None:
    """The same, cell by cell."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        cause = (
            f"{source}, line {number}: byte {error.start + 1} of the line "
            f"(0x{line[error.start]:02x}) is not UTF-8; is this a text file, and was it copied "
            "in binary mode?"
        )
        return LineFault("encoding", CorruptFileError(cause))
    cells = text.split("\t")
    if len(cells) != NUM_COLUMNS:
        cause = f"{source}, line {number}: {_column_fault(text, len(cells))}"
        return LineFault("columns" if text.strip() else "empty", CorruptFileError(cause))
    for cell, (name, (wanted, pattern)) in zip(cells, _WANTED.items(), strict=True):
        if not pattern.fullmatch(cell):
            if number == 1 and name == LABEL and cell and not cell.isdigit():
                wanted += "; Criteo's files have no header: remove the first line"
            fault = BadValueError(source, f"line {number}", name, cell, wanted)
            return LineFault(_kind_of(name), fault)
    return None


def _kind_of(column: str) -> Kind:
    if column == LABEL:
        return "label"
    return "count" if column in DENSE_NAMES else "id"


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

"""Typed reading of csv files, whole or in blocks; a fault is named by file, line, column and value.

Polars reads the text with the wanted types. Only when that fails, or finds an empty or forbidden
cell, is the text searched line by line to say where the fault is.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from trainer.errors import (
    BadValueError,
    ColumnError,
    CorruptFileError,
    DataError,
    SourceMissingError,
)
from trainer.storage import Location

_PATTERNS = {
    "a whole number": re.compile(r"\d{1,18}"),
    "a number": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"),
}
# 2100-01-01 UTC.
_YEAR_2100_S = 4_102_444_800


@dataclass(frozen=True)
class CsvColumn:
    """A column to read; a number lies in `bounds`, of which the lower one is exclusive.

    `rule` says in words what is wanted, where kind and bounds do not say it well.
    """

    name: str
    kind: str = "text"
    bounds: tuple[float, float] | None = None
    rule: str | None = None

    @property
    def dtype(self) -> type[pl.DataType]:
        kinds = {"text": pl.String, "a whole number": pl.Int64, "a number": pl.Float64}
        return kinds[self.kind]

    @property
    def wanted(self) -> str:
        if self.rule is not None:
            return self.rule
        if self.bounds is None:
            return self.kind
        return f"{self.kind} above {self.bounds[0]:g} and at most {self.bounds[1]:g}"

    def accepts(self, text: str | None) -> bool:
        """Whether a cell may stand in this column; text columns take anything."""
        if self.kind == "text":
            return True
        if text is None or not _PATTERNS[self.kind].fullmatch(text):
            return False
        return self.bounds is None or self.bounds[0] < float(text) <= self.bounds[1]

    def fault(self) -> pl.Expr:
        """Whether a cell that was read breaks the rule; false for every cell of a text column."""
        if self.kind == "text":
            return pl.lit(False).alias(self.name)
        broken = pl.col(self.name).is_null() | (pl.col(self.name) < 0)
        if self.bounds is not None:
            broken |= ~pl.col(self.name).is_between(*self.bounds, closed="right")
        return broken.any()


def text(name: str) -> CsvColumn:
    """A column of any text; an empty cell reads as an empty string."""
    return CsvColumn(name)


def integer(name: str) -> CsvColumn:
    """A column of non-negative integers."""
    return CsvColumn(name, "a whole number")


def number(name: str, *, above: float, at_most: float) -> CsvColumn:
    return CsvColumn(name, "a number", (above, at_most))


def timestamp(name: str) -> CsvColumn:
    """A column of whole seconds since 1970; what lies after the year 2100 is no such time."""
    rule = "a time in whole seconds since 1970, before the year 2100; is it in milliseconds?"
    return CsvColumn(name, "a whole number", (-1, _YEAR_2100_S), rule)


def read_csv(
    path: Path | Location, columns: Sequence[CsvColumn], *, delimiter: str = ","
) -> pl.DataFrame:
    """Read `columns` of a csv file with a header; other columns are left out.

    Raises `SourceMissingError`, `ColumnError`, `BadValueError`, or `CorruptFileError` where a file
    is empty or cannot be parsed at all.
    """
    reader = BlockReader(Location.parse(path), columns, delimiter=delimiter)
    return pl.concat(frame for _, frame in reader.blocks())


def without_blank_end(content: bytes) -> bytes:
    """The text without blank lines at its end; its last line keeps its own end."""
    text = content.rstrip(b"\r\n")
    end = content[len(text) :].find(b"\n") + 1
    return content[: len(text) + end] if end else content


def _delimiter_hint(line: str, delimiter: str) -> str:
    others = [mark for mark in (",", ";", "\t", "|") if mark != delimiter and mark in line]
    if delimiter in line or not others:
        return ""
    return f". Its cells seem to be split by {others[0]!r}: set --delimiter"


def _fault_of(
    path: str,
    line: int,
    record: Sequence[str],
    columns: Sequence[CsvColumn],
    header: Sequence[str],
) -> DataError | None:
    if not record:
        return CorruptFileError(f"{path}, line {line}: the line is blank; remove it")
    cells = dict(zip(header, record, strict=False))
    for column in columns:
        cell = cells.get(column.name)
        if cell is not None and not _is_utf8(cell):
            return CorruptFileError(
                f"{path}, line {line}, column '{column.name}': bytes that are not UTF-8 "
                f"({cell.encode('utf-8', 'surrogateescape')!r}); save the file as UTF-8"
            )
        if not column.accepts(cell):
            return BadValueError(path, f"line {line}", column.name, cell, column.wanted)
    if len(record) > len(header):
        return CorruptFileError(
            f"{path}, line {line}: more cells than columns: the header has {len(header)}; "
            "is the delimiter right, and is text with delimiters in it quoted?"
        )
    return None


def _is_utf8(cell: str) -> bool:
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


_BLOCK_BYTES = 32 * 1024 * 1024
# Lines are short; a "line" of several blocks is a quote that was never closed.
_MAX_BLOCKS_PER_LINE = 4
# Where blank lines at the end are looked for.
_END_BYTES = 4096


@dataclass(frozen=True)
class Block:
    """Where a block lies: bytes `[start, end)` and lines `[line, next_line)` of the file."""

    start: int
    end: int
    line: int
    next_line: int


class BlockReader:
    """Reads the wanted columns of a csv file block by block; memory is that of one block."""

    def __init__(
        self,
        location: Location,
        columns: Sequence[CsvColumn],
        *,
        delimiter: str = ",",
        block_bytes: int = _BLOCK_BYTES,
        may_lack_rows: bool = False,
    ) -> None:
        """Look at the header; raises `SourceMissingError`, `ColumnError` or `CorruptFileError`.

        `may_lack_rows`: a header alone is no fault. Blank lines at the end do not count.
        """
        if not location.exists():
            raise SourceMissingError(
                f"{location} is missing; a MovieLens folder holds ratings.csv, movies.csv"
            )
        self._location = location
        self._columns = columns
        self._delimiter = delimiter
        self._block_bytes = block_bytes
        size_bytes = location.size_bytes()
        with location.open_input() as file:
            header = file.read(min(block_bytes, size_bytes)).split(b"\n", 1)[0]
            file.seek(max(0, size_bytes - _END_BYTES))
            end = file.read(_END_BYTES)
        self.size_bytes = size_bytes - len(end) + len(without_blank_end(end))
        # A file that was cut short may still end in a number, of which digits are missing.
        self.has_line_end = end.endswith(b"\n")
        self._header = header + b"\n"
        if not header.strip():
            raise CorruptFileError(f"{location} is empty; was the download cut short?")
        self._check_header()
        if self.size_bytes <= len(self._header) and not may_lack_rows:
            raise CorruptFileError(
                f"{location} has a header but no rows; was the download cut short?"
            )

    @property
    def first(self) -> int:
        """Where the first block begins: after the header."""
        return len(self._header)

    def read(self, start: int, line: int) -> tuple[Block, pl.DataFrame]:
        """The block that begins at byte `start`, on line `line`; raises a `DataError`."""
        content = self._read(start, line)
        block = Block(start, start + len(content), line, line + content.count(b"\n"))
        # The header is line 1 of what is parsed, and the block's first line is line 2.
        return block, self._parse(self._header + content, line_offset=line - 2)

    def blocks(self) -> Iterator[tuple[Block, pl.DataFrame]]:
        """All blocks, one after the other; raises what `read` does."""
        start, line = self.first, 2
        while start < self.size_bytes:
            block, frame = self.read(start, line)
            yield block, frame
            start, line = block.end, block.next_line

    def _parse(self, content: bytes, line_offset: int) -> pl.DataFrame:
        """Read a csv text that begins with the header, of which line n is `line_offset` + n here.

        Raises `BadValueError` or `CorruptFileError`.
        """
        columns = self._columns
        try:
            frame = pl.read_csv(
                content,
                columns=[column.name for column in columns],
                schema_overrides={column.name: column.dtype for column in columns},
                separator=self._delimiter,
            )
        except pl.exceptions.PolarsError as error:
            cause = str(error).splitlines()[0]
            raise self._locate_fault(content, line_offset, cause) from None
        if any(frame.select(column.fault()).item(0, 0) for column in columns if len(frame)):
            cause = "a value is missing or out of bounds"
            raise self._locate_fault(content, line_offset, cause)
        texts = [column.name for column in columns if column.kind == "text"]
        frame = frame.select(column.name for column in columns)
        return frame.with_columns(pl.col(texts).fill_null("")) if texts else frame

    def _check_header(self) -> None:
        """Raise `ColumnError` unless the header names every column."""
        line = self._header.decode("utf-8-sig", errors="replace").rstrip("\r\n")
        present = next(csv.reader([line], delimiter=self._delimiter), [])
        for column in self._columns:
            if column.name not in present:
                raise ColumnError(
                    f"{self._location}, line 1: column '{column.name}' is missing; it has {present}"
                    + _delimiter_hint(line, self._delimiter)
                )

    def _locate_fault(self, content: bytes, line_offset: int, cause: str) -> DataError:
        """Find the first bad record: slow, and only used to name a known fault."""
        file = io.TextIOWrapper(
            io.BytesIO(content), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        reader = csv.reader(file, delimiter=self._delimiter)
        header = next(reader, [])
        line = 1 + reader.line_num + line_offset
        try:
            for record in reader:
                if fault := _fault_of(str(self._location), line, record, self._columns, header):
                    return fault
                line = 1 + reader.line_num + line_offset
        except csv.Error as error:
            # The reader has gone on to where it gave up; the record began where the last one ended.
            place = f"{self._location}, line {line}"
            return CorruptFileError(f"{place}: {error}; is a quote left open?")
        for number, piece in enumerate(content.split(b"\n"), start=1):
            # An odd number of quotes: one is inside a cell without quotes.
            if piece.count(b'"') % 2:
                return CorruptFileError(
                    f"{self._location}, line {number + line_offset}: a quote is left open; a cell "
                    'that holds a quote is quoted itself, and the quote doubled, as in "5"" disk"'
                )
        return CorruptFileError(
            f"{self._location} cannot be read between lines {2 + line_offset} and {line - 1}: "
            f"{cause}"
        )

    def _read(self, start: int, line: int) -> bytes:
        """Whole lines from `start` on: about one block, and at least one line."""
        with self._location.open_input() as file:
            file.seek(start)
            content = b""
            for _ in range(_MAX_BLOCKS_PER_LINE):
                left = self.size_bytes - start - len(content)
                content += file.read(min(self._block_bytes, left))
                if start + len(content) == self.size_bytes:
                    return content
                if end := last_line_end(content):
                    return content[:end]
        raise CorruptFileError(
            f"{self._location}, line {line}: no end of line in {len(content)} bytes; is a quote "
            "left open, or is it no text file?"
        )


def last_line_end(content: bytes) -> int:
    """Where the last whole line ends: after a newline that is not inside quotes; 0 for none."""
    end = content.rfind(b"\n") + 1
    num_quotes = content.count(b'"', 0, end)
    while end and num_quotes % 2:
        # Back over the quote, as every newline after it is inside quotes too.
        quote = content.rfind(b'"', 0, end)
        earlier = content.rfind(b"\n", 0, quote) + 1
        num_quotes -= content.count(b'"', earlier, end)
        end = earlier
    return end

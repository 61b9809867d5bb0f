"""Text files in blocks of whole lines, and csv with types: faults by file, line, column and value.

Polars reads the text with the wanted types. Only when that fails, or finds an empty or forbidden
cell, is the text searched line by line to say where the fault is.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl
import pyarrow as pa

from trainer.errors import (
    BadValueError,
    ColumnError,
    CorruptFileError,
    DataError,
    SourceMissingError,
)
from trainer.storage import Location

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a file; `first_line` counts from 1."""

    lines: bytes
    first_line: int

    @property
    def num_lines(self) -> int:
        """The last may lack its line feed."""
        return self.lines.count(b"\n") + (not self.lines.endswith(b"\n"))


def read_blocks(source: Location, block_bytes: int) -> Iterator[LineBlock]:
    """Blocks of about `block_bytes`, cut after line feeds: always the same for the same file.

    Where the first has none, carriage returns end lines: they become line feeds.
    Raises `CorruptFileError` for an empty file, a compressed one that is cut short, and a line that
    is longer than a block; `StorageError` where storage does not let it be read for now.
    """
    first_line, rest, has_feeds = 1, b"", None
    try:
        with source.reading(), _open(source) as stream:
            while block := stream.read(block_bytes):
                if has_feeds is None:
                    # A block may end between the two characters of a line's end.
                    has_feeds = b"\n" in block or stream.peek(1)[:1] == b"\n"
                if not has_feeds:
                    block = block.replace(b"\r", b"\n")
                end = block.rfind(b"\n") + 1
                if not end and len(block) == block_bytes:
                    raise CorruptFileError(
                        f"{source}, line {first_line}: longer than {block_bytes} bytes; is this a "
                        "text file?"
                    )
                lines, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
                if lines:
                    found = LineBlock(lines, first_line)
                    first_line += found.num_lines
                    yield found
    except (OSError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"{source} cannot be read to its end ({error}); was the download cut short? "
            "Copy it again"
        ) from None
    if rest:
        yield LineBlock(rest, first_line)
    elif first_line == 1:
        raise CorruptFileError(f"{source} is empty; was the download cut short?")


def _open(source: Location) -> io.BufferedReader:
    file = source.open_input()
    suffix = next((end for end in COMPRESSIONS if source.name.endswith(end)), None)
    # A compressed stream may give less than was asked for; buffered, only at the end.
    stream = pa.CompressedInputStream(file, COMPRESSIONS[suffix]) if suffix else file
    return io.BufferedReader(stream)


# Rows are short; a "row" of several blocks is a quote that was never closed.
_MAX_BLOCKS_PER_ROW = 4


def whole_rows(source: Location, block_bytes: int) -> Iterator[LineBlock]:
    """Blocks of `read_blocks` that end where a row does: after an even number of quotes.

    Blank lines at the end are left out. Raises as `read_blocks` does, and `CorruptFileError` for a
    row of several blocks.
    """
    rest = LineBlock(b"", 1)
    for block in read_blocks(source, block_bytes):
        lines = rest.lines + block.lines
        end = last_line_end(lines)
        if not end and len(lines) > _MAX_BLOCKS_PER_ROW * block_bytes:
            raise CorruptFileError(
                f"{source}, line {rest.first_line}: no end of line in {len(lines)} bytes; is a "
                "quote left open, or is it no text file?"
            )
        # Blank lines wait for what comes after them.
        length = len(lines[:end].rstrip(b"\r\n"))
        end = lines.find(b"\n", length, end) + 1 or end
        if length:
            yield LineBlock(lines[:end], rest.first_line)
        else:
            end = 0
        rest = LineBlock(lines[end:], rest.first_line + lines.count(b"\n", 0, end))
    if rest.lines.strip(b"\r\n"):
        yield rest


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


_PATTERNS = {
    "a whole number": re.compile(r"[+-]?\d{1,19}", re.ASCII),
    "a number": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII),
}
_TYPES = {"text": pl.String, "a whole number": pl.Int64, "a number": pl.Float64}
# What stands for a byte that is not UTF-8.
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
# 2100-01-01 UTC.
_YEAR_2100_S = 4_102_444_800


@dataclass(frozen=True)
class CsvColumn:
    """A column to read; a number lies in `bounds`, of which the lower one is exclusive.

    An empty cell of text reads as an empty string. `rule` says in words what is wanted, where there
    are bounds.
    """

    name: str
    kind: str = "text"
    bounds: tuple[float, float] | None = None
    rule: str = ""

    def accepts(self, text: str | None) -> bool:
        """Whether a cell may stand in this column; text columns take anything."""
        if self.kind == "text":
            return True
        if text is None or not _PATTERNS[self.kind].fullmatch(text):
            return False
        number = float(text) if self.kind == "a number" else int(text)
        return self.bounds is None or self.bounds[0] < number <= self.bounds[1]

    def fault(self) -> pl.Expr:
        """Whether a cell that was read breaks the rule; false for every cell of a text column."""
        if self.kind == "text":
            return pl.lit(False).alias(self.name)
        broken = pl.col(self.name).is_null()
        if self.bounds is not None:
            broken |= ~pl.col(self.name).is_between(*self.bounds, closed="right")
        return broken.any()


def integer(name: str) -> CsvColumn:
    return CsvColumn(name, "a whole number", (-1, 2**63 - 1), "a whole number from 0 on")


def timestamp(name: str) -> CsvColumn:
    """A column of whole seconds since 1970; what lies after the year 2100 is no such time."""
    rule = "a time in whole seconds since 1970, before the year 2100; is it in milliseconds?"
    return CsvColumn(name, "a whole number", (-1, _YEAR_2100_S), rule)


def cells_of(line: str, delimiter: str, source: Location) -> list[str]:
    """Cells of the first line of `source`, none of a blank one; raises `CorruptFileError`."""
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        raise CorruptFileError(
            f"{source}, line 1: it holds a carriage return, or a cell of more than "
            f"{csv.field_size_limit()} characters; end lines by line feeds, and close every quote"
        ) from None


_BLOCK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class BlockReader:
    """Reads the wanted columns of a csv file block by block; memory is that of one block.

    `may_lack_rows`: a header alone is no fault.
    """

    location: Location
    columns: Sequence[CsvColumn]
    block_bytes: int = _BLOCK_BYTES
    may_lack_rows: bool = False

    def __post_init__(self) -> None:
        """Look at the header; raises `SourceMissingError`, `ColumnError` or `CorruptFileError`."""
        if not self.location.exists():
            raise SourceMissingError(
                f"{self.location} is missing; was the data unpacked whole, and its folder named?"
            )
        line = self._header.decode("utf-8-sig", errors="replace").rstrip("\r\n")
        present = cells_of(line, ",", self.location)
        for column in self.columns:
            if column.name not in present:
                raise ColumnError(
                    f"{self.location}, line 1: column '{column.name}' is missing; split by commas "
                    f"it has {present}"
                )

    @cached_property
    def _header(self) -> bytes:
        first = next(read_blocks(self.location, self.block_bytes))
        return first.lines.partition(b"\n")[0] + b"\n"

    def blocks(self) -> Iterator[LineBlock]:
        """Blocks of whole rows, without the header; always the same for the same file.

        Blank lines at the end do not count. Raises `CorruptFileError`.
        """
        has_rows = self.may_lack_rows
        for block in whole_rows(self.location, self.block_bytes):
            if block.first_line == 1:
                block = LineBlock(block.lines.partition(b"\n")[2], 2)
            if block.lines:
                has_rows = True
                yield block
        if not has_rows:
            raise CorruptFileError(
                f"{self.location} has a header but no rows; was the download cut short?"
            )

    def read(self) -> pl.DataFrame:
        """The wanted columns of the whole file; raises as `blocks` and `parse` do."""
        return pl.concat(map(self.parse, self.blocks()))

    def parse(self, block: LineBlock) -> pl.DataFrame:
        """The wanted columns of a block; raises `BadValueError` or `CorruptFileError`."""
        # The header is line 1 of what is parsed, and the block's first line is line 2.
        content, line_offset = self._header + block.lines, block.first_line - 2
        columns = self.columns
        try:
            frame = pl.read_csv(
                content,
                columns=[column.name for column in columns],
                schema_overrides={column.name: _TYPES[column.kind] for column in columns},
            )
        except pl.exceptions.PolarsError as error:
            cause = str(error).splitlines()[0]
            raise self._locate_fault(content, line_offset, cause) from None
        if any(frame.select(column.fault()).item(0, 0) for column in columns if len(frame)):
            cause = "a value is missing or out of bounds"
            raise self._locate_fault(content, line_offset, cause)
        frame = frame.select(column.name for column in columns)
        return frame.with_columns(pl.col(pl.String).fill_null(""))

    def _locate_fault(self, content: bytes, line_offset: int, cause: str) -> DataError:
        """Find the first bad record: slow, and only used to name a known fault."""
        file = io.TextIOWrapper(
            io.BytesIO(content), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        reader = csv.reader(file)
        header = next(reader, [])
        line = 1 + reader.line_num + line_offset
        try:
            for record in reader:
                if fault := self._fault_of(record, header, line):
                    return fault
                line = 1 + reader.line_num + line_offset
        except csv.Error as error:
            # The reader has gone on to where it gave up; the record began where the last one ended.
            place = f"{self.location}, line {line}"
            return CorruptFileError(f"{place}: {error}; is a quote left open?")
        for number, piece in enumerate(content.split(b"\n"), start=1):
            # An odd number of quotes: one is inside a cell without quotes.
            if piece.count(b'"') % 2:
                return CorruptFileError(
                    f"{self.location}, line {number + line_offset}: a quote is left open; a cell "
                    'that holds a quote is quoted itself, and the quote doubled, as in "5"" disk"'
                )
        return CorruptFileError(
            f"{self.location} cannot be read between lines {2 + line_offset} and {line - 1}: "
            f"{cause}"
        )

    def _fault_of(
        self, record: Sequence[str], header: Sequence[str], line: int
    ) -> DataError | None:
        place = f"{self.location}, line {line}"
        if not record:
            return CorruptFileError(f"{place}: the line is blank; remove it")
        cells = dict(zip(header, record, strict=False))
        for column in self.columns:
            cell = cells.get(column.name)
            if cell is not None and _ESCAPED_BYTE.search(cell):
                return CorruptFileError(
                    f"{place}, column '{column.name}': bytes that are not UTF-8 "
                    f"({cell.encode('utf-8', 'surrogateescape')!r}); save the file as UTF-8"
                )
            if not column.accepts(cell):
                path = str(self.location)
                wanted = column.rule or column.kind
                return BadValueError(path, f"line {line}", column.name, cell, wanted)
        if len(record) > len(header):
            return CorruptFileError(
                f"{place}: more cells than columns: the header has {len(header)}; "
                "is text with commas in it quoted?"
            )
        return None

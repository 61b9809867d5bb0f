"""A large csv file as a sequence of blocks of whole lines, each read and checked by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from trainer.data.errors import CorruptFileError, SourceMissingError
from trainer.data.prepare.csv_reader import (
    CsvColumn,
    check_header,
    parse_csv,
    without_blank_end,
)
from trainer.data.storage import Location

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
        end = self._read_end()
        self.size_bytes = location.size_bytes() - len(end) + len(without_blank_end(end))
        # A file that was cut short may still end in a number, of which digits are missing.
        self.has_line_end = end.endswith(b"\n")
        self._header = self._read_header()
        if not self._header.strip():
            raise CorruptFileError(f"{location} is empty; was the download cut short?")
        check_header(location, self._header, columns, delimiter)
        if self.size_bytes <= len(self._header) and not may_lack_rows:
            raise CorruptFileError(
                f"{location} has a header but no rows; was the download cut short?"
            )

    @property
    def first(self) -> int:
        """Where the first block begins: after the header."""
        return len(self._header)

    def read(self, start: int, line: int) -> tuple[Block, pl.DataFrame]:
        """The block that begins at byte `start`, on line `line`; raises what `parse_csv` does."""
        content = self._read(start, line)
        block = Block(start, start + len(content), line, line + content.count(b"\n"))
        # The header is line 1 of what is parsed, and the block's first line is line 2.
        frame = parse_csv(
            self._location,
            self._header + content,
            self._columns,
            self._delimiter,
            line_offset=line - 2,
        )
        return block, frame

    def _read_end(self) -> bytes:
        with self._location.open_input() as file:
            file.seek(max(0, self._location.size_bytes() - _END_BYTES))
            return file.read(_END_BYTES)

    def _read_header(self) -> bytes:
        with self._location.open_input() as file:
            return file.read(min(self._block_bytes, self.size_bytes)).split(b"\n", 1)[0] + b"\n"

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
                if end := _last_line_end(content):
                    return content[:end]
        raise CorruptFileError(
            f"{self._location}, line {line}: no end of line in {len(content)} bytes; is a quote "
            "left open, or is it no text file?"
        )


def _last_line_end(content: bytes) -> int:
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

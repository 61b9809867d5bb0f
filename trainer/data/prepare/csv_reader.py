"""Typed reading of csv files; a fault is named by file, line, column and value.

Polars reads the whole file with the wanted types. Only when that fails, or finds an empty or
forbidden cell, is the file read again line by line to say where the fault is.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from trainer.data.errors import (
    BadValueError,
    ColumnError,
    CorruptFileError,
    DataError,
    SourceMissingError,
)

_PATTERNS = {
    "a whole number": re.compile(r"\d{1,18}"),
    "a number": re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"),
}


@dataclass(frozen=True)
class CsvColumn:
    """A column to read; a number lies in `bounds`, of which the lower one is exclusive."""

    name: str
    kind: str = "text"
    bounds: tuple[float, float] | None = None

    @property
    def dtype(self) -> type[pl.DataType]:
        """Polars type of the column."""
        kinds = {"text": pl.String, "a whole number": pl.Int64, "a number": pl.Float64}
        return kinds[self.kind]

    @property
    def wanted(self) -> str:
        """The rule in words."""
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
    """A column of numbers in (above, at_most]."""
    return CsvColumn(name, "a number", (above, at_most))


def read_csv(path: Path, columns: Sequence[CsvColumn]) -> pl.DataFrame:
    """Read `columns` of a csv file with a header; other columns are left out.

    Raises `SourceMissingError`, `ColumnError`, `BadValueError`, or `CorruptFileError` where a file
    is empty or cannot be parsed at all.
    """
    _check_header(path, [column.name for column in columns])
    try:
        frame = pl.read_csv(
            path,
            columns=[column.name for column in columns],
            schema_overrides={column.name: column.dtype for column in columns},
        )
    except pl.exceptions.PolarsError as error:
        raise _locate_fault(path, columns, str(error)) from None
    if frame.is_empty():
        raise CorruptFileError(f"{path} has a header but no rows; was the download cut short?")
    if any(frame.select(column.fault()).item(0, 0) for column in columns):
        raise _locate_fault(path, columns, "a value is missing or out of bounds")
    texts = [column.name for column in columns if column.kind == "text"]
    return frame.with_columns(pl.col(texts).fill_null("")) if texts else frame


def _check_header(path: Path, wanted: Sequence[str]) -> None:
    if not path.is_file():
        raise SourceMissingError(
            f"{path} is missing; a MovieLens folder holds ratings.csv, movies.csv"
        )
    try:
        present = pl.read_csv(path, n_rows=0, infer_schema=False).columns
    except pl.exceptions.NoDataError:
        raise CorruptFileError(f"{path} is empty; was the download cut short?") from None
    except pl.exceptions.PolarsError as error:
        raise CorruptFileError(f"{path} is not a csv file: {error}") from None
    for name in wanted:
        if name not in present:
            raise ColumnError(f"{path}, line 1: column '{name}' is missing; it has {present}")


def _locate_fault(path: Path, columns: Sequence[CsvColumn], cause: str) -> DataError:
    """Find the first bad cell, line by line: slow, and only used to name a known fault."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for record in reader:
                for column in columns:
                    if not column.accepts(record.get(column.name)):
                        return BadValueError(
                            path,
                            f"line {reader.line_num}",
                            column.name,
                            record.get(column.name),
                            column.wanted,
                        )
                if None in record:
                    return CorruptFileError(
                        f"{path}, line {reader.line_num}: more cells than columns"
                    )
        except csv.Error as error:
            return CorruptFileError(f"{path}, line {reader.line_num}: {error}")
    return CorruptFileError(f"{path} cannot be read: {cause}")

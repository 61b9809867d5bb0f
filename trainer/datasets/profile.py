"""Finding and reading data sets for `data inspect`, and statistics of their columns.

One pass in bounded memory: nulls, range, cardinality, skew. Up to `MAX_VALUES` distinct values are
counted exactly. Beyond that a column keeps its most frequent values and those whose hash falls into
an ever smaller part (distinct sampling, Gibbons 2001): the number of the latter, scaled up,
estimates the cardinality within about half a percent. Files with the same columns are one data set;
a folder of `ratings.csv` and `movies.csv` is two.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.manifest import MANIFEST_NAME, Manifest, read_footer, read_manifest
from trainer.data.parquet import as_read, is_data_file
from trainer.data.transforms import Moments
from trainer.datasets.criteo.reader import ID_NAMES, NUM_COLUMNS, SCHEMA
from trainer.datasets.io.csv_reader import cells_of, read_blocks, whole_rows
from trainer.datasets.io.sources import find_sources
from trainer.errors import ColumnError, CorruptFileError, SourceMissingError
from trainer.storage import Location

MAX_VALUES = 400_000
# Share of the most frequent values that `top_share` is about.
TOP_FRACTION = 0.01
_FEWEST_FOR_ZIPF = 10
_MAX_ZIPF_RANK = 1000
_COUNTS = pl.Schema({"value": pl.UInt64, "count": pl.Int64})


@dataclass(frozen=True)
class ListLengths:
    """Lengths of the lists of a column; nulls are not counted."""

    mean: float
    longest: int
    num_empty: int


@dataclass(frozen=True)
class ColumnReport:
    """One column. For lists all but `num_nulls` is about their items.

    `kind`: integer, number, text, or other; text that is all integers or numbers counts as such.
    `top_share` is the share of the values that the most frequent hundredth of the distinct ones
    make up; `zipf_exponent` is minus the slope of log count over log rank, None for few values.
    `is_estimate` marks `num_distinct` and both of these. `num_nulls` are the rows with a null, or
    with NaN that is in no list; infinite numbers are counted in `num_infinite` and left out of
    range, mean and deviation. Of text `num_words` are those that are no numbers, `num_barred`
    those with a `|` inside.
    """

    name: str
    kind: str
    num_rows: int
    num_nulls: int
    num_distinct: int
    is_estimate: bool
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    top_share: float | None
    zipf_exponent: float | None
    lists: ListLengths | None
    num_infinite: int = 0
    num_words: int = 0
    num_barred: int = 0

    @property
    def is_binary(self) -> bool:
        """Whether its values are 0 and 1 and nothing else; some may be null."""
        return self.lists is None and (self.minimum, self.maximum, self.num_distinct) == (0, 1, 2)

    @property
    def num_values(self) -> int:
        """Rows that are no nulls."""
        return self.num_rows - self.num_nulls


class ColumnSketch:
    """Gathers one column part by part."""

    def __init__(self, name: str, *, is_text: bool = False) -> None:
        """`is_text` says that text is not to be taken for numbers even where all of it could be."""
        self._name, self._is_text = name, is_text
        self._num_rows = self._num_nulls = self._num_items = self._num_infinite = 0
        self._num_words = self._num_barred = 0
        self._lengths: tuple[int, int, int] | None = None  # lists, longest, empty
        self._moments = Moments()
        self._low, self._high = math.inf, -math.inf
        # What every value so far was; a column is of the first kind that is left.
        self._kinds = ["integer", "number", "text"]
        self._counts = pl.DataFrame(schema=_COUNTS)
        self._level = 0

    def add(self, part: pl.Series) -> None:
        """Count the rows of a part of the column, the same type every time."""
        self._num_rows += len(part)
        self._num_nulls += part.null_count()
        values = part.drop_nulls()
        if isinstance(part.dtype, pl.List):
            values = self._unpack(values)
        if values.dtype in (pl.Categorical, pl.Enum):
            values = values.cast(pl.String)
        elif values.dtype.is_float():
            numbers = values.drop_nans()
            self._num_nulls += len(values) - len(numbers) if self._lengths is None else 0
            values = numbers
        self._num_items += len(values)
        self._add_numbers(values)
        self._add_counts(values)

    def report(self) -> ColumnReport:
        kind = self._kinds[0] if self._kinds else "other"
        is_number = kind in ("integer", "number") and self._low <= self._high
        counts = np.sort(self._counts["count"].to_numpy())[::-1]
        num_distinct = len(self._counts.filter(self._is_sampled())) << self._level
        top = counts[: max(1, int(num_distinct * TOP_FRACTION))]
        std = self._moments.deviation  # infinite where squares were too large to be added up
        num_lists, longest, num_empty = self._lengths or (0, 0, 0)
        lists = ListLengths(self._num_items / max(1, num_lists), longest, num_empty)
        return ColumnReport(
            name=self._name,
            kind=kind,
            num_rows=self._num_rows,
            num_nulls=self._num_nulls,
            num_distinct=num_distinct,
            is_estimate=self._level > 0,
            minimum=self._low if is_number else None,
            maximum=self._high if is_number else None,
            mean=self._moments.mean if is_number else None,
            std=std if is_number and math.isfinite(std) else None,
            top_share=float(top.sum() / self._num_items) if self._num_items else None,
            zipf_exponent=_zipf_exponent(counts),
            lists=lists if self._lengths else None,
            num_infinite=self._num_infinite if is_number else 0,
            num_words=self._num_words,
            num_barred=self._num_barred,
        )

    def _unpack(self, lists: pl.Series) -> pl.Series:
        lengths = lists.list.len()
        num_lists, longest, num_empty = self._lengths or (0, 0, 0)
        self._lengths = (
            num_lists + len(lists),
            max([longest, *lengths.top_k(1).to_list()]),
            num_empty + int((lengths == 0).sum()),
        )
        self._num_nulls += int((lists.list.drop_nulls().list.len() < lengths).sum())
        return lists.explode().drop_nulls()

    def _add_numbers(self, values: pl.Series) -> None:
        if not len(values) or (numbers := self._as_numbers(values)) is None:
            return
        if "integer" in self._kinds and not numbers.dtype.is_integer():
            self._kinds.remove("integer")
        if numbers.dtype.is_float():
            finite = numbers.filter(numbers.is_finite())
            self._num_infinite += len(numbers) - len(finite)
            numbers = finite
        if not len(numbers):
            return
        low: Any = numbers.min()
        high: Any = numbers.max()
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._moments += Moments.of(numbers.cast(pl.Float64).to_numpy())

    def _as_numbers(self, values: pl.Series) -> pl.Series | None:
        """The values as numbers, or None where they are none; notes what they are instead."""
        if values.dtype.is_numeric():
            return values
        if values.dtype != pl.String:
            self._kinds = []
            return None
        self._num_words += values.cast(pl.Float64, strict=False).null_count()
        self._num_barred += int(values.str.contains("|", literal=True).sum())
        is_text = self._is_text or "number" not in self._kinds
        for kind in () if is_text else (pl.Int64, pl.Float64):
            numbers = values.cast(kind, strict=False)
            if not numbers.null_count() and not (
                numbers.dtype.is_float() and numbers.is_nan().any()
            ):
                return numbers
        self._kinds = ["text"]
        return None

    def _add_counts(self, values: pl.Series) -> None:
        hashed = values.hash(seed=0).alias("value")
        fresh = hashed.value_counts(name="count").cast(_COUNTS)
        counts = pl.concat([self._counts, fresh]).group_by("value").agg(pl.col("count").sum())
        if len(counts) > MAX_VALUES:
            # The most frequent quarter stays, and a sample, which is halved until all fits.
            ranked = counts.sort(["count", "value"], descending=True).with_row_index("rank")
            is_top, most = pl.col("rank") < MAX_VALUES // 4, MAX_VALUES * 3 // 4
            while len(ranked := ranked.filter(self._is_sampled() | is_top)) > most:
                self._level += 1
            counts = ranked.drop("rank")
        self._counts = counts

    def _is_sampled(self) -> pl.Expr:
        return pl.col("value") % (1 << self._level) == 0


def _zipf_exponent(counts: np.ndarray) -> float | None:
    """By least squares over the first ranks, evenly in their logarithm; `counts` descend."""
    if len(counts) < _FEWEST_FOR_ZIPF:
        return None
    last = min(len(counts), _MAX_ZIPF_RANK)
    ranks = np.unique(np.geomspace(1, last, 50).astype(np.int64))
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks - 1]), 1)[0]
    return abs(float(slope))


_BATCH_ROWS = 131_072
_BLOCK_BYTES = 8 * 1024 * 1024
_DELIMITER_NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


@dataclass(frozen=True)
class TextFormat:
    """How a text file is laid out; `columns` are the header's names or made-up ones.

    Of a known format `texts` are the columns that are text whatever stands in them, and `command`
    prepares it.
    """

    delimiter: str
    has_header: bool
    columns: tuple[str, ...]
    texts: tuple[str, ...] = ()
    command: str = ""

    @property
    def text(self) -> str:
        header = "with a header" if self.has_header else "without a header"
        return f"text separated by {_DELIMITER_NAMES[self.delimiter]}, {header}"

    @property
    def has_quotes(self) -> bool:
        """Whether quoted cells may hold delimiters and line feeds."""
        return self.delimiter != "\t"


@dataclass(frozen=True)
class DataSet:
    """Files with the same columns. `text` is None for Parquet.

    `folder` and `manifest` are those of a prepared folder, None for raw files.
    """

    title: str
    files: tuple[Location, ...]
    columns: tuple[str, ...]
    text: TextFormat | None = None
    folder: Location | None = None
    manifest: Manifest | None = None
    size_bytes: int = 0

    def batches(self) -> Iterator[pl.DataFrame]:
        """All rows, part by part, in memory of one part; text columns stay text."""
        for file in self.files:
            if self.text:
                yield from _text_batches(file, self.text)
            else:
                yield from _parquet_batches(file, self.columns)


def find_data(texts: Sequence[str]) -> list[DataSet]:
    """The data sets among the files and folders named.

    Raises `SourceMissingError`, `ManifestError` or `CorruptFileError`.
    """
    found: list[DataSet] = []
    for text in texts:
        location = Location.parse(text)
        path = location / MANIFEST_NAME
        if location.is_dir() and path.exists():
            found.append(_prepared(location, read_manifest(path)))
        else:
            found += _raw(location)
    return found


def _prepared(folder: Location, manifest: Manifest) -> DataSet:
    """The training part of a prepared folder."""
    name, split = next(iter(manifest.splits.items()))
    return DataSet(
        title=f"{folder}, part {name}",
        files=tuple(folder / entry.path for entry in split.files),
        columns=tuple(manifest.columns),
        folder=folder,
        manifest=manifest,
        size_bytes=sum(entry.size_bytes for entry in split.files),
    )


def _raw(location: Location) -> list[DataSet]:
    groups: dict[tuple[str, ...], list[tuple[Location, TextFormat | None]]] = {}
    for file in _files(location):
        text = None if file.name.endswith(".parquet") else sniff_text(file)
        columns = text.columns if text else tuple(read_footer(file).schema.to_arrow_schema().names)
        if len(set(columns)) < len(columns):
            twice = next(name for name in columns if columns.count(name) > 1)
            raise ColumnError(f"{file}: several columns '{twice}'; rename all but one")
        groups.setdefault((str(text and text.delimiter), *columns), []).append((file, text))
    return [
        DataSet(
            title=str(members[0][0] if len(members) == 1 else location),
            files=tuple(file for file, _ in members),
            columns=key[1:],
            text=members[0][1],
            size_bytes=sum(file.size_bytes() for file, _ in members),
        )
        for key, members in groups.items()
    ]


def _files(location: Location) -> Sequence[Location]:
    """Parquet files of a folder; also any below, if there are splits or none; else text files."""
    if location.is_dir():
        files = location.list(recursive=True)
        paths = [file.relative_to(location) for file in files]
        if found := [path for path in paths if is_data_file(path)]:
            own = [path for path in found if "/" not in path]
            has_splits = any(path.startswith(("train/", "validation/")) for path in found)
            return [location / path for path in (found if has_splits else own or found)]
        if not location.list():
            raise SourceMissingError(f"{location} holds neither {MANIFEST_NAME} nor data files")
    return find_sources([location])


def sniff_text(file: Location) -> TextFormat:
    """Delimiter and header from the first line; raises `CorruptFileError` where it is no text."""
    block = next(read_blocks(file, _BLOCK_BYTES)).lines
    try:
        first = block.split(b"\n", 1)[0].decode("utf-8").rstrip("\r").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise CorruptFileError(
            f"{file}, line 1: not UTF-8; name Parquet files or text (csv, tsv)"
        ) from None
    delimiter = max(_DELIMITER_NAMES, key=first.count)
    cells = cells_of(first, delimiter, file) or [""]
    if len(cells) == NUM_COLUMNS and delimiter == "\t" and cells[0] in ("0", "1"):
        command = "shardloom data prepare criteo"
        return TextFormat(delimiter, False, tuple(SCHEMA), ID_NAMES, command)
    made_up = tuple(f"column_{number}" for number in range(1, len(cells) + 1))
    # A column without a name, as that of pandas' row numbers, is given one.
    names = tuple(cell.strip() or own for cell, own in zip(cells, made_up, strict=True))
    are_names = names != made_up and len(set(names)) == len(names)
    numbers = pl.Series(names).cast(pl.Float64, strict=False)
    if are_names and not numbers.is_not_null().any():
        return TextFormat(delimiter, True, names)
    return TextFormat(delimiter, False, made_up)


def _text_batches(file: Location, text: TextFormat) -> Iterator[pl.DataFrame]:
    for block in (whole_rows if text.has_quotes else read_blocks)(file, _BLOCK_BYTES):
        lines = block.lines
        if text.has_header and block.first_line == 1:
            lines = lines.partition(b"\n")[2]
        if not lines:
            continue
        try:
            yield pl.read_csv(
                io.BytesIO(lines),
                separator=text.delimiter,
                has_header=False,
                schema=dict.fromkeys(text.columns, pl.String),
                quote_char='"' if text.has_quotes else None,
            )
        except pl.exceptions.PolarsError as error:
            last = block.first_line + block.num_lines - 1
            cause, *_ = str(error).splitlines()[0].split(". ")  # then comes what a caller could do
            raise CorruptFileError(
                f"{file}, between lines {block.first_line} and {last}: cannot be read as "
                f"{text.text}, {len(text.columns)} columns: {cause}; mend lines with more or fewer "
                "cells, and quotes that are left open"
            ) from None


def _parquet_batches(file: Location, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    try:
        with file.reading(), pq.ParquetFile(file.open_input()) as parquet:
            schema = as_read(parquet.schema_arrow)
            for batch in parquet.iter_batches(_BATCH_ROWS):
                yield pl.DataFrame(pa.table(batch).cast(schema).select(columns))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CorruptFileError(
            f"{file} cannot be read to its end ({error}); was it damaged? Copy it again"
        ) from None

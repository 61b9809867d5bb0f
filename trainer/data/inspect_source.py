"""Finding and reading data of any kind that `data inspect` knows: prepared folders, Parquet, text.

Files with the same columns are one data set; a folder of `ratings.csv` and `movies.csv` is two.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.errors import CorruptFileError, SourceMissingError
from trainer.data.manifest import MANIFEST_NAME, Manifest, parse_manifest
from trainer.data.prepare.criteo_format import NUM_COLUMNS, SCHEMA
from trainer.data.prepare.criteo_source import LineBlock, find_sources, read_blocks
from trainer.data.storage import Location

_BATCH_ROWS = 131_072
_BLOCK_BYTES = 8 * 1024 * 1024
_MAX_CELL_BYTES = 4 * _BLOCK_BYTES
_DELIMITERS = "\t,;|"
_DELIMITER_NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


@dataclass(frozen=True)
class TextFormat:
    """How a text file is laid out; `columns` are the header's names or made-up ones."""

    delimiter: str
    has_header: bool
    columns: tuple[str, ...]

    @property
    def text(self) -> str:
        """In words."""
        header = "with a header" if self.has_header else "without a header"
        return f"text separated by {_DELIMITER_NAMES[self.delimiter]}, {header}"

    @property
    def has_quotes(self) -> bool:
        """Whether quoted cells may hold delimiters and line feeds."""
        return self.delimiter == ","

    @property
    def is_criteo(self) -> bool:
        """Whether it looks like Criteo's files."""
        return self.columns == tuple(SCHEMA)


@dataclass(frozen=True)
class DataSet:
    """Files with the same columns. `text` is None for Parquet, `manifest` for raw files."""

    title: str
    files: tuple[Location, ...]
    columns: tuple[str, ...]
    text: TextFormat | None = None
    manifest: Manifest | None = None
    size_bytes: int = 0

    def batches(self) -> Iterator[pl.DataFrame]:
        """All rows, part by part, in memory of one part; text columns stay text."""
        for file in self.files:
            yield from _text_batches(file, self.text) if self.text else _parquet_batches(file)


def find_data(texts: Sequence[str]) -> list[DataSet]:
    """The data sets among the files and folders named.

    Raises `SourceMissingError`, `ManifestError` or `CorruptFileError`.
    """
    found: list[DataSet] = []
    for text in texts:
        location = Location.parse(text)
        manifest = find_manifest(location)
        found += [_prepared(location, manifest)] if manifest else _raw(location)
    return found


def find_manifest(folder: Location) -> Manifest | None:
    """The manifest of a prepared folder, None for anything else; raises `ManifestError`."""
    path = folder / MANIFEST_NAME
    if not folder.is_folder() or not path.exists():
        return None
    return parse_manifest(path.read_bytes(), str(path))


def _prepared(folder: Location, manifest: Manifest) -> DataSet:
    """The training part of a prepared folder."""
    name, split = next(iter(manifest.splits.items()))
    return DataSet(
        title=f"{folder}, part {name}",
        files=tuple(folder / entry.path for entry in split.files),
        columns=tuple(manifest.columns),
        manifest=manifest,
        size_bytes=sum(entry.size_bytes for entry in split.files),
    )


def _raw(location: Location) -> list[DataSet]:
    groups: dict[tuple[str, ...], list[tuple[Location, TextFormat | None]]] = {}
    for file in _files(location):
        text = None if file.name.endswith(".parquet") else sniff_text(file)
        columns = text.columns if text else tuple(_open_parquet(file).schema_arrow.names)
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
    """Parquet files anywhere below a folder; if there are none, its text files."""
    if location.is_folder():
        nested = [file for file in location.list(recursive=True) if _is_parquet(file, location)]
        if nested:
            return nested
        if not location.list():
            raise SourceMissingError(f"{location} holds neither {MANIFEST_NAME} nor data files")
    return find_sources([location.text])


def _is_parquet(file: Location, folder: Location) -> bool:
    parts = file.relative_to(folder).split("/")
    return file.name.endswith(".parquet") and not any(part.startswith(".") for part in parts)


def sniff_text(file: Location) -> TextFormat:
    """Delimiter and header from the first line; raises `CorruptFileError` where it is no text."""
    block = next(read_blocks(file, _BLOCK_BYTES)).lines
    try:
        first = block.split(b"\n", 1)[0].decode("utf-8").rstrip("\r").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise CorruptFileError(
            f"{file}, line 1: not UTF-8; name Parquet files or text (csv, tsv)"
        ) from None
    delimiter = max(_DELIMITERS, key=first.count)
    cells = next(csv.reader([first], delimiter=delimiter), [""])
    if len(cells) == NUM_COLUMNS and delimiter == "\t" and cells[0] in ("0", "1"):
        return TextFormat(delimiter, False, tuple(SCHEMA))
    made_up = tuple(f"column_{number}" for number in range(1, len(cells) + 1))
    # A column without a name, as that of pandas' row numbers, is given one.
    names = tuple(cell.strip() or own for cell, own in zip(cells, made_up, strict=True))
    are_names = names != made_up and len(set(names)) == len(names)
    if are_names and not any(map(_is_number, cells)):
        return TextFormat(delimiter, True, names)
    return TextFormat(delimiter, False, made_up)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _text_batches(file: Location, text: TextFormat) -> Iterator[pl.DataFrame]:
    blocks = read_blocks(file, _BLOCK_BYTES)
    for block in _whole_rows(blocks) if text.has_quotes else blocks:
        lines = block.lines
        if text.has_header and block.first_line == 1:
            lines = lines.split(b"\n", 1)[1]
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
            raise CorruptFileError(
                f"{file}, between lines {block.first_line} and {last}: cannot be read as "
                f"{text.text}, {len(text.columns)} columns: {str(error).splitlines()[0]}"
            ) from None


def _whole_rows(blocks: Iterable[LineBlock]) -> Iterator[LineBlock]:
    """The same lines in blocks that end where a row does: after an even number of quotes.

    Where a quote opens and no other follows for long, it is not meant as one: then, as ever, rows
    end with lines.
    """
    rest = LineBlock(b"", 1)
    for block in blocks:
        lines = rest.lines + block.lines
        end = _end_of_rows(lines)
        if not end and len(lines) > _MAX_CELL_BYTES:
            end = len(lines)
        if end:
            yield LineBlock(lines[:end], rest.first_line)
        num_lines = lines.count(b"\n", 0, end)
        rest = LineBlock(lines[end:], rest.first_line + num_lines)
    if rest.lines:
        yield rest


def _end_of_rows(lines: bytes) -> int:
    """The end of the last line after which no quote is open; 0 where there is none."""
    num_quotes = lines.count(b'"')
    end = len(lines)
    while num_quotes % 2:
        before = lines.rfind(b"\n", 0, end - 1) + 1
        num_quotes -= lines.count(b'"', before, end)
        end = before
    return end


def _open_parquet(file: Location) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.open_input())
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(
            f"{file} is not a whole Parquet file ({error}); was it truncated? Copy it again"
        ) from None


def _parquet_batches(file: Location) -> Iterator[pl.DataFrame]:
    parquet = _open_parquet(file)
    try:
        for batch in parquet.iter_batches(_BATCH_ROWS):
            categories = pl.col(pl.Categorical, pl.Enum)
            yield pl.DataFrame(pa.table(batch)).with_columns(categories.cast(pl.String))
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(
            f"{file} cannot be read to its end ({error}); was it damaged? Copy it again"
        ) from None
    finally:
        parquet.close()

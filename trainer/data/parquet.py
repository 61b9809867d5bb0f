"""Parquet files as numbered row groups, on a disk or in an object store.

They are read one group at a time; of remote files, the columns' ranges of several groups at once.
What the files hold is in the manifest of a prepared folder; of plain Parquet an attempt's driver
reads the footers. It tells the T ranks, each of which reads one footer before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.manifest import FileContents, contents_in, read_footer
from trainer.data.ragged import IntArray, offsets_of, ragged_positions
from trainer.data.transforms import Moments, is_text
from trainer.errors import (
    ColumnError,
    CorruptFileError,
    SourceMissingError,
    StorageError,
    TooFewRowsError,
)
from trainer.storage import Location

logger = logging.getLogger(__name__)
# Footers of wide files take a tenth of a megabyte each.
_MAX_KEPT_FOOTERS = 256
# Requests under way at once: each waits for most of its time.
_NUM_REQUESTS = 16
# Of a mean of numbers of 64 bits, as a share of it.
_ROUNDING = 1e-13


class ParquetSource:
    """The Parquet files of a folder, in name order, as one sequence of row groups.

    Only footers are read to build it. Raises `SourceMissingError`, `CorruptFileError` (naming the
    truncated file), `ColumnError` or `TooFewRowsError`.

    `contents` says by name what the files hold, in the order in which their rows are numbered.
    """

    def __init__(
        self,
        folder: Location | Path,
        columns: Sequence[str],
        contents: Mapping[str, FileContents] | None = None,
    ) -> None:
        """`columns` are those to read; each must be in every file.

        Of `contents` just the files that it names are read, whose columns are taken to be those of
        the first; without it all that lie in the folder.
        """
        self.folder = Location.parse(folder)
        self.columns = tuple(dict.fromkeys(columns))
        names = contents or [file.name for file in _parquet_files(self.folder)]
        self.file_names = tuple(sorted(names))
        self.contents = self._open(contents)
        files = self.contents.values()
        group_rows = [rows for each in files for rows in each.group_rows]
        self._groups = [
            (file, group)
            for file, each in enumerate(files)
            for group, num_rows in enumerate(each.group_rows)
            if num_rows
        ]
        self.group_rows: IntArray = np.array([n for n in group_rows if n], dtype=np.int64)
        self.num_rows = int(self.group_rows.sum())
        self._file_starts = offsets_of(
            np.array([sum(each.group_rows) for each in files], dtype=np.int64)
        )
        self._group_starts = offsets_of(self.group_rows)
        self._num_values = sum(
            each.num_values.get(name, each.num_rows) for each in files for name in self.columns
        )
        if not self.num_rows:
            raise TooFewRowsError(f"{folder} holds no rows; mend the data, or data.split")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_pool", "_footer_of")}

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_NUM_REQUESTS, "parquet")

    @cached_property
    def _footer_of(self) -> Callable[[int, object], pq.FileMetaData]:
        """What gives the footer of a file, by its place and fingerprint, and keeps the newest."""
        return lru_cache(_MAX_KEPT_FOOTERS)(lambda place, _: read_footer(self._file(place)))

    def _file(self, place: int) -> Location:
        return self.folder / self.file_names[place]

    def _open(self, known: Mapping[str, FileContents] | None) -> dict[str, FileContents]:
        """What the files hold, and `schema`, from no more footers than are needed."""
        places = range(1 if known else len(self.file_names))
        # A mounted folder may be as slow to answer as an object store.
        footers = list((self._pool.map if len(places) > 1 else map)(self._footer, places))
        self._stored = self._common_schema(footers)
        self.schema = as_read(self._stored)
        found = dict(zip(self.file_names, map(FileContents.of, footers), strict=not known))
        for name, each in found.items():
            if known and each.group_rows != known[name].group_rows:
                raise StorageError(
                    f"{self.folder / name} has {each.num_rows:,} rows in {each.num_row_groups} row "
                    f"groups, not {known[name].num_rows:,} in {known[name].num_row_groups} as the "
                    "driver or the manifest found: is another folder mounted on this host, or has "
                    "the data changed? What comes later belongs in another folder"
                )
        contents = {**(known or {}), **found}
        return {name: contents[name] for name in self.file_names}

    def _footer(self, place: int) -> pq.FileMetaData:
        """The footer of a file as it is now; one that was read of the same file before is kept."""
        # Looked up before the footer: a file replaced in between is then found to be another one.
        return self._footer_of(place, self._file(place).fingerprint())

    @property
    def decoded_bytes(self) -> int:
        """Estimated size in memory of all columns of all rows."""
        widest_value_bytes = 8
        return widest_value_bytes * (self._num_values + self.num_rows * len(self.columns))

    def row_numbers(self, row_groups: Sequence[int]) -> IntArray:
        """Numbers over all files of the rows of row groups, in the order given."""
        groups = np.array(row_groups)
        return ragged_positions(self._group_starts[groups], self.group_rows[groups])

    def locate(self, row: int) -> tuple[str, int]:
        """File of a row numbered over all files, and its number within that file (from 0)."""
        file = int(np.searchsorted(self._file_starts, row, side="right")) - 1
        return str(self._file(file)), int(row - self._file_starts[file])

    def files_of(self, rows: IntArray) -> list[tuple[str, IntArray]]:
        """Files of rows numbered over all files, each with the places in `rows` of those in it."""
        files = np.searchsorted(self._file_starts, rows, side="right") - 1
        return [(str(self._file(file)), np.flatnonzero(files == file)) for file in np.unique(files)]

    def begin_reading(self, row_groups: Sequence[int]) -> list[Callable[[], pa.Table]]:
        """Functions that give row groups, in the order given; of remote files all are under way.

        Each raises `CorruptFileError` where its group is not as it was at the start, and
        `StorageError` where the file is gone or the disk, mount or store fails, which says nothing
        about its rows.
        """
        if self.folder.is_local:
            return [partial(self.read_group, number) for number in row_groups]
        return [self._pool.submit(self.read_group, number).result for number in row_groups]

    def read_group(self, number: int) -> pa.Table:
        """Read one row group; raises as what `begin_reading` returns."""
        place, group = self._groups[number]
        file = self._file(place)
        try:
            footer = self._footer(place)

            def read(opened: pa.NativeFile) -> pa.Table:
                remote = not self.folder.is_local
                with pq.ParquetFile(
                    opened, metadata=footer, pre_buffer=remote, page_checksum_verification=True
                ) as parquet:
                    # `RowReader` has threads enough; more would crowd out the trainers.
                    return parquet.read_row_group(group, list(self.columns), use_threads=False)

            table = file.parse_with(read).select(self.columns)
        except MemoryError:  # also pyarrow's, which is an ArrowException
            raise
        except (SourceMissingError, StorageError) as error:
            if not file.is_local:
                raise
            raise StorageError(
                f"{error}; is the folder of data.path mounted on this host, and are its disk and "
                "limits (open files) in order?"
            ) from None
        except (pa.ArrowException, OSError, KeyError, IndexError) as error:
            raise _unreadable(file, group, str(error)) from None
        if table.schema.types != self._stored.types:
            raise _unreadable(file, group, "its columns have other types now")
        if len(table) != self.group_rows[number]:
            rows = f"it has {len(table)} rows, not {self.group_rows[number]} as at the start"
            raise _unreadable(file, group, rows)
        return table if self.schema is self._stored else table.cast(self.schema)

    def blank_group(self, number: int) -> pa.Table:
        """As many rows of nothing but null as row group `number` has."""
        num_rows = int(self.group_rows[number])
        blank = [pa.nulls(num_rows, kind) for kind in self.schema.types]
        return pa.table(blank, names=self.schema.names)

    def _common_schema(self, footers: Sequence[pq.FileMetaData]) -> pa.Schema:
        """That of the columns in the first files, of which these are the footers."""
        schemas = [footer.schema.to_arrow_schema() for footer in footers]
        for place, schema in enumerate(schemas):
            file = self._file(place)
            for name in self.columns:
                if name not in schema.names:
                    raise ColumnError(f"{file}: no column '{name}'; it has {schema.names}")
                if schema.names.count(name) > 1:
                    raise ColumnError(f"{file}: several columns '{name}'; rename all but one")
                if schema.field(name).type != schemas[0].field(name).type:
                    raise ColumnError(
                        f"{file}: column '{name}' is {schema.field(name).type} here but "
                        f"{schemas[0].field(name).type} in {self.file_names[0]}"
                    )
        return pa.schema([schemas[0].field(name) for name in self.columns])


def _unreadable(file: Location, group: int, cause: str) -> CorruptFileError:
    return CorruptFileError(
        f"{file}: row group {group} cannot be read ({cause}); was the file damaged or replaced, or "
        "is another folder mounted on this host? Prepare or copy the data again"
    )


def read_schema(folder: Location | Path, names: Collection[str] = ()) -> pa.Schema:
    """Names and types of the columns of a folder's first file; reads its footer only.

    The first of `names`, if there are any.
    """
    folder = Location.parse(folder)
    first = folder / min(names) if names else _parquet_files(folder)[0]
    return as_read(read_footer(first).schema.to_arrow_schema())


def known_contents(data: Location, folder: Location) -> dict[str, FileContents] | None:
    """What the files in `folder` hold, by name; None where the manifest in `data` lacks one."""
    known, files = contents_in(data, folder), _parquet_files(folder)
    contents = {file.name: known[file.name] for file in files if file.name in known}
    is_whole = len(contents) == len(files) and all(each.group_rows for each in contents.values())
    return contents if is_whole else None


def as_read(stored: pa.Schema) -> pa.Schema:
    """Booleans are read as the integers 0 and 1, decimals as floats, categories but text as what
    they stand for, views of text as text, and lists of a fixed size as lists; items of lists too.
    """
    for place, field in enumerate(stored):
        if (kind := _kind_as_read(field.type)) != field.type:
            stored = stored.set(place, field.with_type(kind))
    return stored


def _kind_as_read(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_boolean(kind):
        return pa.uint8()
    if pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_dictionary(kind) and not is_text(kind):
        return _kind_as_read(kind.value_type)
    is_fixed = pa.types.is_fixed_size_list(kind)
    if is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = _kind_as_read(kind.value_type)
        if is_fixed or items != kind.value_type:
            return pa.large_list(items) if pa.types.is_large_list(kind) else pa.list_(items)
    return kind


def is_data_file(path: str) -> bool:
    """Whether a file at this path below a folder of data holds rows.

    A hidden file, or one in a hidden folder, is what some tool has not finished.
    """
    is_hidden = any(part.startswith((".", "_")) for part in path.split("/"))
    return path.endswith(".parquet") and not is_hidden


def _parquet_files(folder: Location) -> list[Location]:
    if files := [file for file in folder.list() if is_data_file(file.name)]:
        return files
    if folder.is_dir():
        raise SourceMissingError(
            f"{folder} itself holds no .parquet files, and those in subfolders are not read: put "
            "them side by side, name one subfolder in data.split, or prepare the data again"
        )
    raise SourceMissingError(
        f"{folder} does not exist; check data.path and data.split, or prepare the data"
    )


def mean_and_deviation(
    folder: Location | Path, column: str, *, skip_unreadable: bool = False
) -> tuple[float, float]:
    """Mean and population deviation of a number column, 0 of a constant; null and NaN left out.

    One pass over that column, a row group at a time; with `skip_unreadable` without those that are
    damaged. Raises a `DataError`.
    """
    source = ParquetSource(folder, [column])
    kind, found = source.schema.field(column).type, Moments()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ColumnError(
            f"{folder}: column '{column}' is {kind}, not a number to standardise; name another "
            "column in features[].column, or store it as numbers"
        )
    for group in range(len(source.group_rows)):
        try:
            values = source.read_group(group).column(0).cast(pa.float64(), safe=False).to_numpy()
        except CorruptFileError as error:
            if not skip_unreadable:
                raise
            logger.warning("%s", error)
            continue
        found += Moments.of(values)
    if not found.count:
        raise TooFewRowsError(f"{folder}: column '{column}' holds no number to standardise by")
    # What the mean is off by for its rounding is no deviation of a constant column.
    is_constant = found.deviation <= _ROUNDING * abs(found.mean)
    return found.mean, 0.0 if is_constant else found.deviation

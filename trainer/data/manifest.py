"""The manifest of a prepared folder: what is in it, and proof that it is whole.

`manifest.json` is written last, so a folder without one was never finished.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from trainer.errors import CorruptFileError, ManifestError
from trainer.storage import Location

MANIFEST_NAME = "manifest.json"
_MAX_BYTES = 2**26
_NUM_READERS = 16  # a mounted folder may be as slow to answer as an object store


class StoredFile(BaseModel, extra="forbid", frozen=True):
    """A file of the prepared folder; `path` is relative to it."""

    path: str
    size_bytes: int
    sha256: str


class FileContents(BaseModel, extra="forbid", frozen=True):
    """What a Parquet file holds, so that nobody has to read its footer to number its rows.

    `group_rows` are the rows of each row group. `num_values` counts the values of those columns
    that have not one for each row, such as lists. Folders of older versions lack both.
    """

    num_rows: int
    num_row_groups: int
    group_rows: tuple[int, ...] = ()
    num_values: dict[str, int] = {}

    @classmethod
    def of(cls, footer: pq.FileMetaData) -> FileContents:
        groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
        num_values: Counter[str] = Counter()
        for group in groups:
            for leaf in map(group.column, range(group.num_columns)):
                num_values[leaf.path_in_schema.split(".")[0]] += leaf.num_values
        return cls(
            num_rows=footer.num_rows,
            num_row_groups=len(groups),
            group_rows=tuple(group.num_rows for group in groups),
            num_values={name: n for name, n in num_values.items() if n != footer.num_rows},
        )


class FileEntry(StoredFile, FileContents, frozen=True):
    """One Parquet file of a split."""


class SplitEntry(BaseModel, extra="forbid", frozen=True):
    """One part of the data, in file order."""

    num_rows: int
    files: tuple[FileEntry, ...]


class VocabularyEntry(StoredFile, frozen=True):
    """A vocabulary file; `num_values` does not count the unknown id 0."""

    num_values: int


class Manifest(BaseModel, extra="forbid", frozen=True):
    """A prepared folder.

    `columns` maps each column to its type (`int64`, `float32`, `list<int64>`, ...); `vocab_sizes`
    maps each id column to the number of ids it may hold, the unknown id 0 included. `counts` says
    what was met on the way (duplicates, movies without metadata, ...), `bad_lines` names the first
    few skipped lines.
    """

    schema_version: Literal[1] = 1
    source: str
    splits: dict[str, SplitEntry]
    columns: dict[str, str]
    vocab_sizes: dict[str, Annotated[int, Field(ge=1)]]
    options: dict[str, Any]
    statistics: dict[str, FiniteFloat]
    vocabularies: dict[str, VocabularyEntry] = {}
    counts: dict[str, int] = {}
    bad_lines: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Every file of the folder: Parquet files of all splits, then vocabularies."""
        splits = (entry for split in self.splits.values() for entry in split.files)
        return (*splits, *self.vocabularies.values())


def read_footer(file: Location | Path) -> pq.FileMetaData:
    """Read only the footer of a Parquet file; raises `CorruptFileError` where it is cut short.

    Raises `StorageError` or `SourceMissingError` where it cannot be read.
    """
    location = Location.parse(file)
    try:
        return location.parse_with(pq.read_metadata)
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(
            f"{location} is not a whole Parquet file ({error}); was it truncated? "
            "Prepare or copy the data again"
        ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest; call it last, when everything else in the folder stands."""
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")


def load_manifest(folder: Location | Path) -> Manifest:
    """Read the manifest and check that every file is there and as large as it says.

    Of local Parquet files the footers are compared, too. Raises `SourceMissingError`,
    `ManifestError`, `CorruptFileError` or `StorageError`.
    """
    folder = Location.parse(folder)
    manifest = read_manifest(folder / MANIFEST_NAME)
    sizes = folder.sizes_bytes()

    def check(entry: FileEntry) -> None:
        _check_file(folder / entry.path, sizes.get(entry.path), entry)

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        list(pool.map(check, (e for split in manifest.splits.values() for e in split.files)))
    return manifest


def contents_in(data: Location, folder: Location) -> dict[str, FileContents]:
    """What the files of `folder` hold, by name, if a manifest in `data` says so; else nothing."""
    path = data / MANIFEST_NAME
    if not path.exists():
        return {}
    manifest = read_manifest(path)
    files = ((data / e.path, e) for split in manifest.splits.values() for e in split.files)
    return {file.name: entry for file, entry in files if file.parent.path == folder.path}


def verify_checksums(folder: Location | Path, manifest: Manifest) -> int:
    """Compare the sha256 of every file that the manifest names; gives their number.

    Raises `CorruptFileError` naming the first file with other contents.
    """
    for entry in manifest.files:
        file = Location.parse(folder) / entry.path
        _, found = file.size_and_sha256()
        if found != entry.sha256:
            raise CorruptFileError(
                f"{file} is damaged: its sha256 is {found}, not {entry.sha256} as when it was "
                "written; copy or prepare the data again"
            )
    return len(manifest.files)


def read_manifest(path: Location) -> Manifest:
    """The manifest as it is written, its files unseen; raises `ManifestError`."""
    with path.errors_as("read"), path.open_input() as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ManifestError(
            f"{path} has more than {_MAX_BYTES >> 20} MiB; prepare the data again, in fewer files"
        )
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ManifestError(
            f"{path}: {where}: {first['msg']}; prepare the data again with this version"
        ) from None


def _check_file(path: Location, size_bytes: int | None, entry: FileEntry) -> None:
    if size_bytes is None:
        raise CorruptFileError(
            f"{path} is named in the manifest but missing; prepare the data again"
        )
    contents = FileContents.of(read_footer(path)) if path.is_local else entry
    found = (size_bytes, contents.num_rows, contents.num_row_groups)
    wanted = (entry.size_bytes, entry.num_rows, entry.num_row_groups)
    if found != wanted or entry.group_rows not in ((), contents.group_rows):
        raise CorruptFileError(
            f"{path} is not the file that the manifest names: (bytes, rows, row groups) are "
            f"{found}, not {wanted}, or its row groups have other rows; prepare the data again"
        )

"""Errors of data and storage; every message names the file, the likely cause and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

EXIT_BAD_DATA = 2
"""What a command on data ends with where data are to blame: to try again would not mend it."""


class DataError(Exception):
    """Base of every fault in data; but for `StorageError` no retry helps before data are mended."""


class SourceMissingError(DataError):
    """A folder or file that was named is not there."""


class OutputExistsError(DataError):
    """The folder to write is taken, or holds something that must not be replaced."""


class ColumnError(DataError):
    """A column is missing or has the wrong type."""


ABOUT_VOCABULARIES = (
    "a vocabulary is a Parquet file with the columns value, index (from 1) and, for min_count, "
    "count; `shardloom data prepare` writes those of its data, features[].vocabulary.path names "
    "others"
)


def missing_column(place: object, name: str, columns: Collection[str]) -> str:
    """That `place`, which has `columns`, has none of this name, and which is nearest to it."""
    return f"{place} has no column '{name}'{guess(name, columns)}; it has {', '.join(columns)}"


def guess(name: str, known: Collection[str]) -> str:
    """Which of the known names may have been meant, in words; nothing where none is like it."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""


class BadValueError(DataError):
    """One cell is wrong.

    `place` says where in the file, as in `line 7` of a csv or `row 12` of a Parquet file, `problem`
    what is wrong with the value, and `mend` what to change.
    """

    def __init__(
        self,
        path: Path | str,
        place: str,
        column: str,
        value: object,
        wanted: str,
        mend: str | None = None,
    ):
        self.path = str(path)
        self.place = place
        self.column = column
        self.value = value
        self.problem = f"{value!r} is not {wanted}"
        mend = f"; {mend}" if mend else ""
        super().__init__(f"{path}, {place}, column '{column}': {self.problem}{mend}")


class TooFewRowsError(DataError):
    """Nothing is left to train or validate on."""


class CorruptFileError(DataError):
    """A file cannot be read, or is not what the manifest says."""


class TooManyBadRowsError(DataError):
    """More rows cannot be used than `data.max_bad_share` lets be left out."""


class StorageError(DataError):
    """A file system or object store failed; the message names URL, likely cause and mend."""


class StorageAwayError(StorageError):
    """Remote storage does not answer, or says that it is busy: it may come back."""


class StorageRefusedError(StorageError):
    """Remote storage refuses: credentials or a bucket are wrong, and no retry helps."""


class ManifestError(DataError):
    """The manifest is missing, unreadable or lacks something that was asked for."""

"""Reading Criteo files, plain or compressed, local or remote, in blocks of whole lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from trainer.data.errors import CorruptFileError, DataError, SourceMissingError, StorageError
from trainer.data.storage import Location

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Pauses before a remote read is tried again.
_PAUSES_S = (1.0, 5.0, 25.0)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a file; `first_line` counts from 1."""

    lines: bytes
    first_line: int

    @property
    def num_lines(self) -> int:
        """How many lines; the last one of a file may lack its line feed."""
        return self.lines.count(b"\n") + (not self.lines.endswith(b"\n"))


def find_sources(texts: Sequence[str]) -> tuple[Location, ...]:
    """The files meant: those named, and all files of folders named, `day_2` before `day_10`.

    Raises `SourceMissingError` where there is none.
    """
    found: list[Location] = []
    for text in texts:
        location = Location.parse(text)
        if location.is_folder():
            files = [file for file in location.list() if _is_data(file.name)]
            found += sorted(files, key=lambda file: _natural(file.name))
        elif location.exists():
            found.append(location)
        else:
            raise SourceMissingError(f"{location} is missing; name a Criteo file or its folder")
    if not found:
        raise SourceMissingError(
            f"no files in {', '.join(texts)}; name Criteo's tab-separated files"
        )
    return tuple(found)


def check_distinct(files: Sequence[Location]) -> None:
    """Raise `SourceMissingError` where rows would count twice, perhaps in both parts of the data.

    That is: where a file is named twice, by whatever paths or links, or lies beside itself
    compressed.
    """
    known: dict[object, Location] = {}
    for file in files:
        names = {_identity(file), ("plain", file.root, str(file.parent), _plain_name(file.name))}
        if earlier := next((known[name] for name in names if name in known), None):
            raise SourceMissingError(
                f"{file} and {earlier} are the same rows, which would be counted twice; name or "
                "keep only one of them"
            )
        known |= dict.fromkeys(names, file)


def _identity(file: Location) -> object:
    """Equal for two paths of one file, symbolic and hard links included."""
    if not file.is_local:
        return file.text
    status = file.local_path.stat()
    return status.st_dev, status.st_ino


def _plain_name(name: str) -> str:
    """The name without the ending of a compressed file."""
    return next((name.removesuffix(end) for end in _COMPRESSIONS if name.endswith(end)), name)


def _is_data(name: str) -> bool:
    """Whether a file of a folder is meant: no hidden one, no description."""
    is_hidden = name.startswith((".", "_"))
    return not is_hidden and not name.endswith((".json", ".md")) and "readme" not in name.lower()


def _natural(name: str) -> list[str | int]:
    """Sorts runs of digits by their value; texts and numbers alternate, so they compare."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def read_blocks(source: Location, block_bytes: int) -> Iterator[LineBlock]:
    """Blocks of about `block_bytes`, cut after line feeds: always the same for the same file.

    Raises `CorruptFileError` for an empty file, a compressed one that is cut short, and a line that
    is longer than a block; `StorageError` where a remote file cannot be read for now.
    """
    first_line, rest = 1, b""
    with _faults_named(source), _open(source) as stream:
        while block := _read_fully(stream, block_bytes):
            end = block.rfind(b"\n") + 1
            if not end and len(block) == block_bytes:
                raise CorruptFileError(
                    f"{source}, line {first_line}: longer than {block_bytes} bytes; is this a "
                    "tab-separated text file?"
                )
            lines, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
            if lines:
                found = LineBlock(lines, first_line)
                first_line += found.num_lines
                yield found
    if rest:
        yield LineBlock(rest, first_line)
    elif first_line == 1:
        raise CorruptFileError(f"{source} is empty; was the download cut short?")


def count_lines(source: Location, block_bytes: int) -> int:
    """Number of lines, read as `read_blocks` does and with its errors."""
    return sum(block.num_lines for block in read_blocks(source, block_bytes))


def _open(source: Location) -> pa.NativeFile:
    file = source.open_input()
    if not source.is_local:
        file = pa.PythonFile(_PatientFile(source, file), mode="r")
    suffix = next((end for end in _COMPRESSIONS if source.name.endswith(end)), None)
    return pa.CompressedInputStream(file, _COMPRESSIONS[suffix]) if suffix else file


class _PatientFile:
    """A remote file that is opened again, where it was, when the network fails for a while."""

    def __init__(self, source: Location, file: pa.NativeFile) -> None:
        self._source = source
        self._file = file
        self._position = 0
        self.closed = False

    def read(self, num_bytes: int) -> bytes:
        """Up to `num_bytes`, none at the end; raises `StorageError` after some tries."""
        for pause_s in (*_PAUSES_S, None):
            try:
                part = self._file.read(num_bytes)
            except OSError as error:
                if pause_s is None:
                    raise StorageError(
                        f"{self._source} cannot be read on from byte {self._position} ({error}); "
                        "check the network, then run the same command again: it goes on"
                    ) from None
                time.sleep(pause_s)
                self._reopen()
            else:
                self._position += len(part)
                return part
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close the file that is open now."""
        self.closed = True
        self._file.close()

    def _reopen(self) -> None:
        """Go on with a fresh file; where there is none for now, the next read fails again."""
        try:
            fresh = self._source.open_input()
            fresh.seek(self._position)
        except (OSError, DataError):
            return
        self._file.close()
        self._file = fresh


def _read_fully(stream: pa.NativeFile, num_bytes: int) -> bytes:
    """`num_bytes`, fewer only at the end; a compressed stream may give less at a time."""
    parts: list[bytes] = []
    missing = num_bytes
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


@contextmanager
def _faults_named(source: Location) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"{source} cannot be read to its end ({error}); was the download cut short? "
            "Copy it again"
        ) from None

"""All logs of some attempts as one file, made piece by piece while it is sent."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from service.log_parts import read_at
from service.logs import dropped_notice, list_sources
from trainer.run_dir import RunDir

_CHUNK_BYTES = 1 << 18


def logs_of(run_dir: RunDir, attempt_ids: Sequence[str]) -> list[tuple[str, Path]]:
    """Name in the archive and path of every log."""
    found = []
    for attempt_id in attempt_ids:
        files = run_dir.attempt(attempt_id)
        for source in list_sources(files):
            found.append((f"{attempt_id}/{source}.log", files.log_path(source)))
    return found


def as_zip(logs: Iterable[tuple[str, Path]]) -> Iterator[bytes]:
    """A ZIP archive with a file for each log."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in logs:
            # Its size is not known beforehand: a job that runs goes on writing.
            with archive.open(name, "w", force_zip64=True) as member:
                for chunk in _contents(path):
                    member.write(chunk)
                    yield sink.take()
    yield sink.take()


def as_gzip(logs: Iterable[tuple[str, Path]]) -> Iterator[bytes]:
    """One text, gzipped, with a heading above each log."""
    sink = _Sink()
    with gzip.GzipFile(fileobj=sink, mode="wb", compresslevel=1) as text:
        for name, path in logs:
            text.write(f"==> {name} <==\n".encode())
            for chunk in _contents(path):
                text.write(chunk)
                yield sink.take()
            text.write(b"\n")
    yield sink.take()


def _contents(path: Path) -> Iterator[bytes]:
    offset = 0
    while (piece := read_at(path, offset, _CHUNK_BYTES)) is not None:
        if piece.num_dropped:
            yield f"\n{dropped_notice(piece.num_dropped)}\n".encode()
        yield piece.data
        offset = piece.start + len(piece.data)
        if not piece.data:
            return


class _Sink(io.RawIOBase):
    """Keeps what is written until somebody takes it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        added = bytes(data)
        self._kept += added
        return len(added)

    def take(self) -> bytes:
        taken = bytes(self._kept)
        self._kept.clear()
        return taken

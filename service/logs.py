"""Log files on run storage: they outlive the cluster, and are read in pieces of whole lines."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from service.api.schemas import FieldFault
from service.errors import InvalidRequest, LogNotFound
from trainer.run_dir import AttemptDir

# Anything else is refused before it becomes part of a path.
_SOURCE_PATTERN = re.compile(
    r"(?P<single>driver|coordinator)|(?:group-(?P<group>\d{1,6})-)?rank-(?P<rank>\d{1,6})"
)
MAX_READ_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
# A file offset has 63 bits.
_Offset = Annotated[int, Field(ge=0, lt=2**63)]
_CURSOR: TypeAdapter[tuple[str | None, dict[str, _Offset]]] = TypeAdapter(
    tuple[str | None, dict[str, _Offset]]
)


@dataclass(frozen=True)
class LogPosition:
    """How far the logs of an attempt were read: a byte offset per source, 0 where missing."""

    attempt_id: str | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)

    def moved(self, source: str, offset: int) -> LogPosition:
        """The position after reading `source` up to `offset`."""
        return LogPosition(self.attempt_id, {**self.offsets, source: offset})

    def encode(self) -> str:
        """An opaque cursor."""
        text = json.dumps([self.attempt_id, dict(self.offsets)], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, cursor: str) -> LogPosition:
        """Read a cursor back; raises `InvalidRequest` if it is none of ours."""
        try:
            text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
            attempt_id, offsets = _CURSOR.validate_json(text)
            return cls(attempt_id, offsets)
        except ValueError:
            message = "not a cursor that this service gave out; leave it away to start over"
            raise InvalidRequest(
                [FieldFault(path="after", code="cursor", message=message)]
            ) from None


@dataclass(frozen=True)
class LogPiece:
    """One line, and the position behind it."""

    source: str
    text: str
    position: LogPosition


def list_sources(files: AttemptDir) -> list[str]:
    """Names of the logs of an attempt: driver, coordinator, then groups and ranks by number."""
    names = [path.stem for path in files.logs_dir.glob("*.log")]
    return sorted((name for name in names if _SOURCE_PATTERN.fullmatch(name)), key=_order)


def _order(source: str) -> tuple[bool, bool, int, int]:
    match = _SOURCE_PATTERN.fullmatch(source)
    assert match, "the caller has checked the name"
    is_rank = match["single"] is None
    return is_rank, source == "coordinator", int(match["group"] or 0), int(match["rank"] or 0)


def check_source(source: str, known: Sequence[str]) -> None:
    """Raise `LogNotFound` if `source` cannot name a log; a rank may have none *yet*."""
    if not _SOURCE_PATTERN.fullmatch(source):
        raise LogNotFound(source, known)


def read_new(
    files: AttemptDir, position: LogPosition, source: str | None, *, is_final: bool
) -> Iterator[LogPiece]:
    """Lines behind `position`, at most MAX_READ_BYTES per source: of `source`, or of all.

    A last line without an end counts only if `is_final`, when nobody writes any more.
    """
    for name in [source] if source else list_sources(files):
        offset = position.offsets.get(name, 0)
        for line in _read_lines(files.log_path(name), offset, is_final=is_final):
            offset += len(line)
            position = position.moved(name, offset)
            yield LogPiece(name, line.decode("utf-8", "replace").rstrip("\r\n"), position)


def _read_lines(path: Path, offset: int, *, is_final: bool) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return []
    lines = _split_at_lf(data)
    is_open = bool(lines) and not lines[-1].endswith(b"\n")
    is_overlong = len(lines) == 1 and len(data) == MAX_READ_BYTES
    return lines[:-1] if is_open and not (is_final or is_overlong) else lines


def _split_at_lf(data: bytes) -> list[bytes]:
    # Not `splitlines`: a carriage return alone redraws a line and does not end it.
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def tail_position(
    files: AttemptDir, attempt_id: str, source: str | None, num_lines: int
) -> LogPosition:
    """The position from which `num_lines` lines of each source remain."""
    position = LogPosition(attempt_id)
    for name in [source] if source else list_sources(files):
        position = position.moved(name, _tail_offset(files.log_path(name), num_lines))
    return position


def _tail_offset(path: Path, num_lines: int) -> int:
    """Byte offset of the last `num_lines` lines of a file, read block by block from its end."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END)
            tail = b""
            # One more line end than wanted, since the last line has one as well.
            while start > 0 and tail.count(b"\n") <= num_lines:
                size = min(start, _BLOCK_BYTES)
                start -= size
                file.seek(start)
                tail = file.read(size) + tail
    except FileNotFoundError:
        return 0
    lines = _split_at_lf(tail)
    return start + sum(len(line) for line in lines[: max(0, len(lines) - num_lines)])

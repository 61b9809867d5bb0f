"""Log files on run storage: they outlive the cluster, and are read in pieces of whole lines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from service.api.schemas import FieldFault
from service.artifact_errors import LogNotFound
from service.errors import InvalidRequest
from service.log_lines import (
    Head,
    group_of,
    is_source,
    last_head,
    rank_of,
    source_order,
    with_heads,
)
from service.log_parts import context_before, read_at, split_at_lf, tail_offset
from trainer.run_dir import AttemptDir

# Most that one look reads: of one log, and of all of them together.
MAX_READ_BYTES = 1 << 20
_MAX_LOOK_BYTES = 1 << 23
_MIN_READ_BYTES = 1 << 16
# A file offset has 63 bits.
_Offset = Annotated[int, Field(ge=0, lt=2**63)]
NO_HEAD = Head()
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
            if attempt_id is not None and not attempt_id.isprintable():
                raise ValueError("no id of an attempt")
            return cls(attempt_id, offsets)
        except ValueError:
            message = "not a cursor that this service gave out; leave it away to start over"
            raise InvalidRequest(
                [FieldFault(path="after", code="cursor", message=message)]
            ) from None


@dataclass(frozen=True)
class LogPiece:
    """One line, the position behind it, and its level and time as far as they are known."""

    source: str
    text: str
    position: LogPosition
    head: Head = NO_HEAD

    @property
    def level(self) -> str | None:
        """How much it matters, as in `warning`."""
        return self.head.level.name.lower() if self.head.level else None

    @property
    def time(self) -> float | None:
        """When it was written, in Unix seconds."""
        return self.head.time

    @property
    def rank(self) -> int | None:
        """The rank that wrote it."""
        return rank_of(self.source)

    @property
    def group(self) -> int | None:
        """The sharding group that wrote it, where groups are failure domains."""
        return group_of(self.source)


def list_sources(files: AttemptDir) -> list[str]:
    """Names of the logs of an attempt: driver, coordinator, then groups and ranks by number."""
    names = [path.stem for path in files.logs_dir.glob("*.log")]
    return sorted((name for name in names if is_source(name)), key=source_order)


def check_source(source: str, known: Sequence[str]) -> None:
    """Raise `LogNotFound` if `source` cannot name a log; a rank may have none *yet*."""
    if not is_source(source):
        raise LogNotFound(source, known)


def read_new(
    files: AttemptDir,
    position: LogPosition,
    source: str | Sequence[str] | None,
    *,
    is_final: bool,
) -> Iterator[LogPiece]:
    """Lines behind `position`, at most MAX_READ_BYTES per source: of some sources, or of all.

    A last line without an end counts only if `is_final`, when nobody writes any more. Where a log
    grew too long and lines were removed, a line says so.
    """
    names = _names(files, source)
    share = max(_MIN_READ_BYTES, min(MAX_READ_BYTES, _MAX_LOOK_BYTES // max(1, len(names))))
    for name in names:
        for text, head, offset in _read_lines(
            files.log_path(name), position.offsets.get(name, 0), share, is_final=is_final
        ):
            position = position.moved(name, offset)
            yield LogPiece(name, text, position, head)


def _names(files: AttemptDir, source: str | Sequence[str] | None) -> Sequence[str]:
    if source is None:
        return list_sources(files)
    return [source] if isinstance(source, str) else source


def _read_lines(
    log: Path, offset: int, max_bytes: int, *, is_final: bool
) -> Iterator[tuple[str, Head, int]]:
    """Lines of one log with level, time and the offset behind each."""
    piece = read_at(log, offset, max_bytes)
    if piece is None:
        return
    if piece.num_dropped:
        yield dropped_notice(piece.num_dropped), Head(), piece.start
    lines = split_at_lf(piece.data)
    is_open = bool(lines) and not lines[-1].endswith(b"\n")
    is_overlong = len(lines) == 1 and len(piece.data) == max_bytes
    if is_open and not (is_final or is_overlong or piece.is_cut):
        lines = lines[:-1]
    if not lines:
        return
    before = last_head([_text(line) for line in split_at_lf(context_before(log, piece.start))])
    offset = piece.start
    texts = [_text(line) for line in lines]
    for line, (text, head) in zip(lines, with_heads(before, texts), strict=True):
        offset += len(line)
        yield text, head, offset


def dropped_notice(num_bytes: int) -> str:
    """The line in the place of what was removed from a log that grew too long."""
    return (
        f"[shardloom] {num_bytes} bytes of this log were dropped here: it grew beyond "
        "SHARDLOOM_LOG_MAX_BYTES"
    )


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def tail_position(
    files: AttemptDir, attempt_id: str, source: str | Sequence[str] | None, num_lines: int
) -> LogPosition:
    """The position from which `num_lines` lines of each source remain."""
    position = LogPosition(attempt_id)
    names = _names(files, source)
    for name in names:
        position = position.moved(name, tail_offset(files.log_path(name), num_lines))
    return position

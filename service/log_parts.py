"""The files of one log as one text that is read by byte offset: see `trainer.log_pump`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from service.security.files import is_below
from trainer.log_pump import parts_of

_BLOCK_BYTES = 1 << 16
# A tail is for people: nobody reads more, and looking for its beginning must end soon.
MAX_TAIL_BYTES = 8 << 20
# Far enough to find the line that a traceback belongs to.
_CONTEXT_BYTES = 1 << 14


@dataclass(frozen=True)
class Piece:
    """Bytes of a log from `start` on; `num_dropped` bytes before them are gone.

    With `is_cut` the bytes behind them are gone as well: a last line without an end stays so.
    """

    start: int
    data: bytes
    num_dropped: int = 0
    is_cut: bool = False


@dataclass(frozen=True)
class _Part:
    offset: int
    path: Path
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def read_at(log: Path, offset: int, max_bytes: int) -> Piece | None:
    """Bytes of a log from `offset` on, at most `max_bytes`; None where there are none yet."""
    parts = [part for part in _parts(log) if part.end > offset]
    if not parts:
        return None
    start = max(offset, parts[0].offset)
    data, at = b"", start
    for part in parts:
        if part.offset > at or len(data) == max_bytes:
            break
        data += _read(part, at, max_bytes - len(data))
        at = start + len(data)
    # Right behind them begins a file that does not go on from them.
    is_cut = any(part.end == at for part in parts) and all(part.offset != at for part in parts)
    return Piece(start, data, start - offset, is_cut and any(part.offset > at for part in parts))


def size_of(log: Path) -> int:
    """Number of bytes that were ever written to a log."""
    return max((part.end for part in _parts(log)), default=0)


def context_before(log: Path, offset: int) -> bytes:
    """Some bytes before `offset`, to learn what its line goes on from."""
    start = max(0, offset - _CONTEXT_BYTES)
    found = read_at(log, start, offset - start) if offset else None
    return found.data if found and found.start + len(found.data) == offset else b""


def tail_offset(log: Path, num_lines: int) -> int:
    """Byte offset of the last `num_lines` lines, read block by block from the end.

    Where they are longer than `MAX_TAIL_BYTES` it is that of as many bytes, within a line.
    """
    parts = _parts(log)
    if not parts:
        return 0
    end = start = parts[-1].end
    first_kept = max(_start_of_last_run(parts), end - MAX_TAIL_BYTES)
    blocks: list[bytes] = []
    # One more line end than wanted, since the last line has one as well.
    num_ends = 0
    while start > first_kept and num_ends <= num_lines:
        begin = max(first_kept, start - _BLOCK_BYTES)
        piece = read_at(log, begin, start - begin)
        if piece is None or piece.start != begin:
            break
        blocks.append(piece.data)
        num_ends += piece.data.count(b"\n")
        start = begin
    lines = split_at_lf(b"".join(reversed(blocks)))
    return start + sum(len(line) for line in lines[: max(0, len(lines) - num_lines)])


def split_at_lf(data: bytes) -> list[bytes]:
    """Lines with their ends. Not `splitlines`: a carriage return alone redraws a line."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _parts(log: Path) -> list[_Part]:
    found = []
    for offset, path in parts_of(log):
        # A job may lay a link among its files; what it leads to is not the job's to show.
        if not is_below(path, (log.parent.parent,)):
            continue
        try:
            found.append(_Part(offset, path, path.stat().st_size))
        except FileNotFoundError:  # removed since it was listed
            continue
    return found


def _start_of_last_run(parts: list[_Part]) -> int:
    """Offset of the first byte after the last gap."""
    start = parts[-1].offset
    for part in reversed(parts[:-1]):
        if part.end != start:
            break
        start = part.offset
    return start


def _read(part: _Part, at: int, max_bytes: int) -> bytes:
    try:
        with part.path.open("rb") as file:
            file.seek(at - part.offset, os.SEEK_SET)
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""

"""Logs of an attempt on run storage: parse, read, tail, filter, download.

Log files outlive the cluster. Each process writes one, `trainer.protocol.log_pump` in several parts
that are read here as one text by byte offset. Times are Unix seconds; levels are those of Python's
logging.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field, TypeAdapter

from service.errors import InvalidRequest
from trainer.protocol.log_pump import parts_of
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.untrusted import NotRegular, list_untrusted, open_untrusted
from trainer.spec.base import FieldProblem

_SOURCE_PATTERN = re.compile(
    r"driver|coordinator|(?:group-(?P<group>\d{1,6})-)?rank-(?P<rank>\d{1,6})"
)
# As `trainer.driver.process_log` writes lines, Python's logging by itself, MLflow, Ray and its C++
# part.
_HEAD = re.compile(
    r"\[?(?P<date>\d{4}([-/])\d\d\2\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)"
    r"(?:[.,](?P<ms>\d{3}))?(?P<zone>Z?)\s"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|[DIWEF])\b"
)
# Of torch and its C++ part: [W1121 10:11:12.131415 File.cpp:7], [rank0]:W1121 10:11:12.131415 ...
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?(?P<letter>[DIWEF])\d{4} \d\d:\d\d:\d\d[.\d]* ")
LEVELS = logging.getLevelNamesMapping()
_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
# Last words of a process: nobody dates them or gives them a level.
_LAST_WORDS = re.compile(
    r"Fatal Python error|terminate called|Segmentation fault|Aborted|\*\*\* (?:SIG|Aborted)|"
    r"corrupted |double free|free\(\): |malloc\(\): |std::bad_alloc"
)
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Head:
    """Level (of `logging`) and time (Unix s) of a line, None while none of its log has said any."""

    level: int | None = None
    time: float | None = None


def is_source(name: str) -> bool:
    return _SOURCE_PATTERN.fullmatch(name) is not None


def _number_in(source: str, part: str) -> int | None:
    """The `rank` that wrote a log, or its sharding `group` where groups are failure domains.

    Ranks then count within their group.
    """
    match = _SOURCE_PATTERN.fullmatch(source)
    return int(match[part]) if match and match[part] else None


def head_of(text: str) -> Head | None:
    """What a line says itself; None for one that only goes on where the last one ended."""
    if match := _HEAD.match(text):
        level = _LETTERS.get(match["level"], match["level"])
        return Head(LEVELS[level], _time_of(match))
    if match := _GLOG.match(text):
        return Head(LEVELS[_LETTERS[match["letter"]]])
    if _LAST_WORDS.match(text):
        return Head(logging.CRITICAL)
    if text.startswith(_TRACEBACK):
        return Head(logging.ERROR)
    return None


def following(before: Head, text: str) -> Head:
    """Level and time of a line behind `before`: the lines of a traceback are as its first."""
    own = head_of(text)
    if own is None:
        return before
    if text.startswith(_TRACEBACK) and before.level is not None:
        # Below the line that announced it the traceback is as bad as that line, or worse.
        return Head(max(before.level, logging.ERROR), before.time)
    return own if own.time is not None else Head(own.level, before.time)


def _time_of(match: re.Match[str]) -> float | None:
    try:
        date = match["date"].replace("/", "-")
        moment = datetime.fromisoformat(f"{date}T{match['clock']}.{match['ms'] or '000'}")
        # Without a zone it is the local time of the host that wrote it: taken as our own.
        return (moment.replace(tzinfo=UTC) if match["zone"] else moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted; what is left away lets everything through.

    `text` is looked for in a line whatever the case, and `*` in it stands for anything. Times are
    Unix seconds.
    """

    ranks: Sequence[int] = ()
    min_level: int | None = None
    text: str = ""
    since: float | None = None
    until: float | None = None

    def takes_source(self, source: str) -> bool:
        return not self.ranks or _number_in(source, "rank") in self.ranks

    def takes(self, head: Head, text: str) -> bool:
        """Whether a line is wanted. A line without a level is as `info`."""
        if self.min_level is not None and (head.level or logging.INFO) < self.min_level:
            return False
        time = -math.inf if head.time is None else head.time
        if self.since is not None and time < self.since:
            return False
        if self.until is not None and time >= self.until:
            return False
        return contains(text, self.text)


def contains(text: str, wanted: str) -> bool:
    """Whether `wanted` is in `text`, whatever the case; `*` stands for anything in between.

    Part by part, from left to right: linear in the text, unlike a regular expression, so that no
    search can hold up the service.
    """
    text, at = text.casefold(), 0
    for part in wanted.casefold().split("*"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


# ---- one log by byte offset

_BLOCK_BYTES = 1 << 16
# A tail is for people: nobody reads more, and looking for its beginning must end soon. Of one log,
# and of all that are looked at together.
MAX_TAIL_BYTES = 8 << 20
MAX_TAILS_BYTES = 1 << 25
_TAILS_S = 3.0
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


# Files of a folder by the log that they may be parts of. Thousands of ranks have logs in one: it is
# listed once for all of them.
Listing = Mapping[str, Sequence[Path]]


def list_logs(folder: Path) -> Listing:
    """What there is in a folder of logs; whoever reads several of them asks once."""
    found: dict[str, list[Path]] = {}
    for path in list_untrusted(folder, AttemptDir(folder.parent).runs_dir):
        found.setdefault(path.stem.partition("@")[0], []).append(path)
    return found


def read_at(log: Path, offset: int, max_bytes: int, listing: Listing | None = None) -> Piece | None:
    """Bytes of a log from `offset` on, at most `max_bytes`; None where there are none yet."""
    parts = [part for part in _parts(log, listing) if part.end > offset]
    if not parts:
        return None
    start = max(offset, parts[0].offset)
    data, at = b"", start
    for part in parts:
        if part.offset > at or len(data) == max_bytes:
            break
        with suppress(FileNotFoundError), _open(part.path) as file:
            file.seek(at - part.offset)
            data += file.read(max_bytes - len(data))
        at = start + len(data)
    # Right behind them begins a file that does not go on from them.
    is_cut = any(part.end == at for part in parts) and all(part.offset != at for part in parts)
    return Piece(start, data, start - offset, is_cut and any(part.offset > at for part in parts))


def context_before(log: Path, offset: int, listing: Listing | None = None) -> bytes:
    """Some bytes before `offset`, to learn what its line goes on from."""
    start = max(0, offset - _CONTEXT_BYTES)
    found = read_at(log, start, offset - start, listing) if offset else None
    return found.data if found and found.start + len(found.data) == offset else b""


def tail_offset(
    log: Path, num_lines: int, listing: Listing | None = None, max_bytes: int = MAX_TAIL_BYTES
) -> int:
    """Byte offset of the last `num_lines` lines, read block by block from the end.

    Where they are longer than `max_bytes` it is that of as many bytes, within a line.
    """
    parts = _parts(log, listing)
    if not parts:
        return 0
    end = start = parts[-1].end
    first_kept = max(_start_of_last_run(parts), end - max_bytes)
    blocks: list[bytes] = []
    # One more line end than wanted, since the last line has one as well.
    num_ends = 0
    while start > first_kept and num_ends <= num_lines:
        begin = max(first_kept, start - _BLOCK_BYTES)
        piece = read_at(log, begin, start - begin, listing)
        if piece is None or piece.start != begin:
            break
        blocks.append(piece.data)
        num_ends += piece.data.count(b"\n")
        start = begin
    lines = _split(b"".join(reversed(blocks)))
    return start + sum(len(line) for line in lines[: max(0, len(lines) - num_lines)])


def _split(data: bytes) -> list[bytes]:
    """Lines with their ends. Not `splitlines`: a carriage return alone redraws a line."""
    return io.BytesIO(data).readlines()


def _parts(log: Path, listing: Listing | None) -> list[_Part]:
    found = []
    known = list_logs(log.parent) if listing is None else listing
    for offset, path in parts_of(log, known.get(log.stem, ())):
        # Removed since it was listed, or no file: what a link leads to is not the job's to show.
        with suppress(FileNotFoundError, NotRegular), _open(path) as file:
            found.append(_Part(offset, path, os.fstat(file.fileno()).st_size))
    return found


def _open(part: Path) -> IO[bytes]:
    return open_untrusted(part, AttemptDir(part.parent.parent).runs_dir)


def _start_of_last_run(parts: list[_Part]) -> int:
    """Offset of the first byte after the last gap."""
    start = parts[-1].offset
    for part in reversed(parts[:-1]):
        if part.end != start:
            break
        start = part.offset
    return start


# ---- lines of all logs of an attempt

# Most that one poll reads: of one log, and of all of them together.
MAX_READ_BYTES = 1 << 20
_MAX_POLL_BYTES = 1 << 23
_MIN_READ_BYTES = 1 << 16
MAX_POLL_LINES = 100_000
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
        return LogPosition(self.attempt_id, {**self.offsets, source: offset})

    def encode(self) -> str:
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
                [FieldProblem(path="after", code="cursor", message=message)]
            ) from None


@dataclass(frozen=True)
class LogPiece:
    """One line, and its level and time as far as they are known.

    `before` is the position where its poll began to read its log, `offset` that behind it. Where a
    poll `is_cut` there was more than it may read.
    """

    source: str
    text: str
    before: LogPosition
    offset: int
    head: Head = Head()
    is_cut: bool = False

    @property
    def position(self) -> LogPosition:
        """The position behind it; it has an offset for every log, so few lines should be asked."""
        return self.before.moved(self.source, self.offset)

    @property
    def level(self) -> str | None:
        return logging.getLevelName(self.head.level).lower() if self.head.level else None

    @property
    def time(self) -> float | None:
        """When it was written, in Unix seconds."""
        return self.head.time

    @property
    def rank(self) -> int | None:
        return _number_in(self.source, "rank")

    @property
    def group(self) -> int | None:
        return _number_in(self.source, "group")


def list_sources(files: AttemptDir) -> list[str]:
    """Names of the logs of an attempt: driver, coordinator, then groups and ranks by number."""
    paths = list_untrusted(files.logs_dir, files.runs_dir)
    names = [path.stem for path in paths if path.suffix == ".log" and is_source(path.stem)]
    return sorted(names, key=_source_order)


def _source_order(source: str) -> tuple[bool, bool, int, int]:
    rank, group = _number_in(source, "rank"), _number_in(source, "group")
    return rank is not None, source == "coordinator", group or 0, rank or 0


def read_new(
    files: AttemptDir,
    position: LogPosition,
    sources: Sequence[str],
    *,
    is_final: bool,
) -> Iterator[LogPiece]:
    """Lines of some sources behind `position`, at most MAX_READ_BYTES of each.

    Of many sources with much that is new the first ones come first. A last line without an end
    counts only if `is_final`, when nobody writes any more. Where a log grew too long and lines were
    removed, a line says so.
    """
    listing = list_logs(files.logs_dir)
    share = max(_MIN_READ_BYTES, min(MAX_READ_BYTES, _MAX_POLL_BYTES // max(1, len(sources))))
    num_bytes = num_lines = 0
    for name in sources:
        if num_bytes >= _MAX_POLL_BYTES:
            return
        start = offset = position.offsets.get(name, 0)
        for text, head, offset, is_cut in _read_lines(
            files.log_path(name), start, share, listing, is_final=is_final
        ):
            num_lines += 1
            is_last = num_lines >= MAX_POLL_LINES
            is_cut |= is_last or num_bytes + offset - start >= _MAX_POLL_BYTES
            yield LogPiece(name, text, position, offset, head, is_cut)
            if is_last:
                return
        if offset != start:
            position, num_bytes = position.moved(name, offset), num_bytes + offset - start


def _read_lines(
    log: Path, offset: int, max_bytes: int, listing: Listing, *, is_final: bool
) -> Iterator[tuple[str, Head, int, bool]]:
    """Lines of one log with level, time, the offset behind each, and whether they are cut off."""
    piece = read_at(log, offset, max_bytes, listing)
    if piece is None:
        return
    is_full = len(piece.data) == max_bytes
    is_cut = is_full or piece.is_cut
    if piece.num_dropped:
        yield dropped_notice(piece.num_dropped), Head(), piece.start, is_cut
    lines = _split(piece.data)
    is_open = bool(lines) and not lines[-1].endswith(b"\n")
    is_overlong = len(lines) == 1 and is_full
    if is_open and not (is_final or is_overlong or piece.is_cut):
        lines = lines[:-1]
    if not lines:
        return
    head, offset = Head(), piece.start
    for line in _split(context_before(log, offset, listing)):
        head = following(head, _text(line))
    for line in lines:
        text = _text(line)
        head = following(head, text)
        offset += len(line)
        yield text, head, offset, is_cut


def dropped_notice(num_bytes: int) -> str:
    """The line in the place of what was removed from a log that grew too long."""
    return (
        f"[shardloom] {num_bytes} bytes of this log were dropped here: it grew beyond "
        "SHARDLOOM_LOG_MAX_BYTES"
    )


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def tail_position(
    files: AttemptDir, attempt_id: str, sources: Sequence[str], num_lines: int
) -> LogPosition:
    """The position from which `num_lines` lines of each source remain.

    Of many sources it is fewer, so that no job keeps run storage busy. Raises `InvalidRequest`
    where their beginnings are not found soon.
    """
    listing, deadline = list_logs(files.logs_dir), time.monotonic() + _TAILS_S
    share = min(MAX_TAIL_BYTES, MAX_TAILS_BYTES // max(1, len(sources)))
    offsets: dict[str, int] = {}
    for name in sources:
        if time.monotonic() > deadline:
            message = f"{len(sources)} logs are too many to look at; ask for a source, or for ranks"
            raise InvalidRequest([FieldProblem(path="tail", code="slow", message=message)])
        offsets[name] = tail_offset(files.log_path(name), num_lines, listing, share)
    return LogPosition(attempt_id, offsets)


# ---- download: all logs of some attempts as one file, made while it is sent

_CHUNK_BYTES = 1 << 18


def logs_of(run_dir: RunDir, attempt_ids: Sequence[str]) -> list[tuple[str, Iterator[bytes]]]:
    """Name in the archive and content of every log."""
    found, list_folder = [], lru_cache(maxsize=1)(list_logs)
    for attempt_id in attempt_ids:
        files = run_dir.attempt(attempt_id)
        for source in list_sources(files):
            content = _content(files.log_path(source), list_folder)
            found.append((f"{attempt_id}/{source}.log", content))
    return found


def as_zip(
    files: Iterable[tuple[str, Iterable[bytes]]], compression: int = zipfile.ZIP_DEFLATED
) -> Iterator[bytes]:
    """A ZIP archive of files, given by their names and contents."""
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", compression, compresslevel=1) as archive:
        for name, content in files:
            # Sizes are not known beforehand: a job that runs goes on writing.
            with archive.open(name, "w", force_zip64=True) as member:
                for chunk in content:
                    member.write(chunk)
                    yield sink.take()
            # Unpacked they would be their owner's only.
            archive.getinfo(name).external_attr = 0o644 << 16
    yield sink.take()


def _content(path: Path, list_folder: Callable[[Path], Listing]) -> Iterator[bytes]:
    offset, listing = 0, list_folder(path.parent)
    while (piece := read_at(path, offset, _CHUNK_BYTES, listing)) is not None:
        if piece.num_dropped:
            yield f"\n{dropped_notice(piece.num_dropped)}\n".encode()
        yield piece.data
        offset = piece.start + len(piece.data)
        if not piece.data:
            return


class _Sink(io.BytesIO):
    """Keeps what is written until somebody takes it, so that positions in it mean nothing."""

    def tell(self) -> int:
        raise io.UnsupportedOperation("tell")

    def take(self) -> bytes:
        taken = self.getvalue()
        self.seek(0)
        self.truncate()
        return taken

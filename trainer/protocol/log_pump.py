"""Copies what a process writes to its log on run storage, from a process of its own.

    python -I -S log_pump.py LOG_PATH MAX_BYTES < PIPE 2> WHERE_IT_WENT_BEFORE

The process's file descriptors 1 and 2 lead into the pipe, so that this sees everything: Python's
logging, and the last words of native code that aborts. It outlives the process that it serves and
copies what is left in the pipe, whatever ended that process. Standard library only, for a quick
start: one such process runs beside every worker.

A log is a chain of files: NAME.log, then NAME@OFFSET.log, where OFFSET is the number of bytes
before it. When the chain holds more than MAX_BYTES, files in its middle are removed: the
beginning says what was started, the end how it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

_CHUNK_BYTES = 1 << 16
# The first part and the last three of a log stay.
_NUM_PARTS = 4
_OFFSET_DIGITS = 15
Part = tuple[int, Path]
"""A file of a chain, and the number of bytes before it."""


def parts_of(log: Path, files: Iterable[Path] | None = None) -> list[Part]:
    """The files of a chain among those of its folder, in order."""
    later = re.compile(rf"{re.escape(log.stem)}@(\d{{{_OFFSET_DIGITS}}})\.log")
    found = []
    for path in log.parent.glob("*.log") if files is None else files:
        if path == log:
            found.append((0, path))
        elif match := later.fullmatch(path.name):
            found.append((int(match[1]), path))
    return sorted(found)


def last_part(
    log: Path,
    max_bytes: int,
    known: Part | None = None,
    list_files: Callable[[], Iterable[Path] | None] = lambda: None,
) -> tuple[Part, int]:
    """The part that a log ends with, or will begin with, and the size of that.

    It is the one `known` from before as long as that is not full: nobody begins another then. Else
    the folder is listed, which may hold the logs of thousands of ranks.
    """
    with contextlib.suppress(FileNotFoundError):
        if known and (size := known[1].lstat().st_size) < _part_bytes(max_bytes):
            return known, size
    part = [(0, log), *parts_of(log, list_files())][-1]
    return part, part[1].lstat().st_size if part[1].exists() else 0


def _part_bytes(max_bytes: int) -> int:
    """At which a part is full."""
    return max(1, max_bytes // _NUM_PARTS)


def _open(path: Path) -> IO[bytes]:
    return path.open("ab", buffering=0)


def append(
    log: Path,
    max_bytes: int,
    data: bytes,
    known: Part | None = None,
    opened: Callable[[Path], IO[bytes]] = _open,
    lock_kind: int = fcntl.LOCK_EX,
) -> Part:
    """Write at the end of a chain; the part that it went to, to be `known` at the next time.

    Several processes may, as an old one drains while a new one starts. `opened` opens to append;
    who must not wait for the others gives LOCK_NB to `lock_kind`. Raises OSError if storage fails.
    """
    with opened(log) as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, lock_kind)
        (offset, path), size = last_part(log, max_bytes, known)
        if size >= _part_bytes(max_bytes):
            offset += size
            path = log.with_name(f"{log.stem}@{offset:0{_OFFSET_DIGITS}d}.log")
            # A new part is about to begin: of those there, the first and the last two stay.
            for _, part in parts_of(log)[1 : -(_NUM_PARTS - 2)]:
                part.unlink(missing_ok=True)
        with contextlib.nullcontext(lock) if path == log else opened(path) as file:
            while data:
                data = data[file.write(data) or 0 :]
    return offset, path


def pump(log: Path, max_bytes: int) -> None:
    """Copy standard input to the log and to standard error, until its end."""
    part = None
    while data := os.read(0, _CHUNK_BYTES):
        # Neither a full disk nor a closed terminal may stop the other copy, or the process.
        with contextlib.suppress(OSError):
            part = append(log, max_bytes, data, part)
        with contextlib.suppress(OSError):
            os.write(2, data)


def detach() -> None:
    """Let the parent go on at once; this goes on as a process that nobody waits for or ends."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    detach()
    # The end of the pipe tells of the end of the process that is served.
    pump(Path(sys.argv[1]), int(sys.argv[2]))

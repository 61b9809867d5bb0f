"""Reading the end of a growing log file, piece by piece. Blocking file access, no NiceGUI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_MAX_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class LogTail:
    """`lines` are new since the last read; `offset_bytes` is where the next one begins."""

    offset_bytes: int | None = None
    lines: tuple[str, ...] = ()


def list_sources(logs_dir: Path) -> list[str]:
    """Names of the log files of an attempt: the driver first, then ranks in number order."""
    names = [path.stem for path in logs_dir.glob("*.log")]
    return sorted(names, key=lambda name: (name != "driver", len(name), name))


def read_tail(path: Path, previous: LogTail, max_lines: int) -> LogTail:
    """Complete lines after `previous`, at most `max_lines`; the first read starts near the end.

    A file that is missing gives no lines; one that became shorter was replaced and is read anew.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = previous.offset_bytes
            if start is None or start > end or end - start > _MAX_READ_BYTES:
                start = max(0, end - _MAX_READ_BYTES)
            file.seek(start)
            data = file.read(end - start)
    except FileNotFoundError:
        return LogTail()
    # A line still being written waits for the next read.
    complete = data[: data.rfind(b"\n") + 1]
    lines = complete.decode("utf-8", errors="replace").splitlines()
    return LogTail(offset_bytes=start + len(complete), lines=tuple(lines[-max_lines:]))

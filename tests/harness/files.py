"""What lies in a folder: digests to compare, records of an attempt, pickles that run code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from trainer.protocol.events import EventModel, read_record
from trainer.protocol.run_dir import AttemptDir


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def records_in(attempt: AttemptDir, *kinds: type[EventModel]) -> list[Any]:
    """Records of these kinds that the streams of an attempt hold, stream by stream."""
    lines = [line for path in attempt.stream_paths() for line in path.read_bytes().splitlines()]
    return [r for r in (read_record(line, now=0.0) for line in lines) if isinstance(r, kinds)]


class Call:
    """Unpickled it is what `function` returns; so do early Pythons 3.11 write members of enums."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

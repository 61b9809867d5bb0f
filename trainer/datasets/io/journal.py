"""Work in numbered parts that survives a kill: what is finished is never done again.

A part is a file. It is written under another name, measured, renamed, and only then recorded in
`journal.jsonl`, one line per part with size, sha256 and the facts found on the way. The journal's
first line says what the work is (options, inputs, versions); other work starts anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID, TimeElapsedColumn

from trainer.protocol.run_dir import file_record, write_whole

JOURNAL_NAME = "journal.jsonl"
Facts = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A finished part: `name` is its path in the working folder; `facts` are JSON values."""

    name: str
    size_bytes: int
    sha256: str
    facts: Facts


def make_part(name: str, path: Path, make: Callable[[Path], Facts | None]) -> Part:
    """Let `make` write `path`, and measure it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = make(path) or {}
    return Part(name, **vars(file_record(path)), facts=facts)


class Journal:
    """The finished parts of one piece of work in `folder`."""

    def __init__(
        self, folder: Path, work: Mapping[str, Any], *, keep: Collection[str] = ()
    ) -> None:
        """Open the journal of `work` (JSON values), or empty the folder and begin one.

        Files of the folder named in `keep` are left there either way.
        """
        self.folder = folder
        self._path = folder / JOURNAL_NAME
        self._parts: dict[str, Part] = {}
        header = json.dumps(dict(work))
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        first, *lines = text.splitlines() or [""]
        if first != header:
            for path in folder.iterdir():
                if path.name not in keep:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            lines = []
        for line in lines:
            with suppress(ValueError, TypeError):  # cut by a kill
                part = Part(**json.loads(line))
                self._parts[part.name] = part
        # Written again so that a line cut by a kill does not spoil the next one.
        lines = [header, *(json.dumps(vars(part)) for part in self._parts.values())]
        write_whole(self._path, ("\n".join(lines) + "\n").encode())

    def find(self, name: str) -> Part | None:
        return self._parts.get(name)

    def part(self, name: str, make: Callable[[Path], Facts | None]) -> Part:
        """The finished part `name`; `make` writes its file where it is not there and whole.

        `make` is given the path to write and returns facts to keep with the part.
        """
        path = self.folder / name
        known = self.find(name)
        if known and path.is_file() and file_record(path).sha256 == known.sha256:
            return known
        unfinished = path.with_name(f".{path.name}.unfinished")
        part = make_part(name, unfinished, make)
        unfinished.rename(path)
        self.record(part)
        return part

    def record(self, part: Part) -> None:
        self._parts[part.name] = part
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(part)) + "\n")
            file.flush()
            os.fsync(file.fileno())


Advance = Callable[[float], object]
_LINE_EVERY_S = 10.0


class _ProgressLines(Progress):
    """A line for the step at hand every `_LINE_EVERY_S`, for logs; shows no bars."""

    _told_at: float | None = None

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        now, task = self.get_time(), self._tasks[task_id]
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at >= _LINE_EVERY_S:
            self._told_at = now
            far = f"{task.percentage:.0f} %" if task.total else f"{task.completed:,.0f}"
            print(f"{task.description}: {far}", file=sys.stderr, flush=True)


def progress_bars(*columns: ProgressColumn, transient: bool = False) -> Progress:
    """Bars, or `columns`, for the steps of a command, on stderr; lines where it is no terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return (Progress if is_terminal else _ProgressLines)(
        *(columns or Progress.get_default_columns()),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_terminal,
        # Else it is a thread that tells how far it is, and ends where nothing is shown.
        auto_refresh=is_terminal,
        transient=transient,
    )

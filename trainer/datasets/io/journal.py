"""Work in numbered parts that survives a kill: what is finished is never done again.

A part is a file. It is written under another name, measured, renamed, and only then recorded in
`journal.jsonl`, one line per part with size, sha256 and the facts found on the way. The journal's
first line says what the work is (options, inputs, versions); other work starts anew. A part may say
by itself what it is made of: it alone is done again where that has changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from trainer.data.manifest import sha256_of

JOURNAL_NAME = "journal.jsonl"
UNFINISHED_JOURNAL_NAME = f".{JOURNAL_NAME}.unfinished"
Facts = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A finished part: `name` is its path in the working folder; `facts` are JSON values.

    `made_of` is any text that changes with what the part was made of, beside the work itself.
    """

    name: str
    size_bytes: int
    sha256: str
    facts: Facts
    made_of: str = ""


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
        header = json.dumps(dict(work))
        known = _read(self._path, header)
        if known is None:
            _empty(folder, keep)
        self._parts = known or {}
        self._used: set[str] = set()
        self.num_resumed = len(self._parts)
        # Written again so that a line cut by a kill does not spoil the next one.
        lines = [header, *(json.dumps(asdict(part)) for part in self._parts.values())]
        _replace(self._path, "\n".join(lines) + "\n")

    def find(self, name: str, made_of: str = "") -> Part | None:
        """The part of that name, if it was recorded and made of the same."""
        self._used.add(name)
        found = self._parts.get(name)
        return found if found is not None and found.made_of == made_of else None

    @property
    def used(self) -> frozenset[str]:
        """The names that were asked for since it was opened: what else is recorded is stale."""
        return frozenset(self._used)

    def names(self) -> tuple[str, ...]:
        """The names of all finished parts."""
        return tuple(self._parts)

    def part(self, name: str, make: Callable[[Path], Facts | None], made_of: str = "") -> Part:
        """The finished part `name`; `make` writes its file where it is not there and whole.

        `make` is given the path to write and returns facts to keep with the part.
        """
        path = self.folder / name
        if (known := self.find(name, made_of)) and is_whole(path, known):
            return known
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        facts = make(unfinished) or {}
        part = Part(name, unfinished.stat().st_size, sha256_of(unfinished), facts, made_of)
        unfinished.rename(path)
        self.record(part)
        return part

    def record(self, part: Part) -> None:
        """Note that a part is finished."""
        self._parts[part.name] = part
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(part)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def is_whole(path: Path, part: Part) -> bool:
    """Whether the file of a part is there with the contents that were recorded."""
    return (
        path.is_file() and path.stat().st_size == part.size_bytes and sha256_of(path) == part.sha256
    )


def _read(path: Path, header: str) -> dict[str, Part] | None:
    """The recorded parts of the work `header`; None where the journal is of other work."""
    if not path.is_file():
        return None
    first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if first != header:
        return None
    parts = (_parse(line) for line in lines)
    return {part.name: part for part in parts if part is not None}


def _parse(line: str) -> Part | None:
    """A line of the journal; None for one that was cut by a kill."""
    try:
        return Part(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _empty(folder: Path, keep: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(UNFINISHED_JOURNAL_NAME)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


Advance = Callable[[float], None]
# Begins a bar of a name and a total; what is yielded moves it on.
Progress = Callable[[str, float], AbstractContextManager[Advance]]


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function that shows one bar per step until the block ends."""
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )

    @contextmanager
    def step(name: str, total: float) -> Iterator[Advance]:
        task = bars.add_task(name, total=total)
        yield lambda amount: bars.advance(task, amount)
        bars.update(task, completed=total)

    with bars:
        yield step

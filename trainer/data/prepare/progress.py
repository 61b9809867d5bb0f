"""Progress of long preparations, on stderr where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

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

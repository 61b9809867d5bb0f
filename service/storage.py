"""Calls to storage that may hang: each has a deadline, and few may hang at once.

Whoever reads from a mount that is gone waits in the kernel for good. So a call runs in a thread of
its own, which the caller leaves behind after the deadline; while as many calls to one place hang as
may, later ones fail at once. Other places are not concerned.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 10.0
MAX_HANGING = 8
_PLACE_PARTS = 3
_Result = TypeVar("_Result")
_hanging: Counter[Path] = Counter()
_lock = threading.Lock()


def in_time(path: Path, call: Callable[[], _Result], deadline_s: float = DEADLINE_S) -> _Result:
    """What `call` returns or raises; an OSError where the storage of `path` hangs."""
    # Whatever else is asked for there hangs as well: mounts are near the root.
    place = Path(*path.parts[:_PLACE_PARTS])
    if _hanging[place] >= MAX_HANGING:
        raise TimeoutError(errno.ETIMEDOUT, "storage hangs; is its server away?", str(place))
    future: Future[_Result] = Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(call))
        except BaseException as error:  # for the caller
            future.set_exception(error)

    threading.Thread(target=run, name=f"storage {place}", daemon=True).start()
    try:
        return future.result(deadline_s)
    except TimeoutError:
        if future.done():
            raise
        _count(place, 1)
        future.add_done_callback(lambda _: _count(place, -1))
        cause = f"storage has not answered for {deadline_s:g} s; is its server away?"
        raise TimeoutError(errno.ETIMEDOUT, cause, str(place)) from None


def hanging() -> dict[str, int]:
    """How many calls hang now, by place."""
    with _lock:
        return {str(place): number for place, number in _hanging.items() if number}


def _count(place: Path, change: int) -> None:
    with _lock:
        _hanging[place] += change

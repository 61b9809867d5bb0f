"""Calls to storage that may hang: each has a deadline, and few may hang at once.

Whoever reads from a mount that is gone waits in the kernel for good. So a call has a thread to
itself, which the caller leaves behind after the deadline, and which takes another call once it is
done. A call that takes a tenth of that counts as hanging: while as many to one place do as may, no
other waits longer there, and later ones fail at once. Other places are not concerned.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

DEADLINE_S = 10.0
# Of the 40 threads of the API, and others.
MAX_HANGING = 16
_SLOW_SHARE = 0.1
_PLACE_PARTS = 3
# To start one takes longer than most calls, above all where others compute.
_MAX_IDLE = 16
_Result = TypeVar("_Result")
# What idle threads wait at.
_idle: list[SimpleQueue[Callable[[], None]]] = []
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

    with _lock:
        thread = _idle.pop() if _idle else None
    if thread is None:
        thread = SimpleQueue()
        threading.Thread(target=_serve, args=(thread,), name="storage", daemon=True).start()
    thread.put(run)
    slow_s = _SLOW_SHARE * deadline_s
    if wait([future], slow_s).not_done:
        is_last = _count(place, 1) > MAX_HANGING
        future.add_done_callback(lambda _: _count(place, -1))
        wait([future], 0.0 if is_last else deadline_s - slow_s)
    if not future.done():
        cause = f"storage has not answered for {deadline_s:g} s; is its server away?"
        raise TimeoutError(errno.ETIMEDOUT, cause, str(place))
    return future.result()


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    """Make calls one after another, for as long as few threads are idle."""
    while True:
        calls.get()()
        with _lock:
            if len(_idle) >= _MAX_IDLE:
                return
            _idle.append(calls)


def hanging() -> dict[str, int]:
    """How many calls hang now, by place."""
    with _lock:
        return {str(place): number for place, number in _hanging.items() if number}


def _count(place: Path, change: int) -> int:
    with _lock:
        _hanging[place] += change
        return _hanging[place]

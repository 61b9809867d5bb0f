"""Calls to storage that may hang: each has a deadline, and few may hang at once.

Whoever reads from a mount that is gone waits in the kernel for good. So a call has a thread to
itself, which the caller leaves behind after the deadline, and which takes another call once it is
done. A call that takes a tenth of that counts as hanging: while as many to one place do as may, no
other waits longer there, and later ones fail at once. Other places are not concerned, and of one
job only some are counted: whoever writes too much to be read soon keeps nobody else from storage.
Half of a place is for calls that are for no job, such as those by which jobs start.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextvars import copy_context
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

DEADLINE_S = 10.0
# Of the 40 threads of the API, and others; of those for jobs; and of those for one job.
MAX_HANGING, MAX_OWNED, MAX_OF_ONE = 16, 8, 4
_SLOW_SHARE = 0.1
_MOUNTS = Path("/proc/self/mountinfo")
# What is mounted later is looked for as often as that.
_MOUNTS_S = 10.0
# Of a path that no mount is known to hold.
_PLACE_PARTS = 3
# To start one takes longer than most calls, above all where others compute.
_MAX_IDLE = 16
_Result = TypeVar("_Result")
# What idle threads wait at.
_idle: list[SimpleQueue[Callable[[], None]]] = []
# By place and owner; all of a place have the owner "", and all for jobs the owner `_JOBS`.
_JOBS = "jobs"
_hanging: Counter[tuple[Path, str]] = Counter()
_lock = threading.Lock()
_mounts: frozenset[str] = frozenset()
_mounts_read_at = -math.inf


def in_time(
    path: Path, call: Callable[[], _Result], deadline_s: float = DEADLINE_S, owner: str = ""
) -> _Result:
    """What `call` returns or raises; a TimeoutError where the storage of `path` hangs.

    `owner` is the job whose files it reads, if any.
    """
    place = place_of(path)
    _check_room(place, owner)
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
        counted, is_last = _count(place, owner)
        future.add_done_callback(lambda _: _uncount(counted))
        wait([future], 0.0 if is_last else deadline_s - slow_s)
    if not future.done():
        cause = f"storage has not answered for {deadline_s:g} s; is its server away?"
        raise TimeoutError(errno.ETIMEDOUT, cause, str(place))
    return future.result()


def _check_room(place: Path, owner: str) -> None:
    """Raise a TimeoutError where as many calls like this one hang as may."""
    for each, most in _limits(owner).items():
        if _hanging[place, each] >= most:
            cause = f"storage hangs, or what {each} wrote there takes long to read; try again later"
            hung = "storage hangs; is its server away?"
            raise TimeoutError(errno.ETIMEDOUT, cause if each else hung, str(place))


def _limits(owner: str) -> Mapping[str, int]:
    """How many calls like one for `owner` may hang, by whom they are counted for."""
    return {owner: MAX_OF_ONE, _JOBS: MAX_OWNED, "": MAX_HANGING} if owner else {"": MAX_HANGING}


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    """Make calls one after another, for as long as few threads are idle."""
    while True:
        calls.get()()
        with _lock:
            if len(_idle) >= _MAX_IDLE:
                return
            _idle.append(calls)


def place_of(path: Path) -> Path:
    """The mount that holds a path: whatever else is asked for there hangs as well.

    The kernel is asked, never the mount itself. Of what lies on the root it is the first folders.
    """
    global _mounts, _mounts_read_at
    if time.monotonic() >= _mounts_read_at + _MOUNTS_S:
        _mounts, _mounts_read_at = _read_mounts(), time.monotonic()
    found = next((each for each in (path, *path.parents) if str(each) in _mounts), None)
    return found or Path(*path.parts[:_PLACE_PARTS])


def _read_mounts() -> frozenset[str]:
    """Where something is mounted, but for the root; nothing where the kernel does not tell."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return frozenset()
    # Blanks in names are octal numbers.
    names = (line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in lines)
    return frozenset(map(os.fsdecode, names)) - {"/"}


def hanging() -> dict[str, int]:
    """How many calls hang now, by place; of those for one job as many as count."""
    with _lock:
        return {str(place): number for (place, owner), number in _hanging.items() if not owner}


def _count(place: Path, owner: str) -> tuple[list[tuple[Path, str]], bool]:
    """Count a call that hangs; as what it counts, and whether there are too many like it."""
    counted = []
    with _lock:
        for each, most in _limits(owner).items():
            counted.append((place, each))
            if is_one_too_many := _hanging[place, each] >= most:
                break
        _hanging.update(counted)
    return counted, is_one_too_many


def _uncount(counted: list[tuple[Path, str]]) -> None:
    global _hanging
    with _lock:
        _hanging -= Counter(counted)  # which keeps no zeros

"""Processes that do not outlive the pytest that started them, however that ends (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends; for `preexec_fn`."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def if_killed(
    command: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Run `command` if this process dies before the block ends: for what runs detached from it."""
    watcher = subprocess.Popen(
        # The pipe ends without a line when its only writer is dead.
        ["sh", "-c", 'read -r line || exec "$@"', "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.communicate(b"over\n")

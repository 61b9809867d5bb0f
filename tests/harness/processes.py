"""Processes that do not outlive the pytest that started them, however that ends (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends; for `preexec_fn`."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def rank_environment(
    rank: int, world_size: int, store_port: int, interface: str = "lo"
) -> dict[str, str]:
    """Variables by which a gloo rank of this machine joins its world."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": interface,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def run_program(
    command: Sequence[str | Path], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository, with PATH and no home but for what `environment` has."""
    return subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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

"""Processes of the local stack: identity, process trees, termination. Linux only: reads /proc.

A pid alone proves nothing, since the kernel reuses it: a process is known by pid and start time.
A *process tree* is a process, everything below it and everything in a session that one of them
leads: Ray starts each job's driver in a session of its own, so a process group would not hold all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
_KILL_TIMEOUT_S = 5.0
PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """One process, for ever: `start_ticks` is its start time in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class ProcessInfo:
    id: ProcessId
    parent_pid: int
    session: int
    is_zombie: bool


def parse_stat(text: str) -> ProcessInfo:
    """Read the content of /proc/PID/stat; the command in parentheses may hold any character."""
    pid = int(text[: text.index(" ")])
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessInfo(
        ProcessId(pid, start_ticks=int(fields[19])),
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        is_zombie=fields[0] in "ZX",
    )


def find_process(pid: int) -> ProcessInfo | None:
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text())
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        # With hidepid=1 /proc lists processes of other users, and tells nothing of them.
        return None


def identify(pid: int) -> ProcessId:
    """Identity of a running process; raises `ProcessLookupError` if there is none."""
    found = find_process(pid)
    if found is None:
        raise ProcessLookupError(f"no process {pid}")
    return found.id


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs (a zombie does not)."""
    found = find_process(process.pid)
    return found is not None and found.id == process and not found.is_zombie


def process_table() -> list[ProcessInfo]:
    """Every process that runs now, zombies left out."""
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    found = [find_process(pid) for pid in pids]
    return [process for process in found if process is not None and not process.is_zombie]


def process_tree(root: ProcessId, table: Iterable[ProcessInfo]) -> set[ProcessId]:
    """`root` if it is in `table`, all its descendants, and all members of their sessions.

    A dead root's session counts too: its pid is not reused while the session has members. If the
    pid belongs to another process by now, nothing of the tree is left.
    """
    rows = [process for process in table if process.id.start_ticks >= root.start_ticks]
    if any(process.id.pid == root.pid and process.id != root for process in rows):
        return set()
    members: set[ProcessId] = set()
    pids = {root.pid}
    while True:
        found = {
            process.id
            for process in rows
            if process.id.pid in pids or process.parent_pid in pids or process.session in pids
        }
        if found == members:
            return members
        members = found
        pids = {root.pid} | {member.pid for member in members}


def terminate_tree(root: ProcessId, *, grace_s: float) -> set[ProcessId]:
    """End a process tree: SIGTERM to the root, SIGKILL to what is left after `grace_s`.

    Returns those that survived even that, which is empty unless the kernel holds them.
    """
    known = process_tree(root, process_table())
    if root in known:
        _signal(root, signal.SIGTERM)
        _wait_until_gone({root}, grace_s)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        # Members may have been born since the last pass, but not outside the known sessions.
        leaders = {member.pid for member in known}
        known |= {process.id for process in process_table() if process.session in leaders}
        left = {member for member in known if is_alive(member)}
        if not left or time.monotonic() > deadline:
            return left
        for member in left:
            _signal(member, signal.SIGKILL)
        _wait_until_gone(left, timeout_s=1.0)


def _signal(process: ProcessId, number: signal.Signals) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_until_gone(processes: Iterable[ProcessId], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)

"""One attempt at a time on a run folder: a lock file with its owner and a heartbeat.

The owner rewrites `run.lock` in place every `BEAT_S`, with a count that goes up. Whoever finds the
file judges by its own clock whether the count still moves, so clocks of hosts need not agree; where
the owner's process is on the same machine, whether that process is there. A dead owner's lock is
taken over. The file needs nothing of the storage but that a host which opens a file sees what
another one has written and closed: that holds on NFS, where flock depends on a lock service that
many clusters do not run, and where a renamed file may hide in a cache for a minute.

Two that take over at the same moment both write and read again a little later; the one whose name
stayed has it. An owner that was suspended so long that it was given up finds another's name at its
next heartbeat, and knows that it has lost the folder. Its workers save no more: they look for the
owner's name before they put a marker in place.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from trainer.driver.attempt import AttemptFailed
from trainer.failures import EndReason, Failure
from trainer.protocol.run_dir import RunDir

logger = logging.getLogger(__name__)
BEAT_S = 2.0
PATIENCE_S = 10.0
_LOOK_S = 0.5
_SETTLE_S = 0.2
_FILE_BYTES = 1024  # always the same size, so that a beat never leaves half of an older one


class Owner(BaseModel, extra="forbid", frozen=True):
    """Who holds a run folder, as the lock file says.

    `machine` names what process ids count in (one boot of a kernel and a namespace in it), and
    `process_start` tells a process from a later one with the same id.
    """

    name: str
    host: str
    pid: int
    machine: str
    process_start: str
    since: float
    token: str
    beat: int = 0

    @classmethod
    def here(cls, name: str) -> Owner:
        return cls(
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            process_start=_process_start(os.getpid()) or "",
            since=time.time(),
            token=uuid.uuid4().hex,
        )

    @property
    def description(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        return f"{self.name} (process {self.pid} on {self.host}, since {since})"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None when there is none, or it has ended."""
    try:
        # The name in brackets may hold anything; field 22 is the 20th behind it.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except (OSError, ValueError, IndexError):
        return None


def is_gone(owner: Owner, machine: str) -> bool | None:
    """Whether the owner's process has ended; None where `machine` cannot tell."""
    if not machine or owner.machine != machine:
        return None
    return _process_start(owner.pid) != owner.process_start


class RunLock:
    """The lock of one run folder, for the attempt called `name`."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        patience_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = RunDir(run_dir).lock_path
        self._owner = Owner.here(name)
        self._patience_s = patience_s
        self._clock = clock
        self._sleep = sleep

    def acquire(self) -> None:
        """Take the folder, from a dead owner if need be.

        Waits `patience_s` and a beat for a live one to end, then raises `AttemptFailed` with
        `run_in_use`.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            dead = self._watch()
            if dead is not None and self._take_over(dead):
                return

    def beat(self) -> bool:
        """Say that the owner lives; False when another one has the folder."""
        if not self._is_own():
            return False
        self._owner = self._owner.model_copy(update={"beat": self._owner.beat + 1})
        self._write()
        return True

    def release(self) -> None:
        """Give the folder back, unless another one has taken it."""
        if self._is_own():
            self._path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        """Whether this owner has the folder, perhaps with a beat that storage did not take."""
        owner = self._parsed(self._read())
        return owner is not None and owner.token == self._owner.token

    def _create(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.close(descriptor)
        self._write()
        return True

    def _watch(self) -> bytes | None:
        """What a dead owner left in the file; None once the file is gone. Raises for a live one."""
        seen, moved_at = self._read(), self._clock()
        deadline = moved_at + self._patience_s
        while seen is not None:
            owner, now = self._parsed(seen), self._clock()
            is_dead = is_gone(owner, self._owner.machine) if owner else None
            if is_dead or (is_dead is None and now - moved_at >= self._patience_s):
                return seen
            # A beat before the deadline may have been the last one.
            is_alive = is_dead is False or moved_at > deadline
            if is_alive and now >= deadline:
                raise AttemptFailed(Failure(EndReason.RUN_IN_USE, self._refusal(owner)))
            self._sleep(_LOOK_S)
            before, seen = seen, self._read()
            moved_at = moved_at if seen == before else self._clock()
        return None

    def _take_over(self, dead: bytes) -> bool:
        if self._read() != dead:
            return False
        self._write()
        self._sleep(_SETTLE_S)
        if not self._is_own():
            return False
        before = self._parsed(dead)
        logger.warning(
            "run folder %s was left by %s and is taken over",
            self._path.parent,
            before.description if before else "an owner without a name",
        )
        return True

    def _refusal(self, owner: Owner | None) -> str:
        return (
            f"run folder {self._path.parent} is in use by "
            f"{owner.description if owner else 'another attempt'}; two would overwrite each "
            "other's checkpoints. Stop that one, or give this job a run folder of its own"
        )

    def _write(self) -> None:
        with self._path.open("r+b") as file:
            file.write(self._owner.model_dump_json().encode().ljust(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    @staticmethod
    def _parsed(content: bytes | None) -> Owner | None:
        """The owner that the file names; None for one that was just created, or is damaged."""
        try:
            return Owner.model_validate_json(content or b"")
        except ValidationError:
            return None


@contextmanager
def hold_run(run_dir: Path, name: str, on_lost: Callable[[], None]) -> Iterator[None]:
    """Hold `run_dir` for the attempt called `name` while the block runs.

    Raises `AttemptFailed` with `run_in_use`. `on_lost` is called, in a thread, should another
    attempt have taken the folder after all.
    """
    lock = RunLock(run_dir, name, PATIENCE_S)
    lock.acquire()
    is_over = threading.Event()
    thread = threading.Thread(
        target=_keep_beating, args=(lock, is_over, on_lost), name="run-lock", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        try:
            lock.release()
        except OSError as error:  # how the block ended counts more
            logger.warning("the run folder's lock is left to be taken over: %s", error)


def _keep_beating(lock: RunLock, is_over: threading.Event, on_lost: Callable[[], None]) -> None:
    while not is_over.wait(BEAT_S):
        try:
            if not lock.beat():
                logger.error("another attempt has taken this run folder")
                on_lost()
                return
        except OSError as error:
            # Others are patient for some beats; storage may come back.
            logger.warning("the lock of the run folder could not be renewed: %s", error)

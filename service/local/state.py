"""State of the local stack, and the files of its home folder.

HOME/                    $SHARDLOOM_HOME, ~/.shardloom by default
  stack.json             processes and addresses of the running stack (mode 0600)
  stack.lock             held while a stack starts or stops
  ray-token              bearer token of the private Ray cluster (mode 0600)
  logs/service.log, ray.log, host-ADDRESS.log
/tmp/shardloom-HASH/     Ray's own folder; short, because a socket's path has 107 bytes at most
"""

from __future__ import annotations

import fcntl
import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from service.files import home_dir, write_private
from service.local.processes import ProcessId, is_alive

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class StackError(Exception):
    """The local stack cannot be started or ended; the message says why and what to change."""


class StackState(BaseModel):
    """The stack that was started last. Processes are None where they were not ours to start.

    `hosts` are Ray nodes beside the head, by the loopback address that each has to itself.
    `machine` is the name of the one that it runs on.
    """

    url: str
    boot_id: str
    started_at: float
    service: ProcessId | None = None
    ray: ProcessId | None = None
    ray_address: str | None = None
    gcs_address: str | None = None
    hosts: dict[str, ProcessId] = {}
    machine: str = ""

    @property
    def is_running(self) -> bool:
        """Whether everything that was started still runs (since the same boot)."""
        started = [process for process in (self.service, self.ray) if process is not None]
        return (
            self.service is not None
            and self.boot_id == boot_id()
            and all(is_alive(process) for process in started)
        )

    def has_processes_of(self, other: StackState) -> bool:
        """Whether both states are about the same running stack."""
        return (self.service, self.ray) == (other.service, other.ray)


class StackHome:
    """Paths of one local stack, by default that of SHARDLOOM_HOME."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or home_dir()
        self.state_path = self.root / "stack.json"
        self.token_path = self.root / "ray-token"

    @property
    def ray_dir(self) -> Path:
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:10]
        return Path("/tmp") / f"shardloom-{digest}"

    def log_path(self, name: str) -> Path:
        """Log file of `service` or `ray`; the one of the time before ends in `.previous.log`."""
        return self.root / "logs" / f"{name}.log"

    def read_state(self) -> StackState | None:
        """The stored state, whether or not its processes live; None if there is none."""
        with self._explaining(), suppress(FileNotFoundError, NotADirectoryError, ValidationError):
            return StackState.model_validate_json(self.state_path.read_bytes())
        return None

    def write(self, state: StackState) -> None:
        """Store a state in its file, atomically."""
        with self._explaining():
            write_private(self.state_path, state.model_dump_json(indent=2))

    def token(self) -> str:
        """The token of the private Ray cluster, made on first use."""
        if not self.token_path.exists():
            write_private(self.token_path, secrets.token_hex(32))
        return self.token_path.read_text().strip()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the stack's lock; waits while another command starts or stops this stack.

        Raises `StackError` if the folder cannot be had.
        """
        with self._explaining():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (self.root / "stack.lock").open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an `OSError` into a `StackError` that names the folder."""
        try:
            yield
        except OSError as error:
            raise StackError(
                f"cannot keep files in {self.root} ({error.strerror}); check its rights and the "
                "space left, or name another folder with SHARDLOOM_HOME"
            ) from error


def boot_id() -> str:
    """Identifies this boot of the machine: process ids of another one mean nothing."""
    return BOOT_ID_PATH.read_text().strip()

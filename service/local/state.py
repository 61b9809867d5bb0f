"""State of the local stack and of a joined node, and the files of a stack's home folder.

HOME/                    $SHARDLOOM_HOME, ~/.shardloom by default
  stack.json             processes and addresses of the running stack (mode 0600)
  joined-HOSTNAME.json   node by which this machine has joined the cluster of another one
  stack.lock             held while a stack starts or stops
  storage-id             id of the run storage that the head on this machine has had
  ray-token              bearer token of the Ray cluster that is headed here (mode 0600)
  cluster-token          the same of the cluster that this machine has joined (mode 0600)
  logs/service.log, ray.log, host-ADDRESS.log, node-ADDRESS.log
/tmp/shardloom-HASH/     Ray's own folder; short, because a socket's path has 107 bytes at most
"""

from __future__ import annotations

import fcntl
import hashlib
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from service.files import home_dir, write_private
from service.local.processes import ProcessId, is_alive

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class StackError(Exception):
    """The local stack cannot be started or ended; the message says why and what to change."""


class StackState(BaseModel):
    """The stack that was started last. Processes are None where they were not ours to start.

    `hosts` are Ray nodes beside the head, by the loopback address that each has to itself.
    `machine` is the name of the one that it runs on, `head_address` the address at which other
    machines can join; None where none can.
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
    head_address: str | None = None

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


class JoinedState(BaseModel):
    """The node by which this machine has joined the cluster of another one.

    `node_id` is the one by which Ray knows it; None until the head counts it.
    """

    address: str
    head_url: str
    ray_address: str
    gcs_address: str
    boot_id: str
    started_at: float
    node: ProcessId
    node_id: str | None = None

    @property
    def is_running(self) -> bool:
        return self.boot_id == boot_id() and is_alive(self.node)


State = TypeVar("State", bound=BaseModel)


@dataclass(frozen=True)
class StackHome:
    """Paths of one local stack."""

    root: Path

    @classmethod
    def from_environment(cls) -> StackHome:
        return cls(home_dir())

    @property
    def state_path(self) -> Path:
        return self.root / "stack.json"

    @property
    def joined_path(self) -> Path:
        """File of the `JoinedState`: one a machine, as a home may lie on shared storage."""
        return self.root / f"joined-{socket.gethostname()}.json"

    @property
    def token_path(self) -> Path:
        return self.root / "ray-token"

    @property
    def cluster_token_path(self) -> Path:
        return self.root / "cluster-token"

    @property
    def ray_dir(self) -> Path:
        """Ray's folder of sessions, one per stack home."""
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:10]
        return Path("/tmp") / f"shardloom-{digest}"

    def log_path(self, name: str) -> Path:
        """Log file of `service` or `ray`; the one of the time before ends in `.previous.log`."""
        return self.root / "logs" / f"{name}.log"

    def read_state(self) -> StackState | None:
        """The stored state, whether or not its processes live; None if there is none."""
        return self._read(self.state_path, StackState)

    def write(self, state: StackState | JoinedState) -> None:
        """Store a state in its file, atomically."""
        path = self.state_path if isinstance(state, StackState) else self.joined_path
        with self._explaining():
            write_private(path, state.model_dump_json(indent=2))

    def read_joined(self) -> JoinedState | None:
        """By what node this machine has joined, whether or not it lives; None if it has not."""
        return self._read(self.joined_path, JoinedState)

    def _read(self, path: Path, kind: type[State]) -> State | None:
        with self._explaining(), suppress(FileNotFoundError, NotADirectoryError, ValidationError):
            return kind.model_validate_json(path.read_bytes())
        return None

    def token(self) -> str:
        """The token of the private Ray cluster, made on first use."""
        if not self.token_path.exists():
            write_private(self.token_path, secrets.token_hex(32))
        return self.token_path.read_text().strip()

    def keep_cluster_token(self, token: str) -> None:
        """Store the token of a cluster that another machine heads."""
        with self._explaining():
            write_private(self.cluster_token_path, token)

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

"""A Ray cluster of emulated hosts on this machine, and drivers of attempts on it.

Every host is a raylet with a loopback address of its own, by which Ray tells hosts apart. The head
has room for no worker, so that every worker's host may be lost.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from service.local.processes import process_table
from tests.harness.files import records_in
from tests.harness.wait import free_port, wait_for
from trainer.driver.attempt import DriverContext
from trainer.fault_injection import FAULTS, VARIABLE, Fault
from trainer.protocol import events
from trainer.protocol.events import EventModel
from trainer.spec.job import JobSpec

HEAD = "127.0.0.2"
RAY = shutil.which("ray", path=sysconfig.get_path("scripts")) or "ray"
_STORE_BYTES = 80_000_000
_STARTED = b"Ray runtime started."
# A lost host is noticed within seconds rather than minutes, and nobody counts what nobody asks.
RAY_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # On a busy machine a worker that starts slowly is not started again in vain, nor any ahead.
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass
class RayHosts:
    """The cluster: processes of `ray start`, by the address of their host."""

    temp_dir: Path
    environment: dict[str, str]
    port: int
    head_options: Sequence[str]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{HEAD}:{self.port}"

    def start(self, workers_by_address: dict[str, int]) -> None:
        """Start hosts with room for so many workers each, and wait until they are there."""
        # One after the other: those that start at once choose the same names of sockets.
        for address, num_workers in workers_by_address.items():
            wait_for(partial(self._is_up, address, num_workers), f"host {address}", limit_s=180)

    def _is_up(self, address: str, num_workers: int) -> bool:
        """Whether a host is there; starts it, again where Ray gave up on a busy machine."""
        if address not in self.nodes or self.nodes[address].poll() is not None:
            self._start(address, num_workers)
        return _STARTED in self._output(address).read_bytes()

    def _output(self, address: str) -> Path:
        return self.temp_dir.with_name(f"{self.temp_dir.name}-{address}.log")

    def _start(self, address: str, num_workers: int) -> None:
        role = [f"--address={self.address}"]
        if address == HEAD:
            role = ["--head", f"--port={self.port}", *self.head_options]
            role += [f"--temp-dir={self.temp_dir}", "--include-log-monitor=false"]
        command = [
            RAY,
            "start",
            "--block",
            *role,
            f"--node-ip-address={address}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--num-cpus={num_workers}",
            f"--object-store-memory={_STORE_BYTES}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--disable-usage-stats",
        ]
        # NCCL, too, takes it for a host of its own: two ranks may use one GPU then.
        environment = self.environment | {"NCCL_HOSTID": address}
        with self._output(address).open("wb") as output:
            self.nodes[address] = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def kill(self, address: str) -> None:
        """SIGKILL everything that runs on a host."""
        node = self.nodes.pop(address)
        kill_tree(node.pid)
        node.wait()
        self._output(address).unlink()

    def kill_raylet(self, address: str) -> None:
        """SIGKILL a host's raylet only: what it started is left alone for now."""
        os.kill(self.raylet(address), signal.SIGKILL)

    def raylet(self, address: str) -> int:
        """Process of a host's raylet, whether started here or by Ray's autoscaler."""
        below = [pid for node in self.nodes.values() for pid in processes_below(node.pid)]
        (found,) = [pid for pid in below if _is_raylet_of(pid, address)]
        return found

    def end(self) -> None:
        for address in list(self.nodes):
            self.kill(address)


def kill_tree(root: int) -> None:
    """SIGKILL a process that we started, and all below it."""
    for pid in processes_below(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_below(root: int) -> list[int]:
    """A process, then all that it started and that these started, and so on."""
    started: dict[int, list[int]] = {}
    for each in process_table():
        started.setdefault(each.parent_pid, []).append(each.id.pid)
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += started.get(found[-1], [])
    return found


def _is_raylet_of(pid: int, address: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[0].endswith(b"/raylet") and f"--node_ip_address={address}".encode() in words
    return False


@contextmanager
def ray_hosts(
    workers_by_address: dict[str, int],
    faults: Sequence[Fault] = (),
    settings: Mapping[str, str] | None = None,
    head_options: Sequence[str] = ("--include-dashboard=false",),
    port: int | None = None,
) -> Iterator[RayHosts]:
    """A head, and hosts with room for so many workers each, by address.

    `faults` befall the workers on all of them; `settings` are more variables of the environment.
    """
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Ray's sockets lie below it, and their names may not be long.
    temp_dir = Path(tempfile.mkdtemp(prefix="ray-hosts-"))
    injected = {VARIABLE: FAULTS.dump_json(list(faults)).decode()}
    environment = kept | RAY_SETTINGS | token | injected | dict(settings or {})
    hosts = RayHosts(temp_dir, environment, port or free_port(), head_options)
    try:
        hosts.start({HEAD: 0})
        hosts.start(workers_by_address)
        yield hosts
    finally:
        hosts.end()
        shutil.rmtree(temp_dir, ignore_errors=True)


@dataclass
class DriverProcess:
    """The driver of an attempt, as Ray Jobs would start it, and what it and its workers tell."""

    context: DriverContext
    process: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls, hosts: RayHosts, run_dir: Path, spec: JobSpec, attempt_index: int = 0
    ) -> DriverProcess:
        """Start an attempt at `spec` with its files in `run_dir`."""
        environment = {
            "SHARDLOOM_JOB_ID": "job",
            "SHARDLOOM_ATTEMPT_ID": f"job-a{attempt_index}",
            "SHARDLOOM_RUN_DIR": str(run_dir),
            "SHARDLOOM_MAX_WORKER_FAILURES": str(spec.retry.max_failures),
        }
        context = DriverContext.from_env(environment)
        context.files.spec_path.parent.mkdir(parents=True)
        context.files.spec_path.write_text(spec.model_dump_json())
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.driver"],
            env=hosts.environment | environment | {"RAY_ADDRESS": hosts.address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return cls(context, process)

    def told(self, *kinds: type[EventModel]) -> list[Any]:
        """What was told so far of these kinds, by time."""
        return sorted(records_in(self.context.files, *kinds), key=lambda record: record.time)

    @property
    def step(self) -> int:
        return max((each.step for each in self.told(events.Progress)), default=0)

    def log(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}"
            for path in sorted(self.context.files.logs_dir.glob("*.log"))
        )

    def end(self) -> None:
        """SIGKILL it; its workers end with it."""
        self.process.kill()
        self.process.wait()

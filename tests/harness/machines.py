"""Machines of a small network, emulated on this one, that run the `shardloom` command.

Each is a host of `tests.harness.emulated`: an address, a network and a process table of
its own. What they share is the disk, as machines share a network storage.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from service.files import write_private
from service.local.state import StackHome, StackState, boot_id
from tests.harness.emulated import EmulatedHosts, Link, missing_requirement
from tests.harness.wait import scaled, wait_for
from trainer.fault_injection import Fault

REPOSITORY = Path(__file__).parents[2]
COMMAND_TIMEOUT_S = 120.0
RAY_PORT = 6379
_GIGABIT = Link(10**9)


@dataclass(frozen=True)
class Machine:
    """One machine: `shardloom` in a home of its own, with settings (environment variables)."""

    hosts: EmulatedHosts
    index: int
    home: Path
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.hosts.addresses[self.index]

    @property
    def token_path(self) -> Path:
        """Ray's token, which an administrator has carried to all."""
        return self.home.parent / "ray-token"

    def start_ray(self, *options: str) -> None:
        """`ray start` in the background, with one CPU, as docs/guides/machines.md says."""
        where = f"--node-ip-address={self.address}", f"--temp-dir={StackHome(self.home).ray_dir}"
        self.python("-m", "trainer.driver.ray_start", *options, *where, "--num-cpus=1")

    def end_ray(self) -> None:
        """SIGKILL all that was started there."""
        for pid in self.hosts.processes(self.index):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not self.hosts.processes(self.index), f"{self.address} runs nothing")

    def python(self, *arguments: str, **settings: str) -> str:
        """Run Python with Ray's token, as `shardloom` does its commands."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        return self._run(arguments, token | settings)

    def shardloom(self, *arguments: str, **settings: str) -> str:
        """Output of a command; fails with what it said where its exit code is not 0."""
        return self._run(("-m", "service.cli", *arguments), settings)

    def _run(self, arguments: Sequence[str], settings: Mapping[str, str]) -> str:
        prefixes = ("SHARDLOOM_", "RAY_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
        environment = kept | dict(self.settings) | dict(settings)
        environment |= {"SHARDLOOM_HOME": str(self.home), "SHARDLOOM_KEEP_PLANNER": "false"}
        # Into files: what a command leaves running would keep a pipe open.
        self.home.mkdir(parents=True, exist_ok=True)
        output, errors = self.home / "command.out", self.home / "command.err"
        with output.open("wb") as out, errors.open("wb") as err:
            child = self.hosts.start(
                self.index,
                [sys.executable, *arguments],
                REPOSITORY,
                env=environment,
                stdout=out,
                stderr=err,
            )
            code = child.wait(timeout=scaled(COMMAND_TIMEOUT_S))
        said = output.read_text()
        assert code == 0, f"{' '.join(arguments)}: {said}{errors.read_text()}"
        return said

    def cut(self) -> None:
        """Pull its cable: packets are lost, no connection ends by it."""
        self.hosts.cut(self.index)

    def mend(self) -> None:
        self.hosts.mend(self.index)


@contextmanager
def machines(folder: Path, settings: Mapping[str, str]) -> Iterator[Sequence[Machine]]:
    """Three machines, with homes below `folder`; all that runs there ends with them."""
    if reason := missing_requirement():
        pytest.skip(reason)
    write_private(folder / "ray-token", secrets.token_hex(32))
    with EmulatedHosts(3, _GIGABIT) as hosts:
        made = [Machine(hosts, index, folder / f"machine-{index}", settings) for index in range(3)]
        yield made
    for each in made:
        # Ray's folder lies outside the test's own: it has to have a short path.
        shutil.rmtree(StackHome(each.home).ray_dir, ignore_errors=True)


def serve_beside(service: Machine, head: Machine) -> tuple[dict[str, str], dict[str, str]]:
    """Start Ray's head and a service; settings of the service there, and of its administrator."""
    head.start_ray("--head", f"--port={RAY_PORT}", f"--dashboard-host={head.address}")
    attached = {
        "SHARDLOOM_HOST": service.address,
        "SHARDLOOM_RAY_ADDRESS": f"http://{head.address}:8265",
        "SHARDLOOM_RAY_AUTH_TOKEN": head.token_path.read_text(),
    }
    said = service.shardloom("keys", "create", "root", "--admin", **attached)
    (key,) = re.findall(r"shl_\S+", said)
    service.shardloom("up", "--detach", **attached)
    url = f"http://{service.address}:8700"
    return attached, {"SHARDLOOM_URL": url, "SHARDLOOM_API_KEY": key}


def slow_until(release: Path, arg: float) -> Fault:
    """Others wait for group 0 at every sync, so that a job lasts as long as a test needs."""
    return Fault(
        kind="slow", group=0, rank=0, step=0, phase="lookup", arg=arg, times=10**6, until=release
    )


# ---- what `shardloom` keeps on a machine


def keep_stack(home: StackHome, **fields: Any) -> StackState:
    """Write the state of a stack that was started here since the last boot."""
    given = {"url": "http://127.0.0.1:1", "boot_id": boot_id(), "started_at": 1.0, **fields}
    state = StackState(**given)
    home.root.mkdir(parents=True, exist_ok=True)
    home.write(state)
    return state

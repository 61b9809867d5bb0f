"""Installs torchft beside the environment and measures how long its survivors pause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.elastic_jobs import (
    HOSTS,
    RANKS_PER_HOST,
    SYNC_EVERY_STEPS,
    pause_s,
    peer_spec,
)
from tests.benchmarks.report import REPOSITORY, BenchmarkError, run_child
from tests.harness.wait import free_port

_PACKAGE = "torchft==0.2.0"
# What it needs besides torch, which is there.
_NEEDS = ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "opentelemetry-api")
_COMMITS_BEFORE = 40
_COMMITS_AFTER = 10
_TIMEOUT_S = 120.0
_LIGHTHOUSE = {
    "min_replicas": 1,
    "join_timeout_ms": 60_000,  # less, and groups that are a moment late are left out
    "quorum_tick_ms": 20,
    "heartbeat_timeout_ms": 1000,
}
_OPERATION_TIMEOUT_S = 2.0


class NoTorchftError(Exception):
    """torchft cannot run here; the message says why."""


@dataclass(frozen=True)
class TorchftLab:
    """torchft in `site`, a folder of packages."""

    site: Path

    def measure(self, document: Mapping[str, Any]) -> float:
        """SIGKILL of a group: how much longer than usual the others wait for a commit, seconds."""
        with TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with self._groups(document, folder) as victims:
                _wait_for_commits(folder, _COMMITS_BEFORE)
                began = time.time()
                for victim in victims:
                    victim.kill()
                _wait_for_commits(folder, len(_commits(folder)) + _COMMITS_AFTER)
                return pause_s(_commits(folder), began, time.time())

    @contextmanager
    def _groups(
        self, document: Mapping[str, Any], folder: Path
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        """A lighthouse and all ranks; the ranks of the last group."""
        port = free_port()
        config = {
            "spec": peer_spec(document, RANKS_PER_HOST).model_dump(mode="json"),
            "folder": str(folder),
            "num_ranks": RANKS_PER_HOST,
            "store_ports": [free_port() for _ in HOSTS],
            "lighthouse": f"http://127.0.0.1:{port}",
            "sync_every_steps": SYNC_EVERY_STEPS,
            "timeout_s": _OPERATION_TIMEOUT_S,
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        options = [f"--{name}={value}" for name, value in _LIGHTHOUSE.items()]
        lighthouse = [str(self.site / "bin" / "torchft_lighthouse")]
        rank = [sys.executable, "-m", "tests.benchmarks.peers.torchft_groups", str(path)]
        with ExitStack() as stack:
            self._start([*lighthouse, f"--bind=127.0.0.1:{port}", *options], folder, stack)
            ranks = [
                [
                    self._start([*rank, str(group), str(number)], folder, stack)
                    for number in range(RANKS_PER_HOST)
                ]
                for group in range(len(HOSTS))
            ]
            yield ranks[-1]

    def _start(self, command: list[str], folder: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
        variables = {"PYTHONPATH": str(self.site), "GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "warn"}
        log = stack.enter_context((folder / "log.txt").open("ab"))
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | variables, stdout=log, stderr=log
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process


def _commits(folder: Path) -> list[float]:
    """When the first rank of the first group committed."""
    path = folder / "commits-0-0.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line)["time"] for line in lines]


def _wait_for_commits(folder: Path, number: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while len(_commits(folder)) < number:
        if time.monotonic() > deadline:
            log = (folder / "log.txt").read_text(errors="replace")
            raise BenchmarkError(f"torchft did not commit {number} syncs:\n{log[-3000:]}")
        time.sleep(0.05)


def install_torchft(site: Path) -> TorchftLab:
    """Install into the folder `site`; raises `NoTorchftError`."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site)]
    try:
        run_child(*pip, "--no-deps", _PACKAGE, what=f"installing {_PACKAGE}")
        run_child(*pip, *_NEEDS, what=f"installing what {_PACKAGE} needs")
        check = (sys.executable, "-c", "import torchft")
        run_child(*check, what=f"importing {_PACKAGE}", environment={"PYTHONPATH": str(site)})
    except BenchmarkError as error:
        raise NoTorchftError(str(error)) from error
    return TorchftLab(site)

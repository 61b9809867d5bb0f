"""The real service as a process of its own, on the scripted backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

import httpx

from service.backends.fake import FakeBackend
from service.client.transport import RetryPolicy
from tests.harness.processes import die_with_parent
from tests.harness.wait import scaled, wait_for
from trainer.protocol.events import EventBatch
from trainer.protocol.run_dir import AttemptDir, RunDir

START_TIMEOUT_S = 60.0
# Of clients, across a restart: that takes a while on a busy machine.
PATIENT = RetryPolicy(num_retries=400, max_delay_s=0.3)
# Far above what a shutdown takes, so that one which waits for somebody is told from a slow one.
SHUTDOWN_TIMEOUT_S = 60


class ServiceProcess:
    """`python -m service.app` with its state under `home`; it may be killed and started again.

    `settings` are further variables of its environment.
    """

    def __init__(
        self, home: Path, port: int, settings: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.home = home
        self._settings = settings
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.cluster = FakeBackend(home / "fake-cluster")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SHARDLOOM_HOME": str(self.home),
            "SHARDLOOM_PORT": str(self.port),
            "SHARDLOOM_BACKEND": "fake",
            "SHARDLOOM_AUTH": "none",
            "SHARDLOOM_DASHBOARD": "false",
            "SHARDLOOM_KEEP_PLANNER": "false",
            "SHARDLOOM_RECONCILE_INTERVAL_S": "0.05",
            "SHARDLOOM_STREAM_POLL_S": "0.05",
            "SHARDLOOM_SHUTDOWN_TIMEOUT_S": str(SHUTDOWN_TIMEOUT_S),
            **self._settings,
        }

    def start(self) -> None:
        process = self._start([sys.executable, "-m", "service.app"])
        deadline = time.monotonic() + scaled(START_TIMEOUT_S)
        while not self._is_ready():
            assert process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def start_to_be_killed(self, point: str) -> None:
        """Start one that kills itself at a point, as `tests.harness.killed_service` names them.

        Returns when it is ready or dead.
        """
        process = self._start([sys.executable, "-m", "tests.harness.killed_service", point])
        wait_for(
            lambda: process.poll() is not None or self._is_ready(),
            f"a service to be killed {point}",
            START_TIMEOUT_S,
        )

    def wait_until_killed(self) -> None:
        """Wait until the point is reached."""
        assert self._process.wait(scaled(60.0)) == -signal.SIGKILL, self.log()
        self._process = None

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.home / "service.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        return self._process

    def run_to_the_end(self, **changes: str) -> subprocess.CompletedProcess[str]:
        """A service that is expected to end by itself; `changes` are those of its environment."""
        return self._run(["-m", "service.app"], changes)

    def shell(self, *arguments: str, **changes: str) -> str:
        """What a `shardloom` command prints in the service's environment, with these changes."""
        done = self._run(["-m", "service.cli", *arguments], changes)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run(
        self, arguments: Sequence[str], changes: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.environment(), **changes},
            capture_output=True,
            text=True,
            timeout=scaled(60),
            check=False,
        )

    def post_events(self, attempt_id: str, records: EventBatch, token: str = "") -> int:
        """Post a batch as a driver does; returns `next_seq`."""
        response = httpx.post(
            f"{self.url}/v1/attempts/{attempt_id}/events",
            content=records.model_dump_json(),
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {token}"} if token else {}),
            },
            trust_env=False,
            timeout=scaled(10.0),
        )
        response.raise_for_status()
        return int(response.json()["next_seq"])

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def terminate(self) -> float:
        """SIGTERM; returns the seconds that it took to exit."""
        began = time.monotonic()
        self._end(signal.SIGTERM)
        return time.monotonic() - began

    def log(self) -> str:
        return (self.home / "service.log").read_text()

    def attempt_files(self, job_id: str, index: int = 0) -> AttemptDir:
        return RunDir(self.home / "runs" / job_id).attempt(f"{job_id}-a{index}")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(timeout=scaled(2 * SHUTDOWN_TIMEOUT_S))
            self._process = None

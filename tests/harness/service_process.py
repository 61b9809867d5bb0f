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
from tests.harness.wait import scaled
from trainer.protocol.events import EventBatch
from trainer.protocol.run_dir import AttemptDir, RunDir

START_TIMEOUT_S = 60.0
# Of clients, across a restart: that takes a while on a busy machine.
PATIENT = RetryPolicy(num_retries=400, max_delay_s=0.3)
# Far above what a shutdown takes, so that one which waits for somebody is told from a slow one.
SHUTDOWN_TIMEOUT_S = 60


def variables_of_others() -> dict[str, str]:
    """This process's, but for settings of a service: those of a developer name a real database."""
    return {name: text for name, text in os.environ.items() if not name.startswith("SHARDLOOM_")}


class ServiceProcess:
    """`python -m service.app` with its state under `home`; it may be killed and started again.

    `settings` are further variables of its environment. One that `is_killable` ends itself where
    `kill_at` says.
    """

    def __init__(
        self,
        home: Path,
        port: int,
        settings: Mapping[str, str] = MappingProxyType({}),
        *,
        is_killable: bool = False,
    ) -> None:
        self.home = home
        self._is_killable = is_killable
        self._kill_point = home / "kill-point"
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
            **variables_of_others(),
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
        """Returns when it is ready, or dead if it is to be killed."""
        killable = ["tests.harness.killed_service", str(self._kill_point)]
        with (self.home / "service.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", *(killable if self._is_killable else ["service.app"])],
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + scaled(START_TIMEOUT_S)
        while not self._is_ready():
            code = process.poll()
            if self._is_killable and code == -signal.SIGKILL:
                return
            assert code is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def start_if_ended(self) -> None:
        """Have it live on, or again, whatever was asked before."""
        self._kill_point.unlink(missing_ok=True)
        if self._process is None or self._process.poll() is not None:
            self.start()

    def kill_at(self, point: str) -> None:
        """Have the process kill itself at a point, as `tests.harness.killed_service` names them."""
        self._kill_point.write_text(point)

    def start_once_killed(self) -> None:
        """Start it again when its point is reached."""
        assert self._process is not None
        assert self._process.wait(scaled(60.0)) == -signal.SIGKILL, self.log()
        self.start()

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
            return httpx.get(f"{self.url}/readyz", trust_env=False, verify=False).is_success
        except httpx.TransportError:
            return False

    def _end(self, signum: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(signum)
            self._process.wait(timeout=scaled(2 * SHUTDOWN_TIMEOUT_S))
            self._process = None

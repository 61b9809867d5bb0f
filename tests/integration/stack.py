"""A whole Shardloom on this machine: service, store and private Ray, as `shardloom up` runs it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from service.api.schemas import JobDetail
from service.client import ShardloomClient
from service.local import LocalStack
from service.local_state import StackHome
from tests.conftest import EXAMPLE_SPEC
from tests.integration.ports import free_port
from trainer.run_dir import AttemptDir, RunDir
from trainer.spec import apply_overrides

Found = TypeVar("Found")


class Stack:
    """The running stack, its client, and a hand on every process of a job."""

    def __init__(self, home: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SHARDLOOM_")}
        self._local = LocalStack(StackHome(home), kept)
        self._port = free_port()

    def up(self) -> None:
        """Start what does not run."""
        state = self._local.up(port=self._port, report=lambda line: None)
        self.client = ShardloomClient(state.url)

    def down(self) -> None:
        """End everything."""
        self.client.close()
        self._local.down(lambda line: None)

    def jobs_api(self) -> tuple[str, str]:
        """URL and token of the Ray cluster's Jobs API."""
        state = self._local.running()
        assert state is not None and state.ray_address is not None
        return state.ray_address, self._local.home.token()

    @property
    def ray_temp_dir(self) -> Path:
        """Where Ray keeps its sessions, and lists its nodes for Prometheus."""
        return self._local.home.ray_dir

    def kill_service(self) -> None:
        """SIGKILL the service; Ray and the jobs on it go on."""
        state = self._local.running()
        assert state is not None
        assert state.service is not None
        os.kill(state.service.pid, signal.SIGKILL)
        wait_for(lambda: self._local.running() is None, "the service to be gone", timeout_s=10)

    def submit(self, data: Path, *overrides: str) -> JobDetail:
        """Submit the demo job on `data` with `overrides`."""
        document = yaml.safe_load(EXAMPLE_SPEC.read_text())
        return self.client.submit(apply_overrides(document, [f"data.path={data}", *overrides]))

    def wait_for_step(self, job_id: str, step: int, timeout_s: float = 120) -> JobDetail:
        """The job once it has reached `step`; fails when it ends before."""

        def reached() -> JobDetail | None:
            job = self.client.get_job(job_id)
            if job.progress.step >= step:
                return job
            assert not job.status.is_terminal, f"{job.status}: {job.message}"
            return None

        return wait_for(reached, f"step {step}", timeout_s)

    def wait_for_end(self, job_id: str, timeout_s: float = 180) -> JobDetail:
        """The job once it has ended."""
        return self.client.wait(job_id, timeout_s=timeout_s, poll_s=0.3)

    def files(self, job: JobDetail, attempt_index: int = 0) -> AttemptDir:
        """Files of one attempt."""
        return RunDir(Path(job.run_dir)).attempt(f"{job.id}-a{attempt_index}")

    def worker_pid(self, job: JobDetail, rank: int, run_index: int = 0) -> int:
        """Process of a rank, as its log says."""
        text = self.files(job).log_path(f"rank-{rank}").read_text()
        found = re.search(rf"rank {rank} of worker group run {run_index} is process (\d+)", text)
        assert found, text
        return int(found.group(1))

    def driver_pid(self, job: JobDetail, attempt_index: int = 0) -> int:
        """Process of the driver, as its log says."""
        text = self.files(job, attempt_index).log_path("driver").read_text()
        found = re.search(r"is process (\d+)", text)
        assert found, text
        return int(found.group(1))

    def timeline(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        """Data of all timeline events of a kind."""
        return [e.data for e in self.client.iter_events(job_id) if e.kind == kind]


def wait_for(look: Callable[[], Found | None], what: str, timeout_s: float) -> Found:
    """First true answer of `look`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")

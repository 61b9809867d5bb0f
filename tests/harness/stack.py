"""A whole Shardloom on this machine: service, store and private Ray, as `shardloom up` runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from service.client.client import ShardloomClient
from service.local.processes import is_alive, process_table, process_tree
from service.local.stack import LocalStack
from service.local.state import StackError, StackHome, StackState
from service.schemas.jobs import JobDetail
from tests.conftest import EXAMPLE_SPEC
from tests.harness.processes import if_killed
from tests.harness.service_process import variables_of_others
from tests.harness.wait import free_port, scaled, wait_for
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.spec.parse import apply_overrides

_NUM_STARTS = 3


class Stack:
    """The running stack, its client, and a hand on every process of a job."""

    def __init__(self, home: Path) -> None:
        settings = {"SHARDLOOM_AUTH": "none", "SHARDLOOM_KEEP_PLANNER": "false"}
        self._home, self._environment = home, variables_of_others() | settings
        self._local = LocalStack(StackHome(home), self._environment)
        self._port = free_port()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Up until the block ends, or until pytest is killed."""
        down = [sys.executable, "-m", "service.cli", "down"]
        with if_killed(down, self._environment | {"SHARDLOOM_HOME": str(self._home)}):
            self.up()
            try:
                yield
            finally:
                table, state = process_table(), self._local.running()
                roots = [state.ray, state.service] if state is not None else []
                members = {each for root in roots if root for each in process_tree(root, table)}
                self.down()
                # It lies outside of the home: it has to have a short path.
                shutil.rmtree(self._local.home.ray_dir, ignore_errors=True)
            assert [each for each in members if is_alive(each)] == [], "left by `down`"

    def up(self) -> None:
        """Start what does not run; again where Ray gave up starting on a busy machine."""
        for num_tries_left in reversed(range(_NUM_STARTS)):
            try:
                state = self._local.up(port=self._port, report=lambda line: None)
                break
            except StackError:
                if not num_tries_left:
                    raise
        self.client = ShardloomClient(state.url)

    def down(self) -> None:
        self.client.close()
        self._local.down(lambda line: None)

    @property
    def state(self) -> StackState:
        state = self._local.running()
        assert state is not None
        return state

    def jobs_api(self) -> tuple[str, str]:
        """URL and token of the Ray cluster's Jobs API."""
        return self.state.ray_address, self._local.home.token()

    def kill_service(self) -> None:
        """SIGKILL the service; Ray and the jobs on it go on."""
        os.kill(self.state.service.pid, signal.SIGKILL)
        wait_for(lambda: self._local.running() is None, "the service to be gone")

    @contextmanager
    def shardloom(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command of the CLI, killed if it still runs at the end of the block."""
        with subprocess.Popen(
            [sys.executable, "-m", "service.cli", *arguments],
            env=os.environ | {"SHARDLOOM_URL": self.client.base_url, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as command:
            try:
                yield command
            finally:
                command.kill()

    def submit(self, data: Path, *overrides: str) -> JobDetail:
        document = yaml.safe_load(EXAMPLE_SPEC.read_text())
        return self.client.submit(apply_overrides(document, [f"data.path={data}", *overrides]))

    def wait_for_step(self, job_id: str, step: int, limit_s: float = 120) -> JobDetail:
        """The job once it has reached `step`; fails when it ends before."""

        def reached() -> JobDetail | None:
            job = self.client.get_job(job_id)
            if job.progress.step >= step:
                return job
            assert not job.status.is_terminal, f"{job.status}: {job.message}"
            return None

        return wait_for(reached, f"step {step}", limit_s, poll_s=0.2)

    def wait_for_end(self, job_id: str) -> JobDetail:
        return self.client.wait(job_id, timeout_s=scaled(180), poll_s=0.3)

    def files(self, job: JobDetail, attempt_index: int = 0) -> AttemptDir:
        return RunDir(Path(job.run_dir)).attempt(f"{job.id}-a{attempt_index}")

    def pid(self, job: JobDetail, source: str) -> int:
        """First process of the driver or of a rank of the first attempt, as its log says."""
        text = self.files(job).log_path(source).read_text()
        found = re.search(r"is process (\d+)", text)
        assert found, text
        return int(found.group(1))

    def timeline(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        """Data of all timeline events of a kind."""
        return [e.data for e in self.client.iter_events(job_id) if e.kind == kind]

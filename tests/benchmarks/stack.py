"""A private stack for a benchmark: service and Ray in a folder of their own, gone afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from service.client.errors import ShardloomError
from service.domain.models import JobStatus
from service.local.state import StackError
from tests.benchmarks.report import BenchmarkError
from tests.benchmarks.workload import NUM_RATINGS, WORLD_SIZE, job_document, prepared_ratings
from tests.harness import stack as harness

# More reports than a benchmark's job makes, so that the service sends each one by itself.
MAX_REPORTS = 5_000


@dataclass(frozen=True)
class JobRun:
    """A job that succeeded: Unix times of the call that submitted it and of each reported step."""

    submitted_at: float
    time_of_step: dict[int, float]


class Stack(harness.Stack):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "home")
        self.folder = folder

    def run_job(self, document: dict[str, Any]) -> JobRun:
        """Submit a job and wait for its end.

        Raises `BenchmarkError` with the end of the driver's log unless the job succeeded.
        """
        submitted_at = time.time()
        try:
            job = self.client.wait(self.client.submit(document).id)
            if job.status is not JobStatus.SUCCEEDED:
                lines = self.client.read_logs(job.id, source="driver", tail=20).lines
                tail = "\n".join(line.text for line in lines)
                raise BenchmarkError(f"job {job.id} is {job.status}: {job.message}\n{tail}")
            answer = self.client.metrics(job.id, names=["train/loss"], max_points=MAX_REPORTS)
        except ShardloomError as error:
            raise BenchmarkError(f"the service does not do its part: {error}") from error
        times = {point.step: point.time for series in answer.series for point in series.points}
        return JobRun(submitted_at, times)


SETTINGS = {
    "world_size": WORLD_SIZE,
    "shard_group_size": WORLD_SIZE,
    "num_ratings": NUM_RATINGS,
    "backend": "gloo",
    "model": "DLRM of examples/movielens.yaml",
}
"""What the numbers of every job of `stack_and_job` belong to."""


@contextmanager
def stack_and_job(name: str, overrides: list[str]) -> Iterator[tuple[Stack, dict[str, Any]]]:
    """A private stack, gone afterwards, and the document of the job that both sides train.

    Raises `BenchmarkError` if the stack does not start.
    """
    with (
        prepared_ratings() as data,
        TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as folder,
    ):
        stack = Stack(Path(folder))
        try:
            with stack.running():
                yield stack, job_document(name, data, overrides)
        except StackError as error:
            raise BenchmarkError(f"the local stack does not start: {error}") from error

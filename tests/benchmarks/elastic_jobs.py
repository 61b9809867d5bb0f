"""What the benchmarks of lost hosts share: a job of three groups, its driver on Ray, its pauses."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import REPOSITORY, BenchmarkError
from tests.benchmarks.workload import NUM_RATINGS, job_document, resolved_spec
from tests.harness.ray_hosts import DriverProcess, RayHosts, ray_hosts
from trainer.fault_injection import Fault
from trainer.protocol import events
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

HOSTS = ("127.0.0.3", "127.0.0.4", "127.0.0.5")
RANKS_PER_HOST = 2
WORLD_SIZE = len(HOSTS) * RANKS_PER_HOST
SYNC_EVERY_STEPS = 4
BATCH_SIZE = 128
CHECKPOINT_EVERY_STEPS = 50
TIMEOUT_S = 400.0
# Ray's own time-outs, as low as they work; what is not named here is left as it comes.
RAY_TUNED = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def elastic_document(name: str, data: Path, *overrides: str) -> dict[str, Any]:
    """The demo's model as groups of `RANKS_PER_HOST` workers, each group on a host of its own.

    It ends only when it is killed, and writes no checkpoint: nothing could be read from storage.
    """
    return job_document(
        name,
        data,
        [
            f"data.batch_size={BATCH_SIZE}",
            f"parallelism.workers={{min: {RANKS_PER_HOST}, max: {WORLD_SIZE}}}",
            f"parallelism.shard_group_size={RANKS_PER_HOST}",
            "parallelism.placement=inter_host",
            "parallelism.survive={hosts: 1}",
            f"parallelism.sync={{every_steps: {SYNC_EVERY_STEPS}}}",
            "parallelism.dense=auto",
            "training.epochs=1000",
            "training.report_every_steps=1",
            "checkpoint.every_steps=1000000",
            *overrides,
        ],
    )


@dataclass
class OurJob:
    """A driver on a cluster of emulated hosts."""

    hosts: RayHosts
    driver: DriverProcess

    def commit_times(self) -> list[float]:
        return [each.time for each in self.driver.told(events.Progress)]

    def num_current(self) -> int:
        changes = self.driver.told(events.MembershipChanged)
        groups = changes[-1].groups if changes else []
        return sum(group.standing == "current" for group in groups)

    def has_spare(self) -> bool:
        changes = self.driver.told(events.MembershipChanged)
        return bool(changes) and any(each.standing == "spare" for each in changes[-1].groups)

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        """First true answer of `look`; raises `BenchmarkError` in the end."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := look()):
            if self.driver.process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"waited in vain for {what}\n{self.driver.log()[-6000:]}")
            time.sleep(0.05)
        return found

    def wait_for_groups(self, number: int) -> None:
        self.wait_for(lambda: self.num_current() == number, f"{number} groups")
        self.wait_for_commits(10)

    def wait_for_commits(self, number: int) -> None:
        wanted = len(self.commit_times()) + number
        self.wait_for(lambda: len(self.commit_times()) >= wanted, f"{number} more syncs")

    def first(self, kind: type, since: float) -> Any:
        """The first event of a kind after a time, once it is there."""

        def look() -> Any:
            return next((e for e in self.driver.told(kind) if e.time > since), None)

        return self.wait_for(look, kind.__name__)


@contextmanager
def our_job(
    document: Mapping[str, Any], num_hosts: int, armed: Sequence[Fault] = ()
) -> Iterator[OurJob]:
    """Run a job on so many emulated hosts, its workers with `armed` faults."""
    spec = validate_spec(dict(document))
    places = dict.fromkeys(HOSTS[:num_hosts], RANKS_PER_HOST)
    with (
        TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as folder,
        ray_hosts(places, armed) as hosts,
    ):
        driver = DriverProcess.start(hosts, Path(folder, "run"), spec)
        try:
            yield OurJob(hosts, driver)
        finally:
            driver.end()


def settings() -> dict[str, Any]:
    return {
        "hosts": len(HOSTS),
        "workers_per_host": RANKS_PER_HOST,
        "batch_size_per_rank": BATCH_SIZE,
        "sync_every_steps": SYNC_EVERY_STEPS,
        "num_ratings": NUM_RATINGS,
        "model": "DLRM of examples/movielens.yaml",
        "ours": "driver on a local Ray cluster, one TorchTrainer per group",
        "peer": f"TorchTrainer over all workers, checkpoint every {CHECKPOINT_EVERY_STEPS} steps",
        "ray_variables": RAY_TUNED,
    }


def pause_s(times: Sequence[float], began: float, ended: float) -> float:
    """How much longer than usual the longest wait for a commit was, of those within this time.

    Usual is the median of the 20 waits before. Raises `BenchmarkError` without commits around.
    """
    waits = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
    before = [wait for at, wait in waits if at < began][-20:]
    during = [wait for at, wait in waits if began <= at <= ended]
    if not before or not during:
        raise BenchmarkError("there were no syncs before and after what was to be measured")
    return max(0.0, max(during) - statistics.median(before))


def peer_spec(document: Mapping[str, Any], num_workers: int) -> JobSpec:
    """The same model and data in 1D over `num_workers`, for scripts that know no groups."""
    parallelism = {"workers": num_workers, "shard_group_size": num_workers}
    return resolved_spec({**document, "parallelism": parallelism})


def ray_elastic(document: Mapping[str, Any], actions: Sequence[str]) -> list[dict[str, Any]]:
    """What each action cost an elastic Ray Train job; see `peers.ray_elastic`."""
    with TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as folder:
        config = {
            "spec": peer_spec(document, WORLD_SIZE).model_dump(mode="json"),
            "folder": folder,
            "num_nodes": len(HOSTS),
            "workers_per_node": RANKS_PER_HOST,
            "actions": list(actions),
            "checkpoint_every_steps": CHECKPOINT_EVERY_STEPS,
        }
        path, log = Path(folder, "config.json"), Path(folder, "log.txt")
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "tests.benchmarks.peers.ray_elastic", str(path)]
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
        with log.open("w") as output:
            subprocess.run(
                command,
                cwd=REPOSITORY,
                env=os.environ | RAY_TUNED | token,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        result = Path(folder, "RESULT.json")
        if not result.exists():  # ending the cluster may end this process with an error
            raise BenchmarkError(f"elastic Ray Train failed:\n{log.read_text()[-3000:]}")
        return json.loads(result.read_text())

"""Where Ray Train enters a worker. Light to import: the driver pickles this by reference.

The engine behind it (torch, TorchRec) is imported inside the worker only, so that the driver
starts workers a few seconds earlier.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from trainer.process_log import start_log
from trainer.run_dir import RunDir
from trainer.secret_env import NO_SECRETS, SecretEnv
from trainer.spec import JobSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupConfig:
    """Which sharding group a worker belongs to where each is a failure domain of its own.

    `incarnation` counts the lives of the group. The coordinator is the Ray actor `actor_name` in
    the namespace `shardloom`, or listens at `address` (host:port).
    """

    group: int
    incarnation: int
    actor_name: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver gives every worker. `spec` has its tables and its layout resolved.

    `watch_address` (host:port) is where the driver hears the workers that have no `group`.
    """

    spec: JobSpec
    run_dir: Path
    attempt_id: str
    run_index: int
    group: GroupConfig | None = None
    watch_address: str | None = None
    secrets: SecretEnv = NO_SECRETS

    @property
    def run_label(self) -> str:
        """Short name of this life of workers, unique within the job: `a0-r1`, or `a0-r0-g2i1`."""
        return f"{self.attempt_id.rpartition('-')[2]}-r{self.run_index}{self._group_label}"

    @property
    def stream(self) -> str:
        """Event stream of these workers' rank 0."""
        return f"{'group' if self.group else 'workers'}{self._group_label}-{self.run_index}"

    def rank_stream(self, rank: int) -> str:
        """Event stream of what one rank alone knows."""
        return f"rank{rank}{self._group_label}-{self.run_index}"

    def log_source(self, rank: int) -> str:
        """Name of the log file of one rank of these workers."""
        return f"group-{self.group.group}-rank-{rank}" if self.group else f"rank-{rank}"

    @property
    def _group_label(self) -> str:
        return f"-g{self.group.group}i{self.group.incarnation}" if self.group else ""


def ray_train_loop(config: dict[str, WorkerConfig]) -> None:
    """Entry point of a Ray Train worker; raises `WorkerFailure`."""
    import ray.train
    import ray.util

    # A client of a TCPStore looks its peer's name up; where no name server answers, that would
    # stall it for 5 s, and with it every group that waits for this one.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    worker = config["worker"]
    worker.secrets.set_in(os.environ)
    rank = ray.train.get_context().get_world_rank()
    start_log(RunDir(worker.run_dir).attempt(worker.attempt_id).log_path(worker.log_source(rank)))
    logger.info(
        "rank %d of worker group run %d is process %d on %s",
        rank,
        worker.run_index,
        os.getpid(),
        socket.gethostname(),
    )

    # An address, not Ray's node id: what counts for a placement is which ranks share a machine.
    host = ray.util.get_node_ip_address()
    if worker.group:
        from trainer.elastic.group_worker import run_group_worker

        run_group_worker(worker, worker.group, host)
        return

    from trainer.worker import run_worker

    run_worker(worker, host=host)

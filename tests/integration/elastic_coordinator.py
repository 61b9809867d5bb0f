"""The coordinator's process in `elastic_house`: a server, and calls to it through a pipe."""

from __future__ import annotations

import logging
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from tests.benchmarks.emulated_hosts import enter_network
from trainer.ray_worker import WorkerConfig

JOURNAL = "journal.jsonl"


def serve(
    config: WorkerConfig,
    num_groups: int,
    address: str,
    network: Path | None,
    folder: Path,
    pipe: Connection,
) -> None:
    """Coordinate a job until killed: its ranks at `address`, its house at the end of `pipe`.

    `network` is the emulated host's to which `address` belongs, if it does to one.
    """
    if network:
        enter_network(network)
    log = (folder / "coordinator.log").open("a", buffering=1)
    sys.stdout = sys.stderr = log
    logging.basicConfig(
        level=logging.INFO, stream=log, format="%(asctime)s %(message)s", force=True
    )
    coordinator = _start(config, num_groups, address, folder)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            coordinator.stop()
            return
        found = getattr(coordinator, method)
        try:
            pipe.send((None, found(*args) if callable(found) else found))
        except Exception:  # the house raises it again
            pipe.send((traceback.format_exc(), None))


def _start(config: WorkerConfig, num_groups: int, address: str, folder: Path):
    from trainer.data.reader import open_source
    from trainer.elastic.coordinator import CoordinatorConfig, LeasedRows, start_in_thread
    from trainer.elastic.policy import MembershipPolicy
    from trainer.run_dir import RunDir

    spec = config.spec
    source = open_source(spec, Path(spec.data.path) / spec.data.split.train)
    batch_rows = spec.parallelism.group_size * spec.data.batch_size
    max_steps = spec.training.max_steps
    rows = LeasedRows(
        num_rows=source.num_rows,
        epochs=spec.training.epochs,
        rows_per_lease=spec.parallelism.sync.every_steps * batch_rows,
        max_rows=max_steps and max_steps * spec.parallelism.world_size * spec.data.batch_size,
    )
    host, _, port = address.rpartition(":")
    attempt = RunDir(config.run_dir).attempt(config.attempt_id).root
    return start_in_thread(
        CoordinatorConfig(
            policy=MembershipPolicy.of(spec, num_groups),
            rows=rows,
            host=host,
            port=int(port),
            attempt_dir=attempt,
            journal_path=folder / JOURNAL,
        )
    )

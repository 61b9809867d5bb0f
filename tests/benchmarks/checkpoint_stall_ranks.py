"""Blocks of training steps with a save beside them or none: the checkpoint benchmark on a rank.

A block starts at a barrier and lasts until the slowest rank has taken its steps and its save, if
there was one, is on storage with its marker.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.sparse_sync_ranks import Training, slowest_s
from tests.benchmarks.workload import Workload
from trainer.checkpoint.files import RowOrder
from trainer.checkpoint.manager import CheckpointManager, TrainState
from trainer.checkpoint.state_dict import state_to_save
from trainer.protocol.events import Event, Metrics
from trainer.protocol.worker_config import WorkerConfig

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Pair:
    """Seconds of a block of steps with a save beside it, and without; and what saves cost.

    `stall_s` is how long training stood still for the save beside it, and `blocking_s` how long a
    save takes for which training waits.
    """

    with_save_s: float
    without_s: float
    stall_s: float
    blocking_s: float


class SavingRun:
    """Training that can save; rank 0 knows what saves cost."""

    def __init__(self, workload: Workload, run_dir: Path, sync_every_steps: int) -> None:
        self._training = Training(workload)
        self._sync = self._training.sync()
        self._every = sync_every_steps
        self._said: list[Event] = []
        config = WorkerConfig(self._training.spec, run_dir, "bench-a0", 0)
        row_order = RowOrder(0, "")
        self._checkpoints = CheckpointManager(
            config, self._training.groups, self._said.append, row_order
        )
        self._step = 0

    def block(self, num_steps: int, *, saves: bool) -> float:
        """Seconds of `num_steps`, with a save after the first of them."""
        seconds, _ = slowest_s(lambda: self._steps(num_steps, saves))
        return seconds

    def _steps(self, num_steps: int, saves: bool) -> None:
        for number in range(num_steps):
            self._training.train(1)
            self._step += 1
            if self._step % self._every == 0:
                self._sync()
            self._checkpoints.poll()
            if saves and number == 0:
                self.save(is_last=False)
        self._checkpoints.wait()

    def save(self, is_last: bool) -> None:
        """A save; training waits for that of a job's last step."""
        started_s = time.perf_counter()
        self._sync.flush()
        model, optimizers = self._training.model, self._training.optimizers
        self._checkpoints.save(
            state_to_save(model, optimizers.combined),
            TrainState(step=self._step),
            {},
            is_best=False,
            is_last=is_last,
            started_s=started_s,
        )

    def stall_s(self) -> float:
        """Of the newest save; zero on ranks that do not speak."""
        found = [event.values for event in self._said if isinstance(event, Metrics)]
        return found[-1]["checkpoint/stall_s"] if found else 0.0

    def close(self) -> None:
        self._checkpoints.close()
        self._sync.close()


def measure(
    workload: Workload, run_dir: Path, num_steps: int, sync_every_steps: int, num_pairs: int
) -> list[Pair]:
    """What blocks cost with and without a save; who goes first alternates."""
    run = SavingRun(workload, run_dir, sync_every_steps)
    run.block(WARM_UP_STEPS, saves=True)
    pairs = []
    for pair in range(num_pairs):
        seconds = {}
        for saves in (True, False) if pair % 2 == 0 else (False, True):
            seconds[saves] = run.block(num_steps, saves=saves)
            if saves:
                stall_s = run.stall_s()
        blocking_s, _ = slowest_s(lambda: run.save(is_last=True))
        pairs.append(Pair(seconds[True], seconds[False], stall_s, blocking_s))
    run.close()
    return pairs

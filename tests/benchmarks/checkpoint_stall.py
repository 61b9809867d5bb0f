"""Step time with a checkpoint every 100 steps, over none.

python -m tests.benchmarks.checkpoint_stall --json FILE

Both sides train the same tables in the same processes, in blocks of 100 steps that take turns. Ours
saves once in each block: a copy in memory at the step, files, checksums and marker beside the
training, all of it inside the block. A second table shows what the save costs where training waits
for it instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks import checkpoint_stall_ranks as ranks
from tests.benchmarks.report import BenchmarkReport, Goal, Run, log, main
from tests.benchmarks.workload import Workload
from tests.harness.ranks import run_ranks
from trainer.checkpoint.files import list_committed
from trainer.protocol.run_dir import RunDir

NAME = "checkpoint_stall"
PAIRS = 12
WORKLOAD = Workload(world_size=4, shard_group_size=2, table_rows=20_000)
STEPS = 100
SYNC_EVERY_STEPS = 16
TIMEOUT_S = 900
GOAL = Goal("step_time", "step_s", "s", 1.02, "lower", "the same steps without checkpoints")


def run(num_pairs: int) -> BenchmarkReport:
    with TemporaryDirectory(prefix="shardloom-bench-") as folder:
        log(f"{WORKLOAD.world_size} ranks, {num_pairs} pairs of {STEPS} steps")
        pairs = run_ranks(
            ranks.measure,
            WORKLOAD.world_size,
            *(WORKLOAD, Path(folder), STEPS, SYNC_EVERY_STEPS, num_pairs),
            timeout_s=TIMEOUT_S,
        )[0]
        newest = list_committed(RunDir(Path(folder)).checkpoints_dir)[-1]
    settings = _settings() | {"checkpoint_bytes": newest.commit.size_bytes}
    return BenchmarkReport(NAME, settings, [GOAL], runs_of(pairs), rows_of(pairs))


def runs_of(pairs: Sequence[ranks.Pair]) -> list[Run]:
    return [
        each
        for number, pair in enumerate(pairs)
        for each in (
            Run(number, "ours", {"step_s": pair.with_save_s / STEPS}),
            Run(number, "peer", {"step_s": pair.without_s / STEPS}),
        )
    ]


def rows_of(pairs: Sequence[ranks.Pair]) -> list[dict[str, Any]]:
    """Medians by way of saving: how long training stands still, and the step time over none.

    A save that training waits for costs its own time, spread over the steps between two.
    """
    without_s = median(pair.without_s for pair in pairs)
    beside_s = median(pair.with_save_s for pair in pairs)
    blocking_s = median(pair.blocking_s for pair in pairs)
    return [
        {
            "save": "asynchronous",
            "stall_s": round(median(pair.stall_s for pair in pairs), 4),
            "step_time_over_none": round(beside_s / without_s, 4),
        },
        {
            "save": "blocking",
            "stall_s": round(blocking_s, 4),
            "step_time_over_none": round(1 + blocking_s / without_s, 4),
        },
    ]


def _settings() -> dict[str, Any]:
    return {
        "workload": asdict(WORKLOAD),
        "steps_per_checkpoint": STEPS,
        "steps_between_syncs": SYNC_EVERY_STEPS,
        "optimizer": "row_wise_adagrad",
        "sharding": "table_wise",
        "backend": "gloo, one thread a rank",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

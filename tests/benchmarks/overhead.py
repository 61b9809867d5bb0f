"""Rows per second of a job through the service, over a bare TorchRec script.

python -m tests.benchmarks.overhead --json FILE

Both sides train the same DLRM on the same ratings with 4 gloo ranks, every table sharded the same
way over all of them. Ours is a job sent to a running service: Ray Train workers that read, count,
report and post. The peer is `peers/bare_torchrec.py`, with its batches in memory before the clock
starts. Both are timed by the wall clock over the very same steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Values,
    log,
    main,
    run_pairs,
)
from tests.benchmarks.stack import Stack, private_stack
from tests.benchmarks.workload import (
    NUM_RATINGS,
    WORLD_SIZE,
    job_document,
    prepared_ratings,
    resolved_spec,
)

NAME = "overhead"
BATCH_SIZE = 512
REPORT_EVERY_STEPS = 50
FIRST_STEP = 100
LAST_STEP = 900
PAIRS = 3
GOAL = Goal(
    key="rows_per_s",
    measured="rows_per_s",
    unit="rows/s",
    goal=0.97,
    better="higher",
    peer_name="bare TorchRec script",
)


def run(num_pairs: int) -> BenchmarkReport:
    """Measure; raises `BenchmarkError` when either side cannot run."""
    with prepared_ratings() as data, private_stack() as stack:
        document = job_document(NAME, data, _overrides())
        runs = run_pairs(
            num_pairs,
            lambda: measure_ours(stack, document),
            lambda: measure_peer(stack, document),
            log,
        )
    return BenchmarkReport(NAME, _settings(), [GOAL], runs)


def _overrides() -> list[str]:
    return [
        f"data.batch_size={BATCH_SIZE}",
        "training.epochs=1000",
        f"training.max_steps={LAST_STEP}",
        f"training.report_every_steps={REPORT_EVERY_STEPS}",
        f"checkpoint.every_steps={LAST_STEP}",
    ]


def measure_ours(stack: Stack, document: dict[str, Any]) -> Values:
    """Run a job through the service; times are those of its own reports."""
    time_of_step = stack.run_job(document).time_of_step
    return _values(time_of_step[LAST_STEP] - time_of_step[FIRST_STEP])


def measure_peer(stack: Stack, document: dict[str, Any]) -> Values:
    """Run the bare script, while the service and its Ray stand idle."""
    spec_path, result_path = stack.folder / "spec.json", stack.folder / "peer.json"
    spec_path.write_text(resolved_spec(document).model_dump_json())
    result_path.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "tests.benchmarks.peers.bare_torchrec", str(spec_path)),
        *(str(FIRST_STEP), str(LAST_STEP), str(result_path)),
    ]
    repository = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode or not result_path.exists():
        raise BenchmarkError(f"the bare TorchRec script failed:\n{done.stderr[-3000:]}")
    return _values(json.loads(result_path.read_text())["elapsed_s"])


def _values(elapsed_s: float) -> Values:
    rows = (LAST_STEP - FIRST_STEP) * BATCH_SIZE * WORLD_SIZE
    return {"rows_per_s": rows / elapsed_s, "elapsed_s": elapsed_s}


def _settings() -> dict[str, Any]:
    return {
        "world_size": WORLD_SIZE,
        "shard_group_size": WORLD_SIZE,
        "batch_size_per_rank": BATCH_SIZE,
        "measured_steps": [FIRST_STEP, LAST_STEP],
        "report_every_steps": REPORT_EVERY_STEPS,
        "num_ratings": NUM_RATINGS,
        "backend": "gloo",
        "model": "DLRM of examples/movielens.yaml",
        "ours": "job through POST /v1/jobs, no validation, one checkpoint after the last step",
        "peer": "4 processes, batches of one epoch in memory, no metrics, reports or checkpoints",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

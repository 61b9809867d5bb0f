"""Rows per second of a job through the service, over a bare TorchRec script.

python -m tests.benchmarks.overhead --json FILE

Both sides train the same DLRM on the same ratings with 4 gloo ranks, every table sharded the same
way over all of them. Ours is a job sent to a running service: Ray Train workers that read, count,
report and post. The peer is `peers/bare_torchrec.py`, plain or pipelined, whichever is faster here,
with its batches in memory before the clock starts. Both are timed by the wall clock over the very
same steps.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.benchmarks.report import BenchmarkReport, Goal, Values, log, main, run_module, run_pairs
from tests.benchmarks.stack import SETTINGS, Stack, stack_and_job
from tests.benchmarks.workload import WORLD_SIZE, resolved_spec

NAME = "overhead"
BATCH_SIZE = 512
REPORT_EVERY_STEPS = 50
FIRST_STEP = 100
LAST_STEP = 500
PAIRS = 5
GOAL = Goal("rows_per_s", "rows_per_s", "rows/s", 0.97, "higher", "bare TorchRec script")
OVERRIDES = [
    f"data.batch_size={BATCH_SIZE}",
    "training.epochs=1000",
    f"training.max_steps={LAST_STEP}",
    f"training.report_every_steps={REPORT_EVERY_STEPS}",
    f"checkpoint.every_steps={LAST_STEP}",
]


def run(num_pairs: int) -> BenchmarkReport:
    """Measure; raises `BenchmarkError` when either side cannot run."""
    with stack_and_job(NAME, OVERRIDES) as (stack, document):
        speeds = {
            steps: measure_peer(stack, document, steps)["rows_per_s"]
            for steps in ("plain", "pipelined")
        }
        log(f"bare script: {speeds}")
        faster = max(speeds, key=lambda steps: speeds[steps])
        runs = run_pairs(
            num_pairs,
            lambda: measure_ours(stack, document),
            lambda: measure_peer(stack, document, faster),
        )
    return BenchmarkReport(NAME, _settings() | {"peer_steps": faster}, [GOAL], runs)


def measure_ours(stack: Stack, document: dict[str, Any]) -> Values:
    """Run a job through the service; times are those of its own reports."""
    time_of_step = stack.run_job(document).time_of_step
    return _values(time_of_step[LAST_STEP] - time_of_step[FIRST_STEP])


def measure_peer(stack: Stack, document: dict[str, Any], steps: str) -> Values:
    """Run the bare script, while the service and its Ray stand idle."""
    spec_path = stack.folder / "spec.json"
    spec_path.write_text(resolved_spec(document).model_dump_json())
    found = run_module("peers.bare_torchrec", spec_path, FIRST_STEP, LAST_STEP, steps)
    return _values(found["elapsed_s"])


def _values(elapsed_s: float) -> Values:
    rows = (LAST_STEP - FIRST_STEP) * BATCH_SIZE * WORLD_SIZE
    return {"rows_per_s": rows / elapsed_s, "elapsed_s": elapsed_s}


def _settings() -> dict[str, Any]:
    return SETTINGS | {
        "batch_size_per_rank": BATCH_SIZE,
        "measured_steps": [FIRST_STEP, LAST_STEP],
        "report_every_steps": REPORT_EVERY_STEPS,
        "ours": "job through POST /v1/jobs, no validation, one checkpoint after the last step",
        "peer": "4 processes, batches of one epoch in memory, no metrics, reports or checkpoints",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

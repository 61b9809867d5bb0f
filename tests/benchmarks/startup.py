"""Seconds from submitting a job to its first training step, over a raw Ray Train script.

python -m tests.benchmarks.startup --json FILE

Both sides train the same DLRM on the same ratings with 4 gloo workers, as jobs of the same running
Ray cluster. Ours goes through POST /v1/jobs. The peer is `peers/raw_ray_train.py`, which Ray's own
JobSubmissionClient submits. The clock starts when the submitting call begins and ends when rank 0
has finished its first optimizer step; ours has by then also computed and reported its metrics.
Each run starts on a machine that is idle, and after an earlier job: our workers are warm then.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Values,
    log,
    main,
    run_pairs,
)
from tests.benchmarks.stack import SETTINGS, Stack, stack_and_job
from tests.benchmarks.workload import resolved_spec

NAME = "startup"
PEER_SCRIPT = Path(__file__).parent / "peers" / "raw_ray_train.py"
NUM_STEPS = 5
PAIRS = 4
POLL_S = 0.5
# The machine is idle when it was for so many seconds in a row.
IDLE_PERCENT = 25.0
NUM_IDLE_S = 3
GOAL = Goal(
    "submit_to_first_step", "submit_to_first_step_s", "s", 0.6, "lower", "raw Ray Train script"
)
OVERRIDES = [
    f"training.max_steps={NUM_STEPS}",
    "training.report_every_steps=1",
    f"checkpoint.every_steps={NUM_STEPS}",
]


def run(num_pairs: int) -> BenchmarkReport:
    with stack_and_job(NAME, OVERRIDES) as (stack, document):
        ours, peer = partial(measure_ours, stack, document), partial(measure_peer, stack, document)
        # Files that nobody has read yet would burden whoever goes first.
        for measure in (ours, peer):
            log(f"warm-up, not counted: {measure()}")
        runs = run_pairs(num_pairs, ours, peer)
    return BenchmarkReport(NAME, _settings(), [GOAL], runs)


def measure_ours(stack: Stack, document: dict[str, Any]) -> Values:
    """Submit a job to the service; its first step's time is that of its own report."""
    _wait_for_idle_machine()
    job = stack.run_job(document)
    return {"submit_to_first_step_s": job.time_of_step[1] - job.submitted_at}


def measure_peer(stack: Stack, document: dict[str, Any]) -> Values:
    _wait_for_idle_machine()
    folder = stack.folder / f"peer-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    config_path, first_step_path = folder / "config.json", folder / "first-step"
    config = {
        "spec": resolved_spec(document).model_dump(mode="json"),
        "storage_path": str(folder / "storage"),
        "num_steps": NUM_STEPS,
        "first_step_path": str(first_step_path),
    }
    config_path.write_text(json.dumps(config))
    address, token = stack.jobs_api()
    client = JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"})
    submitted_at = time.time()
    job_id = client.submit_job(
        entrypoint=shlex.join([sys.executable, str(PEER_SCRIPT), str(config_path)])
    )
    _wait_for_end(client, job_id)
    return {"submit_to_first_step_s": float(first_step_path.read_text()) - submitted_at}


def _wait_for_idle_machine() -> None:
    num_idle_s = 0
    while num_idle_s < NUM_IDLE_S:
        num_idle_s = num_idle_s + 1 if psutil.cpu_percent(1.0) < IDLE_PERCENT else 0


def _wait_for_end(client: JobSubmissionClient, job_id: str) -> None:
    while not (status := client.get_job_status(job_id)).is_terminal():
        time.sleep(POLL_S)
    if status is not JobStatus.SUCCEEDED:
        tail = client.get_job_logs(job_id)[-3000:]
        raise BenchmarkError(f"the raw Ray Train script ended as {status}:\n{tail}")


def _settings() -> dict[str, Any]:
    return SETTINGS | {
        "warm_up": "one run of each side, not counted; then each starts on an idle machine",
        "ours": "POST /v1/jobs to the report of step 1",
        "peer": "JobSubmissionClient.submit_job to the end of step 1, on the same Ray cluster",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

"""What the service hands to the cluster for an attempt: its spec file, command and environment."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from service.backends.base import Submission
from service.domain import Attempt, Job
from service.lifecycle import remaining_failures
from service.settings import Settings
from trainer.run_dir import RunDir

STOP_WAIT_S = 20


def run_dir_of(settings: Settings, job_id: str) -> RunDir:
    """Where a job keeps its files."""
    return RunDir(settings.runs_dir / job_id)


def submission_of(job: Job, attempt: Attempt, settings: Settings) -> Submission:
    """The driver's command and environment for an attempt."""
    return Submission(
        attempt_id=attempt.id,
        job_id=job.id,
        entrypoint=f"{shlex.quote(settings.trainer_python)} -m trainer.driver",
        env={
            "SHARDLOOM_JOB_ID": job.id,
            "SHARDLOOM_ATTEMPT_ID": attempt.id,
            "SHARDLOOM_RUN_DIR": str(run_dir_of(settings, job.id).root),
            "SHARDLOOM_SERVICE_URL": settings.service_url,
            "SHARDLOOM_MAX_WORKER_FAILURES": str(remaining_failures(job)),
            "PYTHONUNBUFFERED": "1",
            # Ray's own way to stop a job is SIGTERM and 3 s later SIGKILL: too short to report.
            "RAY_JOB_STOP_SIGNAL": "SIGINT",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        },
        metadata={"shardloom_job_id": job.id, "shardloom_job_name": job.name},
    )


def write_spec(job: Job, attempt: Attempt, settings: Settings) -> Path:
    """Write the spec that the attempt will run, whole or not at all; raises OSError."""
    path = run_dir_of(settings, job.id).attempt(attempt.id).spec_path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(job.spec.model_dump_json(indent=2))
        file.flush()
        os.fsync(file.fileno())
    return partial.replace(path)

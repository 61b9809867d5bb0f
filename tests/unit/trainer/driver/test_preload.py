"""What makes a process fit for the workers of any job."""

from __future__ import annotations

import json
import subprocess
import sys

from trainer.driver.preload import share_environment

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def _environment(attempt: str) -> dict[str, str]:
    variables = {
        "SHARDLOOM_ATTEMPT_ID": attempt,
        "SHARDLOOM_ATTEMPT_TOKEN": f"token of {attempt}",
        "SHARDLOOM_LOG_MAX_BYTES": "1000",
    }
    config = {"runtime_env": {"env_vars": variables}, "metadata": {"shardloom_job_id": "job-1"}}
    return variables | {JOB_CONFIG: json.dumps(config)}


def test_workers_of_all_attempts_get_one_environment() -> None:
    first, second = _environment("job-1-a0"), _environment("job-1-a1")
    for environment in (first, second):
        share_environment(environment)
    assert first[JOB_CONFIG] == second[JOB_CONFIG]
    shared = json.loads(first[JOB_CONFIG])
    assert shared["runtime_env"] == {"env_vars": {"SHARDLOOM_LOG_MAX_BYTES": "1000"}}
    assert shared["metadata"] == {"shardloom_job_id": "job-1"}
    assert first["SHARDLOOM_ATTEMPT_TOKEN"] == "token of job-1-a0"


def test_a_driver_outside_of_a_job_is_left_as_it_is() -> None:
    environment = {"HOME": "/home/me"}
    share_environment(environment)
    assert environment == {"HOME": "/home/me"}


def test_processes_that_are_no_workers_preload_nothing() -> None:
    code = "import sys, trainer.driver.preload; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"

"""How Ray's processes start: nodes that are late are waited for, and what workers preload."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainer.driver.preload import share_environment
from trainer.driver.ray_start import patient

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def _absent(gcs_address: str, node_id: str) -> object:
    raise RuntimeError("no such node")


def test_a_node_that_is_late_is_found() -> None:
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node_id": "n"}])
    pauses: list[float] = []

    def get_node(gcs_address: str, node_id: str) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    find = patient(get_node, lambda: True, patience_s=60, sleep=pauses.append)
    assert find("127.0.0.2:6379", "n") == {"node_id": "n"}
    assert len(pauses) == 2


@pytest.mark.parametrize(("patience_s", "raylet_lives"), [(0, True), (60, False)])
def test_a_node_that_cannot_come_is_given_up(patience_s: float, raylet_lives: bool) -> None:
    find = patient(_absent, lambda: raylet_lives, patience_s)
    with pytest.raises(RuntimeError, match="no such node"):
        find("127.0.0.2:6379", "n")


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

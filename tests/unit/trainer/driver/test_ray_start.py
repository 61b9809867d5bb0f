"""How Ray's processes start: nodes that are late are waited for, and what workers preload."""

from __future__ import annotations

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest

from trainer.driver.preload import share_environment
from trainer.driver.ray_start import patient
from trainer.protocol.versions import versions_here

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def test_a_node_that_is_late_is_found() -> None:
    pauses: list[float] = []
    get_node = Mock(side_effect=[RuntimeError("not yet")] * 2 + [{"node_id": "n"}])
    find = patient(get_node, lambda: True, patience_s=60, sleep=pauses.append)
    assert find("127.0.0.2:6379", "n") == {"node_id": "n"}
    assert len(pauses) == 2


@pytest.mark.parametrize(("patience_s", "raylet_lives"), [(0, True), (60, False)])
def test_a_node_that_cannot_come_is_given_up(patience_s: float, raylet_lives: bool) -> None:
    find = patient(Mock(side_effect=RuntimeError("no such node")), lambda: raylet_lives, patience_s)
    with pytest.raises(RuntimeError, match="no such node"):
        find("127.0.0.2:6379", "n")


def _environment(attempt: str) -> dict[str, str]:
    variables = {
        "SHARDLOOM_ATTEMPT_ID": attempt,
        "SHARDLOOM_AVOIDED_HOSTS": f"hosts of {attempt}",
        "SHARDLOOM_LOG_MAX_BYTES": "1000",
        "SHARDLOOM_ATTEMPT_TOKEN": f"token of {attempt}",
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
    assert first["SHARDLOOM_AVOIDED_HOSTS"] == "hosts of job-1-a0"
    outside_of_a_job = {"HOME": "/home/me"}
    share_environment(outside_of_a_job)
    assert outside_of_a_job == {"HOME": "/home/me"}


def test_processes_that_are_no_workers_preload_nothing() -> None:
    code = "import sys, trainer.driver.preload; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_code_that_is_replaced_after_workers_preloaded_is_not_their_version() -> None:
    code = (
        "from trainer.driver import preload; preload._ENGINE = (); preload.import_engine(); "
        "from trainer.protocol import versions; versions._CODE /= 'driver'; "
        "print(versions.versions_here())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(versions_here())


def test_garbage_collections_leave_out_what_workers_preload() -> None:
    code = (
        "import gc; from trainer.driver import preload; preload._ENGINE = ('decimal',); "
        "preload.import_engine(); print(gc.isenabled(), len(gc.get_objects()) < 100)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]

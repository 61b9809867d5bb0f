"""`shardloom cluster`, and the names that the shell completes."""

from __future__ import annotations

import json

import pytest

from service.commands.context import job_names
from tests.unit.service.api_samples import job_body
from tests.unit.service.fake_service import FakeService, shardloom

CLUSTER = {
    "reachable": True,
    "backend": "ray_jobs",
    "address": "http://127.0.0.1:8265",
    "message": "Ray 2.60.0",
    "max_workers": 32,
    "hosts": [
        {"address": "10.0.0.7", "num_cpus": 16.0, "num_gpus": 8.0, "memory_bytes": 512 << 30}
    ],
}


def test_the_cluster_is_shown_with_its_hosts(service: FakeService) -> None:
    service.cluster = CLUSTER
    result = shardloom("cluster")
    assert result.exit_code == 0, result.output
    for word in ("ray_jobs at http://127.0.0.1:8265 answers", "Ray 2.60.0", "10.0.0.7", "16", "8"):
        assert word in result.stdout
    assert "grows by itself to room for 32 workers" in result.stdout
    assert json.loads(shardloom("cluster", "--json").stdout) == CLUSTER


def test_a_cluster_that_does_not_answer_is_told_by_the_exit_code(service: FakeService) -> None:
    service.cluster = {**CLUSTER, "reachable": False, "message": "no answer", "hosts": []}
    result = shardloom("cluster")
    assert result.exit_code == 3
    assert "does not answer" in result.stdout


@pytest.mark.parametrize(
    ("typed", "offered"), [("", ["ratings"]), ("rat", ["ratings"]), ("x", []), ("job-", ["job-1"])]
)
def test_the_shell_completes_names_and_where_asked_for_ids(
    service: FakeService, typed: str, offered: list[str]
) -> None:
    service.looks = [job_body(id="job-1")]
    assert [name for name, _ in job_names(typed)] == offered


def test_nothing_is_completed_where_nobody_answers(service: FakeService) -> None:
    service.is_down = True
    assert job_names("") == []

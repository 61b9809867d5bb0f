"""A job with a cluster of its own through the front door, on a Ray that really runs.

The API server is ours or that of SHARDLOOM_TEST_KUBECONFIG, the operator a stand-in, the service
a process of its own; the trainer, its driver and workers are real and run on the stack's Ray.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client.client import ShardloomClient
from service.domain.models import JobStatus
from tests.conftest import EXAMPLE_SPEC
from tests.harness.kube.backends import KubeRayBackends, rules
from tests.harness.kube.operator import operator_for
from tests.harness.service_process import ServiceProcess
from tests.harness.stack import Stack
from tests.harness.wait import free_port, wait_for

pytestmark = pytest.mark.slow

OWN = (
    "resources.cluster=own",
    "parallelism.workers=2",
    "parallelism.shard_group_size=2",
    "parallelism.sync=null",
    "data.batch_size=32",
    "training.report_every_steps=4",
)


@pytest.fixture
def service(backends: KubeRayBackends, stack: Stack, tmp_path: Path) -> Iterator[ServiceProcess]:
    """The service with the KubeRay backend, and an operator whose clusters are the stack's Ray."""
    cluster, (address, token) = backends.cluster, stack.jobs_api()
    config = cluster.kubeconfig(tmp_path / "config", cluster.token_for("service", rules()))
    settings = {
        "SHARDLOOM_BACKEND": "kuberay",
        "SHARDLOOM_KUBECONFIG": config,
        "SHARDLOOM_KUBERAY_NAMESPACE": cluster.namespace,
        "SHARDLOOM_RAY_ADDRESS": address,
        "SHARDLOOM_RAY_AUTH_TOKEN": token,
        "SHARDLOOM_RECONCILE_INTERVAL_S": "0.5",
    }
    home = tmp_path / "home"
    home.mkdir()
    with (
        operator_for(cluster, ray_address=address, ray_token=token),
        ServiceProcess(home, free_port(), settings) as process,
    ):
        yield process


def _spec(data: Path, *changes: str) -> list[str]:
    options = [f"data.path={data}", *OWN, *changes]
    return [str(EXAMPLE_SPEC), *(f"--set={each}" for each in options)]


def _shardloom(service: ServiceProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("shardloom"))
    command = [program, *arguments, "--url", service.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


# Two starts of a driver with its workers, and two of the service.
@pytest.mark.timeout(480)
def test_a_job_runs_on_a_cluster_of_its_own_and_another_is_cancelled_there(
    backends: KubeRayBackends, service: ServiceProcess, small_movielens: Path
) -> None:
    seen = _shardloom(service, "cluster")
    assert "kuberay at http" in seen.stdout and "ray.io/v1" in seen.stdout, seen
    short = ("training.epochs=1", "training.max_steps=12", "training.validate_every_steps=12")
    ran = _shardloom(service, "run", *_spec(small_movielens, *short))
    assert ran.returncode == 0, ran.stdout + ran.stderr + service.log()
    found = re.search(r"submitted (job-\w+)", ran.stdout)
    assert found is not None, ran.stdout
    with ShardloomClient(service.url) as client:
        job = client.get_job(found[1])
        assert (job.status, job.progress.step) == (JobStatus.SUCCEEDED, 12)
        rayjob = backends.rayjobs()[f"{job.id}-a0"]
        assert rayjob["status"]["jobDeploymentStatus"] == "Complete"
        assert rayjob["metadata"]["labels"]["shardloom.io/job"] == job.id
        assert "TOKEN" not in str(rayjob), "tokens are in the Secret alone"
        _cancel_a_long_one(client, backends, service, small_movielens)


def _cancel_a_long_one(
    client: ShardloomClient,
    backends: KubeRayBackends,
    service: ServiceProcess,
    data: Path,
) -> None:
    """Cancel a job that runs, by a service that was killed meanwhile and knows nothing of it."""
    long = ("training.epochs=1000", "training.max_steps=100000", "name=long")
    submitted = _shardloom(service, "submit", *_spec(data, *long))
    job_id = submitted.stdout.strip()
    wait_for(lambda: client.get_job(job_id).progress.step, "steps", 180)
    service.kill()
    service.start()
    client.cancel(job_id)
    job = client.wait(job_id, timeout_s=60, poll_s=0.3)
    assert (job.status, job.num_attempts) == (JobStatus.CANCELLED, 1), job.message
    rayjob = backends.rayjobs()[f"{job_id}-a0"]
    # Its head was asked; nothing was deleted under the driver.
    assert rayjob["status"]["jobStatus"] == "STOPPED", rayjob["status"]

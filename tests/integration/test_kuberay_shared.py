"""Jobs on the shared cluster beside those with their own: each is looked for where it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest

from service.backends.base import ClusterNeed, Submission
from service.backends.kuberay_api import KubeApi
from service.backends.kuberay_template import FileTemplate
from service.backends.ray_jobs import RayJobsBackend
from service.domain import ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.cluster import InProcessCluster
from tests.integration.kuberay_house import House, house_in, submission
from tests.unit.k8s.rendering import FOLDER

pytestmark = pytest.mark.skipif(
    not CRD_FOLDER.exists(), reason="KubeRay's CRDs (../shared/kuberay-crds) are not here"
)
SHARED = ClusterNeed()


@dataclass
class JobsApi:
    """Ray's Jobs API as far as the backend uses it; every job runs for ever."""

    jobs: set[str] = field(default_factory=set)
    is_away: bool = False

    def open(self) -> RayJobsBackend:
        """A backend that speaks to it."""
        return RayJobsBackend("http://ray:8265", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_away:
            raise httpx.ConnectError("connection refused")
        if request.method == "POST" and request.url.path == "/api/jobs/":
            self.jobs.add(httpx.Response(200, content=request.content).json()["submission_id"])
            return httpx.Response(200, json={})
        job_id = request.url.path.split("/")[3]
        if job_id not in self.jobs:
            return httpx.Response(404, text=f"Job {job_id} does not exist")
        if request.url.path.endswith("/stop"):
            self.jobs.discard(job_id)
        return httpx.Response(200, json={"status": "RUNNING"})


@pytest.fixture
def server() -> Iterator[KubeApiServer]:
    """An API server of ours: it is broken here."""
    with KubeApiServer() as found:
        yield found


@pytest.fixture
def house(server: KubeApiServer, tmp_path: Path) -> Iterator[House]:
    """A namespace in it."""
    with house_in(InProcessCluster(server), tmp_path) as found:
        yield found


def _shared(number: int = 0) -> Submission:
    sent = submission(number)
    return replace(sent, cluster=SHARED)


def test_a_shared_job_is_found_by_replicas_that_did_not_submit_it(house: House) -> None:
    ray = JobsApi()
    sent = _shared()
    house.open(shared=ray.open()).submit(sent)
    other = house.open(shared=ray.open())
    assert other.observe(sent.attempt_id).state is ObservedState.RUNNING
    assert not house.rayjobs()
    other.stop(sent.attempt_id)
    assert house.open(shared=ray.open()).observe(sent.attempt_id).state is ObservedState.NOT_FOUND


def test_kubernetes_away_is_no_trouble_of_shared_jobs(house: House, server: KubeApiServer) -> None:
    ray = JobsApi()
    backend, sent = house.open(shared=ray.open(), watches=False), _shared()
    backend.submit(sent)
    server.faults.away()
    assert backend.observe(sent.attempt_id).state is ObservedState.RUNNING
    later = house.open(shared=ray.open(), watches=False)
    assert later.observe(sent.attempt_id).state is ObservedState.RUNNING
    # Nobody knows where this one is: it may be what Kubernetes would tell of.
    assert later.observe("job-000000000009-a0").state is ObservedState.UNREACHABLE
    server.faults.back()


def test_ray_away_is_no_trouble_of_jobs_with_their_own_cluster(house: House) -> None:
    ray = JobsApi(is_away=True)
    backend, sent = house.open(shared=ray.open()), submission()
    backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is ObservedState.PENDING
    later = house.open(shared=ray.open())
    assert later.observe(sent.attempt_id).state is ObservedState.PENDING
    assert later.observe("job-000000000009-a0").state is ObservedState.UNREACHABLE
    with pytest.raises(BackendUnreachable, match="no answer from Ray"):
        later.check()


def test_without_a_shared_cluster_shared_jobs_are_refused(house: House) -> None:
    backend = house.open()
    with pytest.raises(SubmissionRefused, match=r"set resources\.cluster to own"):
        backend.submit(_shared())
    assert backend.hosts() is None and "shared cluster: none" in backend.check()
    assert backend.observe("job-000000000009-a0").state is ObservedState.NOT_FOUND


def test_a_template_may_come_from_a_file(tmp_path: Path) -> None:
    base = FOLDER / "base" / "raycluster.yaml"
    assert FileTemplate(base).read()["metadata"]["name"] == "shardloom-ray"
    with pytest.raises(BackendUnreachable, match="cannot read the cluster template"):
        FileTemplate(tmp_path / "missing.yaml").read()
    other = FOLDER / "base" / "service.yaml"
    with pytest.raises(BackendUnreachable, match="has no RayCluster"):
        FileTemplate(other).read()


def test_no_way_into_kubernetes_says_what_to_set(tmp_path: Path) -> None:
    for config in (None, tmp_path / "missing"):
        with pytest.raises(BackendUnreachable, match="SHARDLOOM_KUBECONFIG or KUBECONFIG"):
            KubeApi.open(config, "shardloom", 1.0)

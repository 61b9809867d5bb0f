"""The stand-in for KubeRay: RayJobs go through its states, on our API server or a real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client

from tests.integration.kube.cluster import KubeCluster
from tests.integration.kube.manifests import ray_job, secret
from tests.integration.kube.operator import KueueStandIn, RayJobOperator

Manifest = dict[str, Any]


class Jobs:
    """RayJobs of the namespace, by name."""

    def __init__(self, kube: KubeCluster) -> None:
        self.core = client.CoreV1Api(kube.client())
        self.custom = client.CustomObjectsApi(kube.client())
        self.namespace = kube.namespace
        self._where = ("ray.io", "v1", kube.namespace, "rayjobs")

    def create(self, manifest: Manifest) -> Manifest:
        return self.custom.create_namespaced_custom_object(*self._where, manifest)

    def status(self, name: str) -> Manifest:
        found = self.custom.get_namespaced_custom_object(*self._where, name)
        return found.get("status", {})

    def patch(self, name: str, **spec: Any) -> None:
        self.custom.patch_namespaced_custom_object(*self._where, name, {"spec": spec})

    def delete(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(*self._where, name)

    def wait(self, name: str, state: str) -> Manifest:
        """Status of a RayJob once its deployment is in a state."""
        return until(lambda: self._in_state(name, state), f"{name} is {state}")

    def _in_state(self, name: str, state: str) -> Manifest | None:
        status = self.status(name)
        return status if status.get("jobDeploymentStatus", "") == state else None

    def clusters(self) -> list[Manifest]:
        return self.custom.list_namespaced_custom_object(
            "ray.io", "v1", self.namespace, "rayclusters"
        )["items"]

    def pods(self) -> list[Any]:
        return self.core.list_namespaced_pod(self.namespace).items


def until(ask: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """Ask until the answer is something."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not in {timeout_s} s: {what}")


@pytest.fixture
def jobs(kube: KubeCluster) -> Jobs:
    return Jobs(kube)


@pytest.fixture
def operator(kube: KubeCluster) -> Iterator[RayJobOperator]:
    with RayJobOperator(kube, namespace=kube.namespace) as operator:
        yield operator


def test_a_job_runs_on_a_cluster_of_its_own_that_goes_when_it_ends(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    jobs.create(ray_job("a", entrypoint="python train.py", metadata={"who": "me"}, jobId="a-1"))
    running = until(
        lambda: jobs.status("a").get("jobStatus") == "RUNNING" and jobs.status("a"), "a runs"
    )
    assert running["jobDeploymentStatus"] == "Running"
    assert running["dashboardURL"] == "ray-head.invalid:8265"
    assert sorted(pod.status.phase for pod in jobs.pods()) == ["Running", "Running"]
    (request,) = operator.scripted.submitted
    assert (request.job_id, request.entrypoint) == ("a-1", "python train.py")
    assert request.metadata == {"who": "me"}
    operator.scripted.finish("a-1", "SUCCEEDED", "Job finished successfully.")
    ended = jobs.wait("a", "Complete")
    assert (ended["jobStatus"], ended["succeeded"], ended["failed"]) == ("SUCCEEDED", 1, 0)
    assert {"startTime", "endTime"} <= set(ended["rayJobInfo"])
    until(lambda: not jobs.clusters() and not jobs.pods(), "cluster and pods are gone")


def test_a_job_that_fails_says_so_and_is_not_run_again(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    jobs.create(ray_job("a", jobId="a-1", ttlSecondsAfterFinished=600))
    until(lambda: operator.scripted.submitted, "submitted")
    operator.scripted.finish("a-1", "FAILED", "ValueError: no")
    ended = jobs.wait("a", "Failed")
    assert (ended["reason"], ended["message"], ended["failed"]) == (
        "AppFailed",
        "ValueError: no",
        1,
    )
    assert len(jobs.clusters()) == 1


def test_a_back_off_limit_makes_a_new_cluster_and_job(jobs: Jobs, operator: RayJobOperator) -> None:
    jobs.create(ray_job("a", backoffLimit=1))
    (first,) = until(lambda: operator.scripted.submitted, "submitted")
    operator.scripted.finish(first.job_id, "FAILED")
    until(lambda: len(operator.scripted.submitted) == 2, "submitted again")
    second = operator.scripted.submitted[1]
    assert second.job_id != first.job_id
    operator.scripted.finish(second.job_id, "SUCCEEDED")
    ended = jobs.wait("a", "Complete")
    assert (ended["succeeded"], ended["failed"]) == (1, 1)


def test_values_of_secrets_reach_the_job_and_a_missing_secret_holds_it(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    manifest = ray_job("a")
    head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["envFrom"] = [{"secretRef": {"name": "a-env"}}]
    jobs.create(manifest)
    until(
        lambda: any(
            status.state.waiting and status.state.waiting.message == 'secret "a-env" not found'
            for pod in jobs.pods()
            for status in pod.status.container_statuses or ()
        ),
        "the pods wait for the Secret",
    )
    assert jobs.status("a")["jobDeploymentStatus"] == "Initializing"
    jobs.core.create_namespaced_secret(jobs.namespace, secret("a-env", TOKEN="t"))
    (request,) = until(lambda: operator.scripted.submitted, "submitted")
    assert request.env == {"TOKEN": "t"}


def test_pods_without_room_keep_a_job_initializing_until_its_deadline(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    operator.clusters.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    jobs.create(ray_job("a", activeDeadlineSeconds=1))
    ended = jobs.wait("a", "Failed")
    assert ended["reason"] == "DeadlineExceeded"
    assert "activeDeadlineSeconds" in ended["message"]
    assert operator.scripted.submitted == []


def test_a_deleted_job_is_stopped_and_takes_all_it_had_along(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    jobs.create(ray_job("a", jobId="a-1"))
    until(lambda: jobs.status("a").get("jobStatus") == "RUNNING", "a runs")
    jobs.delete("a")
    until(lambda: not jobs.clusters() and not jobs.pods(), "cluster and pods are gone")
    info = operator.scripted.info("a-1")
    assert info is not None
    assert info.status == "STOPPED"


def test_a_suspended_job_gives_its_cluster_back_and_begins_anew_when_admitted(
    kube: KubeCluster, jobs: Jobs, operator: RayJobOperator
) -> None:
    kueue = KueueStandIn(kube)
    # Kueue's webhook suspends what has a queue; a real cluster without Kueue has none.
    manifest = ray_job("a") if kube.server else ray_job("a", suspend=True)
    manifest["metadata"]["labels"] = {KueueStandIn.QUEUE_LABEL: "team"}
    jobs.create(manifest)
    jobs.wait("a", "Suspended")
    assert jobs.clusters() == []
    kueue.admit(jobs.namespace, "a")
    until(lambda: len(operator.scripted.submitted) == 1, "submitted")
    kueue.evict(jobs.namespace, "a")
    suspended = jobs.wait("a", "Suspended")
    assert jobs.clusters() == []
    assert not suspended.get("jobId")
    kueue.admit(jobs.namespace, "a")
    until(lambda: len(operator.scripted.submitted) == 2, "submitted again")


def test_a_job_that_kuberay_refuses_is_told_from_one_that_the_schema_refuses(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    jobs.create(ray_job("a" * 48))
    refused = jobs.wait("a" * 48, "ValidationFailed")
    assert "no more than 47 characters" in refused["message"]
    with pytest.raises(client.ApiException) as error:
        jobs.create(ray_job("b", activeDeadlineSeconds="soon"))
    assert error.value.status == 422


def test_a_ray_that_is_away_is_no_failure_until_that_lasts(kube: KubeCluster, jobs: Jobs) -> None:
    with RayJobOperator(kube, namespace=kube.namespace, check_timeout_s=2) as operator:
        jobs.create(ray_job("a", ttlSecondsAfterFinished=60))
        until(lambda: jobs.status("a").get("jobStatus") == "RUNNING", "a runs")
        operator.scripted.is_away = True
        until(lambda: "jobStatusCheckFailureStartTime" in jobs.status("a"), "noticed")
        assert jobs.status("a")["jobDeploymentStatus"] == "Running"
        assert jobs.wait("a", "Failed")["reason"] == "JobStatusCheckTimeoutExceeded"


def test_a_head_that_forgot_its_jobs_is_given_the_job_again(
    jobs: Jobs, operator: RayJobOperator
) -> None:
    jobs.create(ray_job("a", jobId="a-1"))
    until(lambda: jobs.status("a").get("jobStatus") == "RUNNING", "a runs")
    operator.scripted.forget("a-1")
    until(lambda: len(operator.scripted.submitted) == 2, "submitted again")
    assert operator.scripted.submitted[0] == operator.scripted.submitted[1]

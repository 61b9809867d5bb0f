"""The KubeRay backend against an API server: nothing is made twice, lost, or misread.

With SHARDLOOM_TEST_KUBECONFIG it runs against that cluster; tests that inject faults skip there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.backends.base import Submission
from service.backends.kuberay import watch
from service.backends.kuberay.backend import (
    KEEP_CUT_OFF_S,
    STOP_FAILED_AT,
    STOP_GRACE_S,
    TAKE_DOWN_S,
    IsolatedProjectsBackend,
    KubeRayBackend,
    is_garbage,
    template_in,
)
from service.backends.kuberay.client import KubeApi, KubeRefused
from service.backends.kuberay.first_secrets import make_secrets
from service.backends.kuberay.manifest import secret_name_of
from service.backends.ray_jobs import RayJobsBackend
from service.domain.models import EndReason, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from tests.harness.builders import spec
from tests.harness.kube.backends import (
    KubeRayBackends,
    rules,
    submission,
    wait_for_state,
    without,
)
from tests.harness.kube.cluster import InProcessCluster
from tests.harness.kube.operator import KueueStandIn, RayJobOperator
from tests.harness.kube.server import KubeApiServer
from tests.harness.wait import wait_for
from tests.unit.k8s.rendering import build

PENDING, RUNNING = ObservedState.PENDING, ObservedState.RUNNING
NOT_FOUND, UNREACHABLE = ObservedState.NOT_FOUND, ObservedState.UNREACHABLE
SUCCEEDED, FAILED = ObservedState.SUCCEEDED, ObservedState.FAILED


def _place(backends: KubeRayBackends, *rest: str) -> tuple[str, ...]:
    return ("ray.io", "v1", backends.cluster.namespace, *rest)


def _submitted(backends: KubeRayBackends, **options: Any) -> tuple[KubeRayBackend, Submission]:
    """A replica and an attempt that it submitted."""
    backend, sent = backends.open(**options), submission()
    backend.submit(sent)
    return backend, sent


def _running(backends: KubeRayBackends, **options: Any) -> tuple[KubeRayBackend, Submission]:
    """A replica and an attempt that it submitted and saw run."""
    backend, sent = _submitted(backends, **options)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    return backend, sent


def _wait_until_none_is_left(backends: KubeRayBackends) -> None:
    wait_for(lambda: not backends.rayjobs(), "RayJobs to go", 15)


# ---- submit


def test_a_repeated_submission_changes_nothing(backends: KubeRayBackends) -> None:
    backend, sent = _submitted(backends)
    before = backends.rayjobs()[sent.attempt_id]
    backend.submit(sent)
    backends.open().submit(sent)
    assert backends.rayjobs() == {sent.attempt_id: before}
    assert len(backends.secrets_of(sent)) == 1
    assert backend.observe(sent.attempt_id).state is PENDING


@pytest.mark.parametrize(
    ("verb", "path"), [("create", "rayjobs"), ("create", "secrets"), ("patch", "rayjobs")]
)
@pytest.mark.parametrize("is_lost", [True, False], ids=["answer lost", "request lost"])
def test_a_submission_that_is_cut_off_anywhere_is_carried_through(
    backends: KubeRayBackends, server: KubeApiServer, verb: str, path: str, is_lost: bool
) -> None:
    backend, sent = backends.open(), submission()
    if is_lost:
        server.faults.lose_answer(verb=verb, path=path)
    else:
        server.faults.fail(503, verb=verb, path=path)
    with pytest.raises(BackendUnreachable):
        backend.submit(sent)
    server.faults.clear()
    # A replica that starts later knows nothing of it, and would be told to submit.
    later = backends.open()
    is_through = is_lost and verb == "patch"
    assert later.observe(sent.attempt_id).state is (PENDING if is_through else NOT_FOUND)
    later.submit(sent)
    (found,) = backends.rayjobs().values()
    assert found["spec"]["suspend"] is False
    assert secret_name_of(found) in backends.secrets_of(sent)
    assert later.observe(sent.attempt_id).state is PENDING


def test_many_replicas_that_submit_at_once_make_one(backends: KubeRayBackends) -> None:
    sent = submission()
    opened = [backends.open(watches=False) for _ in range(4)]
    threads = [threading.Thread(target=each.submit, args=(sent,)) for each in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(backends.rayjobs()) == [sent.attempt_id]


def test_a_name_that_somebody_else_has_is_refused_and_left_alone(backends: KubeRayBackends) -> None:
    backend, sent = backends.open(), submission()
    foreign = {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {"suspend": True}}
    foreign["metadata"] = {"name": sent.attempt_id}
    backends.api.create_namespaced_custom_object(*_place(backends, "rayjobs"), foreign)
    with pytest.raises(SubmissionRefused, match="another RayJob with the name"):
        backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is NOT_FOUND
    backend.stop(sent.attempt_id)
    assert list(backends.rayjobs()) == [sent.attempt_id]


@pytest.mark.parametrize(
    "by",
    [
        'admission webhook "policy" denied the request',
        """ValidatingAdmissionPolicy 'policy' with binding 'all' denied request""",
    ],
)
def test_a_job_that_kubernetes_refuses_leaves_nothing_behind(
    backends: KubeRayBackends, server: KubeApiServer, by: str
) -> None:
    message = f"{by}: images must be signed"
    server.faults.fail(403, verb="create", path="secrets", message=message)
    with pytest.raises(SubmissionRefused, match="images must be signed"):
        backends.open().submit(submission())
    _wait_until_none_is_left(backends)
    assert not [name for name in backends.secrets() if "-env" in name]


def test_a_conflict_over_a_quota_is_no_secret(
    backends: KubeRayBackends, server: KubeApiServer
) -> None:
    backend, sent = backends.open(watches=False), submission()
    message = 'Operation cannot be fulfilled on resourcequotas "team": it has been modified'
    server.faults.fail(409, verb="create", path="secrets", message=message)
    with pytest.raises(BackendUnreachable, match="a conflict in Kubernetes"):
        backend.submit(sent)
    _wait_until_none_is_left(backends)
    backend.submit(sent)
    (found,) = backends.rayjobs().values()
    assert backends.secrets_of(sent) == [secret_name_of(found)]
    # Nor one of those that an installation begins with.
    server.faults.fail(409, verb="create", path="secrets", message=message)
    name, api = "shardloom-first-key", backend._api
    with pytest.raises(KubeRefused, match="resourcequotas"):
        list(make_secrets(api, [f"firstKey={name}"]))
    told = [list(make_secrets(api, [f"firstKey={name}"])) for _ in range(2)]
    assert told == [[f"{name} is made"], [f"{name} is there and stays as it is"]]


def test_the_secret_of_an_earlier_rayjob_is_not_taken_for_this_ones(
    backends: KubeRayBackends,
) -> None:
    backend, sent = _submitted(backends, watches=False)
    (first,) = backends.secrets_of(sent)
    backends.api.delete_namespaced_custom_object(*_place(backends, "rayjobs", sent.attempt_id))
    backend.submit(sent)
    (found,) = backends.rayjobs().values()
    assert secret_name_of(found) in backends.secrets_of(sent) and secret_name_of(found) != first


# ---- isolated projects


def test_attempts_of_an_isolated_project_live_in_its_namespace_and_are_found_there(
    backends: KubeRayBackends, server: KubeApiServer, tmp_path: Path
) -> None:
    """With the rights of the chart in each namespace: those of one are no use in the other."""
    (tmp_path / "ads").mkdir()
    theirs = KubeRayBackends(InProcessCluster(server), tmp_path / "ads")

    def open_both() -> IsolatedProjectsBackend:
        isolated = theirs.open(rules("ads-training"), ray_token_of="Ray of {}".format)
        return IsolatedProjectsBackend(backends.open(), {"ads": isolated})

    backend, ads, other = open_both(), submission(0, project="ads"), submission(1)
    for sent in (ads, other):
        backend.submit(sent)
    assert list(theirs.rayjobs()) == [ads.attempt_id]
    assert list(backends.rayjobs()) == [other.attempt_id]
    assert (len(theirs.secrets_of(ads)), backends.secrets_of(ads)) == (1, [])
    later = open_both()
    for sent in (ads, other):
        assert later.observe(sent.attempt_id).state is PENDING
    assert later.observe("job-000000000009-a0").state is NOT_FOUND
    assert "1 isolated project" in later.check()
    server.faults.fail(403, path=f"/namespaces/{theirs.cluster.namespace}/", message="no Role")
    assert "; ads: no right to list rayjobs" in later.check()
    open_both().stop(ads.attempt_id)
    _wait_until_none_is_left(theirs)
    assert later.observe(other.attempt_id).state is PENDING
    theirs.close()
    theirs.cluster.remove()


# ---- what an administrator mends


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            'rayjobs.ray.io "job" is forbidden: exceeded quota: team, requested: '
            "count/rayjobs.ray.io=1, used: count/rayjobs.ray.io=0, limited: "
            "count/rayjobs.ray.io=0",
            r"quota.*used up.*exceeded quota: team",
        ),
        (
            'rayjobs.ray.io "job" is forbidden: unable to create new content in namespace ads '
            "because it is being terminated",
            "is being deleted",
        ),
    ],
    ids=["quota", "namespace that ends"],
)
def test_what_the_namespace_has_no_room_for_waits(
    backends: KubeRayBackends, server: KubeApiServer, message: str, told: str
) -> None:
    backend, sent = backends.open(), submission()
    server.faults.fail(403, verb="create", path="rayjobs", message=message)
    with pytest.raises(BackendUnreachable, match=told):
        backend.submit(sent)
    backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is PENDING


@pytest.mark.parametrize(
    ("resource", "verb"),
    [
        ("rayjobs", "create"),
        ("rayjobs", "get"),
        ("rayjobs", "patch"),
        ("secrets", "create"),
    ],
)
def test_a_missing_right_is_named_and_loses_nothing(
    backends: KubeRayBackends, resource: str, verb: str
) -> None:
    allowed = without({verb}, {resource})
    sent, poor = submission(), backends.open(allowed, watches=False)
    with pytest.raises(BackendUnreachable, match=f"grant the verb '{verb}' on '{resource}'"):
        poor.submit(sent)
        seen = poor.observe(sent.attempt_id)
        assert seen.state is UNREACHABLE
        raise BackendUnreachable(seen.message)
    backends.open().submit(sent)
    assert backends.open().observe(sent.attempt_id).state is PENDING


def test_without_the_right_to_watch_each_look_asks(backends: KubeRayBackends) -> None:
    allowed = without({"watch", "list"}, {"rayjobs"})
    backend, sent = _submitted(backends, allowed=allowed)
    assert backend.observe(sent.attempt_id).state is PENDING


def test_a_missing_crd_is_no_missing_job(backends: KubeRayBackends, server: KubeApiServer) -> None:
    backend, sent = _submitted(backends, watches=False)
    assert "ray.io/v1" in backend.check()
    server.remove_definition("rayjobs.ray.io")
    seen = backend.observe(sent.attempt_id)
    assert seen.state is UNREACHABLE and "the CRD rayjobs.ray.io is missing" in seen.message
    for ask in (lambda: backend.submit(sent), backend.check):
        with pytest.raises(BackendUnreachable, match=r"CRD rayjobs\.ray\.io is missing"):
            ask()


def test_an_api_server_in_trouble_says_nothing_about_the_job(
    backends: KubeRayBackends, server: KubeApiServer
) -> None:
    backend, sent = _submitted(backends, watches=False)
    for code in (302, 401, 408, 429, 500, 503, 504):
        server.faults.fail(code, verb="create", path="rayjobs")
        with pytest.raises(BackendUnreachable, match=str(code)):
            backend.submit(submission(1))
        server.faults.fail(code, times=2)
        seen = backend.observe(sent.attempt_id)
        assert seen.state is UNREACHABLE and str(code) in seen.message
        with pytest.raises(BackendUnreachable):
            backend.stop(sent.attempt_id)
        assert backend.observe(sent.attempt_id).state is PENDING
        assert list(backends.rayjobs()) == [sent.attempt_id]


def test_an_api_server_that_is_away_and_comes_back(
    backends: KubeRayBackends, server: KubeApiServer
) -> None:
    backend, sent = _submitted(backends)
    server.faults.away()
    seen = wait_for_state(backend, sent.attempt_id, UNREACHABLE)
    assert "no answer from Kubernetes at http://127.0.0.1" in seen.message
    with pytest.raises(BackendUnreachable):
        backend.submit(submission(1))
    server.faults.back()
    wait_for_state(backend, sent.attempt_id, PENDING)
    backend.submit(submission(1))
    assert len(backends.rayjobs()) == 2


def test_without_a_template_jobs_wait(backends: KubeRayBackends, tmp_path: Path) -> None:
    backend = backends.open(template=partial(template_in, tmp_path / "raycluster.yaml"))
    with pytest.raises(BackendUnreachable, match="SHARDLOOM_KUBERAY_TEMPLATE_FILE names it"):
        backend.submit(submission())
    assert not backends.rayjobs()


def test_a_template_is_the_first_ray_cluster_of_a_file(tmp_path: Path) -> None:
    base = tmp_path / "objects.yaml"
    base.write_text(yaml.safe_dump_all(build("gpu")))
    assert template_in(base)["metadata"]["name"] == "shardloom-ray"
    with pytest.raises(BackendUnreachable, match="cannot read the cluster template"):
        template_in(tmp_path / "missing.yaml")
    base.write_bytes(b"# gr\xfc\xdfe")
    with pytest.raises(BackendUnreachable, match="cannot read the cluster template"):
        template_in(base)
    other = tmp_path / "none.yaml"
    for text in ("kind: Service", "kind: RayCluster\nspec: text"):
        other.write_text(text)
        with pytest.raises(BackendUnreachable, match="has no RayCluster with workerGroupSpecs"):
            template_in(other)


def test_no_way_into_kubernetes_says_what_to_set(tmp_path: Path) -> None:
    for config in (None, tmp_path / "missing"):
        with pytest.raises(BackendUnreachable, match="SHARDLOOM_KUBECONFIG or KUBECONFIG"):
            KubeApi.open(config, "shardloom", 1.0)


# ---- the course of a job


def test_a_job_is_followed_to_its_end_by_a_replica_that_knew_nothing_of_it(
    backends: KubeRayBackends, operator: RayJobOperator
) -> None:
    sent = submission(env={"SHARDLOOM_RUN_DIR": '/runs/it\'s "here" $HOME', "EMPTY": ""})
    backends.open().submit(sent)
    adopted = backends.open()
    wait_for_state(adopted, sent.attempt_id, RUNNING)
    (started,) = operator.scripted.submitted
    assert started.env.items() >= sent.env.items()
    assert started.entrypoint == sent.entrypoint and started.metadata == sent.metadata
    operator.scripted.finish(sent.attempt_id, "FAILED", "Job failed with exit code 1")
    seen = wait_for_state(adopted, sent.attempt_id, FAILED)
    assert "AppFailed" in seen.message and "exit code 1" in seen.message and seen.reason is None


def test_looks_cost_no_requests_while_the_watch_lives(
    backends: KubeRayBackends, server: KubeApiServer, operator: RayJobOperator
) -> None:
    backend, sent = _running(backends)
    wait_for(lambda: backend._watch.is_live, "a watch", 15)
    operator.frozen.set()
    server.requests.clear()
    for _ in range(50):
        assert backend.observe(sent.attempt_id).state is RUNNING
    assert not [each for each in server.requests if sent.attempt_id in each]


def test_pods_that_find_no_room_are_told_of(
    backends: KubeRayBackends, operator: RayJobOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_AGE_S", 0.1)  # of what was read of pods
    backend, sent = backends.open(), submission()
    message = "0/3 nodes are available: 3 Insufficient cpu."
    operator.clusters.unschedulable = message
    backend.submit(sent)

    def told() -> str:
        seen = backend.observe(sent.attempt_id)
        assert seen.state is PENDING
        return seen.message if "Unschedulable" in seen.message else ""

    assert message in wait_for(told, "the scheduler's reason", 20)
    operator.clusters.unschedulable = None
    wait_for_state(backend, sent.attempt_id, RUNNING)


def test_what_keeps_the_cluster_itself_from_being_made_is_told(backends: KubeRayBackends) -> None:
    backend, sent = _submitted(backends, watches=False)
    started = {"jobDeploymentStatus": "Initializing", "rayClusterName": "not-made", "jobStatus": ""}
    place = _place(backends, "rayjobs", sent.attempt_id)
    backends.api.patch_namespaced_custom_object_status(*place, {"status": started})
    namespace = backends.cluster.namespace
    about = {"kind": "RayJob", "name": sent.attempt_id, "namespace": namespace}
    event = {
        "metadata": {"name": "no-cluster"},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedToCreateRayCluster",
        "message": "exceeded quota: team",
        "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    backends.core.create_namespaced_event(namespace, event)
    seen = backend.observe(sent.attempt_id)
    assert seen.state is PENDING
    assert "FailedToCreateRayCluster: exceeded quota: team" in seen.message


def test_a_driver_past_its_deadline_is_stopped_before_its_attempt_ends(
    backends: KubeRayBackends, operator: RayJobOperator
) -> None:
    backend, sent = backends.open(ttl_s=3600), submission(deadline_s=3600)
    backend.submit(sent)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    backends.patch(sent.attempt_id, {"spec": {"activeDeadlineSeconds": 1}})
    seen = wait_for_state(backend, sent.attempt_id, FAILED)
    assert "deadline_s" in seen.message and not backends.rayjobs()
    info = operator.scripted.info(sent.attempt_id)
    assert info is not None and info.status == "STOPPED"
    assert not [name for name in backends.pods() if name.startswith(sent.attempt_id)]
    assert backend.observe(sent.attempt_id) == seen, "it is still known how it ended"


def test_a_cluster_that_does_not_go_is_not_waited_for_for_ever(
    backends: KubeRayBackends, operator: RayJobOperator
) -> None:
    backend, sent = backends.open(watches=False), submission(deadline_s=1)
    backend.submit(sent)

    def is_over() -> bool:
        status: dict[str, Any] = backends.rayjobs()[sent.attempt_id].get("status", {})
        return status.get("jobDeploymentStatus") == "Failed"

    wait_for(is_over, "the deadline", 15)
    # Its finalizer stays: as where the operator is down, or a machine with pods.
    operator.frozen.set()
    seen = backend.observe(sent.attempt_id)
    assert seen.state is PENDING and "is taken down" in seen.message
    backend.stop(sent.attempt_id)
    late = backends.open(clock=lambda: time.time() + TAKE_DOWN_S + 5, watches=False)
    assert late.observe(sent.attempt_id).state is FAILED


# ---- Kueue


def test_kueue_admits_a_job_and_takes_its_room_back(
    backends: KubeRayBackends, operator: RayJobOperator
) -> None:
    kueue = KueueStandIn(backends.cluster)
    backend, sent = backends.open(), submission(queue="ads")
    backend.submit(sent)
    seen = backend.observe(sent.attempt_id)
    assert seen.state is PENDING and "admission by Kueue queue ads" in seen.message
    kueue.admit(sent.attempt_id)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    kueue.evict(sent.attempt_id)
    seen = wait_for_state(backend, sent.attempt_id, FAILED)
    assert seen.reason is EndReason.PREEMPTED
    # Admitted once more, KubeRay would start the same attempt again.
    _wait_until_none_is_left(backends)
    assert len(operator.scripted.submitted) == 1


@pytest.mark.parametrize(("verb", "path"), [("create", "secrets"), ("patch", "rayjobs")])
def test_kueue_that_is_faster_than_a_cut_off_submission_changes_nothing(
    backends: KubeRayBackends, server: KubeApiServer, verb: str, path: str
) -> None:
    kueue, backend = KueueStandIn(backends.cluster), backends.open()
    sent = submission(queue="ads")
    server.faults.fail(503, verb=verb, path=path)
    with pytest.raises(BackendUnreachable):
        backend.submit(sent)
    kueue.admit(sent.attempt_id)
    later = backends.open()
    assert later.observe(sent.attempt_id).state is NOT_FOUND
    (cut_off,) = backends.rayjobs().values()
    assert is_garbage(cut_off, time.time() + KEEP_CUT_OFF_S + 5), "where nobody carries it on"
    later.submit(sent)
    (found,) = backends.rayjobs().values()
    assert found["spec"]["suspend"] is False
    assert backends.secrets_of(sent) == [secret_name_of(found)]
    assert later.observe(sent.attempt_id).state is PENDING


# ---- stop


def test_stopping_takes_the_secret_along(backends: KubeRayBackends) -> None:
    backend, sent = _submitted(backends)
    backend.stop(sent.attempt_id)
    wait_for(lambda: not backends.secrets_of(sent), "the Secret to go", 15)
    wait_for_state(backend, sent.attempt_id, NOT_FOUND)
    backend.stop(sent.attempt_id)
    backend.stop("job-of-nobody-a0")


def test_a_policy_that_keeps_a_rayjob_is_told_when_its_job_is_stopped(
    backends: KubeRayBackends, server: KubeApiServer
) -> None:
    backend, sent = _submitted(backends, watches=False)
    message = 'admission webhook "policy" denied the request: kept until Monday'
    server.faults.fail(403, verb="delete", path="rayjobs", message=message)
    with pytest.raises(BackendUnreachable, match=rf"cannot stop {sent.attempt_id}.*until Monday"):
        backend.stop(sent.attempt_id)
    later = backends.open(clock=lambda: 4e9, watches=False)
    (rayjob,) = backends.rayjobs().values()
    later._sweep([{**rayjob, "status": {"jobDeploymentStatus": "Running"}}])
    assert list(backends.rayjobs()) == [sent.attempt_id], "what has not ended is left alone"
    rayjob["status"] = {"jobDeploymentStatus": "Complete"}
    server.faults.fail(403, verb="delete", path="rayjobs", message=message)
    later._sweep([rayjob, rayjob])
    _wait_until_none_is_left(backends)


def test_a_head_that_does_not_answer_is_given_half_a_minute(
    backends: KubeRayBackends, operator: RayJobOperator
) -> None:
    now = [1_000_000.0]
    first, sent = _running(backends, clock=lambda: now[0])
    # The script's Ray is at an address that leads nowhere.
    with pytest.raises(BackendUnreachable, match="does not answer; its cluster is deleted"):
        first.stop(sent.attempt_id)
    noted = backends.rayjobs()[sent.attempt_id]["metadata"]["annotations"][STOP_FAILED_AT]
    now[0] += STOP_GRACE_S - 1
    other = backends.open(clock=lambda: now[0])
    with pytest.raises(BackendUnreachable):
        other.stop(sent.attempt_id)
    again = backends.rayjobs()[sent.attempt_id]["metadata"]["annotations"][STOP_FAILED_AT]
    assert again == noted
    now[0] += 2
    other.stop(sent.attempt_id)
    wait_for_state(first, sent.attempt_id, NOT_FOUND)
    assert operator.scripted.info(sent.attempt_id).status == "STOPPED"  # type: ignore[union-attr]


# ---- jobs on the shared cluster beside those with their own


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
        if request.url.path == "/api/jobs/" and request.method == "GET":
            running = [{"submission_id": job_id, "status": "RUNNING"} for job_id in self.jobs]
            return httpx.Response(200, json=running)
        if request.url.path == "/api/jobs/":
            submitted = httpx.Response(200, content=request.content)
            self.jobs.add(submitted.json()["submission_id"])
            return submitted
        job_id = request.url.path.split("/")[3]
        if job_id not in self.jobs:
            return httpx.Response(404, text=f"Job {job_id} does not exist")
        if request.url.path.endswith("/stop") or request.method == "DELETE":
            self.jobs.discard(job_id)
        return httpx.Response(200, json={"status": "RUNNING"})


def _shared() -> Submission:
    return replace(submission(), spec=spec())


def test_a_shared_job_is_found_by_replicas_that_did_not_submit_it(
    backends: KubeRayBackends,
) -> None:
    ray, sent = JobsApi(), _shared()
    backends.open(shared=ray.open()).submit(sent)
    other = backends.open(shared=ray.open())
    assert other.observe(sent.attempt_id).state is RUNNING
    assert not backends.rayjobs()
    other.stop(sent.attempt_id)
    assert backends.open(shared=ray.open()).observe(sent.attempt_id).state is NOT_FOUND
    other.submit(sent)
    backends.open(shared=ray.open()).forget(sent.attempt_id)
    assert not ray.jobs, "it keeps no job that has ended"


def test_kubernetes_away_is_no_trouble_of_shared_jobs(
    backends: KubeRayBackends, server: KubeApiServer
) -> None:
    ray = JobsApi()
    backend, sent = backends.open(shared=ray.open(), watches=False), _shared()
    backend.submit(sent)
    server.faults.away()
    assert backend.observe(sent.attempt_id).state is RUNNING
    later = backends.open(shared=ray.open(), watches=False)
    assert later.observe(sent.attempt_id).state is RUNNING
    # Nobody knows where this one is: it may be what Kubernetes would tell of.
    assert later.observe("job-000000000009-a0").state is UNREACHABLE


def test_ray_away_is_no_trouble_of_jobs_with_their_own_cluster(backends: KubeRayBackends) -> None:
    ray = JobsApi(is_away=True)
    backend, sent = _submitted(backends, shared=ray.open())
    assert backend.observe(sent.attempt_id).state is PENDING
    later = backends.open(shared=ray.open())
    assert later.observe(sent.attempt_id).state is PENDING
    assert later.observe("job-000000000009-a0").state is UNREACHABLE
    with pytest.raises(BackendUnreachable, match="no answer from Ray"):
        later.check()


def test_without_a_shared_cluster_shared_jobs_are_refused(backends: KubeRayBackends) -> None:
    backend = backends.open()
    with pytest.raises(SubmissionRefused, match=r"set resources\.cluster to own"):
        backend.submit(_shared())
    assert backend.hosts() is None and "shared cluster: none" in backend.check()
    assert backend.observe("job-000000000009-a0").state is NOT_FOUND

"""The KubeRay backend against an API server: nothing is made twice, lost, or misread.

KUBECONFIG makes it run against that cluster (where faults cannot be injected, tests skip).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.backends.kuberay import STOP_FAILED_AT, STOP_GRACE_S
from service.backends.kuberay_manifest import secret_name_of
from service.backends.kuberay_sweep import KEEP_ENDED_S
from service.domain import EndReason, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.cluster import kube_cluster, operator_for
from tests.integration.kube.operator import KueueStandIn, RayJobOperator
from tests.integration.kuberay_house import (
    House,
    house_in,
    submission,
    wait_for,
    wait_for_state,
    without,
)

pytestmark = pytest.mark.skipif(
    not CRD_FOLDER.exists(), reason="KubeRay's CRDs (../shared/kuberay-crds) are not here"
)
PENDING, RUNNING = ObservedState.PENDING, ObservedState.RUNNING
NOT_FOUND, UNREACHABLE = ObservedState.NOT_FOUND, ObservedState.UNREACHABLE


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A namespace without an operator: RayJobs stay as they are made."""
    with kube_cluster() as cluster, house_in(cluster, tmp_path) as found:
        yield found


@pytest.fixture
def server(house: House) -> KubeApiServer:
    """The API server, to break."""
    if house.cluster.server is None:
        pytest.skip("a real API server takes no injected faults")
    return house.cluster.server


@pytest.fixture
def operator(house: House) -> Iterator[RayJobOperator]:
    """The operator stand-in, whose Ray does as the test says."""
    with operator_for(house.cluster, poll_s=0.05) as found:
        if found is None:
            pytest.skip("KubeRay itself runs here: its Ray takes no script")
        yield found


# ---- submit


def test_a_repeated_submission_changes_nothing(house: House) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    before = house.rayjobs()[sent.attempt_id]
    backend.submit(sent)
    house.open().submit(sent)
    assert house.rayjobs() == {sent.attempt_id: before}
    assert len(house.secrets_of(sent)) == 1
    assert backend.observe(sent.attempt_id).state is PENDING


@pytest.mark.parametrize(
    ("verb", "path"), [("create", "rayjobs"), ("create", "secrets"), ("patch", "rayjobs")]
)
@pytest.mark.parametrize("is_lost", [True, False], ids=["answer lost", "request lost"])
def test_a_submission_that_is_cut_off_anywhere_is_carried_through(
    house: House, server: KubeApiServer, verb: str, path: str, is_lost: bool
) -> None:
    backend, sent = house.open(), submission()
    if is_lost:
        server.faults.lose_answer(verb=verb, path=path)
    else:
        server.faults.fail(503, verb=verb, path=path)
    with pytest.raises(BackendUnreachable):
        backend.submit(sent)
    server.faults.clear()
    # A replica that starts later knows nothing of it, and would be told to submit.
    later = house.open()
    is_through = is_lost and verb == "patch"
    assert later.observe(sent.attempt_id).state is (PENDING if is_through else NOT_FOUND)
    later.submit(sent)
    (found,) = house.rayjobs().values()
    assert found["spec"]["suspend"] is False
    assert secret_name_of(found) in house.secrets_of(sent)
    assert later.observe(sent.attempt_id).state is PENDING


def test_many_replicas_that_submit_at_once_make_one(house: House) -> None:
    sent = submission()
    backends = [house.open(watches=False) for _ in range(4)]
    threads = [threading.Thread(target=each.submit, args=(sent,)) for each in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(house.rayjobs()) == [sent.attempt_id]


def test_a_name_that_somebody_else_has_is_refused_and_left_alone(house: House) -> None:
    backend, sent = house.open(), submission()
    foreign = {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {"suspend": True}}
    foreign["metadata"] = {"name": sent.attempt_id}
    place = ("ray.io", "v1", house.cluster.namespace, "rayjobs")
    house.api.create_namespaced_custom_object(*place, foreign)
    with pytest.raises(SubmissionRefused, match="another RayJob with the name"):
        backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is NOT_FOUND
    backend.stop(sent.attempt_id)
    assert list(house.rayjobs()) == [sent.attempt_id]


def test_a_job_that_kubernetes_refuses_leaves_nothing_behind(
    house: House, server: KubeApiServer
) -> None:
    message = 'admission webhook "policy" denied the request: images must be signed'
    server.faults.fail(403, verb="create", path="secrets", message=message)
    with pytest.raises(SubmissionRefused, match="images must be signed"):
        house.open().submit(submission())
    wait_for("rayjobs", house.rayjobs, lambda found: not found, 15)
    assert not [name for name in house.secrets() if "-env" in name]


def test_stopping_takes_the_secret_along(house: House) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    backend.stop(sent.attempt_id)
    wait_for("secrets", lambda: house.secrets_of(sent), lambda names: not names, 15)
    wait_for_state(backend, sent.attempt_id, NOT_FOUND)
    backend.stop(sent.attempt_id)
    backend.stop("job-of-nobody-a0")


# ---- what an administrator mends


def test_a_quota_that_is_used_up_keeps_the_job_waiting(house: House) -> None:
    backend, sent = house.open(), submission()
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": {"count/rayjobs.ray.io": "0"}},
    }
    house.core.create_namespaced_resource_quota(house.cluster.namespace, quota)
    if house.cluster.server is None:
        # A controller counts first.
        place = ("team", house.cluster.namespace)
        read = house.core.read_namespaced_resource_quota
        wait_for("quota", lambda: read(*place).status.used, bool, 30)
    with pytest.raises(BackendUnreachable, match=r"quota.*used up.*exceeded quota: team"):
        backend.submit(sent)
    house.core.delete_namespaced_resource_quota("team", house.cluster.namespace)
    backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is PENDING


@pytest.mark.parametrize(
    ("resource", "verb"),
    [
        ("rayjobs", "create"),
        ("rayjobs", "get"),
        ("rayjobs", "patch"),
        ("secrets", "create"),
        ("rayclusters", "get"),
    ],
)
def test_a_missing_right_is_named_and_loses_nothing(house: House, resource: str, verb: str) -> None:
    allowed = without({verb}, {resource})
    sent, poor = submission(), house.open(allowed, watches=False)
    with pytest.raises(BackendUnreachable, match=f"grant the verb '{verb}' on '{resource}'"):
        poor.submit(sent)
        seen = poor.observe(sent.attempt_id)
        assert seen.state is UNREACHABLE
        raise BackendUnreachable(seen.message)
    house.open().submit(sent)
    assert house.open().observe(sent.attempt_id).state is PENDING


def test_without_the_right_to_watch_each_look_asks(house: House) -> None:
    allowed = without({"watch", "list"}, {"rayjobs"})
    backend, sent = house.open(allowed), submission()
    backend.submit(sent)
    assert backend.observe(sent.attempt_id).state is PENDING


def test_a_missing_crd_is_no_missing_job(house: House, server: KubeApiServer) -> None:
    backend, sent = house.open(watches=False), submission()
    backend.submit(sent)
    assert "ray.io/v1" in backend.check()
    server.remove_definition("rayjobs.ray.io")
    seen = backend.observe(sent.attempt_id)
    assert seen.state is UNREACHABLE and "the CRD rayjobs.ray.io is missing" in seen.message
    for ask in (lambda: backend.submit(sent), backend.check):
        with pytest.raises(BackendUnreachable, match=r"CRD rayjobs\.ray\.io is missing"):
            ask()


@pytest.mark.parametrize("code", [401, 429, 500, 503, 504])
def test_an_api_server_in_trouble_says_nothing_about_the_job(
    house: House, server: KubeApiServer, code: int
) -> None:
    backend, sent = house.open(watches=False), submission()
    backend.submit(sent)
    server.faults.fail(code, times=2)
    seen = backend.observe(sent.attempt_id)
    assert seen.state is UNREACHABLE and str(code) in seen.message
    with pytest.raises(BackendUnreachable):
        backend.stop(sent.attempt_id)
    assert backend.observe(sent.attempt_id).state is PENDING
    assert list(house.rayjobs()) == [sent.attempt_id]


def test_an_api_server_that_is_away_and_comes_back(house: House, server: KubeApiServer) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    server.faults.away()
    seen = wait_for_state(backend, sent.attempt_id, UNREACHABLE)
    assert "no answer from Kubernetes at http://127.0.0.1" in seen.message
    with pytest.raises(BackendUnreachable):
        backend.submit(submission(1))
    server.faults.back()
    wait_for_state(backend, sent.attempt_id, PENDING)
    backend.submit(submission(1))
    assert len(house.rayjobs()) == 2


def test_a_cluster_without_its_template_keeps_jobs_waiting(house: House) -> None:
    backend = house.open()
    place = ("ray.io", "v1", house.cluster.namespace, "rayclusters", "shardloom-ray")
    house.api.delete_namespaced_custom_object(*place)
    with pytest.raises(BackendUnreachable, match="no RayCluster shardloom-ray to make clusters"):
        backend.submit(submission())


# ---- the course of a job


def test_a_job_is_followed_to_its_end_by_a_replica_that_knew_nothing_of_it(
    house: House, operator: RayJobOperator
) -> None:
    sent = submission(env={"SHARDLOOM_RUN_DIR": '/runs/it\'s "here" $HOME', "EMPTY": ""})
    house.open().submit(sent)
    adopted = house.open()
    wait_for_state(adopted, sent.attempt_id, RUNNING)
    (started,) = operator.scripted.submitted
    assert started.env.items() >= sent.env.items()
    assert started.entrypoint == sent.entrypoint and started.metadata == sent.metadata
    operator.scripted.finish(sent.attempt_id, "FAILED", "Job failed with exit code 1")
    seen = wait_for_state(adopted, sent.attempt_id, ObservedState.FAILED)
    assert "AppFailed" in seen.message and "exit code 1" in seen.message and seen.reason is None


def test_looks_cost_no_requests_while_the_watch_lives(
    house: House, server: KubeApiServer, operator: RayJobOperator
) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    wait_for("watch", lambda: backend._watch.is_live, bool, 15)
    operator.frozen.set()
    server.requests.clear()
    for _ in range(50):
        assert backend.observe(sent.attempt_id).state is RUNNING
    assert not [each for each in server.requests if sent.attempt_id in each]


@pytest.mark.parametrize("is_compacted", [False, True], ids=["dropped", "too old"])
def test_a_watch_that_breaks_misses_nothing(
    house: House, server: KubeApiServer, operator: RayJobOperator, is_compacted: bool
) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    wait_for("watch", lambda: backend._watch.is_live, bool, 15)
    server.faults.fail(503, verb="watch", path="rayjobs")
    server.faults.drop_watches()
    operator.scripted.finish(sent.attempt_id)
    wait_for_state(backend, sent.attempt_id, ObservedState.SUCCEEDED)
    if is_compacted:
        server.compact()
    wait_for("watch", lambda: backend._watch.is_live, bool, 15)
    found = wait_for("copy", lambda: backend._watch.find(sent.attempt_id), bool, 15)
    assert found["status"]["jobStatus"] == "SUCCEEDED"


def test_pods_that_find_no_room_are_told_of(house: House, operator: RayJobOperator) -> None:
    backend, sent = house.open(), submission()
    message = "0/3 nodes are available: 3 Insufficient cpu."
    operator.clusters.unschedulable = message
    backend.submit(sent)
    seen = wait_for(
        "reason",
        lambda: backend.observe(sent.attempt_id),
        lambda seen: "Unschedulable" in seen.message,
        20,
    )
    assert seen.state is PENDING and message in seen.message
    operator.clusters.unschedulable = None
    wait_for_state(backend, sent.attempt_id, RUNNING)


def test_a_deleted_rayjob_is_not_found(house: House, operator: RayJobOperator) -> None:
    backend, sent = house.open(), submission()
    backend.submit(sent)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    place = ("ray.io", "v1", house.cluster.namespace, "rayjobs", sent.attempt_id)
    house.api.delete_namespaced_custom_object(*place)
    wait_for_state(backend, sent.attempt_id, NOT_FOUND)
    assert house.open().observe(sent.attempt_id).state is NOT_FOUND


# ---- Kueue


def test_kueue_admits_a_job_and_takes_its_room_back(house: House, operator: RayJobOperator) -> None:
    kueue = KueueStandIn(house.cluster)
    backend, sent = house.open(), submission(queue="ads")
    backend.submit(sent)
    seen = backend.observe(sent.attempt_id)
    assert seen.state is PENDING and "admission by Kueue queue ads" in seen.message
    kueue.admit(house.cluster.namespace, sent.attempt_id)
    wait_for_state(backend, sent.attempt_id, RUNNING)
    kueue.evict(house.cluster.namespace, sent.attempt_id)
    seen = wait_for_state(backend, sent.attempt_id, ObservedState.FAILED)
    assert seen.reason is EndReason.PREEMPTED
    # Admitted once more, KubeRay would start the same attempt again.
    wait_for("rayjobs", house.rayjobs, lambda found: not found, 15)
    assert len(operator.scripted.submitted) == 1


# ---- stop


def test_a_head_that_does_not_answer_is_given_half_a_minute(
    house: House, operator: RayJobOperator
) -> None:
    now = [1_000_000.0]
    first = house.open(clock=lambda: now[0])
    sent = submission()
    first.submit(sent)
    wait_for_state(first, sent.attempt_id, RUNNING)
    # The script's Ray is at an address that leads nowhere.
    with pytest.raises(BackendUnreachable, match="does not answer; its cluster is deleted"):
        first.stop(sent.attempt_id)
    noted = house.rayjobs()[sent.attempt_id]["metadata"]["annotations"][STOP_FAILED_AT]
    now[0] += STOP_GRACE_S - 1
    other = house.open(clock=lambda: now[0])
    with pytest.raises(BackendUnreachable):
        other.stop(sent.attempt_id)
    assert house.rayjobs()[sent.attempt_id]["metadata"]["annotations"][STOP_FAILED_AT] == noted
    now[0] += 2
    other.stop(sent.attempt_id)
    wait_for_state(first, sent.attempt_id, NOT_FOUND)
    assert operator.scripted.info(sent.attempt_id).status == "STOPPED"  # type: ignore[union-attr]


def test_what_ended_long_ago_is_swept_and_the_rest_stays(
    house: House, operator: RayJobOperator
) -> None:
    backend = house.open()
    ended, living = submission(0), submission(1)
    for sent in (ended, living):
        backend.submit(sent)
        wait_for_state(backend, sent.attempt_id, RUNNING)
    operator.scripted.finish(ended.attempt_id)
    wait_for_state(backend, ended.attempt_id, ObservedState.SUCCEEDED)
    later = house.open(clock=lambda: 4e9 + KEEP_ENDED_S, watches=False)
    later._sweep(list(house.rayjobs().values()))
    wait_for("rayjobs", house.rayjobs, lambda found: list(found) == [living.attempt_id], 15)

"""Own clusters when things go wrong halfway: none holds its room, or trains, for nobody.

KUBECONFIG makes it run against that cluster, as in test_kuberay.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.backends.kuberay import TAKE_DOWN_S
from service.backends.kuberay_manifest import secret_name_of
from service.backends.kuberay_sweep import KEEP_CUT_OFF_S, is_garbage
from service.domain import EndReason, ObservedState
from service.errors import BackendUnreachable
from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.cluster import kube_cluster, operator_for
from tests.integration.kube.operator import KueueStandIn
from tests.integration.kuberay_house import (
    House,
    house_in,
    submission,
    wait_for,
    wait_for_state,
)

pytestmark = pytest.mark.skipif(
    not CRD_FOLDER.exists(), reason="KubeRay's CRDs (../shared/kuberay-crds) are not here"
)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A namespace without an operator."""
    with kube_cluster() as cluster, house_in(cluster, tmp_path) as found:
        yield found


@pytest.fixture
def server(house: House) -> KubeApiServer:
    """The API server, to break."""
    if house.cluster.server is None:
        pytest.skip("a real API server takes no injected faults")
    return house.cluster.server


@pytest.mark.parametrize(("verb", "path"), [("create", "secrets"), ("patch", "rayjobs")])
def test_kueue_that_is_faster_than_a_cut_off_submission_changes_nothing(
    house: House, server: KubeApiServer, verb: str, path: str
) -> None:
    kueue, backend, sent = KueueStandIn(house.cluster), house.open(), submission(queue="ads")
    server.faults.fail(503, verb=verb, path=path)
    with pytest.raises(BackendUnreachable):
        backend.submit(sent)
    kueue.admit(house.cluster.namespace, sent.attempt_id)
    later = house.open()
    assert later.observe(sent.attempt_id).state is ObservedState.NOT_FOUND
    (cut_off,) = house.rayjobs().values()
    assert is_garbage(cut_off, time.time() + KEEP_CUT_OFF_S + 5), "where nobody carries it on"
    later.submit(sent)
    (found,) = house.rayjobs().values()
    assert found["spec"]["suspend"] is False and house.secrets_of(sent) == [secret_name_of(found)]
    assert later.observe(sent.attempt_id).state is ObservedState.PENDING


def test_a_conflict_over_a_quota_is_no_secret(house: House, server: KubeApiServer) -> None:
    backend, sent = house.open(watches=False), submission()
    message = 'Operation cannot be fulfilled on resourcequotas "team": it has been modified'
    server.faults.fail(409, verb="create", path="secrets", message=message)
    with pytest.raises(BackendUnreachable, match="a conflict in Kubernetes"):
        backend.submit(sent)
    wait_for("rayjobs", house.rayjobs, lambda found: not found, 15)
    backend.submit(sent)
    (found,) = house.rayjobs().values()
    assert house.secrets_of(sent) == [secret_name_of(found)]


def test_the_secret_of_an_earlier_rayjob_is_not_taken_for_this_ones(house: House) -> None:
    backend, sent = house.open(watches=False), submission()
    backend.submit(sent)
    (first,) = house.secrets_of(sent)
    place = ("ray.io", "v1", house.cluster.namespace, "rayjobs", sent.attempt_id)
    house.api.delete_namespaced_custom_object(*place)
    backend.submit(sent)
    (found,) = house.rayjobs().values()
    assert secret_name_of(found) in house.secrets_of(sent) and secret_name_of(found) != first


def test_a_driver_past_its_deadline_is_stopped_before_its_attempt_ends(house: House) -> None:
    with operator_for(house.cluster, poll_s=0.05) as operator:
        if operator is None:
            pytest.skip("KubeRay itself runs here: its Ray takes no script")
        backend, sent = house.open(ttl_s=3600), submission(deadline_s=3600)
        backend.submit(sent)
        wait_for_state(backend, sent.attempt_id, ObservedState.RUNNING)
        house.patch(sent.attempt_id, {"spec": {"activeDeadlineSeconds": 1}})
        seen = wait_for_state(backend, sent.attempt_id, ObservedState.FAILED)
        assert "deadline_s" in seen.message and not house.rayjobs()
        info = operator.scripted.info(sent.attempt_id)
        assert info is not None and info.status == "STOPPED"
        assert not [name for name in house.pods() if name.startswith(sent.attempt_id)]
        assert backend.observe(sent.attempt_id) == seen, "it is still known how it ended"


def test_a_cluster_that_does_not_go_is_not_waited_for_for_ever(house: House) -> None:
    with operator_for(house.cluster, poll_s=0.05) as operator:
        if operator is None:
            pytest.skip("KubeRay itself runs here: its Ray takes no script")
        backend, sent = house.open(watches=False), submission(deadline_s=1)
        backend.submit(sent)
        wait_for("over", lambda: _deployment(house, sent.attempt_id), "Failed".__eq__, 15)
        # Its finalizer stays: as where the operator is down, or a machine with pods.
        operator.frozen.set()
        seen = backend.observe(sent.attempt_id)
        assert seen.state is ObservedState.PENDING and "is taken down" in seen.message
        backend.stop(sent.attempt_id)
        late = house.open(clock=lambda: time.time() + TAKE_DOWN_S + 5, watches=False)
        assert late.observe(sent.attempt_id).state is ObservedState.FAILED


def test_a_head_that_is_lost_starts_no_second_driver(house: House) -> None:
    change = {"spec": {"gcsFaultToleranceOptions": None}}
    place = ("ray.io", "v1", house.cluster.namespace, "rayclusters", "shardloom-ray")
    house.api.patch_namespaced_custom_object(*place, change)
    with operator_for(house.cluster, poll_s=0.05, check_timeout_s=1.0) as operator:
        if operator is None:
            pytest.skip("KubeRay itself runs here: its Ray takes no script")
        backend, sent = house.open(), submission()
        backend.submit(sent)
        wait_for_state(backend, sent.attempt_id, ObservedState.RUNNING)
        operator.scripted.forget(sent.attempt_id)
        seen = wait_for_state(backend, sent.attempt_id, ObservedState.FAILED)
        assert seen.reason is EndReason.HOST_LOST
        assert len(operator.scripted.submitted) == 1


def test_what_keeps_the_cluster_itself_from_being_made_is_told(house: House) -> None:
    backend, sent = house.open(watches=False), submission()
    backend.submit(sent)
    started = {"jobDeploymentStatus": "Initializing", "rayClusterName": "not-made", "jobStatus": ""}
    place = ("ray.io", "v1", house.cluster.namespace, "rayjobs", sent.attempt_id)
    house.api.patch_namespaced_custom_object_status(*place, {"status": started})
    event = {
        "metadata": {"name": "no-cluster"},
        "involvedObject": {
            "kind": "RayJob",
            "name": sent.attempt_id,
            "namespace": house.cluster.namespace,
        },
        "type": "Warning",
        "reason": "FailedToCreateRayCluster",
        "message": "exceeded quota: team",
        "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    house.core.create_namespaced_event(house.cluster.namespace, event)
    seen = backend.observe(sent.attempt_id)
    assert seen.state is ObservedState.PENDING
    assert "FailedToCreateRayCluster: exceeded quota: team" in seen.message


def _deployment(house: House, name: str) -> str:
    return str(house.rayjobs()[name].get("status", {}).get("jobDeploymentStatus", ""))

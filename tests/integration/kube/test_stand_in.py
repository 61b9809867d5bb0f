"""The API server and the operator of the tests behave as Kubernetes and KubeRay do.

With KUBECONFIG set the same is asked of that cluster, but for faults.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client, watch

from tests.harness.kube.cluster import KubeCluster, RayJobs, ray_job, secret
from tests.harness.kube.objects import Manifest
from tests.harness.kube.operator import RayJobOperator
from tests.harness.kube.server import KubeApiServer
from tests.harness.wait import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def api(kube: KubeCluster) -> RayJobs:
    return RayJobs(kube)


def _refusal(call: Any, *args: Any, **more: Any) -> Manifest:
    """The Status that a call is answered with."""
    with pytest.raises(client.ApiException) as error:
        call(*args, **more)
    status: Manifest = json.loads(error.value.body)
    assert status["code"] == error.value.status
    return status


def _named(name: str, **metadata: Any) -> Manifest:
    manifest = ray_job(name)
    manifest["metadata"].update(metadata)
    return manifest


# ---- the API server


def test_the_schema_is_kept_and_unknown_fields_are_refused_when_asked(api: RayJobs) -> None:
    manifest = ray_job("a", colour="red")
    status = _refusal(api.create, manifest, field_validation="Strict")
    assert (status["code"], status["reason"]) == (400, "BadRequest")
    assert "colour" in status["message"]
    api.create(manifest)
    for spec, field in (
        ({"backoffLimit": "x"}, "spec.backoffLimit"),
        ({"preRunningDeadlineSeconds": 0}, "spec.preRunningDeadlineSeconds"),
        ({"metadata": {"a": 1}}, "spec.metadata.a"),
    ):
        status = _refusal(api.create, ray_job("b", **spec))
        assert (status["code"], status["reason"]) == (422, "Invalid")
        assert status["message"].startswith('RayJob.ray.io "b" is invalid: ')
        assert field in [cause["field"] for cause in status["details"]["causes"]]


def test_names_keep_the_rules_and_are_taken_once(api: RayJobs) -> None:
    status = _refusal(api.create, ray_job("Bad_Name"))
    assert "a lowercase RFC 1123 subdomain must consist of" in status["message"]
    api.create({**ray_job("a"), "status": {"jobStatus": "RUNNING"}})
    assert not api.status("a").get("jobStatus")
    status = _refusal(api.create, ray_job("a"))
    assert (status["code"], status["reason"]) == (409, "AlreadyExists")
    assert status["message"] == 'rayjobs.ray.io "a" already exists'


def test_an_update_of_an_older_version_is_a_conflict(api: RayJobs) -> None:
    old = api.create(ray_job("a"))
    new = {**old, "spec": {**old["spec"], "suspend": True}}
    written = api.replace("a", new)
    assert written["metadata"]["generation"] == 2
    status = _refusal(api.replace, "a", new)
    assert (status["code"], status["reason"]) == (409, "Conflict")
    assert "the object has been modified; please apply your changes" in status["message"]
    stale = {"metadata": {"resourceVersion": "1", "labels": {"q": "r"}}}
    assert _refusal(api.patch, "a", stale)["reason"] == "Conflict"
    del new["metadata"]["resourceVersion"]
    assert "must be specified for an update" in _refusal(api.replace, "a", new)["message"]
    again = api.replace("a", api.get("a"))
    version = written["metadata"]["resourceVersion"]
    assert again["metadata"]["resourceVersion"] == version, "nothing was changed"


def test_status_and_the_rest_are_written_apart(api: RayJobs) -> None:
    made = api.create(ray_job("a"))
    mixed = {**made, "spec": {**made["spec"], "suspend": True}, "status": {"jobStatus": "RUNNING"}}
    written = api.custom.replace_namespaced_custom_object_status(*api.where, "a", mixed)
    assert written["status"]["jobStatus"] == "RUNNING"
    assert "suspend" not in written["spec"]
    assert written["metadata"]["generation"] == 1
    changed = api.replace("a", {**written, "spec": mixed["spec"], "status": {}})
    assert changed["spec"]["suspend"] is True
    assert changed["status"]["jobStatus"] == "RUNNING"


def test_secrets_are_stored_encoded_and_merged_by_key(api: RayJobs) -> None:
    made = api.core.create_namespaced_secret(api.namespace, secret("s", a="b"))
    assert (made.data, made.type) == ({"a": "Yg=="}, "Opaque")
    api.core.patch_namespaced_secret("s", api.namespace, {"stringData": {"c": "d"}})
    assert api.core.read_namespaced_secret("s", api.namespace).data == {"a": "Yg==", "c": "ZA=="}
    wrong = {**secret("t"), "dat": {}}
    call = api.core.create_namespaced_secret
    assert _refusal(call, api.namespace, wrong, field_validation="Strict")["code"] == 400


def test_deletion_answers_with_a_status_and_knows_which_object_is_meant(api: RayJobs) -> None:
    uid = api.create(ray_job("a"))["metadata"]["uid"]
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="other"))
    assert _refusal(api.delete, "a", body=other)["reason"] == "Conflict"
    status = api.delete("a")
    assert status["status"] == "Success"
    assert status["details"] == {"name": "a", "group": "ray.io", "kind": "rayjobs", "uid": uid}
    assert _refusal(api.delete, "a")["message"] == 'rayjobs.ray.io "a" not found'


def test_finalizers_hold_an_object_until_the_last_is_gone(api: RayJobs) -> None:
    api.create(_named("a", finalizers=["shardloom.io/test"]))
    assert api.delete("a")["metadata"]["deletionTimestamp"]
    api.patch("a", {"metadata": {"finalizers": None}})
    assert _refusal(api.get, "a")["code"] == 404


def _owned(name: str, owner: Manifest) -> Manifest:
    manifest = secret(name)
    reference = {key: owner[key] for key in ("apiVersion", "kind")}
    about = {key: owner["metadata"][key] for key in ("name", "uid")}
    manifest["metadata"]["ownerReferences"] = [
        {**reference, **about, "controller": True, "blockOwnerDeletion": True}
    ]
    return manifest


def _secrets(api: RayJobs) -> list[str]:
    return [each.metadata.name for each in api.core.list_namespaced_secret(api.namespace).items]


def test_what_is_owned_goes_with_its_owner(api: RayJobs) -> None:
    owner = api.create(ray_job("a"))
    api.core.create_namespaced_secret(api.namespace, _owned("s", owner))
    api.delete("a")
    wait_for(lambda: not _secrets(api), "the Secret to go")
    api.core.create_namespaced_secret(api.namespace, _owned("s", owner))
    wait_for(lambda: not _secrets(api), "what names an owner that is gone to go")


def test_a_foreground_deletion_waits_for_what_is_owned(api: RayJobs) -> None:
    owner = api.create(ray_job("a"))
    dependent = _owned("s", owner)
    dependent["metadata"]["finalizers"] = ["shardloom.io/test"]
    api.core.create_namespaced_secret(api.namespace, dependent)
    api.delete("a", propagation_policy="Foreground", body={"propagationPolicy": "Foreground"})
    read = api.core.read_namespaced_secret
    wait_for(
        lambda: read("s", api.namespace).metadata.deletion_timestamp, "the Secret to be marked"
    )
    assert api.get("a")["metadata"]["finalizers"] == ["foregroundDeletion"]
    api.core.patch_namespaced_secret("s", api.namespace, {"metadata": {"finalizers": None}})
    wait_for(lambda: not api.names(), "the RayJob to go")


def test_selectors_choose_by_labels_and_fields(api: RayJobs) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2"}), ("c", {})):
        api.create(_named(name, labels=labels))
    assert api.names(label_selector="x=1") == ["a"]
    assert api.names(field_selector="metadata.name=b") == ["b"]
    assert _refusal(api.names, field_selector="spec.suspend=true")["code"] == 400


def _watch(api: RayJobs, **options: Any) -> list[tuple[str, str]]:
    """Types and names of the events of a watch of one second."""
    lists = api.custom.list_namespaced_custom_object
    events: Any = watch.Watch().stream(lists, *api.where, timeout_seconds=1, **options)
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events]


def test_a_watch_goes_on_from_a_version(api: RayJobs) -> None:
    made = api.create(_named("a", labels={"x": "1"}))
    assert _watch(api) == [("ADDED", "a")]
    api.patch("a", {"metadata": {"labels": {"x": "2"}}})
    api.patch("a", {"spec": {"suspend": True}})
    api.delete("a")
    since = {"resource_version": made["metadata"]["resourceVersion"]}
    assert _watch(api, **since) == [("MODIFIED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]
    assert _watch(api, label_selector="x=1", **since) == [("DELETED", "a")]


def test_who_may_not_is_told_what_and_where(kube: KubeCluster, api: RayJobs) -> None:
    rule = {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get"]}
    user = RayJobs(kube, kube.token_for("narrow", [rule]))
    user.create(ray_job("a"))
    assert user.get("a")["metadata"]["name"] == "a"
    status = _refusal(user.delete, "a")
    assert (status["code"], status["reason"]) == (403, "Forbidden")
    assert status["message"] == (
        f'rayjobs.ray.io "a" is forbidden: User "system:serviceaccount:{kube.namespace}:narrow" '
        'cannot delete resource "rayjobs" in API group "ray.io" in the namespace '
        f'"{kube.namespace}"'
    )
    write_status = user.custom.patch_namespaced_custom_object_status
    status = _refusal(write_status, *api.where, "a", {"status": {}})
    assert 'cannot patch resource "rayjobs/status"' in status["message"]
    assert _refusal(RayJobs(kube, "nonsense").get, "a")["code"] == 401


def test_bookmarks_tell_versions_of_what_a_watch_does_not_show() -> None:
    with KubeApiServer(bookmark_every_s=0.1) as server:
        core = client.CoreV1Api(server.client())
        core.create_namespaced_service_account("default", {"metadata": {"name": "c"}})
        events: Any = watch.Watch().stream(
            core.list_namespaced_secret,
            "default",
            resource_version="1",
            allow_watch_bookmarks=True,
            timeout_seconds=1,
        )
        bookmark = next(event for event in events if event["type"] == "BOOKMARK")
        assert bookmark["raw_object"]["metadata"]["resourceVersion"] == str(server.store.revision)


# ---- the operator


def _in_state(api: RayJobs, name: str, state: str) -> Manifest:
    """Status of a RayJob once its deployment is in a state."""

    def status() -> Manifest | None:
        found = api.status(name)
        return found if found.get("jobDeploymentStatus") == state else None

    return wait_for(status, f"{name} to be {state}")


def _wait_until_it_runs(api: RayJobs, name: str) -> Manifest:
    wait_for(lambda: api.status(name).get("jobStatus") == "RUNNING", f"{name} to run")
    return api.status(name)


def _wait_until_all_is_gone(api: RayJobs) -> None:
    wait_for(lambda: not api.clusters() and not api.pods(), "RayClusters and pods to go")


def test_a_job_runs_on_a_cluster_of_its_own_that_goes_when_it_ends(
    api: RayJobs, operator: RayJobOperator
) -> None:
    api.create(ray_job("a", entrypoint="python train.py", metadata={"who": "me"}, jobId="a-1"))
    running = _wait_until_it_runs(api, "a")
    assert running["jobDeploymentStatus"] == "Running"
    assert sorted(pod.status.phase for pod in api.pods()) == ["Running", "Running"]
    (request,) = operator.scripted.submitted
    assert (request.job_id, request.entrypoint) == ("a-1", "python train.py")
    operator.scripted.finish("a-1", "SUCCEEDED", "Job finished successfully.")
    ended = _in_state(api, "a", "Complete")
    assert ended["jobStatus"] == "SUCCEEDED"
    _wait_until_all_is_gone(api)

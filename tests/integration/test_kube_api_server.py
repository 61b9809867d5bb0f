"""Our API server behaves as a real one does; with KUBECONFIG set the same is asked of that."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.dynamic import DynamicClient

from tests.integration.kube.cluster import KubeCluster
from tests.integration.kube.manifests import ray_job, secret
from tests.integration.kube.ray_job_api import Api

Manifest = dict[str, Any]


@pytest.fixture
def api(kube: KubeCluster) -> Api:
    return Api(kube)


def _refusal(call: Any, *args: Any, **more: Any) -> Manifest:
    """The Status that a call is answered with."""
    with pytest.raises(client.ApiException) as error:
        call(*args, **more)
    status: Manifest = json.loads(error.value.body)
    assert status["code"] == error.value.status
    return status


def _until(ask: Any, timeout_s: float = 20.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (answer := ask()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return answer


def _named(which: str, **metadata: Any) -> Manifest:
    manifest = ray_job(which)
    manifest["metadata"].update(metadata)
    return manifest


def test_kinds_are_found_by_discovery(api: Api) -> None:
    kind = DynamicClient(api.api).resources.get(api_version="ray.io/v1", kind="RayJob")
    made = kind.create(body=_named("", generateName="j-"), namespace=api.namespace)
    assert made.metadata.name.startswith("j-")
    assert made.metadata.uid


def test_defaults_of_the_schema_are_filled_in_and_status_is_not_taken(api: Api) -> None:
    manifest = {**ray_job("a"), "status": {"jobStatus": "RUNNING"}}
    del manifest["spec"]["submissionMode"]
    made = api.create(manifest)
    assert made["spec"]["submissionMode"] == "K8sJobMode"
    assert made["spec"]["ttlSecondsAfterFinished"] == 0
    assert "status" not in made
    assert made["metadata"]["generation"] == 1


def test_unknown_fields_are_refused_when_asked_and_else_dropped(api: Api) -> None:
    manifest = ray_job("a", colour="red")
    container = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    container["containers"][0]["imagee"] = "x"
    status = _refusal(api.create, manifest, field_validation="Strict")
    assert (status["code"], status["reason"]) == (400, "BadRequest")
    assert status["message"] == (
        'RayJob in version "v1" cannot be handled as a RayJob: strict decoding error: unknown '
        'field "spec.colour", unknown field '
        '"spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].imagee"'
    )
    made = api.create(manifest)
    assert "colour" not in made["spec"]


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        ({"backoffLimit": "x"}, "spec.backoffLimit", "FieldValueTypeInvalid"),
        ({"suspend": "yes"}, "spec.suspend", "FieldValueTypeInvalid"),
        ({"managedBy": "me"}, "spec.managedBy", "FieldValueInvalid"),
        ({"preRunningDeadlineSeconds": 0}, "spec.preRunningDeadlineSeconds", "FieldValueInvalid"),
        ({"metadata": {"a": 1}}, "spec.metadata.a", "FieldValueTypeInvalid"),
        ({"deletionStrategy": {}}, "spec.deletionStrategy", "FieldValueInvalid"),
    ],
)
def test_the_schema_and_its_rules_are_kept(
    api: Api, spec: Manifest, field: str, reason: str
) -> None:
    status = _refusal(api.create, ray_job("a", **spec))
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert status["message"].startswith('RayJob.ray.io "a" is invalid: ')
    assert status["details"]["kind"] == "RayJob"
    assert (field, reason) in [(c["field"], c["reason"]) for c in status["details"]["causes"]]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"name": "Bad_Name"}, "a lowercase RFC 1123 subdomain must consist of"),
        ({"labels": {"a": "x" * 64}}, "must be no more than 63 bytes"),
        ({"labels": {"a": "x y"}}, "a valid label must be an empty string or consist of"),
        ({"labels": {"a b": "x"}}, "name part must consist of alphanumeric characters"),
        ({"annotations": {"a": "x" * 300_000}}, "may not be more than 262144 bytes"),
        ({"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x"}]}, "uid"),
    ],
)
def test_names_and_labels_keep_the_rules(api: Api, metadata: Manifest, said: str) -> None:
    status = _refusal(api.create, _named("a", **metadata))
    assert status["code"] == 422
    assert said in status["message"]


def test_names_are_taken_once(api: Api) -> None:
    api.create(ray_job("a"))
    status = _refusal(api.create, ray_job("a"))
    assert (status["code"], status["reason"]) == (409, "AlreadyExists")
    assert status["message"] == 'rayjobs.ray.io "a" already exists'
    assert status["details"] == {"name": "a", "group": "ray.io", "kind": "rayjobs"}


def test_an_update_of_an_older_version_is_a_conflict(api: Api) -> None:
    old = api.create(ray_job("a"))
    new = {**old, "spec": {**old["spec"], "suspend": True}}
    assert api.replace("a", new)["metadata"]["generation"] == 2
    status = _refusal(api.replace, "a", new)
    assert (status["code"], status["reason"]) == (409, "Conflict")
    assert "the object has been modified; please apply your changes" in status["message"]
    del new["metadata"]["resourceVersion"]
    assert "must be specified for an update" in _refusal(api.replace, "a", new)["message"]


def test_an_update_that_changes_nothing_writes_nothing(api: Api) -> None:
    made = api.create(ray_job("a"))
    again = api.replace("a", made)
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_status_and_the_rest_are_written_apart(api: Api) -> None:
    made = api.create(ray_job("a"))
    mixed = {
        **made,
        "spec": {**made["spec"], "suspend": True},
        "status": {"jobStatus": "RUNNING", "nonsense": 1},
    }
    written = api.custom.replace_namespaced_custom_object_status(*api.where, "a", mixed)
    assert written["status"] == {"jobStatus": "RUNNING", "failed": 0, "succeeded": 0}
    assert "suspend" not in written["spec"]
    assert written["metadata"]["generation"] == 1
    changed = api.replace("a", {**written, "spec": mixed["spec"], "status": {}})
    assert changed["spec"]["suspend"] is True
    assert changed["status"]["jobStatus"] == "RUNNING"


def test_patches_merge_or_follow_a_list(api: Api) -> None:
    api.create(_named("a", labels={"x": "1", "y": "2"}))
    merged = api.patch("a", {"metadata": {"labels": {"x": None, "z": "3"}}})
    assert merged["metadata"]["labels"] == {"y": "2", "z": "3"}
    listed = api.patch("a", [{"op": "replace", "path": "/metadata/labels/y", "value": "4"}])
    assert listed["metadata"]["labels"] == {"y": "4", "z": "3"}
    wrong = [{"op": "test", "path": "/metadata/labels/y", "value": "5"}]
    assert _refusal(api.patch, "a", wrong)["code"] == 422
    stale = {"metadata": {"resourceVersion": "1", "labels": {"q": "r"}}}
    assert _refusal(api.patch, "a", stale)["reason"] == "Conflict"


def test_secrets_are_stored_encoded_and_merged_by_key(api: Api) -> None:
    made = api.core.create_namespaced_secret(api.namespace, secret("s", a="b"))
    assert (made.data, made.type) == ({"a": "Yg=="}, "Opaque")
    api.core.patch_namespaced_secret("s", api.namespace, {"stringData": {"c": "d"}})
    assert api.core.read_namespaced_secret("s", api.namespace).data == {"a": "Yg==", "c": "ZA=="}
    big = _refusal(
        api.core.create_namespaced_secret, api.namespace, secret("t", a="x" * (1024 * 1024 + 1))
    )
    assert (
        big["message"]
        == 'Secret "t" is invalid: data: Too long: may not be more than 1048576 bytes'
    )
    bad = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "t"}, "data": {"a": "!!"}}
    assert _refusal(api.core.create_namespaced_secret, api.namespace, bad)["code"] == 400


def test_deletion_answers_with_a_status_and_knows_which_object_is_meant(api: Api) -> None:
    uid = api.create(ray_job("a"))["metadata"]["uid"]
    other = client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="other"))
    assert _refusal(api.delete, "a", body=other)["reason"] == "Conflict"
    status = api.delete("a")
    assert status["status"] == "Success"
    assert status["details"] == {"name": "a", "group": "ray.io", "kind": "rayjobs", "uid": uid}
    assert _refusal(api.delete, "a")["message"] == 'rayjobs.ray.io "a" not found'


def test_finalizers_hold_an_object_until_the_last_is_gone(api: Api) -> None:
    api.create(_named("a", finalizers=["shardloom.io/test"]))
    marked = api.delete("a")
    assert marked["metadata"]["deletionTimestamp"]
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 0
    new = {"metadata": {"finalizers": ["shardloom.io/test", "shardloom.io/other"]}}
    assert "no new finalizers can be added" in _refusal(api.patch, "a", new)["message"]
    api.patch("a", {"metadata": {"finalizers": None}})
    assert _refusal(api.get, "a")["code"] == 404


def _owned(name: str, owner: Manifest) -> Manifest:
    reference = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    manifest = secret(name)
    manifest["metadata"]["ownerReferences"] = [reference]
    return manifest


def _secrets(api: Api) -> list[str]:
    return [each.metadata.name for each in api.core.list_namespaced_secret(api.namespace).items]


@pytest.mark.parametrize(("policy", "remains"), [("Background", []), ("Orphan", ["s"])])
def test_what_is_owned_goes_with_its_owner_or_is_left(
    api: Api, policy: str, remains: list[str]
) -> None:
    owner = api.create(ray_job("a"))
    api.core.create_namespaced_secret(api.namespace, _owned("s", owner))
    api.delete("a", propagation_policy=policy)
    _until(lambda: api.names() == [] and _secrets(api) == remains)


def test_a_foreground_deletion_waits_for_what_is_owned(api: Api) -> None:
    owner = api.create(ray_job("a"))
    dependent = _owned("s", owner)
    dependent["metadata"]["finalizers"] = ["shardloom.io/test"]
    api.core.create_namespaced_secret(api.namespace, dependent)
    api.delete("a", propagation_policy="Foreground")
    _until(lambda: api.core.read_namespaced_secret("s", api.namespace).metadata.deletion_timestamp)
    assert api.get("a")["metadata"]["finalizers"] == ["foregroundDeletion"]
    api.core.patch_namespaced_secret("s", api.namespace, {"metadata": {"finalizers": None}})
    _until(lambda: api.names() == [])


def test_what_names_an_owner_that_is_gone_is_collected(api: Api) -> None:
    owner = api.create(ray_job("a"))
    api.delete("a")
    api.core.create_namespaced_secret(api.namespace, _owned("s", owner))
    _until(lambda: _secrets(api) == [])


def test_selectors_choose_by_labels_and_fields(api: Api) -> None:
    for name, labels in (("a", {"x": "1"}), ("b", {"x": "2"}), ("c", {})):
        api.create(_named(name, labels=labels))
    assert api.names(label_selector="x=1") == ["a"]
    assert api.names(label_selector="x in (1,2),x!=2") == ["a"]
    assert api.names(label_selector="!x") == ["c"]
    assert api.names(label_selector="x notin (1)") == ["b", "c"]
    assert api.names(field_selector="metadata.name=b") == ["b"]
    status = _refusal(api.names, field_selector="spec.suspend=true")
    assert status["message"] == "field label not supported: spec.suspend"


def test_pages_of_a_list_are_of_one_moment(api: Api) -> None:
    for name in ("a", "b", "c"):
        api.create(ray_job(name))
    first = api.custom.list_namespaced_custom_object(*api.where, limit=2)
    assert first["metadata"]["remainingItemCount"] == 1
    api.create(ray_job("d"))
    second = api.custom.list_namespaced_custom_object(
        *api.where, limit=2, _continue=first["metadata"]["continue"]
    )
    assert [each["metadata"]["name"] for each in second["items"]] == ["c"]
    assert not second["metadata"].get("continue")


def test_a_watch_goes_on_from_a_version(api: Api) -> None:
    made = api.create(_named("a", labels={"x": "1"}))
    api.patch("a", {"metadata": {"labels": {"x": "2"}}})
    api.patch("a", {"spec": {"suspend": True}})
    api.delete("a")
    events = watch.Watch().stream(
        api.custom.list_namespaced_custom_object,
        *api.where,
        resource_version=made["metadata"]["resourceVersion"],
        timeout_seconds=1,
    )
    assert [event["type"] for event in events] == ["MODIFIED", "MODIFIED", "DELETED"]
    selected = watch.Watch().stream(
        api.custom.list_namespaced_custom_object,
        *api.where,
        resource_version=made["metadata"]["resourceVersion"],
        label_selector="x=1",
        timeout_seconds=1,
    )
    assert [event["type"] for event in selected] == ["DELETED"]


def test_a_watch_without_a_version_begins_with_what_is_there(api: Api) -> None:
    api.create(ray_job("a"))
    events = watch.Watch().stream(
        api.custom.list_namespaced_custom_object, *api.where, timeout_seconds=1
    )
    assert [(e["type"], e["object"]["metadata"]["name"]) for e in events] == [("ADDED", "a")]


def test_who_may_not_is_told_what_and_where(kube: KubeCluster, api: Api) -> None:
    rule = {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create", "get"]}
    user = Api(kube, kube.token_for("narrow", [rule]))
    user.create(ray_job("a"))
    assert user.get("a")["metadata"]["name"] == "a"
    who = f'User "system:serviceaccount:{kube.namespace}:narrow" cannot'
    status = _refusal(user.delete, "a")
    assert (status["code"], status["reason"]) == (403, "Forbidden")
    assert status["message"] == (
        f'rayjobs.ray.io "a" is forbidden: {who} delete resource "rayjobs" in API group "ray.io" '
        f'in the namespace "{kube.namespace}"'
    )
    status = _refusal(user.core.list_secret_for_all_namespaces)
    assert status["message"] == (
        f'secrets is forbidden: {who} list resource "secrets" in API group "" at the cluster scope'
    )
    status = _refusal(
        user.custom.patch_namespaced_custom_object_status, *api.where, "a", {"status": {}}
    )
    assert 'cannot patch resource "rayjobs/status"' in status["message"]
    status = _refusal(Api(kube, "nonsense").get, "a")
    assert (status["code"], status["message"]) == (401, "Unauthorized")


def test_a_quota_says_what_is_used_up(kube: KubeCluster, api: Api) -> None:
    hard = {"count/rayjobs.ray.io": "1"}
    api.core.create_namespaced_resource_quota(
        api.namespace, {"metadata": {"name": "q"}, "spec": {"hard": hard}}
    )
    if kube.server is None:
        _until(lambda: api.core.read_namespaced_resource_quota("q", api.namespace).status.used, 60)
    api.create(ray_job("a"))
    status = _refusal(api.create, ray_job("b"))
    assert (status["code"], status["reason"]) == (403, "Forbidden")
    assert status["message"] == (
        'rayjobs.ray.io "b" is forbidden: exceeded quota: q, requested: count/rayjobs.ray.io=1, '
        "used: count/rayjobs.ray.io=1, limited: count/rayjobs.ray.io=1"
    )


def test_a_namespace_takes_all_it_has_along_and_nothing_more_in(
    kube: KubeCluster, api: Api
) -> None:
    api.create(_named("a", finalizers=["shardloom.io/test"]))
    api.core.delete_namespace(api.namespace)
    _until(lambda: api.get("a")["metadata"].get("deletionTimestamp"))
    status = _refusal(api.create, ray_job("b"))
    assert status["code"] == 403
    assert "because it is being terminated" in status["message"]
    assert status["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    api.patch("a", {"metadata": {"finalizers": None}})
    _until(lambda: kube.namespace not in [n.metadata.name for n in api.core.list_namespace().items])
    assert _refusal(api.create, ray_job("b"))["message"] == (
        f'namespaces "{kube.namespace}" not found'
    )


def test_what_is_not_served_is_not_found(api: Api) -> None:
    with pytest.raises(client.ApiException) as error:
        api.custom.list_namespaced_custom_object("ray.io", "v1", api.namespace, "raysonnets")
    assert error.value.status == 404
    assert error.value.body == "404 page not found\n"


def test_a_pod_needs_its_service_account(api: Api) -> None:
    spec = {"serviceAccountName": "trainer", "containers": [{"name": "c", "image": "i"}]}
    pod = {"metadata": {"name": "p"}, "spec": spec}
    status = _refusal(api.core.create_namespaced_pod, api.namespace, pod)
    assert status["message"] == (
        f'pods "p" is forbidden: error looking up service account {api.namespace}/trainer: '
        'serviceaccount "trainer" not found'
    )
    api.core.create_namespaced_service_account(api.namespace, {"metadata": {"name": "trainer"}})
    api.core.create_namespaced_pod(api.namespace, pod)


def test_a_dry_run_says_the_same_and_stores_nothing(api: Api) -> None:
    made = api.create(ray_job("a"), dry_run="All")
    assert made["metadata"]["uid"]
    assert api.names() == []
    assert _refusal(api.create, ray_job("a", suspend="x"), dry_run="All")["code"] == 422

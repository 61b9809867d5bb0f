"""What the API server of the tests must do, or tests of the backend would pass for nothing.

With KUBECONFIG set the same is asked of that cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.backends.kuberay.client import RAYJOBS, SECRETS, KubeApi, KubeRefused
from tests.harness.kube.backends import TIMEOUT_S
from tests.harness.kube.cluster import KubeCluster
from tests.harness.wait import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def api(kube: KubeCluster, tmp_path: Path) -> KubeApi:
    config = kube.kubeconfig(tmp_path / "config")
    return KubeApi.open(Path(config), kube.namespace, TIMEOUT_S)


def _ray_job(name: str, **spec: Any) -> dict[str, Any]:
    about = {"name": name}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}


def _is_there(api: KubeApi, name: str) -> bool:
    return name in [each["metadata"]["name"] for each in api.list(RAYJOBS)["items"]]


@pytest.mark.parametrize(
    ("name", "spec", "status", "told"),
    [
        ("a", {"colour": "red"}, 400, "colour"),
        ("a", {"backoffLimit": "x"}, 422, "spec.backoffLimit"),
        ("Bad_Name", {}, 422, "lowercase RFC 1123 subdomain"),
    ],
)
def test_what_a_definition_does_not_have_is_refused(
    api: KubeApi, name: str, spec: dict[str, Any], status: int, told: str
) -> None:
    with pytest.raises(KubeRefused, match=told) as refused:
        api.create(RAYJOBS, _ray_job(name, **spec))
    assert refused.value.status == status


def test_a_name_is_taken_once_and_an_older_version_is_a_conflict(api: KubeApi) -> None:
    api.create(RAYJOBS, {**_ray_job("a"), "status": {"jobStatus": "RUNNING"}})
    assert not api.get(RAYJOBS, "a").get("status"), "it is written apart"
    stale = {"metadata": {"resourceVersion": "1", "labels": {"q": "r"}}}
    for refused in (
        lambda: api.create(RAYJOBS, _ray_job("a")),
        lambda: api.patch(RAYJOBS, "a", stale),
        lambda: api.delete(RAYJOBS, "a", uid="other"),
    ):
        with pytest.raises(KubeRefused) as error:
            refused()
        assert error.value.is_conflict
    assert _is_there(api, "a")


def test_a_foreground_deletion_waits_for_what_is_owned(api: KubeApi) -> None:
    uid = api.create(RAYJOBS, _ray_job("a"))["metadata"]["uid"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "a", "uid": uid}
    held = {"finalizers": ["shardloom.io/test"]}
    references = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    about = {"name": "s", "ownerReferences": references, **held}
    api.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": about})
    api.delete(RAYJOBS, "a", uid)
    wait_for(lambda: "deletionTimestamp" in api.get(SECRETS, "s")["metadata"], "it to be marked")
    assert _is_there(api, "a")
    api.patch(SECRETS, "s", {"metadata": {"finalizers": None}})
    wait_for(lambda: not _is_there(api, "a"), "the RayJob to go")

"""Every object that is sent is valid, and has no field that Kubernetes or KubeRay do not know.

As strict as the API server's `fieldValidation: Strict`: unknown fields are errors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.chart import CHART, problems
from service.jobs.actions import merged
from tests.harness.kube.objects import built_in_validator, crd_validator
from tests.unit.k8s.rendering import (
    FULL,
    VERSION,
    Manifest,
    build,
    chart,
    every_variant,
    objects_of,
    of_kind,
    one,
    ray_cluster,
)

_CLUSTER_WIDE = {"ResourceFlavor", "ClusterQueue", "Queue"}
# The schemas of Prometheus' operator, Kueue, Volcano, Gateway API and Cilium are not at hand here.
_WITHOUT_SCHEMA = (
    *("monitoring.coreos.com/", "kueue.x-k8s.io/", "scheduling.volcano.sh/"),
    *("gateway.networking.k8s.io/", "cilium.io/"),
)
# The oldest version that docs/guides/kubernetes.md names, and the newest the package knows.
VERSIONS = ("1.32", kubernetes_validate.latest_version())


def _check_kubernetes(manifest: Manifest, version: str = VERSIONS[-1]) -> None:
    built_in_validator(manifest["apiVersion"], manifest["kind"], version).validate(manifest)


def _check_ray_cluster(manifest: Manifest) -> None:
    crd_validator("rayclusters.ray.io", "v1").validate(manifest)


def _pods_of_ray(cluster: Manifest) -> list[Manifest]:
    """Its pods; the CRD leaves their metadata open, which Kubernetes does not."""
    spec = cluster["spec"]
    templates = [each["template"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": "ray"},
            "spec": template["spec"],
        }
        for template in templates
    ]


@every_variant
def test_objects_of_kubernetes_and_of_kuberay_are_valid(variant: str) -> None:
    known = [
        m for m in build(variant) if not m["apiVersion"].startswith((*_WITHOUT_SCHEMA, "ray.io/"))
    ]
    for manifest, version in product([*known, *_pods_of_ray(ray_cluster(variant))], VERSIONS):
        _check_kubernetes(manifest, version)
    _check_ray_cluster(ray_cluster(variant))


def test_a_misspelt_field_is_an_error_whoever_defines_it() -> None:
    cluster = copy.deepcopy(ray_cluster(FULL))
    container = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(jsonschema.ValidationError, match="readinesProbe"):
        _check_ray_cluster(cluster)
    service = copy.deepcopy(one(build(FULL), "Deployment", "shardloom"))
    service["spec"]["template"]["spec"]["topologySpreadConstraint"] = []
    with pytest.raises(jsonschema.ValidationError, match="topologySpreadConstraint"):
        _check_kubernetes(service)


@every_variant
def test_objects_are_in_the_namespace_and_there_once(variant: str) -> None:
    names = [
        (each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in build(variant)
    ]
    assert len(set(names)) == len(names)
    for manifest in build(variant):
        namespace = manifest["metadata"].get("namespace")
        assert namespace == (None if manifest["kind"] in _CLUSTER_WIDE else "shardloom"), manifest


def test_a_namespace_of_an_isolated_project_has_what_its_clusters_refer_to() -> None:
    made = [each for each in build("gpu+isolated") if each not in build(FULL)]
    for manifest in made:
        if manifest["apiVersion"].startswith("monitoring"):
            continue
        _check_kubernetes(manifest)
    per_namespace = {
        namespace: sorted(
            (each["kind"], each["metadata"]["name"])
            for each in made
            if each["metadata"]["namespace"] == namespace
            and each["kind"] in ("ServiceAccount", "PersistentVolumeClaim", "RoleBinding")
        )
        for namespace in ("ads-training", "maps-training")
    }
    assert (
        per_namespace["ads-training"]
        == per_namespace["maps-training"]
        == [
            ("PersistentVolumeClaim", "shardloom-data"),
            ("PersistentVolumeClaim", "shardloom-runs"),
            ("RoleBinding", "shardloom-observer"),
            ("RoleBinding", "shardloom-own-clusters"),
            ("ServiceAccount", "shardloom-ray-head"),
            ("ServiceAccount", "shardloom-ray-worker"),
        ]
    )
    volumes = {
        each["metadata"]["namespace"]: each["spec"]["volumeName"]
        for each in made
        if each["metadata"]["name"] == "shardloom-runs"
    }
    assert volumes == {"ads-training": "ads-runs", "maps-training": "maps-runs"}
    (alone,) = of_kind(build("bucket+isolated"), "PersistentVolumeClaim")
    assert alone["metadata"]["namespace"] == "shardloom"


# ---- values


def test_helm_finds_nothing_to_complain_of_in_the_chart_of_this_version() -> None:
    assert problems(chart()) == []
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == VERSION


_ADS = {"namespace": "a", "runsVolume": "r", "dataVolume": "d"}


def _isolated(projects: Manifest) -> Manifest:
    return {"ownClusters": {"enabled": True, "projects": projects}}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"images": {"registry": ""}}, "images.registry: set the registry and folder"),
        ({"ray": {"groups": []}}, "at '/ray/groups': minItems"),
        ({"ray": {"groups": [{"gpus": 8}]}}, "at '/ray/groups/0': missing property 'name'"),
        ({"ray": {"redis": {"address": "redis"}}}, "at '/ray/redis/address': 'redis' does not"),
        ({"ray": {"shared": False}}, "ray.shared: false leaves jobs without any cluster"),
        ({"ray": {"groups": [{"name": "g", "minHosts": 9}]}}, "g has minHosts 9, more than its"),
        ({"ray": {"groups": [{"name": "g"}, {"name": "g"}]}}, "ray.groups: two are called g"),
        ({"storage": {"runs": {"enabled": False}}}, "run storage is always a volume"),
        ({"storage": {"runs": {"accessMode": "ReadWriteOnce"}}}, "is a volume of one machine"),
        ({"storage": {"runs": {"shared": False}}}, "gives the volume to one pod alone"),
        ({"service": {"settings": {"SHARDLOOM_TPYO": "1"}}}, "at '/service/settings'"),
        ({"ray": {"groups": [{"name": "head"}]}}, "head is the name of the head"),
        ({"ray": {"groups": [{"name": "g", "diskGiB": 40}]}}, "g has a diskGiB of 40"),
        ({"networkPolicies": {"ports": {"redis": []}}}, "at '/networkPolicies/ports/redis': minI"),
        ({"networkPolicies": {"outside": [{"cidr": "999.1.1.1/99"}]}}, "/outside/0/cidr': '999"),
        ({"networkPolicies": {"namespaces": {"kuberay": []}}}, "/kuberay': minItems"),
        ({"images": {"service": {"tag": "a b"}}}, "at '/images/service/tag'"),
        ({"ingress": {"enabled": True, "host": "not a host!"}}, "at '/ingress/host'"),
        (
            {
                "ingress": {"enabled": True, "host": "a.b"},
                "gateway": {"enabled": True, "host": "a.b", "parentRefs": [{"name": "g"}]},
            },
            "the service has one way in",
        ),
        ({"ingress": {"enabled": True}}, "at '/ingress/host': minLength"),
        ({"gateway": {"enabled": True, "host": "a.b"}}, "at '/gateway/parentRefs': minItems"),
        ({"service": {"settings": {"PORT": "1"}}}, "at '/service/settings'"),
        (_isolated({"ads": {"namespace": "a", "dataVolume": "d"}}), "ads has no runsVolume"),
        (_isolated({"ads": {"namespace": "a", "runsVolume": "r"}}), "ads has no dataVolume"),
        (_isolated({"ads": _ADS | {"namespace": "shardloom"}}), "shardloom, which is another's"),
        (_isolated({"ads": _ADS, "maps": _ADS}), "maps has the namespace a, which is another's"),
        ({"ownClusters": {"projects": {"ads": _ADS}}}, "at '/ownClusters/projects': maxProperties"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(wrong: Manifest, said: str) -> None:
    values = merged({"images": {"registry": "registry.example/ads"}}, wrong)
    with pytest.raises(helm_python.HelmError) as refused:
        objects_of(values)
    assert said in str(refused.value)


@dataclass(frozen=True)
class _Mistake:
    """A value at a path (`0` is the first of a list), and what Helm is to say of it."""

    path: tuple[str, ...]
    value: Any
    said: str

    def goes_with(self, other: _Mistake) -> bool:
        """Whether one document can have both: neither hides the other or changes its text."""
        if self.value is None and other.value is None and self.path[:-1] == other.path[:-1]:
            return False
        size = min(len(self.path), len(other.path))
        return self.path[:size] != other.path[:size]


def _together(mistakes: list[_Mistake]) -> Iterator[list[_Mistake]]:
    """All mistakes, in documents of as many as go together: Helm names each, in 15 ms for all."""
    while mistakes:
        made: list[_Mistake] = []
        for each in mistakes:
            if all(each.goes_with(other) for other in made):
                made.append(each)
        yield made
        mistakes = [each for each in mistakes if each not in made]


def _document(mistakes: list[_Mistake]) -> Manifest:
    """The values that have these mistakes."""
    values: Manifest = {}
    for each in mistakes:
        node: Any = values
        for name, below in pairwise(each.path):
            key = 0 if name == "0" else name
            empty: Any = [{}] if below == "0" else {}
            node = node.setdefault(key, empty) if isinstance(node, dict) else node[key]
        node[0 if each.path[-1] == "0" else each.path[-1]] = each.value
    return values


def _mistakes(schema: Manifest, at: Manifest, path: tuple[str, ...] = ()) -> Iterator[_Mistake]:
    """A wrong type, an unknown name and a missing value wherever the schema has a place for it."""
    if "$ref" in at:
        at = merged(schema["$defs"][at["$ref"].rpartition("/")[2]], {**at, "$ref": None})
    where = f"at '{''.join(f'/{name}' for name in path)}'"
    kind = at.get("type", "string")
    if path:
        yield _Mistake(path, 7 if kind in ("string", "array") else "wrong", where)
    if kind == "array":
        yield from _mistakes(schema, at["items"], (*path, "0"))
    if "properties" not in at:
        return
    if path[-2:] != ("parentRefs", "0"):
        yield _Mistake((*path, "unknown"), 1, f"{where}: additional properties 'unknown'")
    for name, each in at["properties"].items():
        yield from _mistakes(schema, each, (*path, name))
        # Helm takes a default away where null is given: nothing is left to stand for it.
        if name in at.get("required", ()) and "0" not in path:
            yield _Mistake((*path, name), None, f"{where}: missing property '{name}'")


def test_every_wrong_unknown_or_missing_value_is_refused_by_its_path() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = list(_mistakes(schema, schema))
    assert len(found) > 300
    with helm_python.Chart.load(chart()) as loaded:
        for mistakes in _together(found):
            values = _document(mistakes)
            images = values.setdefault("images", {})
            if isinstance(images, dict):
                images.setdefault("registry", "registry.example/ads")
            with pytest.raises(helm_python.HelmError) as refused:
                loaded.render(values, name="shardloom", namespace="shardloom")
            assert [each for each in mistakes if each.said not in str(refused.value)] == []

"""Every object that is sent is valid, and has no field that Kubernetes or KubeRay do not know.

As strict as the API server's `fieldValidation: Strict`: unknown fields are errors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import product

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.chart import CHART, problems
from tests.harness.kube.objects import built_in_validator, crd_validator, merged
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
        ({"networkPolicies": {"outside": [{"cidr": "999.1.1.1/99"}]}}, "/outside/0/cidr': '999"),
        (
            {
                "ingress": {"enabled": True, "host": "a.b"},
                "gateway": {"enabled": True, "host": "a.b", "parentRefs": [{"name": "g"}]},
            },
            "the service has one way in",
        ),
        ({"ingress": {"enabled": True}}, "at '/ingress/host': minLength"),
        ({"gateway": {"enabled": True, "host": "a.b"}}, "at '/gateway/parentRefs': minItems"),
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


def _values(at: Manifest, path: str = "") -> Iterator[tuple[str, Manifest]]:
    """What a schema says of each value, by its path."""
    yield path, at
    if "$ref" in at:
        # The definition says it all; what stands beside it is narrower.
        return
    for name, each in at.get("properties", {}).items():
        yield from _values(each, f"{path}/{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(each := at.get(key), dict):
            yield from _values(each, f"{path}/{key}")


def test_the_schema_has_a_type_for_every_value_and_knows_every_name() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    roots = {"": schema, **schema["$defs"]}
    found = dict(pair for name, root in roots.items() for pair in _values(root, name))
    assert len(found) > 150
    for path, each in found.items():
        assert each.keys() & {"type", "enum", "$ref"}, path
        if "properties" in each and "$ref" not in each:
            assert each.get("additionalProperties") is False, path

"""Every object that is sent is valid, and has no field that Kubernetes or KubeRay do not know.

As strict as the API server's `fieldValidation: Strict`: unknown fields are errors.
"""

from __future__ import annotations

import copy
import json
from itertools import product

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from deploy.chart import CHART, problems
from service.jobs.actions import merged
from tests.harness.kube.objects import CRD_FOLDER, built_in_validator, crd_validator
from tests.unit.k8s.rendering import (
    FULL,
    Manifest,
    build,
    chart,
    every_variant,
    objects_of,
    one,
    ray_cluster,
)

_CLUSTER_WIDE = {"ResourceFlavor", "ClusterQueue", "Queue"}
# The schemas of Prometheus' operator, Kueue, Volcano and the Gateway API are not at hand here.
_WITHOUT_SCHEMA = (
    *("monitoring.coreos.com/", "kueue.x-k8s.io/", "scheduling.volcano.sh/"),
    "gateway.networking.k8s.io/",
)
# The oldest version that docs/guides/kubernetes.md names, and the newest the package knows.
VERSIONS = ("1.32", kubernetes_validate.latest_version())

with_crds = pytest.mark.skipif(
    not CRD_FOLDER.is_dir(), reason=f"needs the CRDs of KubeRay v1.7.0 in {CRD_FOLDER}"
)


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
def test_objects_of_kubernetes_are_valid(variant: str) -> None:
    known = [
        m for m in build(variant) if not m["apiVersion"].startswith((*_WITHOUT_SCHEMA, "ray.io/"))
    ]
    for manifest, version in product([*known, *_pods_of_ray(ray_cluster(variant))], VERSIONS):
        _check_kubernetes(manifest, version)


@with_crds
@every_variant
def test_ray_cluster_is_valid_by_its_crd(variant: str) -> None:
    _check_ray_cluster(ray_cluster(variant))


@with_crds
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


# ---- values


def test_helm_finds_nothing_to_complain_of_in_the_chart() -> None:
    assert problems(chart()) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"images": {"registry": ""}}, "images.registry: set the registry and folder"),
        ({"images": {"regsitry": "x.example"}}, "at '/images': additional properties 'regsitry'"),
        ({"ray": {"groups": []}}, "at '/ray/groups': minItems"),
        ({"ray": {"groups": [{"name": "gpu", "gpu": 8}]}}, "at '/ray/groups/0': additional"),
        ({"ray": {"groups": [{"name": "g", "maxHosts": "4"}]}}, "at '/ray/groups/0/maxHosts': got"),
        ({"ray": {"groups": [{"gpus": 8}]}}, "at '/ray/groups/0': missing property 'name'"),
        ({"ray": {"faultTolerance": "rocksdb"}}, "at '/ray/faultTolerance': value must be one of"),
        ({"ray": {"redis": {"address": "redis"}}}, "at '/ray/redis/address': 'redis' does not"),
        ({"ray": {"shared": False}}, "ray.shared: false leaves jobs without any cluster"),
        ({"ingress": {"enabled": True, "host": "a.b"}}, "at '/ingress/tlsSecret': minLength"),
        ({"gateway": {"enabled": True, "host": "a.b"}}, "at '/gateway/parentRefs': minItems"),
        ({"service": {"settings": {"PORT": "1"}}}, "at '/service/settings'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(wrong: Manifest, said: str) -> None:
    values = merged({"images": {"registry": "registry.example/ads"}}, wrong)
    with pytest.raises(helm_python.HelmError) as refused:
        objects_of(values)
    assert said in str(refused.value)


def test_every_value_has_a_schema_that_allows_nothing_else() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys()

    def check(node: Manifest, at: Manifest, path: str) -> None:
        if "$ref" in at:
            at = {**schema["$defs"][at["$ref"].rpartition("/")[2]], **at}
        if "properties" in at:
            assert at["additionalProperties"] is False, path
            assert node.keys() <= at["properties"].keys(), path
            for name, value in node.items():
                if isinstance(value, dict):
                    check(value, at["properties"][name], f"{path}/{name}")

    for name, value in values.items():
        check(value, schema["properties"][name], f"/{name}")

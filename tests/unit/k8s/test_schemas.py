"""Every object that is sent is valid, and has no field that Kubernetes or KubeRay do not know.

As strict as the API server's `fieldValidation: Strict`: unknown fields are errors.
"""

from __future__ import annotations

import copy
from itertools import product

import jsonschema
import kubernetes_validate
import pytest

from tests.harness.kube.objects import CRD_FOLDER, built_in_validator, crd_validator
from tests.unit.k8s.rendering import (
    FOLDER,
    FULL,
    Manifest,
    build,
    build_folder,
    every_variant,
    one,
    ray_cluster,
)

_CLUSTER_WIDE = {"Namespace", "ResourceFlavor", "ClusterQueue", "Queue"}
# The schemas of Prometheus' operator, Kueue and Volcano are not at hand here.
_WITHOUT_SCHEMA = ("monitoring.coreos.com/", "kueue.x-k8s.io/", "scheduling.volcano.sh/")
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
    manifests = (*build(variant), *build_folder(FOLDER / "bootstrap"))
    known = [m for m in manifests if not m["apiVersion"].startswith((*_WITHOUT_SCHEMA, "ray.io/"))]
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

"""Every object that is sent is valid, and has no field that Kubernetes or KubeRay do not know."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import jsonschema
import pytest

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
from tests.unit.k8s.schemas import (
    CRDS,
    NEWEST_KUBERNETES,
    OLDEST_KUBERNETES,
    check_kubernetes,
    check_ray_cluster,
    is_of_kubernetes,
)

_CLUSTER_WIDE = {"Namespace", "ResourceFlavor", "ClusterQueue", "Queue"}

with_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"needs the CRDs of KubeRay v1.7.0 in {CRDS}"
)
VERSIONS = (OLDEST_KUBERNETES, NEWEST_KUBERNETES)


def _templates(cluster: Manifest) -> Iterator[tuple[str, Manifest]]:
    spec = cluster["spec"]
    yield "head", spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


@every_variant
def test_objects_of_kubernetes_are_valid(variant: str) -> None:
    manifests = (*build(variant), *build_folder(FOLDER / "bootstrap"))
    for manifest, version in product(filter(is_of_kubernetes, manifests), VERSIONS):
        check_kubernetes(manifest, version)


@with_crds
@every_variant
def test_ray_cluster_is_valid_by_its_crd(variant: str) -> None:
    check_ray_cluster(ray_cluster(variant))


@every_variant
def test_pods_of_the_ray_cluster_are_valid(variant: str) -> None:
    # The CRD leaves the metadata of pods open, which Kubernetes does not.
    for name, template in _templates(ray_cluster(variant)):
        metadata = {**template["metadata"], "name": name}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        for version in VERSIONS:
            check_kubernetes(pod, version)


@with_crds
def test_a_misspelt_field_is_an_error_whoever_defines_it() -> None:
    cluster = copy.deepcopy(ray_cluster(FULL))
    container = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(jsonschema.ValidationError, match="readinesProbe"):
        check_ray_cluster(cluster)
    service = copy.deepcopy(one(build(FULL), "Deployment", "shardloom"))
    service["spec"]["template"]["spec"]["topologySpreadConstraint"] = []
    with pytest.raises(jsonschema.ValidationError, match="topologySpreadConstraint"):
        check_kubernetes(service, NEWEST_KUBERNETES)


@every_variant
def test_objects_are_in_the_namespace_and_there_once(variant: str) -> None:
    names = [
        (each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in build(variant)
    ]
    assert len(set(names)) == len(names)
    for manifest in build(variant):
        namespace = manifest["metadata"].get("namespace")
        assert namespace == (None if manifest["kind"] in _CLUSTER_WIDE else "shardloom"), manifest

"""Validation as strict as the API server's `fieldValidation: Strict`: unknown fields are errors."""

from __future__ import annotations

import kubernetes_validate

from tests.harness.kube.objects import CRD_FOLDER as CRDS
from tests.harness.kube.objects import built_in_validator, crd_validator
from tests.unit.k8s.rendering import Manifest

__all__ = ["CRDS"]
# The oldest version that docs/guides/kubernetes.md names, and the newest the package knows.
OLDEST_KUBERNETES = "1.32"
NEWEST_KUBERNETES = kubernetes_validate.latest_version()

# The schemas of Prometheus' operator, Kueue and Volcano are not at hand here.
_WITHOUT_SCHEMA = ("monitoring.coreos.com/", "kueue.x-k8s.io/", "scheduling.volcano.sh/")


def is_of_kubernetes(manifest: Manifest) -> bool:
    """Whether it is an object of Kubernetes itself."""
    return not manifest["apiVersion"].startswith((*_WITHOUT_SCHEMA, "ray.io/"))


def check_kubernetes(manifest: Manifest, version: str) -> None:
    """Raise unless an object of Kubernetes itself is valid for that version."""
    built_in_validator(manifest["apiVersion"], manifest["kind"], version).validate(manifest)


def check_ray_cluster(manifest: Manifest) -> None:
    """Raise unless a RayCluster is valid by the schema of its CRD."""
    crd_validator("rayclusters.ray.io", "v1").validate(manifest)


def check_ray_job(manifest: Manifest) -> None:
    """Raise unless a RayJob is valid by the schema of its CRD."""
    crd_validator("rayjobs.ray.io", "v1").validate(manifest)

"""The RayJobs of a namespace, as a client of the API server writes and reads them."""

from __future__ import annotations

from typing import Any

from kubernetes import client

from tests.integration.kube.cluster import KubeCluster

Manifest = dict[str, Any]


class Api:
    """The API of a namespace, for the administrator or for a token."""

    def __init__(self, kube: KubeCluster, token: str | None = None) -> None:
        self.namespace = kube.namespace
        self.api = kube.client(token)
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.where = ("ray.io", "v1", kube.namespace, "rayjobs")

    def create(self, manifest: Manifest, **more: Any) -> Manifest:
        """Create a RayJob."""
        return self.custom.create_namespaced_custom_object(*self.where, manifest, **more)

    def get(self, name: str) -> Manifest:
        """One RayJob."""
        return self.custom.get_namespaced_custom_object(*self.where, name)

    def replace(self, name: str, manifest: Manifest) -> Manifest:
        """Replace a RayJob."""
        return self.custom.replace_namespaced_custom_object(*self.where, name, manifest)

    def patch(self, name: str, patch: Any) -> Manifest:
        """Merge a change into a RayJob, or apply a list of operations."""
        # Left to itself the client sends a list as a merge patch.
        kind = "json-patch" if isinstance(patch, list) else "merge-patch"
        return self.custom.patch_namespaced_custom_object(
            *self.where, name, patch, _content_type=f"application/{kind}+json"
        )

    def delete(self, name: str, **more: Any) -> Manifest:
        """Delete a RayJob."""
        return self.custom.delete_namespaced_custom_object(*self.where, name, **more)

    def names(self, **query: Any) -> list[str]:
        """Names of all RayJobs."""
        found = self.custom.list_namespaced_custom_object(*self.where, **query)
        return [each["metadata"]["name"] for each in found["items"]]

"""The RayCluster from which clusters of jobs' own are made: the live shared one, or a file.

The live one has what kustomize made of it (images by digest, patches of overlays), so that there is
one place for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import yaml

from service.backends.kuberay_api import RAYCLUSTERS, KubeApi, KubeRefused
from service.backends.kuberay_size import Manifest
from service.errors import BackendUnreachable

_MAX_AGE_S = 30.0


class Template(Protocol):
    """Where the manifest comes from."""

    def read(self) -> Manifest:
        """The manifest of a RayCluster; raises `BackendUnreachable`."""


class FileTemplate:
    """The first RayCluster in a YAML file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Manifest:
        """The manifest, read anew: a mounted ConfigMap changes under us."""
        try:
            documents = list(yaml.safe_load_all(self._path.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError) as error:
            raise BackendUnreachable(
                f"cannot read the cluster template {self._path} ({error}); "
                "SHARDLOOM_KUBERAY_TEMPLATE_FILE names it"
            ) from error
        for document in documents:
            if isinstance(document, dict) and document.get("kind") == "RayCluster":
                return document
        raise BackendUnreachable(f"{self._path} has no RayCluster; see k8s/base/raycluster.yaml")


class LiveTemplate:
    """A RayCluster of the namespace, looked at every half minute."""

    def __init__(
        self, api: KubeApi, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._name = name
        self._clock = clock
        self._known: tuple[float, Manifest] | None = None

    def read(self) -> Manifest:
        """The manifest as it is, or was a moment ago."""
        if self._known is None or self._clock() - self._known[0] > _MAX_AGE_S:
            self._known = (self._clock(), self._get())
        return self._known[1]

    def _get(self) -> Manifest:
        try:
            return self._api.get(RAYCLUSTERS, self._name)
        except KubeRefused as error:
            raise BackendUnreachable(
                f"no RayCluster {self._name} to make clusters from ({error}); "
                "SHARDLOOM_KUBERAY_TEMPLATE_CLUSTER names it, or give a file by "
                "SHARDLOOM_KUBERAY_TEMPLATE_FILE"
            ) from error

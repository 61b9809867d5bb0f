"""Manifests that tests of the API server and of the operator stand-in begin with."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Manifest = dict[str, Any]


def ray_job(name: str, **spec: Any) -> Manifest:
    """A RayJob with a head, one worker and the Secret `NAME-env` in their environment."""
    container = {
        "name": "ray",
        "image": "rayproject/ray:2.60.0",
        "envFrom": [{"secretRef": {"name": f"{name}-env", "optional": True}}],
    }
    template = {"spec": {"containers": [container]}}
    cluster = {
        "rayVersion": "2.60.0",
        "headGroupSpec": {"rayStartParams": {}, "template": template},
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                "replicas": 1,
                "minReplicas": 1,
                "maxReplicas": 1,
                "rayStartParams": {},
                "template": deepcopy(template),
            }
        ],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": "true",
            "submissionMode": "HTTPMode",
            "rayClusterSpec": cluster,
            "shutdownAfterJobFinishes": True,
            **spec,
        },
    }


def secret(name: str, **values: str) -> Manifest:
    """A Secret."""
    about = {"name": name}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": values}

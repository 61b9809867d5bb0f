"""The pods that the objects of a build lead to, whoever makes them, and their labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.unit.k8s.rendering import Manifest, build, ray_cluster


@dataclass(frozen=True)
class Pod:
    """A pod template: `owner` names its object, `replicas` how many there may be at once."""

    owner: str
    kind: str
    replicas: int
    about: Manifest
    spec: Manifest

    @property
    def labels(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.about["labels"]
        return found

    @property
    def component(self) -> str:
        """What part of Shardloom it is."""
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Manifest]:
        """All of them; with `autoscaler` in the head, which KubeRay adds."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def lasts(self) -> bool:
        """Whether it runs until it is stopped."""
        return self.kind not in ("Job", "CronJob")


def pods(variant: str, component: str = "") -> list[Pod]:
    """The pods of a variant, those of its cluster template too; with `component`, those of it."""
    manifests = build(variant)
    found = pods_of(manifests if "own-only" not in variant else (*manifests, ray_cluster(variant)))
    return [pod for pod in found if component in ("", pod.component)]


def pods_of(manifests: tuple[Manifest, ...]) -> list[Pod]:
    """Every kind of pod that these objects lead to."""
    return [pod for each in manifests for pod in _pods_of(each)]


def _pods_of(manifest: Manifest) -> Iterator[Pod]:
    kind, spec = manifest["kind"], manifest.get("spec", {})
    name = manifest["metadata"]["name"]
    if kind in ("Deployment", "StatefulSet", "Job"):
        yield _pod(name, kind, spec.get("replicas", 1), spec["template"])
    if kind == "CronJob":
        yield _pod(name, kind, 1, spec["jobTemplate"]["spec"]["template"])
    if kind == "RayCluster":
        yield _head_of(name, spec)
        for group in spec["workerGroupSpecs"]:
            yield _pod(
                f"{name}/{group['groupName']}", kind, group["maxReplicas"], group["template"]
            )


def _pod(owner: str, kind: str, replicas: int, template: Manifest) -> Pod:
    return Pod(owner, kind, replicas, template["metadata"], template["spec"])


def _head_of(name: str, spec: Manifest) -> Pod:
    template = spec["headGroupSpec"]["template"]
    options = spec["autoscalerOptions"]
    # As KubeRay v1.7.0 makes it (BuildAutoscalerContainer, mergeAutoscalerOverrides).
    autoscaler = {
        "name": "autoscaler",
        "image": template["spec"]["containers"][0]["image"],
        "command": ["/bin/bash", "-c", "--"],
        **{
            key: options[key]
            for key in ("args", "resources", "securityContext", "env", "volumeMounts")
        },
    }
    containers = [*template["spec"]["containers"], autoscaler]
    whole = {**template, "spec": {**template["spec"], "containers": containers}}
    return _pod(f"{name}/head", "RayCluster", 1, whole)


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes something with these labels; an empty one takes all."""
    selector = selector or {}
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(each, labels) for each in selector.get("matchExpressions", []))


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    if expression["operator"] == "In":
        return value in expression["values"]
    raise AssertionError(f"these tests do not know the operator {expression['operator']}")

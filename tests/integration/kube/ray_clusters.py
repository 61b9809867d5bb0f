"""The RayCluster half of the operator stand-in: pods by the groups of a cluster, and its status."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from kubernetes import client

from tests.integration.kube.rayjob_states import owner_reference

Manifest = dict[str, Any]

_NOT_THERE = 404


def pods_of(cluster: Manifest) -> Iterator[Manifest]:
    """Pods that a RayCluster is to have: a head, and each group's hosts."""
    spec = cluster["spec"]
    yield _pod(cluster, "head", "headgroup", "head", spec["headGroupSpec"]["template"])
    for group in spec.get("workerGroupSpecs", ()):
        replicas = max(group.get("replicas", 0), group.get("minReplicas", 0))
        for index in range(0 if group.get("suspend") else replicas * group.get("numOfHosts", 1)):
            name = f"{group['groupName']}-worker-{index}"
            yield _pod(cluster, "worker", group["groupName"], name, group["template"])


def _pod(cluster: Manifest, node_type: str, group: str, name: str, template: Manifest) -> Manifest:
    about, cluster_name = template.get("metadata", {}), cluster["metadata"]["name"]
    labels = {
        **about.get("labels", {}),
        "ray.io/cluster": cluster_name,
        "ray.io/node-type": node_type,
        "ray.io/group": group,
        "ray.io/is-ray-node": "yes",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{cluster_name}-{name}",
            "labels": labels,
            "annotations": about.get("annotations", {}),
            "ownerReferences": [owner_reference("RayCluster", cluster)],
        },
        "spec": template["spec"],
    }


class RayClusters:
    """Makes the pods of RayClusters and says when a cluster is ready.

    `unschedulable` is a scheduler's message while there is no room: pods are made but stay
    Pending. It does not add or remove pods once they are there (no autoscaler), and makes no
    Services.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self.unschedulable: str | None = None

    def reconcile(self, cluster: Manifest) -> None:
        """One step for one cluster."""
        if "deletionTimestamp" in cluster["metadata"]:
            return
        wanted = list(pods_of(cluster))
        running = [self._bring_up(pod, cluster["metadata"]["namespace"]) for pod in wanted]
        status = _status(cluster, wanted, all(running))
        if status != cluster.get("status", {}):
            self._write_status({**cluster, "status": status})

    def _bring_up(self, pod: Manifest, namespace: str) -> bool:
        """Make a pod if it is not there; says whether it runs."""
        name = pod["metadata"]["name"]
        try:
            found = self._core.read_namespaced_pod(name, namespace)
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            self._core.create_namespaced_pod(namespace, pod)
            return False
        if found.status.phase == "Pending" and found.metadata.deletion_timestamp is None:
            self._core.patch_namespaced_pod_status(
                name, namespace, {"status": self._pod_status(pod, namespace)}
            )
        return bool(found.status.phase == "Running")

    def _pod_status(self, pod: Manifest, namespace: str) -> Manifest:
        if self.unschedulable:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": self.unschedulable,
            }
            return {"phase": "Pending", "conditions": [condition]}
        missing = self.missing_secret(pod["spec"], namespace)
        containers = pod["spec"]["containers"]
        if missing:
            waiting = {
                "reason": "CreateContainerConfigError",
                "message": f'secret "{missing}" not found',
            }
            states = [_container_status(each, {"waiting": waiting}) for each in containers]
            return {"phase": "Pending", "containerStatuses": states}
        ready = {"type": "Ready", "status": "True"}
        states = [_container_status(each, {"running": {}}) for each in containers]
        return {"phase": "Running", "conditions": [ready], "containerStatuses": states}

    def missing_secret(self, pod_spec: Manifest, namespace: str) -> str | None:
        """Name of a Secret that the containers of a pod need and that is not there."""
        for name in _secret_names(pod_spec):
            if self._secret(name, namespace) is None:
                return name
        return None

    def env_of(self, cluster: Manifest) -> dict[str, str]:
        """Environment of the head's first container: plain values and those of Secrets.

        Ray's own variables are left out: they are about the pods of a real cluster.
        """
        namespace = cluster["metadata"]["namespace"]
        container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        env: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            name = source.get("secretRef", {}).get("name")
            env.update((name and self._secret(name, namespace)) or {})
        for each in container.get("env", ()):
            reference = each.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                values = self._secret(reference["name"], namespace) or {}
                env[each["name"]] = values.get(reference["key"], "")
            elif "valueFrom" not in each:
                env[each["name"]] = each.get("value", "")
        return {name: value for name, value in env.items() if not name.startswith("RAY_")}

    def _secret(self, name: str, namespace: str) -> dict[str, str] | None:
        try:
            data = self._core.read_namespaced_secret(name, namespace).data or {}
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            return None
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def _write_status(self, cluster: Manifest) -> None:
        about = cluster["metadata"]
        self._custom.replace_namespaced_custom_object_status(
            "ray.io", "v1", about["namespace"], "rayclusters", about["name"], cluster
        )


def _secret_names(pod_spec: Manifest) -> Iterator[str]:
    for container in pod_spec["containers"]:
        for source in container.get("envFrom", ()):
            reference = source.get("secretRef", {})
            if reference and not reference.get("optional"):
                yield reference["name"]
        for each in container.get("env", ()):
            reference = each.get("valueFrom", {}).get("secretKeyRef", {})
            if reference and not reference.get("optional"):
                yield reference["name"]


def _container_status(container: Manifest, state: Manifest) -> Manifest:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _status(cluster: Manifest, wanted: list[Manifest], is_ready: bool) -> Manifest:
    name = cluster["metadata"]["name"]
    num_workers = len(wanted) - 1
    status = {
        **cluster.get("status", {}),
        "desiredWorkerReplicas": num_workers,
        "availableWorkerReplicas": num_workers if is_ready else 0,
        "head": {"serviceName": f"{name}-head-svc", "podName": f"{name}-head"},
        "observedGeneration": cluster["metadata"].get("generation", 1),
    }
    return {**status, **({"state": "ready"} if is_ready else {})}

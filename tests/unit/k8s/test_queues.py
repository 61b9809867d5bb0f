"""Queues of the platform admit the cluster at its largest, by Kueue's own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal

import pytest
from kubernetes.utils.quantity import parse_quantity

from tests.harness.kube.objects import merged
from tests.unit.k8s.pods import Pod, pods_of
from tests.unit.k8s.rendering import (
    Manifest,
    build,
    objects_of,
    of_kind,
    one,
    ray_cluster,
    values,
)

# One group of hosts, alone and beside own clusters; two groups; hosts with RDMA.
_QUEUED = ("gpu+{}", "gpu+{}+own", "spot+{}", "multi-rack+{}")


@dataclass
class ClusterQueue:
    """What Kueue knows of a ClusterQueue with one resource group, and what is used of it."""

    covered: list[str]
    flavors: list[Manifest]
    left: dict[str, dict[str, Decimal]]

    @classmethod
    def of(cls, variant: str) -> ClusterQueue:
        """That of the local queue which the RayCluster names."""
        manifests = build(variant)
        local = one(
            manifests,
            "LocalQueue",
            ray_cluster(variant)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"],
        )
        whole = one(manifests, "ClusterQueue", local["spec"]["clusterQueue"])
        (group,) = whole["spec"]["resourceGroups"]
        left = {}
        for flavor in group["flavors"]:
            names = [each["name"] for each in flavor["resources"]]
            # Its webhook wants every flavor to have what is covered, in that order.
            assert names == group["coveredResources"]
            left[flavor["name"]] = {
                each["name"]: parse_quantity(each["nominalQuota"]) for each in flavor["resources"]
            }
        flavors = [one(manifests, "ResourceFlavor", name) for name in left]
        return cls(group["coveredResources"], flavors, left)

    def admit(self, pod: Pod, count: int) -> str:
        """The flavor that a podset is counted on, as `findFlavorForPodSets` finds it."""
        requests: dict[str, Decimal] = {}
        for container in pod.containers:
            for name, amount in container["resources"]["requests"].items():
                requests[name] = requests.get(name, Decimal(0)) + count * parse_quantity(amount)
        uncovered = [name for name in requests if name not in self.covered]
        assert not uncovered, f"{pod.owner}: {uncovered} unavailable in ClusterQueue"
        for flavor in self.flavors:
            left = self.left[flavor["metadata"]["name"]]
            if _fits(flavor, pod) and all(left[name] >= most for name, most in requests.items()):
                for name, most in requests.items():
                    left[name] -= most
                return str(flavor["metadata"]["name"])
        raise AssertionError(f"{pod.owner}: insufficient quota for {count} pods in {self.left}")


def _fits(flavor: Manifest, pod: Pod) -> bool:
    """Whether a podset may be on a flavor: its taints are tolerated, and its labels selected."""
    for taint in flavor["spec"].get("nodeTaints", []):
        if not any(_tolerates(each, taint) for each in pod.spec.get("tolerations", [])):
            return False
    # A selector's keys that the flavor does not have are none of its concern.
    labels, selector = flavor["spec"].get("nodeLabels", {}), pod.spec.get("nodeSelector", {})
    return all(selector.get(key, value) == value for key, value in labels.items())


def _tolerates(toleration: Manifest, taint: Manifest) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration["operator"] == "Exists":
        return bool(toleration.get("key", taint["key"]) == taint["key"])
    return bool((toleration["key"], toleration.get("value")) == (taint["key"], taint["value"]))


@pytest.mark.parametrize("variant", [each.format("kueue") for each in _QUEUED])
def test_kueue_admits_the_head_and_every_host(variant: str) -> None:
    cluster, queue = ray_cluster(variant), ClusterQueue.of(variant)
    ray = pods_of((cluster,))
    # First all with no host, which fits anywhere: a group stays on the flavor it is given then.
    first = {pod.owner: queue.admit(pod, int(pod.component == "ray-head")) for pod in ray}
    assert len(set(first.values())) == len(ray), "each on a flavor of its own"
    for pod in ray:
        if pod.component == "ray-worker":
            assert queue.admit(pod, pod.replicas) == first[pod.owner]
    if "+own" in variant:
        # Jobs' own clusters: as many as there are hosts, beside the shared one.
        (head,) = [pod for pod in ray if pod.component == "ray-head"]
        num_hosts = sum(pod.replicas for pod in ray if pod.component == "ray-worker")
        assert queue.admit(head, num_hosts) == first[head.owner]
    # Without it Kueue would suspend the whole cluster whenever a host is added.
    assert cluster["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"


def test_a_host_more_than_the_quota_is_not_admitted() -> None:
    queue = ClusterQueue.of("multi-rack+kueue")
    (worker,) = [pod for pod in pods_of((ray_cluster("multi-rack+kueue"),)) if pod.replicas == 16]
    with pytest.raises(AssertionError, match="insufficient quota"):
        queue.admit(worker, 17)
    queue.covered.remove("rdma/hca_shared_devices_a")
    with pytest.raises(AssertionError, match="unavailable in ClusterQueue"):
        queue.admit(worker, 1)


@pytest.mark.parametrize("variant", [each.format("volcano") for each in _QUEUED])
def test_the_volcano_queue_has_room_for_the_cluster(variant: str) -> None:
    cluster = ray_cluster(variant)
    (queue,) = of_kind(build(variant), "Queue")
    assert cluster["metadata"]["labels"]["volcano.sh/queue-name"] == queue["metadata"]["name"]
    for name, most in queue["spec"]["capability"].items():
        asked = sum(
            pod.replicas * parse_quantity(container["resources"]["requests"].get(name, 0))
            for pod in pods_of((cluster,))
            for container in pod.containers
        )
        assert asked <= parse_quantity(most)


@pytest.mark.parametrize("kind", ["kueue", "volcano"])
def test_sizes_of_the_largest_clusters_and_volumes_are_quantities(kind: str) -> None:
    large = {
        "ray": {"hosts": {"memoryGiB": 2048, "maxHosts": 600, "diskGiB": 28_000}},
        "storage": {"runs": {"sizeGiB": 1 << 20}, "data": {"sizeGiB": 2_000_000}},
        "queue": {"kind": kind},
    }
    texts = list(_texts_of(objects_of(merged(values("gpu"), large))))
    sizes = [text for text in texts if re.fullmatch(r"[0-9][^ ]*Gi", text)]
    assert {parse_quantity(each) for each in sizes} >= {(1 << 20) << 30, 2_000_000 << 30}
    assert ("1228800Gi" in sizes) == (kind == "kueue")


def _texts_of(value: object) -> Iterator[str]:
    below = value.values() if isinstance(value, dict) else value
    if isinstance(below, str):
        yield below
    elif isinstance(below, Iterable):
        for each in below:
            yield from _texts_of(each)

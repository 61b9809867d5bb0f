"""How large a cluster of a job's own is: pods of the template that its workers fill. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.backends.base import ClusterNeed, HostFacts
from service.errors import SubmissionRefused

Manifest = dict[str, Any]

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True)
class GroupShape:
    """What each pod of a worker group offers to Ray."""

    name: str
    num_cpus: float
    num_gpus: float
    memory_bytes: int
    num_hosts: int = 1

    def num_fitting(self, need: ClusterNeed) -> int:
        """How many workers fit a pod, as whole sharding groups where such must not be split."""
        fitting = int(self.num_cpus / need.cpus_per_worker + 1e-6)
        if self.gives_gpus(need):
            fitting = min(fitting, int(self.num_gpus))
        size = need.group_size
        is_spread = need.num_hosts > 1 and size is not None and size <= fitting
        return fitting // size * size if is_spread and size else fitting

    def gives_gpus(self, need: ClusterNeed) -> bool:
        """Whether each worker takes a GPU of the pod."""
        return need.device == "cuda" or (need.device == "auto" and self.num_gpus > 0)


@dataclass(frozen=True)
class ClusterSize:
    """The pods of a cluster: those that start, and the most that there may be."""

    shape: GroupShape
    num_fitting: int
    min_pods: int
    max_pods: int

    @property
    def is_elastic(self) -> bool:
        """Whether the autoscaler has anything to do."""
        return self.min_pods < self.max_pods


def size_of(need: ClusterNeed, groups: Sequence[Mapping[str, Any]]) -> ClusterSize:
    """The size for a job, in pods of the first worker group that holds its workers.

    Raises `SubmissionRefused` where none does.
    """
    shapes = [shape_of(group) for group in groups]
    # Machines with GPUs are the last that workers without any are given.
    for shape in sorted(shapes, key=lambda each: need.device == "cpu" and each.num_gpus > 0):
        fitting = shape.num_fitting(need)
        if fitting:
            _check_single(shape)
            least = max(need.num_hosts, math.ceil(need.min_workers / fitting))
            most = max(least, math.ceil(need.max_workers / fitting))
            return ClusterSize(shape, fitting, least, most)
    raise SubmissionRefused(_too_large(need, shapes))


def _check_single(shape: GroupShape) -> None:
    if shape.num_hosts > 1:
        raise SubmissionRefused(
            f"worker group {shape.name} of the cluster template has numOfHosts "
            f"{shape.num_hosts}; clusters of jobs' own are made of groups with 1"
        )


def _too_large(need: ClusterNeed, shapes: Sequence[GroupShape]) -> str:
    wanted = f"{need.cpus_per_worker:g} CPU(s)" + (" and a GPU" if need.device == "cuda" else "")
    offers = "; ".join(
        f"{each.name}: {each.num_cpus:g} CPU(s), {each.num_gpus:g} GPU(s)" for each in shapes
    )
    return (
        f"a worker takes {wanted}, which no pod of the cluster template has ({offers or 'none'}); "
        "lower resources.cpus_per_worker, change resources.device, or enlarge a worker group of "
        "the template"
    )


def shape_of(group: Mapping[str, Any]) -> GroupShape:
    """What Ray will count on a pod of a worker group, as KubeRay tells it.

    Raises `SubmissionRefused` where the group is no usable one.
    """
    try:
        return _shape_of(group)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SubmissionRefused(
            f"a worker group of the cluster template cannot be read ({type(error).__name__}: "
            f"{error}); the template is no usable RayCluster, compare it with "
            "k8s/base/raycluster.yaml"
        ) from error


def _shape_of(group: Mapping[str, Any]) -> GroupShape:
    (container, *_) = group["template"]["spec"]["containers"]
    resources = container.get("resources", {})
    amounts = {**resources.get("requests", {}), **resources.get("limits", {})}
    start = group.get("rayStartParams") or {}
    gpus = sum(quantity(amount) for name, amount in amounts.items() if name.endswith("/gpu"))
    # Ray rounds a share of a CPU up.
    cpus = math.ceil(quantity(amounts.get("cpu", 0)))
    return GroupShape(
        name=group["groupName"],
        num_cpus=float(start.get("num-cpus", cpus)),
        num_gpus=float(start.get("num-gpus", gpus)),
        memory_bytes=int(start.get("memory", quantity(amounts.get("memory", 0)))),
        num_hosts=int(group.get("numOfHosts", 1)),
    )


def quantity(text: str | float) -> float:
    """A Kubernetes quantity as a number, as in 500m, 1e3 or 16Gi; raises ValueError."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"'{text}' is no quantity of Kubernetes")
    return float(found[1]) * _UNITS[found[2]]


def hosts_of(size: ClusterSize) -> tuple[HostFacts, ...]:
    """The hosts of a cluster at its largest, which have no addresses yet."""
    shape = size.shape
    return tuple(
        HostFacts(
            address=f"{shape.name}-{index}",
            num_cpus=shape.num_cpus,
            num_gpus=shape.num_gpus,
            memory_bytes=shape.memory_bytes,
        )
        for index in range(size.max_pods)
    )

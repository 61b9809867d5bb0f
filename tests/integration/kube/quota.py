"""ResourceQuota: how many objects of a kind a namespace may have, and what its pods may request.

Counted: `count/PLURAL.GROUP` and the short names pods, secrets, configmaps, services;
`requests.cpu`, `requests.memory`, `cpu`, `memory`, `limits.*` and extended resources of pods.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tests.integration.kube.errors import forbidden
from tests.integration.kube.resources import Resource
from tests.integration.kube.store import Store

Manifest = dict[str, Any]

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** (power + 1) for power, name in enumerate("kMGTPE")},
    **{f"{name}i": Decimal(1024) ** (power + 1) for power, name in enumerate("KMGTPE")},
}
_ENDED = ("Succeeded", "Failed")


def quantity(text: str | int | float) -> Decimal:
    """Value of a Kubernetes quantity like 500m or 4Gi."""
    said = str(text)
    number = said.rstrip("kKMGTPEmi")
    return Decimal(number) * _SUFFIXES[said[len(number) :]]


def check(store: Store, resource: Resource, manifest: Manifest) -> None:
    """Refuse (403) an object that would exceed a quota of its namespace."""
    namespace = manifest["metadata"].get("namespace", "")
    if not resource.namespaced:
        return
    asked = usage(resource.qualified, manifest)
    for limits in store.under("resourcequotas", namespace):
        hard = limits.get("spec", {}).get("hard", {})
        _check_specified(resource, manifest, limits["metadata"]["name"], hard)
        over = [
            name
            for name in sorted(asked)
            if name in hard and _used(store, namespace, name) + asked[name] > quantity(hard[name])
        ]
        if over:
            told = [
                ("requested", {name: asked[name] for name in over}),
                ("used", {name: _used(store, namespace, name) for name in over}),
                ("limited", {name: hard[name] for name in over}),
            ]
            said = ", ".join(
                f"{what}: {','.join(f'{k}={_shown(v)}' for k, v in values.items())}"
                for what, values in told
            )
            name = manifest["metadata"]["name"]
            why = f"exceeded quota: {limits['metadata']['name']}, {said}"
            raise forbidden(resource, name, why)


def _check_specified(resource: Resource, pod: Manifest, quota: str, hard: Manifest) -> None:
    """Containers must say what they use of the things that a quota limits."""
    if resource.qualified != "pods":
        return
    missing: dict[str, str] = {}
    for name in sorted(hard):
        part, _, what = name.partition(".")
        if part in ("requests", "limits") and what in ("cpu", "memory"):
            for container in pod.get("spec", {}).get("containers", ()):
                said = (container.get("resources") or {}).get(part) or {}
                if what not in said:
                    missing[name] = container["name"]
    if missing:
        told = ",".join(f"{name} for: {container}" for name, container in missing.items())
        name = pod["metadata"]["name"]
        raise forbidden(resource, name, f"failed quota: {quota}: must specify {told}")


def _shown(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"{value.normalize():f}" if value == value.to_integral() else f"{value * 1000:.0f}m"
    return str(value)


def usage(qualified: str, manifest: Manifest) -> dict[str, Decimal]:
    """What one object uses of each thing that a quota can limit."""
    used = {f"count/{qualified}": Decimal(1), qualified: Decimal(1)}
    if qualified == "pods" and manifest.get("status", {}).get("phase") not in _ENDED:
        for container in manifest.get("spec", {}).get("containers", ()):
            for part, values in (container.get("resources") or {}).items():
                for name, value in values.items() if part in ("requests", "limits") else ():
                    for told in (f"{part}.{name}", *((name,) if part == "requests" else ())):
                        used[told] = used.get(told, Decimal(0)) + quantity(value)
    return used


def _used(store: Store, namespace: str, name: str) -> Decimal:
    qualified = name.removeprefix("count/") if name.startswith("count/") else name
    if "requests" in name or "limits" in name or qualified in ("cpu", "memory"):
        qualified = "pods"
    counted = (usage(qualified, each) for each in store.under(qualified, namespace))
    return sum((each.get(name, Decimal(0)) for each in counted), Decimal(0))

"""Validation as strict as the API server's `fieldValidation: Strict`: unknown fields are errors."""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

from tests.harness.kube.objects import CRD_FOLDER as CRDS
from tests.harness.kube.objects import built_in_validator, crd_validator
from tests.unit.k8s.rendering import Manifest

__all__ = ["CRDS"]
# The oldest version that docs/guides/kubernetes.md names, and the newest the package knows.
OLDEST_KUBERNETES = "1.32"
NEWEST_KUBERNETES = kubernetes_validate.latest_version()

_NAME = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_QUANTITY = {"type": ["string", "integer"]}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_EXPRESSION = _closed(("key", "operator"), key=_NAME, operator=_NAME, values=_list(_NAME))
_SELECTOR = _closed(matchLabels=_LABELS, matchExpressions=_list(_EXPRESSION))
_AUTHORIZATION = _closed(
    ("credentials",), type=_NAME, credentials=_closed(("name", "key"), name=_NAME, key=_NAME)
)
_ENDPOINT = _closed(("port",), port=_NAME, path=_NAME, interval=_NAME, authorization=_AUTHORIZATION)
_RULE = {
    "oneOf": [
        _closed(("record", "expr"), record=_NAME, expr=_NAME),
        _closed(
            ("alert", "expr", "labels", "annotations"),
            **{"alert": _NAME, "expr": _NAME, "for": _NAME},
            labels=_LABELS,
            annotations=_LABELS,
        ),
    ]
}
_QUOTA = _closed(("name", "nominalQuota"), name=_NAME, nominalQuota=_QUANTITY)
_FLAVOR = _closed(("name", "resources"), name=_NAME, resources=_list(_QUOTA))
_GROUP = _closed(
    ("coveredResources", "flavors"), coveredResources=_list(_NAME), flavors=_list(_FLAVOR)
)
_PREEMPTION = {"enum": ["Never", "LowerPriority", "LowerOrNewerEqualPriority", "Any"]}

# Objects of operators whose schemas are not at hand here: the fields that we use, and no others,
# written down from the operators' reference pages. A field that we begin to use is added here.
THIRD_PARTY = {
    "monitoring.coreos.com/v1 ServiceMonitor": _closed(
        ("selector", "endpoints"), selector=_SELECTOR, endpoints=_list(_ENDPOINT)
    ),
    "monitoring.coreos.com/v1 PodMonitor": _closed(
        ("selector", "podMetricsEndpoints"),
        selector=_SELECTOR,
        podMetricsEndpoints=_list(_ENDPOINT),
    ),
    "monitoring.coreos.com/v1 PrometheusRule": _closed(
        ("groups",), groups=_list(_closed(("name", "rules"), name=_NAME, rules=_list(_RULE)))
    ),
    "kueue.x-k8s.io/v1beta2 ResourceFlavor": _closed(nodeLabels=_LABELS),
    "kueue.x-k8s.io/v1beta2 LocalQueue": _closed(("clusterQueue",), clusterQueue=_NAME),
    "kueue.x-k8s.io/v1beta2 ClusterQueue": _closed(
        ("resourceGroups",),
        namespaceSelector=_SELECTOR,
        queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
        preemption=_closed(withinClusterQueue=_PREEMPTION, reclaimWithinCohort=_PREEMPTION),
        resourceGroups=_list(_GROUP),
    ),
    "scheduling.volcano.sh/v1beta1 Queue": _closed(
        weight={"type": "integer", "minimum": 1},
        reclaimable={"type": "boolean"},
        capability={"type": "object", "additionalProperties": _QUANTITY},
    ),
}


def type_of(manifest: Manifest) -> str:
    """API version and kind, as in `v1 Service`."""
    return f"{manifest['apiVersion']} {manifest['kind']}"


def check_kubernetes(manifest: Manifest, version: str) -> None:
    """Raise unless an object of Kubernetes itself is valid for that version."""
    built_in_validator(manifest["apiVersion"], manifest["kind"], version).validate(manifest)


def check_third_party(manifest: Manifest) -> None:
    """Raise unless an object has only fields that `THIRD_PARTY` lists."""
    schema = _closed(
        ("apiVersion", "kind", "metadata"),
        apiVersion=_NAME,
        kind=_NAME,
        metadata=_closed(
            ("name",), name=_NAME, namespace=_NAME, labels=_LABELS, annotations=_LABELS
        ),
        spec=THIRD_PARTY[type_of(manifest)],
    )
    jsonschema.validate(manifest, schema)


def check_ray_cluster(manifest: Manifest) -> None:
    """Raise unless a RayCluster is valid by the schema of its CRD."""
    crd_validator("rayclusters.ray.io", "v1").validate(manifest)


def check_ray_job(manifest: Manifest) -> None:
    """Raise unless a RayJob is valid by the schema of its CRD."""
    crd_validator("rayjobs.ray.io", "v1").validate(manifest)

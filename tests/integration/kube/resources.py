"""The kinds that the API server serves: built-in ones, and those of custom definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.integration.kube.schema import Schema, built_in_schema

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Resource:
    """One kind as it is served: names, scope, subresources, schema."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: frozenset[str] = frozenset()
    short_names: tuple[str, ...] = ()
    custom: bool = False
    schema: Schema = field(default_factory=Schema, compare=False, hash=False)

    @property
    def qualified(self) -> str:
        """Name as error texts and rules have it, like rayjobs.ray.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """As in an object's apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def to_discovery(self) -> list[dict[str, Any]]:
        """Entries of the resource and its subresources in an APIResourceList."""
        entry: dict[str, Any] = {
            "name": self.plural,
            "singularName": self.kind.lower(),
            "namespaced": self.namespaced,
            "kind": self.kind,
            "verbs": list(VERBS),
        }
        if self.short_names:
            entry["shortNames"] = list(self.short_names)
        subresources = [
            {
                "name": f"{self.plural}/{name}",
                "singularName": "",
                "namespaced": self.namespaced,
                "kind": self.kind,
                "verbs": ["get"] if name == "log" else ["get", "patch", "update"],
            }
            for name in sorted(self.subresources)
        ]
        return [entry, *subresources]


def _built_in(
    group: str,
    kind: str,
    plural: str,
    *,
    namespaced: bool = True,
    subresources: str = "",
    **more: Any,
) -> Resource:
    return Resource(
        group=group,
        version="v1",
        plural=plural,
        kind=kind,
        namespaced=namespaced,
        subresources=frozenset(subresources.split()),
        schema=built_in_schema(kind, group),
        **more,
    )


@cache
def built_in_resources() -> tuple[Resource, ...]:
    """What is served without any custom definition."""
    rbac = "rbac.authorization.k8s.io"
    return (
        _built_in("", "Namespace", "namespaces", namespaced=False, subresources="status"),
        _built_in("", "Secret", "secrets"),
        _built_in("", "ConfigMap", "configmaps", short_names=("cm",)),
        _built_in("", "Pod", "pods", subresources="status log", short_names=("po",)),
        _built_in("", "Service", "services", subresources="status", short_names=("svc",)),
        _built_in("", "ServiceAccount", "serviceaccounts", short_names=("sa",)),
        _built_in("", "Event", "events", short_names=("ev",)),
        _built_in("", "ResourceQuota", "resourcequotas", subresources="status"),
        _built_in(rbac, "Role", "roles"),
        _built_in(rbac, "RoleBinding", "rolebindings"),
    )


CRD = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    subresources=frozenset({"status"}),
    short_names=("crd", "crds"),
)


def resources_of(definition: dict[str, Any]) -> list[Resource]:
    """Served versions of a CustomResourceDefinition."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            namespaced=spec["scope"] == "Namespaced",
            subresources=frozenset(version.get("subresources", {})),
            short_names=tuple(names.get("shortNames", ())),
            custom=True,
            schema=Schema(version["schema"]["openAPIV3Schema"]),
        )
        for version in spec["versions"]
        if version["served"]
    ]


@cache
def read_definitions(folder: Path) -> tuple[dict[str, Any], ...]:
    """CustomResourceDefinitions in the YAML files of a folder; not to be changed."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(
        document
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.load_all(path.read_text(encoding="utf-8"), loader)
        if document
    )

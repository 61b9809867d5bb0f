"""What is served where: groups, versions and kinds, by path; and the discovery documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.integration.kube.errors import method_not_allowed, no_such_path
from tests.integration.kube.resources import (
    CRD,
    Resource,
    built_in_resources,
    resources_of,
)
from tests.integration.kube.rest import Target

Manifest = dict[str, Any]

VERSION = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.2+in-process",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "python",
}
_ON_ONE = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_ON_MANY = {"GET": "list", "POST": "create", "DELETE": "deletecollection"}


def is_true(query: Mapping[str, str], name: str) -> bool:
    """A switch in a query, in the spellings that Go takes."""
    return query.get(name) in ("1", "t", "T", "true", "TRUE", "True")


@dataclass(frozen=True)
class Route:
    """A verb and what it is about."""

    verb: str
    target: Target


class Catalog:
    """Kinds by group, version and plural name; custom definitions come and go."""

    def __init__(self) -> None:
        self._resources = [*built_in_resources(), CRD]

    def define(self, definition: Manifest) -> None:
        """Serve the kinds of a CustomResourceDefinition."""
        new = resources_of(definition)
        names = {(each.qualified, each.version) for each in new}
        kept = [e for e in self._resources if (e.qualified, e.version) not in names]
        self._resources = [*kept, *new]

    def forget(self, qualified: str) -> None:
        """Serve a kind no more."""
        self._resources = [each for each in self._resources if each.qualified != qualified]

    def find(self, qualified: str) -> Resource | None:
        """A kind by its qualified name, in the version that comes first."""
        return next((each for each in self._resources if each.qualified == qualified), None)

    def served(self, group: str, version: str) -> list[Resource]:
        """Kinds of one group and version."""
        return [each for each in self._resources if (each.group, each.version) == (group, version)]

    def route(self, method: str, path: str, query: Mapping[str, str]) -> Route:
        """What a request is about; raises 404 for paths that cannot be anything.

        A kind that is not served is told by a resource without a kind.
        """
        parts = [part for part in path.split("/") if part]
        if parts[:1] == ["api"] and len(parts) >= 3:
            group, version, rest = "", parts[1], parts[2:]
        elif parts[:1] == ["apis"] and len(parts) >= 4:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            raise no_such_path()
        namespace = ""
        if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        return self._route(method, (group, version), namespace, rest, query)

    def _route(
        self,
        method: str,
        where: tuple[str, str],
        namespace: str,
        rest: list[str],
        query: Mapping[str, str],
    ) -> Route:
        found = [each for each in self.served(*where) if each.plural == rest[0]]
        subresource = rest[2] if len(rest) > 2 else ""
        if len(rest) > 3 or (found and subresource and subresource not in found[0].subresources):
            raise no_such_path()
        # Whoever may not ask for it is not told that it is not served.
        found = found or [Resource(*where, rest[0], kind="")]
        name = rest[1] if len(rest) > 1 else ""
        verbs = _ON_ONE if name else _ON_MANY
        if found[0].plural == "namespaces" and name:
            namespace = name
        if method not in verbs or (method == "POST" and found[0].namespaced and not namespace):
            raise method_not_allowed()
        verb = verbs[method]
        if verb == "list" and is_true(query, "watch"):
            verb = "watch"
        return Route(verb, Target(found[0], namespace, name, subresource))

    def document(self, path: str) -> Manifest | None:
        """The discovery document at a path; None where there is none."""
        parts = [part for part in path.split("/") if part]
        if parts == ["version"]:
            return VERSION
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        if parts == ["apis"]:
            groups = [self._group(name) for name in self._groups()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if len(parts) == 2 and parts[0] == "apis" and parts[1] in self._groups():
            return {"kind": "APIGroup", "apiVersion": "v1", **self._group(parts[1])}
        if len(parts) == 2 and parts[0] == "api":
            return self._list("", parts[1])
        if len(parts) == 3 and parts[0] == "apis":
            return self._list(parts[1], parts[2])
        return None

    def _groups(self) -> list[str]:
        return sorted({each.group for each in self._resources if each.group})

    def _group(self, name: str) -> Manifest:
        versions = dict.fromkeys(each.version for each in self._resources if each.group == name)
        told = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
        return {"name": name, "versions": told, "preferredVersion": told[0]}

    def _list(self, group: str, version: str) -> Manifest | None:
        served = self.served(group, version)
        if not served:
            return None
        entries = [entry for each in served for entry in each.to_discovery()]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": served[0].api_version,
            "resources": entries,
        }

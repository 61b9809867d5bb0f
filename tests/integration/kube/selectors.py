"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.integration.kube.errors import bad_request
from tests.integration.kube.resources import Resource

Manifest = dict[str, Any]
Selects = Callable[[Manifest], bool]

_IN = re.compile(r"^(?P<key>\S+)\s+(?P<how>in|notin)\s+\((?P<values>[^)]*)\)$")
_EQUALS = re.compile(r"^(?P<key>[^\s=!]+)\s*(?P<how>==|=|!=)\s*(?P<value>\S*)$")
_FIELDS = {
    "pods": ("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase"),
    "secrets": ("type",),
    "namespaces": ("status.phase",),
    "events": (
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.uid",
        "reason",
        "reportingComponent",
        "type",
    ),
}


def label_selector(text: str) -> Selects:
    """What `labelSelector` asks for; raises an `ApiError` if it cannot be read."""
    checks = [_label_check(part.strip()) for part in _split(text)]
    return lambda manifest: all(check(manifest["metadata"].get("labels") or {}) for check in checks)


def _split(text: str) -> list[str]:
    """Parts between commas that are not in parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_check(part: str) -> Callable[[dict[str, str]], bool]:
    if found := _IN.match(part):
        key, wanted = found["key"], {each.strip() for each in found["values"].split(",")}
        if found["how"] == "in":
            return lambda labels: labels.get(key) in wanted
        return lambda labels: labels.get(key) not in wanted
    if found := _EQUALS.match(part):
        key, value = found["key"], found["value"]
        if found["how"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if re.fullmatch(r"!?[A-Za-z0-9][A-Za-z0-9_./-]*", part):
        name, absent = part.lstrip("!"), part.startswith("!")
        return lambda labels: (name not in labels) is absent
    raise bad_request(f"unable to parse requirement: found '{part}', expected: a key and values")


def field_selector(text: str, resource: Resource) -> Selects:
    """What `fieldSelector` asks for; raises an `ApiError` for fields that cannot be asked for."""
    known = ("metadata.name", "metadata.namespace", *_FIELDS.get(resource.qualified, ()))
    checks: list[Selects] = []
    for part in _split(text):
        found = _EQUALS.match(part.strip())
        if not found:
            raise bad_request(f"invalid selector: '{text}'; can't understand '{part}'")
        if found["key"] not in known:
            raise bad_request(f"field label not supported: {found['key']}")
        checks.append(_field_check(found["key"], found["how"] != "!=", found["value"]))
    return lambda manifest: all(check(manifest) for check in checks)


def _field_check(path: str, wanted_equal: bool, value: str) -> Selects:
    def check(manifest: Manifest) -> bool:
        here: Any = manifest
        for name in path.split("."):
            here = here.get(name, "") if isinstance(here, dict) else ""
        return (str(here) == value) is wanted_equal

    return check

"""Patches: JSON merge patch (RFC 7386), JSON patch (RFC 6902), strategic merge for built-in kinds.

Of strategic merge the lists that pods, secrets and services have are known by their keys;
`$patch: delete` and `$patch: replace` work, ordering directives do not. There is no server-side
apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonpatch

from tests.integration.kube.errors import bad_request, rejected_patch, unsupported_media_type

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = ("finalizers",)


def patched(manifest: dict[str, Any], patch: Any, media_type: str, *, custom: bool) -> Any:
    """The object after a patch; raises an `ApiError` for one that does not apply."""
    ways: dict[str, Callable[[dict[str, Any], Any], Any]] = {
        JSON_PATCH: _json_patched,
        MERGE_PATCH: _merged,
    }
    if not custom:
        ways[STRATEGIC_PATCH] = _strategic
    if media_type not in ways:
        raise unsupported_media_type([*ways, APPLY_PATCH])
    return ways[media_type](copy.deepcopy(manifest), patch)


def _json_patched(manifest: dict[str, Any], patch: Any) -> Any:
    try:
        return jsonpatch.JsonPatch(patch).apply(manifest)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
        raise rejected_patch() from error


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _strategic(target: Any, patch: Any, field: str = "") -> Any:
    if isinstance(patch, list):
        return _strategic_list(target if isinstance(target, list) else [], patch, field)
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _strategic(result.get(name), value, name)
    return result


def _strategic_list(target: list[Any], patch: list[Any], field: str) -> list[Any]:
    if field in _SETS:
        return target + [each for each in patch if each not in target]
    key = _MERGE_KEYS.get(field)
    if key is None:
        return patch
    result = list(target)
    for part in patch:
        if key not in part:
            raise bad_request(f"map: {part} does not contain declared merge key: {key}")
        at = next((i for i, each in enumerate(result) if each.get(key) == part[key]), None)
        if part.get("$patch") == "delete":
            result = [each for each in result if each.get(key) != part[key]]
        elif at is None:
            result.append(part)
        else:
            result[at] = _strategic(result[at], part)
    return result

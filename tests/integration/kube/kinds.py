"""What is particular about single kinds: namespaces, secrets, pods."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

from tests.integration.kube.resources import Resource
from tests.integration.kube.schema import Cause

Manifest = dict[str, Any]

NAMESPACE = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
NAMESPACE_ENDS = (
    "The system is ensuring all content is removed from this namespace.  "
    "Upon completion, this namespace will automatically be purged by the system."
)
RETURNED_WHEN_DELETED = ("namespaces", "pods", "resourcequotas", "serviceaccounts", "services")
_MOST_DATA_BYTES = 1024 * 1024


def completed(manifest: Manifest, resource: Resource) -> Manifest:
    """An object with the defaults of its kind."""
    if resource.qualified == "namespaces":
        return _namespace(manifest)
    if resource.qualified == "secrets":
        return _secret(manifest)
    if resource.qualified == "pods":
        return {**manifest, "status": {"phase": "Pending", **manifest.get("status", {})}}
    return manifest


def _namespace(manifest: Manifest) -> Manifest:
    about = dict(manifest["metadata"])
    label = {"kubernetes.io/metadata.name": about.get("name", "")}
    about["labels"] = {**(about.get("labels") or {}), **label}
    spec = {"finalizers": ["kubernetes"], **manifest.get("spec", {})}
    status = {"phase": "Active", **manifest.get("status", {})}
    return {**manifest, "metadata": about, "spec": spec, "status": status}


def _secret(manifest: Manifest) -> Manifest:
    """stringData is written only; it ends up in data."""
    plain = manifest.get("stringData") or {}
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
    result = {name: part for name, part in manifest.items() if name != "stringData"}
    if encoded:
        result["data"] = {**(result.get("data") or {}), **encoded}
    return {"type": "Opaque", **result}


def causes(manifest: Manifest, old: Manifest | None, resource: Resource) -> list[Cause]:
    """What breaks the rules of a kind beyond its schema."""
    found: list[Cause] = []
    if resource.qualified in ("secrets", "configmaps"):
        found += _data_causes(manifest)
        found += _fixed_data_causes(manifest, old or {})
    if resource.qualified == "pods":
        found += _pod_causes(manifest, old)
    if old is not None and "deletionTimestamp" in old["metadata"]:
        # The API server says it twice of custom kinds.
        found += list(_finalizer_causes(manifest, old)) * (2 if resource.custom else 1)
    return found


def _data_causes(manifest: Manifest) -> Iterator[Cause]:
    data = manifest.get("data") or {}
    for key in data:
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key):
            rule = (
                "a valid config key must consist of alphanumeric characters, '-', '_' or '.' "
                "(e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is "
                "'[-._a-zA-Z0-9]+')"
            )
            yield Cause("FieldValueInvalid", f'Invalid value: "{key}": {rule}', f"data[{key}]")
    is_secret = manifest["kind"] == "Secret"
    num_bytes = sum(len(value) * 3 // 4 if is_secret else len(value) for value in data.values())
    if num_bytes > _MOST_DATA_BYTES:
        rule = f"Too long: may not be more than {_MOST_DATA_BYTES} bytes"
        yield Cause("FieldValueTooLong", rule, "data" if is_secret else "")


def _fixed_data_causes(manifest: Manifest, old: Manifest) -> Iterator[Cause]:
    if old.get("type") and manifest.get("type") != old["type"]:
        rule = f'Invalid value: "{manifest.get("type")}": field is immutable'
        yield Cause("FieldValueInvalid", rule, "type")
    if old.get("immutable"):
        for name in ("immutable", "data"):
            if manifest.get(name) != old.get(name):
                rule = "Forbidden: field is immutable when `immutable` is set"
                yield Cause("FieldValueForbidden", rule, name)


def _pod_causes(manifest: Manifest, old: Manifest | None) -> Iterator[Cause]:
    if not manifest.get("spec", {}).get("containers"):
        yield Cause("FieldValueRequired", "Required value", "spec.containers")
    for index, container in enumerate(manifest.get("spec", {}).get("containers") or ()):
        for name in ("name", "image"):
            if not container.get(name):
                field = f"spec.containers[{index}].{name}"
                yield Cause("FieldValueRequired", "Required value", field)
    if old is not None and _without_images(manifest) != _without_images(old):
        rule = (
            "Forbidden: pod updates may not change fields other than "
            "`spec.containers[*].image`,`spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing "
            "tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
            "previously negative)"
        )
        yield Cause("FieldValueForbidden", rule, "spec")


def _without_images(pod: Manifest) -> Manifest:
    return {
        name: [{**each, "image": ""} for each in part] if name.endswith("ontainers") else part
        for name, part in pod.get("spec", {}).items()
    }


def _finalizer_causes(manifest: Manifest, old: Manifest) -> Iterator[Cause]:
    before = old["metadata"].get("finalizers", ())
    new = [name for name in manifest["metadata"].get("finalizers", ()) if name not in before]
    if new:
        listed = ", ".join(f'"{name}"' for name in new)
        rule = (
            "Forbidden: no new finalizers can be added if the object is being deleted, "
            f"found new finalizers []string{{{listed}}}"
        )
        yield Cause("FieldValueForbidden", rule, "metadata.finalizers")

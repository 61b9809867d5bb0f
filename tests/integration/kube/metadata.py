"""Rules for names, labels and the rest of an object's metadata."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tests.integration.kube.errors import bad_request, invalid
from tests.integration.kube.resources import Resource
from tests.integration.kube.schema import Cause

Manifest = dict[str, Any]

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_VALUE = rf"({_QUALIFIED})?"
_NAME_CHARS = "bcdfghjklmnpqrstvwxz2456789"
_STANDARD_FINALIZERS = ("orphan", "foregroundDeletion", "kubernetes")
_MOST_ANNOTATION_BYTES = 256 * 1024

_SUBDOMAIN_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    f"for validation is '{_SUBDOMAIN}')"
)
_LABEL_RULE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used "
    f"for validation is '{_LABEL}')"
)
_VALUE_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  "
    f"or '12345', regex used for validation is '{_VALUE}')"
)
_KEY_RULE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
    f"validation is '{_QUALIFIED}')"
)


def now_text() -> str:
    """The time as Kubernetes writes it: UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_type(manifest: Any, resource: Resource) -> None:
    """The body must be an object of the kind that the path names; raises 400."""
    for name in ("kind", "apiVersion"):
        if not isinstance(manifest, dict) or (resource.custom and not manifest.get(name)):
            raise bad_request(
                f"the object provided is unrecognized (must be of type {resource.kind}): "
                f"Object '{name[0].upper()}{name[1:]}' is missing"
            )
    # The path says what a built-in kind is.
    version = manifest.get("apiVersion", resource.api_version)
    kind = manifest.get("kind", resource.kind)
    if version != resource.api_version:
        raise bad_request(
            f"the API version in the data ({version}) does not match the expected API version "
            f"({resource.api_version})"
        )
    if kind != resource.kind and resource.custom:
        rule = f'Invalid value: "{kind}": must be {resource.kind}'
        name = (manifest.get("metadata") or {}).get("name", "")
        raise invalid(
            replace(resource, kind=kind), name, [Cause("FieldValueInvalid", rule, "kind")]
        )
    if kind != resource.kind:
        raise bad_request(
            f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"converting ({kind}) to ({resource.kind}): unknown conversion"
        )


def check_namespace(manifest: Manifest, resource: Resource, namespace: str) -> None:
    """The namespace in the body must be that of the path; raises 400."""
    said = manifest["metadata"].get("namespace", "")
    if said and resource.namespaced and said != namespace:
        raise bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )


def born(manifest: Manifest, resource: Resource, namespace: str) -> Manifest:
    """A new object with what the system gives it: name, uid, time, generation."""
    metadata = dict(manifest["metadata"])
    if not metadata.get("name") and metadata.get("generateName"):
        suffix = "".join(secrets.choice(_NAME_CHARS) for _ in range(5))
        metadata["name"] = f"{metadata['generateName'][:58]}{suffix}"
    for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"):
        metadata.pop(name, None)
    metadata["uid"] = str(uuid.uuid4())
    metadata["creationTimestamp"] = now_text()
    metadata.pop("generation", None)
    if resource.custom or resource.plural == "pods":
        metadata["generation"] = 1
    if resource.namespaced:
        metadata["namespace"] = namespace
    return {**manifest, "metadata": metadata}


def kept(manifest: Manifest, old: Manifest) -> Manifest:
    """An update with what only the system may change as it was."""
    metadata = dict(manifest["metadata"])
    for name in (
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
    ):
        metadata.pop(name, None)
        if name in old["metadata"]:
            metadata[name] = old["metadata"][name]
    return {**manifest, "metadata": metadata}


def metadata_causes(resource: Resource, metadata: Manifest) -> list[Cause]:
    """What breaks the rules for metadata."""
    return [
        *_name_causes(resource, metadata.get("name", "")),
        *_label_causes(metadata.get("labels") or {}),
        *_annotation_causes(metadata.get("annotations") or {}),
        *_owner_causes(metadata.get("ownerReferences") or []),
        *([] if resource.custom else _finalizer_causes(metadata.get("finalizers") or [])),
    ]


def _invalid(field: str, value: str, rule: str) -> Cause:
    quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return Cause("FieldValueInvalid", f"Invalid value: {quoted}: {rule}", field)


def _name_causes(resource: Resource, name: str) -> Iterator[Cause]:
    if not name:
        rule = "Required value: name or generateName is required"
        yield Cause("FieldValueRequired", rule, "metadata.name")
        return
    if resource.group == "rbac.authorization.k8s.io":
        return
    is_label = resource.plural in ("namespaces", "services")
    most = 63 if is_label else 253
    if len(name) > most:
        yield _invalid("metadata.name", name, f"must be no more than {most} characters")
    if not re.fullmatch(_LABEL if is_label else _SUBDOMAIN, name):
        yield _invalid("metadata.name", name, _LABEL_RULE if is_label else _SUBDOMAIN_RULE)


def _label_causes(labels: dict[str, str]) -> Iterator[Cause]:
    for key, value in labels.items():
        yield from _key_causes("metadata.labels", key)
        if len(value) > 63:
            yield _invalid("metadata.labels", value, "must be no more than 63 bytes")
        if not re.fullmatch(_VALUE, value):
            yield _invalid("metadata.labels", value, _VALUE_RULE)


def _annotation_causes(annotations: dict[str, str]) -> Iterator[Cause]:
    for key in annotations:
        yield from _key_causes("metadata.annotations", key.lower())
    num_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items())
    if num_bytes > _MOST_ANNOTATION_BYTES:
        rule = f"Too long: may not be more than {_MOST_ANNOTATION_BYTES} bytes"
        yield Cause("FieldValueTooLong", rule, "metadata.annotations")


def _key_causes(field: str, key: str) -> Iterator[Cause]:
    prefix, slash, name = key.rpartition("/")
    if slash and not re.fullmatch(_SUBDOMAIN, prefix):
        yield _invalid(field, key, f"prefix part {_SUBDOMAIN_RULE}")
    if not name:
        yield _invalid(field, key, "name part must be non-empty")
    if len(name) > 63:
        yield _invalid(field, key, "name part must be no more than 63 characters")
    if not re.fullmatch(_QUALIFIED, name):
        yield _invalid(field, key, _KEY_RULE)


def _owner_causes(owners: list[Manifest]) -> Iterator[Cause]:
    for owner in owners:
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                field = f"metadata.ownerReferences.{name}"
                yield _invalid(field, "", "must not be empty")
    controllers = [owner for owner in owners if owner.get("controller")]
    if len(controllers) > 1:
        rule = "Only one reference can have Controller set to true"
        yield _invalid("metadata.ownerReferences", controllers[1]["name"], rule)


def finalizer_warnings(metadata: Manifest) -> list[str]:
    """What is said of a custom object's finalizers that could be anybody's."""
    return [
        f'metadata.finalizers: "{name}": prefer a domain-qualified finalizer name to avoid '
        "accidental conflicts with other finalizer writers"
        for name in metadata.get("finalizers") or ()
        if "/" not in name and name not in _STANDARD_FINALIZERS
    ]


def _finalizer_causes(finalizers: list[str]) -> Iterator[Cause]:
    for name in finalizers:
        if "/" not in name and name not in _STANDARD_FINALIZERS:
            yield _invalid(
                "metadata.finalizers",
                name,
                "name is neither a standard finalizer name nor is it fully qualified",
            )

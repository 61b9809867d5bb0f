"""What reads and writes do: the verbs of the Kubernetes API over the store.

Optimistic concurrency, generations, finalizers, propagation policies, status apart from the rest,
field validation. Objects carry no managedFields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.integration.kube import kinds, metadata, quota
from tests.integration.kube.errors import (
    ApiError,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    invalid_patch,
    not_found,
)
from tests.integration.kube.resources import Resource
from tests.integration.kube.schema import Cause, metadata_schema
from tests.integration.kube.store import Key, Store, key_of

Manifest = dict[str, Any]

_DELETE_OPTIONS = Resource("meta.k8s.io", "v1", "", "DeleteOptions")
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


@dataclass(frozen=True)
class Target:
    """What a request is about."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Where the object is kept."""
        return key_of(self.resource, self.namespace, self.name)


@dataclass
class Options:
    """Query parameters of a write, and the warnings that it leads to."""

    field_validation: str = "Warn"
    dry_run: bool = False
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Deletion:
    """DeleteOptions: how dependents go, and which object is meant."""

    policy: str = "Background"
    uid: str | None = None
    resource_version: str | None = None
    grace_s: int | None = None


class Rest:
    """Verbs on single objects. Every write is one step under the store's lock."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, target: Target) -> Manifest:
        """The object; raises 404."""
        found = self.store.get(target.key)
        if found is None:
            raise not_found(target.resource, target.name)
        return served(found, target.resource)

    def create(self, target: Target, body: Any, options: Options) -> Manifest:
        """Store a new object."""
        resource = target.resource
        metadata.check_type(body, resource)
        manifest = _typed(body, target.resource)
        metadata.check_namespace(manifest, resource, target.namespace)
        if manifest["metadata"].get("resourceVersion"):
            message = "resourceVersion should not be set on objects to be created"
            raise ApiError(500, "", message)
        manifest = _read(manifest, resource, options)
        with self.store.changed:
            manifest = metadata.born(manifest, resource, target.namespace)
            if "status" in resource.subresources:
                manifest.pop("status", None)
            manifest = kinds.completed(manifest, resource)
            target = Target(resource, target.namespace, manifest["metadata"].get("name", ""))
            self._check_home(target)
            _check_valid(manifest, None, resource)
            self._check_account(target, manifest)
            quota.check(self.store, resource, manifest)
            if self.store.get(target.key) is not None:
                raise already_exists(resource, target.name)
            stored = manifest if options.dry_run else self.store.put(target.key, manifest)
        return served(stored, resource)

    def update(self, target: Target, body: Any, options: Options) -> Manifest:
        """Replace an object, or only its status where the target says so."""
        metadata.check_type(body, target.resource)
        manifest = _typed(body, target.resource)
        metadata.check_namespace(manifest, target.resource, target.namespace)
        _check_name(manifest, target)
        manifest = _read(manifest, target.resource, options)
        with self.store.changed:
            old = self._old(target)
            _check_meant(target, manifest["metadata"], old)
            if target.resource.custom and not manifest["metadata"].get("resourceVersion"):
                rule = "Invalid value: 0: must be specified for an update"
                cause = Cause("FieldValueInvalid", rule, "metadata.resourceVersion")
                told = replace(target.resource, kind=target.resource.plural)
                raise invalid(told, target.name, [cause])
            return self._replace(target, old, manifest, options)

    def patch(
        self, target: Target, change: Callable[[Manifest], Any], options: Options
    ) -> Manifest:
        """Apply a change to the object as it is now, whatever its version."""
        with self.store.changed:
            old = self._old(target)
            manifest = change(served(old, target.resource))
            metadata.check_type(manifest, target.resource)
            _check_name(manifest, target)
            manifest = _read(manifest, target.resource, options, is_patched=True)
            _check_meant(target, manifest["metadata"], old)
            return self._replace(target, old, manifest, options)

    def delete(self, target: Target, deletion: Deletion, dry_run: bool = False) -> Manifest:
        """Delete, or mark as to be deleted; returns a `Status` or the object."""
        resource = target.resource
        with self.store.changed:
            old = self._old(target)
            _check_deletion(target, deletion, old)
            if resource.plural == "namespaces" and "deletionTimestamp" in old["metadata"]:
                raise conflict(resource, target.name, kinds.NAMESPACE_ENDS)
            marked = _marked(old, deletion, resource)
            if dry_run:
                return served(marked, resource)
            if waits(marked):
                stored = marked if marked == old else self.store.put(target.key, marked)
                return served(stored, resource)
            last = self.store.remove(target.key)
        if resource.plural in kinds.RETURNED_WHEN_DELETED:
            return served(last, resource)
        return _deleted(resource, target.name, last["metadata"]["uid"])

    def _old(self, target: Target) -> Manifest:
        old = self.store.get(target.key)
        if old is None:
            raise not_found(target.resource, target.name)
        return old

    def _check_home(self, target: Target) -> None:
        if not target.resource.namespaced:
            return
        home = self.store.get(("namespaces", "", target.namespace))
        if home is None:
            raise not_found(kinds.NAMESPACE, target.namespace)
        if "deletionTimestamp" in home["metadata"]:
            why = (
                f"unable to create new content in namespace {target.namespace} "
                "because it is being terminated"
            )
            cause = {
                "reason": "NamespaceTerminating",
                "message": f"namespace {target.namespace} is being terminated",
                "field": "metadata.namespace",
            }
            raise forbidden(target.resource, target.name, why, [cause])

    def _check_account(self, target: Target, manifest: Manifest) -> None:
        """A pod runs as a service account, which must be there."""
        if target.resource.qualified != "pods":
            return
        account = manifest["spec"].get("serviceAccountName") or "default"
        if self.store.get(("serviceaccounts", target.namespace, account)) is None:
            why = (
                f"error looking up service account {target.namespace}/{account}: "
                f'serviceaccount "{account}" not found'
            )
            raise forbidden(target.resource, target.name, why)

    def _replace(
        self, target: Target, old: Manifest, manifest: Manifest, options: Options
    ) -> Manifest:
        resource = target.resource
        new = _joined(old, metadata.kept(manifest, old), target)
        new = kinds.completed(new, resource)
        if target.subresource == "status" and resource.custom:
            _check_status(new, resource)
        else:
            _check_valid(new, old, resource)
        if _desired(new) != _desired(old) and "generation" in new["metadata"]:
            new["metadata"]["generation"] += 1
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        new["apiVersion"] = old["apiVersion"]
        if options.dry_run or new == old:
            return served(new, resource)
        if "deletionTimestamp" in new["metadata"] and not waits(new):
            self.store.put(target.key, new)
            return served(self.store.remove(target.key), resource)
        return served(self.store.put(target.key, new), resource)


def served(manifest: Manifest, resource: Resource) -> Manifest:
    """An object as the asked version of its kind."""
    return {**manifest, "apiVersion": resource.api_version}


def waits(manifest: Manifest) -> bool:
    """Whether finalizers (or a namespace's content) keep an object that is to be deleted."""
    return bool(
        manifest["metadata"].get("finalizers") or manifest.get("spec", {}).get("finalizers")
    )


def _typed(body: Manifest, resource: Resource) -> Manifest:
    kind = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**body, **kind, "metadata": body.get("metadata") or {}}


def _check_name(manifest: Manifest, target: Target) -> None:
    name = manifest["metadata"].get("name", target.name)
    if name != target.name:
        raise bad_request(
            f"the name of the object ({name}) does not match the name on the URL ({target.name})"
        )


def _read(
    manifest: Manifest, resource: Resource, options: Options, *, is_patched: bool = False
) -> Manifest:
    """The body without unknown fields (which Strict refuses), with defaults."""
    schema = metadata_schema() if resource.custom else resource.schema
    broken = schema.decoding_error(manifest, "" if resource.custom else resource.kind)
    handled = f'{resource.kind} in version "{resource.version}" cannot be handled as a'
    if broken:
        raise bad_request(f"{handled} {resource.kind}: {broken}")
    unknown = resource.schema.unknown_fields(manifest)
    told = [f'unknown field "{path}"' for path in sorted(unknown)]
    if told and options.field_validation == "Strict":
        strict = f"strict decoding error: {', '.join(told)}"
        if is_patched:
            raise invalid_patch(manifest, strict)
        raise bad_request(f"{handled} {resource.kind}: {strict}")
    if options.field_validation == "Warn":
        options.warnings.extend(told)
    if resource.custom:
        options.warnings.extend(metadata.finalizer_warnings(manifest["metadata"]))
    pruned = resource.schema.pruned(manifest) if told else manifest
    return resource.schema.with_defaults(pruned)


def _check_valid(manifest: Manifest, old: Manifest | None, resource: Resource) -> None:
    name = manifest["metadata"].get("name", "")
    causes = metadata.metadata_causes(resource, manifest["metadata"])
    if resource.custom:
        body = {**manifest, "metadata": {}}
        causes += resource.schema.violations(body)
        causes += resource.schema.broken_rules(body, old, causes)
    causes += kinds.causes(manifest, old, resource)
    if causes:
        raise invalid(resource, name, causes)


def _check_status(manifest: Manifest, resource: Resource) -> None:
    """A write of the status is judged by the status alone, whose fields are named from there."""
    found = resource.schema.of_field("status").violations(manifest.get("status", {}))
    causes = [replace(cause, field=f"status.{cause.field}") for cause in found]
    causes += resource.schema.broken_rules(manifest, manifest, causes)
    if causes:
        raise invalid(resource, manifest["metadata"]["name"], causes)


def _check_meant(target: Target, said: Mapping[str, Any], old: Manifest) -> None:
    """The update must be of this object, as it is now."""
    uid, version = said.get("uid"), said.get("resourceVersion")
    if uid and uid != old["metadata"]["uid"]:
        resource = target.resource
        place = f"{resource.group}/{resource.plural}" if resource.group else resource.plural
        why = (
            f"StorageError: invalid object, Code: 4, Key: /registry/{place}/{target.namespace}/"
            f"{target.name}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: "
            f"UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
        )
        raise conflict(resource, target.name, why)
    if version and version != old["metadata"]["resourceVersion"]:
        raise conflict(target.resource, target.name)


def _check_deletion(target: Target, deletion: Deletion, old: Manifest) -> None:
    """Only the object that is meant may be deleted."""
    for what, wanted, actual, hint in (
        ("UID", deletion.uid, old["metadata"]["uid"], "deleted and then recreated"),
        (
            "ResourceVersion",
            deletion.resource_version,
            old["metadata"]["resourceVersion"],
            "modified",
        ),
    ):
        if wanted and wanted != actual:
            why = (
                f"the {what} in the precondition ({wanted}) does not match the {what} in record "
                f"({actual}). The object might have been {hint}"
            )
            raise conflict(replace(target.resource, plural=target.resource.kind), target.name, why)


def _joined(old: Manifest, new: Manifest, target: Target) -> Manifest:
    """Old object with the new status, or new object with the old status."""
    if "status" not in target.resource.subresources:
        return new
    if target.subresource == "status":
        changed = {**old, "metadata": dict(old["metadata"])}
        changed.pop("status", None)
        return {**changed, **({"status": new["status"]} if "status" in new else {})}
    kept = {name: value for name, value in new.items() if name != "status"}
    return {**kept, **({"status": old["status"]} if "status" in old else {})}


def _desired(manifest: Manifest) -> Manifest:
    return {name: part for name, part in manifest.items() if name not in ("metadata", "status")}


def _marked(old: Manifest, deletion: Deletion, resource: Resource) -> Manifest:
    """The object as to be deleted: its time, and the finalizer of its propagation policy."""
    about = dict(old["metadata"])
    finalizers = [name for name in about.get("finalizers", ()) if name not in (FOREGROUND, ORPHAN)]
    extra = {"Foreground": [FOREGROUND], "Orphan": [ORPHAN]}.get(deletion.policy, [])
    if deletion.policy == "Background" and "deletionTimestamp" in about:
        finalizers = list(about.get("finalizers", ()))
    about["finalizers"] = [*finalizers, *extra]
    if not about["finalizers"]:
        del about["finalizers"]
    if "deletionTimestamp" not in about:
        about["deletionTimestamp"] = metadata.now_text()
        about["deletionGracePeriodSeconds"] = 0
        if "generation" in about and resource.custom:
            about["generation"] += 1
    marked = {**old, "metadata": about}
    if resource.plural == "namespaces":
        marked["status"] = {**old.get("status", {}), "phase": "Terminating"}
        marked["metadata"].pop("deletionGracePeriodSeconds", None)
    return marked


def _deleted(resource: Resource, name: str, uid: str) -> Manifest:
    group = {"group": resource.group} if resource.group else {}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {"name": name, **group, "kind": resource.plural, "uid": uid},
    }


def deletion_of(body: Any, query: Mapping[str, str]) -> Deletion:
    """DeleteOptions of a request's body, else of its query."""
    said = body if isinstance(body, dict) else {}
    policy = said.get("propagationPolicy") or query.get("propagationPolicy") or "Background"
    if policy not in ("Background", "Foreground", "Orphan"):
        rule = (
            f'Unsupported value: "{policy}": supported values: "Foreground", "Background", '
            '"Orphan", "nil"'
        )
        cause = Cause("FieldValueNotSupported", rule, "propagationPolicy")
        raise invalid(_DELETE_OPTIONS, "", [cause])
    conditions = said.get("preconditions") or {}
    grace = said.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    return Deletion(
        policy=policy,
        uid=conditions.get("uid"),
        resource_version=conditions.get("resourceVersion"),
        grace_s=None if grace is None else int(grace),
    )

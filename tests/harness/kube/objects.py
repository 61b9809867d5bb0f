"""Objects of the API server of the tests: kinds, refusals, the store, verbs, collection by owner.

Enforced: the schemas of CustomResourceDefinitions, unknown fields where the request asks for
`fieldValidation: Strict`, resource versions and conflicts, generations, finalizers, owners, status
apart from the rest. Not there: defaults and CEL rules of definitions, pruning (without `Strict` an
unknown field is kept), schemas of built-in kinds but for `Strict`, the grammar of labels, quotas,
service accounts of pods, dry runs, `Orphan` deletions, managedFields.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import referencing
import yaml

Manifest = dict[str, Any]
Key = tuple[str, str, str]  # qualified resource, namespace, name

LOG = "test/log"  # annotation of a pod: the lines of its log, with times
CRD_FOLDER = Path(__file__).parents[4] / "shared" / "kuberay-crds"
FOREGROUND = "foregroundDeletion"
_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_OPEN = "x-kubernetes-preserve-unknown-fields"

# ---- kinds


@dataclass(frozen=True)
class Resource:
    """One kind as it is served; `validator` is that of its definition, None for built-in kinds."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    validator: Any = None

    @property
    def qualified(self) -> str:
        """Name as error texts and rules have it, like rayjobs.ray.io."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """As in an object's apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version


BUILT_IN = (
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "pods", "Pod", subresources=("status", "log")),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "events", "Event"),
    Resource("batch", "v1", "jobs", "Job", subresources=("status",)),
    Resource("batch", "v1", "cronjobs", "CronJob"),
    # What else the chart makes.
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "services", "Service"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Resource("apps", "v1", "deployments", "Deployment", subresources=("status",)),
    Resource("apps", "v1", "statefulsets", "StatefulSet", subresources=("status",)),
    Resource("networking.k8s.io", "v1", "ingresses", "Ingress"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
)


@cache
def read_definitions() -> tuple[Manifest, ...]:
    """KubeRay's CustomResourceDefinitions, without which a test is skipped; not to be changed."""
    if not CRD_FOLDER.is_dir():
        pytest.skip(f"KubeRay's CustomResourceDefinitions are not at {CRD_FOLDER}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(
        document
        for path in sorted(CRD_FOLDER.glob("*.yaml"))
        for document in yaml.load_all(path.read_text(encoding="utf-8"), loader)
        if document
    )


@cache
def crd_validator(name: str, version: str) -> Any:
    """The validator of a KubeRay definition like rayjobs.ray.io; unknown fields are errors."""
    (found,) = [each for each in read_definitions() if each["metadata"]["name"] == name]
    (served,) = [each for each in found["spec"]["versions"] if each["name"] == version]
    return jsonschema.Draft202012Validator(_strict(served["schema"]["openAPIV3Schema"]))


def _strict(schema: Any) -> Any:
    """The schema with unknown fields forbidden wherever known ones are listed."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    # `properties` itself may have a property of that name, which is then a schema and no list.
    is_object = found.get("type") == "object" and isinstance(found.get("properties"), dict)
    if is_object and not found.get(_OPEN) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found


@cache
def built_in_validator(api_version: str, kind: str, version: str = "") -> Any:
    """The validator of a kind of Kubernetes itself, of its newest version if none is given.

    Unknown fields are errors. As `kubernetes_validate.validate`, which reads all schemas anew at
    each call.
    """
    folder = _schema_folder(version or kubernetes_validate.latest_version())
    # rbac.authorization.k8s.io/v1 is rbac-v1 there.
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = json.loads((folder / f"{kind.lower()}-{group}.json").read_text(encoding="utf-8"))
    registry = referencing.Resource.from_contents(schema) @ _shared_schemas(folder)
    return jsonschema.Draft202012Validator(schema, registry=registry)


def _schema_folder(version: str) -> Path:
    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    (found,) = package.glob(f"v{version}*-local-strict")
    return found


@cache
def _shared_schemas(folder: Path) -> Any:
    shared = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))
    return referencing.Resource.from_contents(shared) @ referencing.Registry()


def resources_of(definition: Manifest) -> list[Resource]:
    """Served versions of a CustomResourceDefinition."""
    spec, name = definition["spec"], definition["metadata"]["name"]
    return [
        Resource(
            spec["group"],
            version["name"],
            spec["names"]["plural"],
            spec["names"]["kind"],
            subresources=tuple(version.get("subresources", {})),
            validator=crd_validator(name, version["name"]),
        )
        for version in spec["versions"]
        if version["served"]
    ]


# ---- refusals, worded as Kubernetes words them


class ApiError(Exception):
    """A request that is answered with a `Status` of Failure."""

    def __init__(
        self, code: int, reason: str, message: str, details: Manifest | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> Manifest:
        """The `Status` object that tells it."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            **({"reason": self.reason} if self.reason else {}),
            **({"details": self.details} if self.details else {}),
            "code": self.code,
        }


def discovery(path: str, resources: Sequence[Resource]) -> Manifest | None:
    """What clients learn of the kinds at /api, /apis, their versions and /openapi/v3; else None."""

    def place(resource: Resource) -> str:
        return f"{'apis' if resource.group else 'api'}/{resource.api_version}"

    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups: dict[str, list[Manifest]] = {}
        for group, version in sorted({(each.group, each.version) for each in resources}):
            named = {"groupVersion": f"{group}/{version}", "version": version}
            groups.setdefault(group, []).append(named)
        found_groups = [{"name": name, "versions": each} for name, each in groups.items() if name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found_groups}
    if path == "/openapi/v3":
        links = {place(each): {"serverRelativeURL": f"{path}/{place(each)}"} for each in resources}
        return {"paths": links}
    found = [each for each in resources if path.removeprefix("/openapi/v3") == f"/{place(each)}"]
    if found and path.startswith("/openapi/v3/"):
        # Only that the server itself refuses unknown fields.
        parameters = [{"name": "fieldValidation", "in": "query"}]
        paths = {
            f"/{place(each)}/{each.plural}": {
                "patch": {
                    "parameters": parameters,
                    "x-kubernetes-group-version-kind": {
                        "group": each.group,
                        "version": each.version,
                        "kind": each.kind,
                    },
                }
            }
            for each in found
        }
        return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}
    if found:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        listed = [
            {
                "name": each.plural,
                "singularName": each.kind.lower(),
                "namespaced": each.namespaced,
                "kind": each.kind,
                "verbs": verbs,
            }
            for each in found
        ]
        about = {"groupVersion": found[0].api_version, "resources": listed}
        return {"kind": "APIResourceList", "apiVersion": "v1", **about}
    return None


def not_found(resource: Resource, name: str) -> ApiError:
    """There is no object of that name."""
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, {"name": name, "kind": resource.plural})


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    """The object is not the one, or not as old, as the request takes it to be."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message)


def forbidden(resource: Resource, name: str, why: str) -> ApiError:
    """The caller may not."""
    quoted = f' "{name}"' if name else ""
    message = f"{resource.qualified}{quoted} is forbidden: {why}"
    return ApiError(403, "Forbidden", message)


def invalid(resource: Resource, name: str, field: str, why: str) -> ApiError:
    """The object breaks its schema."""
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {field}: {why}')


# ---- the store


@dataclass(frozen=True)
class Change:
    """One write: what the object was and is, as JSON; `now` is None where it was deleted."""

    revision: int
    key: Key
    before: str | None
    now: str | None


class Store:
    """Objects by key, one revision for all of them, and the history that watches read.

    Hold `changed` (a condition) for anything that reads and then writes. Objects are kept as JSON
    text: what goes in or comes out is not shared with the caller.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.revision = 1
        self._objects: dict[Key, str] = {}
        self._history: list[Change] = []

    def get(self, key: Key) -> Manifest | None:
        """The object as it is now."""
        text = self._objects.get(key)
        return None if text is None else json.loads(text)

    def put(self, key: Key, manifest: Manifest) -> Manifest:
        """Write an object at the next revision and return it with that revision."""
        with self.changed:
            metadata = {**manifest["metadata"], "resourceVersion": str(self.revision + 1)}
            now = json.dumps({**manifest, "metadata": metadata})
            self._record(key, now)
            self._objects[key] = now
            return json.loads(now)

    def remove(self, key: Key) -> Manifest:
        """Delete an object; returned as it was, at the revision of its deletion."""
        with self.changed:
            last: Manifest = json.loads(self._objects[key])
            self._record(key, None)
            del self._objects[key]
            last["metadata"]["resourceVersion"] = str(self.revision)
            return last

    def under(self, qualified: str, namespace: str | None) -> list[Manifest]:
        """Objects of a kind, of one namespace or (None) of all, by namespace and name."""
        with self.changed:
            found = sorted(self._objects.items())
        return [
            json.loads(text)
            for key, text in found
            if key[0] == qualified and namespace in (None, key[1])
        ]

    def everything(self) -> dict[Key, Manifest]:
        """All objects that there are now."""
        with self.changed:
            objects = list(self._objects.items())
        return {key: json.loads(text) for key, text in objects}

    def since(self, revision: int) -> list[Change]:
        """Writes after a revision, oldest first."""
        with self.changed:
            num_newer = self.revision - revision
            return self._history[-num_newer:] if num_newer > 0 else []

    def _record(self, key: Key, now: str | None) -> None:
        self.revision += 1
        self._history.append(Change(self.revision, key, self._objects.get(key), now))
        self.changed.notify_all()


# ---- verbs


@dataclass(frozen=True)
class Target:
    """What a request is about."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Where the object is kept; versions of a kind share one place."""
        return (
            self.resource.qualified,
            self.namespace if self.resource.namespaced else "",
            self.name,
        )


class Verbs:
    """Reads and writes of single objects. Every write is one step under the store's lock."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, target: Target) -> Manifest:
        """The object; raises 404."""
        found = self.store.get(target.key)
        if found is None:
            raise not_found(target.resource, target.name)
        return found

    def create(self, target: Target, body: Any, *, is_strict: bool = False) -> Manifest:
        """Store a new object."""
        resource = target.resource
        manifest = _typed(body, resource)
        name = manifest["metadata"].get("name", "")
        target = Target(resource, target.namespace, name)
        about = {
            **manifest["metadata"],
            "uid": str(uuid.uuid4()),
            "creationTimestamp": time_text(datetime.now(UTC)),
            **({"generation": 1} if resource.validator else {}),
            **({"namespace": target.namespace} if resource.namespaced else {}),
        }
        manifest = _completed({**manifest, "metadata": about}, resource)
        if "status" in resource.subresources and resource.validator:
            manifest.pop("status", None)
        check_valid(manifest, resource, is_strict=is_strict)
        with self.store.changed:
            if self.store.get(target.key) is not None:
                message = f'{resource.qualified} "{name}" already exists'
                raise ApiError(409, "AlreadyExists", message)
            return self.store.put(target.key, manifest)

    def update(self, target: Target, body: Any, *, is_strict: bool = False) -> Manifest:
        """Replace an object, or only its status where the target says so."""
        manifest = _typed(body, target.resource)
        with self.store.changed:
            return self._replace(target, self.get(target), manifest, is_strict)

    def patch(self, target: Target, change: Any, *, is_strict: bool = False) -> Manifest:
        """Merge a change into the object as it is now (RFC 7386)."""
        with self.store.changed:
            old = self.get(target)
            manifest = _typed(merged(old, change), target.resource)
            return self._replace(target, old, manifest, is_strict)

    def apply(self, target: Target, body: Any, *, is_strict: bool = False) -> Manifest:
        """Make an object as its only field manager applies it: what is no longer said goes."""
        with self.store.changed:
            old = self.store.get(target.key)
            if old is None:
                return self.create(target, body, is_strict=is_strict)
            kept = {"status": old["status"]} if "status" in old else {}
            return self._replace(target, old, _typed({**kept, **body}, target.resource), is_strict)

    def delete(self, target: Target, *, is_foreground: bool, uid: str | None = None) -> Manifest:
        """Delete, or mark as to be deleted; returns a `Status` or the marked object.

        In the foreground dependents go first; `uid` says which object is meant.
        """
        with self.store.changed:
            old = self.get(target)
            about = dict(old["metadata"])
            if uid and uid != about["uid"]:
                why = (
                    f"the UID in the precondition ({uid}) does not match the UID in "
                    f"record ({about['uid']}). The object might have been deleted and recreated"
                )
                raise conflict(target.resource, target.name, why)
            if is_foreground and FOREGROUND not in about.get("finalizers", ()):
                about["finalizers"] = [*about.get("finalizers", ()), FOREGROUND]
            if about.get("finalizers"):
                about.setdefault("deletionTimestamp", time_text(datetime.now(UTC)))
                about.setdefault("deletionGracePeriodSeconds", 0)
                return self.store.put(target.key, {**old, "metadata": about})
            self.store.remove(target.key)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _replace(
        self, target: Target, old: Manifest, manifest: Manifest, is_strict: bool
    ) -> Manifest:
        resource = target.resource
        _check_meant(target, manifest["metadata"], old["metadata"])
        new = _joined(old, _with_system_fields(manifest, old), target)
        new = _completed(new, resource)
        check_valid(new, resource, is_strict=is_strict)
        if _desired(new) != _desired(old) and "generation" in new["metadata"]:
            new["metadata"]["generation"] += 1
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if new == old:
            return old
        if "deletionTimestamp" in new["metadata"] and not new["metadata"].get("finalizers"):
            self.store.put(target.key, new)
            return self.store.remove(target.key)
        return self.store.put(target.key, new)


def time_text(moment: datetime) -> str:
    """A time in UTC as Kubernetes writes it: whole seconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def check_valid(manifest: Manifest, resource: Resource, *, is_strict: bool) -> None:
    """Raise 400 for unknown fields (where they are refused), 422 for what else is wrong."""
    name = manifest["metadata"].get("name", "")
    if not re.fullmatch(_NAME, name) or len(name) > 253:
        rule = f'Invalid value: "{name}": a lowercase RFC 1123 subdomain must consist of {_NAME}'
        raise invalid(resource, name, "metadata.name", rule)
    validator = resource.validator
    if validator is None and is_strict:
        validator = built_in_validator(resource.api_version, resource.kind)
    for error in validator.iter_errors(manifest) if validator else ():
        is_unknown = error.validator == "additionalProperties"
        if is_unknown and is_strict:
            raise ApiError(
                400, "BadRequest", f"strict decoding error: {error.json_path}: {error.message}"
            )
        if not is_unknown:
            field = error.json_path.removeprefix("$.")
            raise invalid(resource, name, field, f"Invalid value: {error.message}")


def _typed(body: Any, resource: Resource) -> Manifest:
    """The body as an object of the kind that the path names; raises 400 for another kind."""
    for name, wanted in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        said = body.get(name, None if resource.validator else wanted)
        if said != wanted:
            message = f"the {name} in the data ({said}) is not the expected {wanted}"
            raise ApiError(400, "BadRequest", message)
    kind = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**body, **kind, "metadata": dict(body.get("metadata") or {})}


def _completed(manifest: Manifest, resource: Resource) -> Manifest:
    """An object with what its kind adds: data of Secrets, the phase of pods."""
    if resource.plural == "pods":
        return {**manifest, "status": {"phase": "Pending", **manifest.get("status", {})}}
    if resource.plural != "secrets":
        return manifest
    plain = manifest.get("stringData") or {}
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in plain.items()}
    result = {name: part for name, part in manifest.items() if name != "stringData"}
    if encoded:
        result["data"] = {**(result.get("data") or {}), **encoded}
    return {"type": "Opaque", **result}


def _with_system_fields(manifest: Manifest, old: Manifest) -> Manifest:
    """An update with what only the system may change as it was."""
    fields = [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
    ]
    about = {name: part for name, part in manifest["metadata"].items() if name not in fields}
    system = {name: old["metadata"][name] for name in fields if name in old["metadata"]}
    return {**manifest, "metadata": {**about, **system}}


def _check_meant(target: Target, said: Manifest, old: Manifest) -> None:
    """The update must be of this object, as it is now."""
    if said.get("resourceVersion", old["resourceVersion"]) != old["resourceVersion"]:
        why = (
            "the object has been modified; please apply your changes to the latest version and "
            "try again"
        )
        raise conflict(target.resource, target.name, why)


def _joined(old: Manifest, new: Manifest, target: Target) -> Manifest:
    """Old object with the new status, or new object with the old status."""
    if "status" not in target.resource.subresources:
        return new
    kept, status = (old, new) if target.subresource == "status" else (new, old)
    result = {name: part for name, part in kept.items() if name != "status"}
    result["metadata"] = dict(result["metadata"])
    return {**result, **({"status": status["status"]} if "status" in status else {})}


def merged(document: Any, patch: Any) -> Any:
    """A document after a JSON merge patch (RFC 7386): null removes, lists are replaced whole."""
    if not isinstance(patch, Mapping):
        return patch
    known = document if isinstance(document, Mapping) else {}
    rest = {key: value for key, value in known.items() if key not in patch}
    changed = {key: merged(known.get(key), value) for key, value in patch.items()}
    return rest | {key: value for key, value in changed.items() if patch[key] is not None}


def _desired(manifest: Manifest) -> Manifest:
    return {name: part for name, part in manifest.items() if name not in ("metadata", "status")}


# ---- collection by owner


class GarbageCollector:
    """Deletes what lost its owners, and dependents of what is deleted in the foreground.

    Works in a thread of its own, once something changed, as in a real cluster: a Secret is there
    for a moment longer than its RayJob.
    """

    def __init__(self, verbs: Verbs, find: Callable[[str], Resource | None]) -> None:
        self._verbs, self._store, self._find = verbs, verbs.store, find
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kube-gc", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for the end."""
        self._stopped.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        with self._store.changed:
            while not self._stopped.is_set():
                revision = self._store.revision
                self._sweep()
                while self._store.revision == revision and not self._stopped.is_set():
                    self._store.changed.wait()

    def _sweep(self) -> None:
        objects = self._store.everything()
        uids = {manifest["metadata"]["uid"]: key for key, manifest in objects.items()}
        for key, manifest in objects.items():
            about = manifest["metadata"]
            owners = [uids.get(uid) for uid in _owners(manifest)]
            if owners and not any(owner is not None and owner[1] == key[1] for owner in owners):
                self._delete(key, manifest, is_foreground=False)
            elif "deletionTimestamp" in about and FOREGROUND in about.get("finalizers", ()):
                dependents = {k: v for k, v in objects.items() if about["uid"] in _owners(v)}
                for each, dependent in dependents.items():
                    self._delete(each, dependent, is_foreground=True)
                if not any(self._store.get(each) for each in dependents):
                    self._release(key, manifest)

    def _delete(self, key: Key, manifest: Manifest, *, is_foreground: bool) -> None:
        resource = self._find(key[0])
        is_going = "deletionTimestamp" in manifest["metadata"]
        if resource is not None and not is_going and self._store.get(key) is not None:
            self._verbs.delete(Target(resource, key[1], key[2]), is_foreground=is_foreground)

    def _release(self, key: Key, manifest: Manifest) -> None:
        left = [name for name in manifest["metadata"]["finalizers"] if name != FOREGROUND]
        manifest["metadata"]["finalizers"] = left
        self._store.put(key, manifest)
        if not left:
            self._store.remove(key)


def _owners(manifest: Manifest) -> Iterator[str]:
    for owner in manifest["metadata"].get("ownerReferences", ()):
        yield owner["uid"]

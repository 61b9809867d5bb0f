"""What the controller manager does: collection by owner, namespaces that end, their accounts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.integration.kube.resources import CRD, Resource
from tests.integration.kube.rest import FOREGROUND, ORPHAN, Deletion, Options, Rest, Target
from tests.integration.kube.store import Key, Manifest, Store

FindResource = Callable[[str], Resource | None]


class GarbageCollector:
    """Looks after the store once something changed, in a thread of its own."""

    def __init__(self, store: Store, find_resource: FindResource) -> None:
        self._store = store
        self._rest = Rest(store)
        self._find = find_resource
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
        while not self._stopped.is_set():
            with self._store.changed:
                revision = self._store.revision
                self.sweep()
                while self._store.revision == revision and not self._stopped.is_set():
                    self._store.changed.wait()

    def sweep(self) -> None:
        """One pass over all objects."""
        with self._store.changed:
            objects = dict(self._store.everything(but=CRD.qualified))
            uids = {manifest["metadata"]["uid"]: key for key, manifest in objects.items()}
            for key, manifest in objects.items():
                self._sweep_owner(key, manifest, objects)
                self._sweep_dependent(key, manifest, uids)
            for key, manifest in objects.items():
                if key[0] == "namespaces" and "deletionTimestamp" in manifest["metadata"]:
                    self._empty(key, objects)
                elif key[0] == "namespaces":
                    self._furnish(key[2])

    def _furnish(self, namespace: str) -> None:
        """Every namespace has a service account of the name default."""
        resource = self._find("serviceaccounts")
        if resource and self._store.get(("serviceaccounts", namespace, "default")) is None:
            manifest = {"metadata": {"name": "default"}}
            self._rest.create(Target(resource, namespace), manifest, Options())

    def _sweep_dependent(self, key: Key, manifest: Manifest, uids: dict[str, Key]) -> None:
        owners = manifest["metadata"].get("ownerReferences", ())
        if owners and not any(self._is_there(owner, key, uids) for owner in owners):
            self._delete(key, manifest)

    def _is_there(self, owner: dict[str, Any], key: Key, uids: dict[str, Key]) -> bool:
        """An owner counts if it is in the same namespace, or in none."""
        owner_key = uids.get(owner["uid"])
        return owner_key is not None and owner_key[1] in ("", key[1])

    def _sweep_owner(self, key: Key, manifest: Manifest, objects: dict[Key, Manifest]) -> None:
        finalizers = manifest["metadata"].get("finalizers", ())
        if "deletionTimestamp" not in manifest["metadata"]:
            return
        uid = manifest["metadata"]["uid"]
        dependents = {k: v for k, v in objects.items() if _is_owned(v, uid)}
        if ORPHAN in finalizers:
            for dependent_key, dependent in dependents.items():
                self._disown(dependent_key, dependent, uid)
            self._drop_finalizer(key, ORPHAN)
        elif FOREGROUND in finalizers:
            blocking = [k for k, v in dependents.items() if _blocks(v, uid)]
            for dependent_key, dependent in dependents.items():
                self._delete(dependent_key, dependent, "Foreground")
            if not any(self._store.get(each) for each in blocking):
                self._drop_finalizer(key, FOREGROUND)

    def _delete(self, key: Key, manifest: Manifest, policy: str = "Background") -> None:
        resource = self._find(key[0])
        is_going = "deletionTimestamp" in manifest["metadata"]
        if resource is not None and not is_going and self._store.get(key) is not None:
            deletion = Deletion(policy=policy, uid=manifest["metadata"]["uid"])
            self._rest.delete(Target(resource, key[1], key[2]), deletion)

    def _disown(self, key: Key, manifest: Manifest, uid: str) -> None:
        about = manifest["metadata"]
        about["ownerReferences"] = [o for o in about["ownerReferences"] if o["uid"] != uid]
        if not about["ownerReferences"]:
            del about["ownerReferences"]
        self._store.put(key, manifest)

    def _drop_finalizer(self, key: Key, finalizer: str) -> None:
        manifest = self._store.get(key)
        if manifest is None:
            return
        about = manifest["metadata"]
        about["finalizers"] = [name for name in about["finalizers"] if name != finalizer]
        if not about["finalizers"]:
            del about["finalizers"]
            self._store.put(key, manifest)
            self._store.remove(key)
        else:
            self._store.put(key, manifest)

    def _empty(self, key: Key, objects: dict[Key, Manifest]) -> None:
        """Delete what is in a namespace that ends; when nothing is left, the namespace itself."""
        inside = {k: v for k, v in objects.items() if k[1] == key[2]}
        for each, manifest in inside.items():
            self._delete(each, manifest)
        if not any(self._store.get(each) for each in inside) and self._store.get(key):
            self._store.remove(key)


def _is_owned(manifest: Manifest, uid: str) -> bool:
    return any(o["uid"] == uid for o in manifest["metadata"].get("ownerReferences", ()))


def _blocks(manifest: Manifest, uid: str) -> bool:
    owners = manifest["metadata"].get("ownerReferences", ())
    return any(o["uid"] == uid and o.get("blockOwnerDeletion") for o in owners)

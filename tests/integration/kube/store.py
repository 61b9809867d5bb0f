"""The state: objects, one revision for all of them, and the history that watches read.

Nothing here knows of HTTP, kinds' rules or clocks. Objects that go in or come out are not shared
with the caller: each is frozen as JSON text at its revision, as etcd would keep it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.integration.kube.resources import Resource

Manifest = dict[str, Any]
Key = tuple[str, str, str]  # qualified resource, namespace, name


@dataclass(frozen=True)
class Change:
    """One write: what the object was and is; `now` is None where it was deleted."""

    revision: int
    key: Key
    before: str | None
    now: str | None


def key_of(resource: Resource, namespace: str, name: str) -> Key:
    """Where an object is kept; versions of a kind share one place."""
    return resource.qualified, namespace if resource.namespaced else "", name


class Store:
    """Objects by key. Hold `changed` (a condition) for anything that reads and then writes."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.revision = 1
        self.compacted = 0
        self._objects: dict[Key, str] = {}
        self._history: list[Change] = []

    def get(self, key: Key) -> Manifest | None:
        """The object as it is now."""
        text = self._objects.get(key)
        return None if text is None else json.loads(text)

    def put(self, key: Key, manifest: Manifest) -> Manifest:
        """Write an object at the next revision and return it with that revision."""
        with self.changed:
            now = self._numbered(manifest)
            self._record(key, now)
            self._objects[key] = now
            result: Manifest = json.loads(now)
            return result

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
        return self.at(self.revision, qualified, namespace)

    def at(self, revision: int, qualified: str, namespace: str | None) -> list[Manifest]:
        """What `under` would have said at a revision that is not compacted."""
        with self.changed:
            objects = dict(self._objects)
            for change in reversed(self._history):
                if change.revision <= revision:
                    break
                _undo(objects, change)
        return [
            json.loads(text)
            for key, text in sorted(objects.items())
            if key[0] == qualified and namespace in (None, key[1])
        ]

    def everything(self, but: str = "") -> Iterator[tuple[Key, Manifest]]:
        """All objects there are now, but those of one kind."""
        with self.changed:
            objects = [(key, text) for key, text in self._objects.items() if key[0] != but]
        for key, text in objects:
            yield key, json.loads(text)

    def since(self, revision: int) -> list[Change]:
        """Writes after a revision, oldest first."""
        with self.changed:
            num_newer = self.revision - max(revision, self.compacted)
            newest = self._history[-num_newer:] if num_newer > 0 else []
            return [change for change in newest if change.revision > revision]

    def compact(self) -> int:
        """Forget the history: what is older than now cannot be watched or listed any more."""
        with self.changed:
            self.compacted = self.revision
            self._history.clear()
            return self.compacted

    def _numbered(self, manifest: Manifest) -> str:
        metadata = {**manifest["metadata"], "resourceVersion": str(self.revision + 1)}
        return json.dumps({**manifest, "metadata": metadata})

    def _record(self, key: Key, now: str | None) -> None:
        self.revision += 1
        self._history.append(Change(self.revision, key, self._objects.get(key), now))
        self.changed.notify_all()


def _undo(objects: dict[Key, str], change: Change) -> None:
    if change.before is None:
        objects.pop(change.key, None)
    else:
        objects[change.key] = change.before

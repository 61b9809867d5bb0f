"""Lists and watches of the API server of the tests, with their selectors.

Selectors are those of equality. Lists come whole, without pages, and watches without bookmarks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.harness.kube.objects import Change, Manifest, Resource, Store

Selects = Callable[[Manifest], bool]


@dataclass(frozen=True)
class Selection:
    """Objects that a list or a watch is about; `namespace` None: those of all namespaces."""

    resource: Resource
    namespace: str | None
    selects: Selects

    def shows(self, text: str | None) -> Manifest | None:
        """A stored object, if it is selected."""
        manifest = None if text is None else json.loads(text)
        return manifest if manifest is not None and self.selects(manifest) else None


def selection(resource: Resource, namespace: str, query: Mapping[str, str]) -> Selection:
    """What the path and the selectors of a query ask for; other selectors are mistakes of ours."""
    labels, fields = (_pairs(query.get(name, "")) for name in ("labelSelector", "fieldSelector"))
    assert fields.keys() <= {"involvedObject.name"}, fields

    def selects(manifest: Manifest) -> bool:
        found = manifest["metadata"].get("labels") or {}
        about = {"involvedObject.name": manifest.get("involvedObject", {}).get("name")}
        return labels.items() <= found.items() and fields.items() <= about.items()

    return Selection(resource, namespace if resource.namespaced and namespace else None, selects)


def _pairs(text: str) -> dict[str, str]:
    """The pairs of a selector like a=b,c=d."""
    assert "!=" not in text and "==" not in text, text
    return dict(part.split("=") for part in text.split(",") if part)


def listed(store: Store, wanted: Selection) -> Manifest:
    """The answer to a list request."""
    with store.changed:
        revision = store.revision
        objects = store.under(wanted.resource.qualified, wanted.namespace)
    return {
        "kind": f"{wanted.resource.kind}List",
        "apiVersion": wanted.resource.api_version,
        "metadata": {"resourceVersion": str(revision)},
        "items": [each for each in objects if wanted.selects(each)],
    }


def watched(
    store: Store,
    wanted: Selection,
    query: Mapping[str, str],
    timeout_s: float,
    dropped: threading.Event,
) -> Iterator[Manifest]:
    """Events after a list, until the time-out, or until the watch is dropped."""
    revision = int(query["resourceVersion"])
    end = time.monotonic() + timeout_s
    while not dropped.is_set() and time.monotonic() < end:
        for change in _wait_for_changes(store, revision, end - time.monotonic(), dropped):
            revision = change.revision
            event = _event(change, wanted)
            if event is not None:
                yield event


def _wait_for_changes(
    store: Store, revision: int, limit_s: float, dropped: threading.Event
) -> list[Change]:
    with store.changed:
        store.changed.wait_for(lambda: store.revision > revision or dropped.is_set(), limit_s)
        return store.since(revision)


def _event(change: Change, wanted: Selection) -> Manifest | None:
    qualified, namespace, _ = change.key
    if qualified != wanted.resource.qualified or wanted.namespace not in (None, namespace):
        return None
    before, now = wanted.shows(change.before), wanted.shows(change.now)
    if now is not None:
        return {"type": "ADDED" if before is None else "MODIFIED", "object": now}
    if before is None:
        return None
    before["metadata"]["resourceVersion"] = str(change.revision)
    return {"type": "DELETED", "object": before}

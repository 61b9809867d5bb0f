"""Lists (in pages, at one revision) and watches (from a revision on)."""

from __future__ import annotations

import base64
import binascii
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.integration.kube.catalog import is_true
from tests.integration.kube.errors import (
    ApiError,
    bad_request,
    expired,
    version_of_the_future,
)
from tests.integration.kube.resources import Resource
from tests.integration.kube.rest import served
from tests.integration.kube.selectors import Selects, field_selector, label_selector
from tests.integration.kube.store import Change, Manifest, Store

_STALE_TOKEN = (
    "The provided continue parameter is too old to display a consistent list result. You can "
    "start a new list without the continue parameter."
)


@dataclass(frozen=True)
class Selection:
    """Objects that a list or a watch is about."""

    resource: Resource
    namespace: str | None
    selects: Selects

    def shows(self, text: str | None) -> Manifest | None:
        """A stored object, if it is selected."""
        manifest = None if text is None else json.loads(text)
        return manifest if manifest is not None and self.selects(manifest) else None


def selection(resource: Resource, namespace: str, query: Mapping[str, str]) -> Selection:
    """What the path and the selectors of a query ask for."""
    labels = label_selector(query.get("labelSelector", ""))
    fields = field_selector(query.get("fieldSelector", ""), resource)
    return Selection(
        resource,
        namespace if resource.namespaced and namespace else None,
        lambda manifest: labels(manifest) and fields(manifest),
    )


def listed(store: Store, wanted: Selection, query: Mapping[str, str]) -> Manifest:
    """The answer to a list request; raises 410 for pages of a compacted revision."""
    limit = _number(query, "limit")
    with store.changed:
        revision, after = store.revision, ("", "")
        if query.get("continue"):
            revision, after = _read_token(query["continue"])
            if revision < store.compacted:
                raise expired(_STALE_TOKEN)
        elif _number(query, "resourceVersion") > store.revision:
            raise version_of_the_future(_number(query, "resourceVersion"), store.revision)
        objects = store.at(revision, wanted.resource.qualified, wanted.namespace)
    found = [each for each in objects if wanted.selects(each) and _place(each) > after]
    page = found[:limit] if limit else found
    about: Manifest = {"resourceVersion": str(revision)}
    if len(page) < len(found):
        about["continue"] = _token(revision, _place(page[-1]))
        about["remainingItemCount"] = len(found) - len(page)
    return {
        "kind": f"{wanted.resource.kind}List",
        "apiVersion": wanted.resource.api_version,
        "metadata": about,
        "items": [_item(each, wanted.resource) for each in page],
    }


def _item(manifest: Manifest, resource: Resource) -> Manifest:
    """As in a list: items of built-in kinds do not repeat their type."""
    if resource.custom:
        return served(manifest, resource)
    return {name: part for name, part in manifest.items() if name not in ("apiVersion", "kind")}


def _number(query: Mapping[str, str], name: str) -> int:
    try:
        return int(query.get(name) or 0)
    except ValueError as error:
        raise bad_request(
            f'invalid resource version: {name}: Invalid value: "{query[name]}": '
            f'strconv.ParseUint: parsing "{query[name]}": invalid syntax'
        ) from error


def _place(manifest: Manifest) -> tuple[str, str]:
    return manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]


def _token(revision: int, place: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, *place]).encode()).decode()


def _read_token(text: str) -> tuple[int, tuple[str, str]]:
    try:
        revision, namespace, name = json.loads(base64.urlsafe_b64decode(text))
    except (ValueError, binascii.Error) as error:
        raise bad_request(f"invalid continue token: continue key is not valid: {error}") from error
    return revision, (namespace, name)


@dataclass(frozen=True)
class Pace:
    """How long a watch goes on; all in seconds of the monotonic clock.

    `dropped` ends it at once, without the courtesy of a last chunk.
    """

    timeout_s: float
    bookmark_every_s: float
    dropped: threading.Event


def watched(
    store: Store, wanted: Selection, query: Mapping[str, str], pace: Pace
) -> Iterator[Manifest]:
    """Events of a watch, until its time-out. A compacted start is told by an ERROR event."""
    asked = query.get("resourceVersion", "")
    has_bookmarks = is_true(query, "allowWatchBookmarks")
    start = _number(query, "resourceVersion")
    with store.changed:
        revision = store.revision
        initial = store.under(wanted.resource.qualified, wanted.namespace)
    wants_initial = is_true(query, "sendInitialEvents")
    if asked in ("", "0") or wants_initial:
        for each in initial:
            if wanted.selects(each):
                yield {"type": "ADDED", "object": served(each, wanted.resource)}
        if wants_initial and has_bookmarks:
            yield _bookmark(wanted.resource, revision, {"k8s.io/initial-events-end": "true"})
    elif start > revision:
        yield _error(version_of_the_future(start, revision))
        return
    else:
        revision = start
    yield from _changes(store, wanted, revision, pace, has_bookmarks)


def _changes(
    store: Store, wanted: Selection, revision: int, pace: Pace, has_bookmarks: bool
) -> Iterator[Manifest]:
    end = time.monotonic() + pace.timeout_s
    bookmark_at = time.monotonic() + pace.bookmark_every_s
    while not pace.dropped.is_set() and time.monotonic() < end:
        if revision < store.compacted:
            said = f"too old resource version: {revision} ({store.compacted})"
            yield _error(expired(said))
            return
        for change in _wait_for_changes(store, revision, min(end, bookmark_at), pace.dropped):
            revision = change.revision
            event = _event(change, wanted)
            if event is not None:
                yield event
        if has_bookmarks and time.monotonic() >= min(end, bookmark_at):
            yield _bookmark(wanted.resource, revision, {})
            bookmark_at = time.monotonic() + pace.bookmark_every_s


def _wait_for_changes(
    store: Store, revision: int, until: float, dropped: threading.Event
) -> list[Change]:
    with store.changed:
        left_s = until - time.monotonic()
        store.changed.wait_for(
            lambda: store.revision > revision or dropped.is_set(), max(0.0, left_s)
        )
        return [] if revision < store.compacted else store.since(revision)


def _event(change: Change, wanted: Selection) -> Manifest | None:
    qualified, namespace, _ = change.key
    if qualified != wanted.resource.qualified or wanted.namespace not in (None, namespace):
        return None
    before, now = wanted.shows(change.before), wanted.shows(change.now)
    if now is not None:
        return {
            "type": "ADDED" if before is None else "MODIFIED",
            "object": served(now, wanted.resource),
        }
    if before is None:
        return None
    before["metadata"]["resourceVersion"] = str(change.revision)
    return {"type": "DELETED", "object": served(before, wanted.resource)}


def _bookmark(resource: Resource, revision: int, annotations: dict[str, str]) -> Manifest:
    about: Manifest = {"resourceVersion": str(revision), "creationTimestamp": None}
    if annotations:
        about["annotations"] = annotations
    manifest = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": about}
    return {"type": "BOOKMARK", "object": manifest}


def _error(error: ApiError) -> Manifest:
    return {"type": "ERROR", "object": error.status()}

"""Watch of RayJobs, so that polling one costs no request; and what keeps their pods from running.

A list comes first; the watch goes on from its version and, when it ends, from the newest version
seen. Where it breaks, or the server does not keep that version any more (410), a list comes again:
the caller may have learnt more meanwhile. For as long as nothing answers `find` gives nothing at
all: the caller then asks itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from service.backends.kuberay.client import EVENTS, PODS, RAYJOBS, KubeApi, KubeRefused, Resource
from service.backends.kuberay.manifest import SELECTOR, Manifest
from service.backends.kuberay.status import event_problem_in, is_suspended, pod_problem_in
from service.errors import BackendUnreachable

logger = logging.getLogger(__name__)
_AGE_S = 5.0
_MAX_REMEMBERED = 10_000
Value = TypeVar("Value")


class Remembered(dict[str, Value]):
    """What is known by name; all of it is forgotten where it becomes too much."""

    def __setitem__(self, name: str, value: Value) -> None:
        if len(self) > _MAX_REMEMBERED:
            self.clear()
        super().__setitem__(name, value)


class PodProblems:
    """What keeps the pods of waiting RayJobs from running, at most some seconds old.

    `clock` gives Unix seconds.
    """

    def __init__(self, api: KubeApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._known = Remembered[tuple[float, str]]()

    def of(self, rayjob: Manifest) -> str:
        """What keeps the pods of a RayJob from running; empty where nothing is known to."""
        name = rayjob["metadata"]["name"]
        cluster = str((rayjob.get("status") or {}).get("rayClusterName") or "")
        if is_suspended(rayjob) or not cluster:
            return ""
        asked_at, known = self._known.get(name, (0.0, ""))
        if 0.0 <= self._clock() - asked_at < _AGE_S:
            return known
        found = ""
        # It is a courtesy: the job is pending whether we are told why or not.
        with suppress(BackendUnreachable, KubeRefused):
            found = self._ask(name, cluster)
        self._known[name] = (self._clock(), found)
        return found

    def _ask(self, name: str, cluster: str) -> str:
        """Pods tell most; events of those that could not be made, and of the cluster itself."""
        pods = self._items(PODS, labelSelector=f"ray.io/cluster={cluster}")
        if found := pod_problem_in(pods, with_ended=True):
            return found
        events: list[Manifest] = []
        for each in (name, cluster):
            events += self._items(EVENTS, fieldSelector=f"involvedObject.name={each}")
        return event_problem_in(events, self._clock())

    def _items(self, resource: Resource, **selector: Any) -> list[Manifest]:
        return list(self._api.list(resource, **selector).get("items") or [])


# ---- watch

WATCH_S = 45
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
# A stream that ends sooner was none: a server may refuse each, and a proxy cut each.
_SHORT_S = 1.0
# The server does not keep what happened after a version.
_GONE = 410


class RayJobWatch:
    """A thread that keeps a copy of the RayJobs that Shardloom made.

    `on_turn` gets all objects after each list and each watch, which is about once a minute.
    """

    def __init__(
        self,
        api: KubeApi,
        on_turn: Callable[[list[Manifest]], None] = lambda objects: None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._api = api
        self._on_turn = on_turn
        self._objects: dict[str, Manifest] = {}
        # None where a list must come first.
        self._version: str | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        # Whether what is known here is what the server says now.
        self.is_live = False
        self._thread = threading.Thread(target=self._run, name="rayjobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Watch no more; a stream that is open ends by itself, and nothing of it is used."""
        self._closing.set()

    def find(self, name: str) -> Manifest | None:
        """An object as it is now; None where it is not known, or nothing is."""
        with self._lock:
            return self._objects.get(name) if self.is_live else None

    def all(self) -> list[Manifest]:
        """Every object that is known."""
        with self._lock:
            return list(self._objects.values())

    def _run(self) -> None:
        failures = 0
        try:
            while not self._closing.is_set():
                began = time.monotonic()
                is_well = self.follow()
                lasted_s = time.monotonic() - began
                if is_well and lasted_s > _SHORT_S:
                    failures = 0
                    continue
                is_first = lasted_s > _MAX_PAUSE_S
                failures = 1 if is_first else failures + 1
                self._pause(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (failures - 1)))
        finally:
            self._lose()

    def follow(self) -> bool:
        """List if that is needed, then watch until the stream ends; whether it ended well."""
        try:
            if self._version is None:
                listed = self._api.list(RAYJOBS, labelSelector=SELECTOR)
                items: list[Manifest] = listed.get("items") or []
                with self._lock:
                    self._objects = {item["metadata"]["name"]: item for item in items}
                    self._version = str(listed["metadata"]["resourceVersion"])
            with self._api.watch(RAYJOBS, self._version, SELECTOR, WATCH_S) as events:
                self.is_live = True
                for event in events:
                    with self._lock:
                        self._apply(event)
                    if self._closing.is_set():
                        return True
            if not self._closing.is_set():
                self._on_turn(self.all())
            return True
        except KubeRefused as error:
            is_expired = error.status == _GONE
            self._lose()
            if not is_expired and not self._closing.is_set():
                logger.warning("cannot watch RayJobs, asking for each of them: %s", error)
            return is_expired
        except (BackendUnreachable, AttributeError, KeyError, TypeError, ValueError) as error:
            # Or what came was no event: nothing of what is known may be relied on.
            self._lose()
            logger.info("the watch of RayJobs broke: %r", error)
            return False

    def _apply(self, event: Manifest) -> None:
        """Take over an event; for errors raises `BackendUnreachable`, or `KubeRefused` with 410."""
        kind, found = event["type"], event["object"]
        if kind == "ERROR" and found.get("code") == _GONE:
            raise KubeRefused(_GONE, "Expired", str(found.get("message")))
        if kind == "ERROR":
            raise BackendUnreachable(f"the watch of RayJobs broke: {found.get('message')}")
        metadata = found["metadata"]
        if kind in ("ADDED", "MODIFIED"):
            self._objects[metadata["name"]] = found
        elif kind == "DELETED":
            self._objects.pop(metadata["name"], None)
        # A bookmark has nothing but its version.
        self._version = str(metadata["resourceVersion"])

    def _lose(self) -> None:
        with self._lock:
            self.is_live = False
            self._version = None

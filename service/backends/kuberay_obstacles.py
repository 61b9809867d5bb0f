"""What keeps the pods of a job's own cluster from running: asked for now and then, and kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from service.backends.kuberay_api import EVENTS, PODS, KubeApi, KubeRefused, Resource
from service.backends.kuberay_size import Manifest
from service.backends.kuberay_status import is_suspended, obstacle_in
from service.errors import BackendUnreachable

_AGE_S = 5.0
_MAX_REMEMBERED = 10_000


class Obstacles:
    """Obstacles of RayJobs that wait, at most some seconds old; `clock` gives Unix seconds."""

    def __init__(self, api: KubeApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}

    def of(self, rayjob: Manifest) -> str:
        """What keeps the pods of a RayJob from running; empty where nothing is known to."""
        name = rayjob["metadata"]["name"]
        cluster = str((rayjob.get("status") or {}).get("rayClusterName") or "")
        if is_suspended(rayjob) or not cluster:
            return ""
        asked_at, known = self._known.get(name, (0.0, ""))
        if 0.0 <= self._clock() - asked_at < _AGE_S:
            return known
        if len(self._known) > _MAX_REMEMBERED:
            self._known.clear()
        found = ""
        # It is a courtesy: the job is pending whether we are told why or not.
        with suppress(BackendUnreachable, KubeRefused):
            found = self._ask(name, cluster)
        self._known[name] = (self._clock(), found)
        return found

    def _ask(self, name: str, cluster: str) -> str:
        """Pods tell most; events of those that could not be made, and of the cluster itself."""
        pods = self._items(PODS, label_selector=f"ray.io/cluster={cluster}")
        found = obstacle_in(pods)
        if found:
            return found
        events: list[Manifest] = []
        for each in (name, cluster):
            events += self._items(EVENTS, field_selector=f"involvedObject.name={each}")
        return obstacle_in((), events, self._clock())

    def _items(self, resource: Resource, **selector: Any) -> list[Manifest]:
        return list(self._api.list(resource, **selector).get("items") or [])

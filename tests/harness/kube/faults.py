"""Faults to inject into the API server: refusals, lost answers, watches that drop, an outage."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.harness.kube.objects import ApiError

_REASONS = {
    403: ("Forbidden", "injected"),
    409: ("Conflict", "injected"),
    429: (
        "TooManyRequests",
        "the server has received too many requests and has asked us to try again later",
    ),
    500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
}


@dataclass
class Fault:
    """What happens to the next `times` requests of a verb on a path that match."""

    verb: str
    path: str
    times: int
    error: ApiError | None = None

    @property
    def loses_answer(self) -> bool:
        """Whether the request is done and its answer lost."""
        return self.error is None

    def meets(self, verb: str, path: str) -> bool:
        """Whether a request is one of those."""
        return self.verb in ("*", verb) and re.search(self.path, path) is not None


@dataclass
class Faults:
    """Faults that wait for a request. Verbs are those of Kubernetes (create, list, watch, ...).

    `away()` is an API server that is not there (connections are refused, open ones break),
    `back()` its return at the same address; `wake` tells watches to look up.
    """

    away: Callable[[], None]
    back: Callable[[], None]
    wake: Callable[[], None]
    _waiting: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drop: threading.Event = field(default_factory=threading.Event)

    def fail(
        self,
        code: int,
        *,
        times: int = 1,
        verb: str = "*",
        path: str = "",
        message: str | None = None,
    ) -> None:
        """Answer the next matching requests with an HTTP error instead of doing them."""
        reason, said = _REASONS.get(code, ("", f"injected {code}"))
        self._add(Fault(verb, path, times, ApiError(code, reason, message or said)))

    def lose_answer(self, *, times: int = 1, verb: str = "*", path: str = "") -> None:
        """Do the next matching requests, but hang up instead of answering."""
        self._add(Fault(verb, path, times))

    def drop_watches(self) -> None:
        """Break all watches that are open now, mid-stream."""
        with self._lock:
            self._drop.set()
            self._drop = threading.Event()
        self.wake()

    def clear(self) -> None:
        """Inject nothing more; a server that is away comes back."""
        with self._lock:
            self._waiting.clear()
        self.back()

    def watch_lease(self) -> threading.Event:
        """Set when watches that are open now are to break."""
        with self._lock:
            return self._drop

    def take(self, verb: str, path: str) -> list[Fault]:
        """Faults that befall a request; each is used up by one."""
        with self._lock:
            met = [fault for fault in self._waiting if fault.meets(verb, path)]
            for fault in met:
                fault.times -= 1
            self._waiting = [fault for fault in self._waiting if fault.times > 0]
            return met

    def _add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)

"""The published keys of an identity provider, fetched so that a slow provider holds up few.

One thread fetches at a time, and no lock is held meanwhile. Whoever has keys that are merely old
goes on with them; who has none waits a moment, or is told that the provider is away. After a fetch,
good or bad, there is no other for `RELOAD_PAUSE_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from service.security.errors import IdentityProviderAway

RELOAD_PAUSE_S = 10.0
_TIMEOUT_S = 5.0
_WAIT_S = 1.0
# Each holds a thread of the service, of which requests with an API key have need, too.
_MAX_WAITING = 8


class ProviderKeys:
    """The keys at `url`, kept for `ttl_s`; `clock` gives seconds. Safe in several threads."""

    def __init__(
        self,
        url: str,
        ttl_s: float,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._ttl_s = ttl_s
        self._http = httpx.Client(transport=transport, timeout=_TIMEOUT_S)
        self._clock = clock
        self._changed = threading.Condition()
        self._keys = KeySet([])
        self._loaded_at = self._tried_at = -1e18
        self._failure = "not read yet"
        self._is_fetching = False
        self._num_waiting = 0

    def current(self) -> KeySet:
        """The keys as far as they are known; raises `IdentityProviderAway` if none are."""
        with self._changed:
            is_old = self._clock() - self._loaded_at >= self._ttl_s
        if is_old:
            self._refresh(must_wait=not self._keys.keys)
        if not self._keys.keys:
            raise IdentityProviderAway(self._url, self._failure)
        return self._keys

    def newer_than(self, known: KeySet) -> KeySet:
        """Keys that were read after `known`; `known` itself where it is too early to look."""
        if self._keys is known:
            self._refresh(must_wait=True)
        return self._keys

    def _refresh(self, *, must_wait: bool) -> None:
        """Fetch the keys, unless that was tried lately; wait for the thread that does it."""
        with self._changed:
            if self._is_fetching:
                if must_wait:
                    self._wait()
                return
            if self._clock() - self._tried_at < RELOAD_PAUSE_S:
                return
            self._is_fetching, self._tried_at = True, self._clock()
        fetched: KeySet | None = None
        try:
            fetched = self._fetched()
        finally:
            with self._changed:
                if fetched is not None:
                    self._keys, self._loaded_at = fetched, self._clock()
                self._is_fetching, self._tried_at = False, self._clock()
                self._changed.notify_all()

    def _wait(self) -> None:
        if self._num_waiting >= _MAX_WAITING:
            return
        self._num_waiting += 1
        try:
            self._changed.wait_for(lambda: not self._is_fetching, _WAIT_S)
        finally:
            self._num_waiting -= 1

    def _fetched(self) -> KeySet | None:
        """The keys as they are published; None if they cannot be had."""
        try:
            response = self._http.get(self._url)
            response.raise_for_status()
            self._failure = "it publishes none"
            return KeySet.import_key_set(_public_only(response.json()))
        except (httpx.HTTPError, JoseError, ValueError, KeyError, TypeError) as error:
            # Keys that were good an hour ago are better than nobody let in.
            self._failure = type(error).__name__
            return None


def _public_only(document: Any) -> Any:
    """The published keys without shared secrets, which no provider should publish."""
    return {"keys": [key for key in document["keys"] if key.get("kty") != "oct"]}

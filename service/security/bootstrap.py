"""The first API key, written to the database itself: nobody could ask the service for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from service.api.security_schemas import NewKey
from service.security.files import make_private
from service.security.keys import ApiKey, hash_of, new_key_text
from service.security.principal import parse_roles, role_names
from service.settings import Settings
from service.store.engine import migrate, open_engine
from service.store.keys import KeyStore


def has_no_key() -> bool:
    """Whether the configured database has no usable key; raises `StoreUnavailable`."""
    with _Opened() as keys:
        return not keys.has_usable_key(time.time())


def create_first_key(name: str, roles: Mapping[str, str], expires_in_s: float | None) -> NewKey:
    """Write a key to the configured database; raises `StoreUnavailable`."""
    now = time.time()
    key_id, text = new_key_text()
    expires_at = None if expires_in_s is None else now + expires_in_s
    user = os.environ.get("USER", "unknown")
    key = ApiKey(key_id, name, parse_roles(roles), now, f"bootstrap by {user}", expires_at)
    with _Opened() as keys:
        keys.add_key(key, hash_of(text))
    fields: dict[str, Any] = {**vars(key), "roles": role_names(key.roles), "key": text}
    return NewKey.model_validate(fields)


class _Opened:
    """The keys of the configured database, migrated."""

    def __enter__(self) -> KeyStore:
        settings = Settings()
        make_private(settings.home)
        self._engine = open_engine(settings.database_url)
        migrate(self._engine)
        return KeyStore(self._engine)

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()

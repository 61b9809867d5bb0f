"""A service that asks who calls, with a key for each role."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.backends.fake import FakeBackend
from service.main import create_app
from service.security.bundle import Security
from service.security.keys import ApiKey, hash_of, new_key_text
from service.security.principal import Role
from service.settings import Settings
from service.store.sql import SqlJobStore
from tests.unit.service.builders import spec_document

HOST = "https://shardloom.example"


@dataclass
class Guarded:
    """An app with `auth=required`; `keys` are texts of keys by their names."""

    app: FastAPI
    http: TestClient
    store: SqlJobStore
    settings: Settings
    backend: FakeBackend
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def security(self) -> Security:
        found: Security = self.app.state.context.security
        return found

    def add_key(self, name: str, roles: dict[str, Role], **changes: Any) -> str:
        """Id of a new key."""
        key_id, text = new_key_text()
        key = ApiKey(key_id, name, roles, time.time(), "test", **changes)
        self.security.keys.add_key(key, hash_of(text))
        self.keys[name] = text
        return key_id

    def send(
        self, method: str, path: str, key: str | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request with the key of this name."""
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys[key]}"
        return self.http.request(method, path, headers=headers, follow_redirects=False, **options)

    def submit(self, key: str, **changes: Any) -> str:
        """Id of a new job."""
        answer = self.send("POST", "/v1/jobs", key, json={"spec": spec_document(**changes)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


def guarded(home: Path, **changes: Any) -> Guarded:
    """An app with a key for each role in `default`, and `root` for everything."""
    data = Path(__file__).parent / "tiny_data"
    settings = Settings(
        **{
            "home": home,
            "backend": "fake",
            "dashboard": False,
            "auth": "required",
            "storage_roots": [data],
            "stream_poll_s": 0.01,
            **changes,
        }
    )
    store = SqlJobStore.open(settings.database_url)
    backend = FakeBackend(home / "fake")
    app = create_app(settings, store, backend)
    http = TestClient(app, base_url=HOST, raise_server_exceptions=False)
    house = Guarded(app, http, store, settings, backend)
    for role in Role:
        house.add_key(role.label, {"default": role})
    house.add_key("root", {"*": Role.ADMIN})
    return house

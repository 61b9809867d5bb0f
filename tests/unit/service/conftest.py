"""Fixtures shared by the tests of the control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.backends.fake import FakeBackend
from service.client import RetryPolicy, ShardloomClient
from service.commands import context
from service.main import create_app
from service.settings import Settings
from service.store.sql import SqlJobStore
from tests.unit.service.api_house import LOOPBACK_URL, Api
from tests.unit.service.fake_service import FakeService
from tests.unit.service.house import House


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """A SQLite file that is not there yet."""
    return f"sqlite:///{tmp_path / 'shardloom.db'}"


@pytest.fixture
def store(database_url: str) -> Iterator[SqlJobStore]:
    """A store on a real database."""
    opened = SqlJobStore.open(database_url)
    yield opened
    opened.close()


@pytest.fixture
def house(store: SqlJobStore, tmp_path: Path) -> House:
    """A control plane without jobs."""
    settings = Settings(home=tmp_path, backend="fake", trainer_python="/usr/bin/my python")
    return House(store, FakeBackend(tmp_path / "fake"), settings)


@pytest.fixture
def app_settings(tmp_path: Path) -> Settings:
    """Settings of an app without pages or a cluster."""
    return Settings(home=tmp_path, backend="fake", dashboard=False, stream_poll_s=0.01)


@pytest.fixture
def api(store: SqlJobStore, app_settings: Settings) -> Iterator[Api]:
    """A client of an app over the store; its reconciler runs only when told to."""
    backend = FakeBackend(app_settings.home / "fake")
    # Not entered as a context manager: the lifespan, and with it the loop, stays out.
    app = create_app(app_settings, store, backend)
    http = TestClient(app, base_url=LOOPBACK_URL, raise_server_exceptions=False)
    yield Api(http, store, backend, app_settings)
    http.close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeService:
    """The in-memory service that the commands talk to."""
    fake = FakeService()
    monkeypatch.setattr(context, "open_client", fake.client)
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHARDLOOM_URL", raising=False)
    return fake


@pytest.fixture
def client(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardloomClient]:
    """The SDK over the app; the commands use it, too."""

    def connect(url: str | None = None) -> ShardloomClient:
        return ShardloomClient(
            LOOPBACK_URL,
            transport=api.http._transport,
            retry=RetryPolicy(num_retries=0),
        )

    monkeypatch.setattr(context, "open_client", connect)
    with connect() as opened:
        yield opened

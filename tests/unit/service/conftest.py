"""Fixtures shared by the tests of the control plane."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import routing
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute

from service.app import create_app
from service.backends.fake import FakeBackend
from service.cli import common
from service.client.client import ShardloomClient
from service.client.transport import RetryPolicy
from service.db.jobs import JobStore
from service.settings import Settings
from tests.harness.databases import PostgresqlServer, SqliteTemplate, open_migrated
from tests.harness.service import (
    LOOPBACK_URL,
    Api,
    FakeService,
    Guarded,
    GuardedApps,
    House,
    guarded,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked `every_database` on PostgreSQL, too; with `slow=True` in test-all only."""
    mark = metafunc.definition.get_closest_marker("every_database")
    if mark and "database" in metafunc.fixturenames:
        marks = [pytest.mark.slow] if mark.kwargs.get("slow") else []
        kinds = ["sqlite", pytest.param("postgresql", marks=marks)]
        metafunc.parametrize("database", kinds, indirect=True)


@pytest.fixture(scope="session", autouse=True)
def routes_are_built_once() -> Iterator[None]:
    """Let all apps share what FastAPI makes of a route: for each app anew it took 50 ms.

    Apps would differ in nothing but `dependency_overrides`, which nobody has.
    """
    build = routing._IncludedRouter._build_effective_context
    built: dict[int, Any] = {}  # each keeps its route

    def build_once(self: routing._IncludedRouter, route: BaseRoute) -> Any:
        if id(route) not in built:
            built[id(route)] = build(self, route)
        return built[id(route)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing._IncludedRouter, "_build_effective_context", build_once)
        # Nobody pulls the plug here.
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The kind of database that `database_url` and `store` are on."""
    return getattr(request, "param", "sqlite")


@pytest.fixture
def database_url(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A database without tables: a SQLite file that is not there yet, or one of PostgreSQL."""
    if database == "sqlite":
        return f"sqlite:///{tmp_path / 'shardloom.db'}"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.empty_database()


@pytest.fixture
def store(
    database: str, tmp_path: Path, request: pytest.FixtureRequest, sqlite_template: SqliteTemplate
) -> Iterator[JobStore]:
    """A store on a migrated database; on SQLite that of `database_url`."""
    if database == "sqlite":
        url = f"sqlite:///{tmp_path / 'shardloom.db'}"
        sqlite_template.copy(url)
    else:
        server: PostgresqlServer = request.getfixturevalue("postgresql")
        url = server.migrated_database()
    opened = open_migrated(url)
    yield opened
    opened.close()


@pytest.fixture
def house(store: JobStore, tmp_path: Path) -> House:
    """A control plane without jobs."""
    settings = Settings(home=tmp_path, backend="fake", trainer_python="/usr/bin/my python")
    return House(store, FakeBackend(tmp_path / "fake"), settings)


@pytest.fixture
def app_settings(tmp_path: Path) -> Settings:
    """Settings of an app without pages or a cluster."""
    return Settings(home=tmp_path, backend="fake", dashboard=False, stream_poll_s=0.01, auth="none")


@pytest.fixture
def api(store: JobStore, app_settings: Settings) -> Iterator[Api]:
    """A client of an app over the store; its reconciler runs only when told to."""
    backend = FakeBackend(app_settings.home / "fake")
    # Not entered as a context manager: the lifespan, and with it the loop, stays out.
    app = create_app(app_settings, store, backend)
    http = TestClient(app, base_url=LOOPBACK_URL, raise_server_exceptions=False)
    yield Api(http, store, backend, app_settings)
    http.close()


@pytest.fixture
def open_guarded(tmp_path: Path, sqlite_template: SqliteTemplate) -> Iterator[GuardedApps]:
    """Opens apps that ask for credentials."""
    opened: list[Guarded] = []

    def open_app(home: Path = tmp_path, **changes: Any) -> Guarded:
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "shardloom.db").exists():
            sqlite_template.copy(f"sqlite:///{home / 'shardloom.db'}")
        opened.append(guarded(home, **changes))
        return opened[-1]

    yield open_app
    for each in opened:
        each.http.close()
        each.store.close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeService:
    """The in-memory service that the commands talk to."""
    fake = FakeService()
    monkeypatch.setattr(common, "open_client", fake.client)
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHARDLOOM_URL", raising=False)
    return fake


@pytest.fixture
def client(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardloomClient]:
    """The SDK over the app; the commands use it, too."""

    def connect(url: str | None = None) -> ShardloomClient:
        return ShardloomClient(
            LOOPBACK_URL, transport=api.http._transport, retry=RetryPolicy(num_retries=0)
        )

    monkeypatch.setattr(common, "open_client", connect)
    with connect() as opened:
        yield opened

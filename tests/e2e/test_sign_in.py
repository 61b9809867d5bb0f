"""Signing in with a browser, and pages under the content security policy of the whole service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from service.app import create_app
from service.auth.security import Security
from service.backends.fake import FakeBackend
from service.db.jobs import JobStore
from service.domain.auth import ApiKey, AuditFilter, Role, hash_of, new_key_text
from service.settings import Settings
from tests.e2e.conftest import Server, note_console, note_request
from tests.harness.builders import queued_job
from tests.harness.databases import SqliteTemplate, open_migrated
from tests.harness.wait import scaled

_JOIN_TIMEOUT_S = 10
LIVE_MS = scaled(10_000)


@dataclass(frozen=True)
class Guarded:
    """A whole service that asks who reads; `key` may submit to the project `default`."""

    url: str
    key: str
    store: JobStore
    security: Security


@pytest.fixture(params=["required", "local"])
def auth(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def guarded(tmp_path: Path, auth: str, sqlite_template: SqliteTemplate) -> Iterator[Guarded]:
    """A whole service on a free port, with two jobs."""
    settings = Settings(home=tmp_path, backend="fake", auth=auth)  # type: ignore[arg-type]
    sqlite_template.copy(settings.database_url)
    store = open_migrated(settings.database_url)
    app = create_app(settings, store, FakeBackend(tmp_path / "fake"))
    security: Security = app.state.context.security
    key_id, text = new_key_text()
    key = ApiKey(key_id, "ada", {"default": Role.SUBMITTER}, 0.0, "test")
    security.keys.add_key(key, hash_of(text))
    store.create_job(queued_job(name="movie-nights"), idempotency_key=None, request_hash="")
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread: threading.Thread = server.start()
    yield Guarded(f"http://127.0.0.1:{server.port}", text, store, security)
    server.should_exit = True
    thread.join(timeout=_JOIN_TIMEOUT_S)


@pytest.fixture
def tab(browser: Browser, guarded: Guarded) -> Iterator[Page]:
    """A tab that fails the test for whatever the policy forbids, and any other fault."""
    faults: list[str] = []
    context = browser.new_context(base_url=guarded.url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.on("console", lambda message: note_console(message, faults))
    page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    page.on("request", lambda request: note_request(request.url, faults))
    yield page
    context.close()
    assert [fault for fault in faults if "401" not in fault] == []


@pytest.mark.parametrize("auth", ["required"], indirect=True)
def test_a_reader_signs_in_works_and_signs_out(tab: Page, guarded: Guarded, tmp_path: Path) -> None:
    tab.goto("/")
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    tab.get_by_label("API key").fill("shl_wrong")
    tab.screenshot(path=tmp_path / "login.png")
    tab.get_by_role("button", name="Sign in").click()
    expect(tab.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
    tab.screenshot(path=tmp_path / "login-refused.png")
    tab.get_by_label("API key").fill(guarded.key)
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("link", name="movie-nights").click()
    expect(tab.locator(".job-head")).to_contain_text("movie-nights")
    tab.screenshot(path=tmp_path / "job.png")
    tab.get_by_role("button", name="Sign out").click()
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    tab.goto("/dashboard/")
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()


def test_the_pages_live_under_the_policy(tab: Page, guarded: Guarded, auth: str) -> None:
    tab.goto("/dashboard/")
    if auth == "required":
        tab.get_by_label("API key").fill(guarded.key)
        tab.get_by_role("button", name="Sign in").click()
    expect(tab.get_by_role("link", name="movie-nights")).to_be_visible()
    # Only an open websocket brings this.
    guarded.store.create_job(queued_job(name="later"), idempotency_key=None, request_hash="")
    expect(tab.get_by_role("link", name="later")).to_be_visible(timeout=LIVE_MS)
    tab.get_by_role("link", name="later").click()
    tab.get_by_role("button", name="Cancel job").first.click()
    tab.locator(".dialog").get_by_role("button", name="Cancel job").click()
    expect(tab.locator(".job-head")).to_contain_text("cancelled", timeout=LIVE_MS)
    guarded.security.audit.flush()
    [line] = guarded.security.keys.list_audit(AuditFilter(action="PAGE cancel"))
    assert line.actor == ("key:ada" if auth == "required" else "local")

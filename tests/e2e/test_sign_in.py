"""Signing in with a browser, and pages under the content security policy of the whole service."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from service.app import create_app
from service.auth.security import Security
from service.backends.fake import FakeBackend
from service.db.jobs import JobStore
from service.domain.auth import ApiKey, AuditFilter, Role, hash_of, new_key_text
from service.settings import Settings
from tests.e2e.conftest import LIVE_MS, open_tab, serve
from tests.harness.builders import queued_job
from tests.harness.databases import SqliteTemplate, open_migrated, store_job


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
    store_job(store, queued_job(name="movie-nights"))
    with serve(app) as url:
        yield Guarded(url, text, store, security)


@pytest.fixture
def tab(browser: Browser, guarded: Guarded) -> Iterator[Page]:
    """A tab that fails the test for whatever the policy forbids, and any other fault."""
    with open_tab(browser, guarded.url) as (page, faults):
        yield page
    assert [fault for fault in faults if "401" not in fault] == []


@pytest.mark.parametrize("auth", ["required"], indirect=True)
def test_a_reader_signs_in_works_and_signs_out(tab: Page, guarded: Guarded) -> None:
    tab.goto("/")
    expect(tab.get_by_role("heading", name="Sign in")).to_be_visible()
    tab.get_by_label("API key").fill("shl_wrong")
    tab.get_by_role("button", name="Sign in").click()
    expect(tab.get_by_role("alert")).to_contain_text("unknown, expired or revoked")
    tab.get_by_label("API key").fill(guarded.key)
    tab.get_by_role("button", name="Sign in").click()
    tab.get_by_role("link", name="movie-nights").click()
    expect(tab.locator(".job-head")).to_contain_text("movie-nights")
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
    store_job(guarded.store, queued_job(name="later"))
    expect(tab.get_by_role("link", name="later")).to_be_visible(timeout=LIVE_MS)
    tab.get_by_role("link", name="later").click()
    tab.get_by_role("button", name="Cancel job").first.click()
    tab.locator(".dialog").get_by_role("button", name="Cancel job").click()
    expect(tab.locator(".job-head")).to_contain_text("cancelled", timeout=LIVE_MS)
    guarded.security.audit.flush()
    [line] = guarded.security.keys.list_audit(AuditFilter(action="PAGE cancel"))
    assert line.actor == ("key:ada" if auth == "required" else "local")

"""A dashboard on a free port over a real store, and a browser that accepts no faults."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from service.dashboard.app import mount
from service.dashboard.panels import PageTools
from service.db.jobs import JobStore
from service.settings import Settings
from tests.harness.databases import SqliteTemplate, open_migrated
from tests.harness.wait import scaled

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
_CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_START_TIMEOUT_S = 20.0
# What playwright itself has as its defaults.
_EXPECT_MS, _ACTION_MS = 5_000, 30_000


@dataclass(frozen=True)
class Dashboard:
    """A running server; `url` has no slash at its end, `woken` is set when a page woke the loop."""

    url: str
    store: JobStore
    runs_dir: Path
    woken: threading.Event


class Server(uvicorn.Server):
    """A server in a thread, which may not install signal handlers."""

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + scaled(_START_TIMEOUT_S)
        while not self.started:
            assert thread.is_alive(), "the server ended while starting"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.05)
        return thread

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]


@pytest.fixture
def dashboard(tmp_path: Path, sqlite_template: SqliteTemplate) -> Iterator[Dashboard]:
    """The dashboard over an empty store."""
    settings = Settings(home=tmp_path)
    sqlite_template.copy(settings.database_url)
    store = open_migrated(settings.database_url)
    app = FastAPI()
    woken = threading.Event()
    mount(app, PageTools(store, settings, woken.set, submit=lambda folder: None), security=None)
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = server.start()
    yield Dashboard(f"http://127.0.0.1:{server.port}", store, settings.runs_dir, woken)
    server.should_exit = True
    thread.join(timeout=scaled(10))
    store.close()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium, as Debian packages it.

    It ends with this folder's tests: while it lives playwright's event loop counts as running, and
    no other test could run one.
    """
    if _CHROMIUM is None:
        pytest.skip("needs a browser: no 'chromium' on PATH (apt-get install chromium)")
    expect.set_options(timeout=scaled(_EXPECT_MS))
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=_CHROMIUM, args=_CHROMIUM_ARGS)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """A tab. The test fails if it logged an error, threw, or asked another host for anything."""
    faults: list[str] = []
    context = browser.new_context(base_url=dashboard.url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(scaled(_ACTION_MS))
    tab = context.new_page()
    tab.on("console", lambda message: note_console(message, faults))
    tab.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    tab.on("request", lambda request: note_request(request.url, faults))
    tab.on("websocket", lambda socket: note_request(socket.url, faults))
    yield tab
    context.close()
    assert not faults


def note_console(message: ConsoleMessage, faults: list[str]) -> None:
    # The browser itself reports a page that answers 404, which some tests ask for.
    is_404_page = message.text.startswith("Failed to load resource") and "404" in message.text
    if message.type == "error" and not is_404_page:
        faults.append(f"console: {message.text}")


def note_request(url: str, faults: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
        faults.append(f"request to another host: {url}")

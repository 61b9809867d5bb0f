"""A dashboard on a free port over a real store, and a browser that accepts no faults."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from service.app import create_app
from service.backends.fake import FakeBackend
from service.db.jobs import JobStore
from service.domain.models import Job
from service.jobs.export_runner import ExportRunner
from service.reconciler.loop import Reconciler
from service.settings import Settings
from tests.harness.builders import batch, queued_job
from tests.harness.databases import SqliteTemplate, open_migrated, store_attempt
from tests.harness.wait import scaled, wait_for
from trainer.protocol.events import Event
from trainer.protocol.run_dir import AttemptDir, RunDir

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A page is built beside the tests of the other process.
_EXPECT_MS, _ACTION_MS = 20_000, 30_000
# Until a page shows what the store was told.
LIVE_MS = scaled(10_000)


@dataclass(frozen=True)
class Dashboard:
    """A running server; `url` has no slash at its end, `woken` is set when a page woke the loop."""

    url: str
    store: JobStore
    runs_dir: Path
    woken: threading.Event


class _Server(uvicorn.Server):
    """A server in a thread, which may not install signal handlers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """Serve an app on a free port; gives its URL."""
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive(), "the server to start")
    assert thread.is_alive(), "the server ended while starting"
    yield server.url
    server.should_exit = True
    thread.join(timeout=scaled(10))


@pytest.fixture
def dashboard(
    tmp_path: Path, sqlite_template: SqliteTemplate, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Dashboard]:
    """The dashboard over an empty store; nothing happens to a job but what the test says."""
    for runs in (Reconciler, ExportRunner):
        monkeypatch.setattr(runs, "start", lambda self: None)
    settings = Settings(home=tmp_path, backend="fake", auth="none")
    sqlite_template.copy(settings.database_url)
    store = open_migrated(settings.database_url)
    app = create_app(settings, store, FakeBackend(tmp_path / "fake"))
    woken = threading.Event()
    monkeypatch.setattr(app.state.context.reconciler, "wake", woken.set)
    with serve(app) as url:
        yield Dashboard(url, store, settings.runs_dir, woken)


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
        launched = playwright.chromium.launch(executable_path=_CHROMIUM, args=CHROMIUM_ARGS)
        yield launched
        launched.close()


@contextmanager
def open_tab(browser: Browser, url: str) -> Iterator[tuple[Page, list[str]]]:
    """A tab, and what goes wrong in it: logged errors, exceptions, requests to another host."""
    faults: list[str] = []
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(scaled(_ACTION_MS))
    tab = context.new_page()
    tab.on("console", lambda message: _note_console(message, faults))
    tab.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    tab.on("request", lambda request: _note_request(request.url, faults))
    tab.on("websocket", lambda socket: _note_request(socket.url, faults))
    yield tab, faults
    context.close()


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """A tab of the dashboard; the test fails if anything goes wrong in it."""
    with open_tab(browser, dashboard.url) as (tab, faults):
        yield tab
    assert not faults


@pytest.fixture(scope="package")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The checker of accessibility; skips where the npm registry cannot be had."""
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, for axe-core")
    pack = [npm, "pack", "--silent", "axe-core@4.14.1"]
    if subprocess.run(pack, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("needs the npm registry, for axe-core")
    with tarfile.open(folder / "axe-core-4.14.1.tgz") as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def serious_faults(page: Page, axe: str) -> list[tuple[str, str]]:
    """What keeps some readers from using a page: the rule, and an element that breaks it."""
    page.evaluate(axe)
    found = page.evaluate("async () => (await axe.run()).violations")
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], each["nodes"][0]["html"]) for each in serious]


def start_job(store: JobStore, name: str, age_s: float = 60.0, **spec: Any) -> Job:
    """Store a job that was submitted `age_s` ago and whose first attempt starts."""
    return store_attempt(store, queued_job(now=time.time() - age_s, name=name, **spec))[0]


def tell(store: JobStore, job: Job, *records: Event, stream: str = "rank-0") -> None:
    """Send further records of the job's attempt, as its driver would."""
    attempt_id = f"{job.id}-a0"
    first_seq = store.stream_positions(attempt_id).get(stream, 0)
    part = batch(*records, stream=stream, first_seq=first_seq)
    store.append_events(attempt_id, part, time.time())


def files_of(dashboard: Dashboard, job: Job) -> AttemptDir:
    return RunDir(dashboard.runs_dir / job.id).attempt(f"{job.id}-a0")


def open_job(page: Page, job: Job) -> None:
    """Open a job's page and wait until it is drawn."""
    page.goto(f"/dashboard/jobs/{job.id}")
    expect(page.get_by_role("heading", name=job.name)).to_be_visible()


def _note_console(message: ConsoleMessage, faults: list[str]) -> None:
    # The browser itself reports a page that answers 404, which some tests ask for.
    is_404_page = message.text.startswith("Failed to load resource") and "404" in message.text
    if message.type == "error" and not is_404_page:
        faults.append(f"console: {message.text}")


def _note_request(url: str, faults: list[str]) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
        faults.append(f"request to another host: {url}")

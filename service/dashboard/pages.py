"""Mounts the dashboard on the service's own FastAPI app, under `/dashboard`.

NiceGUI keeps one application per process. A process that makes several apps (tests do) hands
it from one to the next: the newest `mount` is the one that answers.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from nicegui import app as nicegui_app
from nicegui import ui

from service.dashboard.export_panel import Submit
from service.dashboard.job_page import JobPage
from service.dashboard.list_page import ListPage
from service.dashboard.login import add_login
from service.dashboard.login_guard import reader, set_rules
from service.dashboard.shell import MOUNT_PATH, STATIC_DIR, not_found
from service.dashboard.snapshots import ListFeed
from service.settings import Settings
from service.store.base import JobStore
from trainer.export.folder import ExportFolder


def mount(app: FastAPI, store: JobStore, settings: Settings, wake: Callable[[], None]) -> None:
    """Serve the dashboard from `app`: the list at `/dashboard/`, a job below `jobs/`.

    `wake` makes the reconciler look at once at what a reader asked for. Call it after the API's
    routes are in place; `/` then leads to the list.
    """
    _forget_former_mount()
    context = getattr(app.state, "context", None)
    security = context.security if context is not None else None
    set_rules(is_local=settings.auth == "local", security=security)
    submit = context.exports.submit if context is not None else _forget
    _register_pages(store, settings, wake, submit)
    if security is not None:
        add_login(app)

    @app.get("/", include_in_schema=False)
    def _home() -> RedirectResponse:
        return RedirectResponse(f"{MOUNT_PATH}/")

    ui.run_with(
        app,
        root=_unknown_page,
        mount_path=MOUNT_PATH,
        title="Shardloom",
        favicon=STATIC_DIR / "logo.svg",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
    )


def _forget_former_mount() -> None:
    # Starlette refuses to add middleware to an app that has answered a request.
    nicegui_app.middleware_stack = None
    nicegui_app.user_middleware.clear()


def _forget(folder: ExportFolder) -> None:
    """Without the API nothing makes exports; a service that starts later will."""


def _register_pages(
    store: JobStore, settings: Settings, wake: Callable[[], None], submit: Submit
) -> None:
    feed = ListFeed(store)

    @ui.page("/")
    async def _list() -> None:
        await ListPage(feed, reader().projects).build()

    @ui.page("/jobs/{job_id}")
    async def _job(job_id: str) -> None:
        await JobPage(store, settings, job_id, wake, submit).build()


def _unknown_page() -> None:
    not_found("This page does not exist", "The address may be misspelt, or the page has moved.")

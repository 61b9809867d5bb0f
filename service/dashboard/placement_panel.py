"""Who trains when, and the buttons that ask for another size or for leaving a host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nicegui import ui

from service.dashboard import fragments
from service.dashboard.groups_view import groups_view
from service.dashboard.login_guard import check_change
from service.dashboard.shell import panel
from service.dashboard.snapshots import JobSnapshot
from service.domain import JobStatus
from service.errors import Conflict, ServiceError
from service.membership import failure_domain
from service.resizing import (
    known_hosts,
    legal_sizes,
    newest_wish,
    request_drain,
    request_resize,
)
from service.store.base import JobStore
from trainer.run_dir import RunDir

_RESIZE_HINTS = {
    "replica_group": "Groups that stay train on; new ones copy their state from a live group.",
    "job": "The workers save a checkpoint and start again from it in the new size.",
}


class PlacementPanel:
    """Shows the groups of a job and moves them; `on_asked` runs after a request was made."""

    def __init__(
        self,
        store: JobStore,
        run_dir: RunDir,
        snapshot: JobSnapshot,
        on_asked: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._run_dir = run_dir
        self._snapshot = snapshot
        self._on_asked = on_asked
        self._resize_dialog = self._build_resize_dialog()
        self._drain_dialog = self._build_drain_dialog()
        with panel("Groups", "membership-panel") as self._box:
            with ui.element("div").classes("panel-buttons") as self._buttons:
                self._resize_button = _quiet_button("Resize", self._open_resize)
                self._drain_button = _quiet_button("Drain hosts", self._open_drain)
            self._content = ui.html(sanitize=False)

    def show(self, snapshot: JobSnapshot, now: float) -> None:
        """Show the groups of a snapshot; `now` is Unix time in seconds."""
        self._snapshot = snapshot
        job = snapshot.job
        view = groups_view(job, snapshot.timeline, snapshot.checkpoints, now)
        self._content.set_content(fragments.membership(view))
        self._box.set_visibility(view.has_content)
        self._buttons.set_visibility(job.status is JobStatus.RUNNING)
        self._resize_button.set_visibility(job.spec.parallelism.is_elastic)
        self._drain_button.set_visibility(bool(self._hosts()))

    def _hosts(self) -> list[str]:
        return known_hosts(self._snapshot.job, self._snapshot.timeline)

    # ---- dialogs

    def _build_resize_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Resize").classes("dialog-title")
            self._resize_hint = ui.label()
            with ui.element("div").classes("dialog-fields"):
                self._size = ui.select([], label="Workers").props("dense outlined")
            _dialog_actions(dialog, "Resize", self._resize)
        return dialog

    def _build_drain_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Drain hosts").classes("dialog-title")
            ui.label("Groups leave these hosts in good order, and none is placed there.")
            with ui.element("div").classes("dialog-fields wide"):
                self._drained = ui.select([], label="Hosts to leave", multiple=True)
                self._drained.props("dense outlined use-chips")
            _dialog_actions(dialog, "Apply", self._drain)
        return dialog

    def _open_resize(self) -> None:
        try:
            sizes = legal_sizes(self._snapshot.job)
        except Conflict as error:
            ui.notify(str(error), type="warning")
            return
        self._resize_hint.set_text(_RESIZE_HINTS[failure_domain(self._snapshot.job)])
        wanted = newest_wish(self._snapshot.timeline).num_workers
        self._size.set_options(sizes, value=wanted if wanted in sizes else None)
        self._resize_dialog.open()

    def _open_drain(self) -> None:
        drained = list(newest_wish(self._snapshot.timeline).drain_hosts)
        self._drained.set_options(sorted({*self._hosts(), *drained}), value=drained)
        self._drain_dialog.open()

    async def _resize(self) -> None:
        if self._size.value is None:
            ui.notify("Say how many workers.", type="warning")
            return
        self._resize_dialog.close()
        job_id, size = self._snapshot.job.id, int(self._size.value)
        await self._ask("resize", lambda: request_resize(self._store, self._run_dir, job_id, size))

    async def _drain(self) -> None:
        self._drain_dialog.close()
        wanted = set(self._drained.value)
        drained = set(newest_wish(self._snapshot.timeline).drain_hosts)
        await self._ask("drain", lambda: self._move(wanted - drained, drained - wanted))

    def _move(self, to_leave: set[str], to_use: set[str]) -> None:
        job_id = self._snapshot.job.id
        for host in sorted(to_leave | to_use):
            request_drain(self._store, self._run_dir, job_id, host, undo=host in to_use)

    async def _ask(self, what: str, request: Callable[[], object]) -> None:
        try:
            check_change(self._snapshot.job, what)
            await asyncio.to_thread(request)
        except ServiceError as error:
            ui.notify(str(error), type="warning")
        await self._on_asked()


def _quiet_button(text: str, on_click: Callable[[], None]) -> ui.button:
    button = ui.button(text, on_click=on_click, color=None)
    return button.props("outline no-caps dense").classes("quiet-button")


def _dialog_actions(dialog: ui.dialog, text: str, on_click: Callable[[], Awaitable[None]]) -> None:
    with ui.element("div").classes("dialog-actions"):
        close = ui.button("Not now", on_click=dialog.close)
        close.props("flat no-caps").classes("quiet")
        ui.button(text, on_click=on_click).props("unelevated no-caps")

"""Exports of a job, below its checkpoints: a list with downloads, made and deleted by buttons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from nicegui import ui

from service.api.export_schemas import ExportOut
from service.api.exports import describe_or_fail
from service.dashboard import fragments
from service.dashboard.login_guard import check_change
from service.dashboard.snapshots import JobSnapshot
from service.errors import ServiceError
from service.export_removal import delete_export
from service.exports import get_export, request_export
from service.run_files import run_dir_of
from service.settings import Settings
from service.store.base import JobStore
from trainer.export.folder import ExportFolder, list_exports

Submit = Callable[[ExportFolder], None]

_HINT = "Unsharded, quantised, ready for `shardloom serve`."
_TABLES = {"int8": "int8", "fp16": "fp16", "none": "as trained (float32)"}


class ExportPanel:
    """Shows what was exported and asks for more; `submit` hands a request to what makes it."""

    def __init__(
        self, store: JobStore, settings: Settings, snapshot: JobSnapshot, submit: Submit
    ) -> None:
        self._store = store
        self._settings = settings
        self._job = snapshot.job
        self._submit = submit
        self._dialog = self._build_dialog()
        self._delete_dialog = self._build_delete_dialog()
        with ui.element("div").classes("trace-head"):
            self._button = ui.button("Export", on_click=self._dialog.open, color=None)
            self._button.props("outline no-caps dense").classes("quiet-button").mark("export")
            self._delete_button = ui.button(
                "Delete an export", on_click=self._delete_dialog.open, color=None
            )
            self._delete_button.props("outline no-caps dense").classes("quiet-button")
            ui.label(_HINT).classes("trace-hint")
        self._list = ui.html(sanitize=False)

    async def refresh(self) -> None:
        """Look at run storage, in a thread, and show where the exports stand."""
        found = await asyncio.to_thread(self._read)
        self._list.set_content(fragments.exports(self._job, found, time.time()))
        self._doomed.set_options([each.id for each in found])
        self._delete_button.set_enabled(bool(found))

    def show(self, snapshot: JobSnapshot) -> None:
        """Offer what can be exported now."""
        steps = [str(checkpoint.step) for checkpoint in reversed(snapshot.checkpoints)]
        self._checkpoint.set_options(["newest", "best", *steps])
        self._button.set_enabled(bool(steps))

    def _read(self) -> list[ExportOut]:
        folders = list_exports(run_dir_of(self._settings, self._job.id))
        found = []
        for folder in reversed(folders):
            try:
                found.append(describe_or_fail(folder))
            except (ServiceError, OSError, ValueError):
                continue  # it is being deleted
        return found

    def _build_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Export the model").classes("dialog-title")
            ui.label("It says how far its predictions are from the trainer's on validation rows.")
            with ui.element("div").classes("dialog-fields"):
                self._checkpoint = ui.select(["newest"], label="Checkpoint", value="newest")
                self._tables = ui.select(_TABLES, label="Tables", value="int8")
                for field in (self._checkpoint, self._tables):
                    field.props("dense outlined")
            with ui.element("div").classes("dialog-actions"):
                close = ui.button("Not now", on_click=dialog.close)
                close.props("flat no-caps").classes("quiet")
                ui.button("Export", on_click=self._ask).props("unelevated no-caps")
        return dialog

    def _build_delete_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Delete an export").classes("dialog-title")
            ui.label("Its files go; one that is being made is given up.")
            with ui.element("div").classes("dialog-fields"):
                self._doomed = ui.select([], label="Export").props("dense outlined")
            with ui.element("div").classes("dialog-actions"):
                close = ui.button("Not now", on_click=dialog.close)
                close.props("flat no-caps").classes("quiet")
                ui.button("Delete", on_click=self._delete).props("unelevated no-caps")
        return dialog

    async def _delete(self) -> None:
        if self._doomed.value is None:
            ui.notify("Say which one.", type="warning")
            return
        self._delete_dialog.close()
        export_id = str(self._doomed.value)
        try:
            check_change(self._job, f"delete export {export_id}")
            await asyncio.to_thread(self._delete_here, export_id)
        except ServiceError as error:
            ui.notify(str(error), type="warning")
            return
        ui.notify(f"Export {export_id} is deleted.")
        await self.refresh()

    def _delete_here(self, export_id: str) -> None:
        delete_export(get_export(self._settings, self._job.id, export_id))

    async def _ask(self) -> None:
        self._dialog.close()
        checkpoint, quantize = str(self._checkpoint.value), self._tables.value
        try:
            check_change(self._job, "export")
            folder = await asyncio.to_thread(
                request_export, self._store, self._settings, self._job, checkpoint, quantize
            )
        except ServiceError as error:
            ui.notify(str(error), type="warning")
            return
        self._submit(folder)
        ui.notify("The export appears here; it takes seconds to minutes.")
        await self.refresh()

"""The buttons that change the course of a job: cancel, pause, resume, go on from a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nicegui import ui

from service.dashboard import formats
from service.dashboard.login_guard import check_change, may_change, reader
from service.dashboard.snapshots import JobSnapshot
from service.domain import Job, JobStatus
from service.errors import ServiceError
from service.job_changes import cancel_job, pause_job, restart_job, resume_job
from service.job_errors import JobEnded, StaleVersion
from service.settings import Settings
from service.store.base import JobStore

_AT_REST = (JobStatus.QUEUED, JobStatus.PAUSED)


class CoursePanel:
    """Buttons for what may be done with a job now; `on_asked` runs after something was asked."""

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        snapshot: JobSnapshot,
        on_asked: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._settings = settings
        self._snapshot = snapshot
        self._on_asked = on_asked
        self._cancel_dialog = self._build_cancel_dialog()
        self._restart_dialog = self._build_restart_dialog()
        with ui.element("div").classes("course-buttons"):
            self._pause = _button("Pause", self._pause_now)
            self._resume = _button("Resume", self._resume_now)
            self._restart = _button("Go on from checkpoint", self._open_restart)
            self._cancel = _button("Cancel job", self._cancel_dialog.open, "cancel-button")

    def show(self, snapshot: JobSnapshot) -> None:
        """Offer what fits the job as it is now."""
        self._snapshot = snapshot
        job = snapshot.job
        is_pausing = job.pause_requested and job.status is not JobStatus.PAUSED
        is_open = may_change(job) and not job.status.is_terminal and not job.cancel_requested
        self._pause.set_visibility(is_open and job.status is not JobStatus.PAUSED)
        self._pause.set_enabled(not is_pausing)
        self._pause.set_text("Pausing" if is_pausing else "Pause")
        self._resume.set_visibility(is_open and (is_pausing or job.status is JobStatus.PAUSED))
        self._restart.set_visibility(may_change(job) and self._may_restart(job))
        self._cancel.set_visibility(not job.status.is_terminal and may_change(job))
        self._cancel.set_enabled(not job.cancel_requested)
        self._cancel.set_text("Cancelling" if job.cancel_requested else "Cancel job")

    def _may_restart(self, job: Job) -> bool:
        return bool(self._snapshot.checkpoints) and (
            job.status.is_terminal or job.status in _AT_REST
        )

    # ---- dialogs

    def _build_cancel_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label(f"Cancel {self._snapshot.job.name}?").classes("dialog-title")
            ui.label("Its workers stop. Checkpoints that are committed stay where they are.")
            with ui.element("div").classes("dialog-actions"):
                keep = ui.button("Keep it", on_click=dialog.close)
                keep.props("flat no-caps").classes("quiet")
                stop = ui.button("Cancel job", on_click=self._cancel_now)
                stop.props("unelevated no-caps color=negative")
        return dialog

    def _build_restart_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Go on from a checkpoint").classes("dialog-title")
            ui.label("Later checkpoints count no more, and go once a new one is committed.")
            with ui.element("div").classes("dialog-fields wide"):
                self._step = ui.select({}, label="Checkpoint").props("dense outlined")
            with ui.element("div").classes("dialog-actions"):
                leave = ui.button("Leave it", on_click=dialog.close)
                leave.props("flat no-caps").classes("quiet")
                start = ui.button("Go on", on_click=self._restart_now)
                start.props("unelevated no-caps")
        return dialog

    def _open_restart(self) -> None:
        found = sorted(self._snapshot.checkpoints, key=lambda each: -each.step)
        options = {
            each.step: f"step {each.step:,}{', best so far' if each.is_best else ''}, "
            f"{formats.size(each.size_bytes)}"
            for each in found
        }
        self._step.set_options(options, value=found[0].step)
        self._restart_dialog.open()

    # ---- asking

    async def _cancel_now(self) -> None:
        self._cancel_dialog.close()
        await self._ask(
            "cancel", lambda job, actor: cancel_job(self._store, self._settings, job, actor)
        )

    async def _pause_now(self) -> None:
        await self._ask(
            "pause", lambda job, actor: pause_job(self._store, self._settings, job, actor)
        )

    async def _resume_now(self) -> None:
        await self._ask(
            "resume", lambda job, actor: resume_job(self._store, self._settings, job, actor)
        )

    async def _restart_now(self) -> None:
        self._restart_dialog.close()
        step = self._step.value
        await self._ask(
            "restart",
            lambda job, actor: restart_job(
                self._store, self._settings, job, step=step, actor=actor
            ),
        )

    async def _ask(self, verb: str, change: Callable[[str, str], object]) -> None:
        job = self._snapshot.job
        try:
            check_change(job, verb)
            await asyncio.to_thread(change, job.id, reader().name)
        except JobEnded:
            ui.notify("The job had already ended.")
        except StaleVersion:
            ui.notify("The job changed at that moment; please try again.", type="warning")
        except ServiceError as error:
            ui.notify(str(error), type="warning")
        await self._on_asked()


def _button(text: str, on_click: Callable[[], object], style: str = "quiet-button") -> ui.button:
    button = ui.button(text, on_click=on_click, color=None)
    button.props("outline no-caps dense").classes(style)
    return button

"""The traces of a job: a list with downloads, and a button that records one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nicegui import ui

from service.dashboard import fragments
from service.dashboard.login_guard import check_change
from service.dashboard.snapshots import JobSnapshot
from service.domain import JobStatus
from service.errors import ServiceError
from service.store.base import JobStore
from service.traces import request_trace
from trainer.run_dir import RunDir

_HINT = "Gzipped traces in Chrome's format: open them at ui.perfetto.dev or chrome://tracing."


class TracePanel:
    """Shows what was recorded and asks for more; `on_asked` runs after a request was made."""

    def __init__(
        self,
        store: JobStore,
        run_dir: RunDir,
        snapshot: JobSnapshot,
        on_asked: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._run_dir = run_dir
        self._job = snapshot.job
        self._job_id = snapshot.job.id
        self._on_asked = on_asked
        world_size = snapshot.job.spec.parallelism.world_size
        self._dialog = self._build_dialog(list(range(world_size)))
        with ui.element("div").classes("trace-head"):
            self._button = ui.button("Record a trace", on_click=self._dialog.open, color=None)
            self._button.props("outline no-caps dense").classes("quiet-button")
            ui.label(_HINT).classes("trace-hint")
        self._list = ui.html(sanitize=False)

    def show(self, snapshot: JobSnapshot, now: float) -> None:
        """Show the traces of a snapshot; `now` is Unix time in seconds."""
        self._list.set_content(fragments.traces(snapshot.job, snapshot.timeline, now))
        self._button.set_enabled(snapshot.job.status is JobStatus.RUNNING)

    def _build_dialog(self, ranks: list[int]) -> ui.dialog:
        with ui.dialog() as dialog, ui.element("div").classes("panel dialog"):
            ui.label("Record a trace").classes("dialog-title")
            ui.label("torch.profiler records the next steps, which it slows down meanwhile.")
            with ui.element("div").classes("dialog-fields"):
                self._steps = ui.number("Steps", value=3, min=1, max=100, precision=0)
                self._ranks = ui.select(ranks, label="Ranks", value=[0], multiple=True)
                for field in (self._steps, self._ranks):
                    field.props("dense outlined")
            with ui.element("div").classes("dialog-actions"):
                close = ui.button("Not now", on_click=dialog.close)
                close.props("flat no-caps").classes("quiet")
                ui.button("Record", on_click=self._ask).props("unelevated no-caps")
        return dialog

    async def _ask(self) -> None:
        if not self._steps.value or not self._ranks.value:
            ui.notify("Say how many steps, and of which ranks.", type="warning")
            return
        self._dialog.close()
        num_steps, ranks = int(self._steps.value), list(self._ranks.value)
        try:
            check_change(self._job, "trace")
            await asyncio.to_thread(
                request_trace, self._store, self._run_dir, self._job_id, num_steps, ranks
            )
        except ServiceError as error:
            ui.notify(str(error), type="warning")
            return
        ui.notify("The trace appears here once it is written.")
        await self._on_asked()

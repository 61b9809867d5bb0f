"""Panels of a job's page: lifecycle actions, exports, logs, groups now and before, traces.

Each is built once and then updated by `show` or `refresh`. What blocks on storage runs in threads
with a deadline (`reach`), and every change is a request to the REST API (`Rest`).
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

from nicegui import events, ui

from service.api.views import exports_of
from service.dashboard import fragments
from service.dashboard.groups import MOMENTS, moments_of
from service.dashboard.job_feed import ShownJob
from service.dashboard.rest import Refused, Rest
from service.dashboard.shell import panel
from service.dashboard.snapshots import JobSnapshot
from service.domain.auth import Role
from service.domain.membership import failure_domain
from service.domain.models import Checkpoint, JobStatus
from service.domain.timeline import TimelineEvent, latest_resize_request
from service.errors import Conflict
from service.jobs import actions
from service.jobs.logs import LogPiece, LogPosition, list_sources, read_new, tail_position
from service.jobs.run_storage import reach, run_dir_of
from service.schemas import wording
from service.settings import Settings
from trainer.protocol.run_dir import AttemptDir
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization

MAX_LOG_LINES = 500
_MAX_LINE_CHARS = 4000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXPORT_HINT = "Unsharded, quantised, ready for `shardloom serve`."
_TABLES = {name: name for name in get_args(Quantization)} | {"none": "as trained (float32)"}
_RESIZE_HINTS = {
    "replica_group": "Groups that stay train on; new ones copy their state from a live group.",
    "job": "The workers save a checkpoint and start again from it in the new size.",
}
_TRACE_HINT = "Gzipped traces in Chrome's format: open them at ui.perfetto.dev or chrome://tracing."

# Not of a list to choose from, which Enter opens, or of a word that is being composed.
_IN_A_FIELD = (
    "event => event.isComposing || !event.target.matches('input:not([role=combobox])') || emit()"
)

# All fields look alike.
for _field in (ui.input, ui.select, ui.textarea):
    _field.default_props("dense outlined")
ui.checkbox.default_props("dense size=sm")


def button(text: str, on_click: Callable[[], object], style: str = "quiet-button") -> ui.button:
    made = ui.button(text, on_click=on_click, color=None)
    return made.props("outline no-caps dense").classes(style)


@contextmanager
def asking(
    title: str,
    confirm: str,
    on_confirm: Callable[[], Awaitable[None]],
    *,
    leave: str = "Not now",
    colour: str = "",
) -> Iterator[ui.dialog]:
    """A dialog with a title, what the `with` block adds, and buttons to leave and to confirm."""

    async def confirmed() -> None:
        if dialog.value:  # Of two quick clicks the second one finds it closed.
            dialog.close()
            await on_confirm()

    with ui.dialog() as dialog, ui.element("div").classes("panel dialog") as box:
        box.on("keydown.enter", confirmed, js_handler=_IN_A_FIELD)
        ui.label(title).classes("dialog-title")
        yield dialog
        with ui.element("div").classes("dialog-actions"):
            ui.button(leave, on_click=dialog.close).props("flat no-caps").classes("quiet")
            ui.button(confirm, on_click=confirmed).props(f"unelevated no-caps {colour}")


def ask(
    title: str, told: str, confirm: str, act: Callable[[], Awaitable[None]], *, home: ui.element
) -> None:
    """Ask in a dialog that is made for it; `act` runs in `home`, which outlives the dialog."""

    async def confirmed() -> None:
        with home:
            await act()

    with home, asking(title, confirm, confirmed, colour="color=negative") as made_dialog:
        ui.label(told)
    made_dialog.on("hide", made_dialog.delete)
    made_dialog.open()


def _fields(style: str = "") -> ui.element:
    return ui.element("div").classes(f"dialog-fields {style}")


class Panel(ABC):
    """A panel of a job's page, which `on_change` shows anew after a request."""

    def __init__(
        self, rest: Rest, shown: ShownJob, on_change: Callable[[], Awaitable[None]]
    ) -> None:
        self._rest, self._settings = rest, rest.context.settings
        self._shown = shown
        self._run_dir = run_dir_of(self._settings, self._snapshot.job.id)
        self._on_change = on_change
        # Read once: the rights of a session do not change while a page lives.
        self._may_change = rest.reader().may(Role.SUBMITTER, self._snapshot.job.project)
        self._build()

    @abstractmethod
    def _build(self) -> None:
        """Draw the panel, empty."""

    def show(self, shown: ShownJob) -> None:
        """Show what is new."""
        self._shown = shown

    @property
    def _snapshot(self) -> JobSnapshot:
        return self._shown.snapshot

    async def _change(
        self,
        method: str,
        path: str,
        done: str = "",
        from_dialog: ui.dialog | None = None,
        **options: Any,
    ) -> None:
        """Send a request about the job; a notice says what came of it.

        `from_dialog` is opened again where it was refused, with what was typed.
        """
        try:
            await self._rest.send(method, f"/v1/jobs/{self._snapshot.job.id}{path}", **options)
        except Refused as refused:
            ui.notify(str(refused), type="warning", multi_line=True)
            if from_dialog:
                from_dialog.open()
        else:
            if done:
                ui.notify(done)
        await self._on_change()


class ActionsPanel(Panel):
    """Buttons for what may be done with a job now."""

    def _build(self) -> None:
        title = f"Cancel {self._snapshot.job.name}?"
        with asking(
            title,
            "Cancel job",
            lambda: self._change("POST", ":cancel"),
            leave="Keep it",
            colour="color=negative",
        ) as self._cancel_dialog:
            ui.label("Its workers stop. Checkpoints that are committed stay where they are.")
        with asking(
            "Go on from a checkpoint",
            "Go on",
            lambda: self._change("POST", ":restart", json={"step": self._step.value}),
            leave="Leave it",
        ) as self._restart_dialog:
            ui.label("Later checkpoints count no more, and go once a new one is committed.")
            with _fields("wide"):
                self._step = ui.select({}, label="Checkpoint")
        with ui.element("div").classes("course-buttons"):
            self._pause = button("Pause", lambda: self._change("POST", ":pause"))
            self._resume = button("Resume", lambda: self._change("POST", ":resume"))
            self._restart = button("Go on from checkpoint", self._open_restart)
            self._cancel = button("Cancel job", self._cancel_dialog.open, "cancel-button")

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        job = shown.snapshot.job
        may, has_ended = self._may_change, job.status.is_terminal
        is_pausing = job.pause_requested and job.status is not JobStatus.PAUSED
        is_open = may and not has_ended and not job.cancel_requested
        may_restart = bool(self._restartable) and (has_ended or job.status.is_at_rest)
        self._pause.set_visibility(is_open and job.status is not JobStatus.PAUSED)
        self._pause.set_enabled(not is_pausing)
        self._pause.set_text("Pausing" if is_pausing else "Pause")
        self._resume.set_visibility(is_open and (is_pausing or job.status is JobStatus.PAUSED))
        self._restart.set_visibility(may and may_restart)
        self._cancel.set_visibility(may and not has_ended)
        self._cancel.set_enabled(not job.cancel_requested)
        self._cancel.set_text("Cancelling" if job.cancel_requested else "Cancel job")

    @property
    def _restartable(self) -> list[Checkpoint]:
        """Checkpoints behind which there is something to train, the newest first."""
        job, found = self._snapshot.job, self._snapshot.checkpoints
        if job.status is JobStatus.SUCCEEDED:
            found = [each for each in found if each.step < job.progress.total_steps]
        return sorted(found, key=lambda each: -each.step)

    def _open_restart(self) -> None:
        found = self._restartable
        options = {
            each.step: f"step {each.step:,}{', best so far' if each.is_best else ''}, "
            f"{wording.size(each.size_bytes)}"
            for each in found
        }
        self._step.set_options(options, value=found[0].step)
        self._restart_dialog.open()


class ExportPanel(Panel):
    def _build(self) -> None:
        with asking("Export the model", "Export", self._export) as self._dialog:
            ui.label("It says how far its predictions are from the trainer's on validation rows.")
            with _fields():
                self._checkpoint = ui.select(["newest"], label="Checkpoint", value="newest")
                self._tables = ui.select(_TABLES, label="Tables", value=DEFAULT_QUANTIZATION)
        with asking("Delete an export", "Delete", self._delete) as self._delete_dialog:
            ui.label("Its files go; one that is being made is given up.")
            with _fields():
                self._doomed = ui.select([], label="Export")
        with ui.element("div").classes("trace-head"):
            self._button = button("Export", self._dialog.open).mark("export")
            self._delete_button = button("Delete an export", self._delete_dialog.open)
            ui.label(_EXPORT_HINT).classes("trace-hint")
        self._list = ui.html(sanitize=False)

    async def refresh(self) -> None:
        """Read run storage in a thread and show the state of the exports, the newest first.

        Raises `StorageUnavailable`.
        """
        read = partial(exports_of, self._run_dir)
        job, now = self._snapshot.job, time.time()
        reading = asyncio.to_thread(reach, self._settings, read, owner=job.id)
        found = (await reading)[::-1]
        self._list.set_content(fragments.render("exports.html", job=job, exports=found, now=now))
        if (ids := [each.id for each in found]) != self._doomed.options:
            self._doomed.set_options(ids)
        self._delete_button.set_visibility(self._may_change and bool(found))

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        steps = [str(checkpoint.step) for checkpoint in reversed(shown.snapshot.checkpoints)]
        self._checkpoint.set_options(["newest", "best", *steps])
        self._button.set_visibility(self._may_change)
        self._button.set_enabled(bool(steps))

    async def _delete(self) -> None:
        if self._doomed.value is None:
            ui.notify("Say which one.", type="warning")
            self._delete_dialog.open()
            return
        export_id = str(self._doomed.value)
        done = f"Export {export_id} is deleted."
        await self._change("DELETE", f"/exports/{export_id}", done)

    async def _export(self) -> None:
        if self._checkpoint.value is None:
            ui.notify("That checkpoint is gone; choose another one.", type="warning")
            self._dialog.open()
            return
        body = {"checkpoint": self._checkpoint.value, "quantize": self._tables.value}
        done = "The export appears here; it takes seconds to minutes."
        await self._change("POST", "/exports", done, self._dialog, json=body)


class LogView:
    """Follows one log of one attempt; switches to a new attempt by itself."""

    def __init__(self, settings: Settings, job_id: str) -> None:
        self._run_dir = run_dir_of(settings, job_id)
        self._reach = partial(reach, settings, owner=job_id)
        self._attempt_id: str | None = None
        self._position: LogPosition | None = None
        self._suggested: str | None = None
        with ui.element("div").classes("log-head"):
            self._source = ui.select([], on_change=self._restart)
            self._source.props('aria-label="Log source"').classes("log-source")
            self._hint = ui.label().classes("log-hint")
        self._lines = ui.log(max_lines=MAX_LOG_LINES).classes("log-lines")

    async def refresh(self, attempt_id: str | None, *, is_final: bool) -> None:
        """Show what is new; `is_final` says that nobody writes to the logs any more.

        Raises `StorageUnavailable`.
        """
        if attempt_id != self._attempt_id:
            self._attempt_id = attempt_id
            self._restart()
        if attempt_id is None:
            self._show_sources([], "Logs appear once the job has been submitted to the cluster.")
            return
        files = self._run_dir.attempt(attempt_id)
        look = partial(list_sources, files)
        found = await asyncio.to_thread(self._reach, look)
        self._show_sources(found, "No log has been written yet.")
        if self._source.value:
            await self._follow(files, attempt_id, self._source.value, is_final)

    def _show_sources(self, sources: list[str], hint: str) -> None:
        if sources != self._source.options:
            is_ours = self._source.value == self._suggested
            self._suggested = suggested_source(sources)
            kept = self._source.value if self._source.value in sources and not is_ours else None
            self._source.set_options(sources, value=kept or self._suggested)
        self._source.set_visibility(bool(sources))
        self._hint.set_text("" if sources else hint)

    async def _follow(
        self, files: AttemptDir, attempt_id: str, source: str, is_final: bool
    ) -> None:
        before = self._position
        read = partial(_read, files, attempt_id, source, before, is_final)
        start, pieces = await asyncio.to_thread(self._reach, read)
        # The reader may have picked another source while the thread was reading.
        if before is not self._position or source != self._source.value:
            return
        self._position = pieces[-1].position if pieces else start
        for piece in pieces[-MAX_LOG_LINES:]:
            self._lines.push(shown_line(piece.text))

    def _restart(self) -> None:
        self._position = None
        self._lines.clear()


def shown_line(text: str) -> str:
    """A line as a terminal has it in the end, uncoloured, cut where too long for a page."""
    shown = _COLOURS.sub("", text.rpartition("\r")[2])
    if len(shown) > _MAX_LINE_CHARS:
        shown = f"{shown[:_MAX_LINE_CHARS]} ..."
    # An empty label has no height, and a blank line should keep its place.
    return " ".join(shown.splitlines()) or "\N{NO-BREAK SPACE}"


def suggested_source(sources: list[str]) -> str | None:
    """The log to show until the reader picks one: a rank 0's, where training can be watched."""
    ranks = (source for source in sources if source.endswith("rank-0"))
    return next(ranks, next(iter(sources), None))


def _read(
    files: AttemptDir, attempt_id: str, source: str, position: LogPosition | None, is_final: bool
) -> tuple[LogPosition, list[LogPiece]]:
    """Where reading began and what follows; without a position, from the file's last lines."""
    start = position or tail_position(files, attempt_id, [source], MAX_LOG_LINES)
    return start, list(read_new(files, start, [source], is_final=is_final))


class PlacementPanel(Panel):
    """The groups of a job, with requests to resize it or to drain hosts."""

    def _build(self) -> None:
        with asking("Resize", "Resize", self._resize) as self._resize_dialog:
            self._resize_hint = ui.label()
            with _fields():
                self._size = ui.select([], label="Workers")
        with asking("Drain hosts", "Apply", self._drain) as self._drain_dialog:
            ui.label("Groups leave these hosts in good order, and none is placed there.")
            with _fields("wide"):
                self._drained = ui.select([], label="Hosts to leave", multiple=True).props(
                    "use-chips"
                )
        with panel("Workers and recovery", "membership-panel") as self._box:
            with ui.element("div").classes("panel-buttons") as self._buttons:
                self._resize_button = button("Resize", self._open_resize)
                self._drain_button = button("Drain hosts", self._open_drain)
            with ui.element("div").classes("membership"):
                self._lanes = ui.html(sanitize=False).classes("lanes-scroll").props("tabindex=0")
                self._told = ui.html(sanitize=False).classes("membership-told")

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        snapshot, job = shown.snapshot, shown.snapshot.job
        lanes, told = shown.html["lanes"], shown.html["membership"]
        self._lanes.set_content(lanes)
        self._lanes.set_visibility(bool(lanes))
        self._told.set_content(told)
        self._box.set_visibility(bool(lanes or told))
        self._buttons.set_visibility(self._may_change and job.status is JobStatus.RUNNING)
        self._resize_button.set_visibility(job.spec.parallelism.is_elastic)
        own = (line.kind for line in snapshot.timeline if line.attempt_id == job.current_attempt_id)
        self._drain_button.set_visibility(not MOMENTS.isdisjoint(own))

    def _open_resize(self) -> None:
        job = self._snapshot.job
        try:
            sizes = actions.legal_sizes(job)
        except Conflict as error:
            ui.notify(str(error), type="warning")
            return
        self._resize_hint.set_text(_RESIZE_HINTS[failure_domain(job)])
        wanted = latest_resize_request(self._snapshot.timeline).workers
        self._size.set_options(sizes, value=wanted if wanted in sizes else None)
        self._resize_dialog.open()

    def _open_drain(self) -> None:
        timeline = self._snapshot.timeline
        # Others may drain hosts while the dialog is open: these are no change of this reader's.
        self._shown_drained = sorted(latest_resize_request(timeline).drain_hosts)
        hosts = {*actions.known_hosts(self._snapshot.job, timeline), *self._shown_drained}
        self._drained.set_options(sorted(hosts), value=self._shown_drained)
        self._drain_dialog.open()

    async def _resize(self) -> None:
        if self._size.value is None:
            ui.notify("Say how many workers.", type="warning")
            self._resize_dialog.open()
            return
        await self._change("POST", "/resize", json={"workers": int(self._size.value)})

    async def _drain(self) -> None:
        for host in sorted({*self._drained.value} ^ {*self._shown_drained}):
            body = {"host": host, "undo": host in self._shown_drained}
            await self._change("POST", "/drain", json=body)


class GridPanel(Panel):
    """The 2D groups: as they are now, or after each of the newest events of the job's life."""

    def _build(self) -> None:
        self._moment: TimelineEvent | None = None
        with panel("2D groups"):
            self._grid = ui.html(sanitize=False)
            with ui.element("div").classes("moments") as self._moments:
                self._ticks = ui.html(sanitize=False).classes("moment-ticks")
                # Quasar's slider cannot be focused where its role is.
                self._slider = ui.input().props("type=range min=0 step=1 borderless dense")
                self._slider.props('aria-label="Moment in the life of the job"')
                self._slider.on_value_change(self._choose)
                self._told = ui.label().classes("moment-told").props("role=status")

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        job, moments = shown.snapshot.job, moments_of(shown.snapshot.timeline)
        self._moments.set_visibility(len(moments) > 1)
        self._ticks.set_content(shown.html["moments"])
        # What is now comes after the last of them.
        if self._moment not in moments:
            self._moment = None
        at = len(moments) if self._moment is None else moments.index(self._moment)
        self._slider.props(f"max={len(moments)} value={at}")
        if self._moment is None:
            self._told.set_text("at the end" if job.status.is_terminal else "now")
            self._grid.set_content(shown.html["grid"])

    async def _choose(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        job, timeline = self._snapshot.job, self._snapshot.timeline
        moments, chosen = moments_of(timeline), max(0, int(event.value or 0))
        self._moment = then = moments[chosen] if chosen < len(moments) else None
        if then is not None:
            html = await asyncio.to_thread(fragments.groups, job, timeline, then)
            if self._moment is not then:
                return  # The reader has gone on meanwhile.
            self._told.set_text(f"{wording.clock(then.time - job.created_at)} {then.message}")
            self._grid.set_content(html)
        self.show(self._shown)


class TracePanel(Panel):
    def _build(self) -> None:
        with asking("Record a trace", "Record", self._record) as self._dialog:
            ui.label("torch.profiler records the next steps, which it slows down meanwhile.")
            with _fields():
                self._steps = ui.input("Steps", value="3").props("inputmode=numeric")
                self._ranks = ui.select([0], label="Ranks", value=[0], multiple=True)
        with ui.element("div").classes("trace-head"):
            self._button = button("Record a trace", self._open)
            ui.label(_TRACE_HINT).classes("trace-hint")
        self._list = ui.html(sanitize=False)

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        self._list.set_content(shown.html["traces"])
        self._button.set_visibility(self._may_change)
        self._button.set_enabled(shown.snapshot.job.status is JobStatus.RUNNING)

    def _open(self) -> None:
        # Thousands of options take a while, so those who only look do not get them.
        self._ranks.set_options([*range(self._snapshot.job.spec.parallelism.world_size)])
        self._dialog.open()

    async def _record(self) -> None:
        if not self._steps.value or not self._ranks.value:
            ui.notify("Say how many steps, and of which ranks.", type="warning")
            self._dialog.open()
            return
        body = {"num_steps": self._steps.value, "ranks": list(self._ranks.value)}
        done = "The trace appears here once it is written."
        await self._change("POST", "/traces", done, self._dialog, json=body)


class ShardingPanel(Panel):
    """How tables are sharded and used; those that are not listed are found by a search."""

    def _build(self) -> None:
        self._drawn = ("", "")
        with panel("Sharding", "sharding-panel"):
            self._search = ui.input("Search tables", on_change=self.refresh).props("debounce=300")
            num_tables = len(self._snapshot.job.spec.embedding_tables)
            self._search.set_visibility(num_tables > fragments.MAX_TABLES)
            self._content = ui.html(sanitize=False)

    def show(self, shown: ShownJob) -> None:
        super().show(shown)
        if not self._search.value:
            self._content.set_content(shown.html["sharding"])

    async def refresh(self) -> None:
        """Draw in a thread what is searched for, where it was not drawn of what is shown."""
        wanted = search, html = self._search.value or "", self._shown.html["sharding"]
        if wanted == self._drawn:
            return
        self._drawn = wanted
        if search:
            job, timeline = self._snapshot.job, self._snapshot.timeline
            html = await asyncio.to_thread(fragments.sharding, job, timeline, search)
        if wanted == self._drawn:
            self._content.set_content(html)

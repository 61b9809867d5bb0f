"""The page of one job, which asks once a second what is new."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from typing import Any, TypeVar

from nicegui import events, ui

from service.dashboard import charts, fragments, spec_text
from service.dashboard.job_feed import JobFeed, ShownJob
from service.dashboard.panels import (
    ActionsPanel,
    ExportPanel,
    GridPanel,
    LogView,
    Panel,
    PlacementPanel,
    ShardingPanel,
    TracePanel,
)
from service.dashboard.rest import Refused, Rest
from service.dashboard.shell import MOUNT_PATH, link_button, page_frame, panel
from service.dashboard.snapshots import (
    MAX_AGE_S,
    MAX_CHART_POINTS,
    JobSnapshot,
    Points,
    read_points,
)
from service.db.jobs import JobStore
from service.domain.auth import Role
from service.domain.models import Checkpoint, Job, MetricPoint
from service.errors import JobNotFound, JobUnreadable, StorageUnavailable, StoreUnavailable

REFRESH_INTERVAL_S = 1.0
_MAX_CSV_ROWS = 100_000
# To all of a chart's zooms. In its options each update would undo a reader's own zoom.
_WHOLE = {"type": "dataZoom", "start": 0, "end": 100}
# What is longer is shown as plain text: colours take a second and ten times as many bytes.
_MAX_COLOURED_CHARS = 50_000
PanelKind = TypeVar("PanelKind", bound=Panel)


class JobPage:
    """One reader's view of a job, refreshed every second while the browser is connected."""

    def __init__(self, rest: Rest, feeds: MutableMapping[str, JobFeed], job_id: str) -> None:
        self._rest = rest
        self._store = rest.context.store
        self._job_id = job_id
        placed = rest.context.reconciler.placed
        self._feed = feeds.setdefault(job_id, JobFeed(self._store, job_id, placed))
        # What the charts show, too.
        self._drawn: JobSnapshot | None = None
        self._panels: list[Panel] = []
        self._parts: dict[str, ui.html] = {}
        self._timer: ui.timer | None = None

    async def build(self) -> None:
        """Draw the page; raises `JobNotFound`, `StoreUnavailable`."""
        self._shown = shown = await asyncio.to_thread(self._feed.latest)
        snapshot = shown.snapshot
        if self._rest.reader().role_in(snapshot.job.project) is None:
            raise JobNotFound(self._job_id)
        with page_frame(snapshot.job.name, self._rest):
            self._build_head()
            self._build_body()
            self._build_tabs()
            self._sharding = self._panel(ShardingPanel)
        self._show(shown)
        # Read while the browser loads the page.
        reading = asyncio.create_task(self._read_charts(is_anew=True))
        # No partial: NiceGUI names a task by what it calls, arguments and all.
        ui.timer(0.0, lambda: self._begin(snapshot, reading), once=True)

    async def _begin(self, snapshot: JobSnapshot, reading: Awaitable[list[Points]]) -> None:
        """Draw the charts, then follow the job."""
        with suppress(StoreUnavailable):  # Told of by what follows, which reads them again.
            self._draw_charts(snapshot, await reading)
        self._timer = ui.timer(REFRESH_INTERVAL_S, self.refresh)
        await self._show_parent()

    async def _read_charts(self, *, is_anew: bool) -> list[Points]:
        """The points of each chart, of known ones only what is newer unless `is_anew`."""
        read = partial(read_points, self._store, self._job_id)
        known = [({} if is_anew else chart.points) for chart in self._charts]
        metrics = [chart.metrics for chart in self._charts]
        return await asyncio.to_thread(lambda: [*map(read, metrics, known)])

    def _draw_charts(self, snapshot: JobSnapshot, found: Sequence[Points]) -> None:
        best = next((each for each in snapshot.checkpoints if each.is_best), None)
        marks = charts.marks_of(snapshot.timeline)
        for chart, points in zip(self._charts, found, strict=True):
            chart.show(points, best, marks)
        self._drawn = snapshot

    async def _show_parent(self) -> None:
        """What differs from the spec of the job that this is a clone of."""
        told = (line.data.get("cloned_from") for line in self._shown.snapshot.timeline[:1])
        parent = next(filter(None, told), None)
        if parent is None:
            return
        try:
            old = (await self._rest.get(f"/v1/jobs/{parent}"))["spec"]
        except Refused:
            return  # It was deleted, or may not be seen.
        new = self._shown.snapshot.job.spec.model_dump(mode="json")
        title = f"What differs from {parent}, its parent"
        html = fragments.differences([str(parent), "this job"], [old, new], title)
        self._parent.set_content(html)
        self._parent.set_visibility(True)

    async def refresh(self, max_age_s: float = MAX_AGE_S) -> None:
        """Show what has changed up to `max_age_s` ago."""
        try:
            shown = await asyncio.to_thread(self._feed.latest, max_age_s)
            if shown is not self._shown:
                self._show(shown)
            await self._sharding.refresh()
            snapshot = shown.snapshot
            if snapshot is not self._drawn:
                is_rewound = snapshot.is_rewound(self._drawn)
                self._draw_charts(snapshot, await self._read_charts(is_anew=is_rewound))
        except JobNotFound:
            if self._timer:
                self._timer.cancel()
            self._gone.set_text("This job was deleted. The page shows what was known of it.")
            self._buttons.set_visibility(False)
            return
        except (StoreUnavailable, JobUnreadable) as error:
            self._gone.set_text(f"What is shown is old, as the job cannot be read: {error}")
            return
        self._gone.set_text("")
        job, fault = snapshot.job, ""
        try:
            await self._exports.refresh()
            await self._logs.refresh(job.current_attempt_id, is_final=job.status.is_terminal)
        except StorageUnavailable as error:
            fault = f"Logs and exports cannot be read: {error}"
        self._fault.set_text(fault)

    def _build_head(self) -> None:
        with ui.element("div").classes("crumbs"):
            ui.html(f'<a href="{MOUNT_PATH}/">Jobs</a>', sanitize=False)
            ui.label("/")
            ui.label(self._shown.snapshot.job.name)
        self._gone = ui.label().classes("notice tone-warn").props("role=status")
        with ui.element("div").classes("job-head"):
            self._part("heading").classes("heading")
            with ui.element("div").classes("course-buttons") as self._buttons:
                job_id = self._shown.snapshot.job.id
                link_button("Compare", f"{MOUNT_PATH}/compare?jobs={job_id}")
                if self._rest.reader().may_somewhere(Role.SUBMITTER):
                    link_button("New from this", f"{MOUNT_PATH}/new?source={job_id}")
                self._panel(ActionsPanel)
        self._part("progress").classes("panel progress-panel")
        self._part("figures", tag="dl").classes("figures")
        self._panel(PlacementPanel)

    def _build_body(self) -> None:
        with ui.element("div").classes("columns"):
            with ui.element("div").classes("charts-column"):
                self._charts: list[_ChartPanel] = []
                chart_tools(self._redraw, self._charts)
                with ui.element("div").classes("charts"):
                    job = self._shown.snapshot.job
                    self._charts += [
                        _ChartPanel(self._store, job, spec) for spec in charts.charts_of(job)
                    ]
            with ui.element("div").classes("side"):
                self._panel(GridPanel)
                with panel("Timeline", "timeline-panel"):
                    self._part("timeline").classes("timeline-scroll").props("tabindex=0")

    def _build_tabs(self) -> None:
        with ui.element("section").classes("panel tabs-panel"):
            self._fault = ui.label().classes("notice tone-warn")
            with ui.tabs().props("dense no-caps align=left inline-label").classes("tabs") as tabs:
                for name in ("Logs", "Checkpoints", "Traces", "Attempts", "Spec"):
                    ui.tab(name)
            shown = ui.tab_panels(tabs, value="Logs", animated=False).classes("tab-panels")
            shown.on_value_change(self._show_tab)
            with shown:
                with ui.tab_panel("Logs"):
                    self._logs = LogView(self._rest.context.settings, self._job_id)
                with ui.tab_panel("Checkpoints"):
                    self._part("checkpoints")
                    self._exports = self._panel(ExportPanel)
                with ui.tab_panel("Traces"):
                    self._panel(TracePanel)
                with ui.tab_panel("Attempts"):
                    self._part("attempts")
                with ui.tab_panel("Spec"):
                    self._parent = ui.html(sanitize=False)
                    self._parent.set_visibility(False)
                    self._spec: ui.element | None = ui.element("div")

    async def _show_tab(self, event: events.ValueChangeEventArguments[Any]) -> None:
        """Write the spec once somebody looks: one of thousands of tables takes seconds."""
        place = self._spec
        if event.value != "Spec" or place is None:
            return
        self._spec = None
        text = await asyncio.to_thread(spec_yaml, self._shown.snapshot.job)
        with place:
            if len(text) > _MAX_COLOURED_CHARS:
                html = f"<pre>{escape(text)}</pre>"
                ui.html(html, sanitize=False).classes("spec long").props("tabindex=0")
                return
            code = ui.code(text, language="yaml").classes("spec")
            if code.copy_button is not None:
                code.copy_button.props('aria-label="Copy the spec"')

    def _show(self, shown: ShownJob) -> None:
        self._shown = shown
        for name, made in self._parts.items():
            made.set_content(shown.html[name])
        for each in self._panels:
            each.show(shown)

    def _redraw(self, view: charts.ChartView) -> None:
        for chart in self._charts:
            chart.draw(view)

    def _part(self, name: str, tag: str = "div") -> ui.html:
        """A part of the page that only shows, by its name in `fragments.PARTS`."""
        self._parts[name] = ui.html(sanitize=False, tag=tag)
        return self._parts[name]

    def _panel(self, kind: type[PanelKind]) -> PanelKind:
        made = kind(self._rest, self._shown, partial(self.refresh, 0.0))
        self._panels.append(made)
        return made


class ChartBox(ABC):
    """A chart in its box, with a legend where it has several lines, and its data as files."""

    def __init__(self, title: str, options: dict[str, Any], legend: Mapping[str, str]) -> None:
        self._title = title
        with ui.element("section").classes("panel chart-panel") as self.box:
            with ui.element("div").classes("chart-head"):
                with ui.element("h2"):
                    ui.label(title)
                with ui.element("div").classes("legend"):
                    for label, colour in legend.items():
                        ui.label(label).style(f"--colour: {colour}")
                ui.element("span").classes("grow")
                for text, save in (("CSV", self._save_csv), ("PNG", self._save_png)):
                    save_button = ui.button(text, on_click=save, color=None).classes("chart-save")
                    save_button.props("flat dense no-caps")
                    # Not by a text, which would be parsed: a title may hold what a job wrote.
                    save_button.props["aria-label"] = f"{title} as {text}"
            self.chart = ui.echart(options).classes("chart")
        self.chart.props("role=img").props["aria-label"] = title

    @abstractmethod
    async def read_csv(self) -> str:
        """All that the chart shows, as CSV."""

    def show_zoom(self, *, is_shown: bool) -> None:
        charts.show_zoom(self.chart.options, is_shown=is_shown)
        self.chart.update()
        if not is_shown:  # Without its slider nobody would know of it.
            self.chart.run_chart_method("dispatchAction", _WHOLE)

    async def _save_csv(self) -> None:
        try:
            text = await self.read_csv()
        except StoreUnavailable as error:
            ui.notify(f"The points cannot be read: {error}", type="warning", multi_line=True)
            return
        ui.download.content(text, f"{self._title}.csv", "text/csv")

    async def _save_png(self) -> None:
        ground = {"pixelRatio": 2, "backgroundColor": "#ffffff"}
        url = await self.chart.run_chart_method("getDataURL", ground, timeout=10)
        ui.download.content(base64.b64decode(url.partition(",")[2]), f"{self._title}.png")


class _ChartPanel(ChartBox):
    """A chart of one job; where a reader zooms in, it is read again in detail."""

    def __init__(self, store: JobStore, job: Job, spec: charts.ChartSpec) -> None:
        self._store, self._job_id, self._spec = store, job.id, spec
        legend = {line.label: line.colour for line in spec.lines} if len(spec.lines) > 1 else {}
        super().__init__(spec.title, charts.chart_options(spec), legend)
        self.box.classes("wide" if spec.is_stacked else "")
        self.chart.mark(f"chart-{spec.key}")
        self.chart.on("chart:datazoom", self._zoom, ["start", "end", "batch"], throttle=0.4)
        self.metrics = [line.metric for line in spec.lines]
        self.points: Points = {}
        self._detail: Points = {}
        self._best: Checkpoint | None = None
        self._marks: Sequence[charts.Mark] = ()
        self._view = charts.ChartView()

    def show(self, points: Points, best: Checkpoint | None, marks: Sequence[charts.Mark]) -> None:
        """Draw the points (by metric name), mark events and the best checkpoint."""
        self.points, self._best, self._marks = points, best, marks
        self.draw(self._view)

    def draw(self, view: charts.ChartView) -> None:
        self._view = view
        options = self.chart.options
        shown = {**self.points, **self._with_detail()}
        charts.fill(options, self._spec, shown, self._best, self._marks, view)
        self.box.classes("drawn")
        self.box.set_visibility(not self._spec.is_optional or charts.has_data(options))
        self.chart.update()

    def _with_detail(self) -> Points:
        """The coarse points outside of what was read in detail, and the detail."""
        found = {}
        for name, detail in self._detail.items():
            if detail:
                first, last = detail[0].step, detail[-1].step
                coarse = self.points.get(name, ())
                before = [point for point in coarse if point.step < first]
                found[name] = [*before, *detail, *(each for each in coarse if each.step > last)]
        return found

    async def _zoom(self, event: events.GenericEventArguments) -> None:
        told = (event.args.get("batch") or [event.args])[0]
        start, end = told.get("start"), told.get("end")
        names = [line.metric for line in self._spec.lines if self.points.get(line.metric)]
        if start is None or end is None or not names:
            return
        first = min(self.points[name][0].step for name in names)
        last = max(self.points[name][-1].step for name in names)
        if end - start > 99:
            self._detail = {}
        else:
            near, far = (int(first + (last - first) * share / 100) for share in (start, end))
            read = partial(self._read, names, near, far, MAX_CHART_POINTS)
            with suppress(StoreUnavailable):  # The page says so.
                self._detail = await asyncio.to_thread(read)
        self.draw(self._view)

    def _read(
        self, names: Sequence[str], first: int | None, last: int | None, most: int
    ) -> dict[str, list[MetricPoint]]:
        return {
            name: self._store.metric_points(
                self._job_id, name, from_step=first, to_step=last, max_points=most
            )
            for name in names
        }

    async def read_csv(self) -> str:
        names = [line.metric for line in self._spec.lines if self.points.get(line.metric)]
        found = await asyncio.to_thread(self._read, names, None, None, _MAX_CSV_ROWS)
        return charts.csv_of(found)


def chart_tools(
    redraw: Callable[[charts.ChartView], None],
    boxes: Sequence[ChartBox],
    *,
    have_events: bool = True,
) -> ui.element:
    """How all charts of a page are looked at; `boxes` may be filled later."""
    view = charts.ChartView()

    def show_zoom(is_shown: bool) -> None:
        for box in boxes:
            box.show_zoom(is_shown=is_shown)

    def change(**fields: Any) -> None:
        nonlocal view
        view = dataclasses.replace(view, **fields)
        redraw(view)

    with ui.element("div").classes("chart-tools") as tools:
        shares = {0.0: "not smoothed", 0.6: "smoothed", 0.9: "much smoothed"}
        smoothing = ui.select(
            shares, value=0.0, on_change=lambda event: change(smoothing=event.value)
        )
        smoothing.props('aria-label="Smoothing"')
        ui.checkbox("Log scale", on_change=lambda event: change(is_log=event.value))
        if have_events:
            marked = ui.checkbox("Events", value=True)
            marked.on_value_change(lambda event: change(has_events=event.value))
        with ui.checkbox("Zoom", on_change=lambda event: show_zoom(event.value)):
            ui.tooltip("Or turn the wheel over a chart with Ctrl")
    return tools


def spec_yaml(job: Job) -> str:
    """The spec as the user could submit it again: YAML without what was left at its default."""
    return spec_text.written(job.spec.model_dump(mode="json", exclude_defaults=True))

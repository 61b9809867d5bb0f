"""The two pages: the job list, and the page of one job. Both poll the store once a second."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import yaml
from nicegui import ui

from service.dashboard import charts, fragments, views
from service.dashboard.auth import may_see
from service.dashboard.panels import (
    ActionsPanel,
    ExportPanel,
    LogView,
    PageTools,
    Panel,
    PlacementPanel,
    TracePanel,
)
from service.dashboard.shell import MOUNT_PATH, not_found, page_frame, panel
from service.dashboard.snapshots import (
    MAX_LISTED_JOBS,
    JobSnapshot,
    ListFeed,
    ListFilter,
    ListSnapshot,
    load_job,
)
from service.domain.models import Checkpoint, Job, JobStatus, MetricPoint
from service.errors import JobNotFound, StorageUnavailable
from service.schemas import wording

REFRESH_INTERVAL_S = 1.0
PanelKind = TypeVar("PanelKind", bound=Panel)


class JobPage:
    """One reader's view of a job, refreshed every second while the browser is connected."""

    def __init__(self, tools: PageTools, job_id: str) -> None:
        self._tools = tools
        self._store = tools.store
        self._job_id = job_id

    async def build(self) -> None:
        """Draw the page, or a 404 if there is no such job."""
        try:
            snapshot = await asyncio.to_thread(load_job, self._store, self._job_id, None)
            if not may_see(snapshot.job):
                raise JobNotFound(self._job_id)
        except JobNotFound:
            not_found("There is no such job", f"Nothing is known of '{self._job_id}'.")
            return
        self._snapshot = snapshot
        with page_frame(snapshot.job.name):
            self._build_head()
            self._build_body()
            self._build_tabs()
        self._show(snapshot)
        ui.timer(REFRESH_INTERVAL_S, self.refresh)

    async def refresh(self) -> None:
        """Read the store in a thread and show what changed."""
        snapshot = await asyncio.to_thread(load_job, self._store, self._job_id, self._snapshot)
        self._show(snapshot)
        job, fault = snapshot.job, ""
        try:
            await self._exports.refresh()
            await self._logs.refresh(job.current_attempt_id, is_final=job.status.is_terminal)
        except StorageUnavailable as error:
            fault = f"Logs and exports cannot be read: {error}"
        self._fault.set_text(fault)
        self._fault.set_visibility(bool(fault))

    def _build_head(self) -> None:
        with ui.element("div").classes("crumbs"):
            ui.html(f'<a href="{MOUNT_PATH}/">Jobs</a>', sanitize=False)
            ui.label("/")
            ui.label(self._snapshot.job.name)
        with ui.element("div").classes("job-head"):
            self._heading = ui.html(sanitize=False).classes("heading")
            self._actions = self._panel(ActionsPanel)
        self._progress = ui.html(sanitize=False).classes("panel progress-panel")
        self._figures = ui.html(sanitize=False, tag="dl").classes("figures")
        self._placement = self._panel(PlacementPanel)

    def _build_body(self) -> None:
        with ui.element("div").classes("columns"):
            with ui.element("div").classes("charts"):
                specs = charts.charts_of(self._snapshot.job)
                self._charts = [_ChartPanel(spec) for spec in specs]
            with ui.element("div").classes("side"):
                with panel("2D groups"):
                    self._groups = ui.html(sanitize=False)
                with panel("Timeline", "timeline-panel"):
                    self._timeline = ui.html(sanitize=False).classes("timeline-scroll")
        with panel("Sharding", "sharding-panel"):
            self._sharding = ui.html(sanitize=False)

    def _build_tabs(self) -> None:
        with ui.element("section").classes("panel tabs-panel"):
            self._fault = ui.label().classes("notice tone-warn")
            self._fault.set_visibility(False)
            with ui.tabs().props("dense no-caps align=left inline-label").classes("tabs") as tabs:
                for name in ("Logs", "Checkpoints", "Traces", "Attempts", "Spec"):
                    ui.tab(name)
            with ui.tab_panels(tabs, value="Logs", animated=False).classes("tab-panels"):
                with ui.tab_panel("Logs"):
                    self._logs = LogView(self._tools.settings, self._job_id)
                with ui.tab_panel("Checkpoints"):
                    self._checkpoints = ui.html(sanitize=False)
                    self._exports = self._panel(ExportPanel)
                with ui.tab_panel("Traces"):
                    self._traces = self._panel(TracePanel)
                with ui.tab_panel("Attempts"):
                    self._attempts = ui.html(sanitize=False)
                with ui.tab_panel("Spec"):
                    ui.code(spec_yaml(self._snapshot.job), language="yaml").classes("spec")

    def _show(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        job, now = snapshot.job, time.time()
        self._heading.set_content(fragments.heading(job, now, snapshot.attempts))
        self._progress.set_content(fragments.progress(job))
        self._figures.set_content(fragments.render("figures.html", job=job))
        self._placement.show(snapshot, now)
        self._groups.set_content(fragments.groups(job, snapshot.timeline))
        timeline = fragments.render("timeline.html", job=job, events=snapshot.timeline)
        self._timeline.set_content(timeline)
        self._sharding.set_content(fragments.sharding(job, snapshot.timeline))
        self._traces.show(snapshot, now)
        found = fragments.render("checkpoints.html", checkpoints=snapshot.checkpoints, now=now)
        self._checkpoints.set_content(found)
        self._exports.show(snapshot)
        tried = fragments.render("attempts.html", job=job, attempts=snapshot.attempts, now=now)
        self._attempts.set_content(tried)
        self._actions.show(snapshot)
        if snapshot.points is not None:
            best = next((each for each in snapshot.checkpoints if each.is_best), None)
            for chart in self._charts:
                chart.show(snapshot.points, best)

    def _panel(self, kind: type[PanelKind]) -> PanelKind:
        return kind(self._tools, self._snapshot, self._wake_and_refresh)

    async def _wake_and_refresh(self) -> None:
        self._tools.wake()
        await self.refresh()


class _ChartPanel:
    """A chart in its box, with a legend where it has several lines."""

    def __init__(self, spec: charts.ChartSpec) -> None:
        self._spec = spec
        with panel(spec.title, f"chart-panel {'wide' if spec.is_stacked else ''}") as self._box:
            if len(spec.lines) > 1:
                with ui.element("div").classes("legend"):
                    for line in spec.lines:
                        ui.label(line.label).style(f"--colour: {line.colour}")
            self._chart = ui.echart(charts.chart_options(spec)).classes("chart")
        self._chart.mark(f"chart-{spec.key}")

    def show(self, points: Mapping[str, Sequence[MetricPoint]], best: Checkpoint | None) -> None:
        """Draw the points (by metric name) and mark the best checkpoint."""
        charts.fill(self._chart.options, self._spec, points, best)
        self._box.set_visibility(not self._spec.is_optional or charts.has_data(self._chart.options))
        self._chart.update()


def spec_yaml(job: Job) -> str:
    """The spec as the user could submit it again: YAML without what was left at its default."""
    document = job.spec.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


EXAMPLE_COMMAND = "shardloom run examples/movielens.yaml"
_COLUMNS = (
    ("status", "Status", "left"),
    ("name", "Job", "left"),
    ("progress", "Progress", "left"),
    ("workers", f"Workers T = M {wording.TIMES} L", "left"),
    ("loss", "Train loss", "right"),
    ("quality", "Validation", "right"),
    ("rows_per_s", "Rows/s", "right"),
    ("duration", "Duration", "right"),
    ("age", "Age", "right"),
)
# Compiled by Vue in the browser, which escapes every value and patches rows in place: a row
# under the pointer keeps its identity while its numbers change.
_ROW_TEMPLATE = """
<q-tr :props="props" class="job-row" :title="props.row.message">
  <q-td key="status"><span :class="'status tone-' + props.row.tone">{{ props.row.status }}</span><small v-if="props.row.groups" class="degraded">{{ props.row.groups }}</small></q-td>
  <q-td key="name" class="job-name">
    <a :href="props.row.href">{{ props.row.name }}</a><small>{{ props.row.id }}</small>
  </q-td>
  <q-td key="progress" class="job-progress">
    <div :class="'bar tone-' + props.row.tone"><i :style="{width: props.row.percent + '%'}"></i></div>
    <div class="bar-text"><span>{{ props.row.percent_text }}</span><span>{{ props.row.aside }}</span></div>
  </q-td>
  <q-td key="workers" data-label="Workers">{{ props.row.workers }}</q-td>
  <q-td key="loss" class="number" data-label="Train loss">{{ props.row.loss }}</q-td>
  <q-td key="quality" class="number" data-label="Validation">
    {{ props.row.quality }}<small class="unit">{{ props.row.quality_name }}</small>
  </q-td>
  <q-td key="rows_per_s" class="number" data-label="Rows/s">{{ props.row.rows_per_s }}</q-td>
  <q-td key="duration" class="number" data-label="Duration">{{ props.row.duration }}</q-td>
  <q-td key="age" class="number" data-label="Age">{{ props.row.age }}</q-td>
</q-tr>
"""  # noqa: E501


class ListPage:
    """One reader's job list, refreshed every second while the browser is connected."""

    def __init__(self, feed: ListFeed, projects: frozenset[str] | None = None) -> None:
        self._feed = feed
        self._projects = projects
        self._filter = ListFilter()
        self._snapshot = ListSnapshot(jobs=(), has_more=False)
        self._shown_pills: tuple[object, ...] = ()

    async def build(self) -> None:
        with page_frame("Jobs"):
            with ui.element("div").classes("list-head"):
                ui.html("<h1>Jobs</h1>", sanitize=False)
                self._pills = ui.element("div").classes("pills")
                self._search = ui.input(
                    placeholder="Filter by name", on_change=self._search_changed
                )
                self._search.props('dense outlined clearable debounce=150 aria-label="Filter"')
                self._search.classes("search")
            self._table = _build_table()
            self._note = ui.label().classes("list-note")
            self._empty = ui.element("div").classes("blank")
            with self._empty:
                ui.label("No jobs yet").classes("blank-title")
                ui.label("Submit a first one from a terminal; it shows up here at once.")
                ui.html(f"<pre class='command'>{EXAMPLE_COMMAND}</pre>", sanitize=False)
                ui.label("A job is one YAML file: data, features, tables, model, layout.")
        await self.refresh()
        ui.timer(REFRESH_INTERVAL_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        self._snapshot = await asyncio.to_thread(self._feed.latest, self._projects)
        self._show()

    def _show(self) -> None:
        now = time.time()
        shown = [job for job in self._snapshot.jobs if self._filter.admits(job)]
        rows = [views.job_row(job, now) for job in shown]
        if rows != self._table.rows:
            self._table.rows = rows
        has_jobs = bool(self._snapshot.jobs)
        self._table.set_visibility(has_jobs)
        self._empty.set_visibility(not has_jobs)
        self._pills.set_visibility(has_jobs)
        self._search.set_visibility(has_jobs)
        note = f"The newest {MAX_LISTED_JOBS} jobs." if self._snapshot.has_more else ""
        if has_jobs and not shown:
            note = "No job matches the filter."
        self._note.set_text(note)
        self._show_pills()

    def _show_pills(self) -> None:
        pills: list[tuple[JobStatus | None, str, int]] = [(None, "all", len(self._snapshot.jobs))]
        counts = Counter(job.status for job in self._snapshot.jobs)
        pills += [(each, each.lower(), counts[each]) for each in JobStatus if counts[each]]
        state = (pills, self._filter.status)
        if state == self._shown_pills:
            return
        self._shown_pills = state
        self._pills.clear()
        with self._pills:
            for status, label, number in pills:
                active = "active" if status is self._filter.status else ""
                with ui.element("button").classes(f"pill {active}") as pill:
                    ui.label(label)
                    ui.label(str(number)).classes("pill-count")
                pill.on("click", partial(self._choose, status))

    def _choose(self, status: JobStatus | None) -> None:
        self._filter = ListFilter(status=status, name=self._filter.name)
        self._show()

    def _search_changed(self) -> None:
        self._filter = ListFilter(status=self._filter.status, name=self._search.value or "")
        self._show()


def _build_table() -> ui.table:
    columns = [
        {"name": name, "label": label, "field": name, "align": align}
        for name, label, align in _COLUMNS
    ]
    table = ui.table(columns=columns, rows=[], row_key="id").classes("jobs-table")
    table.props('flat hide-pagination :rows-per-page-options="[0]" hide-no-data')
    table.add_slot("body", _ROW_TEMPLATE)
    return table

"""The page of one job: how it learns, where its time goes, how it is sharded, and what it left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import yaml
from nicegui import ui

from service.dashboard import charts, fragments
from service.dashboard.course_panel import CoursePanel
from service.dashboard.export_panel import ExportPanel, Submit
from service.dashboard.log_view import LogView
from service.dashboard.login_guard import may_see
from service.dashboard.placement_panel import PlacementPanel
from service.dashboard.shell import MOUNT_PATH, not_found, page_frame, panel
from service.dashboard.snapshots import JobSnapshot, load_job
from service.dashboard.trace_panel import TracePanel
from service.domain import Checkpoint, Job, MetricPoint
from service.job_errors import JobNotFound
from service.settings import Settings
from service.store.base import JobStore
from service.submission import run_dir_of

REFRESH_INTERVAL_S = 1.0


class JobPage:
    """One reader's view of a job, refreshed every second while the browser is connected."""

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        job_id: str,
        wake: Callable[[], None],
        submit: Submit,
    ) -> None:
        self._store = store
        self._settings = settings
        self._run_dir = run_dir_of(settings, job_id)
        self._job_id = job_id
        self._wake = wake
        self._submit = submit

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
        await self._exports.refresh()
        job = snapshot.job
        await self._logs.refresh(job.current_attempt_id, is_final=job.status.is_terminal)

    def _build_head(self) -> None:
        with ui.element("div").classes("crumbs"):
            ui.html(f'<a href="{MOUNT_PATH}/">Jobs</a>', sanitize=False)
            ui.label("/")
            ui.label(self._snapshot.job.name)
        with ui.element("div").classes("job-head"):
            self._heading = ui.html(sanitize=False).classes("heading")
            self._course = CoursePanel(
                self._store, self._settings, self._snapshot, self._look_at_once
            )
        self._progress = ui.html(sanitize=False).classes("panel progress-panel")
        self._figures = ui.html(sanitize=False, tag="dl").classes("figures")
        self._placement = PlacementPanel(self._store, self._run_dir, self._snapshot, self.refresh)

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
            with ui.tabs().props("dense no-caps align=left inline-label").classes("tabs") as tabs:
                for name in ("Logs", "Checkpoints", "Traces", "Attempts", "Spec"):
                    ui.tab(name)
            with ui.tab_panels(tabs, value="Logs", animated=False).classes("tab-panels"):
                with ui.tab_panel("Logs"):
                    self._logs = LogView(self._run_dir)
                with ui.tab_panel("Checkpoints"):
                    self._checkpoints = ui.html(sanitize=False)
                    self._exports = ExportPanel(
                        self._store, self._settings, self._snapshot, self._submit
                    )
                with ui.tab_panel("Traces"):
                    self._traces = TracePanel(
                        self._store, self._run_dir, self._snapshot, self.refresh
                    )
                with ui.tab_panel("Attempts"):
                    self._attempts = ui.html(sanitize=False)
                with ui.tab_panel("Spec"):
                    ui.code(spec_yaml(self._snapshot.job), language="yaml").classes("spec")

    def _show(self, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        job, now = snapshot.job, time.time()
        self._heading.set_content(fragments.heading(job, now, snapshot.attempts))
        self._progress.set_content(fragments.progress(job))
        self._figures.set_content(fragments.figures(job))
        self._placement.show(snapshot, now)
        self._groups.set_content(fragments.groups(job, snapshot.timeline))
        self._timeline.set_content(fragments.timeline(job, snapshot.timeline))
        self._sharding.set_content(fragments.sharding(job, snapshot.timeline))
        self._traces.show(snapshot, now)
        self._checkpoints.set_content(fragments.checkpoints(snapshot.checkpoints, now))
        self._exports.show(snapshot)
        self._attempts.set_content(fragments.attempts(job, snapshot.attempts, now))
        self._course.show(snapshot)
        self._show_charts(snapshot)

    def _show_charts(self, snapshot: JobSnapshot) -> None:
        if snapshot.points is None:
            return
        for chart in self._charts:
            chart.show(snapshot.points, snapshot.best_checkpoint)

    async def _look_at_once(self) -> None:
        """Let the reconciler carry out what was asked, and show what came of it so far."""
        self._wake()
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

"""The page of one job, which polls the store once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import yaml
from nicegui import ui

from service.dashboard import charts, fragments, views
from service.dashboard.panels import (
    ActionsPanel,
    ExportPanel,
    LogView,
    Panel,
    PlacementPanel,
    TracePanel,
)
from service.dashboard.rest import Rest
from service.dashboard.shell import MOUNT_PATH, not_found, page_frame, panel
from service.dashboard.snapshots import JobSnapshot, load_job
from service.domain.models import Checkpoint, Job, MetricPoint
from service.errors import JobNotFound, StorageUnavailable

REFRESH_INTERVAL_S = 1.0
PanelKind = TypeVar("PanelKind", bound=Panel)


class JobPage:
    """One reader's view of a job, refreshed every second while the browser is connected."""

    def __init__(self, rest: Rest, job_id: str) -> None:
        self._rest = rest
        self._store = rest.context.store
        self._job_id = job_id

    async def build(self) -> None:
        """Draw the page, or a 404 if there is no such job."""
        try:
            snapshot = await asyncio.to_thread(load_job, self._store, self._job_id, None)
            if self._rest.reader().role_in(snapshot.job.project) is None:
                raise JobNotFound(self._job_id)
        except JobNotFound:
            not_found(self._rest, "There is no such job", f"Nothing is known of '{self._job_id}'.")
            return
        self._snapshot = snapshot
        with page_frame(snapshot.job.name, self._rest):
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
                    self._logs = LogView(self._rest.context.settings, self._job_id)
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
        return kind(self._rest, self._snapshot, self.refresh)


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

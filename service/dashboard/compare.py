"""The page that compares jobs: curves over one another, results, and what differs in specs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlencode

from nicegui import ui

from service.api.deps import Context
from service.dashboard import charts, fragments
from service.dashboard.job import ChartBox, chart_tools
from service.dashboard.panels import button
from service.dashboard.rest import Rest
from service.dashboard.shell import MOUNT_PATH, go_to, page_frame, panel
from service.db.jobs import JobStore
from service.domain.auth import Principal
from service.domain.membership import sizes_of_job
from service.domain.models import Attempt, Job, MetricPoint
from service.domain.sweeps import direction_of, loss_of
from service.errors import JobNotFound, JobUnreadable, StoreUnavailable
from service.jobs.submit import find_job
from service.schemas import wording

MAX_COMPARED = 20
_MAX_POINTS = 300
_REFRESH_S = 10.0
# Of the time that a read took: whole series are read each time.
_PAUSE_RATIO = 20
_LATE_S = 60.0
_COLOURS = (
    *("#6472e8", "#e0913a", "#2c9f9a", "#d4687c", "#b766c9", "#7c9a35", "#4d9be0", "#8d6e52"),
    *("#3f4aa8", "#a3611b", "#1d6f6b", "#9c3d52", "#7d3f8d", "#536a20", "#2a6aa5", "#5f4a37"),
    *("#9aa4f2", "#f0b97c", "#77c7c3", "#e79fac"),
)
_AXES = {"step": "steps", "rows": "rows", "hours": "hours"}


@dataclass(frozen=True)
class Compared:
    """A job of the comparison with what is told of it; `points` by metric name come last."""

    job: Job
    attempts: Sequence[Attempt]
    names: Sequence[str]
    points: dict[str, Sequence[MetricPoint]] = field(default_factory=dict)

    @property
    def worker_hours(self) -> float:
        """Hours of its attempts times the most workers that it may have."""
        spans = [(each.started_at, each.ended_at) for each in self.attempts if each.started_at]
        if not spans and self.job.started_at:
            spans = [(self.job.started_at, self.job.ended_at)]
        # Up to its newest point an attempt that lives has worked for sure.
        times = [series[-1].time for series in self.points.values() if series]
        latest = max(times, default=self.job.started_at or self.job.created_at)
        seconds = sum(max(0.0, (end or latest) - start) for start, end in spans if start)
        return seconds / 3600 * sizes_of_job(self.job).world_size


def places(compared: Compared, points: Sequence[MetricPoint], axis: str) -> list[float]:
    """Where points stand on the axis: steps, rows trained until then, or hours since the start."""
    job = compared.job
    if axis == "rows":
        rows_per_step = job.progress.rows / job.progress.step if job.progress.step else 0.0
        return [point.step * rows_per_step for point in points]
    if axis == "hours":
        start = job.started_at or job.created_at
        return [(point.time - start) / 3600 for point in points]
    return [float(point.step) for point in points]


def best_of(name: str, points: Sequence[MetricPoint]) -> float | None:
    """The best finite value of a metric, over all of its points.

    None where 1 is best and a point stands for values on both sides of it: the nearest is not told.
    """
    if direction_of(name) == "approach_one" and any(each.min < 1 < each.max for each in points):
        return None
    values = [value for point in points for value in (point.min, point.max)]
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, key=partial(loss_of, direction_of(name)), default=None)


def default_metrics(jobs: Sequence[Job]) -> list[str]:
    watched = dict.fromkeys(job.spec.model.watched_metric for job in jobs)
    qualities = [f"{part}/{name}" for name in watched for part in ("validation", "train")]
    return [*qualities, "train/loss", "speed/rows_per_s"]


class ComparePage:
    """One reader's comparison; the address has the jobs, the metrics and the axis."""

    def __init__(self, rest: Rest) -> None:
        self._rest, self._context = rest, rest.context
        self._reader = rest.reader()
        params = ui.context.client.request.query_params
        given = [each.strip() for each in params.get("jobs", "").split(",")]
        self._wanted = [*dict.fromkeys(filter(None, given))]
        self._metrics = [each for each in params.get("metrics", "").split(",") if each]
        axis = params.get("x", "step")
        self._axis = axis if axis in _AXES else "step"
        self._view = charts.ChartView()
        self._boxes: list[_CompareChart] = []
        self._is_stale = self._is_drawn = False

    async def build(self) -> None:
        load = partial(_load, self._context, self._reader, self._wanted, self._metrics)
        self._compared, missing, self._shown = await asyncio.to_thread(load)
        with page_frame("Compare", self._rest):
            self._build_head()
            for name in missing:
                ui.label(f"There is no job '{name}'.").classes("notice tone-warn")
            if len(self._wanted) > MAX_COMPARED:
                ui.label(f"Only the first {MAX_COMPARED} are compared.").classes("notice tone-warn")
            if self._compared:
                with panel("Results"):
                    self._results = ui.html(sanitize=False)
                self._show_results()
                self._build_charts()
                self._build_differences()
            else:
                with ui.element("div").classes("blank"):
                    ui.label("Nothing to compare yet").classes("blank-title")
                    ui.label("Select jobs in the list, or add one by its name or id.")
        # Read while the browser loads the page.
        self._reading: asyncio.Task[bool] | None = asyncio.create_task(self._read())
        if self._compared:
            self._timer = ui.timer(_REFRESH_S, self._refresh)

    async def _read(self) -> bool:
        names = {*self._shown, "speed/rows_per_s"}
        return await asyncio.to_thread(_read, self._context.store, self._compared, names)

    async def _refresh(self) -> None:
        """Show what is new, until all jobs have ended and told all."""
        reading, self._reading = self._reading or self._read(), None
        began_at = time.monotonic()
        try:
            is_new = await reading
        except StoreUnavailable as error:
            if not self._is_stale:
                ui.notify(f"The curves cannot be read: {error}", type="warning", multi_line=True)
            self._is_stale, self._is_drawn = True, False  # some may have been read
            return
        self._timer.interval = max(_REFRESH_S, _PAUSE_RATIO * (time.monotonic() - began_at))
        self._is_stale = False
        if _to_show(self._compared, self._metrics) != self._shown:
            go_to(self._address(self._wanted))  # With the metrics that there are now.
        elif is_new or not self._is_drawn:
            self._show_results()
            self._redraw(self._view)
            self._is_drawn = True
        if all(_is_over(each.job) for each in self._compared):
            self._timer.cancel()

    def _build_head(self) -> None:
        with ui.element("div").classes("page-head"):
            ui.html("<h1>Compare</h1>", sanitize=False)
            ui.element("span").classes("grow")
            self._more = ui.input(placeholder="Name or id of a job")
            self._more.props('aria-label="Add a job"').on("keydown.enter", self._add)
            button("Add", self._add)

    def _show_results(self) -> None:
        rows = []
        for number, each in enumerate(self._compared):
            values = []
            for name in self._shown:
                points = each.points.get(name, ())
                final = points[-1].value if points else None
                best = best_of(name, points)
                values.append((wording.metric(name, final), wording.metric(name, best)))
            speeds = [point.value for point in each.points.get("speed/rows_per_s", ())]
            finite = [value for value in speeds if math.isfinite(value)]
            rows.append(
                {
                    "job": each.job,
                    "colour": _COLOURS[number % len(_COLOURS)],
                    "values": values,
                    "speed": sum(finite) / len(finite) if finite else None,
                    "worker_hours": each.worker_hours,
                    "without_it": self._address(
                        other.job.id for other in self._compared if other is not each
                    ),
                }
            )
        html = fragments.render("compared.html", rows=rows, metrics=self._shown)
        self._results.set_content(html)

    def _build_charts(self) -> None:
        names = sorted({name for each in self._compared for name in each.names})
        with chart_tools(self._redraw, self._boxes, have_events=False):
            axis = ui.select(_AXES, value=self._axis).props('aria-label="Axis"')
            axis.on_value_change(lambda event: self._choose_axis(event.value))
            chosen = ui.select(names, value=self._shown, multiple=True, with_input=True)
            chosen.props('aria-label="Metrics"').classes("metric-choice")
            chosen.on("popup-hide", lambda: self._choose_metrics(chosen.value))
        with ui.element("div").classes("charts"):
            self._boxes += [_CompareChart(self._compared, name) for name in self._shown]

    def _build_differences(self) -> None:
        if len(self._compared) < 2:
            return
        names = [each.job.name for each in self._compared]
        documents = [each.job.spec.model_dump(mode="json") for each in self._compared]
        with panel("Spec: only what differs"):
            ui.html(fragments.differences(names, documents), sanitize=False)

    def _redraw(self, view: charts.ChartView) -> None:
        self._view = view
        for box in self._boxes:
            box.draw(view, self._axis)

    def _choose_axis(self, axis: str) -> None:
        self._axis = axis
        ui.navigate.history.replace(self._address(self._wanted))
        self._show_results()
        self._redraw(self._view)

    def _choose_metrics(self, names: Sequence[str]) -> None:
        if [*names] != self._shown:
            self._metrics = [*names]
            go_to(self._address(self._wanted))

    def _add(self) -> None:
        if name := (self._more.value or "").strip():
            go_to(self._address([*self._wanted, name]))

    def _address(self, jobs: Iterable[str]) -> str:
        """The same comparison of other jobs."""
        params = {"jobs": ",".join(jobs)}
        params |= {"metrics": ",".join(self._metrics)} if self._metrics else {}
        params |= {"x": self._axis} if self._axis != "step" else {}
        return f"{MOUNT_PATH}/compare?{urlencode(params, safe=',/')}"


def _load(
    context: Context, reader: Principal, wanted: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Compared], list[str], list[str]]:
    """The jobs that there are, the names of those that are not, and the metrics to show."""
    store, missing = context.store, []
    jobs: dict[str, Job] = {}  # One may be named by its id and by its name.
    for name in wanted[:MAX_COMPARED]:
        try:
            job = find_job(store, name, reader.projects)
            jobs[job.id] = job
        except JobNotFound:
            missing.append(name)
    found = [_known(store, job) for job in jobs.values()]
    return found, missing, _to_show(found, metrics)


def _to_show(compared: Sequence[Compared], metrics: Sequence[str]) -> list[str]:
    """Those of the `metrics`, by default the usual ones, that any job has."""
    known = {name for each in compared for name in each.names}
    chosen = dict.fromkeys(metrics or default_metrics([each.job for each in compared]))
    return [name for name in chosen if name in known]


def _known(store: JobStore, job: Job) -> Compared:
    return Compared(job, store.list_attempts(job.id), store.metric_names(job.id))


def _is_over(job: Job) -> bool:
    """Whether a job has ended, and its last records have had time to come."""
    return job.ended_at is not None and time.time() - job.ended_at > _LATE_S


def _read(store: JobStore, compared: list[Compared], names: Set[str]) -> bool:
    """Replace each job by what it is now, with its points, unless it is over and has them.

    Returns whether anything is new.
    """
    before = [*compared]
    for number, each in enumerate(before):
        if each.points and _is_over(each.job):
            continue
        with suppress(JobNotFound, JobUnreadable):  # Then it stays as it was.
            now = _known(store, store.get_job(each.job.id))
            for name in names & {*now.names}:
                now.points[name] = store.metric_points(now.job.id, name, max_points=_MAX_POINTS)
            compared[number] = now
    return compared != before


class _CompareChart(ChartBox):
    """A metric of several jobs, a line for each."""

    def __init__(self, compared: Sequence[Compared], metric: str) -> None:
        self._compared, self._metric = compared, metric
        lines = tuple(
            charts.Line(metric, each.job.name, _COLOURS[number % len(_COLOURS)])
            for number, each in enumerate(compared)
        )
        options = charts.chart_options(charts.ChartSpec(metric, metric, lines))
        super().__init__(metric, options, {})
        for faint in self.chart.options["series"][1::2]:
            # Of many jobs the ranges would cover the curves.
            faint["lineStyle"]["opacity"] = 0.12

    def draw(self, view: charts.ChartView, axis: str) -> None:
        options = self.chart.options
        options["xAxis"] = charts.step_axis(axis)
        for each in options["yAxis"]:
            each["type"] = "log" if view.is_log else "value"
        for number, compared in enumerate(self._compared):
            points = compared.points.get(self._metric, ())
            pair = options["series"][2 * number : 2 * number + 2]
            breaks = [each.ended_at for each in compared.attempts[:-1] if each.ended_at]
            xs = places(compared, points, axis)
            charts.draw(pair, points, xs, breaks, is_log=view.is_log, view=view)
        options["title"]["show"] = not charts.has_data(options)
        self.box.classes("drawn")
        self.chart.update()

    async def read_csv(self) -> str:
        rows = (
            [each.job.id, point.step, f"{point.time:.3f}", point.value]
            for each in self._compared
            for point in each.points.get(self._metric, ())
        )
        return charts.csv_text([["job", "step", "time", self._metric], *rows])

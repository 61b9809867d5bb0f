"""Sweeps: the form that begins one, the list, and one with its trials, as charts and as a table."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from nicegui import ui

from service.dashboard import charts, fragments
from service.dashboard.job import ChartBox
from service.dashboard.panels import asking, button
from service.dashboard.rest import Refused, Rest, path_of
from service.dashboard.shell import MOUNT_PATH, link_button, page_frame, panel
from service.domain.auth import Role
from service.domain.sweeps import Search, SweepStatus, loss_of
from service.schemas import wording
from service.schemas.sweeps import SweepDetail, SweepSummary, parameter_of
from trainer.spec.base import FieldProblem
from trainer.spec.job import JobSpec

_REFRESH_S = 3.0
_MAX_COMPARED = 8
_LINE = {"width": 2, "opacity": 1}
_COMMAND = "shardloom sweep SPEC --vary optimizer.sparse.lr=log:0.01..0.3 --metric validation/ne"


_SEARCH_HINT = (
    "One a line, KEY=RANGE, as in optimizer.sparse.lr=log:0.01..0.3 or "
    "parallelism.sync.every_steps=1,4,16. With any, a sweep begins; each of its trials is a job."
)
_DIRECTIONS = {
    "": "by the metric",
    "minimize": "less is better",
    "maximize": "more is better",
}


class SearchForm:
    """The fields of a draft to search, and how; `on_change` is called when they change."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        def dressed(field: ui.input | ui.select) -> Any:
            field.on_value_change(on_change)
            return field.props("stack-label hide-bottom-space debounce=400")

        with panel("Sweep", "form-panel"):
            ui.label(_SEARCH_HINT).classes("muted")
            with ui.element("div").classes("form-section search-form"):
                self._ranges = dressed(ui.textarea(label="fields to search")).props("autogrow")
                self._ranges.classes("search-ranges")
                self._metric = dressed(ui.input(label="metric"))
                self._direction = dressed(ui.select(_DIRECTIONS, label="direction", value=""))
                self._search = dressed(ui.select([*get_args(Search)], label="search", value="tpe"))
                numbers = self._trials, self._parallel, self._stop = [
                    dressed(ui.input(label=label, value=value)).props("inputmode=numeric")
                    for label, value in (
                        ("trials", "20"),
                        ("at a time", "4"),
                        ("compare first after steps", ""),
                    )
                ]
                self._fields = (self._ranges, self._metric, self._direction, self._search, *numbers)
        roots = ("parameters", "metric", "direction", "search", "num_trials", "num_parallel")
        self._by_root = dict(zip((*roots, "early_stopping"), self._fields, strict=True))

    def show_faults(self, problems: Sequence[FieldProblem]) -> list[FieldProblem]:
        """At its fields, by the names that `POST /v1/sweeps` has for them; those of no field."""
        faults, others = defaultdict[str, list[str]](list), list[FieldProblem]()
        for each in problems:
            root = re.split(r"[.\[]", each.path)[0]
            if root in self._by_root:
                faults[root].append(each.message)
            else:
                others.append(each)
        for root, field in self._by_root.items():
            # What the form itself finds of the fields to search stays.
            if root in faults or field is not self._ranges:
                field.error = "; ".join(faults[root]) or None
        return others

    @property
    def values(self) -> dict[str, Any]:
        """What the fields hold, by their labels."""
        return {field.label: field.value for field in self._fields}

    def fill(self, values: Mapping[str, Any]) -> None:
        for field in self._fields:
            field.set_value(values.get(field.label, field.value))

    def check(self, spec: JobSpec | None) -> dict[str, Any] | None:
        """What `POST /v1/sweeps` takes beside the spec: nothing without fields to search, None
        where they do not read so, which the form says then.
        """
        default = f"validation/{spec.model.watched_metric}" if spec else ""
        self._metric.props["placeholder"] = default
        lines = [each for each in (self._ranges.value or "").splitlines() if each.strip()]
        self._ranges.error = None
        if not lines:
            return {}
        try:
            parameters = [*map(parameter_of, lines)]
        except ValueError as error:
            self._ranges.error = str(error)
            return None
        stop = self._stop.value
        return {
            "parameters": parameters,
            "metric": (self._metric.value or "").strip() or default,
            "direction": self._direction.value or None,
            "search": self._search.value,
            # What is no number is for the service to say.
            "num_trials": self._trials.value,
            "num_parallel": self._parallel.value,
            "early_stopping": {"min_steps": stop} if stop else None,
        }


class SweepsPage:
    """One reader's list of sweeps, read again every few seconds."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._shown: object = None

    async def build(self) -> None:
        with page_frame("Sweeps", self._rest):
            with ui.element("div").classes("list-head"):
                ui.html("<h1>Sweeps</h1>", sanitize=False)
                ui.element("span").classes("grow")
                if self._rest.reader().may_somewhere(Role.SUBMITTER):
                    link_button("New sweep", f"{MOUNT_PATH}/new", "primary")
            self._fault = ui.label().classes("notice tone-warn").props("role=status")
            self._body = ui.element("div").classes("stack")
        await self.refresh()
        ui.timer(_REFRESH_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        try:
            found = await self._rest.get("/v1/sweeps", limit=200)
        except Refused as refused:
            self._fault.set_text(f"The list cannot be read: {refused}")
            return
        more = "Only the newest 200 are shown; `shardloom sweeps list --limit N` has more."
        self._fault.set_text(more if found["next"] else "")
        if found == self._shown:
            return
        self._shown = found
        sweeps = [SweepSummary.model_validate(each) for each in found["items"]]
        self._body.clear()
        with self._body:
            if not sweeps:
                with ui.element("div").classes("blank"):
                    ui.label("No sweeps yet").classes("blank-title")
                    ui.label("A sweep searches fields of a spec; each of its trials is a job.")
                    ui.label(_COMMAND).classes("command path")
                return
            html = fragments.render("sweeps.html", sweeps=sweeps, now=time.time())
            with ui.element("section").classes("panel"):
                ui.html(html, sanitize=False)


class SweepPage:
    """One reader's view of a sweep, read again every few seconds."""

    def __init__(self, rest: Rest, sweep_id: str) -> None:
        self._rest, self._path = rest, path_of("sweeps", sweep_id)
        self._shown: SweepDetail | None = None

    async def build(self) -> None:
        found = await self._read()
        with page_frame(found.name, self._rest):
            with ui.element("nav").classes("crumbs").props('aria-label="Path"'):
                with ui.element("a").props(f'href="{MOUNT_PATH}/sweeps"'):
                    ui.label("Sweeps")
                ui.label("/")
                ui.label(found.id).classes("path")
            self._fault = ui.label().classes("notice tone-warn").props("role=status")
            with ui.element("div").classes("page-head"):
                self._head = ui.element("div").classes("heading")
                self._links = ui.element("div").classes("course-buttons")
                with asking("Cancel this sweep?", "Cancel it", self._ask_cancel) as dialog:
                    ui.label("No more trials start, and the jobs of those under way stop.")
                self._cancel = button("Cancel the sweep", dialog.open)
                self._may_change = self._rest.reader().may(Role.SUBMITTER, found.project)
            with ui.element("div").classes("charts"):
                self._charts = [
                    _TrialsChart(f"{found.metric} by trial", value_options, found),
                    _TrialsChart("Values and what came of them", parallel_options, found),
                ]
            with panel("Trials"):
                self._table = ui.html("", sanitize=False)
        self._show(found)
        ui.timer(_REFRESH_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        try:
            found = await self._read()
        except Refused as refused:
            self._fault.set_text(f"What is shown is old, as the sweep cannot be read: {refused}")
            return
        self._fault.set_text("")
        if found != self._shown:
            self._show(found)

    async def _read(self) -> SweepDetail:
        return SweepDetail.model_validate(await self._rest.get(self._path))

    async def _ask_cancel(self) -> None:
        try:
            await self._rest.send("POST", f"{self._path}:cancel")
        except Refused as refused:
            ui.notify(str(refused), type="warning", multi_line=True)
        await self.refresh()

    def _show(self, found: SweepDetail) -> None:
        self._shown = found
        # Those of the jobs that were not deleted.
        ranked = [trial for trial in found.ranked if trial.status is not None]
        self._head.clear()
        with self._head:
            ui.html(fragments.render("sweep.html", sweep=found), sanitize=False)
        self._links.clear()
        with self._links:
            if len(ranked) > 1:
                ids = ",".join(str(each.job_id) for each in ranked[:_MAX_COMPARED])
                link_button("Compare the best", f"{MOUNT_PATH}/compare?jobs={ids}")
            if found.best is not None:
                best = found.trials[found.best].job_id
                link_button("New job from the best", f"{MOUNT_PATH}/new?source={best}", "primary")
        is_running = found.status is SweepStatus.RUNNING
        self._cancel.set_visibility(self._may_change and is_running)
        for chart in self._charts:
            chart.draw(found)
        paths = [each.path for each in found.parameters]
        html = fragments.render("trials.html", sweep=found, paths=paths)
        self._table.set_content(html)


class _TrialsChart(ChartBox):
    def __init__(
        self, title: str, options_of: Callable[[SweepDetail], dict[str, Any]], found: SweepDetail
    ) -> None:
        self._options_of, self._found = options_of, found
        super().__init__(title, options_of(found), {})

    def draw(self, found: SweepDetail) -> None:
        self._found = found
        self.chart.options.clear()
        self.chart.options.update(self._options_of(found))
        self.chart.update()

    async def read_csv(self) -> str:
        return csv_of(self._found)


def csv_of(found: SweepDetail) -> str:
    paths = [each.path for each in found.parameters]
    rows = [
        [each.number, each.job_id, each.step, *map(each.values.get, paths), each.value]
        for each in found.trials
    ]
    return charts.csv_text([["trial", "job", "step", *paths, found.metric], *rows])


def value_options(found: SweepDetail) -> dict[str, Any]:
    """A point for each trial's newest value, and the best so far as a line of steps."""
    points: list[list[float]] = []
    best: list[list[float]] = []
    for trial in found.trials:
        if trial.value is None or not trial.has_value:
            continue
        points.append([trial.number, trial.value])
        known = best[-1][1] if best else trial.value
        better = min(known, trial.value, key=partial(loss_of, found.direction))
        best.append([trial.number, better])
    axis = {
        "axisLabel": charts.AXIS_LABEL,
        "nameTextStyle": charts.AXIS_LABEL,
        "splitLine": {"lineStyle": {"color": charts.LINE_COLOUR}},
    }
    return {
        "animation": False,
        "title": {**charts.NO_DATA, "show": not points},
        "grid": {"left": 56, "right": 16, "top": 12, "bottom": 28},
        "tooltip": {"trigger": "item"},
        "xAxis": {"type": "value", "minInterval": 1, "name": "trial", **axis},
        "yAxis": {"type": "value", "scale": True, **axis},
        "series": [
            {"type": "scatter", "symbolSize": 8, "data": points, "color": charts.TRAIN_COLOUR},
            {
                "type": "line",
                "step": "end",
                "showSymbol": False,
                "data": best,
                "color": charts.VALIDATION_COLOUR,
            },
        ],
    }


def parallel_options(found: SweepDetail) -> dict[str, Any]:
    """A line for each trial with a value: through its values, to the metric, which colours it."""
    shown = [trial for trial in found.trials if trial.has_value]
    axes: list[dict[str, Any]] = []
    for place, each in enumerate(found.parameters):
        axis: dict[str, Any] = {"dim": place, "name": each.path.rpartition(".")[2]}
        if each.values:
            axis |= {"type": "category", "data": [*map(wording.setting, each.values)]}
        else:
            kind = "log" if each.is_log else "value"
            axis |= {"type": kind, "min": each.low, "max": each.high}
            axis |= {"minInterval": 1} if each.is_integer else {}
        axes.append(axis)
    axes.append({"dim": len(axes), "name": found.metric, "type": "value", "scale": True})
    data = [
        [*(_place(trial.values, each.path, each.values) for each in found.parameters), trial.value]
        for trial in shown
    ]
    values = [trial.value for trial in shown if trial.value is not None]
    good, bad = charts.GOOD, charts.FAINT
    colours = [good, bad] if found.direction == "minimize" else [bad, good]
    if found.direction == "approach_one":
        values += [2 - value for value in values]  # so that 1 is in the middle
        colours = [bad, good, bad]
    return {
        "animation": False,
        "title": {**charts.NO_DATA, "show": not data},
        "parallel": {"left": 40, "right": 64, "top": 32, "bottom": 24},
        "parallelAxis": [
            {**axis, "axisLabel": charts.AXIS_LABEL, "nameTextStyle": charts.AXIS_LABEL}
            for axis in axes
        ],
        "visualMap": {
            "show": False,
            "dimension": len(axes) - 1,
            "min": min(values, default=0.0),
            "max": max(values, default=1.0),
            "inRange": {"color": colours},
        },
        "series": [{"type": "parallel", "smooth": True, "lineStyle": _LINE, "data": data}],
    }


def _place(values: Mapping[str, Any], path: str, known: Sequence[Any]) -> Any:
    value = values.get(path)
    return wording.setting(value) if known else value

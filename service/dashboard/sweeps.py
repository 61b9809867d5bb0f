"""The pages of sweeps: the list, and one sweep with its trials, as curves and as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from service.dashboard import charts, fragments
from service.dashboard.panels import asking, button
from service.dashboard.rest import Refused, Rest
from service.dashboard.shell import MOUNT_PATH, link_button, not_found, page_frame, panel
from service.domain.auth import Role
from service.domain.sweeps import SweepStatus
from service.schemas import wording
from service.schemas.sweeps import SweepDetail, SweepSummary, TrialOut

_REFRESH_S = 3.0
_MAX_COMPARED = 8
_TONES = {
    SweepStatus.RUNNING: "active",
    SweepStatus.CANCELLING: "warn",
    SweepStatus.COMPLETED: "good",
    SweepStatus.FAILED: "bad",
    SweepStatus.CANCELLED: "neutral",
}
_COMMAND = "shardloom sweep SPEC --vary optimizer.sparse.lr=log:0.01..0.3 --metric validation/ne"


class SweepsPage:
    """One reader's list of sweeps, read again every few seconds."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._shown: object = None

    async def build(self) -> None:
        with page_frame("Sweeps", self._rest):
            ui.html("<h1>Sweeps</h1>", sanitize=False)
            self._body = ui.element("div").classes("stack")
        await self.refresh()
        ui.timer(_REFRESH_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        found = (await self._rest.get("/v1/sweeps", limit=200))["items"]
        if found == self._shown:
            return
        self._shown = found
        sweeps = [SweepSummary.model_validate(each) for each in found]
        self._body.clear()
        with self._body:
            if not sweeps:
                with ui.element("div").classes("blank"):
                    ui.label("No sweeps yet").classes("blank-title")
                    ui.label("A sweep searches fields of a spec; each of its trials is a job.")
                    ui.label(_COMMAND).classes("command path")
                return
            now = time.time()
            rows = [
                {
                    "sweep": each,
                    "tone": _TONES[each.status],
                    "age": wording.age(each.created_at, now),
                }
                for each in sweeps
            ]
            html = fragments.render("sweeps.html", rows=rows, home=MOUNT_PATH)
            with ui.element("section").classes("panel"):
                ui.html(html, sanitize=False)


class SweepPage:
    """One reader's view of a sweep, read again every few seconds."""

    def __init__(self, rest: Rest, sweep_id: str) -> None:
        self._rest, self._path = rest, f"/v1/sweeps/{sweep_id}"
        self._shown: SweepDetail | None = None

    async def build(self) -> None:
        try:
            found = await self._read()
        except Refused as refused:
            not_found(self._rest, "This sweep does not exist", str(refused))
            return
        with page_frame(found.name, self._rest):
            with ui.element("nav").classes("crumbs").props('aria-label="Path"'):
                with ui.element("a").props(f'href="{MOUNT_PATH}/sweeps"'):
                    ui.label("Sweeps")
                ui.label("/")
                ui.label(found.id).classes("path")
            with ui.element("div").classes("page-head"):
                self._head = ui.element("div").classes("heading")
                self._links = ui.element("div").classes("course-buttons")
                with asking("Cancel this sweep?", "Cancel it", self._ask_cancel) as self._dialog:
                    ui.label("No more trials start, and the jobs of those under way stop.")
                self._cancel = button("Cancel the sweep", self._dialog.open)
                self._may_change = self._rest.reader().may(Role.SUBMITTER, found.project)
            with ui.element("div").classes("charts"):
                with panel(found.metric, "chart-panel"):
                    self._values = ui.echart(value_options(found)).classes("chart")
                with panel("Values and what came of them", "chart-panel"):
                    self._parallel = ui.echart(parallel_options(found)).classes("chart")
            self._values.props('role=img aria-label="The metric by trial"')
            self._parallel.props('role=img aria-label="Values of all trials"')
            with panel("Trials"):
                self._table = ui.html("", sanitize=False)
        self._show(found)
        ui.timer(_REFRESH_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        try:
            found = await self._read()
        except Refused:
            return  # It was forgotten; what is shown stays.
        if found != self._shown:
            self._show(found)

    async def _read(self) -> SweepDetail:
        return SweepDetail.model_validate(await self._rest.get(self._path))

    async def _ask_cancel(self) -> None:
        self._dialog.close()
        try:
            await self._rest.send("POST", f"{self._path}:cancel")
        except Refused as refused:
            ui.notify(str(refused), type="warning", multi_line=True)
        await self.refresh()

    def _show(self, found: SweepDetail) -> None:
        self._shown = found
        ranked = [trial for trial in by_value(found) if trial.job_id is not None]
        self._head.clear()
        with self._head:
            html = fragments.render("sweep.html", sweep=found, tone=_TONES[found.status])
            ui.html(html, sanitize=False)
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
        for chart, options in (
            (self._values, value_options(found)),
            (self._parallel, parallel_options(found)),
        ):
            chart.options.clear()
            chart.options.update(options)
            chart.update()
        rows = [_row(found, trial) for trial in by_value(found)]
        paths = [(each.path, each.path.rpartition(".")[2]) for each in found.parameters]
        self._table.set_content(
            fragments.render("trials.html", sweep=found, rows=rows, paths=paths, home=MOUNT_PATH)
        )


def _has_value(trial: TrialOut) -> bool:
    return trial.value is not None and math.isfinite(trial.value)


def by_value(found: SweepDetail) -> list[TrialOut]:
    """The trials, best first; those without a value last, in the order of their numbers."""
    sign = 1.0 if found.direction == "minimize" else -1.0
    with_value = [trial for trial in found.trials if _has_value(trial)]
    without = [trial for trial in found.trials if not _has_value(trial)]
    return [*sorted(with_value, key=lambda trial: sign * (trial.value or 0.0)), *without]


def _row(found: SweepDetail, trial: TrialOut) -> dict[str, Any]:
    if trial.stopped_at is not None and (trial.status is None or not trial.status.is_terminal):
        state, tone = f"stopped at step {trial.stopped_at}", "neutral"
    elif trial.status is None:
        state, tone = ("refused", "warn") if trial.message else ("being made", "neutral")
    else:
        state, tone = trial.status.value.lower(), wording.tone_of(trial.status)
    return {
        "trial": trial,
        "state": state,
        "tone": tone,
        "value": wording.metric(found.metric, trial.value),
        "values": [_text(trial.values.get(each.path)) for each in found.parameters],
        "is_best": trial.number == found.best,
    }


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def value_options(found: SweepDetail) -> dict[str, Any]:
    """A point for each trial's newest value, and the best so far as a line of steps."""
    points: list[list[float]] = []
    best: list[list[float]] = []
    is_less_better = found.direction == "minimize"
    for trial in found.trials:
        if trial.value is None or not math.isfinite(trial.value):
            continue
        points.append([trial.number, trial.value])
        known = best[-1][1] if best else trial.value
        choose = min if is_less_better else max
        best.append([trial.number, choose(known, trial.value)])
    axis = {
        "axisLabel": charts.AXIS_LABEL,
        "splitLine": {"lineStyle": {"color": charts.LINE_COLOUR}},
    }
    return {
        "animation": False,
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
    shown = [trial for trial in found.trials if _has_value(trial)]
    axes: list[dict[str, Any]] = []
    for place, each in enumerate(found.parameters):
        axis: dict[str, Any] = {"dim": place, "name": each.path.rpartition(".")[2]}
        if each.values:
            axis |= {"type": "category", "data": [*map(_text, each.values)]}
        else:
            kind = "log" if each.is_log else "value"
            axis |= {"type": kind, "min": each.low, "max": each.high}
            axis |= {"minInterval": 1} if each.is_integer else {}
        axes.append(axis)
    axes.append({"dim": len(axes), "name": found.metric, "type": "value", "scale": True})
    data = [
        [
            *(_place(trial.values, each.path, each.values) for each in found.parameters),
            trial.value,
        ]
        for trial in shown
    ]
    values = [trial.value for trial in shown if trial.value is not None]
    good, bad = charts.GOOD, charts.FAINT
    return {
        "animation": False,
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
            "inRange": {"color": [good, bad] if found.direction == "minimize" else [bad, good]},
        },
        "series": [{"type": "parallel", "smooth": True, "lineStyle": {"width": 2}, "data": data}],
    }


def _place(values: Mapping[str, Any], path: str, known: Sequence[Any]) -> Any:
    value = values.get(path)
    return _text(value) if known else value

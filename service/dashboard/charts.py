"""ECharts options of the live charts, and their data. Pure functions.

Each line is drawn by two series: what is read, and behind it, fainter, what it was made of: the
points under a smoothed curve, or the least and the most of every bucket, so that extremes show
however many points there are. What was not measured is never drawn: a NaN is a gap on a red ground,
and no line leads across a loss of workers or a restart.

Colours are mid-tones that hold on a light and on a dark ground: the server does not know which one
a browser that follows the system shows.
"""

from __future__ import annotations

import bisect
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.domain.models import Checkpoint, Job, MetricPoint, TimelineEvent
from trainer.protocol.events import PHASES

TRAIN_COLOUR = "#6472e8"
GOOD, FAINT = "#2c9f9a", "rgba(138, 147, 163, 0.5)"
VALIDATION_COLOUR = "#e0913a"
# Neighbours in the stack differ in hue; waiting is grey, and so is what has no name.
_PHASE_COLOURS = {
    "data_wait": "#9aa3b2",
    "input_dist": "#4d9be0",
    "lookup": "#6472e8",
    "output_dist": "#2c9f9a",
    "dense": "#7c9a35",
    "backward": "#d58b32",
    "optimizer": "#b766c9",
    "sync": "#d4687c",
    "other": "#c3c9d4",
}
_TEXT_COLOUR = "#8a93a3"
LINE_COLOUR = "rgba(138, 147, 163, 0.18)"
AXIS_LABEL = {"color": _TEXT_COLOUR, "fontSize": 11, "hideOverlap": True}
NO_DATA = {
    "text": "no data yet",
    "left": "center",
    "top": "middle",
    "textStyle": {"color": _TEXT_COLOUR, "fontSize": 12, "fontWeight": "normal"},
}
_FEW_POINTS = 40
# Run in the browser (NiceGUI evaluates keys that start with a colon).
_NUMBER = (
    "value => value == null ? '-' : Math.abs(value) >= 1000"
    " ? +(value / 1000).toPrecision(3) + 'k' : String(+value.toPrecision(4))"
)
_MILLISECONDS = "value => value == null ? '-' : String(+(value * 1000).toPrecision(3)) + ' ms'"
_BYTES = (
    "value => { if (value == null) return '-'; let unit = 0;"
    " while (Math.abs(value) >= 1000 && unit < 5) { value /= 1000; unit += 1; }"
    " return +value.toPrecision(3) + ' ' + ['B', 'kB', 'MB', 'GB', 'TB', 'PB'][unit]; }"
)
_PERCENT = "value => value == null ? '-' : +(value * 100).toPrecision(3) + ' %'"
_STEPS = "value => value >= 1000 ? String(value / 1000) + 'k' : String(value)"


@dataclass(frozen=True)
class Line:
    """One series of a chart: the metric that it shows and how; `on_right` has its own axis."""

    metric: str
    label: str
    colour: str
    on_right: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """One chart. `from_zero` keeps 0 on the axis, for what is read as an amount.

    `is_stacked` fills the room between lines that add up; such a chart is as wide as two. An
    `is_optional` chart is not shown before it has data: older jobs never wrote any. `number` and
    `right_number` are the formats of the axes, as JavaScript.
    """

    key: str
    title: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    is_log: bool = False
    is_stacked: bool = False
    is_optional: bool = False
    number: str = _NUMBER
    right_number: str | None = None


def charts_of(job: Job) -> tuple[ChartSpec, ...]:
    """The charts of a job: how well it learns, how fast it goes, and where the time goes."""
    quality = job.spec.model.watched_metric
    qualities = (
        Line(f"train/{quality}", "train", TRAIN_COLOUR),
        Line(f"validation/{quality}", "validation", VALIDATION_COLOUR),
    )
    return (
        ChartSpec("loss", "Loss", (Line("train/loss", "train", TRAIN_COLOUR),)),
        ChartSpec("quality", quality.upper(), qualities),
        *_OTHER_CHARTS,
    )


_amounts = partial(ChartSpec, from_zero=True, is_optional=True)
_OTHER_CHARTS = (
    ChartSpec(
        "speed", "Rows/s", (Line("speed/rows_per_s", "rows/s", TRAIN_COLOUR),), from_zero=True
    ),
    ChartSpec(
        "lr",
        "Learning rates",
        (
            Line("optimizer/lr_sparse", "tables", TRAIN_COLOUR),
            Line("optimizer/lr_dense", "dense", VALIDATION_COLOUR),
        ),
        is_log=True,
        is_optional=True,
    ),
    _amounts(
        "phases",
        "Time of a step",
        tuple(Line(f"phase/{p}_s", p.replace("_", " "), _PHASE_COLOURS[p]) for p in PHASES),
        is_stacked=True,
        number=_MILLISECONDS,
    ),
    _amounts(
        "sync", "Sync time", (Line("sync/time_s", "sync", TRAIN_COLOUR),), number=_MILLISECONDS
    ),
    _amounts(
        "traffic",
        "Sync traffic",
        (
            Line("sync/bytes", "bytes per rank", TRAIN_COLOUR),
            Line("sync/density", "share of rows", VALIDATION_COLOUR, on_right=True),
        ),
        number=_BYTES,
        right_number=_PERCENT,
    ),
    _amounts(
        "memory",
        "Worker memory",
        (
            Line("memory/peak_rss_bytes", "host, peak", VALIDATION_COLOUR),
            Line("memory/peak_reserved_bytes", "PyTorch, peak", TRAIN_COLOUR),
            Line("memory/gpu_used_bytes", "GPU", _PHASE_COLOURS["output_dist"]),
            Line("memory/host_used_share", "share of host", FAINT, on_right=True),
        ),
        number=_BYTES,
        right_number=_PERCENT,
    ),
)


@dataclass(frozen=True)
class ChartView:
    """How charts are looked at: `smoothing` in [0, 1), the share of the past in a mean."""

    smoothing: float = 0.0
    is_log: bool = False
    has_events: bool = True


@dataclass(frozen=True)
class Mark:
    """An event on the axis of steps. `breaks` says that nothing was trained across it."""

    time: float
    text: str
    colour: str
    breaks: bool = False


# Kinds of events that are marked, with colour, and whether training was interrupted there.
_MARKED = {
    "workers_lost": ("#d4687c", True),
    "group_lost": ("#d4687c", False),
    "group_joined": ("#2c9f9a", False),
    "recovered": ("#2c9f9a", False),
    "resized": (TRAIN_COLOUR, False),
    "sync_interval_changed": (TRAIN_COLOUR, False),
    "straggler_found": ("#d58b32", False),
    "hang_found": ("#d58b32", False),
    "attempt_ended": ("#9aa3b2", True),
    "checkpoint_committed": ("rgba(124, 154, 53, 0.45)", False),
}
_MAX_MARKS = 60


def marks_of(timeline: Sequence[TimelineEvent]) -> list[Mark]:
    """The events of a job that its charts mark, in the order of time; of many the newest."""
    found = [
        Mark(line.time, line.message or line.kind.replace("_", " "), *_MARKED[line.kind])
        for line in timeline
        if line.kind in _MARKED
    ]
    return sorted(found, key=lambda mark: mark.time)[-_MAX_MARKS:]


def chart_options(chart: ChartSpec) -> dict[str, Any]:
    options = {
        "animation": False,
        "textStyle": {"fontFamily": "Roboto, sans-serif", "color": _TEXT_COLOUR},
        "grid": {"left": 8, "right": 14, "top": 12, "bottom": 4, "containLabel": True},
        # Until it is known.
        "title": {**NO_DATA, "show": False},
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "transitionDuration": 0,
            # The tooltip is an HTML element, so the stylesheet's variables reach it.
            "backgroundColor": "var(--panel)",
            "borderColor": "var(--line-strong)",
            "textStyle": {"color": "var(--text)", "fontSize": 12},
            "axisPointer": {"lineStyle": {"color": _TEXT_COLOUR, "type": "dashed"}},
            ":valueFormatter": chart.number,
        },
        "xAxis": step_axis(),
        "yAxis": _value_axes(chart),
        "series": [each for line in chart.lines for each in _pair(chart, line)],
    }
    show_zoom(options, is_shown=False)
    return options


def show_zoom(options: dict[str, Any], *, is_shown: bool) -> None:
    """Zoom by a slider, where it is shown, and by the wheel with the control key."""
    slider = {"type": "slider", "height": 14, "bottom": 4, "show": is_shown, "filterMode": "none"}
    # Without the key a page under the pointer could not be scrolled.
    wheel = {"type": "inside", "zoomOnMouseWheel": "ctrl", "moveOnMouseMove": "ctrl"}
    options["dataZoom"] = [
        {**slider, "brushSelect": False, "showDetail": False, "borderColor": LINE_COLOUR},
        {**wheel, "filterMode": "none"},
    ]
    options["grid"]["bottom"] = 26 if is_shown else 4


def step_axis(word: str = "step") -> dict[str, Any]:
    label = f"({{value}}) => '{word} ' + +value.toPrecision(6)"
    return {
        "type": "value",
        "min": "dataMin",
        "max": "dataMax",
        "axisLine": {"lineStyle": {"color": LINE_COLOUR}},
        "axisTick": {"show": False},
        "splitLine": {"show": False},
        "axisLabel": {**AXIS_LABEL, ":formatter": _STEPS, "showMaxLabel": False},
        "axisPointer": {"label": {":formatter": label}},
    }


def _value_axes(chart: ChartSpec) -> list[dict[str, Any]]:
    left = {
        "type": "log" if chart.is_log else "value",
        "scale": not chart.from_zero,
        "splitNumber": 4,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": LINE_COLOUR}},
        "axisLabel": {**AXIS_LABEL, ":formatter": chart.number},
    }
    if chart.right_number is None:
        return [left]
    label = {**AXIS_LABEL, ":formatter": chart.right_number}
    return [left, {**left, "splitLine": {"show": False}, "axisLabel": label}]


def _pair(chart: ChartSpec, line: Line) -> list[dict[str, Any]]:
    """The curve of a line and, unless lines are stacked, the fainter one behind it."""
    series = {
        "name": line.label,
        "type": "line",
        "data": [],
        "symbol": "circle",
        "symbolSize": 5,
        "showSymbol": False,
        "color": line.colour,
        "lineStyle": {"width": 1.75},
        "emphasis": {"disabled": True},
        "connectNulls": False,
        "yAxisIndex": int(line.on_right),
    }
    if line.on_right:
        series["tooltip"] = {":valueFormatter": chart.right_number}
    if chart.is_stacked:
        series |= {"stack": "all", "areaStyle": {"opacity": 0.8}, "lineStyle": {"width": 0}}
        return [series]
    faint = {**series, "lineStyle": {"width": 1, "opacity": 0.35}}
    return [series, {**faint, "data": [], "symbol": "none", "z": 1}]


def has_data(options: Mapping[str, Any]) -> bool:
    return any(series["data"] for series in options["series"])


def fill(
    options: dict[str, Any],
    chart: ChartSpec,
    points: Mapping[str, Sequence[MetricPoint]],
    best: Checkpoint | None,
    marks: Sequence[Mark] = (),
    view: ChartView | None = None,
) -> None:
    """Put points (by metric name) into `options`, and mark events and, on `quality`, the best step.

    What cannot be drawn becomes a gap: what is not finite, and on a logarithmic axis not above 0.
    """
    view = view or ChartView()
    is_log = chart.is_log or (view.is_log and not chart.is_stacked)
    set_scale(options, is_log=is_log)
    breaks = [mark.time for mark in marks if mark.breaks]
    width = 1 if chart.is_stacked else 2
    for number, line in enumerate(chart.lines):
        found = points.get(line.metric, ())
        pair = options["series"][number * width : (number + 1) * width]
        draw(pair, found, [point.step for point in found], breaks, is_log=is_log, view=view)
        if chart.is_stacked:
            # An area of one point has no width.
            pair[0]["showSymbol"] = len(found) == 1
    options["title"]["show"] = not has_data(options)
    steps = next((points[line.metric] for line in chart.lines if points.get(line.metric)), ())
    shown = marks if view.has_events else ()
    options["series"][0]["markLine"] = _mark_lines(
        shown, steps, best if chart.key == "quality" else None
    )
    options["series"][0]["markArea"] = _nan_areas(steps)


# By itself ECharts ends a logarithmic axis at whole powers of ten. A constant is in the middle.
_LOG_ENDS = (
    "({min, max}) => max > 1.01 * min ? min : min / 1.1",
    "({min, max}) => max > 1.01 * min ? max : max * 1.1",
)


def set_scale(options: dict[str, Any], *, is_log: bool) -> None:
    """Make the axes of values logarithmic, from the least to the largest value, or linear."""
    for axis in options["yAxis"]:
        axis["type"] = "log" if is_log else "value"
        axis[":min"], axis[":max"] = _LOG_ENDS if is_log else ("null", "null")


def draw(
    pair: Sequence[dict[str, Any]],
    points: Sequence[MetricPoint],
    xs: Sequence[float],
    breaks: Sequence[float],
    *,
    is_log: bool,
    view: ChartView,
) -> None:
    """Put the points of one line into its series, at places `xs` of the axis."""
    least = 0.0 if is_log else -math.inf

    def shown(value: float) -> float | None:
        return value if least < value < math.inf else None

    means = smoothed([point.value for point in points], view.smoothing)
    # Places of the points that come after an interruption.
    times = [point.time for point in points]
    gaps = {bisect.bisect_left(times, each) for each in breaks} - {0, len(points)}
    pair[0]["data"] = _with_gaps([[x, shown(y)] for x, y in zip(xs, means, strict=True)], gaps)
    # A curve of few points would hide where they are.
    pair[0]["showSymbol"] = 0 < len(points) <= _FEW_POINTS
    pair[0]["symbolSize"] = 10 if len(points) == 1 else 5
    if len(pair) == 1:
        return
    behind: list[list[Any]] = []
    is_range = any(point.min < point.max for point in points)
    pair[1]["name"] = f"{pair[0]['name']}, {'range' if is_range else 'measured'}"
    if is_range:
        for x, point in zip(xs, points, strict=True):
            behind += [[x, shown(point.min)], [x, shown(point.max)]]
        gaps = {2 * gap for gap in gaps}
    elif view.smoothing:
        behind = [[x, shown(point.value)] for x, point in zip(xs, points, strict=True)]
    pair[1]["data"] = _with_gaps(behind, gaps)


def smoothed(values: Sequence[float], share: float) -> list[float]:
    """Exponential means, without the pull of their start; what is not finite stays, and is left out
    of the mean of the others.
    """
    if not share:
        return list(values)
    found, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        found.append(mean / weight if math.isfinite(value) else value)
    return found


def _with_gaps(data: list[list[Any]], gaps: set[int]) -> tuple[list[Any], ...]:
    """The points with a break before each place of `gaps`.

    A tuple, as NiceGUI would wrap a list and each of its points to watch for changes, which takes
    ten times as long as all else.
    """
    found = []
    for place, each in enumerate(data):
        if place in gaps:
            found.append([each[0], None])
        found.append(each)
    return tuple(found)


def _mark_lines(
    marks: Sequence[Mark], points: Sequence[MetricPoint], best: Checkpoint | None
) -> dict[str, Any]:
    times = [point.time for point in points]
    data: list[dict[str, Any]] = []
    for mark in marks if points else ():
        # Events have times, the axis has steps.
        place = min(bisect.bisect_left(times, mark.time), len(points) - 1)
        style = {"color": mark.colour, "type": "solid" if mark.breaks else "dashed", "width": 1}
        data.append({"xAxis": points[place].step, "name": mark.text, "lineStyle": style})
    if best is not None:
        # Close to its line, as there is room for 12 px above that.
        label = {
            "show": True,
            "formatter": "best",
            "color": _TEXT_COLOUR,
            "fontSize": 10,
            "distance": 1,
        }
        data.append({"xAxis": best.step, "name": "best checkpoint", "label": label})
    hover = {"label": {"show": True, "formatter": "{b}", "width": 240, "overflow": "truncate"}}
    return {
        "symbol": "none",
        "lineStyle": {"color": _TEXT_COLOUR, "type": "dotted"},
        "label": {"show": False, "color": _TEXT_COLOUR, "fontSize": 10},
        "emphasis": {"lineStyle": {"width": 2}, **hover},
        "tooltip": {"show": True, "formatter": "{b}"},
        "data": data,
    }


def _nan_areas(points: Sequence[MetricPoint]) -> dict[str, Any]:
    """A red ground where values were NaN or infinite, from the point before to the one after."""
    data: list[list[dict[str, Any]]] = []
    last = len(points) - 1
    for place, point in enumerate(points):
        if math.isfinite(point.value):
            continue
        start, end = points[max(0, place - 1)].step, points[min(last, place + 1)].step
        if data and data[-1][1]["xAxis"] >= start:
            data[-1][1]["xAxis"] = end
        else:
            data.append([{"xAxis": start, "name": "NaN"}, {"xAxis": end}])
    colour = {"color": "rgba(212, 104, 124, 0.14)"}
    label = {"show": True, "position": "insideTop", "color": "#d4687c", "fontSize": 10}
    return {"silent": True, "itemStyle": colour, "label": label, "data": data}


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def csv_of(points: Mapping[str, Sequence[MetricPoint]]) -> str:
    """Metrics as CSV: a row for each step, with its time (Unix seconds); empty where none."""
    rows: dict[int, dict[str, Any]] = {}
    for name, series in points.items():
        for point in series:
            rows.setdefault(point.step, {"time": point.time})[name] = point.value
    table = [
        [step, f"{row['time']:.3f}", *(row.get(name) for name in points)]
        for step, row in sorted(rows.items())
    ]
    return csv_text([["step", "time", *points], *table])

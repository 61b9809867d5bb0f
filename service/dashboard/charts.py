"""ECharts options of the live charts, and their data. Pure functions.

Colours are mid-tones that hold on a light and on a dark ground: the server does not know which one
a browser that follows the system shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.domain.models import Checkpoint, Job, MetricPoint
from trainer.protocol.events import PHASES

TRAIN_COLOUR = "#6472e8"
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
_LINE_COLOUR = "rgba(138, 147, 163, 0.18)"
_AXIS_LABEL = {"color": _TEXT_COLOUR, "fontSize": 11, "hideOverlap": True}
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
    ChartSpec(
        "phases",
        "Time of a step",
        tuple(Line(f"phase/{p}_s", p.replace("_", " "), _PHASE_COLOURS[p]) for p in PHASES),
        from_zero=True,
        is_stacked=True,
        is_optional=True,
        number=_MILLISECONDS,
    ),
    ChartSpec(
        "sync",
        "Sync time",
        (Line("sync/time_s", "sync", TRAIN_COLOUR),),
        from_zero=True,
        is_optional=True,
        number=_MILLISECONDS,
    ),
    ChartSpec(
        "traffic",
        "Sync traffic",
        (
            Line("sync/bytes", "bytes per rank", TRAIN_COLOUR),
            Line("sync/density", "share of rows", VALIDATION_COLOUR, on_right=True),
        ),
        from_zero=True,
        is_optional=True,
        number=_BYTES,
        right_number=_PERCENT,
    ),
    ChartSpec(
        "memory",
        "Worker memory",
        (
            Line("memory/peak_rss_bytes", "host, peak", VALIDATION_COLOUR),
            Line("memory/peak_reserved_bytes", "PyTorch, peak", TRAIN_COLOUR),
            Line("memory/gpu_used_bytes", "GPU", _PHASE_COLOURS["output_dist"]),
        ),
        from_zero=True,
        is_optional=True,
        number=_BYTES,
    ),
)


def chart_options(chart: ChartSpec) -> dict[str, Any]:
    return {
        "animation": False,
        "textStyle": {"fontFamily": "Roboto, sans-serif", "color": _TEXT_COLOUR},
        "grid": {"left": 8, "right": 14, "top": 12, "bottom": 4, "containLabel": True},
        "title": {
            "text": "no data yet",
            "left": "center",
            "top": "middle",
            "textStyle": {"color": _TEXT_COLOUR, "fontSize": 12, "fontWeight": "normal"},
        },
        "tooltip": _tooltip(chart),
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "axisLine": {"lineStyle": {"color": _LINE_COLOUR}},
            "axisTick": {"show": False},
            "splitLine": {"show": False},
            "axisLabel": {**_AXIS_LABEL, ":formatter": _STEPS, "showMaxLabel": False},
            "axisPointer": {"label": {":formatter": "({value}) => 'step ' + Math.round(value)"}},
        },
        "yAxis": _value_axes(chart),
        "series": [_series(chart, line) for line in chart.lines],
    }


def _value_axes(chart: ChartSpec) -> list[dict[str, Any]]:
    left = {
        "type": "log" if chart.is_log else "value",
        "scale": not chart.from_zero,
        "splitNumber": 4,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": _LINE_COLOUR}},
        "axisLabel": {**_AXIS_LABEL, ":formatter": chart.number},
    }
    if chart.right_number is None:
        return [left]
    label = {**_AXIS_LABEL, ":formatter": chart.right_number}
    return [left, {**left, "splitLine": {"show": False}, "axisLabel": label}]


def _tooltip(chart: ChartSpec) -> dict[str, Any]:
    return {
        "trigger": "axis",
        "confine": True,
        "transitionDuration": 0,
        # The tooltip is an HTML element, so the stylesheet's variables reach it.
        "backgroundColor": "var(--panel)",
        "borderColor": "var(--line-strong)",
        "textStyle": {"color": "var(--text)", "fontSize": 12},
        "axisPointer": {"lineStyle": {"color": _TEXT_COLOUR, "type": "dashed"}},
        ":valueFormatter": chart.number,
    }


def _series(chart: ChartSpec, line: Line) -> dict[str, Any]:
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
    return series


def has_data(options: Mapping[str, Any]) -> bool:
    return any(series["data"] for series in options["series"])


def fill(
    options: dict[str, Any],
    chart: ChartSpec,
    points: Mapping[str, Sequence[MetricPoint]],
    best: Checkpoint | None,
) -> None:
    """Put points (by metric name) into `options`; mark the best checkpoint's step on `quality`.

    What cannot be drawn becomes a gap: what is not finite, and on a logarithmic axis not above 0.
    """
    least = 0.0 if chart.is_log else -math.inf
    for series, line in zip(options["series"], chart.lines, strict=True):
        found = points.get(line.metric, ())
        series["data"] = [[p.step, p.value if least < p.value < math.inf else None] for p in found]
        # A curve of few points would hide where they are.
        is_short = 0 < len(series["data"]) <= _FEW_POINTS
        series["showSymbol"] = is_short and not chart.is_stacked
    options["title"]["show"] = not has_data(options)
    if chart.key == "quality":
        options["series"][-1]["markLine"] = _mark(best)


def _mark(best: Checkpoint | None) -> dict[str, Any]:
    return {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"color": _TEXT_COLOUR, "type": "dotted"},
        "label": {"formatter": "best", "color": _TEXT_COLOUR, "fontSize": 10},
        "data": [] if best is None else [{"xAxis": best.step}],
    }

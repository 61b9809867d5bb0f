"""ECharts options of the live charts, and their data. Pure functions.

Colours are mid-tones that hold on a light and on a dark ground, because the server does not
know which of the two a browser that follows the system shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.dashboard.views import quality_metric
from service.domain import Checkpoint, Job, MetricPoint

TRAIN_COLOUR = "#6472e8"
VALIDATION_COLOUR = "#e0913a"
_TEXT_COLOUR = "#8a93a3"
_LINE_COLOUR = "rgba(138, 147, 163, 0.18)"
_FEW_POINTS = 40

# Run in the browser (NiceGUI evaluates keys that start with a colon).
_NUMBER = (
    "value => value == null ? '-' : Math.abs(value) >= 1000"
    " ? +(value / 1000).toPrecision(3) + 'k' : String(+value.toPrecision(4))"
)
_MILLISECONDS = "value => value == null ? '-' : String(+(value * 1000).toPrecision(3)) + ' ms'"
_STEPS = "value => value >= 1000 ? String(value / 1000) + 'k' : String(value)"


@dataclass(frozen=True)
class Line:
    """One series of a chart: the metric that it shows and how."""

    metric: str
    label: str
    colour: str


@dataclass(frozen=True)
class ChartSpec:
    """One chart. `from_zero` keeps 0 on the axis, for what is read as an amount."""

    key: str
    title: str
    lines: tuple[Line, ...]
    from_zero: bool = False
    number: str = _NUMBER


def charts_of(job: Job) -> tuple[ChartSpec, ...]:
    """The charts of a job: loss, quality (train and validation), speed and sync time."""
    quality = quality_metric(job)
    return (
        ChartSpec("loss", "Loss", (Line("train/loss", "train", TRAIN_COLOUR),)),
        ChartSpec(
            "quality",
            quality.upper(),
            (
                Line(f"train/{quality}", "train", TRAIN_COLOUR),
                Line(f"validation/{quality}", "validation", VALIDATION_COLOUR),
            ),
        ),
        ChartSpec(
            "speed", "Rows/s", (Line("speed/rows_per_s", "rows/s", TRAIN_COLOUR),), from_zero=True
        ),
        ChartSpec(
            "sync",
            "Sync time",
            (Line("sync/time_s", "sync", TRAIN_COLOUR),),
            from_zero=True,
            number=_MILLISECONDS,
        ),
    )


def metric_names(charts: Sequence[ChartSpec]) -> list[str]:
    """Every metric that the charts need."""
    return [line.metric for chart in charts for line in chart.lines]


def chart_options(chart: ChartSpec) -> dict[str, Any]:
    """Options of an empty chart."""
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
            "axisLabel": {**_axis_label(), ":formatter": _STEPS, "showMaxLabel": False},
        },
        "yAxis": {
            "type": "value",
            "scale": not chart.from_zero,
            "splitNumber": 4,
            "axisLine": {"show": False},
            "axisTick": {"show": False},
            "splitLine": {"lineStyle": {"color": _LINE_COLOUR}},
            "axisLabel": {**_axis_label(), ":formatter": chart.number},
        },
        "series": [_series(line) for line in chart.lines],
    }


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


def _axis_label() -> dict[str, Any]:
    return {"color": _TEXT_COLOUR, "fontSize": 11, "hideOverlap": True}


def _series(line: Line) -> dict[str, Any]:
    return {
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
    }


def series_data(points: Sequence[MetricPoint]) -> list[list[float | None]]:
    """`[step, value]` pairs; a value that is not finite becomes a gap, as JSON has no NaN."""
    return [[p.step, p.value if math.isfinite(p.value) else None] for p in points]


def fill(
    options: dict[str, Any],
    chart: ChartSpec,
    points: Mapping[str, Sequence[MetricPoint]],
    best: Checkpoint | None,
) -> None:
    """Put points (by metric name) into `options`; mark the best checkpoint's step on `quality`."""
    for series, line in zip(options["series"], chart.lines, strict=True):
        series["data"] = series_data(points.get(line.metric, ()))
        # A curve of few points would hide where they are.
        series["showSymbol"] = 0 < len(series["data"]) <= _FEW_POINTS
    options["title"]["show"] = not any(series["data"] for series in options["series"])
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

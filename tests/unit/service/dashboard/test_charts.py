"""Charts and numbers as the dashboard shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.views import progress_of
from service.dashboard import charts
from service.domain.models import JobStatus, MetricPoint, Progress, TimelineEvent
from service.schemas import wording
from tests.harness.builders import NOW, queued_job


def points(*values: float) -> list[MetricPoint]:
    """Points at steps 10, 20, ..."""
    return [
        MetricPoint(step=10 * n, time=NOW, value=v, min=v, max=v)
        for n, v in enumerate(values, start=1)
    ]


def chart_of(key: str) -> charts.ChartSpec:
    return next(c for c in charts.charts_of(queued_job()) if c.key == key)


def test_a_value_that_is_not_finite_is_a_gap_and_the_options_stay_strict_json() -> None:
    chart = chart_of("quality")
    options = charts.chart_options(chart)
    charts.fill(options, chart, {}, best=None)
    assert options["title"]["show"] is True, "it says that it is empty"
    charts.fill(options, chart, {"train/rmse": points(1.0, math.nan, 0.9)}, best=None)
    data = json.loads(json.dumps(options, allow_nan=False))["series"][0]["data"]
    assert data == [[10, 1.0], [20, None], [30, 0.9]]
    assert isinstance(options["series"][0]["data"], tuple), "NiceGUI watches all points of a list"
    assert options["title"]["show"] is False


def test_events_are_marked_at_their_steps_and_no_line_leads_across_a_restart() -> None:
    chart = chart_of("loss")
    options = charts.chart_options(chart)
    curve = [MetricPoint(step, NOW + step, 1.0, 1.0, 1.0) for step in (10, 20, 30, 40)]
    lost = TimelineEvent(1, "j", "j-a0", NOW + 25, "workers_lost", "rank 1 died", "driver", {})
    told = TimelineEvent(2, "j", "j-a0", NOW + 35, "note", "hello", "driver", {})
    marks = charts.marks_of([lost, told])
    charts.fill(options, chart, {"train/loss": curve}, None, marks)
    series = options["series"][0]
    assert [*series["data"]] == [[10, 1.0], [20, 1.0], [30, None], [30, 1.0], [40, 1.0]]
    assert [(line["xAxis"], line["name"]) for line in series["markLine"]["data"]] == [
        (30, "rank 1 died")
    ]
    hidden = charts.ChartView(has_events=False)
    charts.fill(options, chart, {"train/loss": curve}, None, marks, hidden)
    assert options["series"][0]["markLine"]["data"] == []


def test_buckets_show_their_extremes_and_nan_has_a_red_ground() -> None:
    chart = chart_of("loss")
    options = charts.chart_options(chart)
    buckets = [MetricPoint(10, NOW, 1.0, 0.5, 9.0), MetricPoint(20, NOW, math.nan, 0.4, 2.0)]
    charts.fill(options, chart, {"train/loss": buckets}, None)
    mean, extremes = options["series"]
    assert [*mean["data"]] == [[10, 1.0], [20, None]]
    assert [*extremes["data"]] == [[10, 0.5], [10, 9.0], [20, 0.4], [20, 2.0]]
    assert extremes["name"] == "train, range"
    assert [area[0]["xAxis"] for area in mean["markArea"]["data"]] == [10]


def test_smoothing_begins_at_the_first_value_and_passes_over_nan() -> None:
    assert charts.smoothed([2.0, 4.0], 0.0) == [2.0, 4.0]
    first, gap, last = charts.smoothed([2.0, math.nan, 4.0], 0.5)
    assert (first, math.isnan(gap), last) == (2.0, True, pytest.approx(10 / 3))
    chart = chart_of("loss")
    options = charts.chart_options(chart)
    smooth = charts.ChartView(smoothing=0.5)
    charts.fill(options, chart, {"train/loss": points(2.0, 4.0)}, None, view=smooth)
    behind = options["series"][1]
    assert (behind["name"], [*behind["data"]]) == ("train, measured", [[10, 2.0], [20, 4.0]])


def test_data_of_a_chart_is_a_table_of_steps() -> None:
    found = charts.csv_of({"a": points(1.0, math.nan), "b, c": points(3.0)})
    assert found.splitlines()[0] == 'step,time,a,"b, c"'
    assert [line.split(",")[2:] for line in found.splitlines()[1:]] == [["1.0", "3.0"], ["nan", ""]]


def test_a_rate_of_zero_is_a_gap_on_the_logarithmic_axis() -> None:
    chart = chart_of("lr")
    options = charts.chart_options(chart)
    charts.fill(options, chart, {"optimizer/lr_sparse": points(0.05, 0.0)}, best=None)
    axis = options["yAxis"][0]
    assert axis["type"] == "log"
    assert "min / 1.1" in axis[":min"], "no whole decades, in which a curve would look flat"
    assert [*options["series"][0]["data"]] == [[10, 0.05], [20, None]]
    linear = chart_of("loss")
    charts.fill(options, linear, {"train/loss": points(0.05)}, best=None)
    assert (axis["type"], axis[":min"], axis[":max"]) == ("value", "null", "null")


def test_a_stack_of_areas_shows_its_first_point_which_has_no_width() -> None:
    chart = chart_of("phases")
    options = charts.chart_options(chart)
    for values, is_shown in (((0.01,), True), ((0.01, 0.02), False)):
        charts.fill(options, chart, {"phase/dense_s": points(*values)}, best=None)
        shown = [line for line in options["series"] if line["showSymbol"]]
        assert [line["name"] for line in shown] == ["dense"] * is_shown


def test_what_older_jobs_never_measured_is_optional_and_has_no_data() -> None:
    optional = [chart for chart in charts.charts_of(queued_job()) if chart.is_optional]
    assert {chart.key for chart in optional} == {"lr", "phases", "sync", "traffic", "memory"}
    for chart in optional:
        options = charts.chart_options(chart)
        charts.fill(options, chart, {"train/loss": points(1.0)}, best=None)
        assert not charts.has_data(options)


# ---- numbers


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        # Three digits and a suffix.
        (wording.compact, {0: "0", 7.8125: "7.81", 999.9: "1k", 16_540: "16.5k", 999_960: "1M"}),
        (wording.compact, {3e9: "3B", math.nan: "NaN", None: wording.NOTHING}),
        # Four decimals unless they would hide the value.
        (wording.precise, {0.88123: "0.8812", 0.0: "0.0000", 1e-5: "1e-05", -math.inf: "-∞"}),
        (wording.latency, {1.25: "1.25 s", 0.0125: "12.5 ms", 0.00084: "840 µs", 0.0: "0 µs"}),
        (wording.size, {512: "512 B", 84_300_000: "84.3 MB", 999_900: "1 MB"}),
        # The two largest units.
        (wording.duration, {0: "0s", 59.9: "59s", 200: "3m 20s", 7_500: "2h 05m", -3: "0s"}),
        (wording.duration, {1e308: wording.NOTHING, math.nan: wording.NOTHING}),
        (wording.duration, {97 * 3600: "4d 01h", math.inf: wording.NOTHING, None: wording.NOTHING}),
        # Hours only when there are any.
        (wording.clock, {133: "+02:13", 3909: "+1:05:09"}),
        (wording.utc, {0: "1970-01-01 00:00:00 UTC"}),
    ],
)
def test_numbers_are_told_briefly(words: Callable[[Any], str], texts: dict[Any, str]) -> None:
    assert {value: words(value) for value in texts} == texts


@given(st.integers(min_value=0, max_value=10**9), st.integers(min_value=0, max_value=10**9))
def test_percent_done_stays_within_bounds(step: int, total_steps: int) -> None:
    progress = Progress(step=step, total_steps=total_steps)
    assert 0.0 <= progress_of(progress, JobStatus.RUNNING).percent <= 100.0


def test_a_metric_is_written_in_the_unit_that_its_name_implies() -> None:
    for name, value, text in (
        ("balance/lookup", 1.0849, "1.08×"),  # noqa: RUF001
        ("speed/rows_per_s", 16_540.0, "16.5k"),
        ("sync/time_s", 0.0125, "12.5 ms"),
        ("sync/bytes", 21e6, "21 MB"),
        ("validation/rmse", 0.87123, "0.8712"),
    ):
        assert wording.metric(name, value) == text
    line = wording.metrics_line({"validation/rmse": 0.9, "validation/mae": 0.7})
    assert line == "validation/mae 0.7000 · validation/rmse 0.9000"

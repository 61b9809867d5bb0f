"""ECharts options of the live charts."""

from __future__ import annotations

import json
import math

from service.dashboard import charts
from service.domain import Checkpoint, MetricPoint
from service.sharding import PHASES
from tests.unit.service.builders import NOW, queued_job


def points(*values: float) -> list[MetricPoint]:
    """Points at steps 10, 20, ..."""
    return [
        MetricPoint(step=10 * n, time=NOW, value=v, min=v, max=v)
        for n, v in enumerate(values, start=1)
    ]


def chart_of(key: str) -> charts.ChartSpec:
    return next(c for c in charts.charts_of(queued_job()) if c.key == key)


def quality_chart() -> charts.ChartSpec:
    return chart_of("quality")


def test_the_quality_chart_shows_train_and_validation_of_the_task() -> None:
    chart = quality_chart()
    assert chart.title == "RMSE"
    assert [line.metric for line in chart.lines] == ["train/rmse", "validation/rmse"]


def test_a_value_that_is_not_finite_is_a_gap_and_the_options_stay_strict_json() -> None:
    chart = quality_chart()
    options = charts.chart_options(chart)
    charts.fill(options, chart, {"train/rmse": points(1.0, math.nan, 0.9)}, best=None)
    data = json.loads(json.dumps(options, allow_nan=False))["series"][0]["data"]
    assert data == [[10, 1.0], [20, None], [30, 0.9]]


def test_an_empty_chart_says_so_until_it_has_points() -> None:
    chart = quality_chart()
    options = charts.chart_options(chart)
    charts.fill(options, chart, {}, best=None)
    assert options["title"]["show"] is True
    charts.fill(options, chart, {"train/rmse": points(1.0)}, best=None)
    assert options["title"]["show"] is False


def test_few_points_are_marked_and_many_are_not() -> None:
    chart = quality_chart()
    options = charts.chart_options(chart)
    many = points(*[1.0] * 100)
    charts.fill(options, chart, {"train/rmse": many, "validation/rmse": many[:3]}, best=None)
    assert [series["showSymbol"] for series in options["series"]] == [False, True]


def test_the_best_checkpoint_is_marked_where_it_was_saved() -> None:
    chart = quality_chart()
    options = charts.chart_options(chart)
    best = Checkpoint("job-1", 500, "step-500", 1, NOW, True, {})
    charts.fill(options, chart, {}, best)
    assert options["series"][-1]["markLine"]["data"] == [{"xAxis": 500}]


def test_amounts_start_at_zero_and_qualities_do_not() -> None:
    scaled = {
        chart.key: charts.chart_options(chart)["yAxis"][0]["scale"]
        for chart in charts.charts_of(queued_job())
    }
    amounts = {key for key, is_scaled in scaled.items() if not is_scaled}
    assert amounts == {"speed", "phases", "sync", "traffic"}
    assert scaled.keys() - amounts == {"loss", "quality", "lr"}


def test_the_phases_of_a_step_are_stacked_in_the_order_in_which_they_happen() -> None:
    chart = chart_of("phases")
    options = charts.chart_options(chart)
    values = {f"phase/{phase}_s": points(0.01, 0.02) for phase in PHASES}
    charts.fill(options, chart, values, best=None)
    assert [series["name"] for series in options["series"]][:2] == ["data wait", "input dist"]
    assert {series["stack"] for series in options["series"]} == {"all"}
    assert all(series["data"] == [[10, 0.01], [20, 0.02]] for series in options["series"])


def test_a_rate_of_zero_is_a_gap_on_the_logarithmic_axis() -> None:
    chart = chart_of("lr")
    options = charts.chart_options(chart)
    charts.fill(options, chart, {"optimizer/lr_sparse": points(0.05, 0.0)}, best=None)
    assert options["yAxis"][0]["type"] == "log"
    assert options["series"][0]["data"] == [[10, 0.05], [20, None]]


def test_traffic_has_bytes_on_the_left_and_the_share_of_rows_on_the_right() -> None:
    options = charts.chart_options(chart_of("traffic"))
    assert [series["yAxisIndex"] for series in options["series"]] == [0, 1]
    assert len(options["yAxis"]) == 2
    assert len(charts.chart_options(chart_of("loss"))["yAxis"]) == 1


def test_what_older_jobs_never_measured_is_optional_and_has_no_data() -> None:
    optional = [chart for chart in charts.charts_of(queued_job()) if chart.is_optional]
    assert {chart.key for chart in optional} == {"lr", "phases", "sync", "traffic"}
    for chart in optional:
        options = charts.chart_options(chart)
        charts.fill(options, chart, {"train/loss": points(1.0)}, best=None)
        assert not charts.has_data(options)

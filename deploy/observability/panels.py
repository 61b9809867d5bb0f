"""The kinds of panels that our dashboards are made of, over Grafana's own builders.

A panel is 8 high; widths are of 24. Each reads the data source that the dashboard's variable names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "shardloom"
AnyPanel = timeseries.Panel | stat.Panel | table.Panel
_HEIGHT, _STAT_HEIGHT = 8, 4


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are called, in Grafana's `{{label}}` form."""

    expr: str
    legend: str = ""


def _target(query: Query, ref_id: str, *, is_instant: bool = False) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref_id).datasource(SOURCE)
    if query.legend:
        target = target.legend_format(query.legend)
    return target.instant() if is_instant else target.range()


def _ref_ids(num: int) -> list[str]:
    return [chr(ord("A") + index) for index in range(num)]


def graph(
    title: str,
    *queries: Query,
    unit: str = "short",
    text: str = "",
    width: int = 8,
    stacked: bool = False,
    most: float | None = None,
) -> timeseries.Panel:
    """Lines over time from 0 on, or areas on top of each other; `unit` in Grafana's words."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(_HEIGHT)
        .legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .fill_opacity(40 if stacked else 8)
        .min(0)
    )
    if most is not None:
        panel = panel.max(most)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for ref_id, query in zip(_ref_ids(len(queries)), queries, strict=True):
        panel = panel.with_target(_target(query, ref_id))
    return panel


def number(
    title: str,
    query: Query,
    *,
    unit: str = "short",
    below_1: str = "green",
    from_1: str = "green",
) -> stat.Panel:
    """The newest value, large, in a color below 1 and in one from 1 on."""
    steps = [Threshold(value=None, color=below_1), Threshold(value=1, color=from_1)]
    return (
        stat.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .span(4)
        .height(_STAT_HEIGHT)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("none")
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(query, "A", is_instant=True))
    )


@dataclass(frozen=True)
class Column:
    """A column of a table: the newest value of `expr` for each of its series."""

    title: str
    expr: str
    unit: str = "short"


def listing(
    title: str, columns: Mapping[str, str], *values: Column, link: tuple[str, str] | None = None
) -> table.Panel:
    """A row for each series: `columns` names labels (label -> title), `values` follow.

    `link` is the title of a column and where its cells lead.
    """
    panel = (
        table.Panel().title(title).datasource(SOURCE).span(24).height(_HEIGHT + 2).filterable(True)
    )
    names = dict(columns)
    for ref_id, value in zip(_ref_ids(len(values)), values, strict=True):
        target = _target(Query(value.expr), ref_id, is_instant=True)
        panel = panel.with_target(target.format(PromQueryFormat.TABLE))
        names[f"Value #{ref_id}"] = value.title
        panel = panel.override_by_name(value.title, [DynamicConfigValue("unit", value.unit)])
    if link is not None:
        shown, url = link
        links = [{"title": "Open", "url": url}]
        panel = panel.override_by_name(shown, [DynamicConfigValue("links", links)])
    order = {name: index for index, name in enumerate(names)}
    arranged = {"excludeByName": {"Time": True}, "renameByName": names, "indexByName": order}
    return panel.with_transformation(
        DataTransformerConfig(id_val="merge", options={})
    ).with_transformation(DataTransformerConfig(id_val="organize", options=arranged))


def board(
    uid: str,
    title: str,
    text: str,
    rows: Mapping[str, Sequence[AnyPanel]],
    *choices: dashboard.QueryVariable,
) -> dashboard.Dashboard:
    """A dashboard of rows by title ("" for panels above all rows).

    It leads to the others of ours, and lets one choose the data source and the values of `choices`.
    """
    link = dashboard.DashboardLink("Shardloom").type(DashboardLinkType.DASHBOARDS).tags([TAG])
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags([TAG])
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .readonly()
        .link(link.as_dropdown(True).include_vars(False).keep_time(True))
        .with_variable(source)
    )
    for each in choices:
        made = made.with_variable(each)
    for row, panels in rows.items():
        if row:
            made = made.with_row(dashboard.Row(row))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable with the values of a label, as in `label_values(metric, label)`."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )

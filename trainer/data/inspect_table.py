"""The table of columns that `data inspect` prints, and a narrower one for narrow terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

if TYPE_CHECKING:
    from trainer.data.inspect_columns import ColumnReport
    from trainer.data.inspect_data import DataReport

_BAR_WIDTH = 8
_MANY_NULLS = 0.5
_RIGHT = ("distinct", "nulls", "range", "Zipf")
# What a narrow terminal can do without.
_WIDE_ONLY = ("range", "Zipf", "lists")


def columns_table(report: DataReport, console: Console) -> Table:
    """One row per column; without some of its columns where they would not fit the terminal."""
    wide = _table(report, is_wide=True)
    needed = Measurement.get(console, console.options.update(max_width=1000), wide).maximum
    return wide if needed <= console.width else _table(report, is_wide=False)


def _table(report: DataReport, *, is_wide: bool) -> Table:
    roles = _roles(report, is_wide=is_wide)
    rows = [_cells(column, is_wide=is_wide) for column in report.columns]
    has_lists = any(column.lists for column in report.columns)
    shown = [
        name
        for name in rows[0]
        if (is_wide or name not in _WIDE_ONLY) and (has_lists or name != "lists")
    ]
    gap = (0, 2 if is_wide else 1, 0, 0)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=gap)
    for name in shown:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    table.add_column("suggested", no_wrap=True)
    for column, cells in zip(report.columns, rows, strict=True):
        role = roles.get(column.name, "[dim]left out[/]")
        table.add_row(*(cells[name] for name in shown), role)
    return table


def _cells(column: ColumnReport, *, is_wide: bool) -> dict[str, str]:
    about = "~" if column.is_estimate else ""
    is_id = column.kind in ("integer", "text")
    kind = f"{column.kind} lists" if column.lists else column.kind
    zipf = "" if column.zipf_exponent is None else f"{column.zipf_exponent:.2f}"
    return {
        "column": f"[cyan]{escape(column.name)}[/]",
        "holds": kind,
        "distinct": f"{about}{column.num_distinct:,}",
        "nulls": _nulls(column),
        "range": _range(column),
        "top 1%": _share(column.top_share, has_bar=is_wide) if is_id else "",
        "Zipf": zipf if is_id else "",
        "lists": _lengths(column),
    }


def _nulls(column: ColumnReport) -> str:
    if not column.num_nulls:
        return "[dim]none[/]"
    share = column.num_nulls / column.num_rows
    text = f"{share:.1%}" if share >= 0.001 else f"{column.num_nulls:,}"
    return f"[yellow]{text}[/]" if share > _MANY_NULLS else text


def _range(column: ColumnReport) -> str:
    if column.minimum is None or column.maximum is None:
        return ""
    return f"{_number(column.minimum)} … {_number(column.maximum)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _share(share: float | None, *, has_bar: bool) -> str:
    if share is None:
        return ""
    filled = round(share * _BAR_WIDTH)
    bar = "█" * filled + f"[dim]{'░' * (_BAR_WIDTH - filled)}[/] "
    return f"{bar if has_bar else ''}{share:4.0%}"


def _lengths(column: ColumnReport) -> str:
    if (lists := column.lists) is None:
        return ""
    empty = f", {lists.num_empty:,} empty" if lists.num_empty else ""
    return f"mean {lists.mean:.1f}, max {lists.longest}{empty}"


def _roles(report: DataReport, *, is_wide: bool) -> dict[str, str]:
    """What each column is suggested as, in a few words."""
    suggestion = report.suggestion
    tables = {table["name"]: table for table in suggestion.embedding_tables}
    vocabularies = report.data.manifest.vocab_sizes if report.data.manifest else {}
    roles = {suggestion.label: f"[green]label[/] ({suggestion.loss})"} if suggestion.label else {}
    for feature in suggestion.features:
        words = [feature["type"]]
        words += [feature["transform"]] if "transform" in feature else []
        words += ["hashed"] if "hashing" in feature else []
        if (table := tables.get(feature.get("table", ""))) is not None:
            rows = vocabularies.get(feature["name"], table["num_embeddings"])
            size = f"{rows:,} x {table['embedding_dim']}"
            words.append(f"table {size}" if is_wide else size)
        roles[feature["name"]] = ", ".join(words)
    return roles

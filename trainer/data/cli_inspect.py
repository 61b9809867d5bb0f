"""`shardloom data inspect`: what data holds and what a job spec could make of it."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from trainer.data.cli_common import data_errors_shown, show_summary

if TYPE_CHECKING:
    from trainer.data.inspect_columns import ColumnReport
    from trainer.data.inspect_data import DataReport

_BAR_WIDTH = 8
_MANY_NULLS = 0.5


def inspect_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR|FILE...",
            help="Prepared folders, or Parquet, csv and tsv files (.gz too) and folders of them; "
            "paths, s3:// or gs:// URLs.",
        ),
    ],
    verify: Annotated[
        bool, typer.Option(help="Of prepared folders compare every file with its checksum.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    spec: Annotated[
        bool, typer.Option("--spec", help="Print only features and embedding_tables for a spec.")
    ] = False,
) -> None:
    """Show counts, cardinalities, skew and nulls of data, and suggest features and tables."""
    with data_errors_shown():
        reports = _inspect(sources)
        if as_json:
            print(json.dumps([report.as_json() for report in reports], indent=2))
        elif spec:
            print("\n".join(report.suggestion.yaml() for report in reports), end="")
        else:
            for report in reports:
                _show(report)
        if verify and not (as_json or spec):
            _verify(sources)


def _inspect(sources: list[str]) -> list[DataReport]:
    from trainer.data.inspect_data import inspect_data
    from trainer.data.inspect_source import find_data

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.completed:,.0f} rows"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        reports = []
        for data in find_data(sources):
            task = progress.add_task(escape(f"reading {data.title}"), total=None)
            reports.append(inspect_data(data, partial(progress.advance, task)))
    return reports


def _verify(sources: list[str]) -> None:
    """Check the sums of those sources that are prepared folders."""
    from trainer.data.inspect_data import verify_folder
    from trainer.data.inspect_source import find_manifest
    from trainer.data.storage import Location

    for source in sources:
        folder = Location.parse(source)
        if (manifest := find_manifest(folder)) is not None:
            number = verify_folder(folder, manifest)
            Console().print(f"[green]OK:[/] {number} files have the sha256 of the manifest")


def _show(report: DataReport) -> None:
    data = report.data
    if data.manifest is not None:
        show_summary(data.title, data.manifest)
    kind = data.text.text if data.text else "Parquet"
    files = "1 file" if len(data.files) == 1 else f"{len(data.files)} files"
    size_mb = data.size_bytes / 1e6
    console = Console()
    console.print(
        f"\n[bold]{escape(data.title)}[/]\n"
        f"{report.num_rows:,} rows in {files}, {size_mb:,.1f} MB, {kind}",
        soft_wrap=True,
    )
    console.print(_columns_table(report))
    if data.text and data.text.is_criteo:
        console.print(
            f"[dim]Criteo's format: `shardloom data prepare criteo {escape(data.title)} OUT` "
            "makes it ready to train on.[/]",
            soft_wrap=True,
        )


def _columns_table(report: DataReport) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("column", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    for name in ("distinct", "nulls", "range"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("top 1% have", no_wrap=True)
    table.add_column("Zipf", justify="right", no_wrap=True)
    if has_lists := any(column.lists for column in report.columns):
        table.add_column("list lengths", no_wrap=True)
    table.add_column("suggested", no_wrap=True)
    roles = _roles(report)
    for column in report.columns:
        lists = [_lengths(column)] if has_lists else []
        table.add_row(*_cells(column), *lists, roles.get(column.name, "[dim]left out[/]"))
    return table


def _cells(column: ColumnReport) -> list[str]:
    about = "~" if column.is_estimate else ""
    zipf = "" if column.zipf_exponent is None else f"{column.zipf_exponent:.2f}"
    is_id = column.kind in ("integer", "text")
    return [
        f"[cyan]{escape(column.name)}[/]",
        f"lists of {column.kind}s" if column.lists else column.kind,
        f"{about}{column.num_distinct:,}",
        _nulls(column),
        _range(column),
        _share_bar(column.top_share) if is_id else "",
        zipf if is_id else "",
    ]


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


def _share_bar(share: float | None) -> str:
    if share is None:
        return ""
    filled = round(share * _BAR_WIDTH)
    bar = "█" * filled + f"[dim]{'░' * (_BAR_WIDTH - filled)}[/]"
    return f"{bar} {share:4.0%}"


def _lengths(column: ColumnReport) -> str:
    if column.lists is None:
        return ""
    empty = f", {column.lists.num_empty:,} empty" if column.lists.num_empty else ""
    return f"{column.lists.mean:.1f} on average, at most {column.lists.longest}{empty}"


def _roles(report: DataReport) -> dict[str, str]:
    """What each column is suggested as, in a few words."""
    suggestion = report.suggestion
    sizes = {table["name"]: table for table in suggestion.embedding_tables}
    roles = {suggestion.label: f"[green]label[/] ({suggestion.loss})"} if suggestion.label else {}
    vocabularies = report.data.manifest.vocab_sizes if report.data.manifest else {}
    for feature in suggestion.features:
        text = feature["type"] + (
            "".join(f", {feature[k]}" for k in ("transform",) if k in feature)
        )
        if (table := sizes.get(feature.get("table", ""))) is not None:
            rows = table["num_embeddings"]
            rows = vocabularies.get(feature["name"], rows) if rows == "auto" else rows
            encoding = ", hashed" if "hashing" in feature else ""
            text = f"{feature['type']}{encoding}, table {rows:,} x {table['embedding_dim']}"
        roles[feature["name"]] = text
    return roles

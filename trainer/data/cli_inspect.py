"""`shardloom data inspect`: what data holds and what a job spec could make of it."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trainer.data.cli_common import data_errors_shown, show_summary
from trainer.data.inspect_table import columns_table

if TYPE_CHECKING:
    from trainer.data.inspect_data import DataReport


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
        if not (as_json or spec):
            for report in reports:
                _show(report)
        verified = _verify(sources) if verify else {}
        if as_json:
            print(json.dumps([_as_json(report, verified) for report in reports], indent=2))
        elif spec:
            print("\n".join(report.suggestion.yaml() for report in reports), end="")
        else:
            for number in verified.values():
                Console().print(f"[green]OK:[/] {number} files have the sha256 of the manifest")


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


def _as_json(report: DataReport, verified: dict[str, int]) -> dict[str, Any]:
    """The report and how many files have their sums: null where nobody looked."""
    return report.as_json() | {"num_verified_files": verified.get(_folder(report))}


def _folder(report: DataReport) -> str:
    """What the report is about, without the name of its part."""
    return report.data.title.rsplit(", part ", 1)[0]


def _verify(sources: list[str]) -> dict[str, int]:
    """Check the sums of those sources that are prepared folders; gives their numbers of files."""
    from trainer.data.inspect_data import verify_folder
    from trainer.data.inspect_source import find_manifest
    from trainer.data.storage import Location

    found = {}
    for folder in map(Location.parse, sources):
        if (manifest := find_manifest(folder)) is not None:
            found[str(folder)] = verify_folder(folder, manifest)
    return found


def _show(report: DataReport) -> None:
    data = report.data
    if data.manifest is not None:
        show_summary(_folder(report), data.manifest)
    kind = data.text.text if data.text else "Parquet"
    files = "1 file" if len(data.files) == 1 else f"{len(data.files)} files"
    size_mb = data.size_bytes / 1e6
    console = Console()
    console.print(
        f"\n[bold]{escape(data.title)}[/]\n"
        f"{report.num_rows:,} rows in {files}, {size_mb:,.1f} MB, {kind}",
        soft_wrap=True,
    )
    console.print(columns_table(report, console))
    if data.text and data.text.is_criteo:
        console.print(
            f"[dim]Criteo's format: `shardloom data prepare criteo {escape(data.title)} OUT` "
            "makes it ready to train on.[/]",
            soft_wrap=True,
        )

"""`shardloom data`: prepare, generate and inspect data sets.

Polars and pyarrow are imported inside the commands, so that `--help` stays quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.data.errors import DataError

if TYPE_CHECKING:
    from trainer.data.manifest import Manifest

EXIT_BAD_DATA = 2

app = typer.Typer(name="data", help="Prepare, generate and inspect data.", no_args_is_help=True)
prepare_app = typer.Typer(help="Turn raw data into partitioned Parquet.", no_args_is_help=True)
generate_app = typer.Typer(help="Make up data in a public format.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(generate_app, name="generate")

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT where it was made by this command.")
]


class SplitChoice(StrEnum):
    """How validation rows are chosen by time."""

    GLOBAL = "global"
    PER_USER = "per_user"


@contextmanager
def _data_errors_shown() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(EXIT_BAD_DATA) from None


@prepare_app.command("movielens")
def prepare_movielens_command(
    source: Annotated[Path, typer.Argument(help="Folder with ratings.csv and movies.csv.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    split: Annotated[
        SplitChoice, typer.Option(help="Hold out the last ratings of all, or of each user.")
    ] = SplitChoice.PER_USER,
    validation_fraction: Annotated[float, typer.Option(min=0.001, max=0.999)] = 0.1,
    history_length: Annotated[int, typer.Option(min=1, help="Earlier movies per row.")] = 10,
    min_token_count: Annotated[int, typer.Option(min=1, help="Rarer words are unknown.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest token vocabulary.")] = 20_000,
    num_partitions: Annotated[int, typer.Option(min=1, help="Files per split.")] = 4,
    overwrite: Overwrite = False,
) -> None:
    """Prepare a MovieLens csv folder (ml-latest-small, ml-latest, ml-32m) for training."""
    from trainer.data.prepare.movielens import MovieLensOptions, prepare_movielens

    options = MovieLensOptions(
        split=split.value,
        validation_fraction=validation_fraction,
        history_length=history_length,
        min_token_count=min_token_count,
        max_tokens=max_tokens,
        num_partitions=num_partitions,
    )
    with _data_errors_shown():
        manifest = prepare_movielens(source, out, options=options, overwrite=overwrite)
    _show_summary(out, manifest)


@generate_app.command("movielens")
def generate_movielens_command(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    ratings: Annotated[int, typer.Option(min=1, help="Number of ratings.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Generate ratings, movies and tags in the MovieLens csv format."""
    from trainer.data.prepare.generate import generate_movielens

    with _data_errors_shown():
        generate_movielens(out, num_ratings=ratings, seed=seed, overwrite=overwrite)
    Console().print(f"{ratings} generated ratings in {escape(str(out))}", soft_wrap=True)


@app.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder.")],
    verify: Annotated[
        bool, typer.Option(help="Read every file whole and compare its checksum.")
    ] = True,
) -> None:
    """Show rows, columns and cardinalities of a prepared folder, and check its files."""
    from trainer.data.manifest import load_manifest, verify_checksums

    with _data_errors_shown():
        manifest = load_manifest(folder)
        num_verified = verify_checksums(folder, manifest) if verify else 0
    _show_summary(folder, manifest)
    columns = Table("column", "type", "ids", title="Columns")
    for name, kind in manifest.columns.items():
        columns.add_row(name, kind, str(manifest.vocab_sizes.get(name, "")))
    Console().print(columns)
    if verify:
        Console().print(f"[green]OK:[/] {num_verified} files have the sha256 of the manifest")


def _show_summary(folder: Path, manifest: Manifest) -> None:
    table = Table("what", "value", title=escape(f"{manifest.source} in {folder}"))
    for name, split in manifest.splits.items():
        size_mb = sum(file.size_bytes for file in split.files) / 1e6
        table.add_row(f"{name} rows", f"{split.num_rows} ({size_mb:.1f} MB)")
    for name, size in manifest.vocab_sizes.items():
        if not name.startswith("history_"):
            table.add_row(f"{name} vocabulary", str(size))
    for name, value in manifest.statistics.items():
        label = name.replace("_", " ")
        table.add_row(f"{label} (stars)", f"{value:.4f}")
    Console().print(table)

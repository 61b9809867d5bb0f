"""The commands `shardloom data prepare`, `generate` and `inspect`.

Bad data, or a disk that refuses, is a message on stderr and exit code 2. Polars and pyarrow are
imported inside the commands, so that `--help` stays quick.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape
from rich.progress import SpinnerColumn, TextColumn
from rich.table import Column, Table

from trainer.datasets.criteo.options import CriteoGeneratorOptions, CriteoOptions
from trainer.datasets.movielens.options import MovieLensOptions
from trainer.datasets.parameters import options_from_model
from trainer.errors import EXIT_BAD_DATA, DataError, TooFewRowsError

if TYPE_CHECKING:
    from trainer.data.manifest import Manifest
    from trainer.datasets.inspect import DataReport

app = typer.Typer(name="data", help="Prepare, generate and inspect data.", no_args_is_help=True)
prepare_app = typer.Typer(help="Turn raw data into partitioned Parquet.", no_args_is_help=True)
generate_app = typer.Typer(help="Make up data in a public format.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(generate_app, name="generate")
_MANY_VOCABULARIES = 8
_WIDEST = 1000
Out = Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write.")]
OutFolder = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder for working files; if not named, beside a local OUT, else in the folder for "
        "temporary files."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT where it was made by this command.")
]


@prepare_app.callback()
def _where(
    on: Annotated[
        Literal["here", "cluster"],
        typer.Option(
            help="`cluster`: as a Job in Kubernetes, where the chart is installed; it reads and "
            "writes URLs and /var/lib/shardloom/data. Ctrl-C leaves it to itself."
        ),
    ] = "here",
    namespace: Annotated[
        str, typer.Option(help="Of the chart, with --on cluster.", show_default="shardloom")
    ] = "",
    job: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With --on cluster, in place of a command: show the log of this Job, which may "
            "have ended.",
        ),
    ] = "",
) -> None:
    """Turn raw data into partitioned Parquet."""
    if on == "cluster":
        raise typer.BadParameter("only `shardloom data prepare` does that", param_hint="--on")
    if job:
        raise typer.BadParameter("it is for --on cluster", param_hint="--job")


@contextmanager
def data_errors_shown() -> Iterator[None]:
    """Turn a `DataError`, or a disk that refuses, into a message on stderr and exit code 2."""
    try:
        yield
    except (DataError, OSError) as error:
        text = str(error) if isinstance(error, DataError) else _disk_text(error)
        console = Console(stderr=True)
        console.print(f"[bold red]Error:[/] {escape(text)}", soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(escape(note), soft_wrap=True)
        raise typer.Exit(EXIT_BAD_DATA) from None


def _disk_text(error: OSError) -> str:
    # Polars tells no number of its cause.
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.errno is None
    mend = "is the disk full? Make room" if is_full else "check the path and your rights to it"
    return f"a file cannot be read or written: {error}; {mend}, then run the same command again"


def _vocabulary_rows(sizes: dict[str, int]) -> list[tuple[str, str]]:
    if len(sizes) <= _MANY_VOCABULARIES:
        return [(f"{name} vocabulary", str(size)) for name, size in sizes.items()]
    largest = max(sizes, key=sizes.__getitem__)
    total = f"{sum(sizes.values())} ids, most in {largest}: {sizes[largest]}"
    return [(f"{len(sizes)} vocabularies", total)]


def show_summary(folder: object, manifest: Manifest) -> None:
    """Print rows, vocabularies and statistics of a prepared folder, but those of columns."""
    table = Table("what", "value", title=escape(f"{manifest.source} in {folder}"))
    for name, split in manifest.splits.items():
        size_mb = sum(file.size_bytes for file in split.files) / 1e6
        table.add_row(f"{name} rows", f"{split.num_rows} ({size_mb:.1f} MB)")
    # With the id of what is unknown.
    sizes = {name: entry.num_values + 1 for name, entry in manifest.vocabularies.items()}
    for name, text in _vocabulary_rows(sizes):
        table.add_row(name, text)
    for name, value in manifest.statistics.items():
        if name.rpartition("_")[0] not in manifest.columns:
            table.add_row(name.replace("_", " "), f"{value:.4f}")
    for name, count in manifest.counts.items():
        table.add_row(name.replace("_", " "), str(count))
    console = Console()
    console.print(table)
    for line in manifest.bad_lines:
        console.print(f"left out: {escape(line)}", soft_wrap=True)


@prepare_app.command("criteo")
@options_from_model
def prepare_criteo_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help="Tab-separated files (.gz, .zst, .bz2 too) or folders of them, in time order; "
            "paths, s3:// or gs:// URLs.",
        ),
    ],
    out: Out,
    options: CriteoOptions,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Prepare Criteo click logs (Kaggle's train.txt, Terabyte's day_*) for training.

    Bounded memory, shuffled, the same bytes for the same options. Killed, it goes on where it was
    when the same command runs again.
    """
    from trainer.datasets.criteo.prepare import prepare_criteo

    with data_errors_shown():
        manifest = prepare_criteo(
            sources, out, options=options, overwrite=overwrite, work_folder=work_dir
        )
    show_summary(out, manifest)


@generate_app.command("criteo")
@options_from_model
def generate_criteo_command(
    out: OutFolder, options: CriteoGeneratorOptions, overwrite: Overwrite = False
) -> None:
    """Generate clicks of a known teacher in Criteo's format; its own scores: teacher.json."""
    from trainer.datasets.criteo.synthetic import generate_criteo

    with data_errors_shown():
        document = generate_criteo(out, options, overwrite=overwrite)
    Console().print(_teacher_table(out, document))


def _teacher_table(out: str, document: dict[str, Any]) -> Table:
    names = ("rows", "click rate", "log loss", "NE", "AUC")
    table = Table(
        "part",
        *(Column(name, justify="right") for name in names),
        title=escape(f"{out}: what the teacher itself scores"),
    )
    for name, part in document["parts"].items():
        # A part with clicks only, or none, has no NE and no AUC.
        scores = (part[key] for key in ("click_rate", "logloss", "ne", "auc"))
        texts = ("none" if score is None else f"{score:.4f}" for score in scores)
        table.add_row(name, f"{part['rows']:,}", *texts)
    return table


@app.command("inspect")
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
    from trainer.data.manifest import verify_checksums

    with data_errors_shown():
        reports = _inspect(sources)
        if not (as_json or spec):
            for report in reports:
                _show(report)
        verified = {
            str(data.folder): verify_checksums(data.folder, data.manifest)
            for data in (report.data for report in reports if verify)
            if data.folder and data.manifest
        }
        if as_json:
            documents = [
                report.document() | {"num_verified_files": verified.get(str(report.data.folder))}
                for report in reports
            ]
            # JSON knows no infinities.
            print(to_json(documents, indent=2, inf_nan_mode="null").decode())
        elif spec:
            titles = (" ".join(report.data.title.splitlines()) for report in reports)
            texts = (report.suggestion.yaml() for report in reports)
            parts = (f"# {title}\n{text}" for title, text in zip(titles, texts, strict=True))
            print("---\n".join(parts), end="")
        else:
            for number in verified.values():
                Console().print(f"[green]OK:[/] {number} files have the sha256 of the manifest")


def _inspect(sources: list[str]) -> list[DataReport]:
    from trainer.datasets.inspect import inspect_data
    from trainer.datasets.io.journal import progress_bars
    from trainer.datasets.profile import find_data

    shown = TextColumn("{task.description} {task.completed:,.0f} rows")
    with progress_bars(SpinnerColumn(), shown, transient=True) as progress:
        reports = []
        for data in find_data(sources):
            task = progress.add_task(escape(f"reading {data.title}"), total=None)
            reports.append(inspect_data(data, partial(progress.advance, task)))
    if not any(report.num_rows for report in reports):
        titles = ", ".join(report.data.title for report in reports)
        raise TooFewRowsError(f"there are no rows in {titles}; was it written whole?")
    return reports


def _show(report: DataReport) -> None:
    data = report.data
    if data.manifest is not None:
        show_summary(data.folder, data.manifest)
    kind = data.text.text if data.text else "Parquet"
    files = "1 file" if len(data.files) == 1 else f"{len(data.files)} files"
    size_mb = data.size_bytes / 1e6
    console = Console()
    console.print(
        f"\n[bold]{escape(data.title)}[/]\n"
        f"{report.num_rows:,} rows in {files}, {size_mb:,.1f} MB, {kind}",
        soft_wrap=True,
    )
    from trainer.datasets.inspect import columns_table

    # One line a column, however narrow the terminal is.
    Console(width=_WIDEST).print(columns_table(report))
    if data.text and data.text.command:
        console.print(
            f"[dim]`{data.text.command} {escape(data.title)} OUT` makes it ready to train on.[/]",
            soft_wrap=True,
        )


@prepare_app.command("movielens")
@options_from_model
def prepare_movielens_command(
    source: Annotated[
        str, typer.Argument(help="Folder or URL with ratings.csv, movies.csv and tags.csv.")
    ],
    out: Out,
    options: MovieLensOptions,
    work_dir: WorkDir = None,
    overwrite: Overwrite = False,
) -> None:
    """Prepare a MovieLens csv folder (ml-latest-small, ml-latest, ml-32m) for training.

    Paths may be s3:// or gs:// URLs. Run again after a kill, it goes on where it was.
    """
    from trainer.datasets.movielens.prepare import prepare_movielens

    with data_errors_shown():
        manifest = prepare_movielens(
            source, out, options=options, overwrite=overwrite, work_folder=work_dir
        )
    show_summary(out, manifest)


@generate_app.command("movielens")
def generate_movielens_command(
    out: OutFolder,
    ratings: Annotated[int, typer.Option(min=1, help="Number of ratings.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Generate ratings, movies and tags in the MovieLens csv format."""
    from trainer.datasets.movielens.synthetic import generate_movielens

    with data_errors_shown():
        rmse = generate_movielens(out, num_ratings=ratings, seed=seed, overwrite=overwrite)
    Console().print(
        f"{ratings} generated ratings in {escape(out)}; no predictor can have an RMSE below "
        f"{rmse:.4f} (teacher.json)",
        soft_wrap=True,
    )

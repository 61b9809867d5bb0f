"""`shardloom data prepare criteo` and `shardloom data generate criteo`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.data.cli_common import Overwrite, data_errors_shown, show_summary


class IdsChoice(StrEnum):
    """How raw categorical values become ids."""

    VOCABULARY = "vocabulary"
    HASHING = "hashing"


class NegativesChoice(StrEnum):
    """What the log transform makes of a negative count."""

    ZERO = "zero"
    KEEP_SIGN = "keep_sign"


class CriteoSplitChoice(StrEnum):
    """Which rows are the validation part."""

    LAST_FRACTION = "last_fraction"
    LAST_FILE = "last_file"


class FormatChoice(StrEnum):
    """What `generate` writes."""

    PARQUET = "parquet"
    TSV = "tsv"


def prepare_criteo_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC...",
            help="Tab-separated files (.gz, .zst, .bz2 too) or folders of them, in time order; "
            "paths, s3:// or gs:// URLs.",
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write.")],
    ids: Annotated[
        IdsChoice, typer.Option(help="An id for each frequent value, or hashed ids.")
    ] = IdsChoice.VOCABULARY,
    min_count: Annotated[int, typer.Option(min=1, help="Rarer values are unknown (id 0).")] = 10,
    max_ids: Annotated[
        int, typer.Option(min=1, help="Largest vocabulary of a column.")
    ] = 10_000_000,
    num_hash_buckets: Annotated[
        int, typer.Option(min=2, max=2**31, help="Ids of a column with --ids hashing.")
    ] = 1_000_000,
    negatives: Annotated[
        NegativesChoice, typer.Option(help="Negative counts: 0, or -log(1 - count).")
    ] = NegativesChoice.ZERO,
    split: Annotated[
        CriteoSplitChoice, typer.Option(help="Validate on the last rows or the last file (day).")
    ] = CriteoSplitChoice.LAST_FRACTION,
    validation_fraction: Annotated[float, typer.Option(min=0.00001, max=0.999)] = 0.1,
    on_bad_line: Annotated[
        Literal["fail", "skip"],
        typer.Option(help="A line that cannot be read ends it all, or is left out and counted."),
    ] = "fail",
    max_bad_lines: Annotated[
        float,
        typer.Option(
            min=1e-9,
            help="Most lines to skip: below 1 a share of each file's lines, else a number.",
        ),
    ] = 0.01,
    num_partitions: Annotated[int, typer.Option(min=1, help="Files per split.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of training rows.")] = 0,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for working files, 164 bytes a row; if not named, beside a local OUT, "
            "else in the folder for temporary files."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Prepare Criteo click logs (Kaggle's train.txt, Terabyte's day_*) for training.

    Bounded memory, shuffled, the same bytes for the same options. Killed, it goes on where it was
    when the same command runs again.
    """
    from trainer.data.prepare.criteo import prepare_criteo
    from trainer.data.prepare.criteo_plan import CriteoOptions

    options = CriteoOptions(
        ids=ids.value,
        min_count=min_count,
        max_ids=max_ids,
        num_hash_buckets=num_hash_buckets,
        negatives=negatives.value,
        split=split.value,
        validation_fraction=validation_fraction,
        on_bad_line=on_bad_line,
        max_bad_lines=max_bad_lines,
        num_partitions=num_partitions,
        seed=seed,
    )
    with data_errors_shown():
        manifest = prepare_criteo(
            sources, out, options=options, overwrite=overwrite, work_folder=work_dir
        )
    show_summary(out, manifest)


def generate_criteo_command(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.")],
    rows: Annotated[int, typer.Option(min=10, help="Number of rows.")] = 100_000,
    format: Annotated[
        FormatChoice, typer.Option(help="A prepared folder, or raw files for `prepare criteo`.")
    ] = FormatChoice.PARQUET,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
    zipf: Annotated[float, typer.Option(min=0.01, help="Exponent of the ids' Zipf law.")] = 1.05,
    max_ids: Annotated[
        int, typer.Option(min=1, help="Values of a column; Criteo has up to 10 million.")
    ] = 100_000,
    days: Annotated[int, typer.Option(min=1, help="Raw files: train.txt, or day_0, ...")] = 1,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress the raw files.")] = False,
    num_partitions: Annotated[int, typer.Option(min=1, help="Parquet files per split.")] = 32,
    overwrite: Overwrite = False,
) -> None:
    """Generate clicks of a known teacher in Criteo's format; its own scores: teacher.json."""
    from trainer.data.prepare.generate_criteo import CriteoGeneratorOptions, generate_criteo

    options = CriteoGeneratorOptions(
        num_rows=rows,
        format=format.value,
        seed=seed,
        zipf_exponent=zipf,
        max_ids=max_ids,
        num_days=days,
        gzip=gzip,
        num_partitions=num_partitions,
    )
    with data_errors_shown():
        document = generate_criteo(out, options, overwrite=overwrite)
    Console().print(_teacher_table(out, document))


def _teacher_table(out: str, document: dict[str, Any]) -> Table:
    table = Table(
        "part",
        *("rows", "click rate", "log loss", "NE", "AUC"),
        title=escape(f"{out}: what the teacher itself scores"),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, part in document["parts"].items():
        scores = (part[key] for key in ("click_rate", "logloss", "ne", "auc"))
        table.add_row(name, f"{part['rows']:,}", *map(_score_text, scores))
    return table


def _score_text(score: float | None) -> str:
    """A part with clicks only, or none, has no NE and no AUC."""
    return "none" if score is None else f"{score:.4f}"

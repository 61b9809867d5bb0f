"""`shardloom data`: prepare, generate and inspect data sets.

Polars and pyarrow are imported inside the commands, so that `--help` stays quick.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from trainer.data.cli_common import Overwrite, data_errors_shown, show_summary
from trainer.data.cli_criteo import generate_criteo_command, prepare_criteo_command
from trainer.data.cli_inspect import inspect_command

app = typer.Typer(name="data", help="Prepare, generate and inspect data.", no_args_is_help=True)
prepare_app = typer.Typer(help="Turn raw data into partitioned Parquet.", no_args_is_help=True)
generate_app = typer.Typer(help="Make up data in a public format.", no_args_is_help=True)
app.add_typer(prepare_app, name="prepare")
app.add_typer(generate_app, name="generate")
prepare_app.command("criteo")(prepare_criteo_command)
generate_app.command("criteo")(generate_criteo_command)
app.command("inspect")(inspect_command)


class SplitChoice(StrEnum):
    """How validation rows are chosen by time."""

    GLOBAL = "global"
    PER_USER = "per_user"


class UserMeanChoice(StrEnum):
    """What a label is taken relative to."""

    PAST = "past"
    TRAINING = "training"


class ValidationPastChoice(StrEnum):
    """Which of a user's earlier ratings a held-out row may look back at."""

    ALL = "all"
    TRAINING = "training"


class OnDuplicateChoice(StrEnum):
    """What to do with a second rating of a movie by a user."""

    FAIL = "fail"
    LAST = "last"


class OnMissingMovieChoice(StrEnum):
    """What to do with a rated movie that movies.csv does not describe."""

    KEEP = "keep"
    FAIL = "fail"


@prepare_app.command("movielens")
def prepare_movielens_command(
    source: Annotated[
        str, typer.Argument(help="Folder or URL with ratings.csv, movies.csv and tags.csv.")
    ],
    out: Annotated[str, typer.Argument(help="Folder or URL to write.")],
    split: Annotated[
        SplitChoice, typer.Option(help="Hold out the last ratings of all, or of each user.")
    ] = SplitChoice.PER_USER,
    validation_fraction: Annotated[float, typer.Option(min=0.001, max=0.999)] = 0.1,
    history_length: Annotated[int, typer.Option(min=1, help="Earlier movies per row.")] = 10,
    min_token_count: Annotated[int, typer.Option(min=1, help="Rarer words are unknown.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest token vocabulary.")] = 20_000,
    num_partitions: Annotated[int, typer.Option(min=1, help="Most files per split.")] = 32,
    user_mean: Annotated[
        UserMeanChoice,
        typer.Option(help="Labels are relative to a user's earlier, or all training ratings."),
    ] = UserMeanChoice.PAST,
    validation_past: Annotated[
        ValidationPastChoice,
        typer.Option(help="Held-out rows look back at all earlier ratings, or training ones."),
    ] = ValidationPastChoice.ALL,
    on_duplicate: Annotated[
        OnDuplicateChoice,
        typer.Option(help="A movie rated twice by a user: fail, or keep the latest rating."),
    ] = OnDuplicateChoice.FAIL,
    on_missing_movie: Annotated[
        OnMissingMovieChoice,
        typer.Option(help="A rated movie without metadata: keep it without genres, or fail."),
    ] = OnMissingMovieChoice.KEEP,
    delimiter: Annotated[str, typer.Option(help="What splits the cells of the csv files.")] = ",",
    unit_rows: Annotated[int, typer.Option(min=1000, help="Ratings held in memory at a time.")] = 1
    << 20,
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder for working files, if not beside OUT.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Prepare a MovieLens csv folder (ml-latest-small, ml-latest, ml-32m) for training.

    Paths may be s3:// or gs:// URLs. Run again after a kill, it goes on where it was.
    """
    if len(delimiter) != 1:
        raise typer.BadParameter(f"{delimiter!r} is not one character", param_hint="--delimiter")
    from trainer.data.prepare.movielens import MovieLensOptions, prepare_movielens

    options = MovieLensOptions(
        split=split.value,
        validation_fraction=validation_fraction,
        history_length=history_length,
        min_token_count=min_token_count,
        max_tokens=max_tokens,
        num_partitions=num_partitions,
        user_mean=user_mean.value,
        validation_past=validation_past.value,
        on_duplicate=on_duplicate.value,
        on_missing_movie=on_missing_movie.value,
        delimiter=delimiter,
        unit_rows=unit_rows,
    )
    with data_errors_shown():
        manifest = prepare_movielens(
            source, out, options=options, overwrite=overwrite, work_folder=work_dir
        )
    show_summary(out, manifest)


@generate_app.command("movielens")
def generate_movielens_command(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    ratings: Annotated[int, typer.Option(min=1, help="Number of ratings.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Generate ratings, movies and tags in the MovieLens csv format."""
    from trainer.data.prepare.generate import generate_movielens

    with data_errors_shown():
        score = generate_movielens(out, num_ratings=ratings, seed=seed, overwrite=overwrite)
    Console().print(
        f"{ratings} generated ratings in {escape(str(out))}; no predictor can have an RMSE below "
        f"{score.irreducible_rmse:.4f} (teacher.json)",
        soft_wrap=True,
    )

"""The command that brings the database of the service to its version: migrate."""

from __future__ import annotations

from typing import Annotated

import typer


def migrate(
    check: Annotated[
        bool,
        typer.Option("--check", help="Change nothing; exit with 1 if the database is behind."),
    ] = False,
) -> None:
    """Bring the service's database to this version; run it where SHARDLOOM_DATABASE_URL is set.

    Several at once wait for the first. The service does the same when it starts.
    """
    # It opens the database, which needs what the CLI itself does not import.
    from service.migrate import main

    raise typer.Exit(main(check=check))

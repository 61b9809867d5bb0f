"""Commands of other packages, found by entry point and imported only when they are called.

A package names a Typer app in the entry point group `shardloom.commands`; its name becomes the
command. So the CLI needs neither torch nor polars until a command does.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer

from service.commands.context import error_console
from service.commands.exits import UNAVAILABLE

GROUP = "shardloom.commands"
_HELP = {"data": "Prepare and generate training data."}


def add_plugins(app: typer.Typer, *, rich_help_panel: str) -> None:
    """Add every plugged-in command to `app`, under a heading of its help; imports none of them."""
    for entry in entry_points(group=GROUP):
        app.command(
            entry.name,
            help=_HELP.get(entry.name, f"Commands of {entry.module}."),
            rich_help_panel=rich_help_panel,
            add_help_option=False,
            # Everything behind the name, --help included, belongs to the plug-in.
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_forward(entry))


def _forward(entry: EntryPoint) -> Callable[[typer.Context], None]:
    def command(ctx: typer.Context) -> None:
        sub_app = _load(entry)
        sub_app(args=ctx.args, prog_name=f"shardloom {entry.name}")

    return command


def _load(entry: EntryPoint) -> Callable[..., None]:
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        if missing.partition(".")[0] in ("trainer", "service"):
            raise
        extra = ",".join(entry.extras) or entry.name
        error_console().print(
            f"`shardloom {entry.name}` needs the package {missing}, which is not installed: "
            f"pip install 'shardloom[{extra}]'"
        )
        raise typer.Exit(UNAVAILABLE) from None

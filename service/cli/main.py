"""The command line: `shardloom COMMAND`.

Commands of other packages, found by entry point and imported only when they are called.

A package names a Typer app in the entry point group `shardloom.commands`; its name becomes the
command. So the CLI needs neither torch nor polars until a command does.

Exit codes are listed in `service.cli.common`, settings that come from the environment in
`service.settings`; SHARDLOOM_URL names the service to talk to.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from service.cli import admin, artifacts, jobs, machines, stack, submit
from service.cli.common import UNAVAILABLE, ErrorReportingGroup, error_console

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


# The command line: `shardloom COMMAND`. Imports no torch, Ray, FastAPI or SQLAlchemy.

STACK_PANEL = "The local stack"
JOB_PANEL = "Jobs"
READ_PANEL = "What a job left"
EXPORT_PANEL = "Trained models"
ACCESS_PANEL = "Access"
TOOL_PANEL = "Tools"


def build_app() -> typer.Typer:
    """The whole CLI, plug-ins included."""
    app = typer.Typer(
        cls=ErrorReportingGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train recommendation models on 2D-sharded embeddings.",
    )
    app.callback()(_root)
    command: Callable[..., None]
    for command in (stack.up, stack.down, stack.status, stack.cluster):
        app.command(rich_help_panel=STACK_PANEL)(command)
    for command in (machines.join, machines.leave):
        app.command(rich_help_panel=STACK_PANEL)(command)
    app.add_typer(stack.host_app, name="host", rich_help_panel=STACK_PANEL)
    for command in (submit.run, submit.submit, submit.plan, submit.cancel, jobs.ps):
        app.command(rich_help_panel=JOB_PANEL)(command)
    app.command("follow", rich_help_panel=JOB_PANEL)(submit.follow_job)
    for command in (jobs.resize, jobs.drain):
        app.command(rich_help_panel=JOB_PANEL)(command)
    for command in (jobs.pause, jobs.resume, jobs.clone, jobs.restart):
        app.command(rich_help_panel=JOB_PANEL)(command)
    for command in (jobs.delete, admin.queue):
        app.command(rich_help_panel=JOB_PANEL)(command)
    app.command(rich_help_panel=JOB_PANEL)(artifacts.trace)
    for command in (jobs.show, artifacts.logs, jobs.metrics, jobs.events, jobs.checkpoints):
        app.command(rich_help_panel=READ_PANEL)(command)
    app.command(rich_help_panel=READ_PANEL)(artifacts.traces)
    for command in (artifacts.export, artifacts.exports, artifacts.serve):
        app.command(rich_help_panel=EXPORT_PANEL)(command)
    for command in (admin.login, admin.logout, admin.whoami, admin.audit):
        app.command(rich_help_panel=ACCESS_PANEL)(command)
    app.add_typer(admin.keys_app, name="keys", rich_help_panel=ACCESS_PANEL)
    app.add_typer(admin.projects_app, name="projects", rich_help_panel=ACCESS_PANEL)
    app.command(rich_help_panel=TOOL_PANEL)(admin.migrate)
    app.command(rich_help_panel=TOOL_PANEL)(jobs.recover)
    app.add_typer(admin.webhooks_app, name="webhooks", rich_help_panel=TOOL_PANEL)
    app.add_typer(submit.spec_app, name="spec", rich_help_panel=TOOL_PANEL)
    add_plugins(app, rich_help_panel=TOOL_PANEL)
    return app


def main() -> None:
    """Entry point of the `shardloom` command."""
    build_app()()


def _print_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"shardloom {version('shardloom')}")
        except PackageNotFoundError:
            typer.echo("shardloom (not installed, run from its source tree)")
        raise typer.Exit()


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train recommendation models on 2D-sharded embeddings."""

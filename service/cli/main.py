"""The `shardloom` command: its commands by heading, and those that other packages plug in.

A package names a Typer app in the entry point group `shardloom.commands`; its name becomes the
command, and it is imported only when it is called. So the CLI needs no torch, Ray, polars, FastAPI
or SQLAlchemy until a command does. Exit codes: docs/reference/cli.md; settings from the
environment: `service.settings`. SHARDLOOM_URL names the service to talk to.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Annotated

import typer

from service.cli import admin, artifacts, data, jobs, stack, submit, sweeps
from service.cli.common import UNAVAILABLE, ErrorReportingGroup, error_console

GROUP = "shardloom.commands"
_HELP = {"data": "Prepare and generate training data."}
_TOOLS = "Tools"
_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "The local stack": {
        "up": stack.up,
        "down": stack.down,
        "status": stack.status,
        "cluster": stack.cluster,
        "host": stack.host_app,
    },
    "Jobs": {
        "run": submit.run,
        "submit": submit.submit,
        "plan": submit.plan,
        "cancel": submit.cancel,
        "ps": jobs.ps,
        "follow": submit.follow_job,
        "resize": jobs.resize,
        "drain": jobs.drain,
        "pause": jobs.pause,
        "resume": jobs.resume,
        "clone": jobs.clone,
        "restart": jobs.restart,
        "delete": jobs.delete,
        "queue": admin.queue,
        "trace": artifacts.trace,
    },
    "Searches for settings": {"sweep": sweeps.sweep, "sweeps": sweeps.sweeps_app},
    "What a job left": {
        "show": jobs.show,
        "logs": artifacts.logs,
        "metrics": jobs.metrics,
        "events": jobs.events,
        "checkpoints": jobs.checkpoints,
        "traces": artifacts.traces,
    },
    "Trained models": {
        "export": artifacts.export,
        "exports": artifacts.exports,
        "serve": artifacts.serve,
    },
    "Access": {
        "login": admin.login,
        "logout": admin.logout,
        "whoami": admin.whoami,
        "audit": admin.audit,
        "keys": admin.keys_app,
        "projects": admin.projects_app,
    },
    _TOOLS: {
        "migrate": admin.migrate,
        "recover": jobs.recover,
        "webhooks": admin.webhooks_app,
        "spec": submit.spec_app,
    },
}


def add_plugins(app: typer.Typer) -> None:
    """Add every plugged-in command to `app`; imports none of them."""
    for entry in entry_points(group=GROUP):
        app.command(
            entry.name,
            help=_HELP.get(entry.name, f"Commands of {entry.module}."),
            rich_help_panel=_TOOLS,
            add_help_option=False,
            # Everything behind the name, --help included, belongs to the plug-in.
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_forward(entry))


def _forward(entry: EntryPoint) -> Callable[[typer.Context], None]:
    def command(ctx: typer.Context) -> None:
        if entry.name == "data" and (on_cluster := data.cluster_command(ctx.args)):
            data.run(on_cluster)
            return
        try:
            sub_app = entry.load()
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
        sub_app(args=ctx.args, prog_name=f"shardloom {entry.name}")

    return command


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
    for panel, commands in _COMMANDS.items():
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(command)
    add_plugins(app)
    return app


def main() -> None:
    # None where the caller closed it. Not every terminal has the letters of every text; standard
    # error writes their codes by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
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

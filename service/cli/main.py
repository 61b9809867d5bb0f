"""The `shardloom` command: its commands by heading.

It needs no torch, Ray, polars, FastAPI or SQLAlchemy until a command does. Exit codes:
docs/reference/cli.md; settings from the environment: `service.settings`. SHARDLOOM_URL names the
service to talk to.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from service.cli import admin, artifacts, data, jobs, stack, submit, sweeps
from service.cli.common import ErrorReportingGroup

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


def build_app() -> typer.Typer:
    """The whole CLI."""
    app = typer.Typer(
        cls=ErrorReportingGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for panel, commands in _COMMANDS.items():
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(command)
    app.command(
        rich_help_panel=_TOOLS,
        add_help_option=False,
        # Everything behind the name, --help included, is the trainer's.
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(data.data)
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

"""The command line: `shardloom COMMAND`. Imports no torch, Ray, FastAPI or SQLAlchemy.

Exit codes are listed in `service.commands.exits`, settings that come from the environment in
`service.settings`; SHARDLOOM_URL names the service to talk to.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from service.commands import (
    cluster,
    export,
    hosts,
    jobs,
    keys,
    lifecycle,
    logs,
    machines,
    migrate,
    projects,
    queue,
    resizing,
    spec,
    stack,
    submit,
    traces,
    webhooks,
)
from service.commands.failures import ErrorReportingGroup
from service.commands.plugins import add_plugins

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
    for command in (stack.up, stack.down, stack.status, cluster.cluster):
        app.command(rich_help_panel=STACK_PANEL)(command)
    for command in (machines.join, machines.leave):
        app.command(rich_help_panel=STACK_PANEL)(command)
    app.add_typer(hosts.app, name="host", rich_help_panel=STACK_PANEL)
    for command in (submit.run, submit.submit, submit.plan, submit.cancel, jobs.ps):
        app.command(rich_help_panel=JOB_PANEL)(command)
    app.command("follow", rich_help_panel=JOB_PANEL)(submit.follow_job)
    for command in (resizing.resize, resizing.drain):
        app.command(rich_help_panel=JOB_PANEL)(command)
    for command in (lifecycle.pause, lifecycle.resume, lifecycle.clone, lifecycle.restart):
        app.command(rich_help_panel=JOB_PANEL)(command)
    for command in (lifecycle.delete, queue.queue):
        app.command(rich_help_panel=JOB_PANEL)(command)
    app.command(rich_help_panel=JOB_PANEL)(traces.trace)
    for command in (jobs.show, logs.logs, jobs.metrics, jobs.events, jobs.checkpoints):
        app.command(rich_help_panel=READ_PANEL)(command)
    app.command(rich_help_panel=READ_PANEL)(traces.traces)
    for command in (export.export, export.exports, export.serve):
        app.command(rich_help_panel=EXPORT_PANEL)(command)
    for command in (keys.login, keys.logout, keys.whoami, keys.audit):
        app.command(rich_help_panel=ACCESS_PANEL)(command)
    app.add_typer(keys.app, name="keys", rich_help_panel=ACCESS_PANEL)
    app.add_typer(projects.app, name="projects", rich_help_panel=ACCESS_PANEL)
    app.command(rich_help_panel=TOOL_PANEL)(migrate.migrate)
    app.command(rich_help_panel=TOOL_PANEL)(lifecycle.recover)
    app.add_typer(webhooks.app, name="webhooks", rich_help_panel=TOOL_PANEL)
    app.add_typer(spec.app, name="spec", rich_help_panel=TOOL_PANEL)
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


if __name__ == "__main__":
    main()

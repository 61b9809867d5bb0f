"""Commands about projects: `shardloom projects list|show|set|remove`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from service.api.queue_schemas import ProjectOut
from service.commands import context
from service.commands.context import JsonOption, UrlOption, print_json

app = typer.Typer(no_args_is_help=True, help="Quotas of projects, and what is in use.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the project.")]


@app.command("list")
def list_projects(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List projects that have quotas or jobs that have not ended."""
    with context.open_client(url) as client:
        found = client.projects()
    if as_json:
        print_json(found)
    elif found:
        context.console().print(_table(found))
    else:
        context.console().print("no projects yet; `project: NAME` in a spec makes one")


@app.command()
def show(name: NameArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the quotas of a project and what its jobs hold."""
    with context.open_client(url) as client:
        _print(client.project(name), as_json=as_json)


@app.command("set")
def set_quotas(
    name: NameArgument,
    max_workers: Annotated[
        int | None, typer.Option(min=0, help="Most workers at the same time (default: no limit).")
    ] = None,
    max_running_jobs: Annotated[
        int | None, typer.Option(min=0, help="Most jobs at the same time (default: no limit).")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set both quotas of a project; what runs already is left to run."""
    with context.open_client(url) as client:
        changed = client.set_quotas(
            name, max_workers=max_workers, max_running_jobs=max_running_jobs
        )
    _print(changed, as_json=as_json)


@app.command()
def remove(name: NameArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Take the quotas of a project away; its jobs stay."""
    with context.open_client(url) as client:
        client.remove_quotas(name)
    if as_json:
        print_json({"name": name, "removed": True})
    else:
        typer.echo(f"project {name} has no quotas any more")


def _print(project: ProjectOut, *, as_json: bool) -> None:
    if as_json:
        print_json(project)
    else:
        context.console().print(_table([project]))


def _table(projects: list[ProjectOut]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("PROJECT", "WORKERS", "RUNNING", "QUEUED"):
        table.add_column(heading)
    for each in projects:
        table.add_row(
            each.name,
            _of(each.num_workers, each.max_workers),
            _of(each.num_running_jobs, each.max_running_jobs),
            str(each.num_queued_jobs),
        )
    return table


def _of(used: int, most: int | None) -> str:
    return str(used) if most is None else f"{used} of {most}"

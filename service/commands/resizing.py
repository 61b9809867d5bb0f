"""Commands that place a running job anew: resize, drain."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from service.api.schemas import WishOut
from service.commands import context
from service.commands.context import JobArgument, JsonOption, UrlOption, print_json


def resize(
    job: JobArgument,
    workers: Annotated[int, typer.Argument(min=1, metavar="N", help="How many workers.")],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Grow or shrink a running job to N workers.

    N is a multiple of shard_group_size within parallelism.workers. Groups that stay train on.
    """
    with context.open_client(url) as client:
        _print_wish(job, client.resize(job, workers), as_json=as_json)


def drain(
    job: JobArgument,
    host: Annotated[str, typer.Argument(metavar="HOST", help="As `shardloom show` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Use the host again.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a running job leave a host in good order, before its maintenance."""
    with context.open_client(url) as client:
        _print_wish(job, client.drain(job, host, undo=undo), as_json=as_json)


def _print_wish(job: str, wish: WishOut, *, as_json: bool) -> None:
    if as_json:
        print_json(wish)
        return
    size = f"{wish.workers} workers" if wish.workers else "its workers"
    hosts = f" without {', '.join(wish.drain_hosts)}" if wish.drain_hosts else ""
    typer.echo(f"asked for {size}{hosts}")
    hint = f"`shardloom events -f {job}` tells when it is so"
    context.error_console().print(Text(hint, style="dim"))

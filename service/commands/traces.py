"""Commands about profiler traces: trace, traces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from service.api.schemas import TraceOut, TraceRequested
from service.client import ShardloomClient
from service.commands import context
from service.commands.context import JobArgument, JsonOption, UrlOption, console, print_json
from service.commands.render import traces_table


def trace(
    job: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many steps to record.")] = 3,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="A rank to record; repeatable (default 0).")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the trace is written.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the files in a folder, once they are written."),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record the next steps of a running job with torch.profiler.

    A trace shows training only: it ends early where a checkpoint or a validation begins.

    The files are gzipped traces in Chrome's format: open them at https://ui.perfetto.dev.
    """
    with context.open_client(url) as client:
        requested = client.request_trace(job, num_steps=steps, ranks=rank or (0,))
        if not wait and out is None:
            _print_requested(job, requested, as_json=as_json)
            return
        written = client.wait_for_traces(job, requested)
        if as_json:
            print_json(written)
        elif out is None:
            console().print(traces_table(written, time.time()))
        if out is not None:
            _save(client, job, written, out, is_quiet=as_json)


def traces(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the traces of a job."""
    with context.open_client(url) as client:
        found = client.traces(job)
    if as_json:
        print_json(found)
    elif not found:
        console().print(f"no traces yet; `shardloom trace {job}` records one")
    else:
        console().print(traces_table(found, time.time()))


def _save(
    client: ShardloomClient, job: str, written: list[TraceOut], folder: Path, *, is_quiet: bool
) -> None:
    for each in written:
        try:
            path = client.download_trace(job, each, folder)
        except OSError as error:
            raise typer.BadParameter(f"cannot write to {folder}: {error.strerror}") from None
        if not is_quiet:
            console().print(str(path), soft_wrap=True)


def _print_requested(job: str, requested: TraceRequested, *, as_json: bool) -> None:
    if as_json:
        print_json(requested)
        return
    typer.echo(requested.id)
    hint = f"is asked for; `shardloom traces {job}` lists it once it is written"
    context.error_console().print(Text(f"the trace {hint}", style="dim"))

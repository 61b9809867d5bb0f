"""The command that shows the cluster behind the service."""

from __future__ import annotations

import typer
from rich.table import Table
from rich.text import Text

from service.api.schemas import ClusterOut
from service.commands import context
from service.commands.context import JsonOption, UrlOption, console, print_json
from service.commands.exits import UNAVAILABLE
from service.commands.formats import human_bytes


def cluster(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the cluster behind the service and its hosts; exit code 3 if it does not answer."""
    with context.open_client(url) as client:
        found = client.cluster()
    if as_json:
        print_json(found)
    else:
        _print_page(found)
    if not found.reachable:
        raise typer.Exit(UNAVAILABLE)


def _print_page(found: ClusterOut) -> None:
    state = Text("answers", "green") if found.reachable else Text("does not answer", "red")
    console().print(Text.assemble(f"{found.backend} at {found.address} ", state))
    console().print(Text(found.message, style="dim"))
    if found.max_workers:
        console().print(f"grows by itself to room for {found.max_workers} workers")
    if found.hosts:
        table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0), pad_edge=False)
        table.add_column("Host")
        for heading in ("CPUs", "GPUs", "Memory"):
            table.add_column(heading, justify="right")
        for host in found.hosts:
            memory = human_bytes(host.memory_bytes)
            table.add_row(host.address, f"{host.num_cpus:g}", f"{host.num_gpus:g}", memory)
        console().print(table)

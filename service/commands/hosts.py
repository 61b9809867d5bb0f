"""`shardloom host`: further hosts of the local stack, to see jobs lose one and get one back."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from service.commands.context import JsonOption, console, print_json
from service.local import LocalStack
from service.local_hosts import CPUS_PER_HOST, LocalHosts
from service.local_ray import NODE_IP
from service.local_state import StackHome

app = typer.Typer(
    no_args_is_help=True, help="Hosts of the local stack: Ray nodes with addresses of their own."
)

Address = Annotated[str, typer.Argument(help="Loopback address of the host, as 127.0.0.3.")]


@app.command()
def add(
    address: Annotated[
        str | None, typer.Argument(help="Loopback address (default: the next free one).")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Logical CPUs of it.")] = CPUS_PER_HOST,
) -> None:
    """Start another host; jobs that may grow take it."""
    console().print(f"host {_hosts().add(address, cpus)} is there")


@app.command()
def kill(address: Address) -> None:
    """End everything on a host at once, as a power cut would."""
    num_processes = _hosts().kill(address)
    console().print(f"host {address} is gone, with {num_processes} processes")


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the hosts."""
    addresses = [NODE_IP, *_hosts().running()]
    if as_json:
        print_json({"head": NODE_IP, "hosts": addresses})
        return
    table = Table("host", "role")
    for address in addresses:
        table.add_row(address, "head" if address == NODE_IP else "worker")
    console().print(table)


def _hosts() -> LocalHosts:
    return LocalHosts(LocalStack(StackHome.from_environment()))

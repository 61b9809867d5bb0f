"""`shardloom host`: further hosts of the local stack, to see jobs lose one and get one back."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from service.commands.context import JsonOption, console, print_json
from service.commands.formats import human_bytes
from service.local import LocalStack
from service.local_hosts import CPUS_PER_HOST, LocalHosts
from service.local_ray import NODE_IP
from service.local_state import StackError, StackHome
from service.machine_ray import RayState

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
    """List the hosts; on a head the machines that have joined, too."""
    stack = LocalStack(StackHome.from_environment())
    state = stack.running()
    if state is not None and state.head_address is not None and state.ray_address is not None:
        _list_machines(RayState(state.ray_address, stack.home.token()), as_json=as_json)
        return
    addresses = [NODE_IP, *_hosts().running()]
    if as_json:
        print_json({"head": NODE_IP, "hosts": addresses})
        return
    table = Table("host", "role")
    for address in addresses:
        table.add_row(address, "head" if address == NODE_IP else "worker")
    console().print(table)


def _list_machines(ray: RayState, *, as_json: bool) -> None:
    nodes = ray.live_nodes()
    if nodes is None:
        raise StackError(f"Ray does not answer at {ray.ray_address}; `shardloom down` and `up`")
    nodes = sorted(nodes, key=lambda node: (not node.is_head, node.address))
    if as_json:
        head = next((node.address for node in nodes if node.is_head), None)
        print_json({"head": head, "hosts": [node.address for node in nodes]})
        return
    table = Table("host", "role", "CPUs", "GPUs", "memory")
    for node in nodes:
        role = "head" if node.is_head else "worker"
        memory = human_bytes(node.memory_bytes)
        table.add_row(node.address, role, f"{node.num_cpus:g}", f"{node.num_gpus:g}", memory)
    console().print(table)


def _hosts() -> LocalHosts:
    return LocalHosts(LocalStack(StackHome.from_environment()))

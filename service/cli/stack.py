"""Commands of the local stack (up, down, status, host) and of the cluster behind the service."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from service.cli import common
from service.cli.common import (
    HERE,
    UNAVAILABLE,
    Client,
    JsonOption,
    UrlOption,
    console,
    error_console,
    print_answer,
    print_dim,
    print_hint,
    print_json,
)
from service.cli.render import facts_grid, plain_table
from service.client.credentials import local_token
from service.client.errors import ShardloomError
from service.domain.auth import login_code
from service.local.ray_node import NODE_IP
from service.local.stack import CPUS_PER_HOST, LocalStack
from service.local.state import StackHome, StackState
from service.schemas.admin import ClusterOut
from service.schemas.wording import age, size


def cluster(client: Client = HERE, as_json: JsonOption = False) -> None:
    """Show the cluster behind the service and its hosts; exit code 3 if it does not answer."""
    found = client.cluster()
    print_answer(found, _cluster_page(found), as_json=as_json)
    if not found.reachable:
        raise typer.Exit(UNAVAILABLE)


def _cluster_page(found: ClusterOut) -> RenderableType:
    state = Text("answers", "green") if found.reachable else Text("does not answer", "red")
    parts: list[RenderableType] = [
        Text.assemble(f"{found.backend} at {found.address} ", state),
        Text(found.message, style="dim"),
    ]
    if found.max_workers:
        parts.append(f"autoscales up to {found.max_workers} workers")
    if found.hosts:
        table = plain_table("Host", ">CPUs", ">GPUs", ">Memory")
        for host in found.hosts:
            memory = size(host.memory_bytes)
            table.add_row(host.address, f"{host.num_cpus:g}", f"{host.num_gpus:g}", memory)
        parts.append(table)
    return Group(*parts)


# ---- `shardloom host`: further hosts of the local stack

host_app = typer.Typer(
    no_args_is_help=True, help="Hosts of the local stack: Ray nodes with addresses of their own."
)
Address = Annotated[str, typer.Argument(help="Loopback address of the host, as 127.0.0.3.")]


@host_app.command()
def add(
    address: Annotated[
        str | None, typer.Argument(help="Loopback address (default: the next free one).")
    ] = None,
    cpus: Annotated[int, typer.Option(min=1, help="Logical CPUs of it.")] = CPUS_PER_HOST,
) -> None:
    """Start another host; jobs that may grow take it."""
    console().print(f"host {_stack().add_host(address, cpus)} is there")


@host_app.command()
def kill(address: Address) -> None:
    """End everything on a host at once, as a power cut would."""
    num_processes = _stack().kill_host(address)
    console().print(f"host {address} is gone, with {num_processes} processes")


@host_app.command()
def ls(as_json: JsonOption = False) -> None:
    """List the hosts."""
    hosts = [NODE_IP, *_stack().running_hosts()]
    if as_json:
        print_json({"head": NODE_IP, "hosts": hosts})
        return
    table = plain_table("Host", "Role")
    for address in hosts:
        table.add_row(address, "head" if address == NODE_IP else "worker")
    console().print(table)


def _stack() -> LocalStack:
    return LocalStack(StackHome())


# ---- up, down, status


def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the service (default 8700).")
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=16, help="Hosts that the local Ray has, the head included.")
    ] = 1,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Let anybody on this machine use the service as its owner."),
    ] = False,
) -> None:
    """Start the service and a local Ray; without --detach Ctrl-C stops them again.

    Without --detach that Ray and its jobs end with the service, also with one that was killed.

    SHARDLOOM_HOME names the folder of everything it keeps (default ~/.shardloom), and
    SHARDLOOM_RAY_ADDRESS a Ray cluster to use instead of a local one, as of several machines.
    """
    home = StackHome()
    stack = LocalStack(home, os.environ | ({"SHARDLOOM_AUTH": "none"} if no_auth else {}))
    before, is_up = home.read_state(), stack.running() is not None
    if is_up:
        console().print("Shardloom is already up")
    # A supervisor's SIGTERM and a closed terminal end the command as Ctrl-C does; not under nohup.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        state = _start(stack, port, console(), hosts)
    except KeyboardInterrupt:
        # It stops whatever is not detached, a Ray that was there before as well.
        if before is not None and not is_up and not detach:
            stack.down(print_dim, only=before)
        raise
    _print_addresses(home, state)
    if not is_up:
        _stay(stack, state, detach=detach)


def down() -> None:
    """Stop the local service and its Ray; jobs that run go on at the next start."""
    if not _stack().down(console().print):
        console().print("nothing was running")


def status(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Say whether the service and its cluster answer; exit code 3 if the service does not."""
    home = StackHome()
    state = home.read_state() if url is None else None
    with common.open_client(url) as client:
        error = client.why_not_alive()
        is_alive, cluster = error is None, None
        if is_alive:
            try:
                cluster = client.cluster()
            except ShardloomError as refused:
                error = refused
        if as_json:
            print_json(
                {
                    "url": client.base_url,
                    "service_alive": is_alive,
                    "cluster": cluster,
                    "stack": state,
                }
            )
        else:
            console().print(_status_page(client.base_url, is_alive, cluster, home, state))
            if error is not None:
                console().print(common.describe(error))
            if is_alive:
                if url is None and state is None:
                    print_dim(f"no stack of {home.root} (SHARDLOOM_HOME) runs; this is another")
                _print_link(client.base_url)
    if not is_alive:
        raise typer.Exit(UNAVAILABLE)


def ensure_running() -> None:
    """Start the stack in the background unless it runs; raises `StackError`."""
    stack = _stack()
    if stack.running() is None:
        state = _start(stack, None, error_console())
        print_hint(f"{state.url}  (`shardloom down` stops it)")


def _start(stack: LocalStack, port: int | None, output: Console, num_hosts: int = 1) -> StackState:
    """Start a stack, with a spinner where there is a terminal, above which milestones stand."""
    report = partial(print_dim, output=output)
    with output.status("starting Shardloom", spinner="dots"):
        return stack.up(port=port, num_hosts=num_hosts, report=report)


def _stay(stack: LocalStack, state: StackState, *, detach: bool) -> None:
    """Keep the stack in the foreground until it ends, unless it is to be left running."""
    if detach:
        print_dim("`shardloom down` stops it")
        return
    try:
        print_dim("Ctrl-C stops it")
        message = stack.wait_until_broken(state)
    except KeyboardInterrupt:
        console().print("stopping")
        stack.down(print_dim, only=state)
        return
    if stack.was_ended(state):
        return
    error_console().print(message)
    stack.down(print_dim, only=state)
    raise typer.Exit(UNAVAILABLE)


def _print_addresses(home: StackHome, state: StackState) -> None:
    grid = facts_grid()
    grid.add_row("dashboard", state.url)
    grid.add_row("API", f"{state.url}/v1  (docs: {state.url}/docs)")
    if state.ray_address:
        grid.add_row("Ray", f"{state.ray_address}")
    grid.add_row("files", str(home.root))
    console().print(grid)
    _print_link(state.url)


def _print_link(url: str) -> None:
    """Print what lets a browser in, where the service in this home gave its user a token."""
    if token := local_token(url):
        print_dim("this link opens the dashboard once, within an hour:")
        link = f"{url}/login?code={login_code(token, time.time())}"
        # Whole, or it could not be copied.
        console().print(link, soft_wrap=True)


def _status_page(
    url: str, is_alive: bool, cluster: ClusterOut | None, home: StackHome, state: StackState | None
) -> RenderableType:
    grid = facts_grid()
    answer = Text("answers", style="green") if is_alive else Text("does not answer", style="red")
    grid.add_row("service", Text.assemble(url, "  ", answer))
    if cluster is not None:
        works = cluster.reachable
        word = Text("reachable", style="green") if works else Text("unreachable", style="red")
        grid.add_row(
            "cluster", Text.assemble(f"{cluster.backend} {cluster.address}".strip(), "  ", word)
        )
        if cluster.message:
            grid.add_row("", Text(cluster.message, style="dim"))
    if state is not None:
        grid.add_row("started", age(state.started_at, time.time()))
        grid.add_row("logs", str(home.log_path("service").parent))
    return grid

"""Commands of the local stack (up, down, status, host) and of the cluster behind the service."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.cli import common, machines
from service.cli.common import (
    UNAVAILABLE,
    JsonOption,
    UrlOption,
    console,
    error_console,
    print_answer,
    print_json,
)
from service.cli.machines import print_dim
from service.cli.render import facts_grid, plain_table
from service.client.credentials import local_token
from service.client.errors import ShardloomError
from service.domain.auth import login_code
from service.local.join import JoinedMachine
from service.local.ray_node import (
    NODE_IP,
    NODE_PORT,
    RAY_DASHBOARD_PORT,
    RAY_PORT,
    WORKER_PORTS,
    MachineHead,
    RayState,
)
from service.local.stack import CPUS_PER_HOST, LocalStack, Report
from service.local.state import StackError, StackHome, StackState
from service.schemas.admin import ClusterOut
from service.schemas.wording import age, size


def cluster(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the cluster behind the service and its hosts; exit code 3 if it does not answer."""
    with common.open_client(url) as client:
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
    """List the hosts; on a head the machines that have joined, too."""
    stack = _stack()
    state = stack.running()
    head: str | None = NODE_IP
    rows: list[tuple[str, ...]]
    if state is not None and state.head_address is not None and state.ray_address is not None:
        ray = RayState(state.ray_address, stack.home.token())
        nodes = ray.live_nodes()
        if nodes is None:
            raise StackError(f"Ray does not answer at {ray.ray_address}; `shardloom down` and `up`")
        head = next((node.address for node in nodes if node.is_head), None)
        table = Table("host", "role", "CPUs", "GPUs", "memory")
        rows = [
            (it.address, f"{it.num_cpus:g}", f"{it.num_gpus:g}", size(it.memory_bytes))
            for it in sorted(nodes, key=lambda node: (not node.is_head, node.address))
        ]
    else:
        table = Table("host", "role")
        rows = [(address,) for address in (NODE_IP, *stack.running_hosts())]
    if as_json:
        print_json({"head": head, "hosts": [address for address, *_ in rows]})
        return
    for address, *sizes in rows:
        table.add_row(address, "head" if address == head else "worker", *sizes)
    console().print(table)


def _stack() -> LocalStack:
    return LocalStack(StackHome.from_environment())


# ---- up, down, status

# A service that cannot live is not started again and again without a pause, ever longer.
RESTART_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
# Options of `up` that say something only with --head.
_HEAD_ONLY = ("host", "cpus", "gpus", "ray_port", "ray_dashboard_port", "node_port", "worker_ports")


def up(
    call: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the service (default 8700).")
    ] = None,
    hosts: Annotated[
        int, typer.Option(min=1, max=16, help="Hosts that the local Ray has, the head included.")
    ] = 1,
    head: Annotated[
        bool, typer.Option("--head", help="Let other machines join, and users call with a key.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="With --head: address of this machine that the others reach.")
    ] = None,
    cpus: machines.CpusOption = None,
    gpus: machines.GpusOption = None,
    ray_port: machines.RayPortOption = RAY_PORT,
    ray_dashboard_port: machines.DashboardPortOption = RAY_DASHBOARD_PORT,
    node_port: machines.NodePortOption = NODE_PORT,
    worker_ports: machines.WorkerPortsOption = WORKER_PORTS,
    no_auth: Annotated[
        bool,
        typer.Option("--no-auth", help="Let anybody on this machine use the service as its owner."),
    ] = False,
    no_keep_key: Annotated[
        bool,
        typer.Option(
            "--no-keep-key",
            help="With --head: print the first API key, but do not keep it in SHARDLOOM_HOME.",
        ),
    ] = False,
) -> None:
    """Start the service and a local Ray; without --detach Ctrl-C stops them again.

    SHARDLOOM_HOME names the folder of everything it keeps (default ~/.shardloom), and
    SHARDLOOM_RAY_ADDRESS a Ray cluster to use instead of a local one. With --head other machines
    can join (`shardloom join`); the options from --host on are for that only.
    """
    home = StackHome.from_environment()
    if head and no_auth:
        raise typer.BadParameter("--no-auth is for this machine only, and others reach a head")
    if head:
        made = machines.head_of(
            host, cpus, gpus, node_port, worker_ports, ray_port, ray_dashboard_port
        )
        _up_head(home, made, port, detach=detach, keeps_key=not no_keep_key)
        return
    _refuse_head_options(call)
    stack = LocalStack(home, os.environ | ({"SHARDLOOM_AUTH": "none"} if no_auth else {}))
    if state := stack.running():
        console().print("Shardloom is already up")
        _print_addresses(home, state)
        return
    state = _start(stack, port, console())
    for _ in range(hosts - 1):
        console().print(Text(f"host {stack.add_host()} joined", style="dim"))
    _print_addresses(home, state)
    _stay(stack, state, detach=detach)


def _refuse_head_options(call: typer.Context) -> None:
    """Refuse options that would be ignored; settings (environment variables) may stand."""
    for name in (*_HEAD_ONLY, "no_keep_key"):
        source = call.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option} is for a head: add --head, or leave it out")


def _up_head(
    home: StackHome, head: MachineHead, port: int | None, *, detach: bool, keeps_key: bool
) -> None:
    stack = LocalStack(home, head=head)
    if (state := stack.running()) and state.head_address is None:
        raise StackError(
            "a stack that others cannot join runs here; `shardloom down` ends it, and the jobs on "
            "it go on at the next start"
        )
    if state is not None:
        if (state.gcs_address, state.ray_address) != (head.gcs_address, head.ray_address):
            raise StackError(
                f"a head with Ray at {state.gcs_address} and {state.ray_address} runs here; "
                "`shardloom down` ends it, and the jobs on it go on at the next start"
            )
        console().print("Shardloom is already up")
    else:
        machines.check_storage(home)
        # Said at once: a start that fails would make the next one keep silent about it.
        if key := machines.first_key(stack.url_at(port), keeps_it=keeps_key):
            shown = f"API key of an administrator, shown this once: {key}"
            known = "\n`shardloom` on this machine knows it already" if keeps_key else ""
            console().print(Text.assemble((shown, "bold"), (known, "dim")))
        state = _start(stack, port, console())
    _print_addresses(home, state)
    console().print(machines.how_to_join(home, state))
    _stay(stack, state, detach=detach)


def down() -> None:
    """Stop the local service and its Ray; jobs that run go on at the next start.

    On a machine that has joined another one, end its node without asking the jobs to leave first.
    """
    home = StackHome.from_environment()
    say: Report = console().print
    has_left = JoinedMachine(home).leave(0, say)
    if not LocalStack(home).down(say) and not has_left:
        console().print("nothing was running")


def status(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Say whether the service and its cluster answer; exit code 3 if the service does not."""
    home = StackHome.from_environment()
    state = home.read_state() if url is None else None
    with common.open_client(url) as client:
        is_alive = client.is_alive()
        cluster = None
        if is_alive:
            with suppress(ShardloomError):
                cluster = client.cluster()
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
            if is_alive:
                _print_link(client.base_url)
    if not is_alive:
        raise typer.Exit(UNAVAILABLE)


def ensure_running() -> None:
    """Start the stack in the background unless it runs; raises `StackError`."""
    stack = _stack()
    if stack.running() is None:
        state = _start(stack, None, error_console())
        error_console().print(Text(f"{state.url}  (`shardloom down` stops it)", style="dim"))


def _start(stack: LocalStack, port: int | None, output: Console) -> StackState:
    """Start a stack, with a spinner where there is a terminal, above which milestones stand."""
    with output.status("starting Shardloom", spinner="dots"):
        return stack.up(port=port, report=lambda line: output.print(Text(line, style="dim")))


def _stay(stack: LocalStack, state: StackState, *, detach: bool = False) -> None:
    """Keep the stack in the foreground until it ends, unless it is to be left running."""
    if detach:
        console().print(Text("`shardloom down` stops it", style="dim"))
        return
    machines.interrupt_on_signals()
    try:
        console().print(Text("Ctrl-C stops it", style="dim"))
        message = stack.wait_until_broken(state)
        while not stack.was_ended(state) and stack.has_lost_service_only(state):
            # Joined machines and their jobs go on meanwhile.
            error_console().print(message)
            state = _start_again(stack, state)
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


def _start_again(stack: LocalStack, state: StackState) -> StackState:
    """Start a head's service again and again while its Ray lives; the old state after a `down`."""
    pause_s = RESTART_PAUSE_S
    while True:
        time.sleep(pause_s)
        if stack.was_ended(state):
            return state
        try:
            return _start(stack, None, console())
        except StackError as error:
            if not stack.has_lost_service_only(state):
                raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            error_console().print(str(error))
            error_console().print(f"Ray and its jobs go on; the next try is in {pause_s:.0f} s")


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
        console().print(Text("this link opens the dashboard once, within an hour:", style="dim"))
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
    elif not is_alive:
        grid.add_row("", Text("`shardloom up` starts one on this machine", style="dim"))
    return grid

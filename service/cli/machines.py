"""Commands of several machines (join, leave), and the options and checks of `up --head`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from service import compatibility
from service.cli.common import UNAVAILABLE, console, error_console
from service.client import credentials
from service.local.join import JoinedMachine, head_url, read_token
from service.local.ray_node import (
    NODE_PORT,
    WORKER_PORTS,
    MachineHead,
    MachineNode,
    NodePorts,
    parse_ports,
)
from service.local.state import JoinedState, StackError, StackHome, StackState
from service.network import NoAddress, address_towards, interface_of
from service.schemas.wording import size

GRACE_S = 120
CpusOption = Annotated[
    int | None, typer.Option(min=0, help="CPUs that jobs may use on this machine (default: all).")
]
GpusOption = Annotated[
    int | None, typer.Option(min=0, help="GPUs that jobs may use here (default: all).")
]
NodePortOption = Annotated[
    int,
    typer.Option(
        min=1024, max=65530, envvar="SHARDLOOM_NODE_PORT", help="First of six ports of the node."
    ),
]
WorkerPortsOption = Annotated[
    str,
    typer.Option(
        metavar="FIRST-LAST", envvar="SHARDLOOM_WORKER_PORTS", help="Ports of Ray's workers."
    ),
]
RayPortOption = Annotated[
    int, typer.Option(min=1024, max=65535, envvar="SHARDLOOM_RAY_PORT", help="Where machines join.")
]
DashboardPortOption = Annotated[
    int,
    typer.Option(
        min=1024, max=65535, envvar="SHARDLOOM_RAY_DASHBOARD_PORT", help="Ray's Jobs API."
    ),
]
GraceOption = Annotated[
    int,
    typer.Option(
        "--grace-s", min=0, help="Longest wait, in seconds, for jobs to leave; 0 ends at once."
    ),
]


def head_of(
    host: str | None,
    num_cpus: int | None,
    num_gpus: int | None,
    node_port: int,
    worker_ports: str,
    ray_port: int,
    dashboard_port: int,
) -> MachineHead:
    """The head that the options of `up --head` describe; raises `StackError`."""
    if os.environ.get("SHARDLOOM_RAY_ADDRESS") or os.environ.get("SHARDLOOM_BACKEND") == "fake":
        raise StackError(
            "machines join a Ray that `up --head` starts itself: unset SHARDLOOM_RAY_ADDRESS and "
            "SHARDLOOM_BACKEND"
        )
    try:
        address = host or address_towards()
        interface = interface_of(address)
    except NoAddress as error:
        raise StackError(f"{error}; --host names the one that the others reach") from None
    ports = _ports(node_port, worker_ports, ray_port, dashboard_port)
    node = MachineNode(address, interface, num_cpus, num_gpus, ports)
    return MachineHead(node, ray_port, dashboard_port)


def check_storage(home: StackHome) -> None:
    """Raise `StackError` where the run storage is not the one that this head had before."""
    # Imported late, as below.
    from service.settings import Settings

    try:
        runs_dir = Settings().runs_dir
    except ValidationError as error:
        # Not the values: one of them may be a secret.
        rows = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise StackError(
            f"settings (SHARDLOOM_...) that cannot be used: {'; '.join(rows)}"
        ) from None
    try:
        home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = compatibility.changed_storage(runs_dir, home.root / "storage-id")
    except OSError as error:
        raise StackError(
            f"the run storage {runs_dir} cannot be used ({error.strerror}): is it mounted, and may "
            "this user write there?"
        ) from None
    if fault:
        raise StackError(fault)


def first_key(url: str, *, keeps_it: bool) -> str | None:
    """Make the first API key, and keep it for this user and the service at `url` if wanted.

    Returns its text, or None where there is a key or another way to sign in. Raises `StackError`.
    """
    # Imported late: only a machine that has the service's database has what they need.
    from service.auth.security import create_first_key
    from service.errors import ServiceError

    try:
        has_provider = bool(os.environ.get("SHARDLOOM_OIDC_ISSUER"))
        made = None if has_provider else create_first_key("head", {"*": "admin"}, None)
    except ServiceError as error:
        raise StackError(f"{error}; SHARDLOOM_DATABASE_URL names the database") from None
    if made is None:
        return None
    if keeps_it:
        credentials.keep_key(url, made[1])
    return made[1]


def how_to_join(home: StackHome, state: StackState) -> Text:
    """The message of a head that is up: how other machines join."""
    where = state.url if "https:" in state.url else state.url.removeprefix("http://")
    return Text.assemble(
        ("On each other machine, with a copy of ", "dim"),
        str(home.token_path),
        (" (0600):\n", "dim"),
        f"  shardloom join {where} --token-file COPY",
    )


def join(
    head: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="The head's: ADDRESS, ADDRESS:PORT or https://ADDRESS:PORT."
        ),
    ],
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SHARDLOOM_TOKEN_FILE",
            help="Copy of the head's file ray-token (default: that of the last time).",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of this machine (default: the one that leads to the head)."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
    grace_s: GraceOption = GRACE_S,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    node_port: NodePortOption = NODE_PORT,
    worker_ports: WorkerPortsOption = WORKER_PORTS,
) -> None:
    """Make this machine a host of the cluster of another one; Ctrl-C leaves it again.

    Both machines must have the same versions and see the same run storage; differences are listed.
    """
    machine = JoinedMachine(StackHome.from_environment())
    token = read_token(token_file or machine.home.cluster_token_path)
    wanted = MachineNode(address or "", None, cpus, gpus, _ports(node_port, worker_ports))
    state, node = machine.join(head_url(head), token, wanted, print_dim)
    console().print(
        f"joined {state.head_url} as {state.address}: {node.num_cpus:g} CPUs, "
        f"{node.num_gpus:g} GPUs, {size(node.memory_bytes)}"
    )
    if detach:
        console().print(Text("`shardloom leave` ends it", style="dim"))
    else:
        _stay(machine, state, grace_s)


def leave(grace_s: GraceOption = GRACE_S) -> None:
    """Let the jobs leave this machine, then end what `shardloom join` started."""
    if not JoinedMachine(StackHome.from_environment()).leave(grace_s, print_dim):
        console().print("this machine is in no cluster")


def _stay(machine: JoinedMachine, state: JoinedState, grace_s: int) -> None:
    interrupt_on_signals()
    try:
        console().print(Text("Ctrl-C leaves it", style="dim"))
        message = machine.wait_until_ended(state)
    except KeyboardInterrupt:
        console().print("leaving")
        machine.leave(grace_s, print_dim)
        return
    if message is not None:
        machine.leave(0, print_dim)
        error_console().print(message)
        raise typer.Exit(UNAVAILABLE)


def interrupt_on_signals() -> None:
    """Let a supervisor's SIGTERM and a closed terminal end the command as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def print_dim(line: str) -> None:
    """Print a milestone, less prominent than an answer."""
    console().print(Text(line, style="dim"))


def _ports(first: int, workers: str, *others: int) -> NodePorts:
    try:
        return parse_ports(first, workers, *others)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

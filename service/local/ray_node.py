"""Ray nodes: command lines, ports and environment of heads and further nodes; state of a cluster.

The private Ray of one machine has a loopback address and free ports. The Ray that other machines
join has fixed ports, so that they can be opened; those of node and workers are the same on every
machine:

    head  6379  Ray          node     8710-8715
          8265  Jobs API     workers  10002-19999
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from service.local.processes import ProcessId, is_alive
from service.local.state import StackError
from service.network import port_fault

# Ray replaces 127.0.0.1 by an address that other machines can reach. Any other loopback
# address is kept, so the cluster stays private and survives a change of network.
NODE_IP = "127.0.0.2"
OBJECT_STORE_BYTES = 200_000_000
_COMMON_OPTIONS = (
    "--block",
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--disable-usage-stats",
    "--log-color=false",
)
# Slots are logical: four workers and the driver run on two cores as well, if more slowly.
MIN_LOGICAL_CPUS = 8
# Settings that the trainer reads on its own machine. All others are the service's, secrets among
# them, and whatever a node has in its environment is read by the code of every job.
TRAINER_SETTINGS = frozenset(
    {
        "SHARDLOOM_CA_FILE",
        "SHARDLOOM_FAULTS",
        "SHARDLOOM_LOG_MAX_BYTES",
        "SHARDLOOM_STORAGE_RETRY_S",
        "SHARDLOOM_STORAGE_TIMEOUT_S",
    }
)
_KEPT_FROM_JOBS = frozenset({"RAY_ADDRESS", "RAY_AUTH_TOKEN", "PGPASSWORD", "PGPASSFILE"})


def free_ports(number: int) -> list[int]:
    """Free TCP ports; all are held until the last is found, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def ray_executable() -> str:
    """Path of the `ray` command of this very environment, or else of PATH; raises `StackError`."""
    found = shutil.which("ray", path=sysconfig.get_path("scripts")) or shutil.which("ray")
    if found is None:
        raise StackError("the `ray` command is missing: pip install 'shardloom[trainer-cpu]'")
    return found


def _start_command() -> list[str]:
    """`ray start` of this environment, made fit for a busy machine; else of PATH."""
    if importlib.util.find_spec("ray"):
        return [sys.executable, "-m", "trainer.driver.ray_start"]
    return [ray_executable(), "start"]


def node_environment(inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
    """Environment of any node and of everything below it, drivers and workers included.

    Of the service's own settings only `TRAINER_SETTINGS`: no key, no database's password.
    """
    ours = {name for name in inherited if name.startswith("SHARDLOOM_")} - TRAINER_SETTINGS
    kept = {name: inherited[name] for name in inherited.keys() - ours - _KEPT_FROM_JOBS}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's default of 15 lets training starve beside anything else on the machine.
        "RAY_worker_niceness": "0",
        # On a small machine Ray's own helpers cost the job several percent of its rows a second:
        # nobody reads these statistics here, and worker logs go to run storage by themselves.
        "REPORTER_UPDATE_INTERVAL_MS": "30000",
        "RAY_task_events_report_interval_ms": "0",
        # On a busy machine agents and workers may be late, which is no reason to give a node up.
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_raylet_start_wait_time_s": "240",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
        # Ray would start a worker for each CPU with the first job, none of which has its
        # environment, nor ever serves it.
        "RAY_prestart_worker_first_driver": "0",
        # Workers import the engine when they start. A driver that ends has others started for the
        # next job: all at once, and none of them stays beyond the time that it is given.
        "RAY_preload_python_modules": "trainer.driver.preload",
        "RAY_worker_maximum_startup_concurrency": "64",
        "RAY_num_workers_soft_limit": "0",
        # By default a head that is stopped waits up to 30 s for its node to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def make_temp_dir(path: Path) -> None:
    """Make Ray's folder afresh, private to this user; raises `OSError` if another user owns it."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set SHARDLOOM_HOME elsewhere")
    shutil.rmtree(path)
    path.mkdir(mode=0o700)


RAY_PORT = 6379
RAY_DASHBOARD_PORT = 8265
NODE_PORT = 8710
WORKER_PORTS = "10002-19999"
_NODE_PORT_OPTIONS = (
    "--node-manager-port",
    "--object-manager-port",
    # A raylet that is given the ports of its agents need not wait 15 s for them.
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
_LAST_PORT = 2**16 - 1
_REQUEST_TIMEOUT_S = 5.0
# More than a node gives itself (`trainer.driver.ray_start`).
_JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.5


@dataclass(frozen=True)
class NodePorts:
    """TCP ports of one machine: six of the node, and a range of its workers; Ray chooses for 0."""

    fixed: tuple[int, ...] = tuple(range(NODE_PORT, NODE_PORT + len(_NODE_PORT_OPTIONS)))
    first_worker: int = 10002
    last_worker: int = 19999

    @property
    def workers(self) -> range:
        return range(self.first_worker, self.last_worker + 1)

    def options(self) -> list[str]:
        """Options of `ray start`."""
        pairs = zip(_NODE_PORT_OPTIONS, self.fixed, strict=True)
        return [
            *(f"{option}={port}" for option, port in pairs),
            f"--min-worker-port={self.first_worker}",
            f"--max-worker-port={self.last_worker}",
        ]


def parse_ports(first: int, workers: str, *others: int) -> NodePorts:
    """Ports from options; `workers` reads FIRST-LAST, `others` are those of a head.

    Raises ValueError with a sentence, also where one port has two uses.
    """
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", workers)
    if match is None:
        raise ValueError(f"'{workers}' is no range of ports; it reads FIRST-LAST, as 10002-19999")
    last = first + len(_NODE_PORT_OPTIONS) - 1
    ports = NodePorts(tuple(range(first, last + 1)), int(match[1]), int(match[2]))
    if not 1024 <= ports.first_worker <= ports.last_worker <= _LAST_PORT:
        raise ValueError(f"'{workers}': a range of ports goes up, from 1024 to {_LAST_PORT}")
    if last > _LAST_PORT:
        raise ValueError(f"the six ports from {first} on would go beyond {_LAST_PORT}")
    used = [*others, *ports.fixed]
    for index, port in enumerate(used):
        if port in used[:index]:
            raise ValueError(
                f"port {port} has two uses: --ray-port, --ray-dashboard-port and the node's six "
                f"from --node-port on ({first}-{last}) differ"
            )
        if port in ports.workers:
            raise ValueError(f"port {port} lies in the workers' range {workers} (--worker-ports)")
    return ports


@dataclass(frozen=True)
class MachineNode:
    """One machine as Ray sees it, with all CPUs and GPUs of it where they are None.

    `interface` leads to other machines; None where there are none.
    """

    address: str
    interface: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    ports: NodePorts = field(default_factory=NodePorts)

    def options(self, temp_dir: Path) -> list[str]:
        cpus = (os.cpu_count() or 1) if self.num_cpus is None else self.num_cpus
        # Ray counts them itself.
        gpus = [] if self.num_gpus is None else [f"--num-gpus={self.num_gpus}"]
        return [
            f"--node-ip-address={self.address}",
            *self.ports.options(),
            f"--num-cpus={cpus}",
            *gpus,
            f"--temp-dir={temp_dir}",
            "--include-log-monitor=false",
            *_COMMON_OPTIONS,
        ]

    def environment(self, inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
        """Environment of the node and its workers.

        Gloo looks the machine's own name up, which often leads to 127.0.0.1 or 127.0.1.1, and NCCL
        takes any interface: both are given the one that leads to the other machines.
        """
        networks = {}
        if self.interface is not None:
            # "=" makes NCCL take that very name; without it, all that begin so.
            networks = {
                "GLOO_SOCKET_IFNAME": self.interface,
                "NCCL_SOCKET_IFNAME": f"={self.interface}",
            }
        chosen = {name: inherited[name] for name in networks if inherited.get(name)}
        return node_environment(inherited, token_path) | networks | chosen


@dataclass(frozen=True)
class MachineHead:
    """The machine that others join, and the ports at which they find it.

    Its Jobs API is at `dashboard_host`, which is its own address where that is None.
    """

    node: MachineNode
    ray_port: int = RAY_PORT
    dashboard_port: int = RAY_DASHBOARD_PORT
    dashboard_host: str | None = None
    metrics_port: int = field(default_factory=lambda: free_ports(1)[0])

    @property
    def gcs_address(self) -> str:
        """Where nodes join, as HOST:PORT."""
        return f"{self.node.address}:{self.ray_port}"

    @property
    def ray_address(self) -> str:
        return f"http://{self.dashboard_host or self.node.address}:{self.dashboard_port}"

    @property
    def fixed_ports(self) -> list[int]:
        """Ports that must be free before it starts, the service's apart."""
        return [self.ray_port, self.dashboard_port, *self.node.ports.fixed]

    def command(self, temp_dir: Path) -> list[str]:
        return [
            *_start_command(),
            "--head",
            f"--port={self.ray_port}",
            # No cluster of these grows by itself.
            "--no-monitor",
            "--include-dashboard=true",
            f"--dashboard-host={self.dashboard_host or self.node.address}",
            f"--dashboard-port={self.dashboard_port}",
            *self.node.options(temp_dir),
        ]

    def environment(self, inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
        return self.node.environment(inherited, token_path) | {
            # A host that dies is noticed within seconds, not in half a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
            "DASHBOARD_METRIC_PORT": str(self.metrics_port),
        }


def private_node(address: str, num_cpus: int) -> MachineNode:
    """A node of a Ray on loopback addresses.

    Its ports are free ones: the usual ranges are the same for every cluster of the machine.
    """
    return MachineNode(address, num_cpus=num_cpus, ports=NodePorts((0, 0, *free_ports(4)), 0, 0))


def private_head(num_cores: int) -> MachineHead:
    """The head of a Ray of this machine alone."""
    ray_port, dashboard_port, metrics_port, *agents = free_ports(7)
    ports = NodePorts((0, 0, *agents), 0, 0)
    node = MachineNode(NODE_IP, num_cpus=max(MIN_LOGICAL_CPUS, num_cores), ports=ports)
    return MachineHead(node, ray_port, dashboard_port, "127.0.0.1", metrics_port)


def check_node_ports_free(address: str, ports: Iterable[int]) -> None:
    """Raise `StackError` if something listens on one of the ports of a machine's Ray."""
    for port in ports:
        if fault := port_fault(address, port):
            raise StackError(
                f"{fault}: is another Ray here? --node-port (six ports from there on), "
                "--ray-port and --ray-dashboard-port name others"
            )


def join_command(node: MachineNode, gcs_address: str, temp_dir: Path) -> list[str]:
    """Command that runs a further node until it is told to stop."""
    return [*_start_command(), f"--address={gcs_address}", *node.options(temp_dir)]


def drain_command(gcs_address: str, node_id: str, grace_s: int) -> list[str]:
    """Command that tells Ray, and by it every job, that a node is about to go."""
    return [
        ray_executable(),
        "drain-node",
        f"--address={gcs_address}",
        f"--node-id={node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=shardloom leave",
        f"--deadline-remaining-seconds={grace_s}",
    ]


@dataclass(frozen=True)
class RayNode:
    """A node that Ray counts as alive."""

    node_id: str
    address: str
    is_head: bool
    num_cpus: float
    num_gpus: float
    memory_bytes: int

    @classmethod
    def from_row(cls, row: Mapping) -> RayNode:
        resources = row["resources_total"]
        return cls(
            node_id=row["node_id"],
            address=row["node_ip"],
            is_head=bool(row["is_head_node"]),
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory_bytes=int(resources.get("memory", 0)),
        )


@dataclass(frozen=True)
class RayState:
    """Asks a Ray head (URL of its dashboard) for its nodes; it answers with its token only."""

    ray_address: str
    token: str

    def live_nodes(self) -> list[RayNode] | None:
        """Nodes that are alive; None without an answer of Ray."""
        rows = self._rows("nodes", {"limit": "10000"})
        if rows is None:
            return None
        try:
            return [RayNode.from_row(row) for row in rows if row["state"] == "ALIVE"]
        except (KeyError, TypeError, AttributeError):  # a node that is on its way up
            return None

    def has_head(self) -> bool:
        return any(node.is_head for node in self.live_nodes() or ())

    def wait_for_node(
        self, address: str, process: ProcessId, known: Collection[str] = ()
    ) -> RayNode | None:
        """The node that `process` starts, once it is alive; None if the process ends or is late.

        `known` are ids of earlier nodes, which may have the same address.
        """
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while is_alive(process) and time.monotonic() < deadline:
            for node in self.live_nodes() or ():
                if node.address == address and node.node_id not in known:
                    return node
            time.sleep(_POLL_S)
        return None

    def num_actors_on(self, node_id: str) -> int | None:
        """Actors, workers of jobs above all, that live on a node; None as above."""
        parameters = {
            "filter_keys": ["node_id", "state"],
            "filter_predicates": ["=", "="],
            "filter_values": [node_id, "ALIVE"],
        }
        rows = self._rows("actors", parameters)
        return None if rows is None else len(rows)

    def _rows(self, what: str, parameters: Mapping[str, str | list[str]]) -> list[dict] | None:
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            with httpx.Client(trust_env=False, timeout=_REQUEST_TIMEOUT_S, headers=headers) as http:
                answer = http.get(f"{self.ray_address}/api/v0/{what}", params=parameters)
            rows: list[dict] = answer.json()["data"]["result"]["result"]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return None
        return rows

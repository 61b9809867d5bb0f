"""Ray on machines of a network: command lines of the head and of machines that join it.

Unlike the private Ray of one machine (`service.local_ray`) its ports are fixed, so that they can be
opened. The node's and the workers' are those of every machine.

    head  6379  Ray          node     8710-8715
          8265  Jobs API     workers  10002-19999
          8716  Ray client
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from service import local_ray
from service.local_ray import RayPorts
from service.local_state import StackError
from service.network import port_fault

RAY_PORT = 6379
RAY_DASHBOARD_PORT = 8265
NODE_PORT = 8710
WORKER_PORTS = "10002-19999"
_NODE_PORT_OPTIONS = (
    "--node-manager-port",
    "--object-manager-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
_LAST_PORT = 2**16 - 1
_ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NodePorts:
    """TCP ports of one machine: six for the node, from `first` on, and a range for its workers."""

    first: int = NODE_PORT
    first_worker: int = 10002
    last_worker: int = 19999

    @property
    def fixed(self) -> range:
        """The ports of the node itself."""
        return range(self.first, self.first + len(_NODE_PORT_OPTIONS))

    def options(self) -> list[str]:
        """What `ray start` is told of them."""
        pairs = zip(_NODE_PORT_OPTIONS, self.fixed, strict=True)
        return [
            *(f"{option}={port}" for option, port in pairs),
            f"--min-worker-port={self.first_worker}",
            f"--max-worker-port={self.last_worker}",
        ]


def parse_ports(first: int, workers: str) -> NodePorts:
    """Ports from options; `workers` reads FIRST-LAST. Raises ValueError with a sentence."""
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", workers)
    if match is None:
        raise ValueError(f"'{workers}' is no range of ports; it reads FIRST-LAST, as 10002-19999")
    ports = NodePorts(first, int(match[1]), int(match[2]))
    if not 1024 <= ports.first_worker <= ports.last_worker <= _LAST_PORT:
        raise ValueError(f"'{workers}': a range of ports goes up, from 1024 to {_LAST_PORT}")
    if ports.fixed.stop - 1 > _LAST_PORT:
        raise ValueError(f"the six ports from {first} on would go beyond {_LAST_PORT}")
    if ports.fixed.start <= ports.last_worker and ports.first_worker < ports.fixed.stop:
        raise ValueError(
            f"the node's ports {ports.fixed.start}-{ports.fixed.stop - 1} lie in the workers' "
            f"range {workers}"
        )
    return ports


@dataclass(frozen=True)
class MachineNode:
    """One machine as Ray sees it. Where `num_gpus` is None Ray counts those of the machine."""

    address: str
    interface: str
    num_cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    num_gpus: int | None = None
    ports: NodePorts = field(default_factory=NodePorts)

    def options(self, temp_dir: Path) -> list[str]:
        """What `ray start` is told of it."""
        gpus = [] if self.num_gpus is None else [f"--num-gpus={self.num_gpus}"]
        return [
            "--block",
            f"--node-ip-address={self.address}",
            *self.ports.options(),
            f"--num-cpus={self.num_cpus}",
            *gpus,
            f"--object-store-memory={local_ray.OBJECT_STORE_BYTES}",
            f"--temp-dir={temp_dir}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            "--log-color=false",
        ]

    def environment(self, inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
        """Environment of the node and its workers.

        Gloo looks the machine's own name up, which often leads to 127.0.0.1 or 127.0.1.1, and NCCL
        takes what interface it likes: both are told the one that leads to the others.
        """
        # "=" makes NCCL take that very name; without it, all that begin so.
        networks = {
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": f"={self.interface}",
        }
        chosen = {name: inherited[name] for name in networks if inherited.get(name)}
        return local_ray.node_environment(inherited, token_path) | networks | chosen


@dataclass(frozen=True)
class MachineHead:
    """The machine that others join, and the ports at which they find it."""

    node: MachineNode
    ray_port: int = RAY_PORT
    dashboard_port: int = RAY_DASHBOARD_PORT

    @property
    def gcs_address(self) -> str:
        """Where nodes join, as HOST:PORT."""
        return f"{self.node.address}:{self.ray_port}"

    @property
    def ray_address(self) -> str:
        """URL of the Jobs API."""
        return f"http://{self.node.address}:{self.dashboard_port}"

    @property
    def fixed_ports(self) -> list[int]:
        """Ports that must be free before it starts, the service's apart."""
        return [self.ray_port, self.dashboard_port, *self.node.ports.fixed, self.client_port]

    @property
    def all_ports(self) -> set[int]:
        """Those and its workers'."""
        workers = range(self.node.ports.first_worker, self.node.ports.last_worker + 1)
        return {*self.fixed_ports, *workers}

    @property
    def client_port(self) -> int:
        """Port of Ray's client server: nobody needs it, but it cannot be left out."""
        return self.node.ports.fixed.stop

    def check_ports(self) -> None:
        """Raise ValueError with a sentence where one port has two uses."""
        workers = range(self.node.ports.first_worker, self.node.ports.last_worker + 1)
        for index, port in enumerate(self.fixed_ports):
            if port > _LAST_PORT:
                raise ValueError(f"the head's seven ports from --node-port on go beyond {port - 1}")
            if port in self.fixed_ports[:index]:
                raise ValueError(
                    f"port {port} has two uses: --ray-port, --ray-dashboard-port and the head's "
                    f"seven from --node-port on ({self.node.ports.first}-{self.client_port}) differ"
                )
            if port in workers:
                raise ValueError(
                    f"port {port} of the head lies in the workers' range "
                    f"{workers.start}-{workers.stop - 1} (--worker-ports)"
                )

    def command(self, executable: str, temp_dir: Path) -> list[str]:
        """Command that runs it until it is told to stop."""
        return [
            executable,
            "start",
            "--head",
            f"--port={self.ray_port}",
            f"--ray-client-server-port={self.client_port}",
            "--include-dashboard=true",
            f"--dashboard-host={self.node.address}",
            f"--dashboard-port={self.dashboard_port}",
            *self.node.options(temp_dir),
        ]

    def environment(
        self, inherited: Mapping[str, str], ports: RayPorts, token_path: Path
    ) -> dict[str, str]:
        """Environment of the head and of what runs there."""
        return self.node.environment(
            local_ray.head_environment(inherited, ports, token_path), token_path
        )


def check_node_ports_free(address: str, ports: Iterable[int]) -> None:
    """Raise `StackError` if something listens on one of the ports of a machine's Ray."""
    for port in ports:
        if fault := port_fault(address, port):
            raise StackError(
                f"{fault}: is another Ray here? --node-port (six ports from there on, seven on "
                "the head), --ray-port and --ray-dashboard-port name others"
            )


def join_command(executable: str, node: MachineNode, gcs_address: str, temp_dir: Path) -> list[str]:
    """Command that runs a machine's node until it is told to stop."""
    return [executable, "start", f"--address={gcs_address}", *node.options(temp_dir)]


def drain_command(executable: str, gcs_address: str, node_id: str, grace_s: int) -> list[str]:
    """Command that tells Ray, and by it every job, that a node is about to go."""
    return [
        executable,
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


@dataclass(frozen=True)
class RayState:
    """Asks a Ray head (URL of its dashboard) for its nodes; it answers with its token only."""

    ray_address: str
    token: str

    def live_nodes(self) -> list[RayNode] | None:
        """Nodes that are alive; None while nobody answers, or not as Ray does."""
        rows = self._rows("nodes", {"limit": "10000"})
        if rows is None:
            return None
        try:
            return [_node_of(row) for row in rows if row["state"] == "ALIVE"]
        except (KeyError, TypeError, AttributeError):  # a node that is on its way up
            return None

    def has_head(self) -> bool:
        """Whether the head's own node is among them."""
        return any(node.is_head for node in self.live_nodes() or ())

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
            with httpx.Client(trust_env=False, timeout=_ASK_TIMEOUT_S, headers=headers) as http:
                answer = http.get(f"{self.ray_address}/api/v0/{what}", params=parameters)
            rows: list[dict] = answer.json()["data"]["result"]["result"]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return None
        return rows


def _node_of(row: Mapping) -> RayNode:
    resources = row["resources_total"]
    return RayNode(
        node_id=row["node_id"],
        address=row["node_ip"],
        is_head=bool(row["is_head_node"]),
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        memory_bytes=int(resources.get("memory", 0)),
    )

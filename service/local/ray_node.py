"""Nodes of the private Ray of one machine: command lines, environment; which of them live.

They have loopback addresses of their own, and free ports: the usual ranges are the same for every
cluster of the machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from service.local.processes import ProcessId, is_alive

# Ray replaces 127.0.0.1 by an address that other machines can reach. Any other loopback
# address is kept, so the cluster stays private and survives a change of network.
NODE_IP = "127.0.0.2"
OBJECT_STORE_BYTES = 200_000_000
_COMMON_OPTIONS = (
    "--block",
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--disable-usage-stats",
    "--log-color=false",
    "--include-log-monitor=false",
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


# `ray start` of this environment, made fit for a busy machine.
_START = (sys.executable, "-m", "trainer.driver.ray_start")
_AGENT_PORT_OPTIONS = (
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
_REQUEST_TIMEOUT_S = 5.0
# More than a node gives itself (`trainer.driver.ray_start`).
_JOIN_TIMEOUT_S = 300.0
_POLL_S = 0.5


def free_ports(number: int) -> list[int]:
    """Free TCP ports; all are held until the last is found, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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


@dataclass(frozen=True)
class RayNode:
    """A node at a loopback address of its own."""

    address: str
    num_cpus: int

    def join_command(self, gcs_address: str, temp_dir: Path) -> list[str]:
        """Command that runs it beside the head at `gcs_address` until it is told to stop."""
        return [*_START, f"--address={gcs_address}", *self.options(temp_dir)]

    def options(self, temp_dir: Path) -> list[str]:
        """Options of `ray start`, the same for a head."""
        # A raylet that is given the ports of its agents need not wait 15 s for them.
        ports = zip(_AGENT_PORT_OPTIONS, free_ports(len(_AGENT_PORT_OPTIONS)), strict=True)
        return [
            f"--node-ip-address={self.address}",
            *(f"{option}={port}" for option, port in ports),
            "--node-manager-port=0",
            "--object-manager-port=0",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--num-cpus={self.num_cpus}",
            f"--temp-dir={temp_dir}",
            *_COMMON_OPTIONS,
        ]


class RayHead:
    """The head of the private Ray of a machine with so many cores."""

    def __init__(self, num_cores: int) -> None:
        self._node = RayNode(NODE_IP, max(MIN_LOGICAL_CPUS, num_cores))
        self._port, self._dashboard_port, self._metrics_port = free_ports(3)
        self.gcs_address = f"{NODE_IP}:{self._port}"
        self.ray_address = f"http://127.0.0.1:{self._dashboard_port}"

    def command(self, temp_dir: Path) -> list[str]:
        return [
            *_START,
            "--head",
            f"--port={self._port}",
            # It does not grow by itself.
            "--no-monitor",
            "--include-dashboard=true",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self._dashboard_port}",
            *self._node.options(temp_dir),
        ]

    def environment(self, inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
        return node_environment(inherited, token_path) | {
            # A host that dies is noticed within seconds, not in half a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_failure_threshold": "3",
            "DASHBOARD_METRIC_PORT": str(self._metrics_port),
        }


@dataclass(frozen=True)
class RayState:
    """Asks a Ray head (URL of its dashboard) for its nodes; it answers with its token only."""

    ray_address: str
    token: str

    def live_nodes(self) -> dict[str, str] | None:
        """Addresses of the nodes that are alive, by id; None without an answer of Ray."""
        rows = self._rows()
        return None if rows is None else {row["node_id"]: row["node_ip"] for row in rows}

    def has_head(self) -> bool:
        return any(row["is_head_node"] for row in self._rows() or ())

    def wait_for_node(self, address: str, process: ProcessId, known: Collection[str]) -> bool:
        """Whether the node that `process` starts is alive; false if the process ends or is late.

        `known` are ids of earlier nodes, which may have the same address.
        """
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while is_alive(process) and time.monotonic() < deadline:
            nodes = self.live_nodes() or {}
            if any(nodes[each] == address for each in nodes.keys() - set(known)):
                return True
            time.sleep(_POLL_S)
        return False

    def _rows(self) -> list[dict] | None:
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            with httpx.Client(trust_env=False, timeout=_REQUEST_TIMEOUT_S, headers=headers) as http:
                answer = http.get(f"{self.ray_address}/api/v0/nodes", params={"limit": "10000"})
            rows = answer.json()["data"]["result"]["result"]
            return [row for row in rows if row["state"] == "ALIVE"]
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            return None

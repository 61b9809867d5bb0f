"""How a private Ray cluster is started: command lines of head and further nodes, environment."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import httpx

# Ray replaces 127.0.0.1 by an address that other machines can reach. Any other loopback
# address is kept, so the cluster stays private and survives a change of network.
NODE_IP = "127.0.0.2"
OBJECT_STORE_BYTES = 200_000_000
# Slots are logical: four workers and the driver run on two cores as well, if more slowly.
MIN_LOGICAL_CPUS = 8
# Settings that the trainer reads on its own machine. All others are the service's, secrets among
# them, and whatever a node has in its environment is read by the code of every job.
TRAINER_SETTINGS = frozenset(
    {
        "SHARDLOOM_CA_FILE",
        "SHARDLOOM_DATA_CACHE",
        "SHARDLOOM_DATA_CACHE_BYTES",
        "SHARDLOOM_FAULTS",
        "SHARDLOOM_LOG_MAX_BYTES",
        "SHARDLOOM_STORAGE_RETRY_S",
        "SHARDLOOM_STORAGE_TIMEOUT_S",
    }
)
_KEPT_FROM_JOBS = frozenset({"RAY_ADDRESS", "RAY_AUTH_TOKEN", "PGPASSWORD", "PGPASSFILE"})


@dataclass(frozen=True)
class RayPorts:
    """TCP ports of the head, each free when chosen."""

    gcs: int
    dashboard: int
    client_server: int
    agent_http: int
    autoscaler_metrics: int
    dashboard_metrics: int
    agent_grpc: int
    runtime_env_agent: int
    node_metrics: int


def choose_ports() -> RayPorts:
    """Free ports for a head; all are held until the last is found, so that they differ."""
    sockets = [socket.socket() for _ in fields(RayPorts)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return RayPorts(*(each.getsockname()[1] for each in sockets))
    finally:
        for each in sockets:
            each.close()


def ray_executable() -> str | None:
    """Path of the `ray` command of this very environment, or else of PATH; None if absent."""
    return shutil.which("ray", path=sysconfig.get_path("scripts")) or shutil.which("ray")


def head_command(executable: str, ports: RayPorts, temp_dir: Path, num_cores: int) -> list[str]:
    """Command that runs the head until it is told to stop."""
    return [
        executable,
        "start",
        "--head",
        "--block",
        f"--node-ip-address={NODE_IP}",
        f"--port={ports.gcs}",
        f"--ray-client-server-port={ports.client_server}",
        f"--dashboard-agent-listen-port={ports.agent_http}",
        *_ports_of_agents(ports.agent_grpc, ports.runtime_env_agent, ports.node_metrics),
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={ports.dashboard}",
        # Random ports: the default range is the same for every cluster of the machine.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={max(MIN_LOGICAL_CPUS, num_cores)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--temp-dir={temp_dir}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
        "--log-color=false",
    ]


def node_command(executable: str, gcs_address: str, node_ip: str, num_cores: int) -> list[str]:
    """Command that runs a further node, with an address of its own, until it is told to stop."""
    return [
        executable,
        "start",
        "--block",
        f"--address={gcs_address}",
        f"--node-ip-address={node_ip}",
        f"--dashboard-agent-listen-port={free_port()}",
        *_ports_of_agents(free_port(), free_port(), free_port()),
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--num-cpus={num_cores}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        "--log-color=false",
    ]


def _ports_of_agents(grpc: int, runtime_env: int, metrics: int) -> list[str]:
    """A raylet that is told them does not wait for its agents, which it gives 15 s to come up."""
    return [
        f"--dashboard-agent-grpc-port={grpc}",
        f"--runtime-env-agent-port={runtime_env}",
        f"--metrics-export-port={metrics}",
    ]


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def node_environment(inherited: Mapping[str, str], token_path: Path) -> dict[str, str]:
    """Environment of any node and of everything below it, drivers and workers included.

    Of the service's own settings only `TRAINER_SETTINGS`: no key, no database's password.
    """
    kept = {key: value for key, value in inherited.items() if _is_for_jobs(key)}
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
        # On a busy machine a node's agent may be late, which is no reason to give the node up.
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_raylet_start_wait_time_s": "60",
        # By default a head that is told to stop waits up to 30 s for its node to drain.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


def _is_for_jobs(name: str) -> bool:
    if name.startswith("SHARDLOOM_"):
        return name in TRAINER_SETTINGS
    return name not in _KEPT_FROM_JOBS


def head_environment(
    inherited: Mapping[str, str], ports: RayPorts, token_path: Path
) -> dict[str, str]:
    """Environment of the head."""
    return node_environment(inherited, token_path) | {
        # A host that dies is noticed within seconds, not in half a minute.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
    }


def live_addresses(ray_address: str, token: str) -> set[str]:
    """Addresses of the nodes that Ray counts as alive; none while it does not answer."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(trust_env=False, timeout=5.0, headers=headers) as http:
            nodes = http.get(f"{ray_address}/api/v0/nodes").json()["data"]["result"]["result"]
    except (httpx.TransportError, ValueError, KeyError, TypeError):
        return set()
    return {node["node_ip"] for node in nodes if node["state"] == "ALIVE"}


def make_temp_dir(path: Path) -> None:
    """Make Ray's folder afresh, private to this user; raises `OSError` if another user owns it."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set SHARDLOOM_HOME elsewhere")
    shutil.rmtree(path)
    path.mkdir(mode=0o700)

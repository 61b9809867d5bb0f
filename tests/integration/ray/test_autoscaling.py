"""A cluster that grows by itself, really: nodes come when a job wants them, and leave when idle.

Nodes come from `tests.harness.loopback_nodes` when Ray's autoscaler (v2) wants them. Everything is
started and ended by process id.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from service.client.client import ShardloomClient
from service.local.ray_node import NODE_IP, RayState, free_ports
from tests.conftest import EXAMPLE_SPEC, REPO
from tests.harness.ray_hosts import RAY, RAY_SETTINGS, kill_tree, processes_below
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import Found, free_port, wait_for
from trainer.fault_injection import FAULTS, VARIABLE, Fault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMON = (
    "data.batch_size=16",
    "training.epochs=1000",
    "training.report_every_steps=1",
    "training.validate_every_steps=1000000",
    "recovery.heartbeat_timeout_s=30",
    "recovery.start_grace_s=30",
)


MAX_NODES = 3
IDLE_S = 12
# Nodes, trainers and workers start on a machine that others may use, too.
PATIENCE_S = 420
_STORE_BYTES = 80_000_000
# A step takes a while whatever the machine, so that a job outlives what happens around it.
_SLOW_STEPS = [
    Fault(
        kind="slow",
        group=group,
        rank=rank,
        step=0,
        phase="lookup",
        incarnation=incarnation,
        arg=0.3,
        times=10**6,
    )
    for group in range(MAX_NODES + 1)
    for rank in range(2)
    for incarnation in range(3)
]
_UNUSED: dict[str, Any] = {
    "docker": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{when}setup_commands": [] for when in ("", "head_", "worker_")},
    **{f"{when}_commands": [] for when in ("initialization", "head_start_ray", "worker_start_ray")},
}


def autoscaling_config(gcs_port: int) -> dict[str, Any]:
    """At most `MAX_NODES` nodes with room for one worker each, none to begin with."""
    return _UNUSED | {
        "cluster_name": "loopback",
        "max_workers": MAX_NODES,
        "provider": {
            "type": "external",
            "module": "tests.harness.loopback_nodes.LoopbackNodes",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": f"{NODE_IP}:{gcs_port}",
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": _STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": MAX_NODES,
            },
        },
    }


def _environment(token: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return (
        kept
        | RAY_SETTINGS
        | {
            # Where the monitor finds the provider, and drivers find the trainer.
            "PYTHONPATH": str(REPO),
            "RAY_enable_autoscaler_v2": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "AUTOSCALER_METRIC_PORT": str(free_port()),
            "DASHBOARD_METRIC_PORT": str(free_port()),
            "RAY_AUTH_TOKEN": token,
            "RAY_health_check_timeout_ms": "10000",
            "RAY_agent_register_timeout_ms": "400000",
            "RAY_raylet_start_wait_time_s": "60",
            VARIABLE: FAULTS.dump_json(_SLOW_STEPS).decode(),
        }
    )


@dataclass
class GrowingRay:
    """The head, and below it the nodes that its autoscaler adds."""

    temp_dir: Path
    gcs_port: int = 0
    dashboard_port: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    _head: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The Jobs API."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    def start(self) -> None:
        wait_for(self._is_up, "the head", limit_s=PATIENCE_S)

    def _is_up(self) -> bool:
        """Whether the head is there; starts it, again where Ray gave up on a busy machine."""
        if self._head is None or self._head.poll() is not None:
            self._end_leftovers()
            # Others may have taken a port meanwhile, which is why a start fails at times.
            self.gcs_port, self.dashboard_port = free_ports(2)
            self._start()
        return NODE_IP in self._live_addresses()

    def _start(self) -> None:
        config = self.temp_dir.with_suffix(".json")
        config.write_text(json.dumps(autoscaling_config(self.gcs_port)))
        command = [
            RAY,
            "start",
            "--head",
            "--block",
            f"--autoscaling-config={config}",
            f"--node-ip-address={NODE_IP}",
            f"--port={self.gcs_port}",
            f"--ray-client-server-port={free_port()}",
            f"--dashboard-agent-listen-port={free_port()}",
            # A raylet that is given its agents' ports need not wait for them, for 15 s at most.
            f"--dashboard-agent-grpc-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            f"--runtime-env-agent-port={free_port()}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={self.dashboard_port}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--num-cpus=0",
            f"--object-store-memory={_STORE_BYTES}",
            f"--temp-dir={self.temp_dir}",
            "--disable-usage-stats",
            "--include-log-monitor=false",
        ]
        with self.temp_dir.with_suffix(".log").open("wb") as output:
            self._head = subprocess.Popen(
                command,
                env=_environment(self.token),
                cwd=REPO,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def nodes(self) -> set[str]:
        """Addresses of the nodes that are there beside the head."""
        assert self._head is not None
        assert self._head.poll() is None, self.temp_dir.with_suffix(".log").read_text()
        return self._live_addresses() - {NODE_IP}

    def _live_addresses(self) -> set[str]:
        return {*(RayState(self.url, self.token).live_nodes() or {}).values()}

    def kill(self, address: str) -> None:
        assert self._head is not None
        for pid in processes_below(self._head.pid):
            if _is_raylet_of(pid, address):
                kill_tree(pid)

    def end(self) -> None:
        if self._head is not None:
            kill_tree(self._head.pid)
            self._head.wait()
            self._end_leftovers()
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        for suffix in (".json", ".log"):
            self.temp_dir.with_suffix(suffix).unlink(missing_ok=True)

    def _end_leftovers(self) -> None:
        """SIGKILL what a head that died has left, which is below no process of ours any more."""
        for pid in started_with(f"RAY_AUTH_TOKEN={self.token}"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def started_with(setting: str) -> list[int]:
    """Processes of this user that were started with a variable, as in `NAME=value`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if setting.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _is_raylet_of(pid: int, address: str) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[0].endswith(b"/raylet") and f"--node_ip_address={address}".encode() in words
    return False


@dataclass
class GrowingStack:
    """Ray, the service on it, and its client."""

    ray: GrowingRay
    service: ServiceProcess
    client: ShardloomClient

    def timeline(self, job_id: str, *kinds: str) -> list[dict[str, Any]]:
        return [each.data for each in self.client.iter_events(job_id) if each.kind in kinds]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrowingStack]:
    """A stack whose cluster grows to room for `MAX_NODES` workers."""
    # Ray's sockets lie below it, and their names may not be long.
    ray = GrowingRay(Path(tempfile.mkdtemp(prefix="ray-grow-")))
    service: ServiceProcess | None = None
    try:
        ray.start()
        settings = {
            "SHARDLOOM_BACKEND": "ray_jobs",
            "SHARDLOOM_RAY_ADDRESS": ray.url,
            "SHARDLOOM_RAY_AUTH_TOKEN": ray.token,
            "SHARDLOOM_CLUSTER_MAX_WORKERS": str(MAX_NODES),
            "SHARDLOOM_RECONCILE_INTERVAL_S": "1",
        }
        service = ServiceProcess(tmp_path_factory.mktemp("growing"), free_port(), settings)
        service.start()
        client = ShardloomClient(service.url)
        yield GrowingStack(ray, service, client)
        client.close()
    finally:
        if service is not None:
            service.kill()
        ray.end()


def shardloom(stack: GrowingStack, *arguments: str) -> str:
    return stack.service.shell(*arguments, SHARDLOOM_URL=stack.service.url)


def submit(stack: GrowingStack, data: Path, *changes: str) -> str:
    settings = [f"data.path={data}", *COMMON, *changes]
    options = [word for each in settings for word in ("--set", each)]
    printed = shardloom(stack, "submit", str(EXAMPLE_SPEC), "--json", *options)
    job_id: str = json.loads(printed)["id"]
    return job_id


def wait_on(stack: GrowingStack, job_id: str, look: Callable[[], Found | None], what: str) -> Found:
    """First true answer of `look` while the job lives."""

    def look_at_job() -> Found | None:
        found = look()
        job = stack.client.get_job(job_id)
        assert found or not job.status.is_terminal, f"{job.status}: {job.message}"
        return found

    return wait_for(look_at_job, what, PATIENCE_S)


def hosts_in_use(stack: GrowingStack, job_id: str) -> list[str]:
    """Hosts of the groups that train."""
    membership = stack.client.get_job(job_id).membership
    members = membership.members if membership else []
    return sorted(host for each in members if each.standing == "current" for host in each.hosts)


def wait_for_hosts(stack: GrowingStack, job_id: str, num_hosts: int) -> list[str]:
    def look() -> list[str] | None:
        hosts = hosts_in_use(stack, job_id)
        return hosts if len(hosts) == num_hosts and set(hosts) <= stack.ray.nodes() else None

    return wait_on(stack, job_id, look, f"groups on {num_hosts} hosts")


def end(stack: GrowingStack, job_id: str) -> None:
    shardloom(stack, "cancel", job_id)
    wait_for(lambda: stack.client.get_job(job_id).status.is_terminal, "the end", PATIENCE_S)


def test_an_elastic_job_has_nodes_added_outlives_one_and_lets_idle_ones_leave(
    stack: GrowingStack, small_movielens: Path
) -> None:
    assert not stack.ray.nodes(), "the cluster begins with a head that has no room"
    job_id = submit(
        stack,
        small_movielens,
        "parallelism.workers={min: 1, max: 2}",
        "parallelism.shard_group_size=auto",
        "parallelism.placement=inter_host",
        "parallelism.sync={every_steps: 4}",
        "checkpoint.every_steps=100000",
    )
    first = wait_for_hosts(stack, job_id, 2)
    asked = stack.timeline(job_id, "room_asked")
    assert asked[0]["num_workers"] < asked[0]["num_needed"], "it waited for its first host"
    assert (asked[-1]["num_workers"], asked[-1]["num_wanted"]) == (1, 2), "and then for more"
    (layout,) = stack.timeline(job_id, "layout_chosen")
    assert (layout["num_replicas"], layout["num_hosts"]) == (2, 2), "chosen for hosts to come"

    lost = first[0]
    stack.ray.kill(lost)
    second = wait_on(
        stack, job_id, lambda: _without(lost, hosts_in_use(stack, job_id), 2), "a replacement"
    )
    assert len(set(second) - set(first)) == 1, "on a node that was not there before"
    assert not stack.timeline(job_id, "workers_lost"), "nothing was restarted"

    shardloom(stack, "resize", job_id, "1")
    kept = wait_for_hosts(stack, job_id, 1)
    wait_on(stack, job_id, lambda: stack.ray.nodes() == set(kept), "the idle node to leave")
    step = stack.client.get_job(job_id).progress.step
    wait_on(
        stack, job_id, lambda: stack.client.get_job(job_id).progress.step > step + 5, "the others"
    )
    job = stack.client.get_job(job_id)
    assert job.num_failures == 0
    end(stack, job_id)


def _without(host: str, hosts: list[str], num_hosts: int) -> list[str] | None:
    return hosts if host not in hosts and len(hosts) == num_hosts else None

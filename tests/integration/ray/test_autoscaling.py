"""A cluster that grows by itself, really: nodes come when a job wants them, and leave when idle.

Nodes come from `tests.harness.loopback_nodes` when Ray's autoscaler (v2) wants them. Everything is
started and ended by process id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from service.client.client import ShardloomClient
from service.local.ray_node import RayState
from tests.conftest import EXAMPLE_SPEC, REPO
from tests.harness.ray_hosts import HEAD, RayHosts, kill_tree, ray_hosts
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import Found, free_port, wait_for
from trainer.fault_injection import Fault

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
            "gcs_address": f"{HEAD}:{gcs_port}",
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


SETTINGS = {
    # Where the monitor finds the provider, and drivers find the trainer.
    "PYTHONPATH": str(REPO),
    "RAY_enable_autoscaler_v2": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_agent_register_timeout_ms": "400000",
    "RAY_raylet_start_wait_time_s": "60",
}


@dataclass
class GrowingStack:
    """Ray's head and below it the nodes that its autoscaler adds; the service and its client."""

    head: RayHosts
    ray: RayState
    service: ServiceProcess
    client: ShardloomClient

    def nodes(self) -> set[str]:
        """Addresses of the nodes that are there beside the head."""
        return {*(self.ray.live_nodes() or {}).values()} - {HEAD}

    def timeline(self, job_id: str, *kinds: str) -> list[dict[str, Any]]:
        return [each.data for each in self.client.iter_events(job_id) if each.kind in kinds]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrowingStack]:
    """A stack whose cluster grows to room for `MAX_NODES` workers."""
    folder = tmp_path_factory.mktemp("growing")
    config, port, dashboard_port = folder / "autoscaling.json", free_port(), free_port()
    config.write_text(json.dumps(autoscaling_config(port)))
    options = (
        f"--autoscaling-config={config}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
    )
    with ray_hosts({}, _SLOW_STEPS, SETTINGS, options, port) as head:
        token = head.environment["RAY_AUTH_TOKEN"]
        ray = RayState(f"http://127.0.0.1:{dashboard_port}", token)
        wait_for(ray.has_head, "Ray's dashboard", limit_s=PATIENCE_S)
        settings = {
            "SHARDLOOM_BACKEND": "ray_jobs",
            "SHARDLOOM_RAY_ADDRESS": ray.ray_address,
            "SHARDLOOM_RAY_AUTH_TOKEN": token,
            "SHARDLOOM_CLUSTER_MAX_WORKERS": str(MAX_NODES),
            "SHARDLOOM_RECONCILE_INTERVAL_S": "1",
        }
        service = ServiceProcess(folder, free_port(), settings)
        service.start()
        try:
            with ShardloomClient(service.url) as client:
                yield GrowingStack(head, ray, service, client)
        finally:
            service.kill()


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
        return hosts if len(hosts) == num_hosts and set(hosts) <= stack.nodes() else None

    return wait_on(stack, job_id, look, f"groups on {num_hosts} hosts")


def end(stack: GrowingStack, job_id: str) -> None:
    shardloom(stack, "cancel", job_id)
    wait_for(lambda: stack.client.get_job(job_id).status.is_terminal, "the end", PATIENCE_S)


def test_an_elastic_job_has_nodes_added_outlives_one_and_lets_idle_ones_leave(
    stack: GrowingStack, small_movielens: Path
) -> None:
    assert not stack.nodes(), "the cluster begins with a head that has no room"
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
    kill_tree(stack.head.raylet(lost))
    second = wait_on(
        stack, job_id, lambda: _without(lost, hosts_in_use(stack, job_id), 2), "a replacement"
    )
    assert len(set(second) - set(first)) == 1, "on a node that was not there before"
    assert not stack.timeline(job_id, "workers_lost"), "nothing was restarted"

    shardloom(stack, "resize", job_id, "1")
    kept = wait_for_hosts(stack, job_id, 1)
    wait_on(stack, job_id, lambda: stack.nodes() == set(kept), "the idle node to leave")
    step = stack.client.get_job(job_id).progress.step
    wait_on(
        stack, job_id, lambda: stack.client.get_job(job_id).progress.step > step + 5, "the others"
    )
    job = stack.client.get_job(job_id)
    assert job.num_failures == 0
    end(stack, job_id)


def _without(host: str, hosts: list[str], num_hosts: int) -> list[str] | None:
    return hosts if host not in hosts and len(hosts) == num_hosts else None

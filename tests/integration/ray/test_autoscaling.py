"""A cluster that grows by itself, really: nodes come when a job wants them, and leave when idle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.domain.models import JobStatus
from tests.conftest import EXAMPLE_SPEC
from tests.harness.ray_growing import PATIENCE_S, GrowingStack, growing_stack
from tests.harness.wait import Found, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMON = (
    "data.batch_size=16",
    "training.epochs=1000",
    "training.report_every_steps=1",
    "training.validate_every_steps=1000000",
    "recovery.heartbeat_timeout_s=30",
    "recovery.start_grace_s=30",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrowingStack]:
    with growing_stack(tmp_path_factory.mktemp("growing")) as stack:
        yield stack


def shardloom(stack: GrowingStack, *arguments: str) -> str:
    """What a command of the CLI prints."""
    command = [sys.executable, "-m", "service.cli", *arguments, "--url", stack.service.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(stack: GrowingStack, data: Path, *changes: str) -> str:
    """Submit the demo job with `changes`; its id."""
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


def test_a_job_whose_workers_restart_together_waits_for_a_new_node_after_a_lost_one(
    stack: GrowingStack, small_movielens: Path
) -> None:
    job_id = submit(
        stack,
        small_movielens,
        "parallelism.workers=2",
        "parallelism.shard_group_size=1",
        "parallelism.placement=intra_host",
        "checkpoint.every_steps=5",
    )
    (started,) = wait_on(
        stack, job_id, lambda: stack.timeline(job_id, "workers_started"), "workers"
    )
    wait_on(stack, job_id, lambda: stack.timeline(job_id, "checkpoint_committed"), "a checkpoint")
    lost = started["hosts"][1]
    stack.ray.kill(lost)

    def again() -> dict[str, Any] | None:
        runs = stack.timeline(job_id, "workers_started")
        return runs[-1] if runs[-1]["run_index"] > started["run_index"] else None

    restarted = wait_on(stack, job_id, again, "workers on a new node")
    assert lost not in restarted["hosts"]
    assert len(set(restarted["hosts"])) == 2
    assert restarted["resumed_step"] >= 5
    waits = [e for e in stack.timeline(job_id, "room_asked") if e["num_workers"] < e["num_needed"]]
    assert waits, "it said that it waits for the autoscaler"
    job = stack.client.get_job(job_id)
    assert job.num_failures == 0, "a lost host is nobody's fault"
    assert job.status is JobStatus.RUNNING
    end(stack, job_id)

"""Sharding groups as failure domains on real Ray: a lost host stops nobody, a new one is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import EXAMPLE_SPEC
from tests.harness.ray_hosts import DriverProcess, RayHosts, ray_hosts
from tests.harness.wait import scaled, wait_for
from trainer.data.manifest import load_manifest
from trainer.failures import EndReason
from trainer.fault_injection import Fault
from trainer.protocol import events
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides

# Three Ray nodes and three trainers start here: on two cores that takes minutes, and fails where
# the machine has anything else to do (a node's agent has 15 s to come up, whatever we say).
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        (os.cpu_count() or 1) < 4 and "SHARDLOOM_RAY_HOSTS" not in os.environ,
        reason="emulated Ray hosts need four cores; SHARDLOOM_RAY_HOSTS=1 runs them on fewer",
    ),
]

A, B, C, D = (f"127.0.0.{number}" for number in range(3, 7))
EPOCHS = 10
# A step takes a while whatever the machine, so that a job outlives the start of a group.
SLOW_STEPS = [
    Fault(kind="slow", group=group, rank=0, step=0, phase="lookup", arg=0.025, times=10**6)
    for group in range(3)
]


def job(data: Path, *overrides: str) -> JobSpec:
    """The demo job as three groups of one worker, each a failure domain."""
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    changes = [
        f"data.path={data}",
        "data.batch_size=16",
        "parallelism.workers={min: 1, max: 3}",
        "parallelism.shard_group_size=1",
        "parallelism.placement=inter_host",
        "parallelism.survive={hosts: 1}",
        "parallelism.sync={every_steps: 8}",
        f"training.epochs={EPOCHS}",
        "training.report_every_steps=1",
        "training.validate_every_steps=100000",
        "checkpoint.every_steps=100000",
        "recovery.start_grace_s=30",
        f"recovery.heartbeat_timeout_s={scaled(5.0)}",
    ]
    return validate_spec(apply_overrides(document, [*changes, *overrides]))


@pytest.fixture
def hosts() -> Iterator[RayHosts]:
    with ray_hosts({A: 1, B: 1, C: 1}, SLOW_STEPS) as hosts:
        yield hosts


def members(driver: DriverProcess) -> dict[int, str]:
    """Host of each group that is current, by the newest membership."""
    changes = driver.told(events.MembershipChanged)
    groups = changes[-1].groups if changes else []
    return {each.group: each.hosts[0] for each in groups if each.standing == "current"}


def wait_for_members(driver: DriverProcess, where: set[str]) -> None:
    wait_for(
        lambda: driver.process.poll() is not None or set(members(driver).values()) == where,
        f"groups on {sorted(where)}, not on {members(driver)}",
        limit_s=240,
    )
    assert driver.process.poll() is None, driver.log()


def test_a_lost_host_stops_nobody_and_its_group_comes_back_on_another(
    hosts: RayHosts, small_movielens: Path, tmp_path: Path
) -> None:
    tuned = "parallelism.sync={every_steps: auto, tuner: {min_steps: 4, time_share: 0.0001}}"
    spec = job(small_movielens, "recovery.min_node_speed=0.001", tuned)
    driver = DriverProcess.start(hosts, tmp_path / "run", spec)
    try:
        wait_for_members(driver, {A, B, C})
        hosts.kill(B)
        wait_for_members(driver, {A, C})
        reached = driver.step
        hosts.start({D: 1})
        wait_for_members(driver, {A, C, D})
        assert driver.step > reached, "the others trained on while a group joined"
        assert driver.process.wait(timeout=240) == 0, driver.log()
    finally:
        driver.end()
    (ended,) = driver.told(events.AttemptEnded)
    assert ended.reason == EndReason.COMPLETED
    num_rows = load_manifest(small_movielens).splits["train"].num_rows
    assert driver.told(events.Progress)[-1].rows == num_rows * EPOCHS
    assert [each.group for each in driver.told(events.GroupLost)] == [1]
    assert not driver.told(events.WorkersLost), "nothing was restarted"
    moves = driver.told(events.SyncIntervalChanged)
    assert moves[0].every_steps_before == 4 and moves[0].every_steps == 8
    checks = [line for line in driver.log().splitlines() if "node check: " in line]
    for speed in ("matrix products", "memory", "storage", "network"):
        assert [line.count(speed) for line in checks] == [3, 1], checks
    # By then a sync averages all rows, and brings them to who copies: no bytes need be copied.
    assert {each.how for each in driver.told(events.GroupJoined)} == {"start", "peer_copy"}


def test_a_raylet_that_dies_takes_down_its_group_and_nobody_else(
    hosts: RayHosts, small_movielens: Path, tmp_path: Path
) -> None:
    driver = DriverProcess.start(hosts, tmp_path / "run", job(small_movielens))
    try:
        wait_for_members(driver, {A, B, C})
        hosts.kill_raylet(C)
        wait_for_members(driver, {A, B})
        reached = driver.step
        wait_for(lambda: driver.step > reached + 5, "the others train on", limit_s=60)
        assert driver.process.wait(timeout=240) == 0, driver.log()
    finally:
        driver.end()
    assert [each.group for each in driver.told(events.GroupLost)] == [2]
    assert not driver.told(events.WorkersLost), "nothing was restarted"


def test_a_driver_that_dies_is_followed_by_an_attempt_that_goes_on_from_its_checkpoint(
    hosts: RayHosts, small_movielens: Path, tmp_path: Path
) -> None:
    spec = job(small_movielens, "checkpoint.every_steps=20", "training.epochs=4")
    first = DriverProcess.start(hosts, tmp_path / "run", spec)
    try:
        wait_for(
            lambda: first.process.poll() is not None or first.told(events.CheckpointCommitted),
            "a checkpoint",
            limit_s=240,
        )
    finally:
        first.end()
    second = DriverProcess.start(hosts, tmp_path / "run", spec, attempt_index=1)
    try:
        assert second.process.wait(timeout=300) == 0, second.log()
    finally:
        second.end()
    saved = {each.step for each in first.told(events.CheckpointCommitted)}
    started = second.told(events.WorkersStarted)
    assert started[0].resumed_step in saved
    num_rows = load_manifest(small_movielens).splits["train"].num_rows
    assert second.told(events.Progress)[-1].rows == num_rows * 4

"""Hosts as a job sees them: room for its workers, their memory, and hosts that are yet to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import hosts, spec
from trainer.layout import hosts as hosts_module
from trainer.layout.hosts import (
    host_memory_bytes,
    hosts_by_address,
    hosts_to_come,
    num_that_fit,
    rooms,
    site_of,
    worker_bytes,
)
from trainer.spec.job import JobSpec

GIB = 2**30


def job(workers: Any = 4, **resources: Any) -> JobSpec:
    return spec(parallelism={"workers": workers, "shard_group_size": 2}, resources=resources)


def test_a_host_takes_as_many_workers_as_its_scarcest_resource_allows() -> None:
    assert num_that_fit({"CPU": 2.0}, {"CPU": 7.0}) == 3
    assert num_that_fit({"CPU": 0.1}, {"CPU": 0.3}) == 3
    assert num_that_fit({"CPU": 1.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 4.0}) == 4
    assert num_that_fit({"CPU": 1.0, "GPU": 1.0}, {"CPU": 16.0}) == 0


def test_room_and_memory_are_counted_in_what_a_worker_asks_for() -> None:
    halves = job(cpus_per_worker=0.5)
    assert rooms(halves, hosts(2, 1.4), use_gpu=False) == (4, 2)
    assert worker_bytes(halves, hosts(2, 1, memory_bytes=800), use_gpu=False) == (200, 200)
    assert worker_bytes(halves, hosts(2, memory_bytes=0), use_gpu=False) == (None, None)
    assert rooms(job(), hosts(8, 8, gpus=2), use_gpu=True) == (2, 2)


def test_a_gpu_for_each_worker_is_taken_where_that_is_left_open() -> None:
    for workers, device, gpus, expected in (
        (4, "cuda", 0, (True, (0, 0))),
        (4, "auto", 2, (True, (2, 2))),
        (4, "auto", 1, (False, (8, 8))),
        ({"min": 2, "max": 6}, "auto", 1, (True, (1, 1))),
        (4, "cpu", 2, (False, (8, 8))),
    ):
        site = site_of(job(workers, device=device), hosts(8, 8, gpus=gpus))
        assert (site.use_gpu, site.room) == expected


def test_workers_have_the_memory_of_the_smallest_gpu_where_ray_names_them_all() -> None:
    on_gpus = job(device="cuda")

    def memory(*types: str) -> int | None:
        nodes = [
            (f"10.0.0.{number}", {"CPU": 8, "GPU": 2, f"accelerator_type:{each}": 1.0})
            for number, each in enumerate(types)
        ]
        return site_of(on_gpus, hosts_by_address(nodes)).worker_bytes

    assert memory("H100", "H200") == 80 * GIB
    assert memory("A100") == 40 * GIB
    assert memory("H100", "T4") is None
    assert site_of(on_gpus, hosts(8, gpus=2)).worker_bytes is None
    (told,) = hosts_by_address([("10.0.0.1", {"GPU": 2, "accelerator_type:H100": 1.0})])
    assert told.gpu_memory_bytes == 80 * GIB, "as GET /v1/cluster tells it"


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 20))
def test_hosts_to_come_are_like_the_largest_and_make_no_more_room_than_the_cluster_may_have(
    slots: list[int], most: int
) -> None:
    there = hosts(*slots)
    found = hosts_to_come(job(), there, most, use_gpu=False)
    room = rooms(job(), found, use_gpu=False)
    if not any(slots):
        assert found == (), "nothing is known of what comes"
        return
    assert found[: len(there)] == there
    assert set(room[len(there) :]) <= {max(slots)}
    assert sum(room) + max(slots) > most
    assert sum(room) <= most or found == there


def test_the_memory_of_a_container_is_what_its_limit_leaves_of_the_host_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_CGROUP", tmp_path)
    of_host = host_memory_bytes()
    assert 0 < of_host[1] < of_host[0]
    files = {"max": "1000000", "current": "900000", "stat": "anon 1\ninactive_file 300000\n"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory_bytes() == (1_000_000, 400_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes()[0] == of_host[0], "no limit"

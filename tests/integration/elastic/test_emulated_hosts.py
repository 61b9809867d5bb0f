"""Emulated hosts: their link is as fast as set, and takes as long."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.emulated import EmulatedHosts, Link, missing_requirement, sent_bytes
from tests.harness.host_ranks import HostRanks
from tests.harness.wait import scaled
from trainer.layout.layout import WorkerSite

# Slow enough that a busy machine still fills it.
RATE_BITS_PER_S = 200_000_000
NUM_BYTES = 20_000_000
OWN_NAMESPACE = Path("/proc/self/ns/net")
NEIGHBOUR, FAR = 1, 2  # ranks, seen from rank 0: two ranks per host


def send_from_rank_0(site: WorkerSite, receiver: int) -> tuple[float, int]:
    """(seconds for `NUM_BYTES` from rank 0 to `receiver`, bytes that this host put on its link)."""
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    dist.barrier()
    started, sent = time.perf_counter(), sent_bytes()
    if site.rank == 0:
        dist.send(buffer, receiver)
    if site.rank == receiver:
        dist.recv(buffer, 0)
    duration_s = time.perf_counter() - started
    dist.barrier()  # a sender is done while the kernel still holds the end
    return duration_s, sent_bytes() - sent


def round_trip_s(site: WorkerSite) -> float:
    """The shortest of some between ranks 0 and `FAR`."""
    value, times_s = torch.zeros(1), []
    for _ in range(5):
        started = time.perf_counter()
        if site.rank == 0:
            dist.send(value, FAR)
            dist.recv(value, FAR)
        elif site.rank == FAR:
            dist.recv(value, 0)
            dist.send(value, 0)
        times_s.append(time.perf_counter() - started)
    return min(times_s)


def fail_on_the_last_rank(site: WorkerSite) -> None:
    if site.rank == dist.get_world_size() - 1:
        raise ValueError("the deliberate fault")


def host_of(site: WorkerSite) -> tuple[int, str, str]:
    return site.rank, site.host, str(OWN_NAMESPACE.readlink())


@pytest.mark.slow
def test_hosts_are_joined_by_a_link_of_the_set_rate_and_delay_and_ranks_of_one_by_none() -> None:
    if reason := missing_requirement():
        pytest.skip(reason)
    with EmulatedHosts(2, Link(RATE_BITS_PER_S, delay_ms=5)) as hosts:
        ranks = HostRanks(hosts, 2)
        placed = ranks.call(host_of)
        assert [each[:2] for each in placed] == [(rank, f"host-{rank // 2}") for rank in range(4)]
        namespaces = [namespace for _, _, namespace in placed]
        assert len({*namespaces, str(OWN_NAMESPACE.readlink())}) == 3
        far, near = ranks.call(send_from_rank_0, FAR), ranks.call(send_from_rank_0, NEIGHBOUR)
        assert 8 * NUM_BYTES / far[FAR][0] == pytest.approx(RATE_BITS_PER_S, rel=0.2)
        assert far[0][1] == pytest.approx(NUM_BYTES, rel=0.1)
        assert 8 * NUM_BYTES / near[NEIGHBOUR][0] > 2 * RATE_BITS_PER_S
        assert near[0][1] < NUM_BYTES / 100
        assert 0.01 <= ranks.call(round_trip_s)[0] < 0.01 + scaled(0.01)
        with pytest.raises(AssertionError, match="the deliberate fault"):
            ranks.call(fail_on_the_last_rank)
        assert len(ranks.call(host_of)) == 4, "the next call works"

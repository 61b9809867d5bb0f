"""Emulated hosts: their link is as fast as set."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.emulated import (
    EmulatedHosts,
    Link,
    missing_requirement,
    sent_bytes,
)
from tests.harness.host_ranks import HostRanks
from tests.harness.wait import scaled
from trainer.layout.layout import WorkerSite

pytestmark = pytest.mark.slow

# Slow enough that a busy machine still fills it.
RATE_BITS_PER_S = 200_000_000
NUM_BYTES = 20_000_000
OWN_NAMESPACE = Path("/proc/self/ns/net")
NEIGHBOUR, FAR = 1, 2  # ranks, seen from rank 0: two ranks per host


@pytest.fixture(scope="module", autouse=True)
def needs_emulation() -> None:
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def ranks():
    link = Link(RATE_BITS_PER_S)
    with EmulatedHosts(2, link) as hosts:
        yield HostRanks(hosts, 2)


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


def fail_on_the_last_rank(site: WorkerSite) -> None:
    if site.rank == dist.get_world_size() - 1:
        raise ValueError("the deliberate fault")


def host_of(site: WorkerSite) -> tuple[int, str, str]:
    return site.rank, site.host, str(OWN_NAMESPACE.readlink())


def test_ranks_of_a_host_share_no_link_and_those_of_two_hosts_one_of_the_set_rate(ranks):
    placed = ranks.call(host_of)
    assert [(rank, host) for rank, host, _ in placed] == [
        (0, "host-0"),
        (1, "host-0"),
        (2, "host-1"),
        (3, "host-1"),
    ]
    namespaces = [namespace for _, _, namespace in placed]
    assert len({*namespaces, str(OWN_NAMESPACE.readlink())}) == 3
    far, near = ranks.call(send_from_rank_0, FAR), ranks.call(send_from_rank_0, NEIGHBOUR)
    assert 8 * NUM_BYTES / far[FAR][0] == pytest.approx(RATE_BITS_PER_S, rel=0.2)
    assert far[0][1] == pytest.approx(NUM_BYTES, rel=0.1)
    assert 8 * NUM_BYTES / near[NEIGHBOUR][0] > 2 * RATE_BITS_PER_S
    assert near[0][1] < NUM_BYTES / 100
    with pytest.raises(AssertionError, match="the deliberate fault"):
        ranks.call(fail_on_the_last_rank)
    assert len(ranks.call(host_of)) == 4, "the next call works"


def round_trip_s(site: WorkerSite) -> float:
    """The shortest of some between the two hosts."""
    value, other, times_s = torch.zeros(1), 1 - site.rank, []
    for _ in range(5):
        started = time.perf_counter()
        for is_sent in (site.rank == 0, site.rank == 1):
            (dist.send if is_sent else dist.recv)(value, other)
        times_s.append(time.perf_counter() - started)
    return min(times_s)


def test_a_link_takes_as_long_as_set_and_stays_as_fast():
    with EmulatedHosts(2, Link(RATE_BITS_PER_S, delay_ms=5)) as hosts:
        ranks = HostRanks(hosts, 1)
        trip_s, _ = ranks.call(round_trip_s)
        assert 0.01 <= trip_s < 0.01 + scaled(0.01)
        far = ranks.call(send_from_rank_0, 1)
        assert 8 * NUM_BYTES / far[1][0] == pytest.approx(RATE_BITS_PER_S, rel=0.2)

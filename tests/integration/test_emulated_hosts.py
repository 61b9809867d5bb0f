"""Emulated hosts: their link is as fast as set, and nothing of them outlives their owner."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.emulated_hosts import (
    EmulatedHosts,
    EmulationError,
    Link,
    missing_requirement,
    sent_bytes,
)
from tests.benchmarks.emulated_ranks import HostRanks
from trainer.parallel.layout import WorkerSite

# Slow enough that a busy machine still fills it.
RATE_BITS_PER_S = 200_000_000
NUM_BYTES = 20_000_000
OWN_NAMESPACE = Path("/proc/self/ns/net")
NEIGHBOUR, FAR = 1, 2  # ranks, seen from rank 0: two ranks per host

OWNER = """
import sys
from subprocess import PIPE
from tests.benchmarks.emulated_hosts import EmulatedHosts, Link
with EmulatedHosts(2, Link(10**9)) as hosts:
    for host in range(2):
        shell = "readlink /proc/self/ns/net; setsid sleep 600 & wait"
        child = hosts.start(host, ["sh", "-c", shell], cwd="/", stdout=PIPE, text=True)
        print(child.stdout.readline().strip(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def needs_emulation() -> None:
    reason = missing_requirement()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def ranks():
    link = Link(RATE_BITS_PER_S)
    with EmulatedHosts(2, link) as hosts, HostRanks(hosts, 2, [__name__]) as each:
        yield each


def send_from_rank_0(site: WorkerSite, receiver: int) -> tuple[float, int]:
    """(seconds for `NUM_BYTES` from rank 0 to `receiver`, bytes that this host put on its link)."""
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    dist.barrier()
    started, sent = time.perf_counter(), sent_bytes()
    if site.rank == 0:
        dist.send(buffer, receiver)
    if site.rank == receiver:
        dist.recv(buffer, 0)
    return time.perf_counter() - started, sent_bytes() - sent


def fail_on_the_last_rank(site: WorkerSite) -> None:
    if site.rank == dist.get_world_size() - 1:
        raise ValueError("the deliberate fault")


def host_of(site: WorkerSite) -> tuple[int, str, str]:
    return site.rank, site.host, str(OWN_NAMESPACE.readlink())


def test_between_hosts_gloo_is_as_fast_as_the_link_is_set(ranks):
    results = ranks.call(send_from_rank_0, FAR)
    received_s, _ = results[FAR]
    _, sent = results[0]
    assert 8 * NUM_BYTES / received_s == pytest.approx(RATE_BITS_PER_S, rel=0.2)
    assert sent == pytest.approx(NUM_BYTES, rel=0.1)


def test_inside_a_host_nothing_goes_over_the_link(ranks):
    results = ranks.call(send_from_rank_0, NEIGHBOUR)
    received_s, _ = results[NEIGHBOUR]
    _, sent = results[0]
    assert 8 * NUM_BYTES / received_s > 2 * RATE_BITS_PER_S
    assert sent < NUM_BYTES / 100


def test_ranks_are_numbered_host_by_host_in_namespaces_of_their_own(ranks):
    placed = ranks.call(host_of)
    assert [(rank, host) for rank, host, _ in placed] == [
        (0, "host-0"),
        (1, "host-0"),
        (2, "host-1"),
        (3, "host-1"),
    ]
    namespaces = [namespace for _, _, namespace in placed]
    assert len({*namespaces, str(OWN_NAMESPACE.readlink())}) == 3


def test_a_failed_rank_is_told_and_the_next_call_works(ranks):
    with pytest.raises(EmulationError, match="the deliberate fault"):
        ranks.call(fail_on_the_last_rank)
    assert len(ranks.call(host_of)) == 4


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_hosts_and_all_in_them_end_with_their_owner(end):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdin and owner.stdout
        namespaces = {owner.stdout.readline().strip() for _ in range(2)}
        assert namespaces <= namespaces_in_use()
        if end == "kill":
            owner.kill()
        else:
            owner.stdin.close()
        owner.wait(timeout=20)
    deadline = time.monotonic() + 10
    while namespaces & namespaces_in_use() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not namespaces & namespaces_in_use()


def namespaces_in_use() -> set[str]:
    """Network namespaces that some process lives in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(entry.readlink()))
        except FileNotFoundError:
            continue  # it ended meanwhile
    return found

"""The process group between groups: what it tells of its progress, and of peers that fail."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.harness.wait import scaled
from trainer.elastic.group_sync import CrossGroupProcessGroup, ExchangeError, ReplicaRank

CPU = torch.device("cpu")


def form(
    store: dist.Store, index: int, size: int, address: str, advance=lambda: None, timeout_s=20.0
) -> CrossGroupProcessGroup:
    return CrossGroupProcessGroup(
        ReplicaRank(1, 0, index, size),
        store,
        CPU,
        scaled(timeout_s),
        lambda: False,
        advance,
        address,
    )


def test_each_part_of_an_exchange_is_progress_and_a_peer_that_takes_no_connection_is_named():
    store, parts = dist.HashStore(), []
    out, part = torch.zeros(3), torch.ones(1)
    with socket.create_server(("127.0.0.1", 0)) as alive, ThreadPoolExecutor(3) as pool:
        address = f"127.0.0.1:{alive.getsockname()[1]}"
        addresses = [address, address, "127.0.0.1:1"]
        forming = [
            pool.submit(form, store, index, 3, addresses[index], lambda: parts.append(1))
            for index in range(3)
        ]
        groups = [each.result() for each in forming]
        sums = [pool.submit(group.all_gather, out.clone(), part) for group in groups]
        for each in sums:
            each.result()
        assert len(parts) == 3
        failing = [pool.submit(group.all_gather, out.clone(), part) for group in groups[:2]]
        groups[2].drop()
        found = [each.exception() for each in failing]
    assert all(isinstance(each, ExchangeError) for each in found)
    assert [each.suspects for each in found] == [(2,), (2,)]
    assert not any(each.gave_up for each in found)
    for group in groups:
        group.drop()


def test_peers_that_do_not_come_are_named():
    with pytest.raises(ExchangeError, match="did not meet") as failed:
        form(dist.HashStore(), 1, 3, "", timeout_s=0.05)
    assert failed.value.suspects == (0, 2)


def test_who_was_told_to_give_up_names_nobody():
    with pytest.raises(ExchangeError, match="given up") as failed:
        CrossGroupProcessGroup(ReplicaRank(1, 0, 0, 2), dist.HashStore(), CPU, 20.0, lambda: True)
    assert failed.value.gave_up

"""Gloo ranks on emulated hosts: calls a function on every rank and hands back what they return.

Ranks are numbered host by host. Gloo binds to eth0, so ranks of one host talk through the host's
loopback and ranks of different hosts through the shaped link; rank 0's host holds the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from tests.harness.emulated import INTERFACE, EmulatedHosts, enter_network
from tests.harness.ranks import run_ranks
from trainer.layout.layout import WorkerSite

_COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class HostRanks:
    """`ranks_per_host` ranks on each of `hosts`."""

    hosts: EmulatedHosts
    ranks_per_host: int
    _ports: count[int] = field(default_factory=lambda: count(29500))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(site, *args)` on every rank of a fresh gloo world; results indexed by rank.

        `site` is the rank's WorkerSite; function, arguments and results must pickle. Raises
        AssertionError as `run_ranks` does.
        """
        addresses = self.hosts.addresses
        networks = [self.hosts.network(host) for host in range(len(addresses))]
        # A port of its own: that of the last call may still linger in the kernel.
        place = _Place(networks, self.ranks_per_host, addresses[0], next(self._ports))
        world_size = len(addresses) * self.ranks_per_host
        return run_ranks(_on_host, world_size, place, function, args, timeout_s=600, fresh=True)


@dataclass(frozen=True)
class _Place:
    networks: list[Path]
    ranks_per_host: int
    store_address: str
    store_port: int


def _on_host(place: _Place, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One rank: leave the world that it was started in for that of the hosts, and call."""
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    host, local = divmod(rank, place.ranks_per_host)
    dist.destroy_process_group()
    enter_network(place.networks[host])
    os.environ.update(
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(place.ranks_per_host),
        MASTER_ADDR=place.store_address,
        MASTER_PORT=str(place.store_port),
        GLOO_SOCKET_IFNAME=INTERFACE,
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    return function(WorkerSite(rank, f"host-{host}", local), *args)

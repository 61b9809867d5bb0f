"""A short probe of what memory and links of the workers really carry, for the planner.

    memory       copy inside each worker's memory, all workers at once
    intra_host   pairs of a sharding group's ranks on one host swap a buffer, all pairs at once
    inter_host   the same with pairs on different hosts

Collectives: sends and receives between those pairs, one gather of the results; all on the *global
group*. Everything runs at the same time on purpose: so it does in training. It takes about 0.1 s
on CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer.parallel.groups import MeshGroups

_NUM_REPEATS = 3
# A GPU moves a small buffer before it has got going; a shaped network takes long over a large one.
_LINK_BYTES = {"cpu": 2**19, "cuda": 2**24}
_MEMORY_BYTES = {"cpu": 2**25, "cuda": 2**28}


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per millisecond and worker, the planner's unit; None where no two ranks share one."""

    memory: float
    intra_host: float | None = None
    inter_host: float | None = None


def measure_bandwidths(groups: MeshGroups) -> Bandwidths:
    """Medians over all workers, equal on every rank. Collective over the global group."""
    hosts = [groups.sites[rank].host for rank in groups.sharding_ranks]
    mine = Bandwidths(
        memory=_memory_bandwidth(groups.device),
        intra_host=_link_bandwidth(groups, partners(hosts, same_host=True)),
        inter_host=_link_bandwidth(groups, partners(hosts, same_host=False)),
    )
    everyone: list[Bandwidths] = [mine] * groups.layout.world_size
    dist.all_gather_object(everyone, mine, group=groups.global_group)
    return median_bandwidths(everyone)


def partners(hosts: Sequence[str], *, same_host: bool) -> dict[int, int]:
    """Disjoint pairs of positions on the same host, or on different ones; both ways round.

    `hosts[p]` is the host of position p. Positions for which nobody is left have no entry.
    """
    free = list(range(len(hosts)))
    found: dict[int, int] = {}
    while free:
        first = free.pop(0)
        second = next((p for p in free if (hosts[p] == hosts[first]) == same_host), None)
        if second is not None:
            free.remove(second)
            found[first], found[second] = second, first
    return found


def median_bandwidths(measured: Sequence[Bandwidths]) -> Bandwidths:
    """Median of each kind over the workers that measured it."""

    def median(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return Bandwidths(
        memory=statistics.median(each.memory for each in measured),
        intra_host=median([each.intra_host for each in measured]),
        inter_host=median([each.inter_host for each in measured]),
    )


def _memory_bandwidth(device: torch.device) -> float:
    source = torch.zeros(_MEMORY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    time_ms = _median_time_ms(lambda: target.copy_(source), device)
    return 2 * source.nbytes / time_ms  # each byte is read and written


def _link_bandwidth(groups: MeshGroups, pairs: dict[int, int]) -> float | None:
    # NCCL forms its links in the first call, which all ranks of a group must take part in.
    dist.barrier(groups.global_group)
    if groups.shard_index not in pairs:
        return None
    peer = groups.sharding_ranks[pairs[groups.shard_index]]
    sent = torch.zeros(_LINK_BYTES[groups.device.type], dtype=torch.uint8, device=groups.device)
    received = torch.empty_like(sent)

    def swap() -> None:
        group = groups.global_group
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer, group),
                dist.P2POp(dist.irecv, received, peer, group),
            ]
        )
        for request in requests:
            request.wait()

    return sent.nbytes / _median_time_ms(swap, groups.device)


def _median_time_ms(action: Callable[[], object], device: torch.device) -> float:
    action()  # the first one pays for allocation and connections
    times_ms = []
    for _ in range(_NUM_REPEATS):
        _wait_for(device)
        started = time.perf_counter()
        action()
        _wait_for(device)
        times_ms.append(1000 * (time.perf_counter() - started))
    return statistics.median(times_ms)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

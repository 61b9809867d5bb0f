"""Which host each shard of each sharding group sits on: pure packing, no torch.

`GroupHosts[g][s]` is the index of the host that holds shard s of sharding group g.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from trainer.parallel.layout import Layout

GroupHosts = tuple[tuple[int, ...], ...]


def fill_hosts(hosts: Sequence[int], layout: Layout) -> GroupHosts:
    """The groups of a layout whose positions fill the hosts one after the other.

    `hosts` are the workers that each has room for, at least `layout.world_size` in all.
    """
    positions = _places(hosts, layout.world_size)
    return tuple(tuple(positions[p] for p in group) for group in layout.sharding_groups)


def packings(hosts: Sequence[int], group_size: int, most_groups: int) -> tuple[GroupHosts, ...]:
    """Ways to place independent groups, each a different one; none where no group fits.

    All put groups inside single hosts first, spread over as many hosts as there are. The others
    add groups that span hosts, from what is left: with no host in common, and one after the other,
    which makes more of them.
    """
    left = list(hosts)
    inside = _inside_hosts(left, group_size, most_groups)
    missing = most_groups - len(inside)
    ways = [
        inside,
        inside + _apart(left, group_size, missing),
        inside + _in_a_row(left, group_size, missing),
    ]
    return tuple(dict.fromkeys(tuple(sorted(groups)) for groups in ways if groups))


def _inside_hosts(left: list[int], size: int, most_groups: int) -> list[tuple[int, ...]]:
    """Groups on one host each, taken from `left`: hosts with fewest groups, then most room."""
    groups: list[tuple[int, ...]] = []
    order = [(0, -room, host) for host, room in enumerate(left) if room >= size]
    heapq.heapify(order)
    while order and len(groups) < most_groups:
        num_groups, _, host = heapq.heappop(order)
        groups.append((host,) * size)
        left[host] -= size
        if left[host] >= size:
            heapq.heappush(order, (num_groups + 1, -left[host], host))
    return groups


def _apart(left: Sequence[int], size: int, most_groups: int) -> list[tuple[int, ...]]:
    """Groups that span hosts of which each belongs to one of them."""
    groups: list[tuple[int, ...]] = []
    group: tuple[int, ...] = ()
    for host, room in enumerate(left):
        if len(groups) == most_groups:
            break
        group += (host,) * min(room, size)
        if len(group) >= size:
            groups.append(group[:size])
            group = ()
    return groups


def _in_a_row(left: Sequence[int], size: int, most_groups: int) -> list[tuple[int, ...]]:
    """Groups that take one free place after the other."""
    places = _places(left, size * most_groups)
    return [places[start : start + size] for start in range(0, len(places) - size + 1, size)]


def _places(hosts: Sequence[int], most: int) -> tuple[int, ...]:
    """The host of each free place, host by host."""
    places = (host for host, room in enumerate(hosts) for _ in range(room))
    return tuple(itertools.islice(places, most))

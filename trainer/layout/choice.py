"""The layout for a job: legal candidates with their prices, and the best one for spec and hosts.

Pure arithmetic, no torch. `candidates` lists every legal layout, `choose` takes the best one that
survives what it must, with the reason in a sentence, or says what would be needed. Independent
groups are placed by `placements`, by which the driver starts them, too.
`GroupHosts[g][s]` is the index of the host that holds shard s of sharding group g.

What `auto` means:

* Without `survive` a lost host restarts the job, so speed decides: the smallest L that holds the
  tables, because a large L makes every lookup slow, as long as the M = T / L copies of each shard
  fit on one host (`intra_host`), so that no sync crosses hosts. Where no two copies can share a
  host, groups that each sit inside one (`inter_host`).
* With `survive`, or `inter_host` given, every group is a failure domain of its own, and what fails
  is a host. More copies than one a host add memory and syncs but no safety, so the fewest copies
  win (at least two), among layouts whose groups each sit inside one host: lookups stay there.
* Groups of which the fewest workers make `min_groups` win over larger ones.
* More workers win over fewer, and a second copy over none.
* Where the size of the tables or the memory of a worker is not known, the fewest copies win, too:
  the largest groups that still leave two.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.layout.cost import memory_overhead_bytes, sync_latency_s
from trainer.layout.layout import Layout, LayoutError
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import FailureDomain

GroupHosts = tuple[tuple[int, ...], ...]
# Every L up to here is tried.
_NUM_SMALL = 64


class Room(NamedTuple):
    """A host for groups: `slots` workers fit when it is empty, `free` now; it has `num_groups`."""

    slots: int
    free: int
    num_groups: int = 0


def packing(
    hosts: Sequence[int], group_size: int, most_groups: int, least_hosts: int
) -> GroupHosts:
    """The hosts of each independent group that finds a place where there are no others."""
    rooms = list(map(Room, hosts, hosts))
    places = placements(rooms, group_size, most_groups, least_hosts=least_hosts)
    return tuple(sorted(itertools.islice(places, most_groups)))


def placements(
    rooms: Sequence[Room],
    size: int,
    target: int,
    *,
    num_across: int = 0,
    least_hosts: int = 1,
    may_share: bool = True,
) -> Iterator[tuple[int, ...]]:
    """The hosts of one more group after another, while there is room.

    `target` is how many groups there are to be, with those that are there, `num_across` of them
    across hosts. Groups sit inside single hosts: those with the fewest groups, then with most room.
    They share one only if they `may_share`, there are fewer such hosts than groups, and
    `least_hosts` groups share none. Those that would not fit that way even if all were empty are
    across the hosts that are too small for a whole group, each of which takes part in one.
    """
    able = [host for host, room in enumerate(rooms) if room.slots >= size]
    are_able = [slots >= size for slots, _, num_groups in rooms if num_groups]
    num_apart = sum(are_able) + min(are_able.count(False), num_across)
    num_across += sum(rooms[host].slots // size for host in able)
    may_share &= len(able) < target
    inside = [(rooms[n].num_groups, -rooms[n].free, n) for n in able if rooms[n].free >= size]
    heapq.heapify(inside)
    small = sorted(
        (free, -host)
        for host, (slots, free, num_groups) in enumerate(rooms)
        if slots < size and free and not num_groups
    )
    while True:
        is_spread = num_apart >= least_hosts
        may_be_across = num_across < target or not (is_spread or len(able) >= least_hosts)
        if inside and (not inside[0][0] or (may_share and is_spread)):
            num_groups, free, host = heapq.heappop(inside)
            num_apart += not num_groups
            if free + size <= -size:
                heapq.heappush(inside, (num_groups + 1, free + size, host))
            yield (host,) * size
        elif may_be_across and (group := _across(small, size)):
            num_apart, num_across = num_apart + 1, num_across + 1
            yield group
        else:
            return


def _across(small: list[tuple[int, int]], size: int) -> tuple[int, ...]:
    """A group on as few hosts as may be, taken from `small`: (room, -host), in order; or nothing.

    The largest come first, and last the smallest that is enough.
    """
    hosts: list[int] = []
    while small and (missing := size - len(hosts)):
        is_enough = small[-1][0] >= missing
        room, host = small.pop(bisect.bisect_right(small, (missing - 1, 0)) if is_enough else -1)
        hosts += [-host] * min(room, missing)
    return tuple(hosts) if len(hosts) == size else ()


@dataclass(frozen=True)
class Need:
    """What a job asks for, and what there is. None stands for auto, or for not known.

    `hosts` are the workers that each host has room for. `table_bytes` is S: one whole copy of the
    tables with optimizer state. `worker_table_bytes` is how much of S one worker can hold, and
    `whole_table_bytes` lists the tables that cannot be split. `links_bytes_per_s` is what one
    worker gets inside a host and between hosts; B is the former where every shard has its copies on
    one host. `tied_by` says which setting, if any, ties the sharding groups together between syncs,
    `min_groups` how many groups the fewest workers must make.
    """

    hosts: tuple[int, ...]
    min_workers: int
    max_workers: int
    shard_group_size: int | None = None
    placement: str | None = None
    survive_hosts: int = 0
    table_bytes: int | None = None
    worker_table_bytes: int | None = None
    whole_table_bytes: tuple[int, ...] = ()
    links_bytes_per_s: tuple[float, float] | None = None
    tied_by: str = ""
    min_groups: int = 1

    @property
    def is_size_known(self) -> bool:
        """Whether it can be told which groups hold the tables."""
        return self.table_bytes is not None and self.worker_table_bytes is not None

    def holds_tables(self, shard_group_size: int) -> bool:
        """Whether a group of that size has room for one copy; True where that is not known.

        Tables that cannot be split are laid largest first on the emptiest worker.
        """
        if self.table_bytes is None or self.worker_table_bytes is None:
            return True
        loads = [0] * min(shard_group_size, max(len(self.whole_table_bytes), 1))
        for size in sorted(self.whole_table_bytes, reverse=True):
            heapq.heapreplace(loads, loads[0] + size)
        room = shard_group_size * self.worker_table_bytes
        return max(loads) <= self.worker_table_bytes and self.table_bytes <= room


@dataclass(frozen=True)
class Choice:
    """A layout on the cluster's hosts, and its price (2D sparse parallelism paper, eq. 1).

    `group_hosts[g][s]` is the host, an index into `Need.hosts`, of shard s of sharding group g.
    `num_hosts_survived` hosts, any of them, may be lost at once while a whole group trains on; 0
    in the domain `job`, whose workers restart together. `memory_overhead_bytes` is what the other
    copies cost each worker, S (M - 1) / T, and `sync_latency_s` a full sync, 2 S (M - 1) / (T B);
    None where S or B is not known.
    """

    layout: Layout
    failure_domain: FailureDomain
    group_hosts: GroupHosts
    num_hosts_survived: int
    memory_overhead_bytes: int | None = None
    sync_latency_s: float | None = None
    reason: str = ""

    @property
    def num_hosts(self) -> int:
        return len({host for hosts in self.group_hosts for host in hosts})

    @property
    def copies_by_host(self) -> tuple[dict[int, int], ...]:
        """For each shard: host -> how many of the M copies it holds."""
        return tuple(dict(Counter(hosts)) for hosts in zip(*self.group_hosts, strict=True))

    @property
    def most_groups_per_host(self) -> int:
        """How many sharding groups the loss of one host takes down, at worst."""
        return max(Counter(host for group in self.group_hosts for host in set(group)).values())

    @property
    def are_lookups_local(self) -> bool:
        return all(len(set(hosts)) == 1 for hosts in self.group_hosts)

    @property
    def are_syncs_local(self) -> bool:
        """Whether the copies of each shard sit inside one host."""
        return all(len(holders) == 1 for holders in self.copies_by_host)


def need_of(
    spec: JobSpec,
    hosts: Sequence[int],
    worker_bytes: int | None = None,
    links_bytes_per_s: tuple[float, float] | None = None,
) -> Need:
    """The need of a spec on hosts with room for so many workers each.

    `worker_bytes` is the least memory of a worker; the spec's own limit takes precedence.
    """
    parallelism = spec.parallelism
    group, placement = parallelism.shard_group_size, parallelism.placement
    memory_bytes = spec.resources.memory_bytes_per_worker or worker_bytes
    room_bytes = None
    if memory_bytes is not None and not spec.may_cache:
        room_bytes = int(memory_bytes * (1 - parallelism.planner.storage_reservation))
        if spec.table_bytes:  # syncs hold part of the tables once more
            sync_bytes = sum(map(spec.sync_bytes, spec.embedding_tables))
            room_bytes = room_bytes * spec.table_bytes // (spec.table_bytes + sync_bytes)
    return Need(
        hosts=tuple(hosts),
        min_workers=parallelism.min_workers,
        max_workers=parallelism.world_size,
        shard_group_size=None if group == "auto" else group,
        placement=None if placement == "auto" else placement,
        survive_hosts=parallelism.survive.hosts if parallelism.survive else 0,
        table_bytes=spec.table_bytes,
        worker_table_bytes=room_bytes,
        whole_table_bytes=spec.whole_table_bytes,
        links_bytes_per_s=links_bytes_per_s,
        tied_by=parallelism.tied_by,
        min_groups=parallelism.min_groups,
    )


def choose(need: Need) -> Choice:
    """The best layout that survives what it must; raises `LayoutError` with what would be needed.

    The rule is in the module's docstring.
    """
    possible = candidates(need)
    if not possible or possible[0].num_hosts_survived < need.survive_hosts:
        possible = possible or candidates(replace(need, survive_hosts=0))
        raise LayoutError(_why_none(need, possible))
    return replace(possible[0], reason=_reason(need, possible[0]))


def candidates(need: Need) -> tuple[Choice, ...]:
    """Every layout that the cluster can hold with at least the fewest workers, best first."""
    found = [
        choice
        for size in _group_sizes(need)
        for placement in _placements(need, size)
        for choice in _laid_out(need, size, placement)
        if choice.layout.world_size >= need.min_workers
    ]
    return tuple(sorted(found, key=lambda choice: _preference(need, choice)))


def _placements(need: Need, size: int) -> tuple[str, ...]:
    """The placements to try; where there is one copy they are the same."""
    if need.placement is not None:
        return (need.placement,)
    return ("intra_host", "inter_host") if need.max_workers // size > 1 else ("intra_host",)


def _group_sizes(need: Need) -> list[int]:
    """Each L that holds the tables and divides a number of workers within the bounds.

    Of large ones only those that divide a bound: the others leave workers out for nothing.
    """
    least, most, given = need.min_workers, need.max_workers, need.shard_group_size
    sizes = range(1, most + 1) if given is None else (given,)
    return [
        size
        for size in sizes
        if (size == given or size <= _NUM_SMALL or not most % size or not least % size)
        and most // size * size >= least
        and need.holds_tables(size)
    ]


def _laid_out(need: Need, size: int, placement: str) -> Iterator[Choice]:
    """The layouts of groups of `size` with as many workers as there are, or may be."""
    most_groups = need.max_workers // size
    # What a lost host takes down is the same as `ParallelismSpec.failure_domain`.
    if placement == "inter_host" and most_groups > 1 and not need.tied_by:
        if hosts := packing(need.hosts, size, most_groups, 1 + need.survive_hosts):
            yield _priced(need, Layout(size * len(hosts), size, placement), hosts, "replica_group")
    elif num_workers := min(most_groups, sum(need.hosts) // size) * size:
        layout, rooms = Layout(num_workers, size, placement), Counter(dict(enumerate(need.hosts)))
        places = tuple(itertools.islice(rooms.elements(), num_workers))  # host by host
        groups = tuple(tuple(places[p] for p in group) for group in layout.sharding_groups)
        yield _priced(need, layout, groups, "job")


def _priced(need: Need, layout: Layout, hosts: GroupHosts, domain: FailureDomain) -> Choice:
    # Groups have all of their hosts in common, or none.
    survived = len(set(hosts)) - 1 if domain == "replica_group" else 0
    choice, size_bytes = Choice(layout, domain, hosts, survived), need.table_bytes
    if size_bytes is None:
        return choice
    choice = replace(choice, memory_overhead_bytes=memory_overhead_bytes(size_bytes, layout))
    if need.links_bytes_per_s is None:
        return choice
    link = need.links_bytes_per_s[0 if choice.are_syncs_local else 1]
    return replace(choice, sync_latency_s=sync_latency_s(size_bytes, layout, link))


def _preference(need: Need, choice: Choice) -> tuple[int, ...]:
    """Sorts the best first; see the module's docstring."""
    layout = choice.layout
    is_intra = layout.placement == "intra_host"
    fewest_copies_win = not is_intra or not need.is_size_known
    return (
        -min(choice.num_hosts_survived, need.survive_hosts),
        math.ceil(need.min_workers / layout.shard_group_size) < need.min_groups,
        -layout.world_size,
        layout.num_replicas == 1,
        not (choice.are_syncs_local if is_intra else choice.are_lookups_local),
        not is_intra,
        layout.num_replicas if fewest_copies_win else layout.shard_group_size,
    )


def _reason(need: Need, choice: Choice) -> str:
    """Why this layout, in one sentence with its numbers."""
    layout = choice.layout
    groups = _counted(layout.num_replicas, "group")
    workers, hosts = _counted(layout.shard_group_size, "worker"), _counted(choice.num_hosts, "host")
    why = f"{_size_reason(need, choice)}; {_placement_reason(need, choice)}"
    if need.tied_by and layout.placement == "inter_host" and layout.num_replicas > 1:
        why += f"; the failure domain is the whole job, as {need.tied_by}"
    return f"{groups} of {workers} on {hosts}: {why}"


def _size_reason(need: Need, choice: Choice) -> str:
    size = choice.layout.shard_group_size
    if need.shard_group_size is not None:
        return f"parallelism.shard_group_size is {size}"
    if need.max_workers == 1:
        return "there is one worker"
    if choice.layout.num_replicas == 1:
        return "fewer workers than these hold no whole copy of the tables, or leave some out"
    if choice.layout.placement == "inter_host":
        where = "each inside one host" if choice.are_lookups_local else "no host holds a whole one"
        if need.min_groups > 1:
            where += f", and min_groups is {need.min_groups}"
        return f"the fewest copies with {_counted(size, 'worker')} a group, {where}"
    if not need.is_size_known:
        return "the fewest copies, as the size of the tables or a worker's memory is not known"
    assert need.table_bytes is not None and need.worker_table_bytes is not None
    tables, room = size_text(need.table_bytes), size_text(need.worker_table_bytes)
    return (
        f"the smallest group that holds the tables ({tables} on workers with room for {room}) and "
        "keeps the copies of a shard on one host"
    )


def _placement_reason(need: Need, choice: Choice) -> str:
    layout = choice.layout
    if layout.num_replicas == 1:
        return "there is one copy, so nothing is synced"
    if choice.failure_domain == "replica_group" and choice.num_hosts_survived:
        number = choice.num_hosts_survived
        lost = "any host is" if number == 1 else f"any {number} hosts are"
        return f"{layout.placement}, so a whole copy trains on when {lost} lost"
    if need.placement is not None:
        return f"parallelism.placement is {layout.placement}"
    if choice.are_syncs_local:
        return f"{layout.placement}, so a sync stays inside a host"
    if choice.are_lookups_local:
        return f"{layout.placement}, so lookups stay inside a host"
    return f"{layout.placement}, though no placement keeps lookups or syncs inside a host"


def _why_none(need: Need, possible: Sequence[Choice]) -> str:
    """What is missing for any layout, or for one that survives enough; and what would help.

    The spec was checked: where hosts are to be survived, groups are independent on several hosts.
    """
    sizes = _group_sizes(need)
    if not sizes:
        return _why_no_size(need)
    if possible:
        return _why_not_survived(need, min(sizes), possible)
    return _why_no_room(need, min(sizes))


def _why_no_size(need: Need) -> str:
    given, most = need.shard_group_size, need.max_workers
    if given is not None and need.holds_tables(given):
        return f"workers ({most}) must be a multiple of shard_group_size ({given})"
    assert need.table_bytes is not None and need.worker_table_bytes is not None
    whole, room = max(need.whole_table_bytes, default=0), need.worker_table_bytes
    if whole > room or not room:
        return (
            f"a table that must stay whole takes {size_text(whole)}, but a worker has room for "
            f"{size_text(room)}: allow row_wise for it, or give workers more memory"
        )
    least = math.ceil(need.table_bytes / room)
    fitting = next(size for size in itertools.count(least) if need.holds_tables(size))
    field = "workers" if given is None else "shard_group_size"
    return (
        f"one copy of the tables takes {size_text(need.table_bytes)} and a worker has room for "
        f"{size_text(room)}, so a sharding group needs {fitting} workers, but it has at most "
        f"{given or most}: raise parallelism.{field}, or give workers more memory"
    )


def _why_not_survived(need: Need, size: int, possible: Sequence[Choice]) -> str:
    lost, best = need.survive_hosts, max(choice.num_hosts_survived for choice in possible)
    instead = f"lower survive.hosts to {best}" if best else "remove survive"
    if need.max_workers // size <= lost:
        return (
            f"survive {{hosts: {lost}}} needs {lost + 1} groups of {size} workers, but at most "
            f"{need.max_workers} workers make {need.max_workers // size}: raise "
            f"parallelism.workers to {(lost + 1) * size}, or {instead}"
        )
    able = sum(room >= size for room in need.hosts)
    return (
        f"survive {{hosts: {lost}}} needs {lost + 1} hosts with room for L={size} workers each; "
        f"the cluster has {able}: add {_counted(max(lost + 1 - able, 1), 'host')}, or {instead}"
    )


def _why_no_room(need: Need, size: int) -> str:
    free = sum(need.hosts)
    fewest = math.ceil(need.min_workers / size) * size
    rooms = " + ".join(str(room) for room in need.hosts) or "none"
    lacking = (
        ", where each holds whole groups, or takes part in one if it is too small for that"
        if free >= fewest
        else ""
    )
    return (
        f"the job needs at least {_counted(fewest, 'worker')} in groups of {size}; the cluster has "
        f"room for {free} ({rooms} on {_counted(len(need.hosts), 'host')}){lacking}: add hosts, or "
        "lower parallelism.workers"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"

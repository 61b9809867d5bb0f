"""Placement of sharding groups on hosts, and when to start or retire one: pure decisions.

Groups are kept on hosts of their own, because a lost host then takes one copy of the tables with it
and not two. Where they go is `trainer.layout.choice.placements`, by which a plan places them too. A
group that must move is started elsewhere under another number first, and retired when the new one
trains.

Spare groups are started where all others have room, on hosts of their own if there are such. One
is promoted as soon as a group is missing, and another one started in its place.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainer.driver.autoscale import CapacityDemand, CapacityRequest
from trainer.driver.cluster import Host
from trainer.layout.choice import Room, packing, placements
from trainer.protocol.events import LeaveCause

GroupPhase = Literal["starting", "idle", "training", "leaving"]
"""`starting`: not current yet; `idle`: a spare that is ready; `leaving`: asked to leave."""


@dataclass(frozen=True)
class PlacedGroup:
    """A group that is there; `hosts` has the host of each rank, by address."""

    group: int
    hosts: tuple[str, ...]
    phase: GroupPhase
    is_spare: bool = False


@dataclass(frozen=True)
class GroupPolicy:
    """Between `least` and `most` groups of `group_size` workers, and `num_spares` beside them.

    They share hosts only where there are fewer hosts than groups, and `least_hosts` have one. With
    more `least_hosts` than 1 spares share none.
    """

    group_size: int
    least: int
    most: int
    least_hosts: int = 1
    num_spares: int = 0

    def target(self, wanted_workers: int | None) -> int:
        """How many groups to aim at when `wanted_workers` (None: as many as may be) are wanted."""
        if wanted_workers is None:
            return self.most
        return min(max(wanted_workers // self.group_size, self.least), self.most)


@dataclass(frozen=True)
class View:
    """What is there. `hosts` are the live ones; `num_free` counts starting workers as there.

    `drained` hosts shall be left, `excluded` ones failed or are slow, and no group may start while
    `may_start` is False (shortly after a failure). On `doubtful` ones a group was lost just now:
    they may be gone, though the cluster does not say so yet.
    """

    hosts: Sequence[Host]
    groups: Sequence[PlacedGroup]
    target: int
    drained: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    may_start: bool = True
    doubtful: frozenset[str] = frozenset()

    @property
    def avoided(self) -> frozenset[str]:
        """Hosts that are to be left, whether people or Ray drain them."""
        return self.drained | {host.address for host in self.hosts if host.is_draining}

    @property
    def once_all_may_start(self) -> View:
        """This when no failure delays a start and every node check has been passed."""
        hosts = [replace(h, num_free=h.num_free + h.num_unchecked) for h in self.hosts]
        return replace(self, hosts=hosts, may_start=True)

    @property
    def staying(self) -> list[PlacedGroup]:
        """Groups that neither leave nor have to, without spares."""
        return [group for group in self._kept if not group.is_spare]

    @property
    def spares(self) -> list[PlacedGroup]:
        """Spares that neither leave nor have to."""
        return [group for group in self._kept if group.is_spare]

    @property
    def _kept(self) -> list[PlacedGroup]:
        avoided = self.avoided
        return [g for g in self.groups if g.phase != "leaving" and not avoided & set(g.hosts)]


@dataclass(frozen=True)
class Start:
    """Start `group` with one rank on each of `hosts`, perhaps as a spare."""

    group: int
    hosts: tuple[str, ...]
    is_spare: bool = False


@dataclass(frozen=True)
class Promote:
    """Let the spare `group` take the place of a missing one."""

    group: int


@dataclass(frozen=True)
class Retire:
    """Ask `group` to leave after the next sync."""

    group: int
    cause: LeaveCause


Action = Start | Promote | Retire


def decide(policy: GroupPolicy, view: View) -> list[Action]:
    """What to do now; nothing that is under way already."""
    promoted = _promotions(policy, view)
    numbers = {each.group for each in promoted}  # from here on these are groups that start
    groups = [
        replace(group, phase="starting", is_spare=False) if group.group in numbers else group
        for group in view.groups
    ]
    view = replace(view, groups=groups)
    staying, spares = view.staying, view.spares
    moving = [g for g in view.groups if g.phase != "leaving" and g not in (*staying, *spares)]
    starts_soon = _starts(policy, view.once_all_may_start)
    is_start_due = any(not start.is_spare for start in starts_soon)
    trained = [group for group in moving if not group.is_spare]
    moves = _moves(view, trained, staying, is_start_due=is_start_due)
    return [
        *promoted,
        *_starts(policy, view),
        *(Retire(group.group, "drain") for group in moving if group.is_spare),
        # Those that wait for others to take their place are no more than these would be.
        *(moves or _surplus(trained, view.target)),
        *_surplus(staying, view.target),
        *_surplus(spares, policy.num_spares),  # as of hosts that are drained no more
    ]


def _promotions(policy: GroupPolicy, view: View) -> list[Promote]:
    """Spares for the places of missing groups: ready ones first, while others train to copy from.

    None joins a host with another group where groups must be on several hosts.
    """
    staying = view.staying
    if not any(group.phase == "training" for group in view.groups):
        return []
    must_spread = policy.least_hosts > 1
    taken = {host for group in staying for host in group.hosts} if must_spread else set()
    able = [spare for spare in view.spares if not taken & set(spare.hosts)]
    able.sort(key=lambda spare: (spare.phase != "idle", spare.group))
    return [Promote(spare.group) for spare in able[: max(0, view.target - len(staying))]]


def need_of(policy: GroupPolicy, view: View) -> CapacityDemand:
    """What the groups lack, for an autoscaler; `view` has no room that it holds already.

    A group that is missing wants hosts that no group is on: on one with a group there is either no
    room, or `decide` would have taken it.
    """
    starts = _starts(policy, view)
    num_groups, size = len(view.staying) + len(view.spares) + len(starts), policy.group_size
    num_wanted = view.target + policy.num_spares
    placed: list[PlacedGroup | Start] = [*view.groups, *starts]
    missing = CapacityRequest(
        size,
        on_one_host=size > 1 and any(host.num_slots >= size for host in view.hosts),
        avoided=view.avoided | view.excluded | {host for each in placed for host in each.hosts},
    )
    return CapacityDemand(
        has=num_groups * size,
        wants=num_wanted * size,
        least=policy.least * size,
        requests=(missing,) * (num_wanted - num_groups),
    )


def _starts(policy: GroupPolicy, view: View) -> list[Start]:
    """Starts of the groups that are missing and then of spares, as far as there is room."""
    if not view.may_start:
        return []
    hosts, target = _usable(policy, view), view.target
    num_missing = max(0, target - len(view.staying))
    places = list(itertools.islice(_places(policy, view, hosts, target), num_missing))
    if len(places) == num_missing:  # nothing waits for spares
        sure = [host for host in hosts if host.address not in view.doubtful]
        spares = _places(policy, view, sure, target + policy.num_spares, places, are_spares=True)
        places += itertools.islice(spares, max(0, policy.num_spares - len(view.spares)))
    taken = {group.group for group in view.groups}
    numbers = (number for number in itertools.count() if number not in taken)
    return [
        Start(number, place, is_spare=index >= num_missing)
        for index, (number, place) in enumerate(zip(numbers, places, strict=False))
    ]


def _places(
    policy: GroupPolicy,
    view: View,
    hosts: Sequence[Host],
    target: int,
    taken: Sequence[tuple[str, ...]] = (),
    *,
    are_spares: bool = False,
) -> Iterator[tuple[str, ...]]:
    """Places for one more group after another, beside those that are there and those `taken`."""
    num_taken = Counter(host for place in taken for host in place)
    there = [*taken, *(group.hosts for group in view.groups)]
    num_on = Counter(host for place in there for host in set(place))
    rooms = [
        Room(host.num_slots, host.num_free - num_taken[host.address], num_on[host.address])
        for host in hosts
    ]
    kept = [*taken, *(group.hosts for group in (*view.staying, *view.spares))]
    found = placements(
        rooms,
        policy.group_size,
        target,
        num_across=sum(len(set(place)) > 1 for place in kept),
        least_hosts=policy.least_hosts,
        may_share=not are_spares or policy.least_hosts == 1,
    )
    return (tuple(hosts[n].address for n in place) for place in found)


def _usable(policy: GroupPolicy, view: View) -> list[Host]:
    """Hosts that may take a group; the excluded ones too, if the least would not fit otherwise."""
    avoided = view.avoided
    allowed = [host for host in view.hosts if host.address not in avoided]
    good = [host for host in allowed if host.address not in view.excluded]
    rooms = [host.num_slots for host in good]
    fitting = packing(rooms, policy.group_size, policy.least, policy.least_hosts)
    return good if len(fitting) == policy.least else allowed


def _moves(
    view: View,
    moving: Sequence[PlacedGroup],
    staying: Sequence[PlacedGroup],
    *,
    is_start_due: bool,
) -> list[Retire]:
    """Groups that leave their drained host now: those replaced, and those that nobody can replace.

    With `is_start_due` one starts now or soon. The last group that trains never leaves.
    """
    num_training = sum(group.phase == "training" for group in staying)
    is_one_coming = is_start_due or num_training < len(staying)
    if not num_training or (is_one_coming and num_training < view.target):
        return []
    return [Retire(group.group, "drain") for group in moving]


def _surplus(groups: Sequence[PlacedGroup], target: int) -> list[Retire]:
    """Groups beyond the target: those that are starting first, then by the highest number."""
    num_surplus = len(groups) - target
    if num_surplus <= 0:
        return []
    by_worth = sorted(groups, key=lambda group: (group.phase != "starting", -group.group))
    return [Retire(group.group, "resize") for group in by_worth[:num_surplus]]

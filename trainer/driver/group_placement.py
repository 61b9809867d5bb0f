"""Placement of sharding groups on hosts, and when to start or retire one: pure decisions.

Groups are kept on hosts of their own, because a lost host then takes one copy of the tables with it
and not two. A group that must move is started elsewhere under another number first, and retired
when the new one trains.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainer.driver.autoscale import CapacityDemand, CapacityRequest
from trainer.driver.cluster import Host, fill_hosts

GroupPhase = Literal["starting", "training", "leaving"]
"""`starting`: not current yet; `leaving`: asked to leave."""


@dataclass(frozen=True)
class PlacedGroup:
    """A group that is there; `hosts` has the host of each rank, by address."""

    group: int
    hosts: tuple[str, ...]
    phase: GroupPhase


@dataclass(frozen=True)
class GroupPolicy:
    """Between `least` and `most` groups of `group_size` workers.

    With `must_spread` no two groups share a host, whatever it costs; without, they do where there
    are fewer hosts than groups.
    """

    group_size: int
    least: int
    most: int
    must_spread: bool = False

    def target(self, wanted_workers: int | None) -> int:
        """How many groups to aim at when `wanted_workers` (None: as many as may be) are wanted."""
        if wanted_workers is None:
            return self.most
        return min(max(wanted_workers // self.group_size, self.least), self.most)


@dataclass(frozen=True)
class View:
    """What is there. `hosts` are the live ones; `num_free` counts starting workers as there.

    `drained` hosts shall be left, `excluded` ones failed too often, and no group may start while
    `may_start` is False (shortly after a failure).
    """

    hosts: Sequence[Host]
    groups: Sequence[PlacedGroup]
    target: int
    drained: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    may_start: bool = True

    @property
    def avoided(self) -> frozenset[str]:
        """Hosts that are to be left, whether people or Ray drain them."""
        return self.drained | {host.address for host in self.hosts if host.is_draining}

    @property
    def staying(self) -> list[PlacedGroup]:
        """Groups that neither leave nor have to."""
        avoided = self.avoided
        return [g for g in self.groups if g.phase != "leaving" and not avoided & set(g.hosts)]


@dataclass(frozen=True)
class Start:
    """Start `group` with one rank on each of `hosts`."""

    group: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Retire:
    """Ask `group` to leave after the next sync."""

    group: int
    cause: Literal["resize", "drain"]


Action = Start | Retire


def decide(policy: GroupPolicy, view: View) -> list[Action]:
    """What to do now; nothing that is under way already."""
    staying = view.staying
    moving = [g for g in view.groups if g.phase != "leaving" and g not in staying]
    starts = _starts(policy, view, staying)
    return [*starts, *_moves(view, moving, staying, starts), *_surplus(view, staying)]


def need_of(policy: GroupPolicy, view: View) -> CapacityDemand:
    """What the groups lack, for an autoscaler; `view` has no room that it holds already.

    A group that is missing wants hosts that no group is on: on one with a group there is either no
    room, or `decide` would have taken it.
    """
    starts = _starts(policy, view, view.staying)
    num_groups, size = len(view.staying) + len(starts), policy.group_size
    placed: list[PlacedGroup | Start] = [*view.groups, *starts]
    missing = CapacityRequest(
        size,
        on_one_host=size > 1 and any(host.num_slots >= size for host in view.hosts),
        avoided=view.avoided | view.excluded | {host for each in placed for host in each.hosts},
    )
    return CapacityDemand(
        has=num_groups * size,
        wants=view.target * size,
        least=policy.least * size,
        requests=(missing,) * (view.target - num_groups),
    )


def _starts(policy: GroupPolicy, view: View, staying: Sequence[PlacedGroup]) -> list[Start]:
    """Starts of the groups that are missing, as far as there is room."""
    if not view.may_start:
        return []
    num_on = Counter(host for group in view.groups for host in set(group.hosts))
    slots = _HostSlots(policy, _usable(policy, view), view.target, num_on)
    taken = {group.group for group in view.groups}
    numbers = (number for number in itertools.count() if number not in taken)
    starts: list[Start] = []
    for _ in range(view.target - len(staying)):
        hosts = slots.take()
        if hosts is None:
            break
        starts.append(Start(next(numbers), hosts))
    return starts


def _usable(policy: GroupPolicy, view: View) -> list[Host]:
    """Hosts that may take a group; the excluded ones too, if the least would not fit otherwise."""
    avoided = view.avoided
    allowed = [host for host in view.hosts if host.address not in avoided]
    good = [host for host in allowed if host.address not in view.excluded]
    has_enough = sum(host.num_slots for host in good) >= policy.least * policy.group_size
    return good if has_enough else allowed


@dataclass
class _HostSlots:
    """Takes room for one group after another; `num_on` counts the groups on each host."""

    policy: GroupPolicy
    hosts: list[Host]
    target: int
    num_on: Counter[str]

    def take(self) -> tuple[str, ...] | None:
        """The hosts of the next group's ranks; None without room."""
        size = self.policy.group_size
        inside = [host for host in self.hosts if host.num_slots >= size]
        # Across hosts only where no host holds a whole group, even when it is empty.
        hosts = self._inside(inside) if inside else self._across()
        taken = Counter(hosts or ())
        self.hosts = [
            replace(host, num_free=host.num_free - taken[host.address]) for host in self.hosts
        ]
        self.num_on.update(taken.keys())
        return hosts

    def _inside(self, able: Sequence[Host]) -> tuple[str, ...] | None:
        size = self.policy.group_size
        free = [host for host in able if host.num_free >= size and self._may_take(host, len(able))]
        if not free:
            return None
        best = min(free, key=lambda host: (self.num_on[host.address], -host.num_free))
        return (best.address,) * size

    def _may_take(self, host: Host, num_able: int) -> bool:
        is_empty = not self.num_on[host.address]
        return is_empty or (not self.policy.must_spread and num_able < self.target)

    def _across(self) -> tuple[str, ...] | None:
        """A group over several hosts that no other group is on, as few as possible."""
        empty = [host for host in self.hosts if not self.num_on[host.address]]
        places = fill_hosts(empty, self.policy.group_size)
        is_whole = len(places) == self.policy.group_size
        return tuple(host.address for host in places) if is_whole else None


def _moves(
    view: View,
    moving: Sequence[PlacedGroup],
    staying: Sequence[PlacedGroup],
    starts: Sequence[Start],
) -> list[Retire]:
    """Groups that leave their drained host now: those replaced, and those that nobody can replace.

    The last group that trains never leaves.
    """
    num_training = sum(group.phase == "training" for group in staying)
    is_one_coming = bool(starts) or num_training < len(staying)
    if not num_training or (is_one_coming and num_training < view.target):
        return []
    return [Retire(group.group, "drain") for group in moving]


def _surplus(view: View, staying: Sequence[PlacedGroup]) -> list[Retire]:
    """Groups beyond the target: those that do not train yet first, then by the highest number."""
    num_surplus = len(staying) - view.target
    if num_surplus <= 0:
        return []
    by_worth = sorted(staying, key=lambda group: (group.phase == "training", -group.group))
    return [Retire(group.group, "resize") for group in by_worth[:num_surplus]]

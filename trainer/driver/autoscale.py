"""What a job asks Ray's autoscaler for: pure decisions over what it wants and what it has asked.

A *wish* is room for one gang of workers that start together: a sharding group, so that the cluster
grows by as many groups as it can and not by all or none. An *ask* is a wish that the autoscaler
has, and that holds the room once there is some, so that a host which was added for this job
neither leaves as idle nor goes to another job before the workers are started on it. Room that is
held counts as free for the job, and is let go just before its workers take it.

A placement group that waits is demand which every autoscaler of Ray knows (v1, v2, KubeRay's), and
each job has its own: `ray.autoscaler.sdk.request_resources` keeps one list for the whole cluster,
which the next caller overwrites, and Ray Train is one. A group that was placed holds the room. Ray
removes the groups of a driver that ends, however it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trainer.driver.cluster import Host
from trainer.protocol import events

# The autoscaler goes through all that is asked at each look; what is more follows when this came.
MAX_ASKS = 64


@dataclass(frozen=True)
class CapacityRequest:
    """Room for `num_workers` at once, outside the hosts at `avoided` (addresses).

    With `on_one_host` a host with room for all of them.
    """

    num_workers: int
    on_one_host: bool = False
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PendingCapacity:
    """A wish that was asked for; `node_ids` has the node of each worker once there is room."""

    id: str
    wish: CapacityRequest
    node_ids: tuple[str, ...] = ()

    @property
    def holds_room(self) -> bool:
        """Whether the room is there, and kept for this job."""
        return bool(self.node_ids)


@dataclass(frozen=True)
class CapacityChange:
    """How the asks change: those with an id in `withdrawn` go, each of `wishes` is asked for."""

    withdrawn: tuple[str, ...] = ()
    wishes: tuple[CapacityRequest, ...] = ()


@dataclass(frozen=True)
class CapacityDemand:
    """What a job wants beyond what it has room for: `wishes`, to get from `has` to `wants` workers.

    With fewer than `least` it waits.
    """

    has: int
    wants: int
    least: int = 0
    wishes: tuple[CapacityRequest, ...] = field(default=())

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be trained before there is more room."""
        return self.has < self.least


def revise(
    wanted: Sequence[CapacityRequest], asks: Iterable[PendingCapacity], addresses: dict[str, str]
) -> CapacityChange:
    """From what was asked to what is wanted; `addresses` are those of the live nodes, by id.

    An ask that holds room stays while it is of use: one for the same gang whose hosts are not to
    be avoided. One that waits must be for the very same.
    """
    missing = Counter(wanted[:MAX_ASKS])
    withdrawn: list[str] = []
    # What holds room already is worth more than what waits.
    for ask in sorted(asks, key=lambda ask: not ask.holds_room):
        match = next((wish for wish in missing if _serves(ask, wish, addresses)), None)
        if match is None:
            withdrawn.append(ask.id)
            continue
        missing[match] -= 1
        missing += Counter()  # drops what is at zero
    return CapacityChange(tuple(withdrawn), tuple(missing.elements()))


def _serves(ask: PendingCapacity, wish: CapacityRequest, addresses: dict[str, str]) -> bool:
    if not ask.holds_room:
        return ask.wish == wish
    is_same_gang = replace(ask.wish, avoided=wish.avoided) == wish
    hosts = {addresses.get(node_id, "") for node_id in ask.node_ids}
    return is_same_gang and "" not in hosts and not hosts & wish.avoided


def with_held(hosts: Sequence[Host], asks: Iterable[PendingCapacity]) -> list[Host]:
    """The hosts with the room that is held for this job counted as free."""
    held = Counter(node_id for ask in asks for node_id in ask.node_ids)
    return [
        replace(host, num_free=min(host.num_free + held[host.node_id], host.num_slots))
        for host in hosts
    ]


def holding_on(asks: Iterable[PendingCapacity], node_ids: Iterable[str]) -> tuple[str, ...]:
    """Ids of the asks that hold room on one of these nodes."""
    wanted = set(node_ids)
    return tuple(ask.id for ask in asks if wanted & set(ask.node_ids))


def hosts_to_come(hosts: Sequence[Host], max_workers: int) -> list[Host]:
    """The hosts of a cluster that grows to room for `max_workers`: those there, and more like the
    largest of them; as they are where none has room for a worker, so that nothing is known.
    """
    usable = [host for host in hosts if host.num_slots and not host.is_draining]
    if not usable:
        return list(hosts)
    model = max(usable, key=lambda host: host.num_slots)
    room = max_workers - sum(host.num_slots for host in usable)
    more = [
        replace(model, address=f"new-{index}", num_free=model.num_slots, node_id="")
        for index in range(max(0, room // model.num_slots))
    ]
    return [*hosts, *more]


# Asks Ray's autoscaler for room, by placement groups.

_NODE_ID_LABEL = "ray.io/node-id"
_PLACED = "CREATED"
# GCS answers one driver after another, and each looks several times a second.
_FRESH_S = 2.0
# Next to nothing of what every node has.
_FOOTHOLD = {"memory": 2.0**20}


class RayAutoscaler:
    """The autoscaler of the cluster that this process is connected to (an `Autoscaler`).

    `demand` are the Ray resources of one worker. What became of an ask is known within seconds.
    """

    def __init__(
        self, demand: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._demand = dict(demand)
        self._clock = clock
        self._table: dict[str, Mapping[str, Any]] = {}
        self._read_at = float("-inf")
        self._groups: dict[str, tuple[CapacityRequest, Any]] = {}
        self._footholds: dict[str, Any] = {}

    def asks(self) -> list[PendingCapacity]:
        """What was asked for and not withdrawn."""
        groups = self.items()
        if groups and self._clock() - self._read_at >= _FRESH_S:
            from ray.util.placement_group import placement_group_table

            # One by one: the whole table has the groups of all jobs.
            self._table = {each: placement_group_table(group) for each, (_, group) in groups}
            self._read_at = self._clock()
        return [ask_of(each, wish, self._table.get(each, {})) for each, (wish, _) in groups]

    def items(self) -> list[tuple[str, tuple[CapacityRequest, Any]]]:
        """Id, wish and handle of each placement group."""
        return list(self._groups.items())

    def ask(self, wish: CapacityRequest, node_ids: Collection[str]) -> None:
        """Ask for a wish outside the nodes in `node_ids`; does not wait."""
        from ray.util.placement_group import placement_group

        bundles = bundles_of(wish, self._demand)
        elsewhere = {_NODE_ID_LABEL: f"!in({','.join(sorted(node_ids))})"}
        group = placement_group(
            bundles,
            strategy="STRICT_PACK" if wish.on_one_host else "PACK",
            bundle_label_selector=[elsewhere] * len(bundles) if node_ids else None,
        )
        self._groups[group.id.hex()] = wish, group

    def keep(self, node_id: str) -> str:
        """Take next to nothing on a node, so that it is not idle; the id to withdraw."""
        from ray.util.placement_group import placement_group

        there = [{_NODE_ID_LABEL: node_id}]
        group = placement_group([_FOOTHOLD], bundle_label_selector=there)
        self._footholds[group.id.hex()] = group
        return str(group.id.hex())

    def withdraw(self, ask_id: str) -> None:
        """Remove a placement group, known or not; does not wait."""
        from ray.util.placement_group import remove_placement_group

        _, group = self._groups.pop(ask_id, (None, self._footholds.pop(ask_id, None)))
        if group is not None:
            remove_placement_group(group)


def bundles_of(wish: CapacityRequest, demand: Mapping[str, float]) -> list[dict[str, float]]:
    """The bundles of a wish: one for each worker, or a single one that no two hosts can share."""
    if wish.on_one_host:
        return [{name: amount * wish.num_workers for name, amount in demand.items()}]
    return [dict(demand) for _ in range(wish.num_workers)]


def ask_of(ask_id: str, wish: CapacityRequest, row: Mapping[str, Any]) -> PendingCapacity:
    """An ask as Ray's table of placement groups has it."""
    if row.get("state") != _PLACED:
        return PendingCapacity(ask_id, wish)
    placed = row["bundles_to_node_id"]
    nodes = [placed[index] for index in sorted(placed)]
    return PendingCapacity(
        ask_id, wish, tuple(nodes * wish.num_workers if wish.on_one_host else nodes)
    )


# What one job has asked the autoscaler of its cluster for, kept in step with what it wants.

logger = logging.getLogger(__name__)
# Far above what workers need until they have their room.
_KEEP_S = 300.0
_SETTLE_S = 10.0


class Autoscaler(Protocol):
    """Takes wishes and holds the room that comes; no call waits for room."""

    def asks(self) -> list[PendingCapacity]:
        """What it was asked for and not told to forget."""

    def ask(self, wish: CapacityRequest, node_ids: Collection[str]) -> None:
        """Ask for a wish, which none of the nodes in `node_ids` can fulfil."""

    def withdraw(self, ask_id: str) -> None:
        """Forget an ask, and let go of the room that it holds; or let a kept node go."""

    def keep(self, node_id: str) -> str:
        """Keep a node from leaving as idle, without taking room on it; the id to withdraw."""


@dataclass
class CapacityManager:
    """The asks of one job. `read_free_hosts` gives live hosts by what is free for anybody.

    The lives of a job may ask from several threads.
    """

    autoscaler: Autoscaler
    read_free_hosts: Callable[[], list[Host]]
    demand: Mapping[str, float]
    write: Callable[[events.Event], None]
    clock: Callable[[], float] = time.monotonic
    _told: tuple[int, int] = field(default=(0, 0), init=False)
    _kept: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def read_hosts(self) -> list[Host]:
        """Live hosts by what is free for this job: what is held for it, too."""
        # In this order: what is placed between the two looks is seen by neither, not by both.
        asks = self.autoscaler.asks()
        return with_held(self.read_free_hosts(), asks)

    def seek(self, need: CapacityDemand, hosts: Sequence[Host]) -> None:
        """Ask for what is needed, and for nothing else any more.

        `need` counts no room that is held already; `hosts` are the live ones.
        """
        with self._lock:
            self._let_go(hosts)
            addresses = {host.node_id: host.address for host in hosts}
            asks = self.autoscaler.asks()
            revision = revise(need.wishes, asks, addresses)
            for ask_id in revision.withdrawn:
                self.autoscaler.withdraw(ask_id)
            for wish in revision.wishes:
                avoided = [each for each in addresses if addresses[each] in wish.avoided]
                self.autoscaler.ask(wish, avoided)
            kept = [ask for ask in asks if ask.id not in revision.withdrawn]
            self._tell(need, sum(len(ask.node_ids) for ask in kept))

    def give(self, node_ids: Sequence[str]) -> None:
        """Let go of what is held on these nodes, or anywhere if there are none: it is taken now.

        The workers may need longer than an idle node stays, so the nodes are kept meanwhile.
        """
        with self._lock:
            held = [ask for ask in self.autoscaler.asks() if ask.holds_room]
            ids = holding_on(held, node_ids or [each for ask in held for each in ask.node_ids])
            for ask in held:
                if ask.id in ids:
                    self._keep(ask.node_ids)
                    self.autoscaler.withdraw(ask.id)

    def _keep(self, node_ids: Sequence[str]) -> None:
        for node_id in set(node_ids) - set(self._kept):
            self._kept[node_id] = self.autoscaler.keep(node_id), self.clock()

    def _let_go(self, hosts: Sequence[Host]) -> None:
        """Keep those nodes no longer that are in use or gone, or that nobody came to."""
        live = {host.node_id for host in hosts}
        used = {host.node_id for host in hosts if host.num_free < host.num_slots}
        for node_id, (ask_id, since) in list(self._kept.items()):
            age_s = self.clock() - since
            # For a moment the cluster counts room as used that was just let go of.
            is_used = node_id in used and age_s > _SETTLE_S
            if is_used or node_id not in live or age_s > _KEEP_S:
                del self._kept[node_id]
                self.autoscaler.withdraw(ask_id)

    def close(self) -> None:
        """Ask for nothing any more."""
        self.seek(CapacityDemand(0, 0), ())

    def _tell(self, need: CapacityDemand, num_held: int) -> None:
        """Say so when more is wanted, or more of it is missing, than was said last."""
        wants, num_missing = need.wants, max(0, need.wants - need.has - num_held)
        told_wants, told_missing = self._told
        if num_missing and (wants > told_wants or num_missing > told_missing):
            told = events.CapacityRequested(
                time=time.time(),
                num_workers=need.has + num_held,
                num_wanted=need.wants,
                num_needed=need.least,
                resources_per_worker=dict(self.demand),
            )
            self.write(told)
            logger.info("asked the autoscaler for room: %s", told)
        self._told = wants, num_missing

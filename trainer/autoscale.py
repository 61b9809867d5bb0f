"""What a job asks Ray's autoscaler for: pure decisions over what it wants and what it has asked.

A *wish* is room for one gang of workers that start together: a sharding group, so that the cluster
grows by as many groups as it can and not by all or none. An *ask* is a wish that the autoscaler
has, and that holds the room once there is some, so that a host which was added for this job
neither leaves as idle nor goes to another job before the workers are started on it. Room that is
held counts as free for the job, and is let go just before its workers take it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from trainer.cluster import Host

# The autoscaler goes through all that is asked at each look; what is more follows when this came.
MAX_ASKS = 64


@dataclass(frozen=True)
class Wish:
    """Room for `num_workers` at once, outside the hosts at `avoided` (addresses).

    With `on_one_host` a host with room for all of them.
    """

    num_workers: int
    on_one_host: bool = False
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ask:
    """A wish that was asked for; `node_ids` has the node of each worker once there is room."""

    id: str
    wish: Wish
    node_ids: tuple[str, ...] = ()

    @property
    def holds_room(self) -> bool:
        """Whether the room is there, and kept for this job."""
        return bool(self.node_ids)


@dataclass(frozen=True)
class Revision:
    """How the asks change: those with an id in `withdrawn` go, each of `wishes` is asked for."""

    withdrawn: tuple[str, ...] = ()
    wishes: tuple[Wish, ...] = ()


@dataclass(frozen=True)
class Need:
    """What a job wants beyond what it has room for: `wishes`, to get from `has` to `wants` workers.

    With fewer than `least` it waits.
    """

    has: int
    wants: int
    least: int = 0
    wishes: tuple[Wish, ...] = field(default=())

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be trained before there is more room."""
        return self.has < self.least


def revise(wanted: Sequence[Wish], asks: Iterable[Ask], addresses: dict[str, str]) -> Revision:
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
    return Revision(tuple(withdrawn), tuple(missing.elements()))


def _serves(ask: Ask, wish: Wish, addresses: dict[str, str]) -> bool:
    if not ask.holds_room:
        return ask.wish == wish
    is_same_gang = replace(ask.wish, avoided=wish.avoided) == wish
    hosts = {addresses.get(node_id, "") for node_id in ask.node_ids}
    return is_same_gang and "" not in hosts and not hosts & wish.avoided


def with_held(hosts: Sequence[Host], asks: Iterable[Ask]) -> list[Host]:
    """The hosts with the room that is held for this job counted as free."""
    held = Counter(node_id for ask in asks for node_id in ask.node_ids)
    return [
        replace(host, num_free=min(host.num_free + held[host.node_id], host.num_slots))
        for host in hosts
    ]


def holding_on(asks: Iterable[Ask], node_ids: Iterable[str]) -> tuple[str, ...]:
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

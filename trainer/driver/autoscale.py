"""Capacity requests to Ray's autoscaler, as placement groups, and the room that they reserve.

A `CapacityRequest` is room for one gang of workers that start together: a sharding group, so that
the cluster grows by as many groups as it can and not by all or none. A `PendingCapacity` is a
request that was sent; it reserves the room once there is some, so that a new host neither leaves as
idle nor goes to another job before the workers are started on it. Reserved room counts as free for
the job, and is released just before its workers take it.

A placement group that waits is demand which every autoscaler of Ray knows (v1, v2, KubeRay's), and
each job has its own: `ray.autoscaler.sdk.request_resources` keeps one list for the whole cluster,
which the next caller (Ray Train is one) overwrites. Ray removes the groups of a driver that ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.driver.cluster import NODE_ID_LABEL, Host
from trainer.protocol import events

logger = logging.getLogger(__name__)
# The autoscaler goes through all requests at each update; further ones follow later.
MAX_PENDING = 64
_PLACED = "CREATED"
# GCS answers one driver after another, and each polls several times a second.
_FRESH_S = 2.0


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
    """A request that was sent; `node_ids` has the node of each worker once room is reserved."""

    id: str
    request: CapacityRequest
    node_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class CapacityDemand:
    """`requests` are what a job lacks, from `has` to `wants` workers; it waits below `least`."""

    has: int
    wants: int
    least: int = 0
    requests: tuple[CapacityRequest, ...] = ()


def revise(
    wanted: Sequence[CapacityRequest], pending: Iterable[PendingCapacity], addresses: dict[str, str]
) -> tuple[list[str], list[CapacityRequest]]:
    """From pending to wanted requests: ids to withdraw, and new requests.

    One that reserves room stays while a wanted gang of that size may use its hosts; one that waits
    must be for the very same. `addresses` are those of the live nodes, by id.
    """
    missing = Counter(wanted[:MAX_PENDING])
    withdrawn: list[str] = []
    for each in sorted(pending, key=lambda each: not each.node_ids):
        match = next((request for request in missing if _serves(each, request, addresses)), None)
        if match is None:
            withdrawn.append(each.id)
            continue
        missing[match] -= 1
        missing += Counter()  # drops what is at zero
    return withdrawn, list(missing.elements())


def _serves(pending: PendingCapacity, request: CapacityRequest, addresses: dict[str, str]) -> bool:
    if not pending.node_ids:
        return pending.request == request
    is_same_gang = replace(pending.request, avoided=request.avoided) == request
    hosts = {addresses.get(node_id, "") for node_id in pending.node_ids}
    return is_same_gang and "" not in hosts and not hosts & request.avoided


class RayAutoscaler:
    """The autoscaler of the cluster that this process is connected to.

    `demand` are the Ray resources of one worker. No call waits for room.
    """

    def __init__(
        self, demand: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._demand = dict(demand)
        self._clock = clock
        self._table: dict[str, Mapping[str, Any]] = {}
        self._read_at = float("-inf")
        self._groups: dict[str, tuple[CapacityRequest, Any]] = {}

    def pending(self) -> list[PendingCapacity]:
        """Requests that were sent and not withdrawn; their state is some seconds old at most."""
        groups = list(self._groups.items())
        if groups and self._clock() - self._read_at >= _FRESH_S:
            from ray.util.placement_group import placement_group_table

            # One by one: the whole table has the groups of all jobs.
            self._table = {each: placement_group_table(group) for each, (_, group) in groups}
            self._read_at = self._clock()
        return [
            pending_of(each, request, self._table.get(each, {})) for each, (request, _) in groups
        ]

    def request(self, wanted: CapacityRequest, node_ids: Collection[str]) -> None:
        """Send a request for room outside the nodes in `node_ids`."""
        from ray.util.placement_group import placement_group

        bundles = bundles_of(wanted, self._demand)
        elsewhere = {NODE_ID_LABEL: f"!in({','.join(sorted(node_ids))})"}
        group = placement_group(
            bundles,
            strategy="STRICT_PACK" if wanted.on_one_host else "PACK",
            bundle_label_selector=[elsewhere] * len(bundles) if node_ids else None,
        )
        self._groups[group.id.hex()] = wanted, group

    def withdraw(self, id_: str) -> None:
        """Drop a request with the room that it reserves."""
        from ray.util.placement_group import remove_placement_group

        _, group = self._groups.pop(id_)
        remove_placement_group(group)


def bundles_of(request: CapacityRequest, demand: Mapping[str, float]) -> list[dict[str, float]]:
    """The bundles of a request: one for each worker, or a single one that needs one host."""
    if request.on_one_host:
        return [{name: amount * request.num_workers for name, amount in demand.items()}]
    return [dict(demand) for _ in range(request.num_workers)]


def pending_of(id_: str, request: CapacityRequest, row: Mapping[str, Any]) -> PendingCapacity:
    """The state of a request in Ray's table of placement groups."""
    if row.get("state") != _PLACED:
        return PendingCapacity(id_, request)
    placed = row["bundles_to_node_id"]
    nodes = [placed[index] for index in sorted(placed)]
    return PendingCapacity(
        id_, request, tuple(nodes * request.num_workers if request.on_one_host else nodes)
    )


@dataclass
class CapacityManager:
    """The capacity requests of one job, kept in step with its demand; thread-safe.

    `read_free_hosts` gives live hosts with the room that is free for any job.
    """

    autoscaler: RayAutoscaler
    read_free_hosts: Callable[[], list[Host]]
    resources_per_worker: Mapping[str, float]
    write: Callable[[events.Event], None]
    _reported: tuple[int, int] = field(default=(0, 0), init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def read_hosts(self) -> list[Host]:
        """Live hosts with what is free for this job, its reservations included."""
        # In this order, so that what is placed in between is not counted twice.
        reserved = Counter(node for each in self.autoscaler.pending() for node in each.node_ids)
        return [
            replace(host, num_free=min(host.num_free + reserved[host.node_id], host.num_slots))
            for host in self.read_free_hosts()
        ]

    def seek(self, demand: CapacityDemand, hosts: Sequence[Host]) -> None:
        """Request exactly what is needed; `demand` counts no reserved room, `hosts` are live."""
        with self._lock:
            addresses = {host.node_id: host.address for host in hosts}
            pending = self.autoscaler.pending()
            withdrawn, requests = revise(demand.requests, pending, addresses)
            for each in withdrawn:
                self.autoscaler.withdraw(each)
            for request in requests:
                avoided = [each for each in addresses if addresses[each] in request.avoided]
                self.autoscaler.request(request, avoided)
            kept = [each for each in pending if each.id not in withdrawn]
            self._report(demand, sum(len(each.node_ids) for each in kept))

    def give(self, node_ids: Sequence[str]) -> None:
        """Release reservations on these nodes, by default on all, for workers that start now."""
        with self._lock:
            for each in self.autoscaler.pending():
                nodes = set(each.node_ids)
                if nodes and (not node_ids or nodes & set(node_ids)):
                    self.autoscaler.withdraw(each.id)

    def close(self) -> None:
        self.seek(CapacityDemand(0, 0), ())

    def _report(self, demand: CapacityDemand, num_reserved: int) -> None:
        """Report when more is wanted, or missing, than was reported last."""
        wants, num_missing = demand.wants, max(0, demand.wants - demand.has - num_reserved)
        reported_wants, reported_missing = self._reported
        if num_missing and (wants > reported_wants or num_missing > reported_missing):
            requested = events.CapacityRequested(
                time=time.time(),
                num_workers=demand.has + num_reserved,
                num_wanted=wants,
                num_needed=demand.least,
                resources_per_worker=dict(self.resources_per_worker),
            )
            self.write(requested)
            logger.info("requested capacity of the autoscaler: %s", requested)
        self._reported = wants, num_missing

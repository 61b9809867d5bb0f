"""Asks Ray's autoscaler for room, by placement groups.

A placement group that waits is demand which every autoscaler of Ray knows (v1, v2, KubeRay's), and
each job has its own: `ray.autoscaler.sdk.request_resources` keeps one list for the whole cluster,
which the next caller overwrites, and Ray Train is one. A group that was placed holds the room. Ray
removes the groups of a driver that ends, however it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.autoscale import Ask, Wish

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
        self._groups: dict[str, tuple[Wish, Any]] = {}
        self._footholds: dict[str, Any] = {}

    def asks(self) -> list[Ask]:
        """What was asked for and not withdrawn."""
        groups = self.items()
        if groups and self._clock() - self._read_at >= _FRESH_S:
            from ray.util.placement_group import placement_group_table

            # One by one: the whole table has the groups of all jobs.
            self._table = {each: placement_group_table(group) for each, (_, group) in groups}
            self._read_at = self._clock()
        return [ask_of(each, wish, self._table.get(each, {})) for each, (wish, _) in groups]

    def items(self) -> list[tuple[str, tuple[Wish, Any]]]:
        """Id, wish and handle of each placement group."""
        return list(self._groups.items())

    def ask(self, wish: Wish, node_ids: Collection[str]) -> None:
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


def bundles_of(wish: Wish, demand: Mapping[str, float]) -> list[dict[str, float]]:
    """The bundles of a wish: one for each worker, or a single one that no two hosts can share."""
    if wish.on_one_host:
        return [{name: amount * wish.num_workers for name, amount in demand.items()}]
    return [dict(demand) for _ in range(wish.num_workers)]


def ask_of(ask_id: str, wish: Wish, row: Mapping[str, Any]) -> Ask:
    """An ask as Ray's table of placement groups has it."""
    if row.get("state") != _PLACED:
        return Ask(ask_id, wish)
    placed = row["bundles_to_node_id"]
    nodes = [placed[index] for index in sorted(placed)]
    return Ask(ask_id, wish, tuple(nodes * wish.num_workers if wish.on_one_host else nodes))

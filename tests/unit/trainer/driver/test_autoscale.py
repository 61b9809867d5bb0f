"""What a job asks an autoscaler for, as arithmetic, and what it says of it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.driver.scripted import Cloud
from trainer.driver.autoscale import (
    MAX_PENDING,
    CapacityDemand,
    CapacityManager,
    CapacityRequest,
    PendingCapacity,
    RayAutoscaler,
    bundles_of,
    pending_of,
    revise,
)
from trainer.driver.cluster import Host
from trainer.protocol import events

ADDRESSES = {"na": "a", "nb": "b", "nc": "c"}
wishes = st.builds(
    CapacityRequest,
    st.integers(1, 3),
    st.booleans(),
    st.frozensets(st.sampled_from("abc"), max_size=2),
)
asks = st.builds(
    lambda wish, node: PendingCapacity("", wish, (node,) * wish.num_workers if node else ()),
    wishes,
    st.sampled_from(["", "na", "nb", "gone"]),
)


def host(address: str, slots: int, free: int | None = None, is_draining: bool = False) -> Host:
    return Host(address, slots, slots if free is None else free, f"n{address}", 0, is_draining)


@given(st.lists(wishes, max_size=6), st.lists(asks, max_size=6))
def test_after_a_revision_there_is_an_ask_for_every_wish_and_no_other(
    wanted: list[CapacityRequest], known: list[PendingCapacity]
) -> None:
    numbered = [
        PendingCapacity(str(index), ask.request, ask.node_ids) for index, ask in enumerate(known)
    ]
    withdrawn, new = revise(wanted, numbered, ADDRESSES)
    kept = [ask for ask in numbered if ask.id not in withdrawn]
    assert len(kept) + len(new) == len(wanted)
    assert not Counter(new) - Counter(wanted)
    for ask in kept:
        assert any(ask.request.num_workers == wish.num_workers for wish in wanted)
        assert "gone" not in ask.node_ids


def test_room_that_came_is_kept_although_hosts_are_to_be_avoided_now_unless_it_is_on_them() -> None:
    held = PendingCapacity("1", CapacityRequest(2), ("na", "nb"))
    elsewhere, there = (
        CapacityRequest(2, avoided=frozenset("c")),
        CapacityRequest(2, avoided=frozenset("b")),
    )
    assert revise([elsewhere], [held], ADDRESSES) == ([], [])
    assert revise([there], [held], ADDRESSES) == (["1"], [there])


def test_of_two_asks_the_one_that_holds_room_stays() -> None:
    waiting, held = (
        PendingCapacity("1", CapacityRequest(1)),
        PendingCapacity("2", CapacityRequest(1), ("na",)),
    )
    assert revise([CapacityRequest(1)], [waiting, held], ADDRESSES) == (["1"], [])
    # A large job asks for so much at a time.
    assert len(revise([CapacityRequest(1)] * 500, (), {})[1]) == MAX_PENDING


def test_a_group_on_one_host_is_one_bundle_and_any_other_one_for_each_worker() -> None:
    demand = {"CPU": 2.0, "GPU": 1.0}
    assert bundles_of(CapacityRequest(3, on_one_host=True), demand) == [{"CPU": 6.0, "GPU": 3.0}]
    assert bundles_of(CapacityRequest(2), demand) == [demand, demand]


def test_room_is_there_once_ray_has_placed_the_whole_gang() -> None:
    waiting = {"state": "PENDING", "bundles_to_node_id": {0: "", 1: ""}}
    placed = {"state": "CREATED", "bundles_to_node_id": {1: "nb", 0: "na"}}
    assert not pending_of("1", CapacityRequest(2), waiting).node_ids
    assert not pending_of("1", CapacityRequest(2), {}).node_ids, "Ray does not know it yet"
    assert pending_of("1", CapacityRequest(2), placed).node_ids == ("na", "nb")
    single = {"state": "CREATED", "bundles_to_node_id": {0: "na"}}
    assert pending_of("1", CapacityRequest(3, on_one_host=True), single).node_ids == ("na",) * 3
    lost = {"state": "RESCHEDULING", "bundles_to_node_id": {0: ""}}
    assert not pending_of("1", CapacityRequest(1), lost).node_ids, (
        "its node is gone, and it is asked for again"
    )


@dataclass
class Gcs:
    """Ray's placement groups, as `ray.util.placement_group` gives them."""

    states: list[str] = field(default_factory=list)
    num_reads: int = 0

    def placement_group(self, _bundles: list[dict[str, float]], **_options: object) -> Any:
        self.states.append("PENDING")
        return SimpleNamespace(id=bytes([len(self.states) - 1]))

    def placement_group_table(self, group: Any) -> dict[str, object]:
        self.num_reads += 1
        return {"state": self.states[group.id[0]], "bundles_to_node_id": {0: "na"}}

    def remove_placement_group(self, group: Any) -> None:
        self.states[group.id[0]] = "REMOVED"


def test_what_became_of_the_own_asks_is_read_every_few_seconds_and_no_other_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gcs, now = Gcs(), 0.0
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", gcs)
    autoscaler = RayAutoscaler({"CPU": 1.0}, lambda: now)
    assert (autoscaler.pending(), gcs.num_reads) == ([], 0)
    autoscaler.request(CapacityRequest(1), ())
    for _ in range(4):
        assert [bool(each.node_ids) for each in autoscaler.pending()] == [False]
    gcs.states[0] = "CREATED"
    autoscaler.request(CapacityRequest(1), ())
    now = 2.0
    for _ in range(4):
        assert [bool(each.node_ids) for each in autoscaler.pending()] == [True, False]
    assert gcs.num_reads == 3
    autoscaler.withdraw("00")
    assert [each.id for each in autoscaler.pending()] == ["01"], "known at once"


@dataclass
class Asking:
    hosts: list[Host]
    cloud: Cloud = field(default_factory=Cloud)
    told: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = CapacityManager(
            self.cloud, lambda: self.hosts, {"CPU": 1.0}, self.told.append
        )

    def want(self, has: int, wants: int, least: int = 0, **wish: frozenset[str]) -> None:
        missing = (CapacityRequest(1, **wish),) * (wants - has)
        self.manager.seek(CapacityDemand(has, wants, least, missing), self.hosts)


def test_a_job_asks_once_and_takes_back_what_it_does_not_want_any_more() -> None:
    asking = Asking([host("a", 1, 0)])
    for _ in range(3):
        asking.want(1, 3, avoided=frozenset("a"))
    assert asking.cloud.num_asked == 2
    assert asking.cloud.avoided == [{"na"}] * 2, "by the ids of nodes"
    asking.want(1, 2, avoided=frozenset("a"))
    assert len(asking.cloud.known) == 1
    asking.manager.close()
    assert not asking.cloud.known


def test_the_timeline_tells_what_is_missing_once_and_again_when_more_is() -> None:
    asking = Asking([host("a", 1, 0)])
    asking.want(0, 2, least=2)
    asking.want(0, 2, least=2)
    (first,) = asking.told
    assert isinstance(first, events.CapacityRequested)
    assert (first.num_workers, first.num_wanted, first.num_needed) == (0, 2, 2)
    asking.want(1, 2, least=2)
    assert len(asking.told) == 1, "it gets what it asked for"
    asking.want(2, 2)
    asking.want(1, 2)
    assert len(asking.told) == 2, "a host was lost"
    asking.want(2, 3)
    assert len(asking.told) == 3, "it may grow further"


def test_room_is_held_until_workers_take_it() -> None:
    asking = Asking([host("a", 1, 0), host("b", 1, 0)])
    asking.want(1, 3)
    asking.cloud.give("1", "nb")
    assert [each.num_free for each in asking.manager.read_hosts()] == [0, 1]
    asking.want(1, 3)
    assert set(asking.cloud.known) == {"1", "2"}, "what came stays while it is not in use"
    asking.manager.give(["nb"])
    assert set(asking.cloud.known) == {"2"}
    assert [each.num_free for each in asking.manager.read_hosts()] == [0, 0]

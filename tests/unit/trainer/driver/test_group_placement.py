"""Which group goes where: spread over hosts, moved without a gap, never more than is wanted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.driver.autoscale import CapacityRequest
from trainer.driver.cluster import Host
from trainer.driver.group_placement import (
    Action,
    GroupPhase,
    GroupPolicy,
    PlacedGroup,
    Promote,
    Retire,
    Start,
    View,
    decide,
    need_of,
)
from trainer.layout.choice import Need, choose
from trainer.layout.layout import LayoutError

THREE = GroupPolicy(group_size=2, least=1, most=3)
SPREAD = GroupPolicy(group_size=2, least=2, most=3, least_hosts=2)


def host(address: str, free: int, slots: int | None = None, is_draining: bool = False) -> Host:
    return Host(address, free if slots is None else slots, free, is_draining=is_draining)


def group(number: int, address: str, phase: GroupPhase = "training") -> PlacedGroup:
    return PlacedGroup(number, (address, address), phase)


def test_groups_share_a_host_only_where_there_are_fewer_hosts_than_groups() -> None:
    two_hosts = [host("a", 8), host("b", 8)]
    assert len(decide(THREE, View(two_hosts, [], target=3))) == 3
    places = [start.hosts[0] for start in decide(SPREAD, View(two_hosts, [], target=3))]
    assert places[:2] == ["a", "b"] and len(places) == 3
    assert len(decide(SPREAD, View(two_hosts[:1], [], target=3))) == 1, "none would be survived"
    leaving = View(two_hosts, [group(0, "a"), group(1, "b")], target=3, drained=frozenset("b"))
    assert not [a for a in decide(SPREAD, leaving) if isinstance(a, Start)]
    # The third host is full now, but it may be free again.
    third_is_busy = [*two_hosts, host("c", 0, slots=8)]
    assert len(decide(THREE, View(third_is_busy, [], target=3))) == 2


def test_a_group_spans_hosts_only_where_none_could_hold_it() -> None:
    policy = GroupPolicy(group_size=4, least=1, most=2)
    small = [host("a", 2), host("b", 2), host("c", 3), host("d", 1)]
    starts = decide(policy, View(small, [], target=2))
    assert starts == [Start(0, ("c", "c", "c", "d")), Start(1, ("a", "a", "b", "b"))]
    beside = [PlacedGroup(0, ("c", "c", "c", "a"), "training")]
    left = [host("a", 1, 2), host("b", 2), host("c", 0, 3), host("d", 1)]
    assert decide(policy, View(left, beside, target=2)) == [], "it would share a host"
    one_is_busy = [host("a", 2), host("b", 2), host("big", 1, slots=4)]
    assert decide(policy, View(one_is_busy, [], target=1)) == []


@given(
    st.lists(st.integers(0, 9), max_size=7), st.integers(1, 6), st.integers(2, 5), st.integers(0, 2)
)
def test_the_groups_that_a_plan_promises_are_started_and_started_again_when_lost(
    rooms: list[int], size: int, most: int, survived: int
) -> None:
    need = Need(tuple(rooms), size, size * most, size, "inter_host", survived)
    policy = GroupPolicy(size, 1, most, least_hosts=1 + survived)
    empty = View([host(str(n), room) for n, room in enumerate(rooms)], [], target=most)
    starts = [each for each in decide(policy, empty) if isinstance(each, Start)]
    try:
        promised = choose(need).group_hosts
    except LayoutError:
        assert survived or not starts
        return
    assert sorted(tuple(map(int, start.hosts)) for start in starts) == sorted(promised)
    for lost in starts:
        there = [start for start in starts if start is not lost]
        taken = Counter(address for start in there for address in start.hosts)
        view = replace(
            empty,
            hosts=[replace(h, num_free=h.num_free - taken[h.address]) for h in empty.hosts],
            groups=[PlacedGroup(start.group, start.hosts, "training") for start in there],
        )
        (again,) = decide(policy, view)
        assert isinstance(again, Start)


def test_excluded_hosts_take_no_group_unless_the_least_would_not_fit_without() -> None:
    hosts = [host("a", 2), host("b", 2), host("c", 2)]
    excluded = frozenset({"a"})
    starts = decide(SPREAD, View(hosts, [], target=3, excluded=excluded))
    assert starts == [Start(0, ("b", "b")), Start(1, ("c", "c"))]
    starts = decide(SPREAD, View(hosts[:2], [], target=3, excluded=excluded))
    assert len(starts) == 2
    # There is room for the workers, but not in two whole groups, or not on two hosts.
    for rooms in ([3, 3, 1], [4, 4]):
        hosts = [host(str(n), room) for n, room in enumerate(rooms)]
        starts = decide(SPREAD, View(hosts, [], target=2, excluded=frozenset("1")))
        assert [start.hosts for start in starts] == [("0", "0"), ("1", "1")]


def test_too_many_groups_leave_the_newest_first_and_those_that_do_not_train_before() -> None:
    hosts = [host("a", 0, 2), host("b", 0, 2), host("c", 0, 2)]
    groups = [group(0, "a"), group(1, "b", "starting"), group(2, "c")]
    assert decide(THREE, View(hosts, groups, target=2)) == [Retire(1, "resize")]
    both = [Retire(1, "resize"), Retire(2, "resize")]
    assert decide(THREE, View(hosts, groups, target=1)) == both
    # Although nobody can take their place, and so they have not left their drained hosts.
    stuck = View(hosts, groups, target=2, drained=frozenset("abc"))
    assert decide(THREE, stuck) == [Retire(1, "resize")]


def drained(hosts: list[Host], groups: list[PlacedGroup]) -> list[Action]:
    return decide(SPREAD, View(hosts, groups, target=2, drained=frozenset({"b"})))


def test_without_room_elsewhere_a_drained_group_leaves_while_others_train() -> None:
    hosts = [host("a", 0, 2), host("b", 0, 2)]
    assert drained(hosts, [group(0, "a"), group(1, "b")]) == [Retire(1, "drain")]
    assert drained(hosts, [group(0, "a", "starting"), group(1, "b")]) == []
    assert drained(hosts[1:], [group(1, "b")]) == [], "nobody else trains"


def test_a_drained_group_stays_while_room_elsewhere_may_not_be_used_yet() -> None:
    groups = [group(0, "a"), group(1, "b")]
    hosts = [host("a", 0, 2), host("b", 0, 2), host("c", 2)]
    view = View(hosts, groups, target=2, drained=frozenset("b"), may_start=False)
    assert decide(SPREAD, view) == []
    in_check = replace(hosts[2], num_free=0, num_unchecked=2)
    view = replace(view, hosts=[*hosts[:2], in_check], may_start=True)
    assert decide(SPREAD, view) == []
    assert decide(THREE, replace(view, excluded=frozenset("c"))) == [Retire(1, "drain")]
    assert decide(SPREAD, replace(view, hosts=hosts)) == [Start(2, ("c", "c"))]


def test_a_host_that_ray_drains_is_left_like_one_that_people_drain() -> None:
    hosts = [host("a", 0, 2), host("b", 0, 2, is_draining=True), host("c", 2)]
    view = View(hosts, [group(0, "a"), group(1, "b")], target=2)
    assert decide(SPREAD, view) == [Start(2, ("c", "c"))]


def spare(number: int, address: str, phase: GroupPhase = "idle") -> PlacedGroup:
    return PlacedGroup(number, (address, address), phase, is_spare=True)


def test_spares_come_after_all_groups_and_on_hosts_of_their_own_where_there_are_such() -> None:
    spread, two = replace(SPREAD, num_spares=1), [host("a", 4), host("b", 4)]
    started = decide(spread, View([*two, host("c", 4)], [], target=2))
    assert started[2:] == [Start(2, ("c", "c"), is_spare=True)]
    assert len(decide(spread, View(two, [], target=2))) == 2, "no spare shares a host"
    three = decide(spread, View(two, [], target=3))
    assert not any(isinstance(start, Start) and start.is_spare for start in three)
    assert len(three) == 3, "groups take the room that there is"
    lost = View([*two, host("c", 4), host("d", 4)], [], target=2, doubtful=frozenset("c"))
    assert decide(spread, lost)[2:] == [Start(2, ("d", "d"), is_spare=True)]
    together = replace(THREE, num_spares=1)
    assert decide(together, View(two, [], target=2))[2:] == [Start(2, ("a", "a"), is_spare=True)]


def test_a_spare_is_promoted_where_others_train_and_where_its_host_has_no_group() -> None:
    policy = replace(SPREAD, num_spares=2)
    hosts = [host("a", 0, 2), host("b", 0, 2), host("c", 0, 2)]
    both = [spare(3, "c", "starting"), spare(4, "b")]
    view = View(hosts, [group(0, "a"), *both], target=2, may_start=False)
    assert decide(policy, view) == [Promote(4)], "one that is ready comes first"
    view = replace(view, groups=[group(0, "a", "starting"), *both])
    assert decide(policy, view) == [], "there is nobody to copy from"
    beside = [group(0, "a"), spare(3, "a")]
    assert decide(policy, replace(view, groups=beside)) == []
    assert decide(replace(THREE, num_spares=1), replace(view, groups=beside)) == [Promote(3)]
    # It takes the place of a group whose host is drained, too.
    drained = replace(view, groups=[group(0, "a"), group(1, "b"), both[0]], drained=frozenset("b"))
    assert decide(policy, drained) == [Promote(3)]
    assert decide(policy, replace(drained, drained=frozenset("c"))) == [Retire(3, "drain")]


@st.composite
def situations(draw: st.DrawFn) -> tuple[GroupPolicy, View]:
    size = draw(st.integers(1, 3))
    least = draw(st.integers(1, 3))
    most = draw(st.integers(least, 4))
    policy = GroupPolicy(size, least, most, draw(st.integers(1, 3)), draw(st.integers(0, 2)))
    addresses = [f"h{i}" for i in range(draw(st.integers(0, 5)))]
    slots = [draw(st.integers(0, 6)) for _ in addresses]
    hosts = [
        Host(a, n, draw(st.integers(0, n)), is_draining=draw(st.booleans()))
        for a, n in zip(addresses, slots, strict=True)
    ]
    numbers = draw(st.lists(st.integers(0, 5), unique=True, max_size=4)) if addresses else []
    phases = st.sampled_from(["starting", "training", "leaving"])
    placed = []
    for number in numbers:
        ranks = tuple(draw(st.sampled_from(addresses)) for _ in range(size))
        if draw(st.booleans()):
            placed.append(PlacedGroup(number, ranks, draw(phases)))
        else:
            phase = draw(st.sampled_from(["starting", "idle", "leaving"]))
            placed.append(PlacedGroup(number, ranks, phase, is_spare=True))
    some = st.frozensets(st.sampled_from(addresses)) if addresses else st.just(frozenset[str]())
    view = View(
        hosts,
        placed,
        target=draw(st.integers(least, most)),
        drained=draw(some),
        excluded=draw(some),
        may_start=draw(st.booleans()),
    )
    return policy, view


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(situations())
def test_no_decision_breaks_a_promise(situation: tuple[GroupPolicy, View]) -> None:
    policy, view = situation
    actions = decide(policy, view)
    starts = [a for a in actions if isinstance(a, Start)]
    retired = {a.group for a in actions if isinstance(a, Retire)}
    there = {g.group: g for g in view.groups}
    assert not {s.group for s in starts} & there.keys(), "a number is used twice"
    assert retired <= {g.group for g in view.groups if g.phase != "leaving"}
    avoided = view.drained | {h.address for h in view.hosts if h.is_draining}
    taken = Counter(address for s in starts for address in s.hosts)
    free = {h.address: h.num_free for h in view.hosts}
    for address, num_ranks in taken.items():
        assert num_ranks <= free[address], "more ranks than the host has room for"
        assert address not in avoided
    occupied = {a for g in view.groups for a in g.hosts}
    for start in starts:
        if occupied & set(start.hosts):
            assert len(occupied - avoided) >= policy.least_hosts
        occupied |= set(start.hosts)
    staying = [g for g in view.groups if g.phase != "leaving" and not avoided & set(g.hosts)]
    promoted = [a.group for a in actions if isinstance(a, Promote)]
    num_groups = sum(not g.is_spare for g in staying)
    assert all(there[number] in staying and there[number].is_spare for number in promoted)
    assert not promoted or any(g.phase == "training" for g in view.groups)
    new = len(promoted) + sum(not start.is_spare for start in starts)
    assert num_groups + new <= max(view.target, num_groups)
    num_spares = len(staying) - num_groups - len(promoted)
    new_spares = sum(start.is_spare for start in starts)
    assert num_spares + new_spares <= max(policy.num_spares, num_spares)
    kept = [g for g in staying if g.is_spare and g.group not in retired | {*promoted}]
    assert len(kept) <= policy.num_spares, "of a host that is drained no more one stays"
    assert not new_spares or num_groups + new >= view.target, "groups come first"
    training = {g.group for g in view.groups if g.phase == "training"}
    assert not training or training - retired, "nobody is left to train"


def test_a_wish_is_kept_within_the_bounds() -> None:
    for wanted, target in {None: 3, 6: 3, 100: 3, 5: 2, 4: 2, 2: 1, 1: 1}.items():
        assert THREE.target(wanted) == target


def test_a_missing_group_wants_a_host_that_no_group_is_on() -> None:
    hosts = [host("a", 2, slots=4), host("b", 1, slots=2)]
    view = View(hosts, [group(0, "a")], target=3, excluded=frozenset("x"))
    need = need_of(SPREAD, view)
    assert (need.has, need.wants, need.least) == (2, 6, 4)
    assert need.has < need.least
    assert need.requests == (CapacityRequest(2, on_one_host=True, avoided=frozenset("ax")),) * 2
    # One on a drained host wants another one before it leaves.
    view = View([host("a", 0, slots=2)], [group(0, "a")], target=1, drained=frozenset("a"))
    need = need_of(THREE, view)
    assert need.has == 0
    assert need.requests == (CapacityRequest(2, on_one_host=True, avoided=frozenset("a")),)
    # One that no host holds wants workers wherever they are.
    view = View([host("a", 1), host("b", 0, slots=1)], [], target=1)
    assert need_of(THREE, view).requests == (CapacityRequest(2),)


@given(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 3), st.integers(1, 3))
def test_what_is_there_and_what_is_wished_for_make_the_target(
    free: list[int], target: int, least_hosts: int
) -> None:
    policy = replace(THREE, least_hosts=least_hosts)
    view = View([host(str(index), each) for index, each in enumerate(free)], [], target)
    need = need_of(policy, view)
    assert need.has + sum(wish.num_workers for wish in need.requests) == need.wants == 2 * target
    assert need.has == 2 * len(decide(policy, view))

"""The supervisor, look by look, on a scripted cluster and a scripted coordinator."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.harness.builders import spec
from tests.harness.files import records_in
from tests.unit.trainer.driver.scripted import Cloud, RunStorage, attempt_in
from trainer.coordination.detection import HostRecord, ReplacementPolicy
from trainer.driver.attempt import PAUSED, Attempt
from trainer.driver.autoscale import CapacityManager
from trainer.driver.cluster import Host
from trainer.driver.group_runner import (
    Ended,
    FailureTracker,
    GroupRunLoop,
    failure_of,
)
from trainer.driver.ray_train import Evicted, TrainRun
from trainer.elastic.coordinator.interface import CoordinatorStatus, Departure, GroupStatus
from trainer.failures import EndReason, Failure
from trainer.protocol import events, requests

LOST = Failure(EndReason.WORKERS_LOST, "connection closed")


@dataclass
class World:
    """A cluster, a coordinator, and the TorchTrainers that were started, all of them scripted.

    With a `room` the cluster's autoscaler adds nodes when the test says so.
    """

    attempt: Attempt
    hosts: dict[str, int]
    now: float = 1000.0
    set_back_s: float = 0.0
    standings: dict[tuple[int, int], str] = field(default_factory=dict)
    departures: list[Departure] = field(default_factory=list)
    stragglers: list[events.StragglerFound] = field(default_factory=list)
    failure: Failure | None = None
    has_finished: bool = False
    answers: bool = True
    runs: dict[tuple[int, int], tuple[TrainRun, Future[Failure | None]]] = field(
        default_factory=dict
    )
    killed: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    retired: list[tuple[int, str]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    wanted: tuple[list[int], int] = ([], 0)
    lost: dict[int, tuple[int, str, tuple[str, ...]]] = field(default_factory=dict)
    num_saves: int = 0
    is_stopped: bool = False
    room: CapacityManager | None = None
    actor_name: str = "coordinator"
    cloud: Cloud = field(default_factory=Cloud)
    deadlines: dict[str, float] = field(default_factory=dict)
    """When draining hosts are gone."""

    def __post_init__(self) -> None:
        self.files = self.attempt.context.files
        self.begin(self.attempt)

    def begin(self, attempt: Attempt, size: int | None = None) -> None:
        times = {"clock": lambda: self.now, "wait": self.wait}
        times |= {"wall_clock": lambda: self.now - self.set_back_s}
        times |= {"end_grace_s": 0.0, "kill_grace_s": 0.0}
        policy = ReplacementPolicy(attempt.spec.recovery.replace_stragglers)
        parts = self.read_hosts, self.launch, self, HostRecord(2, 600), policy, 0, self.kill_on
        self.life = GroupRunLoop(attempt, *parts, **times, size=size)

    def grow_by_itself(self) -> None:
        """The cluster has an autoscaler, and no host yet."""
        self.hosts = {}
        write = self.attempt.writer.write
        self.room = CapacityManager(self.cloud, self.read_unreserved, {"CPU": 1.0}, write)
        self.begin(replace(self.attempt, capacity=self.room))

    def add(self, address: str) -> None:
        """A node comes, and the oldest ask that waits holds it."""
        waiting = next(ask.id for ask in self.cloud.pending() if not ask.node_ids)
        self.hosts[address] = 1
        self.cloud.give(waiting, f"node-{address}")

    @property
    def num_asks(self) -> int:
        return len(self.cloud.known)

    def read_unreserved(self) -> list[Host]:
        held = [node for ask in self.cloud.pending() for node in ask.node_ids]
        return [
            replace(host, num_free=host.num_free - held.count(host.node_id))
            for host in self.read_hosts_of_all()
        ]

    def told(self, kind: type[events.EventModel]) -> list[Any]:
        return records_in(self.attempt.context.files, kind)

    def wish(self, text: str) -> None:
        self.files.resize_request_path.write_text(text)

    def look(self, seconds: float = 0.5) -> Ended | None:
        """Let time pass, then look."""
        self.now += seconds
        return self.life.tick()

    def train(self) -> None:
        """Three groups begin, and train on a, b and c."""
        assert self.look() is None
        self.become("current", (0, 0), (1, 0), (2, 0))
        assert self.look() is None

    @property
    def hosts_in_use(self) -> dict[int, str]:
        return {number: run.hosts[0] for number, run in self.life.runs.items()}

    def read_hosts(self) -> list[Host]:
        return self.room.read_hosts() if self.room else self.read_hosts_of_all()

    def read_hosts_of_all(self) -> list[Host]:
        taken = [run.node_ids[0] for run, future in self.runs.values() if not future.done()]
        return [
            Host(
                address,
                slots,
                slots - taken.count(f"node-{address}"),
                f"node-{address}",
                is_draining=address in self.deadlines,
                deadline=self.deadlines.get(address),
            )
            for address, slots in self.hosts.items()
        ]

    def kill_on(self, host: Host, pids: Collection[int]) -> None:
        self.killed.append((host.address, frozenset(pids)))

    def status(self) -> CoordinatorStatus | None:
        if not self.answers:
            return None
        groups = tuple(
            GroupStatus(
                group=group,
                incarnation=incarnation,
                standing=standing,
                processes=((self.host_of(group, incarnation), 50 + group),),
            )
            for (group, incarnation), standing in self.standings.items()
        )
        return CoordinatorStatus(
            has_finished=self.has_finished,
            groups=groups,
            departures=tuple(self.departures),
            stragglers=tuple(self.stragglers),
            failure=self.failure,
        )

    def request(self, step: str, *args: Any) -> None:
        getattr(self, step)(*args)

    def want(
        self,
        groups: Collection[int],
        num_missing: int,
        leaving: dict[tuple[int, int], str],
        num_saves: int,
        lost: dict[int, tuple[int, str, tuple[str, ...]]],
    ) -> None:
        self.lost = dict(lost)
        self.wanted, self.num_saves = (sorted(groups), num_missing), num_saves
        told = [(group, cause) for (group, _), cause in leaving.items()]
        self.retired += [each for each in told if each not in self.retired]

    def drop(self, group: int, incarnation: int, reason: str) -> None:
        self.dropped.append((group, incarnation))
        self.standings.pop((group, incarnation), None)

    def stop(self) -> None:
        self.is_stopped = True

    def launch(self, run: TrainRun) -> Future[Failure | None]:
        assert run.config.group
        future: Future[Failure | None] = Future()
        self.runs[run.config.group.group, run.config.group.incarnation] = run, future
        return future

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def host_of(self, group: int, incarnation: int = 0) -> str:
        return self.runs[group, incarnation][0].node_ids[0].removeprefix("node-")

    def become(self, standing: str, *lives: tuple[int, int]) -> None:
        self.standings.update(dict.fromkeys(lives, standing))

    def end(self, life: tuple[int, int], failure: Failure | None = None) -> None:
        self.standings.pop(life, None)
        self.runs[life][1].set_result(failure)


def world_in(folder: Path, hosts: str, recovery: Any = None, **sizes: Any) -> World:
    """Groups of one worker, two or three unless `sizes` say so, on hosts with room for one."""
    layout = {"shard_group_size": 1, "placement": "inter_host"}
    sizes = {"workers": {"min": 2, "max": 3}} | layout | sizes
    job = spec(parallelism=sizes, recovery=recovery or {})
    return World(attempt_in(folder, job), dict.fromkeys(hosts, 1))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Up to three groups of one worker on three hosts, at least two, none on the same host."""
    recovery = {"start_grace_s": 30, "exclude_host_after": 2, "exclude_host_s": 600}
    return world_in(tmp_path, "abc", survive={"hosts": 1}, recovery=recovery)


def departed(group: int, reason: str, incarnation: int = 0) -> Departure:
    return Departure(group=group, incarnation=incarnation, reason=reason, message="", is_lost=True)


def test_groups_start_spread_and_pinned_and_the_coordinator_awaits_them(world: World) -> None:
    world.train()
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert world.wanted == ([0, 1, 2], 0)
    run = world.runs[1, 0][0]
    assert run.node_ids == ("node-b",)
    assert run.config.group
    assert run.config.group.actor_name == "coordinator"


def test_the_hosts_are_asked_for_once_however_many_groups_start(world: World) -> None:
    read = Mock(side_effect=world.read_hosts)
    world.life.read_hosts = read
    world.look()
    assert (len(world.runs), read.call_count) == (3, 1)


def test_a_job_waits_for_the_fewest_groups_and_then_gives_up(world: World) -> None:
    world.hosts = {"a": 1}
    assert world.look() is None
    assert not world.runs
    ended = world.look(31)
    assert ended and ended.failure
    assert ended.failure.reason == EndReason.NO_ROOM
    assert "the job needs 2" in ended.failure.message


def test_a_lost_group_comes_back_in_another_life_on_a_free_host(world: World) -> None:
    world.train()
    del world.hosts["b"]
    world.end((1, 0), LOST)
    assert world.look() is None
    assert world.dropped == [(1, 0)]
    assert world.hosts_in_use == {0: "a", 2: "c"}, "there is no room yet"
    assert world.wanted == ([0, 2], 1)
    assert world.lost == {1: (0, "workers_lost", ("b",))}, "told again, as drop may not be heard"
    world.hosts["d"] = 1
    assert world.look() is None
    assert world.hosts_in_use == {0: "a", 1: "d", 2: "c"}
    assert (1, 1) in world.runs


def test_a_group_that_the_coordinator_lost_is_killed_and_replaced_at_once(
    world: World,
) -> None:
    world.train()
    world.hosts["d"] = 1
    del world.standings[1, 0]
    world.departures.append(departed(1, "hang"))
    assert world.look() is None
    assert world.hosts_in_use[1] == "d"
    assert not world.killed, "it may end by itself"
    assert world.look(3) is None
    assert world.killed == [("b", frozenset({51}))]
    assert world.look(3) is None
    assert len(world.killed) == 1
    world.end((1, 0), Failure(EndReason.TRAINING_ERROR, "what a killed worker says"))
    assert world.look() is None
    world.become("current", (1, 1))
    assert world.look() is None
    world.departures.append(departed(1, "connection", incarnation=1))
    assert world.look() is None
    assert world.look(3) is None
    assert len(world.killed) == 2
    error = Failure(EndReason.USER_CODE, "no killed worker says that, whenever Ray tells it")
    world.end((1, 1), error)
    assert world.look() == Ended(error)


def test_a_host_is_not_to_blame_where_its_group_turns_out_to_have_ended_of_something_else(
    world: World,
) -> None:
    world.train()
    for incarnation, reason in enumerate((EndReason.STORAGE_ERROR, EndReason.WORKERS_LOST)):
        world.become("current", (1, incarnation))
        assert world.look(5) is None
        world.departures.append(departed(1, "connection", incarnation))
        assert world.look() is None
        world.end((1, incarnation), Failure(reason, "said later"))
        assert world.look() is None
    assert not world.told(events.HostExcluded)
    assert world.look(5) is None
    assert world.hosts_in_use[1] == "b"


def test_a_group_that_the_coordinator_has_no_more_is_lost_though_nothing_was_told_of_that(
    world: World,
) -> None:
    world.train()
    del world.standings[1, 0]
    assert world.look() is None
    assert not world.dropped, "a restarted coordinator waits for its groups, too"
    world.look(60)
    assert world.dropped == [(1, 0)]


def test_a_group_that_hangs_at_its_start_is_given_up_and_starts_elsewhere(world: World) -> None:
    assert world.look() is None
    world.become("current", (0, 0), (1, 0))
    world.hosts["d"] = 1
    assert world.look(599) is None
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}, "a start may take long"
    assert world.look(2) is None
    assert world.dropped == [(2, 0)], "it is not let in any more, should it come"
    hung, again = world.told(events.Note)
    assert "group 2 on c hangs at its start" in hung.message
    assert again.message == "starting group 2 on d, life 2"
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "d"}
    world.become("listening", (2, 1))
    assert world.look(2000) is None
    assert world.dropped == [(2, 0)]


def test_a_run_whose_groups_all_hang_at_their_start_ends_so_that_the_budget_counts(
    world: World,
) -> None:
    assert world.look() is None
    assert world.look(601) is None
    ended = world.look(11)
    assert ended and ended.failure
    assert ended.failure.reason == EndReason.HANG
    assert "raise recovery.min_hang_s" in ended.failure.message


def test_a_spare_that_hangs_at_its_start_is_given_up_too(spared: World) -> None:
    assert spared.look() is None
    spared.become("current", (0, 0), (1, 0))
    spared.hosts["d"] = 1
    assert spared.look() is None
    assert spared.look(601) is None
    assert spared.dropped == [(2, 0)]
    assert spared.look(30) is None
    assert spared.hosts_in_use == {0: "a", 1: "b", 2: "d"}


def test_a_coordinator_that_does_not_answer_means_nothing(world: World) -> None:
    world.train()
    world.answers = False
    for _ in range(100):
        assert world.look() is None
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert not world.dropped


def test_the_training_is_over_when_the_coordinator_says_so(world: World) -> None:
    world.train()
    world.has_finished = True
    world.end((0, 0))
    world.end((1, 0), LOST)
    assert world.look() == Ended()
    assert not world.told(events.HostExcluded)


def test_the_training_is_over_when_groups_end_well_though_the_coordinator_is_away_or_forgot_it(
    world: World,
) -> None:
    world.train()
    world.answers = False
    world.end((0, 0))
    assert world.look() == Ended()


def test_the_end_of_the_training_waits_for_no_group_that_still_starts_or_was_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.train()
    del world.standings[2, 0]
    world.departures.append(departed(2, "hang"))
    world.hosts["d"] = 1
    assert world.look() is None
    assert (2, 1) in world.runs, "it starts again"
    monkeypatch.setattr(futures, "wait", wait := Mock())
    world.life.await_workers()
    assert wait.call_args.args[0] == [world.runs[group, 0][1] for group in (0, 1)]


def test_without_a_group_that_trained_all_start_again_from_a_checkpoint(world: World) -> None:
    world.train()
    del world.hosts["b"]
    world.end((1, 0), LOST)
    assert world.look() is None
    world.hosts["d"] = 1
    assert world.look() is None  # group 1 starts again, and holds nothing yet
    host_lost = Failure(EndReason.HOST_LOST, "gone")
    world.end((0, 0), host_lost)
    world.end((2, 0), host_lost)
    assert world.look() == Ended(host_lost)


def test_the_last_copy_whose_loss_is_nan_starts_over_under_the_same_coordinator(
    world: World,
) -> None:
    world.train()
    for number, host in ((1, "b"), (2, "c")):
        del world.hosts[host]
        world.end((number, 0), LOST)
    assert world.look() is None
    assert world.look(31) is None, "it trains on with fewer groups"
    del world.standings[0, 0]
    poisoned = Departure(group=0, incarnation=0, reason="poisoned", message="", is_lost=False)
    world.departures.append(poisoned)
    world.end((0, 0), LOST)
    world.hosts["a"] = 0  # it is not free at once
    assert world.look() is None
    world.hosts["a"] = 1
    assert world.look(5) is None
    assert (0, 1) in world.runs


def test_what_all_groups_died_of_is_awaited_so_that_the_right_budget_pays(
    world: World,
) -> None:
    world.train()
    for number in range(3):
        del world.standings[number, 0]
        world.departures.append(departed(number, "connection"))
    assert world.look() is None
    # They went with their hosts, whatever Ray says.
    for number in range(3):
        world.end((number, 0), replace(LOST, is_death=True, blamed_host="b"))
    del world.hosts["b"]
    ended = world.look()
    assert ended and ended.failure and ended.failure.reason == EndReason.HOST_LOST


def test_an_error_of_the_job_itself_ends_it(world: World) -> None:
    failure = Failure(EndReason.DATA_ERROR, "row 7")
    world.train()
    world.end((1, 0), failure)
    assert world.look() == Ended(failure)


def test_first_groups_that_all_fail_end_the_life_so_that_the_budget_counts(
    world: World,
) -> None:
    world.look()
    for number in range(3):
        world.end((number, 0), LOST)
    assert world.look() == Ended(LOST)


def test_an_error_in_one_group_is_tried_within_the_budget(world: World) -> None:
    world.train()
    error = Failure(EndReason.TRAINING_ERROR, "KeyError")
    world.end((1, 0), error)
    assert world.look() is None
    assert (1, 1) in world.runs
    world.end((1, 1), error)
    assert world.look() == Ended(error)


@pytest.mark.parametrize("reason", [EndReason.STORAGE_ERROR, EndReason.VERSION_MISMATCH])
def test_a_host_that_is_set_up_wrongly_is_left_out_and_never_ends_the_job(
    world: World, reason: EndReason
) -> None:
    world.train()
    unfit = Failure(reason, "the run folder is not mounted", blamed_host="c")
    for incarnation in range(6):
        while (2, incarnation) not in world.runs:
            assert world.look(60) is None
        world.end((2, incarnation), unfit)
        assert world.look() is None
    assert {each.host for each in world.told(events.HostExcluded)} == {"c"}


def test_groups_that_keep_failing_start_later_and_later_but_not_if_lost_at_once(
    world: World,
) -> None:
    world.train()
    for number in (1, 2):  # as with their host
        world.end((number, 0), LOST)
    world.look()
    assert {(1, 1), (2, 1)} <= world.runs.keys()
    starts = []
    for incarnation in range(1, 5):
        world.wait(2)
        world.end((1, incarnation), replace(LOST, reason=EndReason.DIVERGED))
        since = world.now
        while (1, incarnation + 1) not in world.runs:
            assert world.look(0.25) is None
        starts.append(world.now - since)
    assert starts == sorted(starts)
    assert starts[0] < 2 < starts[-1]


def test_many_groups_that_fail_one_after_the_other_delay_starts() -> None:
    found = FailureTracker(HostRecord(exclude_after=3, exclude_s=100.0), max_suspicious=0)
    for number in range(12):
        found.add(LOST, ["a"], now := 0.75 * number, now)
    assert found.may_start_at > now + 10


def test_the_host_of_a_group_that_lost_all_that_it_could_copy_from_is_not_to_blame() -> None:
    for reason, is_blamed in (("connection", True), ("no_donor", False)):
        found = FailureTracker(HostRecord(exclude_after=1, exclude_s=100.0), max_suspicious=0)
        excluded = found.add(failure_of(departed(0, reason), ["a"]), ["a"], 10.0, 10.0)
        assert bool(excluded) is is_blamed


def test_a_hang_counts_against_the_host_of_the_rank_that_hangs_alone() -> None:
    found = FailureTracker(HostRecord(exclude_after=1, exclude_s=100.0), max_suspicious=0)
    hung = failure_of(departed(0, "hang").model_copy(update={"host": "b"}), ["a", "b"])
    assert [each.host for each in found.add(hung, ["a", "b"], 10.0, 10.0)] == ["b"]
    assert hung.facts["host"] == "b", "so that the next attempt is not there"


def test_a_host_that_fails_often_is_excluded_by_unix_time_and_a_clock_set_back_delays_no_start(
    world: World,
) -> None:
    world.train()
    for incarnation in range(2):
        world.end((1, incarnation), LOST)
        world.look()
        world.set_back_s = 500
        world.look(5)
    assert 1 not in world.life.runs, "no other host has room"
    world.hosts["d"] = 1
    world.look()
    assert world.hosts_in_use[1] == "d"
    (excluded,) = world.told(events.HostExcluded)
    assert (excluded.host, excluded.num_failures) == ("b", 2)
    assert excluded.until - excluded.time == 600
    assert excluded.time < world.now - 400
    assert GroupRunLoop.clock is time.monotonic


def test_an_evicted_driver_says_nothing(world: World) -> None:
    world.train()
    world.runs[1, 0][1].set_exception(Evicted("the cluster is gone"))
    with pytest.raises(Evicted):
        world.look()


def test_a_wish_for_fewer_workers_retires_the_newest_group(world: World) -> None:
    world.train()
    world.wish('{"id": "r-1", "workers": 2}')
    world.look()
    world.look()
    assert world.retired == [(2, "resize")]
    # A coordinator that was started again hears it, too.
    world.retired.clear()
    world.look()
    assert world.retired == [(2, "resize")]
    world.end((2, 0))
    world.look()
    world.look()
    (resized,) = world.told(events.Resized)
    assert (resized.world_size, resized.cause) == (2, "request")
    world.wish('{"id": "r-2", "workers": null}')
    world.look()
    assert 2 in world.life.runs


def test_an_attempt_that_begins_resized_tells_its_size(world: World) -> None:
    world.wish('{"id": "r-1", "workers": 2}')
    assert world.look() is None
    world.become("current", (0, 0), (1, 0))
    for _ in range(3):
        assert world.look() is None
    (resized,) = world.told(events.Resized)
    assert (resized.world_size_before, resized.world_size, resized.cause) == (3, 2, "request")


@pytest.mark.parametrize(("hosts", "told"), [("abc", [(2, 3, "room", True)]), ("ab", [])])
def test_a_run_of_all_groups_reports_its_size_where_the_one_before_had_another(
    world: World, hosts: str, told: list[tuple[int, int, str, bool]]
) -> None:
    world.hosts = dict.fromkeys(hosts, 1)
    world.begin(world.attempt, size=2)
    assert world.look() is None
    world.become("current", *((group, 0) for group in world.life.runs))
    for _ in range(3):
        assert world.look() is None
    assert told == [
        (each.world_size_before, each.world_size, each.cause, each.restarted)
        for each in world.told(events.Resized)
    ]


def test_a_drained_host_is_left_when_its_replacement_trains(world: World) -> None:
    world.train()
    world.hosts["d"] = 1
    world.wish('{"id": "r-1", "workers": null, "drain_hosts": ["b"]}')
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c", 3: "d"}
    world.become("listening", (3, 0))
    world.look()
    assert not world.retired, "it does not train yet"
    world.become("current", (3, 0))
    world.look()
    assert world.retired == [(1, "drain")]
    world.end((1, 0))
    for _ in range(3):
        assert world.look() is None
    assert world.hosts_in_use == {0: "a", 2: "c", 3: "d"}
    assert not world.told(events.Resized)


def test_a_checkpoint_is_asked_for_once_all_groups_are_about_to_lose_hosts(world: World) -> None:
    world.train()
    world.deadlines = {"a": world.now + 90, "b": world.now + 61}
    world.look()
    assert world.num_saves == 0, "group 2 stays"
    world.deadlines["c"] = world.now + 120
    for _ in range(3):
        assert world.look() is None
    assert world.num_saves == 1
    (note,) = [n for n in world.told(events.Note) if "about to lose" in n.message]
    assert "(a, b, c, in 60 s)" in note.message
    del world.deadlines["a"]
    world.look()
    world.deadlines["a"] = world.now + 60
    world.look()
    assert world.num_saves == 2


def test_too_few_groups_train_on_and_the_shortage_is_told_once(world: World) -> None:
    world.train()
    for number, host in ((1, "b"), (2, "c")):
        del world.hosts[host]
        world.end((number, 0), replace(LOST, reason=EndReason.HOST_LOST))
    for _ in range(200):
        assert world.look() is None
    notes = [n for n in world.told(events.Note) if "the job needs 2" in n.message]
    assert len(notes) == 1


def test_a_drain_of_all_hosts_is_told_to_wait_for_others_and_ends_nothing(world: World) -> None:
    world.train()
    world.wish('{"id": "r-1", "workers": null, "drain_hosts": ["a", "b", "c"]}')
    for _ in range(200):
        assert world.look() is None
    assert [note.message for note in world.told(events.Note)] == [
        "the cluster has room for 0 groups of 1 workers each, outside the hosts that are drained "
        "or excluded, and the job needs 2; groups stay on hosts that are to be left until others "
        "are added"
    ]
    assert not world.retired


def test_a_life_stops_its_coordinator_before_it_kills_who_is_left(world: World) -> None:
    def kill_on(host: Host, pids: Collection[int]) -> None:
        assert world.is_stopped, "a coordinator that is left would tell of lost groups"
        world.kill_on(host, pids)

    def wait(seconds: float) -> None:
        world.wait(seconds)
        world.become("current", *world.runs)
        if world.now > 1002:
            world.failure = Failure(EndReason.NON_FINITE, "nan")

    failure = replace(world.life, wait=wait, kill_on=kill_on).run()
    assert failure == Failure(EndReason.NON_FINITE, "nan")
    assert world.is_stopped
    assert {host for host, _ in world.killed} == {"a", "b", "c"}


def test_a_pause_lets_the_leader_save_before_all_groups_end(world: World) -> None:
    world.train()
    world.files.pause_request_path.touch()
    assert world.look() is None
    assert requests.is_stop_wanted(world.files, 0)
    # One that is taken back too late ends the attempt all the same.
    world.files.pause_request_path.unlink()
    assert world.look() is None, "the leader has not saved yet"
    world.files.stopping_path(0).touch()
    assert world.look() == Ended(PAUSED)


def test_a_request_that_storage_refuses_is_written_once_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RunStorage(monkeypatch)
    world.train()
    world.files.pause_request_path.touch()
    storage.leave()
    assert world.look() is None
    storage.come_back()
    assert world.look() is None
    assert requests.is_stop_wanted(world.files, 0)
    world.files.stopping_path(0).touch()
    storage.leave()
    assert world.look() is None
    storage.come_back()
    assert world.look() == Ended(PAUSED)


def test_groups_that_never_trained_have_nothing_to_save(world: World) -> None:
    assert world.look() is None
    world.files.pause_request_path.touch()
    ended = world.look()
    assert ended and ended.failure and ended.failure.reason == EndReason.PAUSED


def test_a_job_without_room_waits_for_the_autoscaler_as_long_as_it_takes(world: World) -> None:
    world.grow_by_itself()
    for _ in range(200):
        assert world.look() is None, "more than the grace"
    assert world.num_asks == 3
    assert [note.message for note in world.told(events.Note)] == [
        "the cluster has room for 0 groups of 1 workers each, outside the hosts that are drained "
        "or excluded, and the job needs 2; the job waits for the autoscaler"
    ]
    (asked,) = world.told(events.CapacityRequested)
    assert (asked.num_workers, asked.num_wanted, asked.num_needed) == (0, 3, 2)


def test_groups_start_when_the_fewest_fit_and_grow_as_nodes_come(world: World) -> None:
    world.grow_by_itself()
    world.look()
    world.add("a")
    world.look()
    assert not world.runs, "one node is not enough, and is held meanwhile"
    assert world.num_asks == 3
    world.add("b")
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "b"}
    assert world.num_asks == 1
    world.become("current", (0, 0), (1, 0))
    world.look()
    world.add("c")
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert not world.num_asks
    world.become("listening", (2, 0))
    world.look()
    assert len(world.told(events.Resized)) == 1, "it does not train yet"
    world.become("current", (2, 0))
    world.look()
    start, resized = world.told(events.Resized)
    assert (start.world_size_before, start.world_size, start.cause) == (3, 2, "start")
    assert (resized.world_size_before, resized.world_size) == (2, 3)
    assert (resized.cause, resized.restarted) == ("room", False)
    # A job that pauses wants no room while it saves.
    del world.hosts["c"]
    world.end((2, 0), replace(LOST, reason=EndReason.HOST_LOST))
    world.look()
    assert world.num_asks == 1
    world.files.pause_request_path.touch()
    assert world.look() is None, "the leader has not saved yet"
    assert not world.num_asks


def test_a_lost_host_is_asked_for_again_and_a_smaller_size_asks_for_none(world: World) -> None:
    world.grow_by_itself()
    world.look()
    for address in "abc":
        world.add(address)
    world.look()
    world.become("current", (0, 0), (1, 0), (2, 0))
    world.look()
    del world.hosts["b"]
    world.end((1, 0), replace(LOST, reason=EndReason.HOST_LOST))
    for _ in range(40):
        world.look()
    assert world.num_asks == 1
    assert world.cloud.avoided[-1] == {"node-a", "node-c"}
    world.wish('{"id": "r-1", "workers": 2}')
    world.look()
    assert not world.num_asks
    world.wish('{"id": "r-2", "workers": null}')
    world.look()
    world.add("d")
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "d", 2: "c"}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_group_that_left_and_does_not_end_is_killed_once_a_save_would_be_through(
    world: World, is_told: bool
) -> None:
    world.train()
    world.wish('{"id": "r-1", "workers": 2}')
    world.look()
    world.standings.pop((2, 0))
    if is_told:
        left = Departure(group=2, incarnation=0, reason="resize", message="", is_lost=False)
        world.departures.append(left)
        world.look()
    else:  # the coordinator was restarted meanwhile
        world.look()
        world.look(60)
    world.look(59)
    assert not world.killed
    world.look(2)
    assert world.killed == [("c", frozenset({52}))]
    world.look(60)
    assert len(world.killed) == 1
    world.end((2, 0), LOST)
    assert world.look() is None
    assert not world.dropped
    assert world.hosts_in_use == {0: "a", 1: "b"}


@pytest.fixture
def spared(tmp_path: Path) -> World:
    """Two groups of one worker and a spare on three hosts, none on the same host."""
    sizes = {"workers": {"min": 1, "max": 2}, "survive": {"hosts": 1}, "spares": 1}
    return world_in(tmp_path, "abc", **sizes)


def train_with_spare(world: World) -> None:
    assert world.look() is None
    world.become("current", (0, 0), (1, 0))
    world.become("spare", (2, 0))
    assert world.look() is None


def test_a_spare_takes_the_place_of_a_lost_group_at_once_and_another_one_is_started(
    spared: World,
) -> None:
    world = spared
    train_with_spare(world)
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert world.wanted == ([0, 1], 0), "nobody waits for the spare"
    assert [run.config.group.is_spare for run, _ in world.runs.values()] == [False, False, True]
    del world.hosts["b"]
    world.end((1, 0), LOST)
    world.look()
    assert world.hosts_in_use == {0: "a", 2: "c"}, "there is no room for another"
    assert world.wanted == ([0, 2], 0)
    world.become("current", (2, 0))
    world.hosts["d"] = 1
    world.look(5)
    assert world.hosts_in_use == {0: "a", 1: "d", 2: "c"}
    assert world.runs[1, 1][0].config.group.is_spare
    assert not world.told(events.Resized)
    # The job does not depend on it, and can't go on from it.
    world.become("spare", (1, 1))
    world.look()
    world.end((0, 0), LOST)
    world.end((2, 0), LOST)
    assert world.look() == Ended(LOST)


def test_a_resize_leaves_spares_alone_and_a_drained_one_moves(spared: World) -> None:
    train_with_spare(spared)
    spared.wish('{"id": "r-1", "workers": 1}')
    spared.look()
    assert spared.retired == [(1, "resize")]
    spared.end((1, 0))
    spared.look()
    (resized,) = spared.told(events.Resized)
    assert (resized.world_size_before, resized.world_size) == (2, 1)
    spared.wish('{"id": "r-2", "workers": null, "drain_hosts": ["c"]}')
    spared.look()
    assert spared.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert spared.retired[-1] == (2, "drain")
    left = Departure(group=2, incarnation=0, reason="drain", message="", is_lost=False)
    spared.departures.append(left)
    spared.end((2, 0), LOST)
    spared.look()
    assert not spared.dropped, "it left, however its processes ended"
    assert 2 not in spared.life.runs


def test_an_autoscaler_is_asked_for_room_for_spares(spared: World) -> None:
    spared.grow_by_itself()
    spared.look()
    (asked,) = spared.told(events.CapacityRequested)
    assert (asked.num_wanted, asked.num_needed) == (3, 1)
    for address in "abc":
        spared.add(address)
    spared.look()
    assert [run.config.group.is_spare for run, _ in spared.runs.values()] == [False, False, True]


def straggler(group: int, host: str, time: float) -> events.StragglerFound:
    times = {"slowdown": 2.0, "own_s": 0.4, "median_s": 0.2}
    return events.StragglerFound(time=time, group=group, rank=0, host=host, action="none", **times)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_group_of_a_straggler_moves_where_that_is_wanted_and_there_is_room(
    tmp_path: Path, is_wanted: bool
) -> None:
    world = world_in(tmp_path, "abc", recovery={"replace_stragglers": is_wanted})
    world.train()
    world.stragglers.append(straggler(1, "b", time=1))
    world.look()
    world.hosts["d"] = 1
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}, "there was no room when it was found"
    world.stragglers.append(straggler(1, "b", time=2))
    world.look()
    found = world.told(events.StragglerFound)
    assert [each.action for each in found] == ["none", "replace" if is_wanted else "none"]
    if not is_wanted:
        assert not world.told(events.HostExcluded)
        return
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c", 3: "d"}
    (excluded,) = world.told(events.HostExcluded)
    assert "2.0 times as slow" in excluded.reason
    assert not world.retired, "its replacement does not train yet"
    world.become("current", (3, 0))
    world.look()
    assert world.retired == [(1, "straggler")]
    world.end((1, 0))
    world.look()
    assert world.hosts_in_use == {0: "a", 2: "c", 3: "d"}, "nobody starts on the slow host"
    assert not world.told(events.Resized)


def test_room_that_a_missing_group_takes_is_no_room_for_the_group_of_a_straggler(
    tmp_path: Path,
) -> None:
    world = world_in(tmp_path, "ab", recovery={"replace_stragglers": True})
    world.look()
    world.become("current", (0, 0), (1, 0))
    world.look()
    world.hosts["c"] = 1
    world.stragglers.append(straggler(0, "a", time=1))
    world.look()
    world.become("current", (2, 0))
    world.look()
    assert world.hosts_in_use == {0: "a", 1: "b", 2: "c"}
    assert [each.action for each in world.told(events.StragglerFound)] == ["none"]
    assert not world.retired

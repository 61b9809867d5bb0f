"""The job domain: how many workers start where, and when they start again with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import spec, workers_started
from tests.harness.files import records_in
from tests.unit.trainer.driver.scripted import Cloud, RunStorage, attempt_in
from trainer.driver import job_runner
from trainer.driver.attempt import MIRROR_S, PAUSED, PAUSED_EARLY, Attempt, Outcome, Restart
from trainer.driver.autoscale import CapacityManager, CapacityRequest
from trainer.driver.cluster import Host
from trainer.driver.job_runner import (
    Bounds,
    JobRunner,
    Plan,
    cause_to_stop,
    need_of,
    plan,
)
from trainer.driver.ray_train import TrainRun
from trainer.errors import StorageError
from trainer.failures import EndReason, Failure
from trainer.protocol import events
from trainer.protocol import requests as requests_module
from trainer.protocol.outbox import EventWriter
from trainer.protocol.requests import ResizeRequest, ResizeRequests, StopRequest
from trainer.protocol.run_dir import AttemptDir

TWO_TO_SIX = Bounds(group_size=2, least=2, most=6)
FOUR = Bounds(group_size=2, least=4, most=4)


def host(address: str, free: int, is_draining: bool = False) -> Host:
    return Host(address, free, free, f"node-{address}", is_draining=is_draining)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 40), st.data())
def test_a_size_is_the_largest_legal_one_that_fits_and_is_wanted_and_the_rest_is_missing(
    group_size: int, least: int, more: int, room: int, data: st.DataObject
) -> None:
    bounds = Bounds(group_size, least * group_size, (least + more) * group_size)
    wanted = data.draw(st.none() | st.integers(1, 40))
    legal = range(bounds.least, bounds.most + 1, group_size)
    fitting = [size for size in legal if size <= room]
    limit = bounds.most if wanted is None else max(wanted, bounds.least)
    expected = max((size for size in fitting if size <= limit), default=None)
    assert bounds.best(room, wanted) == expected
    need = need_of(bounds, Plan(0), [host("a", room)], wanted)
    assert need.wants == bounds.best(1000, wanted)
    assert need.has + sum(wish.num_workers for wish in need.requests) == need.wants
    assert need.has <= room
    assert (need.has < need.least) == (expected is None)


def test_an_elastic_job_takes_the_room_there_is_on_few_hosts() -> None:
    found = plan(TWO_TO_SIX, [host("a", 1), host("b", 4)], None, frozenset())
    assert found.num_workers == 4
    assert found.addresses == {"b"}


def test_avoided_and_draining_hosts_take_no_worker() -> None:
    hosts = [host("a", 4), host("b", 4), host("c", 4, is_draining=True)]
    found = plan(FOUR, hosts, None, frozenset({"a"}))
    assert found == Plan(4, (hosts[1],) * 4)
    # A job that does not fit is left to Ray, which waits.
    assert plan(TWO_TO_SIX, [host("a", 1)], None, frozenset()) == Plan(2)
    assert plan(FOUR, [host("a", 8)], None, frozenset()) == Plan(4)


def on(address: str, num_workers: int) -> Plan:
    return Plan(num_workers, (host(address, 0),) * num_workers)


@pytest.mark.parametrize(
    ("hosts", "request_", "cause"),
    [
        ([host("a", 0)], ResizeRequest(), None),
        ([host("a", 1)], ResizeRequest(), None),
        ([host("a", 0), host("b", 2)], ResizeRequest(), "room"),
        ([host("a", 0), host("b", 2)], ResizeRequest(growth_limit=4), None),
        ([host("a", 0), host("b", 2)], ResizeRequest(workers=4), None),
        ([host("a", 0), host("b", 2)], ResizeRequest(workers=6), "request"),
        ([host("a", 0)], ResizeRequest(workers=2), "request"),
        ([host("a", 0), host("b", 2)], ResizeRequest(drain_hosts=frozenset({"a"})), "drain"),
        ([host("a", 0)], ResizeRequest(drain_hosts=frozenset({"a"})), None),
        ([host("a", 0, is_draining=True)], ResizeRequest(), "drain"),
        ([host("a", 0), host("b", 2)], ResizeRequest(drain_hosts=frozenset({"b"})), None),
    ],
)
def test_four_running_workers_stop_when_another_size_or_host_is_better(
    hosts: list[Host], request_: ResizeRequest, cause: str | None
) -> None:
    assert cause_to_stop(TWO_TO_SIX, on("a", 4), hosts, request_) == cause


def test_only_the_workers_that_are_meant_see_a_request_to_stop(tmp_path: Path) -> None:
    files = AttemptDir(tmp_path)
    assert not requests_module.is_stop_wanted(files, 0)
    requests_module.ask(files, StopRequest(run_index=1, cause="room"))
    assert requests_module.is_stop_wanted(files, 1)
    assert not requests_module.is_stop_wanted(files, 0)
    files.stop_request_path.write_text("{")
    assert not requests_module.is_stop_wanted(files, 1)


def test_the_newest_request_that_can_be_read_counts(tmp_path: Path) -> None:
    files = AttemptDir(tmp_path)
    path = files.resize_request_path
    requests = ResizeRequests(files)
    assert requests.poll() == ResizeRequest()
    path.write_text('{"id": "r-1", "workers": 4, "drain_hosts": ["a"]}')
    wish = ResizeRequest(id="r-1", workers=4, drain_hosts=frozenset({"a"}))
    assert requests.poll() == wish
    path.write_text('{"workers": 0}')
    assert requests.poll() == wish
    path.unlink()
    assert requests.poll() == wish
    files.growth_limit_path.write_text('{"max_workers": 2}')
    assert requests.poll() == wish.model_copy(update={"growth_limit": 2})
    files.growth_limit_path.write_text("{")
    assert requests.poll() == wish


@given(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.integers(0, 9))
def test_a_limit_to_growth_keeps_a_job_small_and_never_makes_it_smaller(
    workers: int | None, limit: int | None, num_workers: int
) -> None:
    wanted = ResizeRequest(workers=workers, growth_limit=limit).wanted_beside(num_workers)
    if limit is None:
        assert wanted == workers
        return
    assert wanted is not None
    assert wanted <= max(limit, num_workers)
    assert wanted >= min(num_workers, workers or num_workers)


@dataclass
class World:
    """A job on a cluster, and what happens on it: `plot` says when, in seconds since the start."""

    attempt: Attempt
    hosts: list[Host]
    now: float = 0.0
    hangs_at: float = math.inf
    launched: list[TrainRun] = field(default_factory=list)
    ends: list[Future[Failure | None]] = field(default_factory=list)
    plot: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    killed: list[tuple[str, Collection[int]]] = field(default_factory=list)
    # As a `HangMonitor`, which hears of a hang at a time.
    address: str = "127.0.0.1:1"
    processes: dict[str, set[int]] = field(default_factory=lambda: {"a": {11, 12}, "gone": {13}})
    stragglers: tuple[events.StragglerFound, ...] = ()
    is_nobody_there: bool = False

    def __post_init__(self) -> None:
        self.files = self.attempt.context.files
        self.cloud = Cloud()
        self.runner = self.runner_of(self.attempt)

    def runner_of(self, attempt: Attempt) -> JobRunner:
        room = attempt.capacity
        return JobRunner(
            attempt,
            room.read_hosts if room else lambda: self.hosts,
            self.launch,
            self,
            attempt.host_record(),
            clock=lambda: self.now,
            wait=self.wait,
            kill_on=self.kill,
        )

    def grow_by_itself(self) -> Cloud:
        """The cluster has an autoscaler, and no host yet."""
        self.hosts = []
        write = self.attempt.writer.write
        room = CapacityManager(self.cloud, lambda: self.hosts, {"CPU": 1.0}, write)
        self.attempt = replace(self.attempt, capacity=room)
        self.runner = self.runner_of(self.attempt)
        return self.cloud

    def avoid(self, address: str) -> None:
        """The service wants no worker on a host."""
        context = replace(self.attempt.context, avoided_hosts=((address, 4e9),))
        self.runner = self.runner_of(replace(self.attempt, context=context))

    def launch(self, run: TrainRun) -> Future[Failure | None]:
        self.launched.append(run)
        self.ends.append(Future())
        return self.ends[-1]

    def wait(self, seconds: float) -> None:
        assert self.now < 1000, "nothing happens any more"
        self.now += seconds
        due = [step for when, step in self.plot if when <= self.now]
        self.plot = [(when, step) for when, step in self.plot if when > self.now]
        for step in due:
            step()

    def check(self, run_index: int) -> Failure | None:
        hangs = run_index == 0 and self.now >= self.hangs_at
        return Failure(EndReason.HANG, "rank 1 stands still") if hangs else None

    def kill(self, where: Host, pids: Collection[int]) -> None:
        self.killed.append((where.address, pids))
        self.end(Failure(EndReason.WORKERS_LOST, "all ranks were lost"))()

    def change(self, *hosts: Host) -> Callable[[], None]:
        """A step that makes these the hosts of the cluster."""
        return lambda: self.hosts.__setitem__(slice(None), hosts)

    def end(self, failure: Failure | None = None) -> Callable[[], None]:
        return lambda: self.ends[-1].set_result(failure)

    def stop(self) -> None:
        """What workers do that find the request."""
        run_index = self.launched[-1].config.run_index
        assert requests_module.is_stop_wanted(self.files, run_index), "nobody asked"
        self.files.stopping_path(run_index).touch()
        self.ends[-1].set_result(None)

    def wish(self, text: str) -> None:
        self.files.resize_request_path.write_text(text)

    def told(self, kind: type[events.EventModel]) -> list[events.EventModel]:
        return records_in(self.attempt.context.files, kind)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A job of two to six workers in groups of two, on one host with room for four."""
    sizes = {"workers": {"min": 2, "max": 6}, "shard_group_size": 2, "placement": "intra_host"}
    return World(attempt_in(tmp_path, spec(parallelism=sizes)), [host("a", 4)])


def test_a_life_takes_the_room_there_is_pinned_and_as_a_fixed_size(world: World) -> None:
    world.plot = [(5, world.end())]
    assert world.runner.run_once(0) is None
    (told,) = world.told(events.Resized)
    assert (told.world_size_before, told.world_size) == (6, 4), "its layout counts six"
    assert (told.cause, told.restarted) == ("start", False)
    (run,) = world.launched
    assert run.num_workers == 4
    assert run.node_ids == ("node-a",) * 4
    assert run.config.spec.parallelism.world_size == 4
    assert not run.config.spec.parallelism.is_elastic


def test_room_that_stays_lets_the_job_grow_by_a_restart(world: World) -> None:
    grown = world.change(host("a", 0), host("b", 2))
    world.plot = [(20, grown), (61, world.stop)]
    assert world.runner.run_once(0) == Restart()
    world.change(host("a", 4), host("b", 2))()
    world.plot = [(70, world.end())]
    assert world.runner.run_once(1) is None
    assert world.launched[1].num_workers == 6
    resized = world.told(events.Resized)[-1]
    assert (resized.world_size_before, resized.world_size) == (4, 6)
    assert (resized.cause, resized.restarted) == ("room", True)


def test_room_that_comes_and_goes_disturbs_nobody(world: World) -> None:
    full, more = (world.change(host("a", 0), host("b", free)) for free in (0, 2))
    world.plot = [(1, full), (70, more), (75, full), (100, world.end())]
    assert world.runner.run_once(0) is None
    assert not world.files.stop_request_path.exists()


def test_a_wish_is_followed_at_once(world: World) -> None:
    world.plot = [(2, partial(world.wish, '{"workers": 2}')), (4, world.stop)]
    assert world.runner.run_once(0) == Restart()
    world.plot = [(20, world.end())]
    assert world.runner.run_once(1) is None
    assert world.launched[1].num_workers == 2
    assert [each.cause for each in world.told(events.Resized)] == ["start", "request"]


def test_an_attempt_that_begins_resized_tells_its_size(world: World) -> None:
    world.wish('{"workers": 2}')
    world.plot = [(20, world.end())]
    assert world.runner.run_once(0) is None
    (resized,) = world.told(events.Resized)
    assert (resized.world_size_before, resized.world_size) == (6, 2)
    assert (resized.cause, resized.restarted) == ("request", False)


@pytest.mark.parametrize("is_of_ray", [False, True])
def test_workers_of_a_fixed_size_leave_the_drained_host_that_ray_chose(
    tmp_path: Path, is_of_ray: bool
) -> None:
    sizes = {"workers": 4, "shard_group_size": 2, "placement": "intra_host"}
    world = World(attempt_in(tmp_path, spec(parallelism=sizes)), [host("a", 4), host("b", 4)])
    drained = world.change(host("a", 0, is_draining=is_of_ray), host("b", 4))
    world.plot = [(2, world.change(host("a", 0), host("b", 4))), (5, drained), (9, world.stop)]
    world.plot += [(5, partial(setattr, world, "processes", {"a": {11, 12, 13, 14}}))]
    if not is_of_ray:
        world.plot += [(3, partial(world.wish, '{"drain_hosts": ["a"]}'))]
    assert world.runner.run_once(0) == Restart()
    assert world.launched[0].node_ids == (), "Ray places what nothing constrains"
    world.plot = [(50, world.end())]
    assert world.runner.run_once(1) is None
    assert world.launched[1].node_ids == ("node-b",) * 4


@pytest.mark.parametrize("workers", ["null", "4"])
def test_workers_on_an_excluded_host_that_they_took_as_others_lacked_do_not_grow_there(
    world: World, workers: str
) -> None:
    world.avoid("a")
    world.wish(f'{{"workers": {workers}}}')
    world.processes = {"a": {11, 12}}

    def others_come() -> None:
        assert not world.files.stop_request_path.exists(), "a restart would use no more of it"
        world.hosts[:] = host("a", 2), host("b", 4)

    world.plot = [(1, world.change(host("a", 2))), (100, others_come), (150, world.stop)]
    assert world.runner.run_once(0) == Restart()
    world.plot = [(200, world.end())]
    assert world.runner.run_once(1) is None
    assert [run.node_ids for run in world.launched] == [(), ("node-b",) * 4]


def test_after_a_loss_the_job_goes_on_with_what_is_left(world: World) -> None:
    died = Failure(EndReason.WORKERS_LOST, "rank 3 was lost", is_death=True, blamed_host="b")
    world.hosts = [host("a", 4), host("b", 2)]
    world.plot = [(5, world.end(died)), (7, world.change(host("a", 4)))]
    outcome = world.runner.run_once(0)
    assert isinstance(outcome, Failure)
    assert outcome.reason == EndReason.HOST_LOST, "its host is gone"
    world.plot = [(50, world.end())]
    assert world.runner.run_once(1) is None
    assert [run.num_workers for run in world.launched] == [6, 4]
    assert world.told(events.Resized)[0].cause == EndReason.HOST_LOST


def test_what_the_last_life_held_is_awaited_before_the_size_is_decided(world: World) -> None:
    killed = world.end(Failure(EndReason.WORKERS_LOST, "killed"))
    world.plot = [(5, world.change(host("a", 2))), (5, killed), (7, world.change(host("a", 4)))]
    world.plot += [(20, world.end())]
    assert isinstance(world.runner.run_once(0), Failure)
    assert world.runner.run_once(1) is None
    assert [run.num_workers for run in world.launched] == [4, 4]


def test_a_start_without_room_is_tried_again_and_at_last_left_to_ray(world: World) -> None:
    no_room = Failure(EndReason.NO_ROOM, "timed out")
    outcomes: list[Outcome] = []
    for index in range(4):
        world.plot = [(world.now + 20, world.end(no_room))]
        outcomes.append(world.runner.run_once(index))
    assert outcomes == [Restart()] * 4
    assert [bool(run.node_ids) for run in world.launched] == [True, True, True, False]
    assert world.launched[-1].num_workers == 2
    (note,) = world.told(events.Note)
    assert note.message == "timed out; trying again"


def test_workers_that_hang_are_killed_where_they_can_be_and_that_is_why_they_ended(
    world: World,
) -> None:
    world.hangs_at = 20
    began = EventWriter(world.files.stream_path("workers-0"))
    world.plot = [(5, lambda: began.write(workers_started()))]
    outcome = world.runner.run_once(0)
    assert isinstance(outcome, Failure)
    assert outcome.reason == EndReason.HANG
    lost_s = world.told(events.Metrics)[-1].values["goodput/lost_s/hang"]
    assert lost_s == pytest.approx(world.now - 5)
    assert world.killed == [("a", {11, 12})]
    assert world.now >= 22, "first they log what they do"
    config = world.launched[0].config
    assert config.watch_address == "127.0.0.1:1"
    assert config.token == world.runner.attempt.token


def test_a_clock_that_is_set_back_takes_nothing_from_the_time_that_was_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Mock(time=lambda: 1e9 + world.now - 3600 * (world.now > 5))
    monkeypatch.setattr(job_runner, "time", clock)
    runner = world.runner_of(world.attempt)
    writer = EventWriter(world.files.stream_path("workers-0"))

    def began() -> None:
        writer.write(workers_started().model_copy(update={"time": clock.time()}))

    world.plot = [(30, began), (60, world.end())]
    assert runner.run_once(0) is None
    (last,) = world.told(events.Metrics)[-1:]
    assert last.values["goodput/lost_s/start"] == pytest.approx(30)


def test_a_straggler_is_left_at_a_restart_from_a_checkpoint_where_others_have_room(
    tmp_path: Path,
) -> None:
    sizes = {"workers": {"min": 2, "max": 4}, "shard_group_size": 2, "placement": "intra_host"}
    job = spec(parallelism=sizes, recovery={"replace_stragglers": True})
    world = World(attempt_in(tmp_path, job), [host("a", 2), host("b", 2)])
    world.avoid("d")

    def find(address: str, time: float) -> Callable[[], None]:
        at = {"group": 0, "rank": 1, "host": address}
        found = events.StragglerFound(time=time, **at, slowdown=2.0, action="none")
        return lambda: setattr(world, "stragglers", (*world.stragglers, found))

    used = host("a", 0), host("b", 0)
    world.plot = [(1, world.change(*used, host("c", 1), host("d", 2))), (5, find("a", 1.0))]
    world.plot += [(20, world.change(*used, host("c", 2))), (21, find("a", 2.0)), (25, world.stop)]
    assert world.runner.run_once(0) == Restart()
    actions = [each.action for each in world.told(events.StragglerFound)]
    assert actions == ["none", "replace"], "there was no room for two workers, then there was"
    (excluded,) = world.told(events.HostExcluded)
    assert (excluded.host, excluded.num_failures) == ("a", 0)
    world.change(host("a", 2), host("b", 2), host("c", 2))()
    slow_again = world.now + 5, find("a", 3.0)
    world.plot = [slow_again, (world.now + 100, world.end())]
    assert world.runner.run_once(1) is None, "room on the slow host is no cause to restart"
    assert set(world.launched[1].node_ids) == {"node-b", "node-c"}
    assert world.told(events.StragglerFound)[-1].action == "none"
    assert not world.told(events.Resized)


def test_where_hosts_share_nothing_the_mark_of_how_workers_ended_is_waited_for(
    world: World,
) -> None:
    context = replace(world.attempt.context, is_mirrored=True)
    world.runner = world.runner_of(replace(world.attempt, context=context))
    files = world.files
    world.plot = [(3, world.end()), (20, files.completed_path(0).touch)]
    assert world.runner.run_once(0) is None
    assert world.now >= 20
    world.plot = [(40, world.end()), (50, files.stopping_path(1).touch)]
    assert isinstance(world.runner.run_once(1), Restart)
    assert world.now >= 50 + MIRROR_S, "the last records come after the mark"
    world.plot = [(70, world.end())]
    with pytest.raises(StorageError, match="is the service away"):
        world.runner.run_once(2)


def test_a_pause_lets_the_workers_save_and_ends_the_attempt(world: World) -> None:
    asked = world.files.pause_request_path
    # Workers that complete training meanwhile have completed.
    world.plot = [(3, asked.touch), (6, world.end())]
    assert world.runner.run_once(0) is None
    asked.unlink()
    world.plot = [(9, asked.touch), (12, world.stop)]
    for run_index in (1, 2):
        ended = world.runner.run_once(run_index)
        assert isinstance(ended, Failure)
        assert ended.reason == EndReason.PAUSED
    assert len(world.launched) == 2, "a paused attempt starts no workers"


def test_workers_that_wait_for_room_are_not_asked_to_grow_into_the_room_they_wait_for(
    tmp_path: Path,
) -> None:
    sizes = {"workers": {"min": 4, "max": 6}, "shard_group_size": 2, "placement": "intra_host"}
    world = World(attempt_in(tmp_path, spec(parallelism=sizes)), [host("a", 3)], processes={})
    world.wish('{"workers": 6}')
    world.plot = [(20, world.end())]
    assert world.runner.run_once(0) is None
    assert not world.files.stop_request_path.exists()


def test_a_pause_ends_the_attempt_at_once_while_its_workers_wait_for_room(world: World) -> None:
    world.hosts = [host("a", 1)]
    world.is_nobody_there = True
    world.plot = [(3, world.files.pause_request_path.touch)]
    assert world.runner.run_once(0) == PAUSED_EARLY
    assert not world.launched[0].node_ids
    assert world.now < 5
    assert world.told(events.Metrics), "the time that it waited is told"


def test_while_storage_is_away_the_request_to_stop_and_the_mark_of_its_end_are_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, asked = RunStorage(monkeypatch), world.files.pause_request_path
    world.plot = [(5, storage.leave), (6, asked.touch), (9, storage.come_back)]
    world.plot += [(12, world.stop), (12, storage.leave), (20, storage.come_back)]
    assert world.runner.run_once(0) == PAUSED
    assert world.now >= 20
    asked.unlink()
    world.plot = [(25, world.end()), (25, storage.leave)]
    with pytest.raises(OSError, match="Stale"):
        world.runner.run_once(1)


def test_a_straggler_is_left_although_storage_refused_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"workers": {"min": 2, "max": 2}, "shard_group_size": 2, "placement": "intra_host"}
    job = spec(parallelism=sizes, recovery={"replace_stragglers": True})
    world = World(attempt_in(tmp_path, job), [host("a", 2), host("b", 2)])
    at = {"group": 0, "rank": 1, "host": "a"}
    found = events.StragglerFound(time=1.0, **at, slowdown=2.0, action="none")
    storage = RunStorage(monkeypatch)
    world.plot = [(5, storage.leave), (5, lambda: setattr(world, "stragglers", (found,)))]
    world.plot += [(9, storage.come_back), (12, world.stop)]
    assert world.runner.run_once(0) == Restart()


def test_running_workers_want_what_they_would_grow_into() -> None:
    hosts = [host("a", 0), host("b", 1)]
    need = need_of(TWO_TO_SIX, on("a", 2), hosts, wanted=None)
    assert (need.has, need.wants) == (2, 6)
    assert need.requests == (CapacityRequest(2), CapacityRequest(2)), (
        "the free one can be half of a group"
    )
    assert need_of(TWO_TO_SIX, on("a", 2), hosts, wanted=2).requests == ()
    drained = need_of(TWO_TO_SIX, on("a", 2), hosts, None, {"a"})
    assert drained.has < drained.least
    assert drained.requests == (CapacityRequest(2, avoided=frozenset("a")),) * 3


def taken(address: str) -> Host:
    """A host of two slots, none of them free."""
    return Host(address, 2, 0, f"node-{address}")


def test_a_job_starts_when_the_autoscaler_has_made_room_for_the_fewest(world: World) -> None:
    cloud = world.grow_by_itself()
    given = partial(cloud.give, "1", "node-a", "node-a")
    world.plot = [(500, world.change(taken("a"))), (500, given), (520, world.end())]
    assert world.runner.run_once(0) is None
    (run,) = world.launched
    assert run.node_ids == ("node-a",) * 2
    assert set(cloud.known) == {"2", "3"}, "its own room was given to it, and more is wanted"


def test_room_that_came_is_held_until_the_workers_start_again_in_it(world: World) -> None:
    cloud = world.grow_by_itself()
    world.hosts = [host("a", 2)]
    given = partial(cloud.give, "1", "node-b", "node-b")
    world.plot = [(1, world.change(taken("a"))), (20, world.change(taken("a"), taken("b")))]
    world.plot += [(20, given), (61, world.stop)]
    assert world.runner.run_once(0) == Restart()
    assert "1" in cloud.known, "nobody else was to have it"
    world.hosts[0] = host("a", 2)
    world.plot = [(70, world.end())]
    assert world.runner.run_once(1) is None
    assert world.launched[1].num_workers == 4
    assert "1" not in cloud.known


def test_a_pause_during_a_restart_lets_go_of_the_room_to_grow_into(world: World) -> None:
    cloud = world.grow_by_itself()
    world.hosts = [host("a", 2)]

    def drain() -> None:
        world.wish('{"drain_hosts": ["a"]}')
        world.hosts = [taken("a"), host("b", 2)]

    def look() -> None:
        assert cloud.known, "it is to grow when it starts again"

    def look_and_end() -> None:
        assert not cloud.known
        world.stop()

    world.plot = [
        (20, drain),
        (24, look),
        (25, world.files.pause_request_path.touch),
        (60, look_and_end),
    ]
    assert world.runner.run_once(0) == Restart()
    assert world.runner.run_once(1) == PAUSED_EARLY


def test_excluded_hosts_are_taken_again_where_the_autoscaler_adds_no_others(world: World) -> None:
    cloud = world.grow_by_itself()
    world.avoid("a")
    world.hosts = [host("a", 2)]
    num_lives: list[int] = []

    def count() -> None:
        num_lives.append(len(world.launched))

    take = world.change(Host("a", 4, 2, "node-a"))
    world.plot = [(170, count), (182, count), (183, take), (300, world.end())]
    assert world.runner.run_once(0) is None
    assert num_lives == [0, 1], "for a while others might have come"
    assert world.launched[0].node_ids == ("node-a",) * 2
    (note,) = world.told(events.Note)
    assert "waits for other hosts than a: drained, or excluded" in note.message
    assert len(cloud.known) == 2, "what it runs on counts, and what is free there does not"


def test_drained_hosts_are_not_taken_although_the_autoscaler_adds_no_others(world: World) -> None:
    world.grow_by_itself()
    world.wish('{"drain_hosts": ["a"]}')
    world.hosts = [host("a", 2)]
    # A job that waits for room can be paused.
    world.plot = [(900, world.files.pause_request_path.touch)]
    assert world.runner.run_once(0) == PAUSED_EARLY
    assert not world.launched

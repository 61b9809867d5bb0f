"""The job domain: how many workers start where, and when they start again with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import spec
from tests.unit.trainer.driver.scripted import Cloud, told
from trainer import failures
from trainer.driver.attempt import PAUSED_EARLY, Attempt, DriverContext, Outcome, Restart
from trainer.driver.autoscale import CapacityManager, CapacityRequest
from trainer.driver.cluster import Host
from trainer.driver.job_runner import Bounds, JobRunner, Plan, cause_to_stop, need_of, plan
from trainer.driver.ray_train import TrainRun
from trainer.failures import Failure
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
def test_a_size_is_the_largest_legal_one_that_fits_and_is_wanted(
    group_size: int, least: int, more: int, room: int, data: st.DataObject
) -> None:
    bounds = Bounds(group_size, least * group_size, (least + more) * group_size)
    wanted = data.draw(st.none() | st.integers(1, 40))
    legal = range(bounds.least, bounds.most + 1, group_size)
    fitting = [size for size in legal if size <= room]
    limit = bounds.most if wanted is None else max(wanted, bounds.least)
    expected = max((size for size in fitting if size <= limit), default=None)
    assert bounds.best(room, wanted) == expected


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


@pytest.fixture
def context(tmp_path: Path) -> DriverContext:
    context = DriverContext("job", "job-a0", tmp_path, None, max_worker_failures=1)
    context.files.root.mkdir(parents=True)
    return context


def test_only_the_workers_that_are_meant_see_a_request_to_stop(context: DriverContext) -> None:
    files = context.files
    assert not requests_module.is_wanted(files, 0)
    requests_module.ask(files, StopRequest(run_index=1, cause="room"))
    assert requests_module.is_wanted(files, 1)
    assert not requests_module.is_wanted(files, 0)
    files.stop_request_path.write_text("{")
    assert not requests_module.is_wanted(files, 1)


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
    """A cluster, and what happens on it: `plot` says when, in seconds since the start."""

    hosts: list[Host]
    now: float = 0.0
    runs: list[TrainRun] = field(default_factory=list)
    ends: list[Future[Failure | None]] = field(default_factory=list)
    plot: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def launch(self, run: TrainRun) -> Future[Failure | None]:
        self.runs.append(run)
        self.ends.append(Future())
        return self.ends[-1]

    def wait(self, seconds: float) -> None:
        assert self.now < 1000, "nothing happens any more"
        self.now += seconds
        due = [step for when, step in self.plot if when <= self.now]
        self.plot = [(when, step) for when, step in self.plot if when > self.now]
        for step in due:
            step()

    def change(self, *hosts: Host) -> Callable[[], None]:
        """A step that makes these the hosts of the cluster."""
        return lambda: self.hosts.__setitem__(slice(None), hosts)

    def end(self, failure: Failure | None = None) -> Callable[[], None]:
        return lambda: self.ends[-1].set_result(failure)


@dataclass
class Ears:
    """A `HangMonitor` that hears of a hang at a time."""

    world: World
    hangs_at: float = math.inf
    address: str = "127.0.0.1:1"
    processes: ClassVar = {"a": {11, 12}, "gone": {13}}

    def check(self, run_index: int) -> Failure | None:
        hangs = run_index == 0 and self.world.now >= self.hangs_at
        return Failure(failures.HANG, "rank 1 stands still") if hangs else None


@pytest.fixture
def jobs(context: DriverContext) -> tuple[JobRunner, World]:
    """A job of two to six workers in groups of two, on one host with room for four."""
    sizes = {"workers": {"min": 2, "max": 6}, "shard_group_size": 2, "placement": "intra_host"}
    world = World([host("a", 4)])
    writer = EventWriter(context.files.stream_path("driver"))
    attempt = Attempt(context, spec(parallelism=sizes), writer)
    times = {"clock": lambda: world.now, "wait": world.wait}
    return JobRunner(attempt, lambda: world.hosts, world.launch, Ears(world), **times), world


def resizes(runs: JobRunner) -> list[events.EventModel]:
    return told(runs.attempt.context, events.Resized)


def stop_as_asked(world: World, files_of: JobRunner, run_index: int) -> Callable[[], None]:
    """What workers do that find the request."""

    def stop() -> None:
        files = files_of.attempt.context.files
        assert requests_module.is_wanted(files, run_index), "nobody asked"
        files.stopping_path(run_index).touch()
        world.ends[-1].set_result(None)

    return stop


def test_a_life_takes_the_room_there_is_pinned_and_as_a_fixed_size(
    jobs: tuple[JobRunner, World],
) -> None:
    runs, world = jobs
    world.plot = [(5, world.end())]
    assert runs.run_once(0) is None
    (run,) = world.runs
    assert run.num_workers == 4
    assert run.node_ids == ("node-a",) * 4
    assert run.config.spec.parallelism.world_size == 4
    assert not run.config.spec.parallelism.is_elastic


def test_room_that_stays_lets_the_job_grow_by_a_restart(jobs: tuple[JobRunner, World]) -> None:
    runs, world = jobs
    grown = world.change(host("a", 0), host("b", 2))
    world.plot = [(20, grown), (61, stop_as_asked(world, runs, 0))]
    assert runs.run_once(0) == Restart()
    world.change(host("a", 4), host("b", 2))()
    world.plot = [(70, world.end())]
    assert runs.run_once(1) is None
    assert world.runs[1].num_workers == 6
    (resized,) = resizes(runs)
    assert (resized.world_size_before, resized.world_size) == (4, 6)
    assert (resized.cause, resized.restarted) == ("room", True)


def test_room_that_comes_and_goes_disturbs_nobody(jobs: tuple[JobRunner, World]) -> None:
    runs, world = jobs
    full, more = (world.change(host("a", 0), host("b", free)) for free in (0, 2))
    world.plot = [(1, full), (70, more), (75, full), (100, world.end())]
    assert runs.run_once(0) is None
    assert not runs.attempt.context.files.stop_request_path.exists()


def test_a_wish_is_followed_at_once(jobs: tuple[JobRunner, World]) -> None:
    runs, world = jobs
    files = runs.attempt.context.files
    world.plot = [
        (2, lambda: files.resize_request_path.write_text('{"workers": 2}') and None),
        (4, stop_as_asked(world, runs, 0)),
    ]
    assert runs.run_once(0) == Restart()
    world.plot = [(20, world.end())]
    assert runs.run_once(1) is None
    assert world.runs[1].num_workers == 2
    assert resizes(runs)[0].cause == "request"


def test_after_a_loss_the_job_goes_on_with_what_is_left(jobs: tuple[JobRunner, World]) -> None:
    runs, world = jobs
    died = Failure(failures.WORKERS_LOST, "rank 3 was lost", is_death=True, evidence={"host": "b"})
    world.hosts = [host("a", 4), host("b", 2)]

    world.plot = [(5, world.end(died)), (7, world.change(host("a", 4)))]
    outcome = runs.run_once(0)
    assert isinstance(outcome, Failure)
    assert outcome.reason == failures.HOST_LOST, "its host is gone"
    world.plot = [(50, world.end())]
    assert runs.run_once(1) is None
    assert [run.num_workers for run in world.runs] == [6, 4]
    assert resizes(runs)[0].cause == failures.HOST_LOST


def test_what_the_last_life_held_is_awaited_before_the_size_is_decided(
    jobs: tuple[JobRunner, World],
) -> None:
    runs, world = jobs
    killed = world.end(Failure(failures.WORKERS_LOST, "killed"))
    world.plot = [(5, world.change(host("a", 2))), (5, killed), (7, world.change(host("a", 4)))]
    world.plot += [(20, world.end())]
    assert isinstance(runs.run_once(0), Failure)
    assert runs.run_once(1) is None
    assert [run.num_workers for run in world.runs] == [4, 4]


def test_a_start_without_room_is_tried_again_and_at_last_left_to_ray(
    jobs: tuple[JobRunner, World],
) -> None:
    runs, world = jobs
    no_room = Failure(failures.NO_ROOM, "timed out")
    outcomes: list[Outcome] = []
    for index in range(4):
        world.plot = [(world.now + 20, world.end(no_room))]
        outcomes.append(runs.run_once(index))
    assert outcomes == [Restart()] * 4
    assert [run.waits_for_room for run in world.runs] == [False, False, False, True]
    assert world.runs[-1].num_workers == 2


def test_workers_that_hang_are_killed_where_they_can_be_and_that_is_why_they_ended(
    jobs: tuple[JobRunner, World],
) -> None:
    runs, world = jobs
    killed = []

    def kill(where: Host, pids: Collection[int]) -> None:
        killed.append((where.address, set(pids)))
        world.end(Failure(failures.WORKERS_LOST, "all ranks were lost"))()

    runs.hang_monitor = Ears(world, hangs_at=20)
    runs.kill_on = kill
    outcome = runs.run_once(0)
    assert isinstance(outcome, Failure)
    assert outcome.reason == failures.HANG
    assert killed == [("a", {11, 12})]
    assert world.runs[0].config.watch_address == "127.0.0.1:1"


def test_a_pause_lets_the_workers_save_and_ends_the_attempt(jobs: tuple[JobRunner, World]) -> None:
    runs, world = jobs
    asked = runs.attempt.context.files.pause_request_path
    # Workers that complete training meanwhile have completed.
    world.plot = [(3, asked.touch), (6, world.end())]
    assert runs.run_once(0) is None
    asked.unlink()
    world.plot = [(9, asked.touch), (12, stop_as_asked(world, runs, 1))]
    for run_index in (1, 2):
        ended = runs.run_once(run_index)
        assert isinstance(ended, Failure)
        assert ended.reason == failures.PAUSED
    assert len(world.runs) == 2, "a paused attempt starts no workers"


def test_hosts_that_the_service_avoids_take_no_worker(
    context: DriverContext, jobs: tuple[JobRunner, World]
) -> None:
    runs, world = jobs
    avoiding = replace(context, avoided_hosts=(("a", 4e9),))
    world.hosts = [host("a", 4), host("b", 2)]
    wary = replace(runs, attempt=replace(runs.attempt, context=avoiding))
    world.plot = [(5, world.end())]
    wary.run_once(0)
    assert set(world.runs[0].node_ids) == {"node-b"}


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


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.integers(0, 40), st.data())
def test_room_and_wishes_make_the_largest_legal_size_that_is_wanted(
    group_size: int, least: int, more: int, room: int, data: st.DataObject
) -> None:
    bounds = Bounds(group_size, least * group_size, (least + more) * group_size)
    wanted = data.draw(st.none() | st.integers(1, 40))
    need = need_of(bounds, Plan(0), [host("a", room)], wanted)
    assert need.wants == bounds.best(1000, wanted)
    assert need.has + sum(wish.num_workers for wish in need.requests) == need.wants
    assert need.has <= room
    assert (need.has < need.least) == (bounds.best(room, wanted) is None)


@pytest.fixture
def growing(jobs: tuple[JobRunner, World]) -> tuple[JobRunner, World, Cloud]:
    """The job of two to six workers, on a cluster that has no host yet."""
    runs, world = jobs
    cloud = Cloud()
    world.hosts = []
    room = CapacityManager(cloud, lambda: world.hosts, {"CPU": 1.0}, runs.attempt.writer.write)
    runs.attempt = replace(runs.attempt, capacity=room)
    runs.read_hosts = room.read_hosts
    return runs, world, cloud


def taken(address: str) -> Host:
    """A host of two slots, none of them free."""
    return Host(address, 2, 0, f"node-{address}")


def test_a_job_starts_when_the_autoscaler_has_made_room_for_the_fewest(
    growing: tuple[JobRunner, World, Cloud],
) -> None:
    runs, world, cloud = growing
    given = partial(cloud.give, "1", "node-a", "node-a")
    world.plot = [(500, world.change(taken("a"))), (500, given), (520, world.end())]
    assert runs.run_once(0) is None
    (run,) = world.runs
    assert run.node_ids == ("node-a",) * 2
    assert set(cloud.known) == {"2", "3"}, "its own room was given to it, and more is wanted"


def test_room_that_came_is_held_until_the_workers_start_again_in_it(
    growing: tuple[JobRunner, World, Cloud],
) -> None:
    runs, world, cloud = growing
    world.hosts = [host("a", 2)]
    given = partial(cloud.give, "1", "node-b", "node-b")
    world.plot = [(1, world.change(taken("a"))), (20, world.change(taken("a"), taken("b")))]
    world.plot += [(20, given), (61, stop_as_asked(world, runs, 0))]
    assert runs.run_once(0) == Restart()
    assert "1" in cloud.known, "nobody else was to have it"
    world.hosts[0] = host("a", 2)
    world.plot = [(70, world.end())]
    assert runs.run_once(1) is None
    assert world.runs[1].num_workers == 4
    assert "1" not in cloud.known


def test_a_job_that_pauses_wants_and_holds_no_room_while_it_saves(
    growing: tuple[JobRunner, World, Cloud],
) -> None:
    runs, world, cloud = growing
    world.hosts = [host("a", 2)]

    def look_and_end() -> None:
        assert not cloud.known, "others may need it"
        stop_as_asked(world, runs, 0)()

    asked = runs.attempt.context.files.pause_request_path
    given = partial(cloud.give, "1", "node-b", "node-b")
    world.plot = [(1, world.change(taken("a"))), (1, given), (20, asked.touch)]
    world.plot += [(120, look_and_end)]
    ended = runs.run_once(0)
    assert isinstance(ended, Failure)
    assert ended.reason == failures.PAUSED


def test_a_pause_during_a_restart_lets_go_of_the_room_to_grow_into(
    growing: tuple[JobRunner, World, Cloud],
) -> None:
    runs, world, cloud = growing
    world.hosts = [host("a", 2)]
    files = runs.attempt.context.files

    def drain() -> None:
        files.resize_request_path.write_text('{"drain_hosts": ["a"]}')
        world.hosts = [taken("a"), host("b", 2)]

    def look() -> None:
        assert cloud.known, "it is to grow when it starts again"

    def look_and_end() -> None:
        assert not cloud.known
        stop_as_asked(world, runs, 0)()

    world.plot = [(20, drain), (24, look), (25, files.pause_request_path.touch), (60, look_and_end)]
    assert runs.run_once(0) == Restart()
    assert runs.run_once(1) == PAUSED_EARLY


def test_excluded_hosts_are_taken_again_where_the_autoscaler_adds_no_others(
    context: DriverContext, growing: tuple[JobRunner, World, Cloud]
) -> None:
    runs, world, cloud = growing
    avoiding = replace(context, avoided_hosts=(("a", 4e9),))
    wary = replace(runs, attempt=replace(runs.attempt, context=avoiding))
    world.hosts = [host("a", 2)]
    num_lives: list[int] = []

    def count() -> None:
        num_lives.append(len(world.runs))

    take = world.change(taken("a"))
    world.plot = [(170, count), (182, count), (183, take), (300, world.end())]
    assert wary.run_once(0) is None
    assert num_lives == [0, 1], "for a while others might have come"
    assert world.runs[0].node_ids == ("node-a",) * 2
    (note,) = told(context, events.Note)
    assert "waits for other hosts than a: drained, or failed too often" in note.message
    assert len(cloud.known) == 2, "what it runs on counts"


def test_drained_hosts_are_not_taken_although_the_autoscaler_adds_no_others(
    growing: tuple[JobRunner, World, Cloud],
) -> None:
    runs, world, _ = growing
    files = runs.attempt.context.files
    files.resize_request_path.write_text('{"drain_hosts": ["a"]}')
    world.hosts = [host("a", 2)]
    # A job that waits for room can be paused.
    world.plot = [(900, files.pause_request_path.touch)]
    assert runs.run_once(0) == PAUSED_EARLY
    assert not world.runs

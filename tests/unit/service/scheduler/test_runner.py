"""The queue at work on the scripted backend: starts, notes, preemptions, replicas, silence."""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from service.backends.fake import Script
from service.db.projects import ProjectStore, hold_lock
from service.domain.models import Job, JobStatus, Project, QueueState
from service.errors import LockLost
from service.observability.metrics import ServiceMetrics
from service.scheduler import runner
from service.scheduler.runner import SchedulerRunner
from tests.harness.builders import attempt_ended, batch, layout_chosen, queued_job, workers_started
from tests.harness.databases import store_job
from tests.harness.service import House
from trainer.failures import EndReason
from trainer.layout.hosts import HostFacts
from trainer.protocol.requests import ResizeRequests
from trainer.spec import JobSpec, load_spec

pytestmark = pytest.mark.every_database(slow=True)


def submit(house: House, workers: int | dict[str, int] = 4, **changes: object) -> Job:
    """A queued job in groups of two, whose attempts run until they are told to end."""
    made = queued_job(
        now=house.now, parallelism={"workers": workers, "shard_group_size": 2}, **changes
    )
    made = replace(made, priority=made.spec.priority, project=made.spec.project)
    house.backend.play(made.id, Script(("running",)))
    # Of two jobs of one moment either may be the first.
    house.now += 0.01
    return store_job(house.store, made)


def offer(house: House, *cpus: float) -> None:
    """Hosts with so many CPUs."""
    house.backend.set_hosts(*(HostFacts(f"h{n}", c, 0, 1 << 33) for n, c in enumerate(cpus)))


def report(house: House, job: Job, reason: str) -> None:
    """The driver of the newest attempt says how it ended, and exits."""
    attempt_id = house.store.get_job(job.id).current_attempt_id
    assert attempt_id is not None
    records = batch(attempt_ended(reason), stream="driver", first_seq=0)
    house.store.append_events(attempt_id, records, house.now)
    house.backend.play(attempt_id, Script(("failed",)))


def kinds(house: House, job: Job) -> list[str]:
    return [line.kind for line in house.store.list_timeline(job.id)]


def test_a_job_waits_with_its_position_and_reason_until_its_workers_fit(house: House) -> None:
    offer(house, 6)
    first, second = submit(house), submit(house)
    house.poll()
    assert (house.status(first), house.status(second)) == (JobStatus.STARTING, JobStatus.QUEUED)
    assert house.place_of(second) == QueueState(1, "waiting for 2 of 4 workers; cluster max 6")
    before = house.store.get_job(second.id)
    assert before.version == 1, "a position is not stored"
    house.poll(3)
    assert house.store.get_job(second.id) == before
    report(house, first, "completed")
    house.poll(2)
    assert house.status(second) is JobStatus.STARTING
    assert house.place_of(second).workers == 4


def test_ends_at_nobodys_cost_are_counted_from_attempt_to_attempt(house: House) -> None:
    offer(house, 4)
    job = submit(house)
    house.poll()
    for num_free, reason in ((1, "host_lost"), (2, "no_room"), (None, "driver_lost")):
        report(house, job, reason)
        house.poll()
        assert house.store.get_job(job.id).queue_note.num_free == num_free
        house.poll(2, every_s=400)


def test_an_elastic_job_grows_no_further_while_another_waits_for_room(house: House) -> None:
    offer(house, 4)
    elastic = submit(house, {"min": 2, "max": 8})
    house.poll()
    waiting = submit(house, 4)
    house.poll()
    files = house.files(elastic)
    house.backend.set_down(True)
    house.poll(3, every_s=61)
    assert ResizeRequests(files).poll().growth_limit == 4, "nobody knows of room"
    house.backend.set_down(False)
    offer(house, 8)
    house.poll(2, every_s=5)
    assert house.status(waiting) is JobStatus.STARTING
    for job in (elastic, waiting):
        house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    house.poll(2, every_s=61)
    assert ResizeRequests(files).poll().growth_limit is None


def test_jobs_of_one_pass_are_limited_until_their_workers_have_started(house: House) -> None:
    offer(house, 4)
    elastic, other = submit(house, {"min": 2, "max": 4}), submit(house, 2, priority=1)
    house.poll(2)
    assert house.status(elastic) is house.status(other) is JobStatus.STARTING
    files = house.files(elastic)
    assert ResizeRequests(files).poll().growth_limit == 2, "though nobody waits in the queue"
    for job in (elastic, other):
        house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    house.poll(2)
    assert ResizeRequests(files).poll().growth_limit is None


def test_limits_are_looked_at_again_after_a_clock_was_set_back(house: House) -> None:
    queue = SchedulerRunner(
        house.store, house.backend, house.settings, lambda: house.now, ServiceMetrics()
    )
    for passed_s, looks in ((0, True), (1, False), (-3600, True), (1, False), (60, True)):
        house.now += passed_s
        assert (queue.admit() is not None) is looks
    queue.close()


def test_growth_limits_that_cannot_be_written_are_told_of_once(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(house, 4)
    elastic = submit(house, {"min": 2, "max": 8})
    house.poll()
    submit(house, 4)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(runner, "limit_growth", refuse)
    house.poll(3)
    warnings = [each.getMessage() for each in caplog.records if each.name == runner.__name__]
    assert [each for each in warnings if "Read-only" in each] == [
        f"job {elastic.id} is not told how far it may grow, trying again: "
        "[Errno 30] Read-only file system"
    ]


def test_a_job_leaves_hosts_to_come_to_the_one_that_they_were_given_to(house: House) -> None:
    house.settings = house.settings.model_copy(update={"cluster_max_workers": 8})
    offer(house, 1)
    elastic = submit(house, {"min": 2, "max": 8})
    house.poll()
    job = house.store.get_job(elastic.id)
    house.store.update_job(replace(job, queue_note=QueueState(workers=2)))
    other = submit(house, 4)
    house.poll()
    assert house.status(other) is JobStatus.STARTING
    files = house.files(elastic)
    assert ResizeRequests(files).poll().growth_limit == 4
    house.poll(3)
    assert ResizeRequests(files).poll().growth_limit == 4, "though nobody waits in the queue"
    report(house, other, "completed")
    house.poll(2)
    assert ResizeRequests(files).poll().growth_limit is None


def test_a_job_that_no_host_can_hold_waits_for_hosts_unless_the_cluster_grows(house: House) -> None:
    offer(house)
    job = submit(house, 4)
    house.poll()
    assert house.status(job) is JobStatus.QUEUED, "a cluster without hosts starts nothing"
    offer(house, 2)
    house.poll()
    assert house.place_of(job).reason == "needs 4 workers; cluster max 2"
    house.settings = house.settings.model_copy(update={"cluster_max_workers": 8})
    house.poll()
    assert house.status(job) is JobStatus.STARTING


def test_without_an_observed_capacity_jobs_wait_for_their_quotas_only(house: House) -> None:
    offer(house, 2)
    house.settings = house.settings.model_copy(update={"queue_capacity": "unlimited"})
    job = submit(house, 4)
    house.poll()
    assert house.status(job) is JobStatus.STARTING


def test_a_cluster_that_does_not_answer_starts_and_preempts_nobody(house: House) -> None:
    offer(house, 4)
    low = submit(house)
    house.poll()
    urgent = submit(house, priority=5)
    house.backend.set_down(True)
    house.poll(5, every_s=600)
    assert not house.store.get_job(low.id).pause_requested
    assert house.place_of(urgent).reason == "the cluster does not answer"


def test_a_lower_priority_makes_way_saves_and_comes_back_with_its_place(house: House) -> None:
    offer(house, 4)
    low = submit(house)
    house.poll()
    house.store.append_events(f"{low.id}-a0", batch(workers_started()), house.now)
    urgent = submit(house, priority=5)
    house.poll()
    files = house.files(low)
    assert files.pause_request_path.exists()
    assert kinds(house, urgent) == ["job_submitted", "preempting"]
    house.poll()
    assert "make way" in house.place_of(urgent).reason
    report(house, low, "paused")
    house.poll(3)
    assert house.status(urgent) is JobStatus.STARTING
    assert house.status(low) is JobStatus.QUEUED
    assert kinds(house, low)[-3:] == ["preemption_requested", "attempt_ended", "job_preempted"]
    assert house.record(low).num_stops == 0
    report(house, urgent, "completed")
    house.poll(3)
    assert house.backend.record(f"{low.id}-a1") is not None
    assert house.store.get_job(low.id).num_failures == 0


def test_a_quota_caps_what_an_elastic_job_may_grow_to(house: House) -> None:
    projects = ProjectStore(house.store.engine)
    projects.put(Project("ads", max_workers=6), house.now)
    # Whether the rest of its spec is legal with so few, the driver finds.
    most = {"workers": {"min": 2, "max": 8}, "shard_group_size": 2, "moment_scale": 4}
    job = store_job(house.store, replace(queued_job(parallelism=most), project="ads"))
    house.backend.play(job.id, Script(("running",)))
    house.poll()
    path = house.files(job).spec_path
    stored = JobSpec.checked(json.loads(path.read_text()), {"stored": True})
    assert stored.parallelism.world_size == 6
    place = house.place_of(job)
    assert (place.workers, place.max_workers) == (6, 6)


def test_a_job_that_is_not_legal_with_what_its_quota_leaves_waits_for_more(house: House) -> None:
    projects = ProjectStore(house.store.engine)
    projects.put(Project("default", max_workers=1), house.now)
    sizes = {"workers": {"min": 1, "max": 8}, "shard_group_size": "auto"}
    memory = {"memory_bytes_per_worker": 2500}
    safe = store_job(house.store, queued_job(parallelism=sizes | {"survive": {"hosts": 1}}))
    large = store_job(house.store, queued_job(parallelism=sizes, resources=memory))
    house.poll()
    assert house.place_of(safe).reason == "project default may use 1 worker, and the job needs 2"
    (first,) = house.store.list_attempts(large.id)
    assert first.end_reason is EndReason.NO_ROOM
    assert "the quota of project default left it 1 workers" in first.message
    projects.put(Project("default", max_workers=16), house.now)
    house.poll(3, every_s=20)
    assert house.status(large) is JobStatus.STARTING


def test_only_one_replica_at_a_time_goes_through_the_queue(house: House) -> None:
    with hold_lock(house.store, "queue", "one", house.now, 10) as is_held:
        assert is_held
        with hold_lock(house.store, "queue", "two", house.now + 9, 10) as is_theirs:
            assert not is_theirs
        with hold_lock(house.store, "queue", "two", house.now + 10, 10) as is_theirs:
            assert is_theirs
    with hold_lock(house.store, "queue", "two", house.now, 10) as is_theirs:
        assert is_theirs
        with ExitStack() as stack:
            with hold_lock(house.store, "other", "late", house.now, 10):
                stack.enter_context(hold_lock(house.store, "other", "next", house.now + 10, 10))
            with hold_lock(house.store, "other", "third", house.now + 11, 10) as is_free:
                assert not is_free, "who was late has no lock to give back"


def test_a_replica_that_lost_the_lock_in_a_pass_starts_nothing(house: House) -> None:
    offer(house, 8)
    first, second = submit(house), submit(house)
    late = house.reconciler()._queue
    begin = late._start

    def start_late(*args: Any) -> None:
        with hold_lock(house.store, "queue", "two", house.now + 60, 60) as lock:
            assert lock is not None
            begin(*args)

    late._start = start_late  # type: ignore[method-assign]
    with pytest.raises(LockLost):
        late.admit()
    late.close()
    told = late.telemetry.registry.get_sample_value("shardloom_queue_wait_seconds_count")
    assert told == 0
    assert {house.status(job) for job in (first, second)} == {JobStatus.QUEUED}
    house.poll()
    assert {house.status(job) for job in (first, second)} == {JobStatus.STARTING}


def test_the_replica_that_starts_a_job_and_no_other_tells_how_long_it_waited(house: House) -> None:
    offer(house, 4)
    for _ in range(2):
        submit(house)
    house.now += 30
    waits = []
    for _ in range(2):
        telemetry = ServiceMetrics(lambda: house.now)
        queue = SchedulerRunner(
            house.store, house.backend, house.settings, lambda: house.now, telemetry
        )
        queue.admit()
        queue.close()
        waits.append(telemetry.registry.get_sample_value("shardloom_queue_wait_seconds_sum"))
    assert waits == [pytest.approx(30, abs=0.1), 0], "the other job waits still"


def test_a_job_that_somebody_writes_while_it_is_started_holds_up_no_other(house: House) -> None:
    offer(house, 8)
    first, second = submit(house), submit(house)
    queue = house.reconciler()._queue
    begin = queue._start

    def start_late(begun: Any, *args: Any) -> None:
        if begun.job.id == first.id:
            house.store.update_job(begun.job)
        begin(begun, *args)

    queue._start = start_late  # type: ignore[method-assign]
    queue.admit()
    queue.close()
    assert (house.status(first), house.status(second)) == (JobStatus.QUEUED, JobStatus.STARTING)


def test_an_attempt_after_a_shortage_of_memory_runs_another_spec(house: House) -> None:
    ProjectStore(house.store.engine).put(Project("default", max_workers=14), house.now)
    workers = {"min": 8, "max": 16}
    made = queued_job(parallelism={"workers": workers, "shard_group_size": "auto"})
    store_job(house.store, made)
    house.backend.play(made.id, Script(("running",)))
    house.poll()
    record = house.record(made)
    assert record.env["SHARDLOOM_END_ON"] == "device_oom host_oom"
    chosen = layout_chosen(shard_group_size=2, world_size=8, num_replicas=4)
    ended = attempt_ended("device_oom")
    house.store.append_events(f"{made.id}-a0", batch(chosen, ended, stream="driver"), house.now)
    house.backend.play(f"{made.id}-a0", Script(("failed",)))
    house.poll(3, every_s=5)
    sizes = load_spec(house.files(made, 1).spec_path.read_text()).parallelism
    assert (sizes.shard_group_size, sizes.world_size) == (4, 12), "within the quota"
    (sent,) = house.store.list_timeline(made.id, kinds=("attempt_submitted",))[1:]
    assert sent.message.endswith("shard_group_size is 4, as memory ran out at 2")

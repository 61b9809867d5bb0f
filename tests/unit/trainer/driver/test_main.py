"""The driver's decisions: what it refuses, which layout it takes, how lives follow each other."""

from __future__ import annotations

import errno
import gc
import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import httpx
import pytest
from ray.exceptions import RaySystemError

from tests.harness.builders import spec, spec_document
from tests.harness.files import records_in
from tests.harness.wait import scaled
from tests.unit.trainer.driver.scripted import attempt_in
from trainer.driver import main
from trainer.driver.attempt import (
    PAUSED,
    PAUSED_EARLY,
    Attempt,
    AttemptFailed,
    DriverContext,
    Outcome,
    Restart,
    run_with_restarts,
    warn,
)
from trainer.driver.cluster import Host, hosts_of, kill_workers, shortage
from trainer.driver.group_runner import GroupRunLoop
from trainer.driver.main import choose_layout, start_mirror
from trainer.failures import EndReason, Failure
from trainer.layout.choice import Choice
from trainer.layout.hosts import HostFacts, Site, site_of
from trainer.protocol.events import WorkersLost
from trainer.protocol.mirror import comes_from_service, goes_to_service
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir
from trainer.spec import validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import MAX_TEXT_CHARS
from trainer.spec.resolve import fill_statistics


def environment(run_dir: Path, **more: str) -> dict[str, str]:
    """What the service sets for the driver of an attempt."""
    given = {"JOB_ID": "job-1", "ATTEMPT_ID": "job-1-a0", "RUN_DIR": str(run_dir)} | more
    return {f"SHARDLOOM_{name}": text for name, text in given.items()}


@pytest.fixture
def context(tmp_path: Path) -> DriverContext:
    """A driver whose spec is empty."""
    context = DriverContext.from_env(environment(tmp_path, MAX_WORKER_FAILURES="2"))
    context.files.spec_path.parent.mkdir(parents=True)
    context.files.spec_path.write_text("{}")
    return context


@pytest.fixture
def attempt(context: DriverContext) -> Attempt:
    return Attempt(context, spec(), EventWriter(context.files.stream_path("driver")))


def test_a_bad_spec_ends_the_attempt_with_its_fields(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "check_versions", lambda: [])
    monkeypatch.setattr(main, "run_until_stopped", main.run_attempt)
    ended = main.end_attempt(context, EventWriter(context.files.stream_path("driver")))
    assert ended.reason == EndReason.BAD_SPEC
    assert "embedding_tables" in ended.message


def test_a_spec_of_a_newer_service_is_told_from_a_bad_one(context: DriverContext) -> None:
    document = spec().model_dump(mode="json") | {"fashion": None}
    document["training"]["dense_precision"] = "fp4"
    context.files.spec_path.write_text(json.dumps(document))
    with pytest.raises(AttemptFailed, match="wrote fashion") as raised:
        context.read_spec()
    assert raised.value.failure.reason == EndReason.VERSION_MISMATCH


def test_what_an_earlier_version_took_and_what_is_long_with_its_defaults_is_run(
    context: DriverContext,
) -> None:
    sizes = {"workers": 2000, "shard_group_size": 1}
    document = spec_document(parallelism=sizes | {"dense": "at_sync", "sync": {"overlap": True}})
    with pytest.raises(SpecError, match="overlap"):
        validate_spec(document)
    [table] = document["embedding_tables"]
    document["embedding_tables"] = [table, *(table | {"name": f"t{n}"} for n in range(3000))]
    stored = JobSpec.checked(document, {"stored": True})
    context.files.spec_path.write_text(stored.model_dump_json(indent=2))
    assert context.files.spec_path.stat().st_size > MAX_TEXT_CHARS
    assert context.read_spec() == stored


@pytest.mark.parametrize(
    ("status", "body", "goes_on"),
    [
        (200, {"is_current": False}, False),
        (200, {"is_current": True}, True),
        (404, {"title": "Not found"}, True),
        (503, None, True),
    ],
)
def test_a_driver_that_starts_after_its_attempt_has_ended_does_nothing(
    context: DriverContext,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: object,
    goes_on: bool,
) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(status, json=body)

    served = replace(context, service_url="http://service")
    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(DriverContext, "connect", lambda self, timeout_s: client)
    monkeypatch.setattr(main, "run_until_stopped", Mock(return_value=Failure("bad_spec", "ran")))
    feed = Mock()
    ended = main.end_attempt(served, EventWriter(context.files.stream_path("driver")), [feed])
    assert asked == ["/v1/attempts/job-1-a0/lease"]
    assert ended.reason == ("bad_spec" if goes_on else EndReason.CANCELLED)
    assert main.run_until_stopped.called is goes_on  # type: ignore[attr-defined]
    assert feed.start.called is goes_on, "the records of a job that has gone on are another's"


def test_sinks_hear_that_versions_are_unlike(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "check_versions", lambda: ["ray 2.1 is not 2.2"])
    feed = Mock()
    ended = main.end_attempt(context, EventWriter(context.files.stream_path("driver")), [feed])
    assert ended.reason == EndReason.VERSION_MISMATCH and feed.start.called


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), EndReason.STORAGE_ERROR),
        (TimeoutError("Ray does not answer"), EndReason.DRIVER_LOST),
        (RaySystemError("GCS does not answer"), EndReason.DRIVER_LOST),
        (KeyError("a fault of ours"), EndReason.TRAINING_ERROR),
    ],
)
def test_an_attempt_whose_run_storage_or_ray_fails_ends_so_that_another_follows(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(main, "check_versions", lambda: [])
    monkeypatch.setattr(main, "run_until_stopped", Mock(side_effect=error))
    ended = main.end_attempt(context, EventWriter(context.files.stream_path("driver")))
    assert ended.reason == reason
    assert str(error) in ended.message
    assert (str(context.run_dir) in ended.message) is (reason == EndReason.STORAGE_ERROR)
    assert ("head node of Ray" in ended.message) is (reason == EndReason.DRIVER_LOST)


def test_a_training_whose_checkpoints_the_driver_does_not_see_is_tried_again_with_the_reason(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = spec(checkpoint={"path": str(tmp_path / "mount")})
    context.files.resolved_spec_path.write_text(elsewhere.model_dump_json())
    monkeypatch.setattr(main, "check_versions", lambda: [])
    monkeypatch.setattr(main, "run_until_stopped", lambda *_: None)
    ended = main.end_attempt(context, EventWriter(context.files.stream_path("driver")))
    assert ended.reason == EndReason.STORAGE_ERROR
    assert f"{tmp_path.name}/checkpoints shows the driver's host no" in ended.message


@pytest.mark.parametrize("given", [{}, {"mean": 50.0, "std": 20.0}])
def test_numbers_are_scaled_as_in_the_first_attempt_unless_the_spec_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, float]
) -> None:
    user, age = spec_document()["features"]
    document = spec_document(features=[user, age | {"transform": "standardise"} | given])
    job, run = validate_spec(document), RunDir(tmp_path)
    measured = iter((49.0, 51.0, 53.0))

    def measure(unresolved: JobSpec, _: object) -> JobSpec:
        return fill_statistics(unresolved, {"age_mean": next(measured), "age_std": 18.0})

    monkeypatch.setattr(main, "resolve_inputs", measure)
    for _ in range(2):
        found = main.resolved(job, run, Mock()).features[1]
        assert (found.mean, found.std) == ((50.0, 20.0) if given else (49.0, 18.0))
    run.scales_path.write_text("{}{")
    assert main.resolved(job, run, Mock()).features[1].mean == (50.0 if given else 53.0)
    assert comes_from_service(run.scales_path.name, "job-1-a1")
    assert goes_to_service(run.scales_path.name, "job-1-a1")


@pytest.mark.parametrize("began", ["workers-0", "group-g0i0-0"])
def test_only_an_attempt_whose_workers_began_has_others_started_for_the_next_job(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch, began: str
) -> None:
    started: list[int] = []
    monkeypatch.setattr(main, "start_warm_workers", started.append)
    monkeypatch.setattr(main, "num_gpus", lambda: 0)
    monkeypatch.setattr(main, "read_hosts", lambda demand: [Host("10.0.0.1", 8, 0)])
    job = spec(parallelism={"workers": 4})
    context.files.resolved_spec_path.write_text(job.model_dump_json())
    for stream, expected in (("driver", []), ("coordinator-0", []), (began, [4])):
        warn(EventWriter(context.files.stream_path(stream)), "something is told")
        main.prepare_next_job(context)
        assert started == expected


def test_no_more_workers_are_started_for_the_next_job_than_the_cluster_has_room_for(
    context: DriverContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(main, "start_warm_workers", started.append)
    monkeypatch.setattr(main, "num_gpus", lambda: 0)
    hosts = [Host(address, 4, 0) for address in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(main, "read_hosts", lambda demand: hosts)
    job = spec(parallelism={"workers": {"min": 1, "max": 64}})
    context.files.resolved_spec_path.write_text(job.model_dump_json())
    warn(EventWriter(context.files.stream_path("workers-0")), "something is told")
    main.prepare_next_job(context)
    assert started == [8]


def test_a_run_of_the_groups_begins_with_the_size_that_the_run_before_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int | None] = []

    def run(loop: GroupRunLoop) -> None:
        sizes.append(loop.size)
        loop.size = 2

    monkeypatch.setattr(GroupRunLoop, "run", run)
    monkeypatch.setattr("trainer.driver.coordinator_actor.RayCoordinator", Mock())
    monkeypatch.setattr(main, "_set_unless_given", Mock())
    layout = {"workers": 3, "shard_group_size": 1, "placement": "inter_host"}
    run_once = main.runner_for(attempt_in(tmp_path, spec(parallelism=layout)))
    run_once(0)
    run_once(1)
    assert sizes == [None, 2]


def test_a_driver_may_have_as_many_connections_as_the_system_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray.cluster_resources", "ray.util.get_node_ip_address"):
        monkeypatch.setattr(name, dict)
    monkeypatch.setattr("trainer.driver.job_runner.HangMonitor", Mock())
    monkeypatch.setattr(main, "_set_unless_given", Mock())
    limits, thresholds = resource.getrlimit(resource.RLIMIT_NOFILE), gc.get_threshold()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        main.runner_for(attempt_in(tmp_path, spec()))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.set_threshold(*thresholds)


def run(attempt: Attempt, outcomes: list[Outcome]) -> tuple[Failure | None, list[int], list[float]]:
    """(how the attempt ended, index of each life, seconds waited between them)."""
    indices: list[int] = []
    waited: list[float] = []

    def live(run_index: int) -> Outcome:
        indices.append(run_index)
        return outcomes[run_index]

    return run_with_restarts(attempt, live, wait=waited.append, clock=lambda: 0.0), indices, waited


def test_workers_that_may_do_better_start_again_and_each_end_is_told(attempt: Attempt) -> None:
    lost = Failure(EndReason.HANG, "rank 3", blamed_host="10.0.0.3")
    ended, indices, _ = run(attempt, [lost, lost, None])
    assert ended is None
    assert indices == [0, 1, 2]
    first, second = records_in(attempt.context.files, WorkersLost)
    for index, event in enumerate((first, second)):
        assert (event.run_index, event.reason, event.will_restart) == (index, lost.reason, True)
    assert first.evidence == {"host": "10.0.0.3"}


def test_a_spent_budget_ends_the_attempt_with_the_last_failure(attempt: Attempt) -> None:
    lost = [Failure(EndReason.WORKERS_LOST, f"life {index}") for index in range(3)]
    ended, _, _ = run(attempt, list(lost))
    assert ended == lost[2]
    assert [e.will_restart for e in records_in(attempt.context.files, WorkersLost)] == [
        True,
        True,
        False,
    ]


def test_what_the_next_attempt_would_do_otherwise_ends_this_one(attempt: Attempt) -> None:
    context = replace(attempt.context, end_on=frozenset({EndReason.DEVICE_OOM}))
    short = Failure(EndReason.DEVICE_OOM, "rank 3")
    ended, indices, _ = run(replace(attempt, context=context), [short])
    assert (ended, indices) == (short, [0])
    assert [e.will_restart for e in records_in(attempt.context.files, WorkersLost)] == [False]


def test_a_pause_is_no_loss_and_is_followed_by_no_other_life(attempt: Attempt) -> None:
    ended, indices, _ = run(attempt, [PAUSED])
    assert (ended, indices) == (PAUSED, [0])
    assert not attempt.context.files.stream_path("driver").exists()


def test_on_the_service_s_own_machine_no_copy_of_its_folder_is_kept(tmp_path: Path) -> None:
    more = {"RUNS_SHARED": "false", "SERVICE_URL": "http://127.0.0.1:1", "ATTEMPT_TOKEN": "sla_x"}
    context = DriverContext.from_env(environment(tmp_path, **more))
    assert context.mirror is not None
    assert not context.mirror.is_of_service
    (tmp_path / "job.json").touch()
    assert start_mirror(context) is None


def test_hosts_to_avoid_and_reasons_to_end_on_come_by_the_environment(tmp_path: Path) -> None:
    plain = DriverContext.from_env(environment(tmp_path))
    assert (plain.end_on, plain.avoided_hosts) == (frozenset(), ())
    avoided = "10.0.0.7=1800000600 fe80::1=1800000700"
    more = {"END_ON": "device_oom host_oom", "AVOIDED_HOSTS": avoided}
    context = DriverContext.from_env(environment(tmp_path, **more))
    assert context.end_on == {"device_oom", "host_oom"}
    assert context.avoided_hosts == (("10.0.0.7", 1800000600.0), ("fe80::1", 1800000700.0))
    with pytest.raises(KeyError, match="SHARDLOOM_JOB_ID"):
        DriverContext.from_env({})


def test_lost_hosts_do_not_spend_the_budget_but_wait_longer_each_time(attempt: Attempt) -> None:
    host_lost = Failure(EndReason.HOST_LOST, "gone")
    paid = Failure(EndReason.WORKERS_LOST, "killed")
    ended, _, waited = run(attempt, [host_lost] * 6 + [paid, paid, None])
    assert ended is None
    assert waited[0] == 0.0
    assert waited == sorted(waited)


def test_a_restart_that_was_asked_for_is_no_failure_and_waits_for_nothing(attempt: Attempt) -> None:
    ended, indices, waited = run(attempt, [Restart()] * 5 + [None])
    assert ended is None
    assert indices == list(range(6))
    assert waited == []
    assert not attempt.context.files.stream_path("driver").exists()


def test_what_a_cluster_lacks_is_counted() -> None:
    assert shortage({"CPU": 1.0}, 4, {"CPU": 4.0}) is None
    message = shortage({"CPU": 2.0, "GPU": 1.0}, 16, {"CPU": 64.0, "GPU": 8.0})
    assert message is not None
    assert "16 GPU (the cluster has 8)" in message
    assert "CPU (" not in message


def test_only_live_nodes_are_hosts_and_they_know_what_is_taken() -> None:
    nodes = [
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": True, "Resources": {"CPU": 4.0}},
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 2.0}},
        {"NodeID": "x", "NodeManagerAddress": "10.0.0.3", "Alive": False, "Resources": {}},
    ]
    hosts = hosts_of(nodes, {"b": {"CPU": 1.0}, "a": {"CPU": 2.0}}, {"b": 0}, {"CPU": 1.0})
    assert [(h.address, h.num_slots, h.num_free, h.is_draining) for h in hosts] == [
        ("10.0.0.1", 2, 2, False),
        ("10.0.0.2", 4, 1, True),
    ]


def hosts(*num_cpus: int) -> list[HostFacts]:
    return [HostFacts(f"10.0.0.{i}", cpus, 0, 0) for i, cpus in enumerate(num_cpus)]


def needing(**parallelism: object) -> JobSpec:
    return spec(parallelism=parallelism, recovery={"start_grace_s": 3})


def choose(
    job: JobSpec, *looks: list[HostFacts], is_pausing: bool = False
) -> tuple[Choice | None, list[str]]:
    """(the choice, what was told), where each look at the cluster finds the next of `looks`."""
    told: list[str] = []
    left = list(looks)

    def look() -> Site:
        return site_of(job, left.pop(0) if len(left) > 1 else left[0])

    choice = choose_layout(job, look, told.append, lambda: is_pausing, wait=lambda _: None)
    return choice, told


SURVIVOR = needing(workers=4, shard_group_size=2, placement="auto", survive={"hosts": 1})


def test_a_layout_that_lacks_hosts_waits_for_them() -> None:
    choice, told = choose(SURVIVOR, hosts(8), hosts(8), hosts(8, 4))
    assert choice
    assert choice.layout.placement == "inter_host"
    assert (choice.num_hosts, choice.num_hosts_survived) == (2, 1)
    assert choose(SURVIVOR, hosts(4, 4)) == (choice, [])
    assert len(told) == 1
    assert "needs 2 hosts" in told[0]


def test_hosts_that_never_come_are_no_room_and_a_pause_does_not_wait_for_them() -> None:
    with pytest.raises(AttemptFailed) as caught:
        choose(SURVIVOR, hosts(8))
    assert caught.value.failure.reason == EndReason.NO_ROOM
    assert "add 1 host" in caught.value.failure.message
    with pytest.raises(AttemptFailed) as paused:
        choose(SURVIVOR, hosts(8), hosts(8, 4), is_pausing=True)
    assert paused.value.failure == PAUSED_EARLY


def test_a_layout_that_no_cluster_can_give_is_refused_at_once() -> None:
    sizes = {"workers": {"min": 1, "max": 4}, "shard_group_size": "auto", "survive": {"hosts": 1}}
    job = needing(**sizes)
    resources = job.resources.model_copy(update={"memory_bytes_per_worker": 100})
    with pytest.raises(AttemptFailed) as caught:
        choose(job.model_copy(update={"resources": resources}), hosts(4, 4))
    assert caught.value.failure.reason == EndReason.BAD_SPEC


def test_a_given_layout_is_not_refused_for_lack_of_room() -> None:
    job = spec(parallelism={"workers": 4, "shard_group_size": 2})
    assert choose(job, hosts(2)) == (None, [])


def test_a_worker_that_is_killed_logs_the_stacks_of_its_threads_whoever_holds_the_gil(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(path: Path) -> bytes:
        if path == Path("/proc/1/cmdline"):
            raise PermissionError("another user's, where /proc is mounted with hidepid=1")
        with path.open("rb") as file:
            return file.read()

    monkeypatch.setattr(Path, "read_bytes", read)
    # re backtracks in C for minutes, and lets no other thread run.
    hang = "import faulthandler, re; faulthandler.enable(); print(flush=True); re.match"
    code = f"{hang}('(a*)*b', 'a' * 40)"
    ray_worker, other = (
        subprocess.Popen([sys.executable, "-c", code, name], stdout=PIPE, stderr=PIPE)
        for name in ("ray::worker", "other")
    )
    try:
        for process in (ray_worker, other):
            assert process.stdout and process.stdout.readline()
        pids = [1, ray_worker.pid, other.pid, 2**22 + 1]
        kill_workers(pids, wait=lambda _: ray_worker.wait(scaled(30)))
        _, logged = ray_worker.communicate()
        assert other.poll() is None, "its number is another process's by now"
    finally:
        other.kill()
        other.communicate()
    assert b"most recent call first" in logged

"""What each live job says of itself to Prometheus, and what the loop adds to it."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from service.domain.ingest import apply_events
from service.domain.membership import apply_event
from service.domain.models import Attempt, EndReason, Job, JobStatus, Progress, QueueState
from service.observability.job_metrics import STALE_AFTER_S, shown_of
from service.observability.metrics import ServiceMetrics
from tests.harness.builders import (
    NOW,
    attempt_of,
    checkpoint,
    divergence,
    folded_membership,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    progress,
    queued_job,
    recovered,
    workers_started,
)
from tests.harness.service import House, run_once

_SURVIVE = {"workers": 6, "shard_group_size": 2, "survive": {"hosts": 1}}


def _running(**changes: object) -> Job:
    job = replace(queued_job(), status=JobStatus.RUNNING, started_at=NOW - 50)
    return replace(job, **{"current_attempt_id": f"{job.id}-a0", **changes})


def _grouped(*events: object) -> Job:
    job = replace(queued_job(parallelism=_SURVIVE), status=JobStatus.RUNNING, started_at=NOW)
    attempt = f"{job.id}-a0"
    told = (layout_chosen(), membership_changed(), *events)
    membership = folded_membership(*told, attempt_id=attempt)
    return replace(job, current_attempt_id=attempt, membership=membership)


def _telemetry(*jobs: Job, max_jobs: int = 1000, now: float = NOW) -> ServiceMetrics:
    telemetry = ServiceMetrics(lambda: now, max_jobs)
    telemetry.saw_live_jobs(jobs)
    return telemetry


def _read(telemetry: ServiceMetrics, job: Job, metric: str, **labels: str) -> float | None:
    owned = {"job_id": job.id, "project": job.project, **labels}
    return telemetry.registry.get_sample_value(f"shardloom_job_{metric}", owned)


# ---- one job


def test_a_running_job_tells_how_far_it_is_and_when_it_last_got_further() -> None:
    progress = Progress(
        step=40, total_steps=100, rows=9, rows_per_s=7.5, advanced_at=NOW - 5, checkpoint_at=NOW - 9
    )
    job, first = _running(progress=progress), _running()
    telemetry = _telemetry(job, first)
    assert _read(telemetry, job, "status", status="RUNNING") == 1
    assert _read(telemetry, job, "info", name="tiny", failure_domain="job") == 1
    told = {
        "steps": 40,
        "wanted_steps": 100,
        "rows": 9,
        "rows_per_second": 7.5,
        "advanced_timestamp_seconds": NOW - 5,
        "checkpoint_timestamp_seconds": NOW - 9,
        "workers": 4,
        "attempts": 1,
    }
    assert {name: _read(telemetry, job, name) for name in told} == told
    # One of an earlier version without a checkpoint counts from when it first ran.
    assert _read(telemetry, first, "checkpoint_timestamp_seconds") == NOW - 50
    telemetry.saw_live_jobs([])
    assert job.id.encode() not in telemetry.render()


def test_goodput_and_lost_time_are_told_and_nothing_is_late_at_rest() -> None:
    latest = {"goodput/share": 0.8, "goodput/lost_s/recovery": 12.0, "risk/steps_undurable": 30.0}
    progress = Progress(step=40, rows_per_s=7.5, advanced_at=NOW - 5)
    made_up = {f"goodput/lost_s/{cause}": math.inf if cause == 3 else 1.0 for cause in range(99)}
    job = _running(latest_metrics=latest | made_up, progress=progress)
    resting = replace(job, id="job-at-rest", status=JobStatus.PAUSED)
    telemetry = _telemetry(job, resting)
    assert _read(telemetry, job, "goodput_ratio") == 0.8
    assert _read(telemetry, job, "lost_seconds", cause="recovery") == 12
    assert _read(telemetry, job, "lost_seconds", cause="3") is None
    lines = f'shardloom_job_lost_seconds{{cause="[^"]*",job_id="{job.id}"'
    assert len(re.findall(lines, telemetry.render().decode())) == 19
    assert _read(telemetry, job, "undurable_steps") == 30
    for name in ("advanced_timestamp_seconds", "checkpoint_timestamp_seconds", "goodput_ratio"):
        assert _read(telemetry, resting, name) is None, name
    assert _read(telemetry, resting, "workers") == 0
    assert _read(telemetry, resting, "steps") == 40


def test_copies_and_groups_are_told_where_groups_are_failure_domains() -> None:
    whole, single = _grouped(), _running()
    lost = _grouped(
        group_lost(1), membership_changed(group_member(0), generation=2, time=NOW + 1), recovered()
    )
    telemetry = _telemetry(whole, single, lost)
    told = {
        "alive_copies": 1,
        "alive_host_copies": 1,
        "current_groups": 1,
        "wanted_groups": 3,
        "lost_groups": 1,
        "recoveries": 1,
        "recovery_pause_seconds": pytest.approx(0.31),
    }
    assert {name: _read(telemetry, lost, name) for name in told} == told
    copies = ("alive_host_copies", "needed_host_copies")
    assert [_read(telemetry, whole, name) for name in copies] == [3, 2]
    assert [_read(telemetry, single, name) for name in copies] == [None, None]


def test_divergences_count_from_0_in_each_attempt() -> None:
    job = _grouped()
    assert _read(_telemetry(job), job, "divergences") == 0
    diverged = replace(job, membership=apply_event(job.membership, f"{job.id}-a0", divergence()))
    assert _read(_telemetry(diverged), diverged, "divergences") == 1
    again = replace(diverged, current_attempt_id=f"{job.id}-a1")
    assert _read(_telemetry(again), again, "divergences") == 0


# ---- which jobs


def test_a_replica_that_has_not_looked_for_a_minute_shows_no_job() -> None:
    now, job = [NOW], _running()
    telemetry = ServiceMetrics(lambda: now[0])
    telemetry.saw_live_jobs([job])
    now[0] += STALE_AFTER_S
    assert _read(telemetry, job, "steps") == 0
    now[0] += 1
    assert _read(telemetry, job, "steps") is None


def test_too_many_jobs_are_counted_and_those_that_run_come_first() -> None:
    queued = [replace(queued_job(), created_at=NOW - 10 + num) for num in range(3)]
    running = _running(created_at=NOW)
    assert shown_of([*queued, running], 2) == [running, queued[0]]
    telemetry = _telemetry(*queued, running, max_jobs=2)
    assert _read(telemetry, running, "attempts") == 1
    assert _read(telemetry, queued[1], "attempts") is None
    assert telemetry.registry.get_sample_value("shardloom_hidden_jobs") == 2
    assert telemetry.registry.get_sample_value("shardloom_live_jobs", {"status": "QUEUED"}) == 3
    telemetry.saw_live_jobs(queued)
    assert _read(telemetry, running, "attempts") is None, "it has ended"


# ---- the queue


def _oldest(telemetry: ServiceMetrics, project: str = "default") -> float | None:
    name = "shardloom_queue_oldest_wait_seconds"
    return telemetry.registry.get_sample_value(name, {"project": project})


def test_the_longest_wait_is_told_by_project() -> None:
    old, young = (replace(queued_job(), created_at=NOW - wait_s) for wait_s in (90, 30))
    other = replace(queued_job(), project="ads", created_at=NOW - 5)
    telemetry = _telemetry(old, young, other, _running())
    assert _oldest(telemetry) == 90
    assert _oldest(telemetry, "ads") == 5


def test_a_retry_waits_from_when_it_may_start_not_from_when_the_job_first_waited() -> None:
    now = [NOW]
    telemetry = ServiceMetrics(lambda: now[0])
    note = QueueState(since=NOW + 20)
    job = replace(_running(), status=JobStatus.QUEUED, created_at=NOW - 9000, queue_note=note)
    telemetry.saw_live_jobs([job])
    assert _oldest(telemetry) == 0
    now[0] += 50
    telemetry.saw_live_jobs([job])
    assert _oldest(telemetry) == 30
    restarted = ServiceMetrics(lambda: now[0])
    restarted.saw_live_jobs([job])
    assert _oldest(restarted) == 30, "a service that was just started knows as much"
    telemetry.left_queue(job)
    assert telemetry.registry.get_sample_value("shardloom_queue_wait_seconds_sum") == 30
    started = replace(job, status=JobStatus.STARTING, current_attempt_id=f"{job.id}-a1")
    telemetry.saw_live_jobs([started])
    assert _oldest(telemetry) == 0


# ---- attempts, ends and the backend


def _count(telemetry: ServiceMetrics, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"shardloom_{name}_total", labels)


def test_an_attempt_is_counted_when_it_is_taken_and_when_it_ends() -> None:
    telemetry, made = ServiceMetrics(), attempt_of(queued_job())
    for reason in EndReason:
        assert _count(telemetry, "ended_attempts", reason=reason.value) == 0
    assert _count(telemetry, "ended_jobs", status="FAILED", reason="hang") == 0
    taken = replace(made, submitted_at=NOW)
    ended = replace(taken, end_reason=EndReason.HANG)
    stored: list[tuple[Attempt | None, Attempt | None]] = [
        (made, made),
        (made, taken),
        (taken, taken),
        (taken, ended),
        (ended, ended),
        (ended, None),
    ]
    for before, now in stored:
        telemetry.attempt_stored(before, now)
    assert _count(telemetry, "submitted_attempts") == 1
    assert _count(telemetry, "ended_attempts", reason="hang") == 1


def test_the_loop_tells_attempts_and_whether_the_backend_answers(house: House) -> None:
    reconciler = house.reconciler()
    telemetry = reconciler._telemetry
    job = house.submit("running", "failed", max_failures=0)
    run_once(reconciler)
    assert _count(telemetry, "submitted_attempts") == 1

    def told_at(name: str, cluster: str) -> float | None:
        name = f"shardloom_backend_{name}_timestamp_seconds"
        return telemetry.registry.get_sample_value(name, {"cluster": cluster})

    assert told_at("answered", "shared") and told_at("unanswered", "shared") == 0
    house.backend.set_down(True)
    run_once(reconciler)
    assert told_at("unanswered", "shared")
    assert told_at("answered", "own") == told_at("unanswered", "own") == 0
    house.backend.set_down(False)
    for _ in range(10):
        house.now += 30
        run_once(reconciler)
    assert house.status(job) is JobStatus.FAILED
    assert _count(telemetry, "ended_attempts", reason="driver_lost") == 1
    reconciler.close()


# ---- what is stored for it


def test_a_report_that_got_no_further_does_not_count_as_progress() -> None:
    job = _running(status=JobStatus.STARTING)
    attempt = attempt_of(job)
    began = apply_events(job, attempt, [workers_started()], NOW).job
    assert began.progress.advanced_at == NOW
    replaced = apply_events(began, attempt, [workers_started()], NOW + 5).job
    assert replaced.progress.advanced_at == NOW
    stepped = apply_events(began, attempt, [progress(5)], NOW + 10).job
    assert stepped.progress.advanced_at == NOW + 10
    idle = apply_events(stepped, attempt, [progress(5)], NOW + 20).job
    assert idle.progress.advanced_at == NOW + 10
    assert idle.progress.total_steps == 100


def test_a_commit_is_dated_by_the_services_clock_until_another_attempt_begins() -> None:
    job = _running()
    attempt = attempt_of(job)
    saved = apply_events(job, attempt, [checkpoint(5), progress(6)], NOW + 7).job
    assert saved.progress.checkpoint_at == NOW + 7
    again = apply_events(saved, attempt, [workers_started(), progress(6)], NOW + 30).job
    assert again.progress.checkpoint_at == NOW + 7
    # One that begins after a pause is not late with its checkpoint.
    resumed = replace(saved, status=JobStatus.STARTING)
    again = apply_events(resumed, attempt_of(resumed), [workers_started()], NOW + 10_000).job
    assert again.progress.checkpoint_at == NOW + 10_000

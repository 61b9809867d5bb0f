"""The reconciler on the scripted backend: crashes, cut-offs, lost races, records left behind."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from service.backends.fake import FakeBackend, Script
from service.domain import EndReason, Job, JobStatus
from service.job_errors import StaleVersion
from service.lifecycle import NOT_FOUND_GRACE_S
from service.reconciler import Reconciler
from service.requests import request_cancel
from service.store.sql import SqlJobStore
from service.telemetry import Telemetry
from tests.unit.service.builders import (
    attempt_ended,
    batch,
    metrics,
    workers_lost,
    workers_started,
)
from tests.unit.service.house import House
from trainer.spec import load_spec


def test_a_job_is_submitted_in_the_first_look_and_succeeds(house: House) -> None:
    job = house.submit("pending", "running", "succeeded")
    house.look()
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]
    house.look(3)
    assert house.status(job) is JobStatus.SUCCEEDED
    kinds = [line.kind for line in house.store.list_timeline(job.id)]
    assert kinds == ["job_submitted", "attempt_created", "attempt_submitted", "job_ended"]


def test_the_driver_gets_its_command_environment_and_spec(house: House) -> None:
    job = house.submit("running")
    house.look()
    record = house.backend.record(f"{job.id}-a0")
    assert record is not None
    assert record.entrypoint == "'/usr/bin/my python' -m trainer.driver"
    run_dir = Path(record.env["SHARDLOOM_RUN_DIR"])
    assert run_dir.is_absolute()
    assert record.env["SHARDLOOM_JOB_ID"] == job.id
    assert record.env["SHARDLOOM_SERVICE_URL"] == house.settings.service_url
    assert record.env["SHARDLOOM_MAX_WORKER_FAILURES"] == "3"
    spec_path = run_dir / "attempts" / f"{job.id}-a0" / "spec.json"
    assert load_spec(spec_path.read_text()) == job.spec


def test_reported_workers_make_the_job_run(house: House) -> None:
    job = house.submit("running")
    house.look()
    house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    house.look(3)
    assert house.status(job) is JobStatus.RUNNING


def test_a_cluster_cut_off_for_a_day_changes_nothing(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    job = house.submit("running")
    house.look()
    house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    house.look()
    before = house.store.get_job(job.id)
    house.backend.set_down(True)
    house.look(24, every_s=3600)
    told = replace(before, message="the fake cluster is down", version=before.version + 1)
    assert house.store.get_job(job.id) == told
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "backend fake: the fake cluster is down"
    ]
    house.backend.set_down(False)
    house.backend.play(job.id, Script(("succeeded",)))
    house.look()
    assert house.status(job) is JobStatus.SUCCEEDED
    assert len(house.store.list_attempts(job.id)) == 1


def test_a_job_submitted_while_the_cluster_is_away_starts_when_it_is_back(house: House) -> None:
    house.backend.set_down(True)
    job = house.submit("running", "succeeded")
    house.look(5, every_s=600)
    assert house.backend.attempt_ids() == []
    house.backend.set_down(False)
    house.look(3)
    assert house.status(job) is JobStatus.SUCCEEDED
    assert len(house.store.list_attempts(job.id)) == 1


def test_a_lost_answer_does_not_submit_twice(house: House) -> None:
    job = house.submit()
    script = Script(("running",), num_lost_answers=1, arrives_unanswered=True)
    house.backend.play(job.id, script)
    house.look(3)
    record = house.backend.record(f"{job.id}-a0")
    assert record is not None
    assert record.num_submits == 1
    assert house.store.get_attempt(f"{job.id}-a0").submitted_at is not None


def test_a_lost_submission_is_sent_again_under_the_same_id(house: House) -> None:
    job = house.submit()
    house.backend.play(job.id, Script(("running",), num_lost_answers=2))
    house.look(4)
    record = house.backend.record(f"{job.id}-a0")
    assert record is not None
    assert (record.num_submits, record.has_arrived) == (3, True)
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]


def test_a_crash_between_intent_and_submission_is_mended(house: House) -> None:
    job = house.submit("running")

    class Crash(BaseException):
        """The process dies here."""

    class CrashingBackend(FakeBackend):
        def submit(self, submission: object) -> None:
            raise Crash

    crashing = CrashingBackend(Path(house.backend.address))
    doomed = Reconciler(house.store, crashing, house.settings, Telemetry(), lambda: house.now)
    with pytest.raises(Crash):
        doomed.run_once()
    doomed.close()
    assert house.store.get_attempt(f"{job.id}-a0").submitted_at is None
    house.look()
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]
    assert house.store.get_attempt(f"{job.id}-a0").submitted_at is not None


def test_a_backend_that_asks_for_patience_costs_no_writes(house: House) -> None:
    job = house.submit("running")

    class PatientBackend(FakeBackend):
        def may_submit(self, attempt_id: str) -> bool:
            return False

    patient = PatientBackend(Path(house.backend.address))
    waiting = Reconciler(house.store, patient, house.settings, Telemetry(), lambda: house.now)
    waiting.run_once()
    before = house.store.get_job(job.id)
    waiting.run_once()
    waiting.close()
    assert house.store.get_job(job.id) == before
    assert house.store.get_attempt(f"{job.id}-a0").last_submit_at is None
    assert house.backend.attempt_ids() == []
    house.look()
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]


def test_a_restarted_reconciler_goes_on_with_the_same_attempt(house: House) -> None:
    job = house.submit("pending", "running", "running", "running", "succeeded")
    for _ in range(6):
        house.look()
    assert house.status(job) is JobStatus.SUCCEEDED
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]


def test_a_lost_driver_is_replaced_after_the_backoff(house: House) -> None:
    job = house.submit()
    house.backend.play(f"{job.id}-a0", Script(("running", "failed")))
    house.backend.play(f"{job.id}-a1", Script(("running", "succeeded")))
    house.look(3)
    assert house.status(job) is JobStatus.QUEUED
    house.look(4, every_s=3.0)
    assert house.status(job) is JobStatus.SUCCEEDED
    first, second = house.store.list_attempts(job.id)
    assert (first.end_reason, second.end_reason) == (EndReason.DRIVER_LOST, EndReason.COMPLETED)
    assert "fake driver of" in first.message
    record = house.backend.record(second.id)
    assert record is not None
    assert record.env["SHARDLOOM_MAX_WORKER_FAILURES"] == "2"


def test_a_job_that_keeps_dying_ends_when_its_budget_is_spent(house: House) -> None:
    job = house.submit("failed", max_failures=2)
    house.look(10, every_s=400)
    ended = house.store.get_job(job.id)
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert len(house.store.list_attempts(job.id)) == 3


def test_a_forgotten_submission_is_replaced_after_the_grace(house: House) -> None:
    job = house.submit("running", "not_found")
    house.look(4)
    assert len(house.store.list_attempts(job.id)) == 1
    house.look(3, every_s=NOT_FOUND_GRACE_S)
    assert len(house.store.list_attempts(job.id)) == 2


def test_a_refused_submission_fails_the_job_with_its_cause(house: House) -> None:
    job = house.submit()
    house.backend.play(job.id, Script(refusal="no such runtime_env"))
    house.look()
    ended = house.store.get_job(job.id)
    assert (ended.status, ended.message) == (JobStatus.FAILED, "no such runtime_env")


def test_run_storage_that_stays_away_fails_the_job_with_its_cause(house: House) -> None:
    job = house.submit()
    house.settings.runs_dir.write_text("a file where the folder should be")
    house.look()
    assert house.store.get_job(job.id).status is JobStatus.QUEUED
    house.look(2 * job.spec.retry.max_failures + 2, every_s=400.0)
    ended = house.store.get_job(job.id)
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert "SHARDLOOM_RUNS_DIR" in ended.message
    reasons = {attempt.end_reason for attempt in house.store.list_attempts(job.id)}
    assert reasons == {EndReason.STORAGE_ERROR}


def test_run_storage_that_comes_back_costs_the_job_nothing_but_time(house: House) -> None:
    job = house.submit()
    house.settings.runs_dir.write_text("a file where the folder should be")
    house.look()
    house.settings.runs_dir.unlink()
    house.look(2, every_s=400.0)
    assert house.store.get_job(job.id).status in (JobStatus.STARTING, JobStatus.RUNNING)


def test_records_left_in_the_outbox_are_taken_before_the_end_is_decided(house: House) -> None:
    job = house.submit("running", "failed")
    house.look()
    attempt_id = f"{job.id}-a0"
    losses = [metrics(step, train_loss=float(step)) for step in range(1200)]
    house.leave(job, *losses, stream="rank-0")
    house.leave(job, workers_lost(), attempt_ended("data_error"))
    house.store.append_events(attempt_id, batch(*losses[:10]), house.now)
    house.look(2)
    ended = house.store.get_job(job.id)
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.DATA_ERROR)
    assert ended.message == "done"
    assert house.store.stream_positions(attempt_id) == {"driver": 2, "rank-0": 1200}
    assert len(house.store.metric_points(job.id, "train/loss", max_points=5000)) == 1200


def test_a_damaged_record_keeps_the_numbers_and_a_torn_one_waits(house: House) -> None:
    job = house.submit("running", "succeeded")
    house.look()
    path = house.leave(job, workers_lost())
    with path.open("a") as file:
        file.write("garbage\n" + attempt_ended().model_dump_json() + "\n" + '{"kind": "no')
    house.look(2)
    assert house.store.stream_positions(f"{job.id}-a0") == {"driver": 3}
    messages = [line.message for line in house.store.list_timeline(job.id)]
    assert "an event record was damaged on storage" in messages


def test_cancel_stops_the_attempt_until_it_is_seen_stopped(house: House) -> None:
    job = house.submit("running")
    house.look()
    asked = request_cancel(house.store.get_job(job.id), house.now)
    house.store.update_job(asked.job, timeline=asked.timeline)
    house.backend.set_down(True)
    house.look(3)
    assert house.status(job) is JobStatus.STOPPING
    house.backend.set_down(False)
    house.look(2)
    assert house.status(job) is JobStatus.CANCELLED
    record = house.backend.record(f"{job.id}-a0")
    assert record is not None
    assert record.num_stops == 1


def test_a_write_that_lost_the_race_is_dropped_and_decided_anew(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.submit("running", "succeeded")
    house.look()
    write = SqlJobStore.update_job

    def cancel_first(store: SqlJobStore, read: Job, **changes: object) -> Job:
        monkeypatch.setattr(SqlJobStore, "update_job", write)
        write(store, replace(store.get_job(read.id), cancel_requested=True))
        with pytest.raises(StaleVersion):
            write(store, read, **changes)
        raise StaleVersion(read.id, read.version)

    monkeypatch.setattr(SqlJobStore, "update_job", cancel_first)
    house.look()
    assert house.store.get_job(job.id).cancel_requested
    house.look()
    assert house.status(job) is JobStatus.SUCCEEDED


def test_the_loop_runs_by_itself_and_is_woken_by_a_submission(house: House) -> None:
    house.settings = house.settings.model_copy(update={"reconcile_interval_s": 3600.0})
    looked_at = []

    class WatchedBackend(FakeBackend):
        def submit(self, submission: object) -> None:
            looked_at.append(submission)
            done.set()

    done = threading.Event()
    backend = WatchedBackend(Path(house.backend.address))
    reconciler = Reconciler(house.store, backend, house.settings, Telemetry())
    reconciler.start()
    house.submit()
    reconciler.wake()
    assert done.wait(10)
    reconciler.close()
    assert len(looked_at) == 1


def test_one_slow_job_does_not_stall_the_others(house: House) -> None:

    slow, quick = house.submit(), house.submit("running", "succeeded")
    release, ended = threading.Event(), threading.Event()

    class SlowBackend(FakeBackend):
        def observe(self, attempt_id: str) -> object:
            if attempt_id.startswith(slow.id):
                release.wait(10)
            observation = super().observe(attempt_id)
            if observation.state == "succeeded":
                ended.set()
            return observation

    settings = house.settings.model_copy(update={"reconcile_interval_s": 0.01})
    reconciler = Reconciler(
        house.store, SlowBackend(Path(house.backend.address)), settings, Telemetry()
    )
    reconciler.start()
    assert ended.wait(10)
    assert not release.is_set()
    release.set()
    reconciler.close()
    assert house.status(quick) is JobStatus.SUCCEEDED


def test_the_fake_outlives_its_service(house: House) -> None:
    job = house.submit("running")
    house.look()
    reopened = FakeBackend(Path(house.backend.address))
    assert reopened.attempt_ids() == [f"{job.id}-a0"]
    record = reopened.record(f"{job.id}-a0")
    assert record is not None
    assert json.loads(json.dumps(record.env))["SHARDLOOM_JOB_ID"] == job.id

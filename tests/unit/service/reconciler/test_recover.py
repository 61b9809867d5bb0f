"""Jobs found again from run storage: after the cluster forgot them, and after the store is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock

import pytest

from service.backends.fake import Script
from service.db.jobs import JobStore
from service.domain.models import EndReason, Job, JobStatus
from service.jobs import run_storage
from service.jobs.actions import cancel_job, restart_job
from service.jobs.run_storage import run_dir_of
from service.reconciler import outbox
from service.reconciler.outbox import OutboxCollector
from service.reconciler.recover import Recovery, recover_jobs
from tests.harness.builders import attempt_ended, checkpoint, metrics, workers_lost, workers_started
from tests.harness.service import House


@pytest.fixture
def empty(house: House, tmp_path: Path) -> Iterator[House]:
    """The same cluster and run storage, with a store that knows nothing."""
    store = JobStore.open(f"sqlite:///{tmp_path / 'new.db'}")
    yield replace(house, store=store)
    store.close()


def recover(house: House, *, believe_all: bool = False) -> Recovery:
    return recover_jobs(house.store, house.settings, lambda: house.now, believe_all=believe_all)


def trained(house: House, *observations: str) -> Job:
    """A job whose first attempt trains and has told so on run storage."""
    job = house.submit(*observations)
    house.poll()
    house.leave(job, workers_started(), metrics(10, train_loss=0.5), stream="workers-0")
    return job


def test_a_job_that_still_trains_is_found_again_and_not_disturbed(
    house: House, empty: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(house, "running")
    # Of any number of records: each portion has one.
    num_bytes = house.files(job).stream_path("workers-0").stat().st_size
    monkeypatch.setattr(outbox, "_PORTION_BYTES", num_bytes - 1)
    found = recover(empty)
    assert found.recovered == [job.id]
    empty.poll(3)
    again = empty.store.get_job(job.id)
    assert (again.status, again.spec) == (JobStatus.RUNNING, job.spec)
    assert again.queued_at == job.waits_since
    assert empty.store.metric_names(job.id) == ["train/loss"]
    assert len(empty.store.list_attempts(job.id)) == 1
    record = empty.record(job)
    assert (record.num_submits, record.num_stops) == (1, 0)


def test_a_hostile_job_keeps_no_other_from_being_found(house: House, empty: House) -> None:
    hostile, job = trained(house, "running"), trained(house, "running")
    root = run_dir_of(house.settings, hostile.id).root
    for name in ("007", "9" * 30):
        (root / "attempts" / f"{hostile.id}-a{name}").mkdir()
        (root / "attempts" / f"{hostile.id}-a{name}" / "spec.json").write_text("{}")
    document = json.loads((root / "job.json").read_text())
    for forged in ({"created_at": float("nan")}, {"queued_at": 1e300}, {"project": "theirs"}, {}):
        (root / "job.json").write_text(json.dumps({**document, **forged}))
        found = recover(empty, believe_all=True)
        assert job.id in (*found.recovered, *found.known)
    assert hostile.id in found.known
    assert empty.store.get_job(hostile.id).project == "default"
    assert len(empty.store.list_attempts(hostile.id)) == 1


def test_what_has_ended_ends_as_its_driver_said(house: House, empty: House) -> None:
    job = trained(house, "succeeded")
    house.leave(job, checkpoint(10), attempt_ended("completed"))
    recover(empty)
    empty.poll()
    assert empty.status(job) is JobStatus.SUCCEEDED
    assert [each.step for each in empty.store.list_checkpoints(job.id)] == [10]


def test_earlier_attempts_come_back_with_their_ends(house: House, empty: House) -> None:
    job = trained(house)
    house.backend.play(f"{job.id}-a0", Script(("failed",)))
    told = attempt_ended("host_lost").model_copy(update={"time": house.now + 3600})
    house.leave(job, workers_lost(), told)
    house.poll(4, every_s=5)
    assert house.store.get_job(job.id).num_attempts == 2
    empty.now += 10_000
    recover(empty)
    first, second = empty.store.list_attempts(job.id)
    assert (first.end_reason, second.end_reason) == (EndReason.HOST_LOST, None)
    assert first.ended_at == told.time, "its workers told nothing for the last hour"
    empty.poll()
    assert len(empty.backend.attempt_ids()) == 2


# ---- jobs that had ended


def recovered(empty: House, job: Job) -> Job:
    """The job after a recovery and some looks of the reconciler."""
    assert recover(empty).recovered == [job.id]
    empty.poll(4, every_s=400)
    return empty.store.get_job(job.id)


def test_a_job_that_was_cancelled_while_it_waited_stays_cancelled(
    house: House, empty: House
) -> None:
    job = trained(house, "failed")
    house.leave(job, attempt_ended("host_lost"))
    house.poll()
    assert house.status(job) is JobStatus.QUEUED
    cancel_job(house.store, house.settings, job.id)
    before, after = house.store.get_job(job.id), recovered(empty, job)
    assert (after.status, after.reason) == (JobStatus.CANCELLED, EndReason.CANCELLED)
    assert (after.message, after.ended_at) == (before.message, before.ended_at)
    assert empty.backend.attempt_ids() == [f"{job.id}-a0"]
    assert empty.store.list_timeline(job.id)[-1].kind == "job_ended"


def test_an_attempt_whose_driver_said_nothing_ends_as_its_job(house: House, empty: House) -> None:
    job = trained(house, "running")
    cancel_job(house.store, house.settings, job.id)
    house.poll(4)
    before, after = house.store.list_attempts(job.id), recovered(empty, job)
    assert after.status is JobStatus.CANCELLED
    (attempt,) = empty.store.list_attempts(job.id)
    assert (attempt.end_reason, attempt.ended_at) == (EndReason.CANCELLED, before[0].ended_at)


def test_a_job_that_was_paused_stays_so(house: House, empty: House) -> None:
    job = trained(house, "failed")
    document = json.loads(run_dir_of(house.settings, job.id).job_path.read_text())
    assert (document["id"], document["spec"]["name"]) == (job.id, job.name)
    house.leave(job, attempt_ended("paused"))
    house.store.update_job(replace(house.store.get_job(job.id), pause_requested=True))
    house.poll()
    assert house.status(job) is recovered(empty, job).status is JobStatus.PAUSED
    assert len(empty.backend.attempt_ids()) == 1


def test_a_job_that_failed_is_not_tried_again(house: House, empty: House) -> None:
    job = trained(house, "failed")
    house.leave(job, checkpoint(10), attempt_ended("training_error"))
    house.poll(2)
    before = house.store.get_job(job.id)
    assert before.status.is_terminal
    house.backend.play(f"{job.id}-a0", Script(("not_found",)))
    after = recovered(empty, job)
    told = attrgetter("status", "reason", "message", "num_failures")
    assert told(after) == told(before)
    assert [each.end_reason for each in empty.store.list_attempts(job.id)] == [before.reason]
    assert [each.step for each in empty.store.list_checkpoints(job.id)] == [10]


def test_a_job_that_was_restarted_after_its_end_lives_again(house: House, empty: House) -> None:
    job = trained(house, "failed")
    house.leave(job, checkpoint(10), attempt_ended("training_error"))
    house.poll(2)
    document = run_dir_of(house.settings, job.id).job_path
    assert json.loads(document.read_text())["ended"]["reason"] == "training_error"
    restart_job(house.store, house.settings, job.id)
    assert json.loads(document.read_text())["ended"] is None
    house.backend.play(f"{job.id}-a1", Script(("running",)))
    house.poll(2)
    after = recovered(empty, job)
    assert (after.status.is_terminal, after.current_attempt_id) == (False, f"{job.id}-a1")


def test_a_job_ends_whether_or_not_its_folder_can_be_told(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = trained(house, "succeeded")
    house.leave(job, attempt_ended("completed"))

    failing = Mock(side_effect=OSError("storage is full"))
    monkeypatch.setattr(run_storage, "replace_untrusted", failing)
    house.poll()
    assert house.status(job) is JobStatus.SUCCEEDED
    assert "storage is full" in caplog.text


# ---- recoveries that are cut off, and folders that cannot be used


def test_a_recovery_that_is_cut_off_is_taken_up_again(
    house: House, empty: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(house, "running")

    with monkeypatch.context() as broken:
        broken.setattr(OutboxCollector, "collect", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            recover(empty)
    empty.poll(3)
    assert len(empty.backend.attempt_ids()) == 1
    assert recover(empty).recovered == [job.id]
    empty.poll()
    assert empty.status(job) is JobStatus.RUNNING
    assert empty.store.metric_names(job.id) == ["train/loss"]


def test_every_field_of_a_job_is_on_run_storage_or_known_to_come_from_elsewhere(
    house: House,
) -> None:
    job = replace(trained(house, "running"), status=JobStatus.CANCELLED)
    run_storage.write_job(job, house.settings)
    document = json.loads(run_dir_of(house.settings, job.id).job_path.read_text())
    kept = {*document, *document["ended"]}
    of_the_spec = {"name", "project", "priority"}
    of_records = {"started_at", "current_attempt_id", "progress", "latest_metrics", "membership"}
    lost = {"version", "cancel_requested", "pause_requested", "retry_at", "resume_from"}
    lost |= {"queue_note"}
    others = {field.name for field in fields(Job)} - kept
    message = "write a new field in run_storage._content_of and read it in recover._job_of"
    assert others == of_the_spec | of_records | lost, message


def test_known_jobs_are_left_and_damaged_folders_are_told(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(house, "running")
    document = json.loads(run_dir_of(house.settings, job.id).job_path.read_text())
    damaged = {
        "job-0000000000zz": "{",
        "job-000000000000": "[" * 100_000,
        "job-000000000001": json.dumps(
            document | {"id": "job-000000000001", "created_at": 10**400}
        ),
    }
    for name, text in damaged.items():
        folder = house.settings.runs_dir / name
        folder.mkdir()
        (folder / "job.json").write_text(text)
    before = house.store.get_job(job.id)
    found = recover(house, believe_all=True)
    assert (found.recovered, found.known) == ([], [job.id])
    assert found.refused.keys() == damaged.keys()
    assert house.store.get_job(job.id) == before
    monkeypatch.setattr("service.db.rows._spec_of", Mock(side_effect=ValueError("of tomorrow")))
    assert recover(house).refused.keys() == {*damaged, job.id}


def test_a_document_that_a_job_changed_is_left_alone_unless_all_are_believed(
    house: House, empty: House
) -> None:
    job = trained(house, "running")
    path = run_dir_of(house.settings, job.id).job_path
    document = json.loads(path.read_text())
    document["spec"]["project"] = "theirs"
    path.write_text(json.dumps(document))
    assert "seal" in recover(empty).refused[job.id]
    path.write_text(json.dumps({key: document[key] for key in document if key != "seal"}))
    assert recover(empty).recovered == []
    assert recover(empty, believe_all=True).recovered == [job.id]

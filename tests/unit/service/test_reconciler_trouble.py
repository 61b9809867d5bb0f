"""What goes wrong with one job, or comes too late for it, holds up no other and ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.backends.fake import FakeBackend, Script
from service.domain import Attempt, EndReason, Job, JobStatus, Observation
from service.job_changes import pause_job, resume_job
from service.outbox import PATIENCE_S
from service.reconciler import Reconciler
from service.submission import run_dir_of
from tests.unit.service.builders import metrics
from tests.unit.service.house import House


def unreadable_stream(house: House, job: Job) -> Path:
    """A stream of the first attempt that cannot be read, whoever tries."""
    path = run_dir_of(house.settings, job.id).attempt(f"{job.id}-a0").stream_path("workers-9")
    path.mkdir(parents=True)
    return path


def attempts(house: House, job: Job) -> list[Attempt]:
    return house.store.list_attempts(job.id)


@pytest.mark.parametrize("grace", [0.0, 600.0])
def test_a_pause_that_is_taken_back_after_the_stop_ends_no_job(house: House, grace: float) -> None:
    house.settings = house.settings.model_copy(update={"pause_grace_s": grace})
    job = house.submit("pending")
    house.look(2)
    pause_job(house.store, house.settings, job.id)
    house.look()
    record = house.backend.record(f"{job.id}-a0")
    assert record is not None and record.num_stops == 1
    resume_job(house.store, house.settings, job.id)
    house.backend.play(f"{job.id}-a0", Script(("stopped",)))
    house.look(3)
    first, second = attempts(house, job)
    assert first.end_reason is EndReason.PAUSED
    assert second.end_reason is None
    assert house.status(job) is JobStatus.STARTING


def test_an_attempt_that_somebody_stops_on_the_cluster_still_ends_its_job(house: House) -> None:
    job = house.submit("running", "stopped")
    house.look(4)
    assert house.status(job) is JobStatus.CANCELLED


def test_a_pause_that_is_taken_back_during_a_look_leaves_no_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.submit("running")
    house.look(2)
    pause_job(house.store, house.settings, job.id)
    house.look()
    resume_job(house.store, house.settings, job.id)
    pause_job(house.store, house.settings, job.id)
    observe = FakeBackend.observe

    def resume_first(backend: FakeBackend, attempt_id: str) -> Observation:
        resume_job(house.store, house.settings, job.id)
        return observe(backend, attempt_id)

    monkeypatch.setattr(FakeBackend, "observe", resume_first)
    house.look()
    attempt = run_dir_of(house.settings, job.id).attempt(f"{job.id}-a0")
    assert not attempt.pause_request_path.exists()


def test_files_that_cannot_be_read_hold_up_their_own_job_only_and_not_for_ever(
    house: House,
) -> None:
    job = house.submit("running", "failed")
    house.look()
    house.leave(job, metrics(1, train_loss=0.5), stream="workers-0")
    unreadable_stream(house, job)
    reconciler = house.reconciler()
    try:
        with pytest.raises(OSError):
            look_until_raised(reconciler, job)
        assert house.store.metric_names(job.id) == ["train/loss"], "the other stream was taken"
        house.now += PATIENCE_S
        reconciler.reconcile(job.id)
    finally:
        reconciler.close()
    assert attempts(house, job)[0].end_reason is EndReason.DRIVER_LOST


def look_until_raised(reconciler: Reconciler, job: Job) -> None:
    """Look until the end of the attempt is seen."""
    for _ in range(3):
        reconciler.reconcile(job.id)


def test_a_job_whose_files_cannot_be_read_does_not_stop_the_queue(house: House) -> None:
    broken = house.submit("failed")
    house.look(2)
    assert house.status(broken) is JobStatus.QUEUED
    house.now += 3600  # its next attempt is due
    unreadable_stream(house, broken)
    other = house.submit("running")
    house.look()
    assert house.status(broken) is JobStatus.QUEUED
    assert house.status(other) is JobStatus.STARTING


def test_an_empty_cluster_starts_nothing(house: House) -> None:
    house.backend.set_hosts()
    job = house.submit("running")
    house.look(3)
    assert house.status(job) is JobStatus.QUEUED

"""The reconciler when things go wrong: storage, late records, lost answers, rewinds."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from service.backends.fake import Script
from service.db.jobs import JobStore
from service.domain.lifecycle import LATE_RECORDS_S, NOT_FOUND_GRACE_S, request_cancel
from service.domain.models import EndReason, Job, JobStatus
from service.errors import JobUnreadable, StaleVersion, StoreUnavailable
from service.jobs.actions import cancel_job, restart_job
from service.jobs.run_storage import run_dir_of
from service.observability.metrics import ServiceMetrics
from service.reconciler import loop, outbox
from service.reconciler.loop import Reconciler
from tests.harness.builders import attempt_ended, batch, checkpoint, metrics, workers_lost
from tests.harness.service import House
from tests.harness.wait import scaled
from trainer.protocol.events import CheckpointCommitted, Metrics, read_record


def _spoil_spec(house: House, job_id: str) -> None:
    """Let the stored spec have a field that only a later version knows."""
    with sqlite3.connect(house.settings.home / "shardloom.db") as database:
        (text,) = database.execute("select spec from jobs where id = ?", (job_id,)).fetchone()
        spec = json.dumps({**json.loads(text), "field_of_tomorrow": 1})
        database.execute("update jobs set spec = ? where id = ?", (spec, job_id))
    database.close()


def test_a_job_that_cannot_be_read_does_not_stall_the_others(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt, good = house.submit("running"), house.submit("running", "succeeded")
    _spoil_spec(house, spoilt.id)
    house.poll(4)
    assert house.status(good) is JobStatus.SUCCEEDED
    assert [job.id for job in house.store.list_jobs()[0]] == [good.id]
    with pytest.raises(JobUnreadable, match="field_of_tomorrow"):
        house.store.get_job(spoilt.id)
    told = [record for record in caplog.records if spoilt.id in record.getMessage()]
    assert len(told) == 1


def test_the_loop_survives_whatever_a_look_raises(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim_live_jobs = JobStore.claim_live_jobs
    errors = [RuntimeError("a bug"), StoreUnavailable("a lock")]
    looked = threading.Event()

    def fail_twice(store: JobStore, *args: Any, **kwargs: Any) -> object:
        if errors:
            raise errors.pop()
        looked.set()
        return claim_live_jobs(store, *args, **kwargs)

    monkeypatch.setattr(JobStore, "claim_live_jobs", fail_twice)
    reconciler = house.reconciler(reconcile_interval_s=0.01)
    assert not reconciler.has_died
    reconciler.start()
    assert looked.wait(scaled(10))
    assert not reconciler.has_died
    reconciler.close()
    assert not reconciler.has_died
    logged = [record for record in caplog.records if "cannot reconcile the jobs" in record.message]
    assert [bool(record.exc_info) for record in logged] == [False, True]


def test_a_loop_that_ended_by_itself_has_died(house: House) -> None:
    class ShortLived(Reconciler):
        def _loop(self) -> None:
            return

    reconciler = ShortLived(house.store, house.backend, house.settings, ServiceMetrics())
    reconciler.start()
    reconciler._thread.join(scaled(10))
    assert reconciler.has_died
    reconciler.close()


def test_every_thread_has_a_connection_and_one_too_many_is_told(house: House) -> None:
    num_api_threads, num_dashboard_threads = 40, 32
    pool = house.store.engine.pool
    num_users = num_api_threads + num_dashboard_threads + loop.NUM_THREADS + 1
    assert pool.size() + pool._max_overflow >= num_users
    pool._timeout, pool._max_overflow = 0.01, 0
    held = [house.store.engine.connect() for _ in range(pool.size())]
    with pytest.raises(StoreUnavailable, match="QueuePool limit"):
        house.store.list_live_jobs()
    for connection in held:
        connection.close()


def test_records_written_after_the_end_was_seen_are_taken_before_the_next_attempt(
    house: House,
) -> None:
    job = house.submit("running", "failed")
    house.poll()
    house.leave(job, checkpoint(10), stream="workers-0")
    house.poll(2)
    assert house.status(job) is JobStatus.QUEUED
    house.leave(job, checkpoint(10), checkpoint(20), stream="workers-0")
    house.poll(every_s=60)
    house.poll()
    assert len(house.store.list_attempts(job.id)) == 2
    assert [found.step for found in house.store.list_checkpoints(job.id)] == [10, 20]


def test_a_record_that_cannot_be_stored_does_not_keep_a_job_from_ending(house: House) -> None:
    job = house.submit("running", "succeeded")
    house.poll()
    unstorable = metrics(0, train_loss=1.0).model_copy(update={"step": _HUGE_STEP})
    records = [metrics(1, train_loss=1.0), unstorable, metrics(2, train_loss=1.0), attempt_ended()]
    path = house.leave(job)
    path.write_text("".join(record.model_dump_json() + "\n" for record in records))
    with pytest.MonkeyPatch.context() as patch:
        # A validator lets through what the database refuses.
        patch.setattr("service.reconciler.outbox.read_record", _read_as_it_is)
        house.poll(2)
    assert house.status(job) is JobStatus.SUCCEEDED
    assert house.store.stream_positions(f"{job.id}-a0") == {"driver": 4}
    steps = [point.step for point in house.store.metric_points(job.id, "train/loss")]
    assert steps == [1, 2]


def test_of_a_record_with_metrics_whose_names_may_be_markup_the_others_are_kept(
    house: House,
) -> None:
    job = house.submit("running", "succeeded")
    house.poll()
    kept = {"train/größe": 2.0}
    bad = dict.fromkeys(('a" b="', "a'", "<a>", "a&b", "a\\", "a\n", "\x9f", ""), 1.0)
    made = metrics(1).model_copy(update={"values": bad | kept})
    saved = checkpoint(1).model_copy(update={"metrics": bad | kept})
    house.leave(job, made, saved, attempt_ended())
    house.poll(2)
    assert house.status(job) is JobStatus.SUCCEEDED
    assert house.store.metric_names(job.id) == ["train/größe"]
    assert not bad.keys() & house.store.get_job(job.id).latest_metrics.keys()
    [stored] = house.store.list_checkpoints(job.id)
    assert stored.metrics == kept


_HUGE_STEP = 2**70


def _read_as_it_is(line: bytes, now: float) -> object:
    """Reads a record as it is, a step that no column holds included."""
    fields = json.loads(line)
    if fields.get("step") == _HUGE_STEP:
        return Metrics.model_construct(**fields)
    return read_record(line, now)


def test_streams_are_taken_in_the_order_of_their_numbers(house: House) -> None:
    job = house.submit("running", "succeeded")
    house.poll()
    for number in (10, 2):
        house.leave(job, workers_lost(run_index=number), stream=f"workers-{number}")
    house.poll(2)
    lost = [line for line in house.store.list_timeline(job.id) if line.kind == "workers_lost"]
    assert [line.data["run_index"] for line in lost] == [2, 10]


def test_a_cancelled_job_stops_a_submission_that_arrives_late(house: House) -> None:
    job = house.submit()
    house.backend.play(job.id, Script(("running",), num_lost_answers=1000))
    house.poll(5, every_s=NOT_FOUND_GRACE_S)
    asked = request_cancel(house.store.get_job(job.id), house.now)
    house.store.update_job(asked.job, timeline=asked.timeline)
    house.now -= NOT_FOUND_GRACE_S - 1
    house.poll()
    assert house.status(job) is JobStatus.STOPPING
    # The submission arrives now.
    path = Path(house.backend.address) / "attempts" / f"{job.id}-a0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "has_arrived": True}))
    house.poll(2)
    record = house.record(job)
    assert record.num_stops > 0
    assert house.status(job) is JobStatus.CANCELLED


# ---- a rewind is applied once


def _restarted(house: House) -> Job:
    """A job that failed after steps 100 and 200 and shall go on from the first."""
    job = house.submit("failed")
    house.poll()
    house.leave(job, _saved(job, 100, 0), _saved(job, 200, 0), attempt_ended("training_error"))
    house.poll(2)
    restart_job(house.store, house.settings, job.id, step=100)
    return job


def _saved(job: Job, step: int, index: int) -> CheckpointCommitted:
    path = f"checkpoints/step-{step:08d}-a{index}-r0"
    return checkpoint(step).model_copy(update={"path": path})


def _rewind_of(house: House, job: Job) -> dict[str, object]:
    document = json.loads(run_dir_of(house.settings, job.id).rewind_path.read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("states", [("failed",), ("running", "failed"), ("not_found",)])
@pytest.mark.parametrize("is_told", [True, False])
def test_an_attempt_that_went_back_unanswered_is_followed_and_not_repeated(
    house: House, states: tuple[str, ...], is_told: bool
) -> None:
    job = _restarted(house)
    again = f"{job.id}-a1"
    house.backend.play(again, Script(states, num_lost_answers=1, arrives_unanswered=True))
    house.backend.play(f"{job.id}-a2", Script(("running",)))
    house.poll()
    asked = house.store.get_job(job.id)
    assert (asked.current_attempt_id, asked.resume_from is None) == (again, False)
    if is_told:
        path = run_dir_of(house.settings, job.id).attempt(again).stream_path("workers-0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_saved(job, 900, 1).model_dump_json() + "\n")
    house.poll(6, every_s=NOT_FOUND_GRACE_S)
    assert _rewind_of(house, job)["attempt_index"] == 1
    assert house.store.get_job(job.id).resume_from is None


def test_a_decision_without_the_record_that_ends_a_rewind_is_stale(house: House) -> None:
    job = _restarted(house)
    again = f"{job.id}-a1"
    house.backend.play(again, Script(num_lost_answers=1, arrives_unanswered=True))
    house.poll()
    before = house.store.get_job(job.id)
    house.store.append_events(again, batch(_saved(job, 900, 1)), house.now)
    assert house.store.get_job(job.id).resume_from is None
    with pytest.raises(StaleVersion):
        house.store.update_job(replace(before, message="decided without it"))


def test_an_attempt_that_never_was_leaves_the_rewind_to_the_next(house: House) -> None:
    job = _restarted(house)
    house.backend.play(f"{job.id}-a1", Script(refusal="no such environment"))
    house.poll()
    ended = house.store.get_attempt(f"{job.id}-a1")
    assert ended.end_reason is EndReason.SUBMISSION_REFUSED
    refused = house.store.get_job(job.id)
    assert (refused.status, refused.message) == (JobStatus.FAILED, "no such environment")
    assert refused.resume_from is not None


def test_a_large_outbox_is_stored_in_portions_for_which_what_is_stored_does_not_count(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.submit("running", "failed", max_failures=0)
    house.poll(2)
    saved = [checkpoint(step) for step in range(20)]
    num_bytes = house.leave(job, *saved[:10], stream="workers-0").stat().st_size
    monkeypatch.setattr(outbox, "_PORTION_BYTES", num_bytes * 2 // 3)
    monkeypatch.setattr(outbox, "_PIECE_BYTES", 100)
    for num_stored in (6, 10):
        assert not house.status(job).is_terminal, "the newest metrics of a job may be in the last"
        house.poll()
        assert len(house.store.list_checkpoints(job.id)) == num_stored
    assert house.status(job) is JobStatus.FAILED
    house.leave(job, *saved[10:], stream="workers-1")
    house.now += LATE_RECORDS_S
    for num_stored in (16, 20):
        house.poll(every_s=10.0)
        assert len(house.store.list_checkpoints(job.id)) == num_stored
    assert house.store.attempts_to_collect(house.now) == []


def test_a_cancelled_job_ends_before_a_large_outbox_is_stored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.submit("running")
    house.poll()
    monkeypatch.setattr(outbox, "_PORTION_BYTES", 1000)
    monkeypatch.setattr(outbox, "_PIECE_BYTES", 100)
    house.leave(job, *map(checkpoint, range(20)), stream="workers-0")
    cancel_job(house.store, house.settings, job.id)
    house.poll(2)
    assert house.status(job) is JobStatus.CANCELLED
    assert len(house.store.list_checkpoints(job.id)) < 20


def test_late_records_are_asked_for_once_while_storage_hangs(house: House) -> None:
    job = house.submit("running", "failed", max_failures=0)
    house.poll(3)
    house.now += LATE_RECORDS_S
    release, asked = threading.Event(), []

    def hang(*attempt: object) -> None:
        asked.append(attempt)
        release.wait(scaled(60))

    reconciler = house.reconciler()
    reconciler._outboxes.collect_late = hang
    for _ in range(2):
        reconciler._dispatch()
    reconciler._pools["shared"].submit(int).result()  # What was submitted before has begun.
    release.set()
    reconciler.close()
    assert asked == [(job.id, 0)]


def test_an_outbox_without_an_end_of_a_line_or_of_what_is_stored_holds_nobody_up(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = house.submit("running", "failed", max_failures=0)
    house.poll()
    house.store.append_events(f"{job.id}-a0", batch(checkpoint(1), stream="workers-0"), house.now)
    os.truncate(house.leave(job, stream="workers-0"), 1 << 40)
    monkeypatch.setattr(outbox, "PATIENCE_S", 0.0)
    monkeypatch.setattr(outbox, "_MAX_PIECES", 4)
    house.poll(2)
    assert house.status(job) is JobStatus.FAILED
    assert "the stream is too long" in caplog.text
    house.now += LATE_RECORDS_S
    os.truncate(house.leave(job), 1 << 40)
    monkeypatch.setattr(outbox, "_PORTION_BYTES", 1 << 24)
    house.poll()
    assert "behind an endless line" in caplog.text
    assert house.store.attempts_to_collect(house.now + 3600) == []


def test_late_records_are_collected_again_after_a_failure_or_a_restart(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = house.submit("running", "failed", max_failures=0)
    house.poll(3)
    assert house.status(job) is JobStatus.FAILED
    house.leave(job, checkpoint(20), stream="workers-0")
    house.now += LATE_RECORDS_S
    with monkeypatch.context() as broken:
        broken.setattr(outbox, "open_untrusted", Mock(side_effect=OSError("storage is away")))
        with pytest.raises(OSError, match="storage is away"):
            house.poll()
    assert house.store.attempts_to_collect(house.now) == []
    house.now += 60.0

    def receive_more(*_: object) -> None:
        house.leave(job, checkpoint(20), checkpoint(30), stream="workers-0")
        house.store.set_collection(f"{job.id}-a0", house.now + 5.0)

    with monkeypatch.context() as receiving:
        receiving.setattr(outbox, "remove_token", receive_more)
        house.poll(2, every_s=5.0)
    house.poll()
    assert [found.step for found in house.store.list_checkpoints(job.id)] == [20, 30]
    assert house.store.attempts_to_collect(house.now + 3600) == []

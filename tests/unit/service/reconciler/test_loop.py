"""The reconciler on the scripted backend: crashes, cut-offs, lost races, records left behind."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from sqlalchemy import text

from service import storage
from service.backends.fake import FakeBackend, Script
from service.db.jobs import JobStore
from service.domain.lifecycle import LATE_RECORDS_S, request_cancel
from service.domain.models import Attempt, EndReason, Job, JobStatus, Observation, ObservedState
from service.errors import BackendUnreachable, StoreUnavailable
from service.jobs.actions import cancel_job, pause_job, resume_job
from service.jobs.run_storage import run_dir_of
from service.reconciler import housekeeping, loop, outbox
from service.reconciler.loop import _ComputeSlot
from service.reconciler.outbox import PATIENCE_S
from service.settings import Settings
from service.storage import in_time
from tests.harness.builders import (
    attempt_ended,
    batch,
    metrics,
    queued_job,
    workers_lost,
    workers_started,
)
from tests.harness.databases import store_attempt
from tests.harness.service import House
from tests.harness.wait import scaled, wait_for
from trainer.protocol.events import EventBatch, damaged_record
from trainer.protocol.untrusted import open_untrusted
from trainer.spec import load_spec

pytestmark = pytest.mark.every_database(slow=True)


def test_a_job_is_submitted_in_the_first_look_and_succeeds(house: House) -> None:
    job = house.submit("pending", "running", "succeeded")
    house.poll()
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]
    assert house.record(job).num_polls == 0, "nobody asks for what was never sent"
    house.poll(3)
    assert house.status(job) is JobStatus.SUCCEEDED
    kinds = [line.kind for line in house.store.list_timeline(job.id)]
    assert kinds == ["job_submitted", "attempt_created", "attempt_submitted", "job_ended"]


def test_the_driver_gets_its_command_environment_and_spec(house: House) -> None:
    job = house.submit("running")
    house.poll()
    record = house.record(job)
    assert record.entrypoint == "'/usr/bin/my python' -m trainer.driver"
    run_dir = Path(record.env["SHARDLOOM_RUN_DIR"])
    assert run_dir.is_absolute()
    assert record.env["SHARDLOOM_JOB_ID"] == job.id
    assert record.env["SHARDLOOM_SERVICE_URL"] == house.settings.service_url
    assert record.env["SHARDLOOM_MAX_WORKER_FAILURES"] == "3"
    spec_path = run_dir / "attempts" / f"{job.id}-a0" / "spec.json"
    assert load_spec(spec_path.read_text()) == job.spec


@pytest.mark.parametrize("is_away", [False, True])
def test_with_an_attempt_go_its_token_and_what_the_cluster_keeps_of_it(
    house: House, is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    def forget(_: FakeBackend, attempt_id: str) -> None:
        forgotten.append(attempt_id)
        if is_away:
            raise BackendUnreachable("no answer")

    monkeypatch.setattr(FakeBackend, "forget", forget)
    job = house.submit("running", "failed", max_failures=0)
    house.poll()
    assert house.files(job).token_path.exists()
    house.poll(2)
    assert house.status(job) is JobStatus.FAILED
    assert not forgotten, "late records may come"
    house.now += LATE_RECORDS_S
    house.poll(2, every_s=60.0)
    assert not house.files(job).token_path.exists()
    assert forgotten == [f"{job.id}-a0"], "and nobody asks a cluster that is gone again and again"


def test_a_cluster_cut_off_for_a_day_changes_nothing(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    job = house.submit("running")
    house.poll()
    house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    house.poll()
    before = house.store.get_job(job.id)
    assert before.status is JobStatus.RUNNING
    house.backend.set_down(True)
    house.poll(24, every_s=3600)
    told = replace(before, message="the fake cluster is down", version=before.version + 1)
    assert house.store.get_job(job.id) == told
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "backend fake, shared cluster: the fake cluster is down"
    ]
    house.backend.set_down(False)
    house.backend.play(job.id, Script(("succeeded",)))
    house.poll()
    assert house.status(job) is JobStatus.SUCCEEDED
    assert len(house.store.list_attempts(job.id)) == 1


def test_a_lost_answer_does_not_submit_twice_and_a_lost_submission_keeps_its_id(
    house: House,
) -> None:
    lost, unanswered = house.submit(), house.submit()
    house.backend.play(lost.id, Script(("running",), num_lost_answers=2))
    script = Script(("running",), num_lost_answers=1, arrives_unanswered=True)
    house.backend.play(unanswered.id, script)
    house.poll()
    assert "did not answer in time" in house.store.get_job(lost.id).message
    house.poll(3)
    assert house.store.get_job(lost.id).message == ""
    for job, num_submits in ((lost, 3), (unanswered, 1)):
        record = house.record(job)
        assert (record.num_submits, record.has_arrived) == (num_submits, True)
        assert house.store.get_attempt(f"{job.id}-a0").submitted_at is not None
        told = [line.message for line in house.store.list_timeline(job.id)]
        assert told.count("attempt 0 submitted") == 1
    assert len(house.backend.attempt_ids()) == 2


def test_a_job_whose_submission_is_not_due_again_costs_no_writes(house: House) -> None:
    job = house.submit()
    house.backend.play(job.id, Script(("running",), num_lost_answers=3))
    house.poll(3)
    before = house.store.get_job(job.id)
    house.poll()
    assert house.store.get_job(job.id) == before
    assert house.record(job).num_submits == 3
    house.poll()
    assert house.record(job).num_submits == 4
    assert house.store.get_attempt(f"{job.id}-a0").submitted_at == house.now - 1


def test_a_lost_driver_is_replaced_after_the_backoff(house: House) -> None:
    job = house.submit()
    house.backend.play(f"{job.id}-a0", Script(("running", "failed")))
    house.backend.play(f"{job.id}-a1", Script(("running", "succeeded")))
    house.poll(3)
    assert house.status(job) is JobStatus.QUEUED
    house.poll(4, every_s=3.0)
    assert house.status(job) is JobStatus.SUCCEEDED
    first, second = house.store.list_attempts(job.id)
    assert (first.end_reason, second.end_reason) == (EndReason.DRIVER_LOST, EndReason.COMPLETED)
    record = house.backend.record(second.id)
    assert record is not None
    assert record.env["SHARDLOOM_MAX_WORKER_FAILURES"] == "2"


def test_run_storage_that_is_away_costs_no_attempt_and_a_name_that_is_taken_does(
    house: House,
) -> None:
    job, runs_dir = house.submit("running"), house.settings.runs_dir
    runs_dir.write_text("a file where the folder should be")
    house.poll(5, every_s=400.0)
    waiting = house.store.get_job(job.id)
    assert (waiting.status, waiting.num_failures) == (JobStatus.STARTING, 0)
    assert str(runs_dir) in waiting.message
    runs_dir.unlink()
    house.poll(2)
    assert house.backend.attempt_ids() == [f"{job.id}-a0"]
    assert house.store.get_job(job.id).message == ""
    faulty = house.submit()
    run_dir_of(house.settings, faulty.id).job_path.mkdir(parents=True)
    house.poll(2 * faulty.spec.retry.max_failures + 2, every_s=400.0)
    ended = house.store.get_job(faulty.id)
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert faulty.id in ended.message
    reasons = [attempt.end_reason for attempt in house.store.list_attempts(faulty.id)]
    assert reasons == [EndReason.STORAGE_ERROR] * (faulty.spec.retry.max_failures + 1)


def test_a_database_of_a_newer_version_is_left_to_it(house: House) -> None:
    running = house.submit("running")
    house.poll()
    queued = house.submit()
    with house.store.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    reconciler = house.reconciler()
    with pytest.raises(StoreUnavailable, match=r"9999.*run the newer version"):
        reconciler._dispatch()
    reconciler.close()
    assert house.status(queued) is JobStatus.QUEUED
    assert house.store.claim_live_jobs("new", lease_s=9, now=house.now, limit=9) == [running.id]


@pytest.mark.parametrize("last", ["failed", "not_found"])
def test_records_left_in_the_outbox_are_taken_before_the_end_is_decided(
    house: House, last: str
) -> None:
    job = house.submit("running", last)
    house.poll()
    attempt_id = f"{job.id}-a0"
    losses = [metrics(step, train_loss=float(step)) for step in range(1200)]
    house.leave(job, *losses, stream="rank-0")
    house.leave(job, workers_lost(), attempt_ended("data_error"))
    house.store.append_events(attempt_id, batch(*losses[:10]), house.now)
    house.poll(2)
    ended = house.store.get_job(job.id)
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.DATA_ERROR)
    assert ended.message == "done"
    assert house.store.stream_positions(attempt_id) == {"driver": 2, "rank-0": 1200}
    assert len(house.store.metric_points(job.id, "train/loss", max_points=5000)) == 1200


def test_a_damaged_record_keeps_the_numbers_and_a_torn_one_waits(house: House) -> None:
    job = house.submit("running", "succeeded")
    house.poll()
    path = house.leave(job, workers_lost())
    with path.open("a") as file:
        file.write("garbage\n" + attempt_ended().model_dump_json() + "\n" + '{"kind": "no')
    house.poll(2)
    assert house.store.stream_positions(f"{job.id}-a0") == {"driver": 3}
    messages = [line.message for line in house.store.list_timeline(job.id)]
    assert damaged_record(0).message in messages


def test_cancel_stops_the_attempt_until_it_is_seen_stopped(house: House) -> None:
    job = house.submit("running")
    house.poll()
    asked = request_cancel(house.store.get_job(job.id), house.now)
    house.store.update_job(asked.job, timeline=asked.timeline)
    house.backend.set_down(True)
    house.poll(3)
    assert house.status(job) is JobStatus.STOPPING
    house.backend.set_down(False)
    house.poll(2)
    assert house.status(job) is JobStatus.CANCELLED
    record = house.record(job)
    assert record.num_stops == 1


def test_the_loop_runs_by_itself_and_is_woken_by_a_submission(house: House) -> None:
    looked_at = []

    class WatchedBackend(FakeBackend):
        def submit(self, submission: object) -> None:
            looked_at.append(submission)
            done.set()

    done = threading.Event()
    reconciler = house.reconciler(WatchedBackend, reconcile_interval_s=3600.0)
    reconciler.start()
    house.submit()
    reconciler.wake()
    assert done.wait(scaled(10))
    reconciler.close()
    assert len(looked_at) == 1


def test_one_slow_job_does_not_stall_the_others(house: House) -> None:

    slow, quick = house.submit(), house.submit("running", "succeeded")
    release, ended = threading.Event(), threading.Event()

    class SlowBackend(FakeBackend):
        def observe(self, attempt_id: str) -> object:
            if attempt_id.startswith(slow.id):
                release.wait(scaled(10))
            observation = super().observe(attempt_id)
            if observation.state == "succeeded":
                ended.set()
            return observation

    reconciler = house.reconciler(SlowBackend, reconcile_interval_s=0.01)
    reconciler.start()
    assert ended.wait(scaled(10))
    assert not release.is_set()
    release.set()
    reconciler.close()
    assert house.status(quick) is JobStatus.SUCCEEDED


# ---- what goes wrong with one job holds up no other


def unreadable_stream(house: House, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of the first attempt that storage does not return."""
    house.leave(job, metrics(1, train_loss=0.5), stream="workers-9")

    def open_or_fail(path: Path, within: Path) -> IO[bytes]:
        if path.stem == "workers-9":
            raise OSError(errno.EIO, "input/output error", str(path))
        return open_untrusted(path, within)

    monkeypatch.setattr(outbox, "open_untrusted", open_or_fail)


@pytest.mark.parametrize("grace", [0.0, 600.0])
def test_a_pause_that_is_taken_back_after_the_stop_ends_no_job(house: House, grace: float) -> None:
    house.settings = house.settings.model_copy(update={"pause_grace_s": grace})
    job = house.submit("pending")
    house.poll(2)
    pause_job(house.store, house.settings, job.id)
    house.poll()
    assert house.record(job).num_stops == 1
    resume_job(house.store, house.settings, job.id)
    house.backend.play(f"{job.id}-a0", Script(("stopped",)))
    house.poll(3)
    first, second = house.store.list_attempts(job.id)
    assert first.end_reason is EndReason.PAUSED
    assert second.end_reason is None
    assert house.status(job) is JobStatus.STARTING


def test_an_attempt_that_somebody_stops_on_the_cluster_still_ends_its_job(house: House) -> None:
    job = house.submit("running", "stopped")
    house.poll(4)
    assert house.status(job) is JobStatus.CANCELLED


def test_a_pause_that_is_taken_back_during_a_look_leaves_no_request(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The clock of the house is ahead of that by which a pause is asked for.
    house.settings = house.settings.model_copy(update={"pause_grace_s": 1e9})
    job = house.submit("running")
    house.poll(2)
    request = house.files(job).pause_request_path
    pause_job(house.store, house.settings, job.id)
    house.poll()
    assert request.exists()
    resume_job(house.store, house.settings, job.id)
    assert not request.exists()
    pause_job(house.store, house.settings, job.id)
    ask_to_pause = loop.ask_to_pause

    def resume_first(settings: Settings, attempt: Attempt) -> None:
        resume_job(house.store, house.settings, job.id)
        ask_to_pause(settings, attempt)
        assert request.exists()

    monkeypatch.setattr(loop, "ask_to_pause", resume_first)
    house.poll()
    assert not request.exists()
    assert not house.store.get_job(job.id).pause_requested


def test_a_pause_that_run_storage_does_not_take_is_said_once_and_asked_for_again(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, call: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    house.settings = house.settings.model_copy(update={"pause_grace_s": 1e9})
    job = house.submit("running")
    house.poll(2)
    pause_job(house.store, house.settings, job.id)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "in_time", refuse)
        house.poll()
        said = house.store.get_job(job.id)
        house.poll(3)
    assert "Read-only file system" in said.message
    assert house.store.get_job(job.id) == said
    assert caplog.text.count("cannot pause") == 1
    house.poll()
    assert house.files(job).pause_request_path.exists()
    assert house.store.get_job(job.id).message.endswith("save a checkpoint and leave")


@pytest.mark.parametrize("fault", [OSError, ValidationError])
def test_records_that_cannot_be_taken_hold_up_their_own_job_only_and_not_for_ever(
    house: House, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    job = house.submit("running", "failed")
    house.poll()
    house.leave(job, metrics(1, train_loss=0.5), stream="workers-0")
    if fault is OSError:
        unreadable_stream(house, job, monkeypatch)
    else:
        refuse = partial(EventBatch, stream="no stream", first_seq=0, events=[])
        monkeypatch.setattr(JobStore, "append_events", lambda *_: refuse())
    reconciler = house.reconciler()
    try:
        with pytest.raises(fault):
            for _ in range(3):
                reconciler.reconcile(job.id)
        is_taken = house.store.metric_names(job.id) == ["train/loss"]
        assert is_taken == (fault is OSError), "the other stream was taken"
        house.now += PATIENCE_S
        reconciler.reconcile(job.id)
    finally:
        reconciler.close()
    assert house.store.list_attempts(job.id)[0].end_reason is EndReason.DRIVER_LOST


def test_a_job_whose_files_cannot_be_read_does_not_stop_the_queue(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = house.submit("failed")
    house.poll(2)
    assert house.status(broken) is JobStatus.QUEUED
    house.now += 3600  # its next attempt is due
    unreadable_stream(house, broken, monkeypatch)
    other = house.submit("running")
    reconciler = house.reconciler()
    reconciler._queue.admit()
    with pytest.raises(OSError, match="input/output"):
        reconciler.reconcile(broken.id)
    reconciler.reconcile(other.id)
    reconciler.close()
    assert set(house.backend.attempt_ids()) == {f"{broken.id}-a0", f"{other.id}-a0"}


# ---- one background thread computes at a time


def test_who_waits_for_somebody_else_makes_room() -> None:
    slot, entered = _ComputeSlot(timeout_s=60.0), threading.Event()

    def other() -> None:
        with slot.taken():
            entered.set()

    with slot.taken(), slot.aside():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(scaled(60))
    thread.join()


def test_one_that_is_stuck_holds_nobody_up_for_good() -> None:
    slot, entered = _ComputeSlot(timeout_s=0.0), threading.Event()

    def other() -> None:
        with slot.taken(), slot.aside():
            entered.set()

    with slot.taken():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(scaled(60))
        thread.join()
    # Who went ahead beside it has not given away room that was never its own.
    with slot.taken():
        assert not slot._slot.acquire(blocking=False)


# ---- the loop waits for nobody


def test_a_cancel_keeps_its_turn_behind_those_that_hang(house: House) -> None:
    reconciler = house.reconciler()
    release, ran = threading.Event(), list[str]()

    def reconcile(job_id: str, seen: object) -> None:
        ran.append(job_id)
        if not ran.count(last.id):
            release.wait(scaled(60))

    # Older ones are looked at first, in each pass.
    jobs = [
        store_attempt(house.store, queued_job(now=house.now + n), JobStatus.RUNNING)[0]
        for n in range(9)
    ]
    last = jobs[-1]
    requested = [replace(job, cancel_requested=True) for job in jobs]
    reconciler.reconcile = reconcile  # type: ignore[method-assign]
    try:
        for _ in range(3):
            reconciler._begin(requested)
        assert len(ran) == 4
        waiting = reconciler._busy[last.id]
        assert waiting is not None
        for _ in range(3):
            reconciler._begin(requested)
        assert reconciler._busy[last.id] is waiting
    finally:
        release.set()
        reconciler.close()


def test_a_cancel_is_carried_out_at_once_while_the_backend_hangs_for_hundreds(
    house: House,
) -> None:
    release = threading.Event()

    class HangingBackend(FakeBackend):
        def observe(self, attempt_id: str) -> Observation:
            if not attempt_id.startswith(healthy.id):
                release.wait(scaled(60))
            return super().observe(attempt_id)

    healthy = house.submit("running")
    house.poll(2)
    for number in range(200):
        # In a millisecond of its own each: ids are random within one.
        job = queued_job(now=house.now + number / 1000)
        store_attempt(house.store, job, JobStatus.RUNNING)
    reconciler = house.reconciler(HangingBackend, reconcile_interval_s=0.05)
    reconciler.start()
    try:
        wait_for(lambda: len(reconciler._busy) > 200, "all threads to hang")
        cancel_job(house.store, house.settings, healthy.id)
        began = time.monotonic()
        wait_for(lambda: house.record(healthy).num_stops, "the stop of the healthy job")
        assert time.monotonic() - began < scaled(5)
        # Nor does it wait for jobs of another kind of cluster.
        own = house.submit("running")
        spec = own.spec.model_copy(
            update={"resources": own.spec.resources.model_copy(update={"cluster": "own"})}
        )
        house.store.update_job(replace(house.store.get_job(own.id), spec=spec))
        reconciler.wake()
        wait_for(lambda: house.store.get_job(own.id).current_attempt_id, "a start of its own")
    finally:
        release.set()
        reconciler.close()


def test_hosts_and_storage_that_hang_delay_no_running_job(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class HangingBackend(FakeBackend):
        def hosts(self) -> None:
            release.wait(scaled(60))

    running = house.submit("running", "succeeded")
    house.poll()
    house.submit()  # For which the cluster is asked for its hosts.
    reconciler = house.reconciler(HangingBackend, reconcile_interval_s=0.05)
    reconciler.start()
    try:
        wait_for(lambda: house.status(running) is JobStatus.SUCCEEDED, "the end of the other job")
        assert not release.is_set()
    finally:
        release.set()
        reconciler.close()


def test_a_service_stops_while_housekeeping_hangs_on_storage(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        begun.set()
        release.wait(scaled(60))

    monkeypatch.setattr(housekeeping, "finish_deletions", hang)
    monkeypatch.setattr(housekeeping, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(housekeeping, "_CLOSE_S", 0.01)
    reconciler = house.reconciler()
    reconciler.start()
    try:
        assert begun.wait(scaled(10))
        closing = threading.Thread(target=reconciler.close)
        closing.start()
        closing.join(scaled(20))
        assert not closing.is_alive()
    finally:
        release.set()


def test_storage_that_hangs_fails_its_own_calls_only_and_later_ones_at_once() -> None:
    release = threading.Event()
    hung, healthy = Path("/mnt/hung"), Path("/mnt/healthy")
    for _ in range(storage.MAX_HANGING):
        with pytest.raises(TimeoutError, match="has not answered"):
            in_time(hung, lambda: release.wait(scaled(60)), deadline_s=0.01)
    with pytest.raises(TimeoutError, match="storage hangs"):
        in_time(hung / "below", lambda: pytest.fail("it is not called"))
    assert in_time(healthy, lambda: 7) == 7
    assert storage.hanging() == {str(hung): storage.MAX_HANGING}
    with pytest.raises(ValueError, match="of the call"):
        in_time(healthy, partial(int, "of the call"))
    release.set()
    wait_for(lambda: not storage.hanging(), "the calls to return")
    assert in_time(hung, lambda: 8) == 8


@pytest.mark.parametrize(
    ("owners", "most", "words"),
    [
        (["job-1"] * storage.MAX_HANGING, storage.MAX_OF_ONE, "job-1 wrote there"),
        ([f"job-{n}" for n in range(storage.MAX_HANGING)], storage.MAX_OWNED, "jobs wrote there"),
    ],
)
def test_calls_for_one_job_and_for_many_leave_storage_to_others(
    owners: list[str], most: int, words: str
) -> None:
    release, busy = threading.Event(), Path("/mnt/busy")
    with ThreadPoolExecutor(len(owners)) as pool:
        late = [
            pool.submit(in_time, busy, lambda: release.wait(scaled(60)), scaled(1.0), owner)
            for owner in owners
        ]
        assert {type(each.exception()) for each in late} == {TimeoutError}
    assert storage.hanging() == {str(busy): most}
    refused, served = ("job-1", ["job-2", ""]) if most == storage.MAX_OF_ONE else ("job-new", [""])
    with pytest.raises(TimeoutError, match=words):
        in_time(busy, lambda: pytest.fail("it is not called"), owner=refused)
    assert [in_time(busy, lambda: 7, owner=owner) for owner in served] == [7] * len(served)
    release.set()
    wait_for(lambda: not storage._hanging, "the calls to return")
    assert in_time(busy, lambda: 8, owner=refused) == 8


def test_a_mount_that_hangs_is_told_from_others_below_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "mountinfo"
    line = "36 35 98:0 / {} rw,noatime shared:1 - nfs4 server:/ rw\n".format
    told.write_text(line("/") + line("/var/lib/shardloom/runs"))
    monkeypatch.setattr(storage, "_MOUNTS", told)
    monkeypatch.setattr(storage, "_mounts", frozenset())
    monkeypatch.setattr(storage, "_mounts_read_at", -math.inf)
    runs, data = Path("/var/lib/shardloom/runs"), Path("/var/lib/shardloom/my data")
    assert storage.place_of(runs / "job-1" / "logs") == runs
    assert storage.place_of(data / "criteo") == Path("/var/lib")
    with told.open("a") as mounts:
        mounts.write(line("/var/lib/shardloom/my\\040data"))
    monkeypatch.setattr(storage, "_MOUNTS_S", 0.0)
    assert storage.place_of(data / "criteo") == data
    with told.open("a") as mounts:
        mounts.write(line("/var/lib/shardloom/runs/job-1"))
    assert storage.place_of(runs / "job-1" / "logs") == runs / "job-1"
    monkeypatch.setattr(storage, "_MOUNTS", tmp_path / "of another system")
    assert storage.place_of(Path("/srv/a/b/c")) == Path("/srv/a")


def test_of_calls_that_begin_together_no_more_wait_for_storage_than_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, hung = threading.Event(), Path("/mnt/other")
    monkeypatch.setattr(storage, "MAX_HANGING", 1)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(in_time, hung, lambda: release.wait(scaled(60)), deadline_s=scaled(20))
            for _ in range(2)
        ]
        done, waiting = wait(calls, scaled(10), return_when=FIRST_COMPLETED)
        assert [type(call.exception()) for call in done] == [TimeoutError]
        release.set()
        assert waiting.pop().result()
    wait_for(lambda: not storage.hanging(), "the calls to return")


def test_many_attempts_are_observed_by_one_request_and_ends_by_one_of_their_own(
    house: House,
) -> None:
    asked: list[str] = []

    class ListingBackend(FakeBackend):
        def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
            asked.append("all")
            return {name: Observation(states.pop(name)) for name in [*states]}

        def observe(self, attempt_id: str) -> Observation:
            asked.append(attempt_id)
            return super().observe(attempt_id)

    jobs = [house.submit("running", "succeeded") for _ in range(20)]
    house.poll(2)
    for job in jobs:
        house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    states = {f"{job.id}-a0": ObservedState.RUNNING for job in jobs}
    states[f"{jobs[0].id}-a0"] = ObservedState.SUCCEEDED
    del states[f"{jobs[1].id}-a0"]
    reconciler = house.reconciler(ListingBackend)
    reconciler._dispatch()
    wait_for(lambda: not reconciler._busy, "the pass to end")
    reconciler.close()
    assert (asked[0], set(asked[1:])) == ("all", {f"{job.id}-a0" for job in jobs[:2]})
    ended = [house.status(job) is JobStatus.SUCCEEDED for job in jobs]
    assert ended == [True, True] + [False] * 18


def test_a_job_that_is_cancelled_while_all_are_observed_is_reconciled_once(house: House) -> None:
    class CancelledMeanwhile(FakeBackend):
        def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
            reconciler._begin([replace(jobs[0], cancel_requested=True)])
            return {}

    jobs = [
        store_attempt(house.store, queued_job(now=house.now + n), JobStatus.RUNNING)[0]
        for n in range(16)
    ]
    reconciler, ran = house.reconciler(CancelledMeanwhile), list[str]()
    reconciler.reconcile = lambda job_id, seen: ran.append(job_id)  # type: ignore[method-assign]
    reconciler._begin(jobs)
    wait_for(lambda: not reconciler._busy, "the pass to end")
    reconciler.close()
    assert sorted(ran) == [job.id for job in jobs]


def test_no_scheduling_pass_follows_a_late_one_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, begun = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        begun.release()
        release.wait(scaled(60))

    monkeypatch.setattr(loop, "_SCHEDULING_S", 0.01)
    reconciler = house.reconciler()
    monkeypatch.setattr(reconciler._queue, "admit", hang)
    reconciler._dispatch()
    assert begun.acquire(timeout=scaled(10))
    release.set()
    assert reconciler._woken.wait(scaled(10))
    reconciler._dispatch()
    reconciler._scheduler.submit(int).result()  # What was submitted before has begun.
    assert not begun.acquire(blocking=False)
    reconciler._dispatch()
    assert begun.acquire(timeout=scaled(10))
    reconciler.close()


@pytest.mark.parametrize("is_told", [False, True])
def test_what_a_late_scheduling_pass_read_is_read_again_only_after_a_wake(
    house: House, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    release = threading.Event()
    monkeypatch.setattr(loop, "_SCHEDULING_S", 0.01)
    reconciler = house.reconciler()

    def hang() -> list[Job]:
        found = house.store.list_live_jobs()
        release.wait(scaled(60))
        return found

    monkeypatch.setattr(reconciler._queue, "admit", hang)
    reconciler._dispatch()
    release.set()
    reconciler._scheduler.submit(int).result()
    if is_told:
        reconciler.wake()
    read, shown = Mock(wraps=house.store.list_live_jobs), Mock()
    monkeypatch.setattr(house.store, "list_live_jobs", read)
    monkeypatch.setattr(reconciler._telemetry, "saw_live_jobs", shown)
    reconciler._dispatch()
    assert (read.called, shown.called) == (is_told, is_told), "metrics never go back in time"
    reconciler.close()


def test_a_wake_looks_at_jobs_that_were_written_and_at_no_other(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is: the queue is scheduled before the jobs are looked at.
    monkeypatch.setattr("service.reconciler.loop._SCHEDULING_S", scaled(30.0))
    known = house.submit("running")
    house.poll(3)
    reconciler = house.reconciler()
    polls = []
    for written_only in (False, True, False):
        new = house.submit("running")
        reconciler._dispatch(written_only=written_only)
        wait_for(lambda: not reconciler._busy, "the pass to end")
        assert house.record(new).has_arrived
        polls.append(house.record(known).num_polls)
    reconciler.close()
    assert polls[0] == polls[1] == polls[2] - 1


def test_a_job_that_runs_on_is_not_read_again_until_it_is_written(house: House) -> None:
    class AllRun(FakeBackend):
        def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
            return dict.fromkeys(attempt_ids, Observation(ObservedState.RUNNING))

    jobs = [house.submit("running") for _ in range(16)]
    house.poll(2)
    # The workers of the others have not told yet that they train.
    for job in jobs[::2]:
        house.store.append_events(f"{job.id}-a0", batch(workers_started()), house.now)
    reconciler = house.reconciler(AllRun)
    num_read = []
    for _ in range(3):
        reconciler._dispatch()
        wait_for(lambda: not reconciler._busy, "the pass to end")
        sample = reconciler._telemetry.registry.get_sample_value
        num_read.append(sample("shardloom_reconcile_seconds_count"))
    house.store.append_events(f"{jobs[0].id}-a0", batch(attempt_ended(), first_seq=1), house.now)
    house.now += 130.0
    reconciler._dispatch()
    wait_for(lambda: not reconciler._busy, "the pass to end")
    reconciler.close()
    assert num_read == [16, 16, 16]
    assert house.status(jobs[0]) is JobStatus.SUCCEEDED

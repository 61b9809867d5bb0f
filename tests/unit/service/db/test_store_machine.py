"""The store against a model of plain dictionaries, with crashes between any two writes.

A crash is an error of the driver: before one of the statements of a transaction, before its
commit, or after it, when the caller hears of a failure though everything was written. After each
the store is opened anew, as by a service that starts again.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.db.jobs import JobStore
from service.domain.models import Attempt, EndReason, Job, JobStatus, TimelineEvent
from service.errors import (
    IdempotencyConflict,
    JobNotEnded,
    JobNotFound,
    SequenceGap,
    StaleVersion,
    StoreUnavailable,
)
from tests.harness.builders import NOW, attempt_of, batch, metrics, queued_job
from tests.harness.databases import SqliteTemplate, open_migrated
from tests.harness.properties import examples
from trainer.protocol.events import Note

# Specs are checked once: that is slow, and nothing of it changes here.
_TEMPLATE = queued_job()


@dataclass
class ModelJob:
    """What the store should know of a job."""

    job: Job
    attempts: dict[str, Attempt] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def next_seq(self) -> int:
        """Every record is a note and a point in turn."""
        return 2 * len(self.notes)


class Fuse:
    """Makes a store's driver fail once: at statement `at`, or around the commit."""

    def __init__(self, store: JobStore) -> None:
        self._dialect: Any = store.engine.dialect
        self._do_commit = self._dialect.do_commit
        self._countdown = 0
        self._moment = ""
        self._dialect.do_execute = self._guard(self._dialect.do_execute)
        self._dialect.do_executemany = self._guard(self._dialect.do_executemany)
        self._dialect.do_commit = self._commit
        self.has_written = False

    def arm(self, moment: str, at: int) -> None:
        self._moment, self._countdown, self.has_written = moment, at, False

    def disarm(self) -> None:
        self._moment = ""

    def _guard(self, execute: Callable[..., None]) -> Callable[..., None]:
        def run(cursor: Any, statement: str, *rest: Any) -> None:
            if self._moment == "statement" and not statement.startswith("BEGIN"):
                self._countdown -= 1
                if self._countdown < 0:
                    self._blow()
            execute(cursor, statement, *rest)

        return run

    def _commit(self, connection: Any) -> None:
        if self._moment == "before commit":
            self._blow()
        self._do_commit(connection)
        if self._moment == "after commit":
            self.has_written = True
            self._blow()

    def _blow(self) -> None:
        self.disarm()
        raise sqlite3.OperationalError("disk I/O error, as the test wanted")


@pytest.fixture(scope="module", autouse=True)
def template(sqlite_template: SqliteTemplate) -> None:
    StoreMachine.template = sqlite_template


class StoreMachine(RuleBasedStateMachine):
    """Writes of every kind, in any order, with and without crashes."""

    template: SqliteTemplate

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="shardloom-store-")
        self._url = f"sqlite:///{Path(self._folder.name) / 'shardloom.db'}"
        self._model: dict[str, ModelJob] = {}
        self._keys: dict[str, str] = {}
        self._num_made = 0
        self._crash: tuple[str, int] | None = None

    @initialize()
    def begin(self) -> None:
        self.template.copy(self._url)
        self.open()

    def open(self) -> None:
        self._store = open_migrated(self._url)
        self._fuse = Fuse(self._store)

    def teardown(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()
        self._folder.cleanup()

    def _write(self, call: Callable[[], object], note: Callable[[], object]) -> None:
        """Call the store, and note in the model what it should have done, crash or not."""
        if self._crash is not None:
            self._fuse.arm(*self._crash)
            self._crash = None
        try:
            call()
        except StoreUnavailable:
            if self._fuse.has_written:
                note()
            self._store.close()
            self.open()
            return
        finally:
            self._fuse.disarm()
        note()

    def _pick(self, data: st.DataObject) -> ModelJob:
        return self._model[data.draw(st.sampled_from(sorted(self._model)))]

    @rule(
        moment=st.sampled_from(["statement", "before commit", "after commit"]), at=st.integers(0, 6)
    )
    def crash_in_the_next_write(self, moment: str, at: int) -> None:
        self._crash = (moment, at)

    @rule(key=st.sampled_from([None, "k1", "k2"]))
    def create(self, key: str | None) -> None:
        self._num_made += 1
        job = replace(_TEMPLATE, id=f"job-{self._num_made:012d}")

        def note() -> None:
            if key not in self._keys:
                self._model[job.id] = ModelJob(job)
                if key is not None:
                    self._keys[key] = job.id

        self._write(
            lambda: self._store.create_job(job, idempotency_key=key, request_hash="h"), note
        )

    @precondition(lambda self: self._keys)
    @rule(data=st.data())
    def reuse_a_key_for_something_else(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self._keys)))
        with pytest.raises(IdempotencyConflict):
            self._store.create_job(_TEMPLATE, idempotency_key=key, request_hash="other")

    @precondition(lambda self: self._model)
    @rule(data=st.data(), status=st.sampled_from(JobStatus), message=st.text(max_size=5))
    def decide(self, data: st.DataObject, status: JobStatus, message: str) -> None:
        known = self._pick(data)
        attempt = attempt_of(known.job, index=len(known.attempts), submitted_at=NOW)
        message = message.replace("\x00", "")
        job = replace(known.job, status=status, message=message, current_attempt_id=attempt.id)
        line = TimelineEvent(0, job.id, attempt.id, NOW, "decided", message, "service", {})

        def note() -> None:
            known.job = replace(job, version=job.version + 1)
            known.attempts[attempt.id] = attempt

        self._write(lambda: self._store.update_job(job, attempt=attempt, timeline=[line]), note)

    @precondition(lambda self: any(known.attempts for known in self._model.values()))
    @rule(data=st.data())
    def end_an_attempt(self, data: st.DataObject) -> None:
        known = self._pick(data)
        if not known.attempts:
            return
        latest = known.attempts[list(known.attempts)[-1]]
        ended = replace(latest, ended_at=NOW, end_reason=EndReason.WORKERS_LOST)

        def note() -> None:
            known.job = replace(known.job, version=known.job.version + 1)
            known.attempts[ended.id] = ended

        self._write(lambda: self._store.update_job(known.job, attempt=ended), note)

    @precondition(lambda self: self._model)
    @rule(data=st.data(), behind=st.integers(-2, 3))
    def decide_on_what_was_read_long_ago(self, data: st.DataObject, behind: int) -> None:
        """A version that is not the stored one is refused, with everything that came along."""
        known = self._pick(data)
        if behind == 0:
            return
        stale = replace(known.job, version=known.job.version - behind, message="stale")
        attempt = attempt_of(stale, index=99)
        with pytest.raises(StaleVersion):
            self._store.update_job(stale, attempt=attempt)

    @precondition(lambda self: any(known.attempts for known in self._model.values()))
    @rule(data=st.data(), num_notes=st.integers(1, 3), shift=st.integers(-4, 1))
    def report(self, data: st.DataObject, num_notes: int, shift: int) -> None:
        """A driver sends records: those that follow, some again, or some too early."""
        known = self._pick(data)
        if not known.attempts:
            return
        first_id = next(iter(known.attempts))
        first = max(0, known.next_seq // 2 + shift)
        texts = [f"note {number}" for number in range(first, first + num_notes)]
        records = [
            record
            for number, text in enumerate(texts, start=first)
            for record in (Note(time=NOW, message=text), metrics(number, train_loss=1.0))
        ]
        part = batch(*records, first_seq=2 * first)
        if 2 * first > known.next_seq:
            with pytest.raises(SequenceGap):
                self._store.append_events(first_id, part, NOW)
            return

        def note() -> None:
            known.notes += texts[len(known.notes) - first :]

        self._write(lambda: self._store.append_events(first_id, part, NOW), note)
        # What an attempt that still steers reports changes the job's figures.
        known.job = replace(known.job, latest_metrics={})

    @precondition(lambda self: self._model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """A job that has ended goes with all its rows; one that lives stays."""
        known = self._pick(data)
        job_id = known.job.id
        if not known.job.status.is_terminal:
            with pytest.raises(JobNotEnded):
                self._store.delete_job(job_id)
            return

        self._write(lambda: self._store.delete_job(job_id), lambda: None)
        # One that was cut off may be repeated.
        with suppress(JobNotFound):
            self._store.delete_job(job_id)
        del self._model[job_id]
        self._keys = {key: each for key, each in self._keys.items() if each != job_id}

    @invariant()
    def the_store_is_as_the_model(self) -> None:
        if not hasattr(self, "_store"):
            return
        stored, _ = self._store.list_jobs(limit=1000)
        assert [job.id for job in stored] == sorted(self._model, reverse=True)
        for job in stored:
            self._compare(job, self._model[job.id])
        queued = [each for each in self._model.values() if each.job.status == "QUEUED"]
        assert self._store.has_queued_jobs() == bool(queued)

    def _compare(self, job: Job, known: ModelJob) -> None:
        assert replace(job, latest_metrics={}) == known.job
        attempts = {attempt.id: attempt for attempt in self._store.list_attempts(job.id)}
        assert attempts == known.attempts
        notes = self._store.list_timeline(job.id, limit=1000, kinds=["note"])
        assert [line.message for line in notes] == known.notes
        assert [line.id for line in notes] == sorted({line.id for line in notes})
        steps = [point.step for point in self._store.metric_points(job.id, "train/loss")]
        assert steps == list(range(len(known.notes)))
        decided = self._store.list_timeline(job.id, limit=1000, kinds=["decided"])
        assert len(decided) == len(known.attempts)

    @invariant()
    def what_was_deleted_is_gone(self) -> None:
        for number in range(1, self._num_made + 1):
            job_id = f"job-{number:012d}"
            if job_id not in self._model:
                with pytest.raises(JobNotFound):
                    self._store.get_job(job_id)


StoreMachine.TestCase.settings = settings(max_examples=examples(25, fast=8), stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase

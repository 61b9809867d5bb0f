"""Two replicas of the service look at one job at the same time, in a thousand orders.

Each replica runs in a greenlet that stops before every call of the store and of the cluster, and a
seeded scheduler picks who goes on. Nothing here waits, so a seed that fails does so again. Leases
are left aside: what keeps a job safe must hold without them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

from service.backends.base import Submission
from service.backends.fake import FakeBackend, Script
from service.db.jobs import JobStore
from service.domain.models import Job, JobStatus, ObservedState
from service.errors import LockLost, StaleVersion
from service.observability.metrics import ServiceMetrics
from service.reconciler.loop import Reconciler
from service.settings import Settings
from tests.harness.builders import NOW, queued_job
from tests.harness.databases import PostgresqlServer, SqliteTemplate, open_migrated, store_job
from tests.harness.killed_service import Stepping

NUM_REPLICAS = 2
NUM_STEPS = 120
SEEDS_OF_A_TEST = 50
SEEDS_IN_TEST = 100
COURSES = (
    ("pending", "running", "running", "succeeded"),
    ("pending", "running", "failed"),
    ("running", "unreachable", "running", "succeeded"),
    ("pending", "unreachable", "failed"),
    ("running",),
)
READS = ("get_", "list_", "has_", "stream_positions", "attempts_to_collect", "observe", "may_")
OVER = {ObservedState.SUCCEEDED.value, ObservedState.FAILED.value, ObservedState.STOPPED.value}


class WatchedBackend(FakeBackend):
    """A fake cluster that notes an attempt that starts while another one of its job runs."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        self.faults: list[str] = []

    def submit(self, submission: Submission) -> None:
        """Take an attempt, after a look at those that the job has already."""
        for other in self.attempt_ids():
            is_of_job = other.startswith(submission.job_id) and other != submission.attempt_id
            if is_of_job and self._runs(other):
                self.faults.append(f"{submission.attempt_id} starts while {other} runs")
        super().submit(submission)

    def _runs(self, attempt_id: str) -> bool:
        record = self.record(attempt_id)
        if record is None or not record.has_arrived or record.num_stops:
            return False
        course = self._script_of(attempt_id, record.job_id).observations
        return course[min(max(record.num_polls - 1, 0), len(course) - 1)] not in OVER


@dataclass
class Duel:
    """Replicas over one store and one cluster; `now` is everybody's clock."""

    store: JobStore
    backend: WatchedBackend
    folder: Path
    now: float = NOW
    calls: list[str] = field(default_factory=list)

    def play(self, seed: int) -> Job:
        """One job from submission to its end, both replicas at it; returns the job."""
        dice = random.Random(seed)
        self.now += 1000
        job = queued_job(now=self.now, max_failures=dice.randint(0, 2))
        store_job(self.store, job)
        self.backend.play(job.id, _script(dice))
        cancel_at = dice.randrange(NUM_STEPS) if dice.random() < 0.3 else None
        replicas = [self._replica(name, job.id) for name in range(NUM_REPLICAS)]
        for step in range(NUM_STEPS):
            if step == cancel_at:
                self._cancel(job.id)
            self.now += dice.choice((0.0, 0.0, 0.1, 1.0, 1.0, 5.0, 45.0))
            self.calls.clear()
            dice.choice(replicas).switch()
            if any(not name.startswith(READS) for name in self.calls):
                self._check(job.id, is_cancelled=cancel_at is not None and step >= cancel_at)
        return self._finish(job.id)

    def _replica(self, name: int, job_id: str) -> greenlet:
        reconciler = self._reconciler(str(name), partial(Stepping, before=self._stop))

        def run() -> None:
            while True:
                with suppress(LockLost):
                    reconciler._queue.admit()
                reconciler.reconcile(job_id)

        return greenlet(run)

    def _stop(self, name: str) -> None:
        """Stop the replica that calls; it notes the call as it goes on."""
        scheduler = getcurrent().parent
        if scheduler is not None:
            scheduler.switch()
        self.calls.append(name)

    def _reconciler(self, name: str, wrap: Callable[[Any], Any]) -> Reconciler:
        settings = Settings(home=self.folder, backend="fake", replica_id=name)
        store, backend = wrap(self.store), wrap(self.backend)
        return Reconciler(store, backend, settings, ServiceMetrics(), lambda: self.now)

    def _cancel(self, job_id: str) -> None:
        job = self.store.get_job(job_id)
        if not job.status.is_terminal:
            # What people ask for races as any other write does.
            self.store.update_job(replace(job, cancel_requested=True))

    def _check(self, job_id: str, *, is_cancelled: bool) -> None:
        live = [each.id for each in self.store.list_attempts(job_id) if each.end_reason is None]
        assert len(live) <= 1, live
        assert not self.backend.faults
        for attempt_id in self.backend.attempt_ids():
            record = self.backend.record(attempt_id)
            assert record is not None
            if record.job_id == job_id and not is_cancelled:
                assert record.num_stops == 0, f"{attempt_id} was healthy and was stopped"

    def _finish(self, job_id: str) -> Job:
        """Let one replica go on alone: a job whose course ends comes to its end."""
        reconciler = self._reconciler("last", lambda target: target)
        for _ in range(40):
            self.now += 60.0
            reconciler._queue.admit()
            reconciler.reconcile(job_id)
            if self.store.get_job(job_id).status.is_terminal:
                break
        return self.store.get_job(job_id)


def _script(dice: random.Random) -> Script:
    return Script(
        observations=dice.choice(COURSES),
        num_lost_answers=dice.choice((0, 0, 0, 1, 2)),
        arrives_unanswered=dice.random() < 0.5,
    )


@pytest.fixture
def sqlite_store(tmp_path: Path, sqlite_template: SqliteTemplate) -> Iterator[JobStore]:
    url = f"sqlite:///{tmp_path / 'shardloom.db'}"
    sqlite_template.copy(url)
    store = open_migrated(url)
    yield store
    store.close()


def _play_all(store: JobStore, folder: Path, seeds: range) -> None:
    ends = set()
    for seed in seeds:
        # A cluster of its own, or looking through its attempts takes ever longer.
        duel = Duel(store, WatchedBackend(folder / f"fake-{seed}"), folder, now=NOW + 1e5 * seed)
        try:
            job = duel.play(seed)
        except (AssertionError, StaleVersion) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ends.add(job.status)
        _check_end(duel, job, seed)
        if not job.status.is_terminal:
            store.update_job(replace(job, status=JobStatus.CANCELLED))
    assert ends >= {JobStatus.SUCCEEDED, JobStatus.FAILED}


def _check_end(duel: Duel, job: Job, seed: int) -> None:
    """Every submission is of an attempt that is stored, and no end is told twice."""
    attempts = {attempt.id for attempt in duel.store.list_attempts(job.id)}
    assert set(duel.backend.attempt_ids()) <= attempts, seed
    kinds = [line.kind for line in duel.store.list_timeline(job.id, limit=1000)]
    assert kinds.count("job_ended") == job.status.is_terminal, seed


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.slow] if first >= SEEDS_IN_TEST else [])
        for first in range(0, 1000, SEEDS_OF_A_TEST)
    ],
)
def test_two_replicas_on_sqlite_never_harm_a_job(
    sqlite_store: JobStore, tmp_path: Path, first: int
) -> None:
    _play_all(sqlite_store, tmp_path, range(first, first + SEEDS_OF_A_TEST))


def test_two_replicas_on_postgresql_never_harm_a_job(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    store = JobStore.open(postgresql.migrated_database())
    _play_all(store, tmp_path, range(1000, 1025))
    store.close()

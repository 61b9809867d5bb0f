"""Several replicas of the service on one database: starting, writing, and losing the database."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from psycopg.errors import DeadlockDetected, SerializationFailure
from sqlalchemy import text

from service.domain import Job, JobStatus
from service.errors import StoreUnavailable
from service.job_errors import RecordRefused, StaleVersion
from service.store.engine import newest_revision
from service.store.sql import SqlJobStore
from tests.integration.postgresql import PostgresqlServer
from tests.unit.service.builders import NOW, attempt_of, batch, metrics, queued_job
from trainer.events import Note

NUM_REPLICAS = 3
_barrier: Barrier


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shardloom.db'}"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.empty_database()


@pytest.fixture
def replicas(postgresql: PostgresqlServer) -> Iterator[list[SqlJobStore]]:
    """The stores of replicas on one PostgreSQL database."""
    url = postgresql.migrated_database()
    opened = [SqlJobStore.open(url) for _ in range(NUM_REPLICAS)]
    yield opened
    for store in opened:
        store.close()


def _set_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _open_together(database_url: str) -> object:
    _barrier.wait(60)
    store = SqlJobStore.open(database_url)
    try:
        return store.ping()["migration"]
    finally:
        store.close()


def test_replicas_that_start_together_migrate_once(database_url: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(NUM_REPLICAS)
    with ProcessPoolExecutor(
        NUM_REPLICAS, spawn, initializer=_set_barrier, initargs=(barrier,)
    ) as pool:
        found = list(pool.map(_open_together, [database_url] * NUM_REPLICAS))
    assert found == [newest_revision()] * NUM_REPLICAS


def _at_once(calls: list[Callable[[], object]]) -> list[object]:
    """The results of calls that begin together, or what they raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait(60)
        try:
            return call()
        except (StaleVersion, StoreUnavailable) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_one_key_makes_one_job_however_many_ask_at_once(replicas: list[SqlJobStore]) -> None:
    for number in range(20):
        results = _at_once(
            [
                lambda store=store, key=str(number): store.create_job(
                    queued_job(), idempotency_key=key, request_hash="h"
                )
                for store in replicas
            ]
        )
        assert len({result.id for result in results if isinstance(result, Job)}) == 1
        assert all(isinstance(result, Job) for result in results)
    assert sum(replicas[0].count_jobs_by_status().values()) == 20


def test_one_of_those_who_write_a_version_wins(replicas: list[SqlJobStore]) -> None:
    job = replicas[0].create_job(queued_job(), idempotency_key=None, request_hash="h")
    for _ in range(20):
        calls = [lambda store=store, job=job: store.update_job(job) for store in replicas]
        results = _at_once(calls)
        assert sorted(type(result).__name__ for result in results) == [
            "Job",
            "StaleVersion",
            "StaleVersion",
        ]
        job = replicas[0].get_job(job.id)


def test_no_two_replicas_lease_a_job_at_once(replicas: list[SqlJobStore]) -> None:
    made = [
        replicas[0].create_job(
            replace(queued_job(now=NOW + number), status=JobStatus.RUNNING),
            idempotency_key=None,
            request_hash="h",
        )
        for number in range(30)
    ]
    for turn in range(10):
        now = NOW + 20.0 * turn
        calls = [
            lambda store=store, name=str(name), now=now: store.claim_live_jobs(
                name, lease_s=15.0, now=now, limit=20
            )
            for name, store in enumerate(replicas)
        ]
        held = [job_id for result in _at_once(calls) for job_id in result]
        assert len(held) == len(set(held))
    assert {*held} <= {job.id for job in made}


def test_a_batch_that_reaches_several_replicas_is_taken_once(replicas: list[SqlJobStore]) -> None:
    job = replicas[0].create_job(queued_job(), idempotency_key=None, request_hash="h")
    attempt = attempt_of(job, submitted_at=NOW)
    changed = replace(job, status=JobStatus.RUNNING, current_attempt_id=attempt.id)
    replicas[0].update_job(changed, attempt=attempt)
    for first in range(0, 100, 10):
        notes = [Note(time=NOW, message=str(number)) for number in range(first, first + 10)]
        part = batch(*notes, metrics(first, train_loss=1.0), first_seq=first // 10 * 11)
        _at_once([lambda s=s, part=part: s.append_events(attempt.id, part, NOW) for s in replicas])
    lines = replicas[0].list_timeline(job.id, limit=1000, kinds=["note"])
    assert [line.message for line in lines] == [str(number) for number in range(100)]
    assert len(replicas[0].metric_points(job.id, "train/loss")) == 10


def test_a_server_that_was_restarted_is_used_again(
    postgresql: PostgresqlServer, replicas: list[SqlJobStore]
) -> None:
    store = replicas[0]
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="h")
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable), store._transactions.write() as connection:
        connection.execute(text("UPDATE jobs SET message = 'half done'"))
        postgresql.hang_up(url)
        connection.execute(text("SELECT 1"))
    # A transaction that was cut off left nothing, and the next one finds a new connection.
    assert store.get_job(job.id) == job
    postgresql.hang_up(url)
    assert store.update_job(job).version == job.version + 1


@pytest.mark.parametrize(("num_ties", "is_written"), [(3, True), (4, False)])
def test_a_write_that_the_database_undid_is_tried_again(
    replicas: list[SqlJobStore], monkeypatch: pytest.MonkeyPatch, num_ties: int, is_written: bool
) -> None:
    store = replicas[0]
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="h")
    ties = iter([SerializationFailure("tied"), DeadlockDetected("tied")] * 2)
    left = iter(range(num_ties))
    commit = store.engine.dialect.do_commit

    def tie(connection: object) -> None:
        if next(left, None) is not None:
            raise next(ties)
        commit(connection)

    monkeypatch.setattr(store.engine.dialect, "do_commit", tie)
    if is_written:
        assert store.update_job(job).version == job.version + 1
    else:
        with pytest.raises(StoreUnavailable, match="again and again"):
            store.update_job(job)
    assert replicas[1].get_job(job.id).version == job.version + is_written


def test_a_server_that_is_away_is_said_to_be(postgresql: PostgresqlServer) -> None:
    url = postgresql.empty_database().replace("host=", "host=/nowhere")
    with pytest.raises(StoreUnavailable, match="SHARDLOOM_DATABASE_URL"):
        SqlJobStore.open(url)


def test_text_that_postgresql_cannot_hold_stops_no_job(replicas: list[SqlJobStore]) -> None:
    store = replicas[0]
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="h")
    attempt = attempt_of(job, submitted_at=NOW, message="died\x00")
    store.update_job(replace(job, message="a\x00b", current_attempt_id=attempt.id), attempt=attempt)
    store.append_events(attempt.id, batch(Note(time=NOW, message="c\x00d")), NOW)
    assert store.get_job(job.id).message == "a\ufffdb"
    assert store.list_timeline(job.id)[-1].message == "c\ufffdd"
    with pytest.raises(RecordRefused):
        store.append_events(attempt.id, batch(metrics(1, **{"a\x00": 1.0}), first_seq=1), NOW)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_url_opens_the_database(
    postgresql: PostgresqlServer, scheme: str
) -> None:
    url = postgresql.migrated_database().replace("postgresql+psycopg", scheme)
    store = SqlJobStore.open(url)
    assert store.ping()["database"] == "postgresql"
    store.close()

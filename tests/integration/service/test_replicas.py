"""Several replicas of the service on one database: they share jobs, the queue and webhooks."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random

import pytest
from psycopg.errors import DeadlockDetected, SerializationFailure
from sqlalchemy import text

from service.backends.fake import FakeBackend, Script
from service.client.client import ShardloomClient
from service.db.engine import newest_revision
from service.db.jobs import JobStore
from service.db.projects import ProjectStore
from service.db.webhooks import WebhookStore
from service.domain.lifecycle import finish
from service.domain.models import EndReason, Job, JobStatus, Project
from service.domain.webhooks import Answer, DeliveryState, after_try
from service.errors import RecordRefused, StaleVersion, StoreUnavailable
from service.observability.metrics import ServiceMetrics
from service.scheduler.runner import SchedulerRunner
from service.settings import Settings
from tests.harness.builders import (
    NOW,
    attempt_of,
    batch,
    metrics,
    queued_job,
    spec_document,
    webhook,
)
from tests.harness.databases import PostgresqlServer, store_attempt, store_job
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, scaled, wait_for
from trainer.layout.hosts import HostFacts
from trainer.protocol.events import Note

NUM_REPLICAS = 3
NUM_QUEUES, NUM_CPUS = 4, 12
NUM_SHARED_JOBS, LEASE_S, WAIT_S = 12, 2.0, 120.0
NUM_DELIVERIES, NUM_SENDERS = 60, 4
_barrier: Barrier


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shardloom.db'}"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.empty_database()


@pytest.fixture
def replicas(postgresql: PostgresqlServer) -> Iterator[list[JobStore]]:
    """The stores of replicas on one PostgreSQL database."""
    url = postgresql.migrated_database()
    opened = [JobStore.open(url) for _ in range(NUM_REPLICAS)]
    yield opened
    for store in opened:
        store.close()


def _set_barrier(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _open_together(database_url: str) -> object:
    _barrier.wait(scaled(60))
    store = JobStore.open(database_url)
    try:
        return store.ping()["migration"]
    finally:
        store.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Those of the replicas, which take seconds to start."""
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(NUM_REPLICAS)
    with ProcessPoolExecutor(
        NUM_REPLICAS, spawn, initializer=_set_barrier, initargs=(barrier,)
    ) as pool:
        yield pool


def test_replicas_that_start_together_migrate_once(
    processes: ProcessPoolExecutor, database_url: str
) -> None:
    found = list(processes.map(_open_together, [database_url] * NUM_REPLICAS))
    assert found == [newest_revision()] * NUM_REPLICAS


def _at_once(calls: list[Callable[[], object]]) -> list[object]:
    """The results of calls that begin together, or what they raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait(scaled(60))
        try:
            return call()
        except (StaleVersion, StoreUnavailable) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_one_key_makes_one_job_however_many_ask_at_once(replicas: list[JobStore]) -> None:
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
    assert len(replicas[0].list_jobs(limit=50)[0]) == 20


def test_one_of_those_who_write_a_version_wins(replicas: list[JobStore]) -> None:
    job = store_job(replicas[0])
    for _ in range(20):
        calls = [lambda store=store, job=job: store.update_job(job) for store in replicas]
        results = _at_once(calls)
        assert sorted(type(result).__name__ for result in results) == [
            "Job",
            "StaleVersion",
            "StaleVersion",
        ]
        job = replicas[0].get_job(job.id)


def test_no_two_replicas_lease_a_job_at_once(replicas: list[JobStore]) -> None:
    made = [
        store_job(replicas[0], replace(queued_job(now=NOW + number), status=JobStatus.RUNNING))
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


def test_a_batch_that_reaches_several_replicas_is_taken_once(replicas: list[JobStore]) -> None:
    job, attempt = store_attempt(replicas[0])
    for first in range(0, 100, 10):
        notes = [Note(time=NOW, message=str(number)) for number in range(first, first + 10)]
        part = batch(*notes, metrics(first, train_loss=1.0), first_seq=first // 10 * 11)
        _at_once([lambda s=s, part=part: s.append_events(attempt.id, part, NOW) for s in replicas])
    lines = replicas[0].list_timeline(job.id, limit=1000, kinds=["note"])
    assert [line.message for line in lines] == [str(number) for number in range(100)]
    assert len(replicas[0].metric_points(job.id, "train/loss")) == 10


def test_a_server_that_was_restarted_is_used_again(
    postgresql: PostgresqlServer, replicas: list[JobStore]
) -> None:
    store = replicas[0]
    ServiceMetrics().watch(store.engine)
    job = store_job(store)
    url = store.engine.url.render_as_string(hide_password=False)
    with pytest.raises(StoreUnavailable), store.write() as connection:
        connection.execute(text("UPDATE jobs SET message = 'half done'"))
        postgresql.hang_up(url)
        connection.execute(text("SELECT 1"))
    # A transaction that was cut off left nothing, and the next one finds a new connection.
    assert store.get_job(job.id) == job
    postgresql.hang_up(url)
    assert store.update_job(job).version == job.version + 1


@pytest.mark.parametrize(("num_ties", "is_written"), [(3, True), (4, False)])
def test_a_write_that_the_database_undid_is_tried_again(
    replicas: list[JobStore], monkeypatch: pytest.MonkeyPatch, num_ties: int, is_written: bool
) -> None:
    store = replicas[0]
    job = store_job(store)
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
        with pytest.raises(StoreUnavailable, match="kept undoing"):
            store.update_job(job)
    assert replicas[1].get_job(job.id).version == job.version + is_written


def test_a_server_that_is_away_is_said_to_be(postgresql: PostgresqlServer) -> None:
    url = postgresql.empty_database().replace("host=", "host=/nowhere")
    with pytest.raises(StoreUnavailable, match="SHARDLOOM_DATABASE_URL"):
        JobStore.open(url)


def test_text_that_postgresql_cannot_hold_stops_no_job(replicas: list[JobStore]) -> None:
    store = replicas[0]
    job = store_job(store)
    attempt = attempt_of(job, submitted_at=NOW, message="died\x00")
    store.update_job(replace(job, message="a\x00b", current_attempt_id=attempt.id), attempt=attempt)
    store.append_events(attempt.id, batch(Note(time=NOW, message="c\x00d")), NOW)
    assert store.get_job(job.id).message == "a\ufffdb"
    assert store.list_timeline(job.id)[-1].message == "c\ufffdd"
    # As no reader of records would let it through.
    unwritable = metrics(1).model_copy(update={"values": {"a\x00": 1.0}})
    with pytest.raises(RecordRefused):
        store.append_events(
            attempt.id,
            batch(metrics(1), first_seq=1).model_copy(update={"events": [unwritable]}),
            NOW,
        )


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_a_url_opens_the_database(
    postgresql: PostgresqlServer, scheme: str
) -> None:
    url = postgresql.migrated_database().replace("postgresql+psycopg", scheme)
    store = JobStore.open(url)
    assert store.ping()["database"] == "postgresql"
    store.close()


# ---- the queue


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_replicas_give_room_away_once_and_keep_to_quotas(
    postgresql: PostgresqlServer, tmp_path: Path, seed: int
) -> None:
    url = postgresql.migrated_database()
    stores = [JobStore.open(url) for _ in range(NUM_QUEUES)]
    random = Random(seed)
    backend = FakeBackend(tmp_path / "fake")
    backend.set_hosts(HostFacts("h0", NUM_CPUS, 0, 1 << 33))
    settings = Settings(home=tmp_path, backend="fake")
    keepers = [
        SchedulerRunner(
            store,
            backend,
            settings.model_copy(update={"replica_id": f"replica-{n}"}),
            lambda: NOW,
            ServiceMetrics(),
        )
        for n, store in enumerate(stores)
    ]
    ProjectStore(stores[0].engine).put(Project("ads", max_workers=4), NOW)
    for _ in range(20):
        project = random.choice(["ads", "default"])
        job = queued_job(project=project, priority=random.randrange(2), preemptible=False)
        job = replace(job, project=project, priority=job.spec.priority)
        store_job(stores[0], job)
    num_ended = 0
    with ThreadPoolExecutor(NUM_QUEUES) as pool:
        while num_ended < 20:
            list(pool.map(SchedulerRunner.admit, keepers))
            live = stores[0].list_live_jobs()
            running = [job for job in live if job.status is JobStatus.STARTING]
            held = [(job.project, job.queue_note.workers or 0) for job in running]
            assert sum(workers for _, workers in held) <= NUM_CPUS
            assert sum(workers for project, workers in held if project == "ads") <= 4
            assert running, "somebody could have started"
            job = random.choice(running)
            ended = finish(job, EndReason.COMPLETED, "done", NOW)
            stores[0].update_job(ended.job)
            num_ended += 1
    for store in stores:
        store.close()


# ---- processes


def test_jobs_of_a_service_that_is_killed_are_finished_by_the_other(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    settings = {
        "SHARDLOOM_DATABASE_URL": postgresql.empty_database(),
        "SHARDLOOM_LEASE_S": str(scaled(LEASE_S)),
    }
    first, second = (ServiceProcess(tmp_path, free_port(), settings) for _ in range(2))
    first.cluster.play("default", Script(("pending", *["running"] * 10, "succeeded")))
    with first, second, ShardloomClient(first.url) as one, ShardloomClient(second.url) as other:
        clients = [one, other] * (NUM_SHARED_JOBS // 2)
        jobs = [
            client.submit(spec_document(name=f"job{number}"), idempotency_key=f"key{number}")
            for number, client in enumerate(clients)
        ]
        # Then one service is in the midst of its work.
        wait_for(lambda: any(other.attempts(job.id) for job in jobs), "an attempt", WAIT_S)
        first.kill()
        ended = [other.wait(job.id, timeout_s=scaled(WAIT_S), poll_s=0.1) for job in jobs]
    assert {job.status for job in ended} == {JobStatus.SUCCEEDED}
    cluster = first.cluster
    assert cluster.attempt_ids() == sorted(f"{job.id}-a0" for job in jobs)
    assert all(cluster.record(each).num_stops == 0 for each in cluster.attempt_ids())


# ---- webhooks


def _drain(url: str, start: threading.Barrier) -> list[int]:
    """Claim and deliver as a replica does, until nothing is due; returns what was claimed."""
    store = JobStore.open(url)
    outbox, claimed = WebhookStore(store.engine), list[int]()
    start.wait()
    while found := outbox.claim(NOW, claim_s=60.0):
        for each in found:
            claimed.append(each.delivery.id)
            outbox.settle(each.delivery.id, after_try(1, Answer(200), NOW, 0.5), NOW)
    store.close()
    return claimed


def test_each_delivery_is_claimed_by_one_replica(database_url: str) -> None:
    store = JobStore.open(database_url)
    outbox, hooks = WebhookStore(store.engine), [webhook(project="*") for _ in range(3)]
    for hook in hooks:
        outbox.create(hook)
    for _ in range(NUM_DELIVERIES):
        store_job(store)
    start = threading.Barrier(NUM_SENDERS)
    with ThreadPoolExecutor(NUM_SENDERS) as pool:
        rounds = [pool.submit(_drain, database_url, start) for _ in range(NUM_SENDERS)]
        counts = Counter(each for found in rounds for each in found.result())
    # A replica may find all that is due locked by others, and stop early; one goes on.
    leftover = _drain(database_url, threading.Barrier(1))
    counts.update(leftover)
    assert sorted(counts.values()) == [1] * NUM_DELIVERIES * len(hooks)
    for hook in hooks:
        found = outbox.list_deliveries(hook.id, limit=500)
        assert {each.state for each in found} == {DeliveryState.DELIVERED}
    store.close()

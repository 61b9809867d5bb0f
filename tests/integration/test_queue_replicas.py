"""The queue of several replicas on one PostgreSQL: room is given away once, quotas hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from service.backends.base import HostFacts
from service.backends.fake import FakeBackend
from service.domain import EndReason, JobStatus, QueueNote
from service.lifecycle import finish
from service.projects import Project
from service.queue_keeper import QueueKeeper
from service.settings import Settings
from service.store.projects import Locks, ProjectStore
from service.store.sql import SqlJobStore
from tests.integration.postgresql import PostgresqlServer
from tests.unit.service.builders import NOW, queued_job

NUM_REPLICAS, NUM_CPUS = 4, 12


@pytest.mark.parametrize("seed", range(3))
def test_replicas_give_room_away_once_and_keep_to_quotas(
    postgresql: PostgresqlServer, tmp_path: Path, seed: int
) -> None:
    url = postgresql.migrated_database()
    stores = [SqlJobStore.open(url) for _ in range(NUM_REPLICAS)]
    random = Random(seed)
    backend = FakeBackend(tmp_path / "fake")
    backend.set_hosts(HostFacts("h0", NUM_CPUS, 0, 1 << 33))
    settings = Settings(home=tmp_path, backend="fake")
    keepers = [_keeper(store, n, backend, settings) for n, store in enumerate(stores)]
    ProjectStore(stores[0].engine).put(Project("ads", max_workers=4), NOW)
    for _ in range(20):
        project = random.choice(["ads", "default"])
        job = queued_job(project=project, priority=random.randrange(2), preemptible=False)
        job = replace(job, project=project, priority=job.spec.priority)
        stores[0].create_job(job, idempotency_key=None, request_hash="")
    num_ended = 0
    with ThreadPoolExecutor(NUM_REPLICAS) as pool:
        while num_ended < 20:
            list(pool.map(QueueKeeper.admit, keepers))
            live = stores[0].list_live_jobs()
            running = [job for job in live if job.status is JobStatus.STARTING]
            held = [(job.project, QueueNote.of(job).workers or 0) for job in running]
            assert sum(workers for _, workers in held) <= NUM_CPUS
            assert sum(workers for project, workers in held if project == "ads") <= 4
            assert running, "somebody could have started"
            job = random.choice(running)
            ended = finish(job, EndReason.COMPLETED, "done", NOW)
            stores[0].update_job(ended.job)
            num_ended += 1
    for store in stores:
        store.close()


def _keeper(
    store: SqlJobStore, number: int, backend: FakeBackend, settings: Settings
) -> QueueKeeper:
    projects, locks = ProjectStore(store.engine), Locks(store.engine, f"replica-{number}")
    return QueueKeeper(store, projects, locks, backend, settings, lambda: NOW)

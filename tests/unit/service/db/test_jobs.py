"""The SQL store: compare-and-set, fencing, migrations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import RowMapping, Select

from service.db.engine import migrate, open_engine
from service.db.jobs import JobStore
from service.db.tables import metadata
from service.domain.models import EndReason, JobStatus
from service.errors import InvalidRequest, StaleVersion, StoreUnavailable
from service.jobs.actions import request_drain
from service.reconciler.submission import plan_attempt
from service.settings import Settings
from tests.harness.builders import (
    NOW,
    attempt_ended,
    batch,
    checkpoint,
    layout_chosen,
    metrics,
    progress,
    workers_lost,
    workers_started,
)
from tests.harness.databases import store_attempt
from tests.harness.service import replace_attempt
from trainer.protocol.events import CheckpointDeleted

pytestmark = pytest.mark.every_database


def test_busy_training_never_makes_a_decision_stale(store: JobStore) -> None:
    job, attempt = store_attempt(store)
    told = batch(metrics(3, train_loss=0.1), progress(3, eta_s=math.nan))
    store.append_events(attempt.id, told, NOW)
    written = store.update_job(replace(job, message="decided"))
    read = store.get_job(job.id)
    assert read.version == written.version
    assert (read.progress.step, read.progress.rows, read.progress.eta_s) == (3, 192, None)
    assert read.latest_metrics == {"train/loss": 0.1}


def test_a_reported_end_makes_an_older_decision_stale(store: JobStore) -> None:
    job, attempt = store_attempt(store)
    store.append_events(attempt.id, batch(workers_lost(), attempt_ended("data_error")), NOW + 1)
    with pytest.raises(StaleVersion):
        store.update_job(job, attempt=attempt)
    read = store.get_attempt(attempt.id)
    assert read.num_worker_failures == 1
    assert (read.reported_end.reason, read.reported_end.time) == (EndReason.DATA_ERROR, NOW + 1)


def test_an_attempt_that_was_replaced_no_longer_steers(store: JobStore) -> None:
    job, old = store_attempt(store)
    replace_attempt(store, job.id)
    ended = store.get_attempt(old.id)
    store.append_events(f"{job.id}-a1", batch(metrics(5, train_loss=0.5)), NOW)
    late = batch(workers_started(), metrics(5, train_loss=9.0), attempt_ended("data_error"))
    store.append_events(old.id, late, NOW)
    read = store.get_job(job.id)
    assert read.status is JobStatus.STARTING
    assert read.latest_metrics == {"train/loss": 0.5}
    assert store.get_attempt(old.id) == ended
    assert [point.value for point in store.metric_points(job.id, "train/loss")] == [0.5]


def test_one_checkpoint_is_best_and_deleted_ones_are_gone(store: JobStore) -> None:
    job, attempt = store_attempt(store)
    gone = CheckpointDeleted(time=NOW, step=1, path=checkpoint(1).path)
    records = [checkpoint(1), checkpoint(2, is_best=True), checkpoint(3, is_best=True), gone]
    store.append_events(attempt.id, batch(*records), NOW)
    found = [(c.step, c.is_best) for c in store.list_checkpoints(job.id)]
    assert found == [(2, False), (3, True)]


def test_no_flood_of_records_is_read_at_once(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, attempt = store_attempt(store)
    named = {f"m{number}": 0.0 for number in range(300)}
    saved = [checkpoint(step) for step in range(2100)]
    saved[7] = saved[7].model_copy(update={"is_best": True})
    saved[-1] = saved[-1].model_copy(update={"metrics": named})
    flood = [*saved, *[layout_chosen()] * 600, *[workers_started()] * 200]
    for at in range(0, len(flood), 1000):
        store.append_events(attempt.id, batch(*flood[at : at + 1000], first_seq=at), NOW)
    kept = store.list_checkpoints(job.id)
    assert (len(kept), kept[0].step, kept[1].step, kept[-1].step) == (2000, 7, 101, 2099)
    assert len(kept[-1].metrics) == 200
    replace_attempt(store, job.id)
    read, rows = [], store.rows

    def counted(query: Select[Any]) -> Sequence[RowMapping]:
        read.append(len(rows(query)))
        return rows(query)

    monkeypatch.setattr(store, "rows", counted)
    plan_attempt(store, *store.get_job_and_attempt(job.id), NOW)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="its hosts"):
        request_drain(store, Settings(home=tmp_path), job.id, "nowhere")
    assert max(read) == 500


def test_a_commit_reaches_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'shardloom.db'}")
    with engine.connect() as connection:
        full = connection.exec_driver_sql("PRAGMA synchronous").scalar()
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        keys = connection.exec_driver_sql("PRAGMA foreign_keys").scalar()
    engine.dispose()
    assert (full, mode, keys) == (2, "wal", 1)


def test_models_and_migrations_agree(store: JobStore) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_ping_names_a_missing_migration(database_url: str) -> None:
    store = JobStore(open_engine(database_url))
    with pytest.raises(StoreUnavailable, match="migration None"):
        store.ping()
    migrate(store.engine)
    assert store.ping()["database"] == store.engine.dialect.name
    store.close()


def test_what_cannot_be_opened_or_is_no_database_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="SHARDLOOM_DATABASE_URL"):
        JobStore.open(f"sqlite:///{tmp_path}")
    path = tmp_path / "shardloom.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnavailable, match="not a database"):
        JobStore.open(f"sqlite:///{path}")


def test_a_url_that_names_no_database_is_explained() -> None:
    for url in ("foo", "sqlite://", "sqlite:///:memory:", "nosuch://u:hunter2@host/name"):
        with pytest.raises(StoreUnavailable, match="SHARDLOOM_DATABASE_URL reads as in") as caught:
            open_engine(url)
        assert "hunter2" not in str(caught.value)

"""Migrations of stored jobs: what an earlier version wrote can still be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Connection, Table, insert, inspect, select, update

from service.domain import EndReason, Job, ReportedEnd
from service.store import rows
from service.store.engine import migrate, migration_config, open_engine
from service.store.sql import SqlJobStore
from service.store.tables import job_progress, jobs
from tests.unit.service.builders import (
    NOW,
    attempt_of,
    batch,
    membership_changed,
    queued_job,
)
from trainer.spec import SpecError, validate_spec

# What the first version kept of a spec that said nothing about syncs.
FIRST_SYNC = {
    "every_steps": 1,
    "optimizer_state": "every",
    "mode": "full",
    "dtype": "fp32",
    "overlap": False,
}


def _insert_known(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert the columns that the table has at the revision of the database."""
    known = {column["name"] for column in inspect(connection).get_columns(table.name)}
    connection.execute(insert(table), {name: values[name] for name in values if name in known})


def _insert_first_version(connection: Connection, job: Job) -> None:
    """Store a job whose `parallelism` and `optimizer` hold what the first version knew."""
    _insert_known(connection, jobs, rows.job_values(job))
    _insert_known(connection, job_progress, rows.progress_values(job))
    spec = job.spec.model_dump(mode="json")
    known = ("workers", "shard_group_size", "placement", "moment_scale", "survive")
    spec["parallelism"] = {name: spec["parallelism"][name] for name in known}
    spec["parallelism"]["sync"] = FIRST_SYNC
    spec["optimizer"]["schedule"] = None
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(spec=spec))


def test_jobs_of_the_first_version_are_still_shown(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shardloom.db'}"
    single = queued_job(name="single", parallelism={"workers": 2, "shard_group_size": 2})
    double = queued_job(name="double")
    engine = open_engine(url)
    migrate(engine, "0001")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        for job in (single, double):
            _insert_first_version(connection, job)
    engine.dispose()
    store = SqlJobStore.open(url)
    assert {job.name for job in store.list_jobs()[0]} == {"single", "double"}
    assert store.get_job(single.id).spec == single.spec
    # A job that was submitted when every sync was full goes on as it began.
    assert store.get_job(double.id).spec.parallelism.sync.mode == "full"
    store.close()


def _renamed(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document with another name of its first table."""
    document["embedding_tables"][0]["name"] = name
    for feature in document["features"]:
        if feature.get("table"):
            feature["table"] = name
    return document


def test_a_stored_job_whose_table_newer_checks_refuse_is_still_read(tmp_path: Path) -> None:
    store = SqlJobStore.open(f"sqlite:///{tmp_path / 'shardloom.db'}")
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    document = _renamed(job.spec.model_dump(mode="json"), "values")
    with pytest.raises(SpecError, match="embedding_tables"):
        validate_spec(document)
    engine = open_engine(f"sqlite:///{tmp_path / 'shardloom.db'}")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        connection.execute(update(jobs).values(spec=document))
    engine.dispose()
    assert store.get_job(job.id).spec.embedding_tables[0].name == "values"
    assert [each.id for each in store.list_jobs()[0]] == [job.id]
    store.close()


def _downgraded_reasons(url: str, reason: EndReason, revision: str) -> set[str]:
    """The reasons that an earlier version finds of a job and an attempt that ended for `reason`."""
    store = SqlJobStore.open(url)
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    ended = attempt_of(
        job, end_reason=reason, reported_end=ReportedEnd(reason, "", NOW, {"signal": "9"})
    )
    store.update_job(replace(job, reason=reason), attempt=ended)
    store.close()
    engine = open_engine(url)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        command.downgrade(migration_config(connection), revision)
        of_job = connection.exec_driver_sql("select reason from jobs").scalars()
        of_attempt = connection.exec_driver_sql("select end_reason, reported_reason from attempts")
        found = {*of_job, *of_attempt.one()}
    engine.dispose()
    return found


@pytest.mark.parametrize(
    ("reason", "revision", "former"),
    [
        (EndReason.DIVERGED, "0001", "training_error"),
        (EndReason.DIVERGED, "0002", "diverged"),
        (EndReason.HANG, "0002", "workers_lost"),
        (EndReason.DEVICE_OOM, "0002", "workers_lost"),
        (EndReason.HOST_OOM, "0002", "workers_lost"),
        (EndReason.HOST_LOST, "0002", "workers_lost"),
        (EndReason.PREEMPTED, "0002", "workers_lost"),
        (EndReason.NO_ROOM, "0002", "workers_lost"),
        (EndReason.NON_FINITE, "0002", "training_error"),
        (EndReason.RUN_IN_USE, "0002", "storage_error"),
    ],
)
def test_an_earlier_version_finds_only_reasons_that_it_knows(
    tmp_path: Path, reason: EndReason, revision: str, former: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shardloom.db'}"
    assert _downgraded_reasons(url, reason, revision) == {former}


def test_jobs_and_attempts_outlive_the_way_back_and_forth(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shardloom.db'}"
    store = SqlJobStore.open(url)
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    attempt = attempt_of(job)
    report = ReportedEnd(EndReason.HANG, "rank 1 hangs", NOW, {"host": "127.0.0.3"})
    store.update_job(replace(job, current_attempt_id=attempt.id), attempt=attempt)
    store.append_events(attempt.id, batch(membership_changed()), NOW)
    held = store.get_job(job.id)
    store.update_job(held, attempt=replace(attempt, reported_end=report))
    assert held.membership
    engine = open_engine(url)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        command.downgrade(migration_config(connection), "0002")
    migrate(engine)
    engine.dispose()
    back, (ended,) = store.get_job(job.id), store.list_attempts(job.id)
    assert (back.spec, back.membership) == (job.spec, None)
    assert ended.reported_end == ReportedEnd(EndReason.WORKERS_LOST, "rank 1 hangs", NOW)
    store.close()


def test_a_migrated_spec_is_still_json_text(tmp_path: Path) -> None:
    job = queued_job(parallelism={"workers": {"min": 2, "max": 2}, "shard_group_size": 2})
    engine = open_engine(f"sqlite:///{tmp_path / 'shardloom.db'}")
    migrate(engine, "0001")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        _insert_first_version(connection, job)
    migrate(engine)
    with engine.connect() as connection:
        text = connection.exec_driver_sql("select spec from jobs").scalar_one()
        assert connection.execute(select(jobs.c.spec)).scalar_one() == json.loads(text)
    assert "sync" not in json.loads(text)["parallelism"]
    engine.dispose()

"""Migrations of stored jobs: what an earlier version wrote can still be read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, update

from service.domain import EndReason, Job, ReportedEnd
from service.store import rows
from service.store.engine import migrate, migration_config, open_engine
from service.store.sql import SqlJobStore
from service.store.tables import job_progress, jobs, metric_names, metric_points
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


def test_jobs_of_the_first_version_are_still_shown(database_url: str) -> None:
    single = queued_job(name="single", parallelism={"workers": 2, "shard_group_size": 2})
    double = queued_job(name="double")
    engine = open_engine(database_url)
    migrate(engine, "0001")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        for job in (single, double):
            _insert_first_version(connection, job)
    engine.dispose()
    store = SqlJobStore.open(database_url)
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


def test_a_stored_job_whose_table_newer_checks_refuse_is_still_read(database_url: str) -> None:
    store = SqlJobStore.open(database_url)
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    document = _renamed(job.spec.model_dump(mode="json"), "values")
    with pytest.raises(SpecError, match="embedding_tables"):
        validate_spec(document)
    engine = open_engine(database_url)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        connection.execute(update(jobs).values(spec=document))
    engine.dispose()
    assert store.get_job(job.id).spec.embedding_tables[0].name == "values"
    assert [each.id for each in store.list_jobs()[0]] == [job.id]
    store.close()


def _downgraded_reasons(database_url: str, reason: EndReason, revision: str) -> set[str]:
    """The reasons that an earlier version finds of a job and an attempt that ended for `reason`."""
    store = SqlJobStore.open(database_url)
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    ended = attempt_of(
        job, end_reason=reason, reported_end=ReportedEnd(reason, "", NOW, {"signal": "9"})
    )
    store.update_job(replace(job, reason=reason), attempt=ended)
    store.close()
    engine = open_engine(database_url)
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
    database_url: str, reason: EndReason, revision: str, former: str
) -> None:
    assert _downgraded_reasons(database_url, reason, revision) == {former}


def test_jobs_and_attempts_outlive_the_way_back_and_forth(database_url: str) -> None:
    store = SqlJobStore.open(database_url)
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    attempt = attempt_of(job)
    report = ReportedEnd(EndReason.HANG, "rank 1 hangs", NOW, {"host": "127.0.0.3"})
    store.update_job(replace(job, current_attempt_id=attempt.id), attempt=attempt)
    store.append_events(attempt.id, batch(membership_changed()), NOW)
    held = store.get_job(job.id)
    store.update_job(held, attempt=replace(attempt, reported_end=report))
    assert held.membership
    engine = open_engine(database_url)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        command.downgrade(migration_config(connection), "0002")
    migrate(engine)
    engine.dispose()
    back, (ended,) = store.get_job(job.id), store.list_attempts(job.id)
    assert (back.spec, back.membership) == (job.spec, None)
    assert ended.reported_end == ReportedEnd(EndReason.WORKERS_LOST, "rank 1 hangs", NOW)
    store.close()


def test_a_migrated_spec_is_still_json_text(database_url: str) -> None:
    job = queued_job(parallelism={"workers": {"min": 2, "max": 2}, "shard_group_size": 2})
    engine = open_engine(database_url)
    migrate(engine, "0001")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        _insert_first_version(connection, job)
    migrate(engine)
    with engine.connect() as connection:
        text = connection.exec_driver_sql("select spec from jobs").scalar_one()
        assert connection.execute(select(jobs.c.spec)).scalar_one() == json.loads(text)
    assert "sync" not in json.loads(text)["parallelism"]
    engine.dispose()


# ---- rows of every table, up and down

REVISIONS = [
    script.revision
    for script in reversed(list(ScriptDirectory.from_config(migration_config()).walk_revisions()))
]
_JSON = {"spec", "roles", "kinds", "metrics", "data", "latest_metrics", "labels", "membership"}


def _row(table: Table, spec: dict[str, Any]) -> dict[str, Any]:
    """A value in every column of a table, the same key wherever a table refers to another."""
    values: dict[str, Any] = {}
    for column in table.columns:
        kind = column.type.python_type
        if column.name == "spec":
            values[column.name] = json.dumps(spec)
        elif kind is str:
            values[column.name] = "{}" if column.name in _JSON else "x"
        else:
            values[column.name] = kind(1)
    return values


def _tables(connection: Connection) -> list[Table]:
    """Tables as they are in the database, those that others refer to first."""
    found = MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if table.name != "alembic_version"]


def _rows(connection: Connection, tables: list[Table]) -> dict[str, list[Any]]:
    return {table.name: list(connection.execute(select(table)).all()) for table in tables}


@pytest.mark.parametrize("revision", REVISIONS)
def test_rows_of_every_table_come_through_the_way_up_and_down(
    database_url: str, revision: str
) -> None:
    engine = open_engine(database_url)
    migrate(engine, revision)
    spec = queued_job().spec.model_dump(mode="json")
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        tables = _tables(connection)
        for table in tables:
            connection.execute(insert(table), _row(table, spec))
        before = _rows(connection, tables)
    migrate(engine)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        grown = _tables(connection)
        kept = [grown_from for grown_from in tables if grown_from.name in {t.name for t in grown}]
        assert _rows(connection, kept) == before
        command.downgrade(migration_config(connection), revision)
        assert [table.name for table in _tables(connection)] == [table.name for table in tables]
        assert _rows(connection, tables) == before
    engine.dispose()


def test_the_fourth_version_finds_labels_and_bounds_in_what_is_stored(database_url: str) -> None:
    engine = open_engine(database_url)
    migrate(engine, "0003")
    job = queued_job(labels={"team": "ads"})
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        _insert_known(connection, jobs, rows.job_values(job))
        _insert_known(connection, job_progress, rows.progress_values(job))
        name = {"id": 1, "job_id": job.id, "name": "loss"}
        _insert_known(connection, metric_names, name)
        for step in range(3):
            point = {"name_id": 1, "step": step, "value": 1.0, "time": NOW + step}
            connection.execute(insert(metric_points), {**point, "attempt_index": 0})
    migrate(engine)
    with engine.connect() as connection:
        bounds = connection.execute(select(metric_names.c.num_points, metric_names.c.oldest_at))
        assert bounds.one() == (3, NOW)
    engine.dispose()
    store = SqlJobStore.open(database_url)
    assert [found.id for found in store.list_jobs(labels={"team": "ads"})[0]] == [job.id]
    assert store.get_job(job.id).queued_at == job.created_at
    store.close()

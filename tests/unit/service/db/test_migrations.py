"""Migrations of stored jobs, what an earlier version wrote, and the command that migrates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, update

from service.db import rows
from service.db.engine import migrate, migration_config, newest_revision, open_engine
from service.db.jobs import JobStore
from service.db.migrate import UNAVAILABLE, UP_TO_DATE, main
from service.db.tables import job_progress, jobs, metric_names, metric_points
from service.domain.job_filter import JobFilter
from service.domain.models import Job
from tests.harness.builders import NOW, queued_job
from tests.harness.databases import store_job
from tests.harness.service import shardloom
from trainer.spec import validate_spec
from trainer.spec.base import SpecError

pytestmark = pytest.mark.every_database

# What the first version kept of a spec that said nothing about syncs.
FIRST_SYNC = {
    "every_steps": 1,
    "optimizer_state": "every",
    "mode": "full",
    "dtype": "fp32",
    "overlap": False,
}


@contextmanager
def _writing(database_url: str, revision: str | None = None) -> Iterator[Connection]:
    """A transaction that may write, after a migration to `revision` where one is given."""
    engine = open_engine(database_url)
    if revision is not None:
        migrate(engine, revision)
    with engine.connect().execution_options(is_write=True) as connection, connection.begin():
        yield connection
    engine.dispose()


def _insert_known(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Insert the columns that the table has at the revision of the database."""
    known = {column["name"] for column in inspect(connection).get_columns(table.name)}
    connection.execute(insert(table), {name: values[name] for name in values if name in known})


def _insert_first_version(connection: Connection, job: Job) -> None:
    """Store a job whose `parallelism` and `optimizer` hold what the first version knew."""
    spec = job.spec.model_dump(mode="json")
    _insert_known(connection, jobs, {**rows.job_values(job), "spec": spec})
    _insert_known(connection, job_progress, rows.progress_values(job))
    known = ("workers", "shard_group_size", "placement", "moment_scale", "survive")
    spec["parallelism"] = {name: spec["parallelism"][name] for name in known}
    spec["parallelism"]["sync"] = FIRST_SYNC
    spec["optimizer"]["schedule"] = None
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(spec=spec))


def test_jobs_of_the_first_version_are_still_shown(database_url: str) -> None:
    single = queued_job(name="single", parallelism={"workers": 2, "shard_group_size": 2})
    double = queued_job(name="double")
    with _writing(database_url, "0001") as connection:
        for job in (single, double):
            _insert_first_version(connection, job)
    store = JobStore.open(database_url)
    assert {job.name for job in store.list_jobs()[0]} == {"single", "double"}
    assert store.get_job(single.id).spec == single.spec
    # A job that was submitted when every sync was full goes on as it began.
    assert store.get_job(double.id).spec.parallelism.sync.mode == "full"
    with store.engine.connect() as connection:
        query = "select spec from jobs where name = 'single'"
        assert (
            "sync" not in json.loads(connection.exec_driver_sql(query).scalar_one())["parallelism"]
        )
    store.close()


def test_a_stored_job_whose_table_newer_checks_refuse_is_still_read(database_url: str) -> None:
    store = JobStore.open(database_url)
    job = store_job(store)
    document = job.spec.model_dump(mode="json")
    document["embedding_tables"][0]["name"] = document["features"][0]["table"] = "values"
    with pytest.raises(SpecError, match="embedding_tables"):
        validate_spec(document)
    with _writing(database_url) as connection:
        connection.execute(update(jobs).values(spec=document))
    assert store.get_job(job.id).spec.embedding_tables[0].name == "values"
    assert [each.id for each in store.list_jobs()[0]] == [job.id]
    store.close()


# What a version stored: a field that is new since then needs a default.
STORED_MEMBERSHIP: dict[str, Any] = {
    "attempt_id": "job-1-a0",
    "layout": {
        **{"world_size": 4, "shard_group_size": 2, "num_replicas": 2, "placement": "inter_host"},
        **{"failure_domain": "replica_group", "num_hosts": 2, "num_hosts_survived": 1},
        **{"memory_overhead_bytes": 1024, "sync_latency_s": None, "reason": "it fits"},
    },
    "members": [{"group": 0, "incarnation": 0, "hosts": ["a"], "standing": "current"}],
    "gone": [
        {
            **{"group": 1, "incarnation": 0, "hosts": ["b"], "time": 2.0},
            **{"reason": "host_lost", "message": ""},
        }
    ],
    "last_recovery": {
        **{"time": 2.0, "generation": 3, "cause": "host_lost"},
        **{"pause_s": 0.5, "syncs_lost": 1, "num_tries": 1},
    },
    "excluded_hosts": [{"host": "b", "num_failures": 3, "until": 9.0}],
    "prediction": {
        **{"cluster": "c", "samples_per_s": 1.0, "lookup_imbalance": 1.0},
        **{"step_s": {"lookup": 0.1}, "memory_bytes": {"tables": 1024}},
    },
}


def test_a_stored_membership_stays_readable(database_url: str) -> None:
    store = JobStore.open(database_url)
    job = store_job(store)
    with _writing(database_url) as connection:
        connection.execute(update(job_progress).values(membership=STORED_MEMBERSHIP))
    membership = store.get_job(job.id).membership
    assert membership is not None and membership.last_recovery is not None
    assert (membership.gone[0].hosts, membership.last_recovery.syncs_lost) == (("b",), 1)
    store.close()


# ---- rows of every table

REVISIONS = [
    script.revision
    for script in reversed(list(ScriptDirectory.from_config(migration_config()).walk_revisions()))
]
_JSON = {"spec", "roles", "kinds", "metrics", "data", "latest_metrics", "labels", "membership"}


def _row(table: Table, spec: dict[str, Any], number: int) -> dict[str, Any]:
    """A value in every column of a table, the same key wherever a table refers to another."""
    values: dict[str, Any] = {}
    for column in table.columns:
        kind = column.type.python_type
        if column.name == "spec":
            values[column.name] = json.dumps(spec)
        elif kind is str:
            values[column.name] = "{}" if column.name in _JSON else f"x{number}"
        else:
            values[column.name] = kind(number)
    return values


def _tables(connection: Connection) -> list[Table]:
    """Tables as they are in the database, those that others refer to first."""
    found = MetaData()
    found.reflect(connection)
    return [table for table in found.sorted_tables if table.name != "alembic_version"]


def _rows(connection: Connection, table: Table) -> list[Any]:
    return list(connection.execute(select(table)).all())


def test_rows_of_every_table_come_through_every_migration(database_url: str) -> None:
    spec = queued_job().spec.model_dump(mode="json")
    stages: list[dict[Table, list[Any]]] = []
    for number, revision in enumerate(REVISIONS, start=1):
        with _writing(database_url, revision) as connection:
            tables = _tables(connection)
            for table in tables:
                connection.execute(insert(table), _row(table, spec, number))
            stages.append({table: _rows(connection, table) for table in tables})
    with _writing(database_url) as connection:
        for num_later, held in enumerate(reversed(stages)):
            # What its columns held then they hold, beside one row for each later revision.
            for table, before in held.items():
                now = _rows(connection, table)
                assert all(row in now for row in before), table.name
                assert len(now) == len(before) + num_later, table.name


def test_the_fourth_version_finds_labels_and_bounds_in_what_is_stored(database_url: str) -> None:
    job = queued_job(labels={"team": "ads"})
    with _writing(database_url, "0003") as connection:
        spec = job.spec.model_dump(mode="json")
        _insert_known(connection, jobs, {**rows.job_values(job), "spec": spec})
        _insert_known(connection, job_progress, rows.progress_values(job))
        name = {"id": 1, "job_id": job.id, "name": "loss"}
        _insert_known(connection, metric_names, name)
        for step in range(3):
            point = {"name_id": 1, "step": step, "value": 1.0, "time": NOW + step}
            connection.execute(insert(metric_points), {**point, "attempt_index": 0})
    store = JobStore.open(database_url)
    with store.engine.connect() as connection:
        bounds = connection.execute(select(metric_names.c.num_points, metric_names.c.oldest_at))
        assert bounds.one() == (3, NOW)
    wanted = JobFilter(labels=[("team", "ads")])
    assert [found.id for found in store.list_jobs(wanted)[0]] == [job.id]
    assert store.get_job(job.id).queued_at == job.created_at
    store.close()


# ---- `shardloom migrate`


@pytest.fixture
def configured(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database that the settings name."""
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", database_url)
    return database_url


def test_a_migration_says_from_where_it_came_and_the_next_that_nothing_was_due(
    configured: str,
) -> None:
    with _writing(configured, "0001"):
        pass
    done = shardloom("migrate")
    assert done.exit_code == UP_TO_DATE
    assert f"from 0001 to {newest_revision()}" in done.output
    again = shardloom("migrate")
    assert (again.exit_code, "already" in again.output) == (UP_TO_DATE, True)


def test_a_database_of_a_newer_version_is_left_alone(
    configured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _writing(configured, "head") as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    assert main() == UNAVAILABLE
    told = capsys.readouterr().err
    assert "of another version of the service" in told and "9999" in told


def test_a_database_that_is_not_there_is_told_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://someone:hunter2@127.0.0.1:1/shardloom?connect_timeout=1"
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", url)
    assert main() == UNAVAILABLE
    told = capsys.readouterr().err
    assert "SHARDLOOM_DATABASE_URL" in told and "hunter2" not in told

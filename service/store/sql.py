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

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, Select, delete, insert, select, update
from sqlalchemy.exc import InterfaceError, OperationalError

from service.domain import Attempt, Checkpoint, Job, JobStatus, MetricPoint, TimelineEvent
from service.errors import (
    AttemptNotFound,
    IdempotencyConflict,
    JobNotFound,
    SequenceGap,
    StaleVersion,
    StoreUnavailable,
)
from service.store import metrics, rows
from service.store.engine import migrate, newest_revision, open_engine, stored_revision
from service.store.intake import Intake, fold
from service.store.tables import (
    attempts,
    checkpoints,
    idempotency_keys,
    job_progress,
    jobs,
    streams,
    timeline,
)
from service.store.upsert import insert_for
from trainer.events import CheckpointCommitted, CheckpointDeleted, EventAck, EventBatch

_LIVE = [status.value for status in JobStatus if not status.is_terminal]


class SqlJobStore:
    """Durable jobs in a SQL database; see `service.store.base` for the contract."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
            known = _job_of_key(connection, job.project, idempotency_key, request_hash)
            if known is not None:
                return _read_job(connection, known)
            connection.execute(insert(jobs), rows.job_values(job))
            connection.execute(insert(job_progress), rows.progress_values(job))
            if idempotency_key is not None:
                _keep_key(connection, job, idempotency_key, request_hash)
            _add_timeline(connection, [_submitted_line(job)])
        return job

    def get_job(self, job_id: str) -> Job:
        """Read a job; raises `JobNotFound`."""
        with self._read() as connection:
            return _read_job(connection, job_id)

    def list_jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 50,
        statuses: Sequence[JobStatus] = (),
        name: str | None = None,
    ) -> tuple[list[Job], str | None]:
        """Newest first; the cursor is the id of the last job of the page."""
        query = _select_jobs().order_by(jobs.c.id.desc()).limit(limit + 1)
        if after is not None:
            query = query.where(jobs.c.id < after)
        if statuses:
            query = query.where(jobs.c.status.in_([status.value for status in statuses]))
        if name is not None:
            query = query.where(jobs.c.name == name)
        with self._read() as connection:
            found = [rows.job_of(row) for row in connection.execute(query).mappings()]
        page = found[:limit]
        return page, page[-1].id if len(found) > limit else None

    def list_live_jobs(self) -> list[Job]:
        """Every job whose status is not terminal, oldest first."""
        query = _select_jobs().where(jobs.c.status.in_(_LIVE)).order_by(jobs.c.id)
        with self._read() as connection:
            return [rows.job_of(row) for row in connection.execute(query).mappings()]

    def update_job(
        self, job: Job, *, attempt: Attempt | None = None, timeline: Sequence[TimelineEvent] = ()
    ) -> Job:
        """Write a decision if nobody wrote since `job` was read; raises `StaleVersion`."""
        written = replace(job, version=job.version + 1)
        with self._write() as connection:
            _write_job(connection, written, expected_version=job.version)
            if attempt is not None:
                _write_attempt(connection, attempt)
            _add_timeline(connection, timeline)
        return written

    # ---- attempts and their records

    def get_attempt(self, attempt_id: str) -> Attempt:
        """Read an attempt; raises `AttemptNotFound`."""
        with self._read() as connection:
            return _read_attempt(connection, attempt_id)

    def list_attempts(self, job_id: str) -> list[Attempt]:
        """Attempts of a job in order."""
        query = select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.index)
        with self._read() as connection:
            return [rows.attempt_of(row) for row in connection.execute(query).mappings()]

    def append_events(self, attempt_id: str, batch: EventBatch, now: float) -> EventAck:
        """Take what is new in a batch; raises `SequenceGap` if records before it are missing."""
        with self._write() as connection:
            job, attempt = _lock(connection, attempt_id)
            next_seq = _next_seq(connection, attempt_id, batch.stream)
            if batch.first_seq > next_seq:
                raise SequenceGap(batch.stream, batch.first_seq, next_seq)
            fresh = batch.events[next_seq - batch.first_seq :]
            if fresh:
                next_seq += len(fresh)
                _save_intake(connection, job, attempt, fold(job, attempt, fresh, now))
                _move_stream(connection, attempt_id, batch.stream, next_seq)
        return EventAck(stream=batch.stream, next_seq=next_seq)

    def stream_positions(self, attempt_id: str) -> dict[str, int]:
        """`next_seq` of every stream of an attempt."""
        query = select(streams.c.stream, streams.c.next_seq)
        with self._read() as connection:
            found = connection.execute(query.where(streams.c.attempt_id == attempt_id))
            return {row.stream: row.next_seq for row in found}

    # ---- what a job left behind

    def list_timeline(
        self, job_id: str, *, after: int = 0, limit: int = 200
    ) -> list[TimelineEvent]:
        """Timeline lines with an id above `after`, in order."""
        query = select(timeline).where(timeline.c.job_id == job_id, timeline.c.id > after)
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
        except (OperationalError, InterfaceError) as error:
            raise StoreUnavailable(
                f"the database did not do its part ({error.orig}); is its disk full, or another "
                "process holding it?"
            ) from error


def _select_jobs() -> Select[Any]:
    return select(jobs, job_progress).join(job_progress, job_progress.c.job_id == jobs.c.id)


def _read_job(connection: Connection, job_id: str) -> Job:
    row = connection.execute(_select_jobs().where(jobs.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return rows.job_of(row)


def _read_attempt(connection: Connection, attempt_id: str) -> Attempt:
    query = select(attempts).where(attempts.c.id == attempt_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise AttemptNotFound(attempt_id)
    return rows.attempt_of(row)


def _job_of_key(
    connection: Connection, project: str, key: str | None, request_hash: str
) -> str | None:
    query = select(idempotency_keys.c.job_id, idempotency_keys.c.request_hash).where(
        idempotency_keys.c.project == project, idempotency_keys.c.key == key
    )
    found = connection.execute(query).one_or_none()
    if found is None or key is None:
        return None
    if found.request_hash != request_hash:
        raise IdempotencyConflict(key)
    return str(found.job_id)


def _keep_key(connection: Connection, job: Job, key: str, request_hash: str) -> None:
    values = {
        "project": job.project,
        "key": key,
        "request_hash": request_hash,
        "job_id": job.id,
    }
    connection.execute(insert(idempotency_keys), values)


def _submitted_line(job: Job) -> TimelineEvent:
    return TimelineEvent(
        id=0,
        job_id=job.id,
        attempt_id=None,
        time=job.created_at,
        kind="job_submitted",
        message=f"job '{job.name}' submitted",
        actor="user",
        data={},
    )


def _write_job(connection: Connection, job: Job, *, expected_version: int) -> None:
    unchanged = jobs.c.version == expected_version
    values = rows.job_values(job)
    # A spec never changes after submission, and is the one big column.
    del values["spec"]
    statement = update(jobs).where(jobs.c.id == job.id, unchanged).values(**values)
    if connection.execute(statement).rowcount != 1:
        raise StaleVersion(job.id, expected_version)


def _write_attempt(connection: Connection, attempt: Attempt) -> None:
    values = rows.attempt_values(attempt)
    statement = insert_for(connection, attempts).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def _add_timeline(connection: Connection, lines: Sequence[TimelineEvent]) -> None:
    if lines:
        connection.execute(insert(timeline), [rows.timeline_values(line) for line in lines])


def _lock(connection: Connection, attempt_id: str) -> tuple[Job, Attempt]:
    """Job and attempt with the job's row locked, so that ingest and decisions take turns."""
    job_id = _read_attempt(connection, attempt_id).job_id
    connection.execute(select(jobs.c.id).where(jobs.c.id == job_id).with_for_update())
    return _read_job(connection, job_id), _read_attempt(connection, attempt_id)


def _next_seq(connection: Connection, attempt_id: str, stream: str) -> int:
    query = select(streams.c.next_seq).where(
        streams.c.attempt_id == attempt_id, streams.c.stream == stream
    )
    return connection.execute(query).scalar_one_or_none() or 0


def _move_stream(connection: Connection, attempt_id: str, stream: str, next_seq: int) -> None:
    values = {"attempt_id": attempt_id, "stream": stream, "next_seq": next_seq}
    statement = insert_for(connection, streams).values(values)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["attempt_id", "stream"], set_={"next_seq": next_seq}
        )
    )


def _save_intake(connection: Connection, job: Job, attempt: Attempt, intake: Intake) -> None:
    before, after = _decision_part(job), _decision_part(intake.job)
    if before != after or attempt != intake.attempt:
        written = replace(intake.job, version=job.version + 1)
        _write_job(connection, written, expected_version=job.version)
        _write_attempt(connection, intake.attempt)
    if intake.job is not job:
        progress = rows.progress_values(intake.job)
        statement = update(job_progress).where(job_progress.c.job_id == job.id)
        connection.execute(statement.values(**progress))
    metrics.save_points(connection, job.id, attempt.index, intake.points)
    for change in intake.checkpoints:
        _change_checkpoint(connection, job.id, change)
    _add_timeline(connection, intake.timeline)


def _decision_part(job: Job) -> tuple[JobStatus, float | None]:
    return job.status, job.started_at


def _change_checkpoint(
    connection: Connection, job_id: str, change: CheckpointCommitted | CheckpointDeleted
) -> None:
    if isinstance(change, CheckpointDeleted):
        connection.execute(
            delete(checkpoints).where(
                checkpoints.c.job_id == job_id, checkpoints.c.path == change.path
            )
        )
        return
    if change.is_best:
        others = update(checkpoints).where(checkpoints.c.job_id == job_id)
        connection.execute(others.values(is_best=False))
    values = {
        "job_id": job_id,
        "path": change.path,
        "step": change.step,
        "size_bytes": change.size_bytes,
        "created_at": change.time,
        "is_best": change.is_best,
        "metrics": change.metrics,
    }
    statement = insert_for(connection, checkpoints).values(values)
    connection.execute(
        statement.on_conflict_do_update(index_elements=["job_id", "path"], set_=values)
    )

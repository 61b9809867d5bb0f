"""`JobStore`: jobs with all their records, and the leases by which replicas share live jobs.

The reconciler and the API write *decisions* with `update_job`, guarded by the job's version
(compare-and-set, `StaleVersion`). Ingest writes what a driver reports. What is reported often
(progress, latest metrics, points, checkpoints) lives in tables of its own and never raises the
version, so a busy job cannot starve the reconciler. What decisions depend on (status, start,
rewind, worker failures, the reported end) raises it, so a decision made without it is refused.
Readers read the job before its attempt; the job's version then covers both.

A lease keeps replicas from reconciling the same job twice; it is an optimisation. Two replicas that
do so all the same (clock skew, a slow machine) are kept apart by the job's version, and by the
attempt's id, which is the id of its submission. Queued and paused jobs are leased by nobody.

Every method raises `StoreUnavailable` if the database is away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Table,
    delete,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from service import errors
from service.db import queries, rows
from service.db.engine import (
    known_revisions,
    migrate,
    newest_revision,
    open_engine,
    repeated,
    stored_revision,
    upsert,
)
from service.db.metrics import MetricStore
from service.db.tables import (
    LIVE,
    attempts,
    checkpoints,
    job_secrets,
    jobs,
    metadata,
    metric_names,
    metric_points,
    streams,
    timeline,
)
from service.db.webhooks import add_timeline
from service.domain.ingest import apply_events
from service.domain.job_filter import ALL_JOBS, JobFilter
from service.domain.models import (
    Attempt,
    Checkpoint,
    Job,
    JobStatus,
    TimelineEvent,
)
from trainer.protocol.events import EventAck, EventBatch

logger = logging.getLogger(__name__)
_AT_REST = [JobStatus.QUEUED.value, JobStatus.PAUSED.value]


class JobStore(MetricStore):
    """Durable jobs in a SQL database: SQLite in WAL mode, or PostgreSQL."""

    # Ids of live jobs that this version cannot read, at the last look.
    _unread_live: Collection[str] = frozenset()

    @classmethod
    def open(cls, database_url: str) -> JobStore:
        """Open the database and migrate it to the newest version."""
        engine = open_engine(database_url)
        migrate(engine)
        return cls(engine)

    def close(self) -> None:
        self.engine.dispose()

    def ping(self) -> dict[str, Any]:
        """Database and migration; raises `StoreUnavailable` if they are not as they should be."""
        with self.read() as connection:
            stored, newest = stored_revision(connection), newest_revision()
        if stored != newest:
            is_known = stored is None or stored in known_revisions()
            advice = "restart the service to migrate" if is_known else "run the newer version"
            raise errors.StoreUnavailable(
                f"the database is at migration {stored}, this version needs {newest}; {advice}"
            )
        return {"database": self.engine.dialect.name, "migration": stored}

    # ---- jobs

    @repeated
    def create_job(
        self,
        job: Job,
        *,
        idempotency_key: str | None,
        request_hash: str,
        actor: str = "user",
        parent: str | None = None,
    ) -> Job:
        """Store a new job, or return the one that was created with this key before.

        `parent` is the id of the job that it is a clone of.
        """
        key = idempotency_key
        try:
            with self.write() as connection:
                queries.insert_job(connection, job, actor, key, request_hash, parent)
            return job
        except IntegrityError:
            known = None if key is None else self.find_submitted(key, request_hash, job.project)
            if known is None:
                raise
            return known

    def find_submitted(self, idempotency_key: str, request_hash: str, project: str) -> Job | None:
        """The job created with a key in a project, if any; raises `IdempotencyConflict`."""
        wanted = {"project": project, "key": idempotency_key}
        with self.read(is_single=True) as connection:
            found = connection.execute(queries.JOB_OF_KEY, wanted).mappings().one_or_none()
        if found is not None and found["request_hash"] != request_hash:
            raise errors.IdempotencyConflict(idempotency_key)
        return None if found is None else rows.job_of(found)

    def get_job(self, job_id: str) -> Job:
        """Read a job; raises `JobNotFound`."""
        with self.read(is_single=True) as connection:
            return queries.read_job(connection, job_id)

    def get_job_and_attempt(self, job_id: str) -> tuple[Job, Attempt | None]:
        """Read a job and its current attempt; raises `JobNotFound`."""
        with self.read() as connection:
            job = queries.read_job(connection, job_id)
            if job.current_attempt_id is None:
                return job, None
            return job, queries.read_attempt(connection, job.current_attempt_id)

    def list_jobs(
        self,
        wanted: JobFilter = ALL_JOBS,
        *,
        projects: Collection[str] | None = None,
        limit: int = 50,
    ) -> tuple[list[Job], str | None]:
        """Newest first; the cursor is the id of the last job of the page.

        `projects` are those whose jobs may be seen, None for all.
        """
        if wanted.project is not None:
            may_be_seen = projects is None or wanted.project in projects
            projects = [wanted.project] if may_be_seen else []
        if projects is not None and not projects:
            return [], None
        found = self.rows(queries.select_page(wanted, projects, limit + 1))
        page = found[:limit]
        return self.readable(page, rows.job_of), page[-1]["id"] if len(found) > limit else None

    def list_live_jobs(self) -> list[Job]:
        """Every job whose status is not terminal, oldest first."""
        found = self.rows(queries.LIVE_JOBS)
        read = self.readable(found, rows.job_of)
        self._unread_live = {row["id"] for row in found} - {job.id for job in read}
        return read

    def has_queued_jobs(self) -> bool:
        query = select(jobs.c.id).where(jobs.c.status == JobStatus.QUEUED.value).limit(1)
        return bool(self.rows(query))

    @repeated
    def claim_live_jobs(self, owner: str, *, lease_s: float, now: float, limit: int) -> list[str]:
        """Lease up to `limit` more live jobs for `lease_s` seconds; the ids of all that are held.

        Leases are renewed once half of their time has passed. Jobs that `list_live_jobs` could not
        read are left to others. `now` is Unix seconds, by the replica's own clock.
        """
        is_requested = jobs.c.cancel_requested | jobs.c.pause_requested
        is_active = text(LIVE) & (jobs.c.status.not_in(_AT_REST) | is_requested)
        is_active &= jobs.c.id.not_in(self._unread_live)
        is_own = jobs.c.lease_owner == owner
        is_old = is_own & (jobs.c.lease_until < now + lease_s / 2)
        is_free = jobs.c.lease_owner.is_(None) | (jobs.c.lease_until <= now)
        is_held = is_own & (jobs.c.lease_until > now)
        facts = (is_old.label("is_old"), is_free.label("is_free"), is_held.label("is_held"))
        seen = self.rows(select(jobs.c.id, *facts).where(is_active).order_by(jobs.c.id))
        held = {row["id"] for row in seen if row["is_held"]}
        due = [row["id"] for row in seen if row["is_old"]]
        due += [row["id"] for row in seen if row["is_free"] and not row["is_old"]][:limit]
        # Mostly nothing is due, and then nobody else should wait for a lock.
        if due:
            ids = select(jobs.c.id).where(jobs.c.id.in_(due), is_active, is_old | is_free)
            # Rows that another transaction holds are left for the next time.
            chosen = update(jobs).where(jobs.c.id.in_(ids.with_for_update(skip_locked=True)))
            taken = chosen.values(lease_owner=owner, lease_until=now + lease_s)
            with self.write() as connection:
                held |= {*connection.execute(taken.returning(jobs.c.id)).scalars()}
        return sorted(held)

    @repeated
    def release_leases(self, owner: str) -> None:
        """Give back every lease of `owner`, so that other replicas need not wait for their end."""
        held = update(jobs).where(text(LIVE), jobs.c.lease_owner == owner)
        self.execute(held.values(lease_owner=None, lease_until=None))

    @repeated
    def delete_job(self, job_id: str) -> None:
        """Delete a job that has ended, and all its rows; raises `JobNotFound` or `JobNotEnded`.

        Its points go first, one metric a transaction: all of them may take minutes. Cut off, it is
        to be repeated.
        """
        names = select(metric_names.c.id).where(metric_names.c.job_id == job_id)
        for name in self.rows(names):
            with self.write() as connection:
                _lock_ended(connection, job_id)
                own = metric_points.c.name_id == name["id"]
                connection.execute(delete(metric_points).where(own))
        with self.write() as connection:
            _lock_ended(connection, job_id)
            # Rows that refer to others go first.
            for table in reversed(metadata.sorted_tables):
                owned = _rows_of(table, job_id)
                if owned is not None:
                    connection.execute(delete(table).where(owned))

    @repeated
    def update_job(
        self,
        job: Job,
        *,
        attempt: Attempt | None = None,
        timeline: Sequence[TimelineEvent] = (),
        fence: Callable[[Connection], None] = lambda connection: None,
    ) -> Job:
        """Write a decision if nobody wrote since `job` was read; raises `StaleVersion`.

        `fence` is called in the transaction first, which ends without effect if it raises.
        """
        written = replace(job, version=job.version + 1)
        with self.write() as connection:
            fence(connection)
            queries.write_job(connection, written, expected_version=job.version)
            if attempt is not None:
                queries.write_attempt(connection, attempt)
            add_timeline(connection, timeline)
        return written

    # ---- attempts and their records

    def get_attempt(self, attempt_id: str) -> Attempt:
        """Read an attempt; raises `AttemptNotFound`."""
        with self.read(is_single=True) as connection:
            return queries.read_attempt(connection, attempt_id)

    def list_attempts(self, job_id: str) -> list[Attempt]:
        """Attempts of a job in order."""
        query = select(attempts).where(attempts.c.job_id == job_id).order_by(attempts.c.index)
        return [rows.attempt_of(row) for row in self.rows(query)]

    def attempts_to_collect(self, now: float) -> list[tuple[str, int]]:
        """Job and index of each attempt whose late records are due by `now` (Unix seconds)."""
        query = select(attempts.c.job_id, attempts.c.index).where(attempts.c.collect_at <= now)
        return [(row["job_id"], row["index"]) for row in self.rows(query)]

    @repeated
    def set_collection(self, attempt_id: str, collect_at: float) -> None:
        """When late records of an attempt are to be collected (Unix seconds)."""
        chosen = update(attempts).where(attempts.c.id == attempt_id)
        self.execute(chosen.values(collect_at=collect_at))

    @repeated
    def end_collection(self, attempt_id: str, collect_at: float) -> None:
        """Note that late records were collected, unless they are to be at another time since."""
        chosen = (attempts.c.id == attempt_id, attempts.c.collect_at == collect_at)
        self.execute(update(attempts).where(*chosen).values(collect_at=None))

    @repeated
    def append_events(
        self, attempt_id: str, batch: EventBatch, now: float, *, late_s: float = math.inf
    ) -> EventAck:
        """Store what is new in a batch.

        Raises `SequenceGap` if records before it are missing, `RecordRefused` if the database
        cannot hold one of them, `Forbidden` if the attempt ended `late_s` or more before `now`.
        """
        at = {"attempt_id": attempt_id, "stream": batch.stream}
        try:
            with self.write() as connection:
                job, attempt = queries.lock(connection, attempt_id)
                if attempt.ended_at is not None and now - attempt.ended_at >= late_s:
                    why = f"attempt {attempt_id} ended too long ago to deliver records"
                    raise errors.Forbidden(why)
                next_seq = connection.execute(queries.NEXT_SEQ, at).scalar_one_or_none() or 0
                if batch.first_seq > next_seq:
                    raise errors.SequenceGap(batch.stream, batch.first_seq, next_seq)
                if fresh := batch.events[next_seq - batch.first_seq :]:
                    next_seq += len(fresh)
                    result = apply_events(job, attempt, fresh, now)
                    queries.save_ingest(connection, job, attempt, result)
                    upsert(connection, streams, {**at, "next_seq": next_seq}, *at)
        except (DataError, IntegrityError, OverflowError, UnicodeEncodeError) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise errors.RecordRefused(attempt_id, str(cause)) from error
        return EventAck(stream=batch.stream, next_seq=next_seq)

    def stream_positions(self, attempt_id: str) -> dict[str, int]:
        """`next_seq` of every stream of an attempt."""
        query = select(streams).where(streams.c.attempt_id == attempt_id)
        return {row["stream"]: row["next_seq"] for row in self.rows(query)}

    # ---- timeline, metrics, checkpoints

    def list_timeline(
        self,
        job_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        kinds: Sequence[str] = (),
        newest: bool = False,
    ) -> list[TimelineEvent]:
        """Timeline events with an id above `after`, in order: of some kinds, or of all.

        At most the first `limit` of them, or the `newest`.
        """
        is_after = timeline.c.id > literal(after, BigInteger)
        query = select(timeline).where(timeline.c.job_id == job_id, is_after)
        if kinds:
            query = query.where(timeline.c.kind.in_(kinds))
        order = timeline.c.id.desc() if newest else timeline.c.id
        found = self.rows(query.order_by(order).limit(limit))
        return [TimelineEvent(**row) for row in (reversed(found) if newest else found)]

    def metric_names(self, job_id: str) -> list[str]:
        query = select(metric_names.c.name).where(metric_names.c.job_id == job_id)
        # Sorted here: databases differ in how they sort texts.
        return sorted(row["name"] for row in self.rows(query))

    def list_checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Committed checkpoints that still exist, in step order."""
        query = select(checkpoints).where(checkpoints.c.job_id == job_id)
        found = self.rows(query.order_by(checkpoints.c.step))
        return [Checkpoint(**row) for row in found]


def _lock_ended(connection: Connection, job_id: str) -> None:
    query = select(jobs.c.status).where(jobs.c.id == job_id).with_for_update()
    status = connection.execute(query).scalar_one_or_none()
    if status is None:
        raise errors.JobNotFound(job_id)
    if not JobStatus(status).is_terminal:
        raise errors.JobNotEnded(job_id, status)


def _rows_of(table: Table, job_id: str) -> ColumnElement[bool] | None:
    """Which rows of a table belong to a job, by foreign keys; None for one that outlives jobs."""
    if table is jobs:
        return jobs.c.id == job_id
    if table is job_secrets:
        return job_secrets.c.job_id == job_id
    for key in sorted(table.foreign_keys, key=lambda key: key.column.table is not jobs):
        owners = _rows_of(key.column.table, job_id)
        if owners is not None and key.column.table is jobs:
            return key.parent == job_id
        if owners is not None:
            return key.parent.in_(select(key.column).where(owners))
    return None

"""The statements of the SQL store, each run inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, delete, insert, select, update

from service.domain import Attempt, Job, JobStatus, TimelineEvent
from service.errors import IdempotencyConflict
from service.job_errors import AttemptNotFound, JobNotFound, StaleVersion
from service.store import metrics, rows, webhooks
from service.store.intake import Intake
from service.store.listing import select_jobs
from service.store.tables import (
    attempts,
    checkpoints,
    idempotency_keys,
    job_labels,
    job_progress,
    jobs,
    streams,
)
from service.store.upsert import insert_for
from trainer.events import CheckpointCommitted, CheckpointDeleted


def read_job(connection: Connection, job_id: str) -> Job:
    """Read a job; raises `JobNotFound` or `JobUnreadable`."""
    row = connection.execute(select_jobs().where(jobs.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return rows.job_of(row)


def read_attempt(connection: Connection, attempt_id: str) -> Attempt:
    """Read an attempt; raises `AttemptNotFound`."""
    query = select(attempts).where(attempts.c.id == attempt_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise AttemptNotFound(attempt_id)
    return rows.attempt_of(row)


def job_of_key(
    connection: Connection, project: str, key: str | None, request_hash: str
) -> str | None:
    """Id of the job that a key made, if any; raises `IdempotencyConflict`."""
    query = select(idempotency_keys.c.job_id, idempotency_keys.c.request_hash).where(
        idempotency_keys.c.project == project, idempotency_keys.c.key == key
    )
    found = connection.execute(query).one_or_none()
    if found is None or key is None:
        return None
    if found.request_hash != request_hash:
        raise IdempotencyConflict(key)
    return str(found.job_id)


def keep_key(connection: Connection, job: Job, key: str, request_hash: str) -> None:
    """Remember which job a key made."""
    values = {
        "project": job.project,
        "key": key,
        "request_hash": request_hash,
        "job_id": job.id,
    }
    connection.execute(insert(idempotency_keys), values)


def add_labels(connection: Connection, job: Job) -> None:
    """Write the labels of a new job's spec, by which jobs are found."""
    labels = rows.label_values(job)
    if labels:
        connection.execute(insert(job_labels), labels)


def submitted_line(job: Job, actor: str) -> TimelineEvent:
    """The first line of a timeline."""
    parallelism = job.spec.parallelism
    return TimelineEvent(
        id=0,
        job_id=job.id,
        attempt_id=None,
        time=job.created_at,
        kind="job_submitted",
        message=f"job '{job.name}' submitted",
        actor=actor,
        data={
            "name": job.name,
            "project": job.project,
            "priority": job.priority,
            "labels": dict(job.spec.labels),
            "min_workers": parallelism.min_workers,
            "max_workers": parallelism.world_size,
        },
    )


def write_job(connection: Connection, job: Job, *, expected_version: int) -> None:
    """Write a job over the version that was read; raises `StaleVersion`."""
    unchanged = jobs.c.version == expected_version
    values = rows.job_values(job)
    # A spec never changes after submission, and is the one big column.
    del values["spec"]
    statement = update(jobs).where(jobs.c.id == job.id, unchanged).values(**values)
    if connection.execute(statement).rowcount != 1:
        raise StaleVersion(job.id, expected_version)


def write_attempt(connection: Connection, attempt: Attempt) -> None:
    """Write an attempt, new or known."""
    values = rows.attempt_values(attempt)
    statement = insert_for(connection, attempts).values(values)
    connection.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values))


def add_timeline(connection: Connection, lines: Sequence[TimelineEvent]) -> None:
    """Append lines to a timeline, and what webhooks are to hear of them."""
    if lines:
        webhooks.insert_lines(connection, lines)


def lock(connection: Connection, attempt_id: str) -> tuple[Job, Attempt]:
    """Job and attempt with the job's row locked, so that ingest and decisions take turns."""
    job_id = read_attempt(connection, attempt_id).job_id
    connection.execute(select(jobs.c.id).where(jobs.c.id == job_id).with_for_update())
    return read_job(connection, job_id), read_attempt(connection, attempt_id)


def next_seq_of(connection: Connection, attempt_id: str, stream: str) -> int:
    """Sequence number of the first record of a stream that was not taken yet."""
    query = select(streams.c.next_seq).where(
        streams.c.attempt_id == attempt_id, streams.c.stream == stream
    )
    return connection.execute(query).scalar_one_or_none() or 0


def move_stream(connection: Connection, attempt_id: str, stream: str, next_seq: int) -> None:
    """Set the sequence number of the record that a stream goes on with."""
    values = {"attempt_id": attempt_id, "stream": stream, "next_seq": next_seq}
    statement = insert_for(connection, streams).values(values)
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["attempt_id", "stream"], set_={"next_seq": next_seq}
        )
    )


def save_intake(connection: Connection, job: Job, attempt: Attempt, intake: Intake) -> None:
    """Write what a batch of records changed; the version rises only where a decision may."""
    before, after = _decision_part(job), _decision_part(intake.job)
    if before != after or attempt != intake.attempt:
        written = replace(intake.job, version=job.version + 1)
        write_job(connection, written, expected_version=job.version)
        write_attempt(connection, intake.attempt)
    if intake.job is not job:
        progress = rows.progress_values(intake.job)
        statement = update(job_progress).where(job_progress.c.job_id == job.id)
        connection.execute(statement.values(**progress))
    metrics.save_points(connection, job.id, attempt.index, intake.points)
    for change in intake.checkpoints:
        _change_checkpoint(connection, job.id, change)
    add_timeline(connection, intake.timeline)


def _decision_part(job: Job) -> tuple[JobStatus, float | None, str | None]:
    return job.status, job.started_at, job.resume_from


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

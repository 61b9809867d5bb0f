"""Statements of `JobStore`, each run inside a transaction of the caller.

Lists of jobs (a filtered page, the live ones, the queue) have an index each. The ids of a page are
read newest first from an index in that order, one walk for each wanted pair of status and project,
and merged; only then are the rows of the page read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    bindparam,
    delete,
    func,
    insert,
    select,
    text,
    type_coerce,
    union_all,
    update,
)

from service.db import metrics, rows
from service.db.engine import upsert
from service.db.tables import (
    LIVE,
    attempts,
    checkpoints,
    idempotency_keys,
    job_labels,
    job_progress,
    jobs,
    metric_names,
    metric_points,
    streams,
    timeline,
)
from service.db.webhooks import add_timeline
from service.domain.ingest import IngestResult
from service.domain.job_filter import JobFilter, MetricBound
from service.domain.metrics import admitted
from service.domain.models import (
    Attempt,
    Job,
    JobStatus,
    TimelineEvent,
    highest_job_id,
    lowest_job_id,
)
from service.domain.timeline import ServiceEvent, timeline_event
from service.errors import (
    AttemptNotFound,
    JobNotFound,
    StaleVersion,
)
from trainer.protocol.events import CheckpointCommitted, CheckpointDeleted

# Statuses and projects, of which a job has one each; an empty set of statuses or None is any.
Kind = tuple[Collection[JobStatus], Collection[str] | None]
# SQLite merges 500 walks at most; above this many a single walk is faster anyway.
_MAX_WALKS = 64
# Of the timeline of one job, as far as its drivers tell it: events, and bytes of the large ones.
_MAX_LINES = 100_000
_NUM_SAVES = 10_000  # that make room at once: each time they are searched for
_SAVES = ("checkpoint_committed", "checkpoint_deleted")
_LARGE_BYTES = 1 << 16
_MAX_LARGE_BYTES = 1 << 26
# Of one job, which are read at once: the best and the newest ones, and metrics of each.
_MAX_CHECKPOINTS = 2000
_MAX_CHECKPOINT_METRICS = 200
_DECISIVE = attrgetter("status", "started_at", "resume_from")
_JOB_COLUMNS = [column for column in jobs.c if column is not jobs.c.spec]


def select_jobs() -> Select[Any]:
    """Jobs joined with their progress, as `rows.job_of` reads them: specs as they are stored."""
    spec = type_coerce(jobs.c.spec, Text).label("spec")
    joined = jobs.join(job_progress, job_progress.c.job_id == jobs.c.id)
    return select(*_JOB_COLUMNS, spec, *job_progress.c).select_from(joined)


def select_page(wanted: JobFilter, projects: Collection[str] | None, limit: int) -> Select[Any]:
    """The newest `limit` jobs that a filter wants, of some projects or of all."""
    walks = [_walk(wanted, kind, limit) for kind in _kinds(wanted, projects)]
    merged = union_all(*(select(walk.subquery().c.id) for walk in walks)).subquery()
    page = select(merged.c.id).order_by(merged.c.id.desc()).limit(limit)
    return select_jobs().where(jobs.c.id.in_(page)).order_by(jobs.c.id.desc())


def _kinds(wanted: JobFilter, projects: Collection[str] | None) -> list[Kind]:
    """One kind for each walk: its jobs lie newest first in an index. A search scans it: once."""
    statuses = wanted.statuses
    by_status: list[Collection[JobStatus]] = [(each,) for each in sorted(set(statuses))]
    by_project: list[Collection[str] | None] = [(name,) for name in sorted(projects or ())]
    if wanted.search or len(by_status) * len(by_project) > _MAX_WALKS:
        return [(statuses, projects)]
    return list(product(by_status or [()], by_project or [None]))


def _walk(wanted: JobFilter, kind: Kind, limit: int) -> Select[Any]:
    """Ids of jobs of one kind, newest first."""
    if wanted.labels:
        return _walk_label(wanted, kind, limit)
    return (
        select(jobs.c.id)
        .where(*_bounds(wanted, jobs.c.id), *_conditions(wanted, kind))
        .order_by(jobs.c.id.desc())
        .limit(limit)
    )


def _walk_label(wanted: JobFilter, kind: Kind, limit: int) -> Select[Any]:
    """The same along the first label; the others are looked up job by job."""
    (key, value), *others = wanted.labels
    job_id = job_labels.c.job_id
    query = select(job_id.label("id")).where(
        job_labels.c.key == key, job_labels.c.value == value, *_bounds(wanted, job_id)
    )
    for other_key, other_value in others:
        other = job_labels.alias()
        same_job = select(other.c.job_id).where(
            other.c.job_id == job_id, other.c.key == other_key, other.c.value == other_value
        )
        query = query.where(same_job.exists())
    conditions = _conditions(wanted, kind)
    if conditions:
        query = query.where(select(jobs.c.id).where(jobs.c.id == job_id, *conditions).exists())
    return query.order_by(job_id.desc()).limit(limit)


def _bounds(wanted: JobFilter, job_id: ColumnElement[str]) -> list[ColumnElement[bool]]:
    """Ids sort by time of creation, so times bound them, to a millisecond or two."""
    bounds = []
    if wanted.after is not None:
        bounds.append(job_id < wanted.after)
    if wanted.created_after is not None:
        bounds.append(job_id >= lowest_job_id(wanted.created_after))
    if wanted.created_before is not None:
        bounds.append(job_id < highest_job_id(wanted.created_before))
    return bounds


def _conditions(wanted: JobFilter, kind: Kind) -> list[ColumnElement[bool]]:
    statuses, projects = kind
    conditions: list[ColumnElement[bool]] = []
    if statuses:
        conditions.append(jobs.c.status.in_([status.value for status in statuses]))
    if wanted.name is not None:
        conditions.append(jobs.c.name == wanted.name)
    if wanted.search:
        conditions.append(jobs.c.id.in_(_found(wanted.search)))
    if projects is not None:
        conditions.append(jobs.c.project.in_(projects))
    conditions += [_holds(bound) for bound in wanted.metrics]
    if wanted.created_after is not None:
        conditions.append(jobs.c.created_at >= wanted.created_after)
    if wanted.created_before is not None:
        conditions.append(jobs.c.created_at < wanted.created_before)
    return conditions


def _found(search: str) -> Select[Any]:
    """Ids of jobs with a text in their name or id: both are in one index, far smaller than rows."""
    other, part = jobs.alias(), search.lower()
    is_in_name = other.c.name.contains(part, autoescape=True)
    return select(other.c.id).where(is_in_name | other.c.id.contains(part, autoescape=True))


def _holds(bound: MetricBound) -> ColumnElement[bool]:
    """Whether the newest point of a job's metric is within a bound."""
    names, points = metric_names.c, metric_points.c
    newest = (
        select(points.value)
        .where(points.name_id == names.id)
        .order_by(points.step.desc())
        .limit(1)
        .correlate(metric_names)
        .scalar_subquery()
    )
    is_within = newest.bool_op(bound.comparison)(bound.value)
    of_job = (names.job_id == jobs.c.id) & (names.name == bound.name)
    return select(names.id).where(of_job, is_within).correlate(jobs).exists()


# Statements that are run all the time are made once: that takes longer than to run them.
LIVE_JOBS = select_jobs().where(text(LIVE)).order_by(jobs.c.id)
_JOB = select_jobs().where(jobs.c.id == bindparam("job_id"))
JOB_OF_KEY = (
    select_jobs()
    .add_columns(idempotency_keys.c.request_hash)
    .join(idempotency_keys, idempotency_keys.c.job_id == jobs.c.id)
    .where(
        idempotency_keys.c.project == bindparam("project"),
        idempotency_keys.c.key == bindparam("key"),
    )
)
_ATTEMPT = select(attempts).where(attempts.c.id == bindparam("attempt_id"))
_WRITE_JOB = update(jobs).where(
    jobs.c.id == bindparam("known_id"), jobs.c.version == bindparam("known_version")
)
_LOCK_JOB = select(jobs.c.id).where(jobs.c.id == bindparam("job_id")).with_for_update()
NEXT_SEQ = select(streams.c.next_seq).where(
    streams.c.attempt_id == bindparam("attempt_id"), streams.c.stream == bindparam("stream")
)
_WRITE_PROGRESS = update(job_progress).where(job_progress.c.job_id == bindparam("known_id"))


def read_job(connection: Connection, job_id: str) -> Job:
    """Read a job; raises `JobNotFound` or `JobUnreadable`."""
    row = connection.execute(_JOB, {"job_id": job_id}).mappings().one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return rows.job_of(row)


def read_attempt(connection: Connection, attempt_id: str) -> Attempt:
    """Read an attempt; raises `AttemptNotFound`."""
    row = connection.execute(_ATTEMPT, {"attempt_id": attempt_id}).mappings().one_or_none()
    if row is None:
        raise AttemptNotFound(attempt_id)
    return rows.attempt_of(row)


def insert_job(
    connection: Connection,
    job: Job,
    actor: str,
    key: str | None,
    request_hash: str,
    parent: str | None,
) -> None:
    """Write a new job with its labels, its idempotency key and the first event of its timeline."""
    spec = job.spec.model_dump(mode="json")
    connection.execute(insert(jobs), {**rows.job_values(job), "spec": spec})
    connection.execute(insert(job_progress), rows.progress_values(job))
    labels = [{"job_id": job.id, "key": k, "value": v} for k, v in job.spec.labels.items()]
    if labels:
        connection.execute(insert(job_labels), labels)
    if key is not None:
        known = {"project": job.project, "key": key, "request_hash": request_hash}
        connection.execute(insert(idempotency_keys), {**known, "job_id": job.id})
    facts: dict[str, object] = {
        "name": job.name,
        "project": job.project,
        "priority": job.priority,
        "labels": dict(job.spec.labels),
        "min_workers": job.spec.parallelism.min_workers,
        "max_workers": job.spec.parallelism.world_size,
    }
    if parent is not None:
        facts["cloned_from"] = parent
    message = f"job '{job.name}' submitted" + (f", a clone of {parent}" if parent else "")
    told = timeline_event(
        job, None, job.created_at, ServiceEvent.JOB_SUBMITTED, message, facts, actor
    )
    add_timeline(connection, [told])


def write_job(connection: Connection, job: Job, *, expected_version: int) -> None:
    """Write a job over the version that was read; raises `StaleVersion`."""
    known = {"known_id": job.id, "known_version": expected_version}
    if connection.execute(_WRITE_JOB, {**rows.job_values(job), **known}).rowcount != 1:
        raise StaleVersion(job.id, expected_version)


def write_attempt(connection: Connection, attempt: Attempt) -> None:
    upsert(connection, attempts, rows.attempt_values(attempt), "id")


def lock(connection: Connection, attempt_id: str) -> tuple[Job, Attempt]:
    """Job and attempt with the job's row locked, which serialises ingest and decisions."""
    job_id = read_attempt(connection, attempt_id).job_id
    connection.execute(_LOCK_JOB, {"job_id": job_id})
    return read_job(connection, job_id), read_attempt(connection, attempt_id)


def save_ingest(connection: Connection, job: Job, attempt: Attempt, result: IngestResult) -> None:
    """Write what a batch of records changed; the version rises where decisions depend on it."""
    if _DECISIVE(job) != _DECISIVE(result.job) or attempt != result.attempt:
        written = replace(result.job, version=job.version + 1)
        write_job(connection, written, expected_version=job.version)
        write_attempt(connection, result.attempt)
    if result.job is not job:
        progress = {**rows.progress_values(result.job), "known_id": job.id}
        connection.execute(_WRITE_PROGRESS, progress)
    metrics.save_points(connection, job.id, attempt.index, result.points)
    for change in result.checkpoints:
        _change_checkpoint(connection, job.id, change)
    if result.checkpoints:
        _forget_first_checkpoints(connection, job.id)
    if result.timeline:
        add_timeline(connection, _fitting(connection, job.id, result.timeline))
    if any(len(json.dumps(event.data)) > _LARGE_BYTES for event in result.timeline):
        _empty_first_large(connection, job.id)


def _fitting(
    connection: Connection, job_id: str, told: Sequence[TimelineEvent]
) -> list[TimelineEvent]:
    """What of a driver's events the timeline of its job has room for, the first of them.

    The oldest lines of checkpoints make room, many at once, until none is left: a long job saves
    far more often than it tells else.
    """
    lines = select(timeline.c.id).where(timeline.c.job_id == job_id)
    limited = lines.limit(_MAX_LINES).subquery()
    num_lines = connection.execute(select(func.count()).select_from(limited)).scalar_one()
    if _MAX_LINES - 1 - len(told) < num_lines < _MAX_LINES:
        saves = lines.where(timeline.c.kind.in_(_SAVES)).order_by(timeline.c.id).limit(_NUM_SAVES)
        num_lines -= connection.execute(delete(timeline).where(timeline.c.id.in_(saves))).rowcount
    fitting = [*told[: max(0, _MAX_LINES - 1 - num_lines)]]
    if num_lines < _MAX_LINES and len(fitting) < len(told):
        message = "the timeline is full: what the job tells from now on is left out"
        fitting.append(replace(told[0], kind="note", message=message, data={"level": "warning"}))
    return fitting


def _empty_first_large(connection: Connection, job_id: str) -> None:
    """Make notes of the first large events of a job's drivers, until the others fit together: pages
    of a timeline are read as a whole.

    The newest of each kind go last: a plan outlives any number of checkpoints.
    """
    known = timeline.c
    num_bytes = func.length(type_coerce(known.data, Text))
    is_large = (known.job_id == job_id) & (known.actor == "driver") & (num_bytes > _LARGE_BYTES)
    query = select(known.id, known.kind, num_bytes.label("num_bytes")).where(is_large)
    large = connection.execute(query.order_by(known.id)).all()
    newest = {line.kind: line.id for line in large}
    num_left_out = sum(line.num_bytes for line in large) - _MAX_LARGE_BYTES
    for line in sorted(large, key=lambda line: line.id == newest[line.kind]):
        if num_left_out <= 0:
            return
        num_left_out -= line.num_bytes
        emptied = update(timeline).where(known.id == line.id)
        connection.execute(emptied.values(kind="note", data={"left_out_bytes": line.num_bytes}))


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
    told = change.model_dump(exclude={"kind", "time", "duration_s"})
    names = admitted((), told["metrics"])[:_MAX_CHECKPOINT_METRICS]
    kept = {name: told["metrics"][name] for name in names}
    values = {**told, "metrics": kept, "job_id": job_id, "created_at": change.time}
    upsert(connection, checkpoints, values, "job_id", "path")


def _forget_first_checkpoints(connection: Connection, job_id: str) -> None:
    """Keep as many rows as may be read at once; the files stay."""
    own = checkpoints.c.job_id == job_id
    order = (checkpoints.c.is_best.desc(), checkpoints.c.step.desc())
    first = select(checkpoints.c.path).where(own).order_by(*order).offset(_MAX_CHECKPOINTS)
    connection.execute(delete(checkpoints).where(own, checkpoints.c.path.in_(first)))

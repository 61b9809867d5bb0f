"""Finding jobs: pages of a filtered list, the live ones, the queue. Each query has an index.

A page is found by ids alone, newest first, from an index that has them in that order already;
only the rows of the page are then read. Several statuses or projects are several such walks,
merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from sqlalchemy import ColumnElement, Select, Text, func, select, text, type_coerce, union_all

from service.domain import JobStatus
from service.ids import highest_job_id, lowest_job_id
from service.store.tables import LIVE, job_labels, job_progress, jobs

# Statuses and projects, of which a job has one each; an empty set of statuses or None is any.
Kind = tuple[Collection[JobStatus], Collection[str] | None]
# SQLite merges 500 at most; with more than this, one look at job by job is faster anyway.
_MAX_WALKS = 64

_JOB_COLUMNS = [column for column in jobs.c if column is not jobs.c.spec]


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are wanted; an empty filter wants all.

    `projects` are those whose jobs may be shown, None for all; `labels` must all be there.
    `created_after` (inclusive) and `created_before` (exclusive) are Unix seconds; `after` is the
    id of the last job of the page before.
    """

    after: str | None = None
    statuses: Collection[JobStatus] = ()
    name: str | None = None
    projects: Collection[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    created_after: float | None = None
    created_before: float | None = None


def common_projects(wanted: str | None, visible: Collection[str] | None) -> Collection[str] | None:
    """The projects to list when one is wanted (None: any) and some are visible (None: all)."""
    if wanted is None:
        return visible
    return [wanted] if visible is None or wanted in visible else []


def select_jobs() -> Select[Any]:
    """Jobs joined with their progress, as `rows.job_of` reads them: specs as they are stored."""
    spec = type_coerce(jobs.c.spec, Text).label("spec")
    joined = jobs.join(job_progress, job_progress.c.job_id == jobs.c.id)
    return select(*_JOB_COLUMNS, spec, *job_progress.c).select_from(joined)


def select_page(wanted: JobFilter, limit: int) -> Select[Any]:
    """The newest `limit` jobs that a filter wants."""
    walks = [_walk(wanted, kind, limit) for kind in _kinds(wanted)]
    merged = union_all(*(select(walk.subquery().c.id) for walk in walks)).subquery()
    page = select(merged.c.id).order_by(merged.c.id.desc()).limit(limit)
    return select_jobs().where(jobs.c.id.in_(page)).order_by(jobs.c.id.desc())


def _kinds(wanted: JobFilter) -> list[Kind]:
    """Kinds of jobs of which each has an index that holds them newest first."""
    statuses: list[tuple[JobStatus, ...]] = [(status,) for status in sorted(wanted.statuses)] or [
        ()
    ]
    projects: list[tuple[str, ...] | None] = [
        (name,) for name in sorted(wanted.projects or ())
    ] or [None]
    if len(statuses) * len(projects) > _MAX_WALKS:
        return [(wanted.statuses, wanted.projects)]
    return list(product(statuses, projects))


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
    (key, value), *others = wanted.labels.items()
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
    conditions = []
    if statuses:
        conditions.append(_is_one_of(jobs.c.status, [status.value for status in statuses]))
    if wanted.name is not None:
        conditions.append(jobs.c.name == wanted.name)
    if projects is not None:
        conditions.append(_is_one_of(jobs.c.project, projects))
    if wanted.created_after is not None:
        conditions.append(jobs.c.created_at >= wanted.created_after)
    if wanted.created_before is not None:
        conditions.append(jobs.c.created_at < wanted.created_before)
    return conditions


def _is_one_of(column: ColumnElement[str], values: Collection[str]) -> ColumnElement[bool]:
    (first, *others) = values
    return column.in_(values) if others else column == first


def select_live() -> Select[Any]:
    """Every job whose status is not terminal, oldest first."""
    return select_jobs().where(text(LIVE)).order_by(jobs.c.id)


def select_queue() -> Select[Any]:
    """Every job that waits for its turn, the first one first."""
    is_queued = jobs.c.status == JobStatus.QUEUED.value
    since = func.coalesce(jobs.c.queued_at, jobs.c.created_at)
    return select_jobs().where(is_queued).order_by(jobs.c.priority.desc(), since, jobs.c.id)


def select_queued_id() -> Select[Any]:
    """The id of any job that waits for its turn."""
    return select(jobs.c.id).where(jobs.c.status == JobStatus.QUEUED.value).limit(1)


def select_counts(project: str | None) -> Select[Any]:
    """How many jobs there are in each status, of one project or of all."""
    query = select(jobs.c.status, func.count()).group_by(jobs.c.status)
    return query if project is None else query.where(jobs.c.project == project)

"""Metric points: kept once per (metric, step), read back in buckets of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Integer,
    RowMapping,
    bindparam,
    case,
    func,
    select,
    update,
)

from service.domain import MetricPoint
from service.store.tables import metric_names, metric_points
from service.store.upsert import insert_for

Points = Mapping[tuple[str, int], tuple[float, float]]


def save_points(connection: Connection, job_id: str, attempt_index: int, points: Points) -> None:
    """Store points (name, step) -> (value, time); those of a newer attempt stand."""
    if not points:
        return
    ids = _ids_of_names(connection, job_id, {name for name, _ in points})
    rows = [
        {
            "name_id": ids[name],
            "step": step,
            "value": None if math.isnan(value) else value,
            "time": time,
            "attempt_index": attempt_index,
        }
        for (name, step), (value, time) in points.items()
    ]
    _widen_bounds(connection, rows)
    insert = insert_for(connection, metric_points)
    new = insert.excluded
    statement = insert.on_conflict_do_update(
        index_elements=["name_id", "step"],
        set_={"value": new.value, "time": new.time, "attempt_index": new.attempt_index},
        where=new.attempt_index >= metric_points.c.attempt_index,
    )
    connection.execute(statement, rows)


def _ids_of_names(connection: Connection, job_id: str, names: set[str]) -> dict[str, int]:
    query = select(metric_names.c.name, metric_names.c.id).where(metric_names.c.job_id == job_id)
    ids = {row.name: row.id for row in connection.execute(query)}
    new = [{"job_id": job_id, "name": name} for name in sorted(names - ids.keys())]
    if not new:
        return ids
    connection.execute(insert_for(connection, metric_names).on_conflict_do_nothing(), new)
    return {row.name: row.id for row in connection.execute(query)}


def _widen_bounds(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Count new points with their metrics, and note the oldest: see `service.store.retention`."""
    bounds: dict[int, tuple[int, float]] = {}
    for row in rows:
        num_points, oldest_at = bounds.get(row["name_id"], (0, math.inf))
        bounds[row["name_id"]] = (num_points + 1, min(oldest_at, row["time"]))
    known = metric_names.c
    oldest = bindparam("oldest", type_=Float)
    is_older = known.oldest_at.is_(None) | (known.oldest_at > oldest)
    statement = update(metric_names).where(known.id == bindparam("name_id"))
    statement = statement.values(
        num_points=known.num_points + bindparam("added", type_=Integer),
        oldest_at=case((is_older, oldest), else_=known.oldest_at),
    )
    # In the order of ids, as others that change several rows do.
    connection.execute(
        statement,
        [
            {"name_id": name_id, "added": num_points, "oldest": oldest_at}
            for name_id, (num_points, oldest_at) in sorted(bounds.items())
        ],
    )


def read_names(connection: Connection, job_id: str) -> list[str]:
    """Names of every metric of a job, sorted."""
    query = select(metric_names.c.name).where(metric_names.c.job_id == job_id)
    # Sorted here: databases differ in how they sort texts.
    return sorted(connection.execute(query).scalars())


def read_points(
    connection: Connection,
    job_id: str,
    name: str,
    from_step: int | None,
    to_step: int | None,
    max_points: int,
) -> list[MetricPoint]:
    """Points of one metric in step order, in at most `max_points` buckets of equal width."""
    wanted = _wanted(job_id, name, from_step, to_step)
    step = metric_points.c.step
    span = connection.execute(
        select(func.count(), func.min(step), func.max(step)).where(wanted)
    ).one()
    num_points, first, last = span
    if num_points == 0:
        return []
    if num_points <= max_points:
        query = select(metric_points).where(wanted).order_by(step)
        return [_exact_point(row) for row in connection.execute(query).mappings()]
    bucket = (step - first) * max_points // (last - first + 1)
    return _read_buckets(connection, wanted, bucket)


def _wanted(
    job_id: str, name: str, from_step: int | None, to_step: int | None
) -> ColumnElement[bool]:
    name_id = select(metric_names.c.id).where(
        metric_names.c.job_id == job_id, metric_names.c.name == name
    )
    wanted = metric_points.c.name_id == name_id.scalar_subquery()
    if from_step is not None:
        wanted = wanted & (metric_points.c.step >= from_step)
    if to_step is not None:
        wanted = wanted & (metric_points.c.step <= to_step)
    return wanted


def _read_buckets(
    connection: Connection, wanted: ColumnElement[bool], bucket: ColumnElement[Any]
) -> list[MetricPoint]:
    value = metric_points.c.value
    buckets = (
        select(
            func.max(metric_points.c.step).label("last_step"),
            func.avg(value).label("mean"),
            func.min(value).label("low"),
            func.max(value).label("high"),
            (func.count() - func.count(value)).label("num_nan"),
        )
        .where(wanted)
        .group_by(bucket)
        .subquery()
    )
    query = (
        select(buckets, metric_points.c.time)
        .join(metric_points, metric_points.c.step == buckets.c.last_step)
        .where(wanted)
        .order_by(buckets.c.last_step)
    )
    return [_bucket_point(row) for row in connection.execute(query).mappings()]


def _exact_point(row: RowMapping) -> MetricPoint:
    value = _nan_if_null(row["value"])
    return MetricPoint(row["step"], row["time"], value, value, value)


def _bucket_point(row: RowMapping) -> MetricPoint:
    # One NaN among a thousand points is what the reader must not miss.
    mean = math.nan if row["num_nan"] else _nan_if_null(row["mean"])
    low, high = _nan_if_null(row["low"]), _nan_if_null(row["high"])
    return MetricPoint(row["last_step"], row["time"], mean, low, high)


def _nan_if_null(value: float | None) -> float:
    return math.nan if value is None else value

"""Metric points: stored once per (metric, step), read in buckets of steps, pruned by retention.

Points older than `days` are deleted. A metric with more than `max_points` keeps the
newest half of that number, and every second of the older ones: the older, the coarser. Points to
drop are chosen by position alone, so means do not shift; a NaN is never dropped for a neighbour.

Deletes run in small transactions, so that ingest never waits long. `metric_names` has an upper
bound of a metric's number of points and a lower bound of their age, so that metrics to prune are
found without reading points; pruning corrects the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    Float,
    Integer,
    Select,
    bindparam,
    case,
    delete,
    func,
    select,
    update,
)

from service.db.engine import Transactions, insert_for
from service.db.tables import metric_names, metric_points
from service.domain.metrics import admitted
from service.domain.models import MetricPoint

Points = Mapping[tuple[str, int], tuple[float, float]]
# Of a finite value: the sum of a hundred million of them is finite, too.
_LARGEST = 1e300
_COLUMNS = ("name_id", "step", "value", "time", "attempt_index")


def save_points(connection: Connection, job_id: str, attempt_index: int, points: Points) -> None:
    """Store points (name, step) -> (value, time); those of a newer attempt are kept.

    Of metrics beyond those that a job may have nothing is stored.
    """
    if not points:
        return
    ids = _ids_of_names(connection, job_id, {name for name, _ in points})
    rows = [
        (ids[name], step, _storable(value), time, attempt_index)
        for (name, step), (value, time) in points.items()
        if name in ids
    ]
    if not rows:
        return
    _widen_bounds(connection, rows)
    statement, names = _upsert_of_points(connection.dialect)
    if names is None:
        named = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        connection.exec_driver_sql(statement, named)
    else:
        in_order = itemgetter(*map(_COLUMNS.index, names))
        connection.exec_driver_sql(statement, [*map(in_order, rows)])


def _storable(value: float) -> float | None:
    """None for NaN, and infinity for what is too large to be added up."""
    if math.isnan(value):
        return None
    return value if abs(value) <= _LARGEST else math.copysign(math.inf, value)


@lru_cache(maxsize=4)
def _upsert_of_points(dialect: Dialect) -> tuple[str, Sequence[str] | None]:
    """The statement, and the order of its parameters; None where they are named.

    It goes to the driver as it is: SQLAlchemy takes as long to look at a thousand rows of numbers
    as the database to write them.
    """
    insert = insert_for(dialect, metric_points)
    new = insert.excluded
    statement = insert.on_conflict_do_update(
        index_elements=["name_id", "step"],
        set_={"value": new.value, "time": new.time, "attempt_index": new.attempt_index},
        where=new.attempt_index >= metric_points.c.attempt_index,
    )
    compiled = statement.compile(dialect=dialect, column_keys=_COLUMNS)
    return str(compiled), compiled.positiontup


def _ids_of_names(connection: Connection, job_id: str, names: set[str]) -> dict[str, int]:
    query = select(metric_names.c.name, metric_names.c.id).where(metric_names.c.job_id == job_id)
    ids = {row.name: row.id for row in connection.execute(query)}
    new = [{"job_id": job_id, "name": name} for name in admitted(ids, sorted(names))]
    if not new:
        return ids
    connection.execute(insert_for(connection.dialect, metric_names).on_conflict_do_nothing(), new)
    return {row.name: row.id for row in connection.execute(query)}


def _widen_bounds(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Count new points with their metrics, and record the oldest time."""
    bounds: dict[int, tuple[int, float]] = {}
    for row in rows:
        num_points, oldest_at = bounds.get(row[0], (0, math.inf))
        bounds[row[0]] = (num_points + 1, min(oldest_at, row[3]))
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


class MetricStore(Transactions):
    """Reads the points of jobs."""

    def metric_points(
        self,
        job_id: str,
        name: str,
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> list[MetricPoint]:
        """Points in step order: as they are, or min, max and mean of `max_points` buckets of steps.

        The last step has one of its own, so that the last point is what was told last.
        """
        with self.read() as connection:
            named = connection.execute(_ID_OF_NAME, {"job_id": job_id, "name": name})
            wanted = {
                "name_id": named.scalar_one_or_none(),
                "from_step": 0 if from_step is None else from_step,
                "to_step": _MAX_STEP if to_step is None else to_step,
            }
            span = connection.execute(_SPAN, {**wanted, "most": max_points + 1}).one()
            if span.num_points <= max_points:
                found = connection.execute(_AS_THEY_ARE, wanted)
                return [MetricPoint(step, at, *[_nan_if_null(v)] * 3) for step, at, v in found]
            width = span.last - span.first
            buckets = {**wanted, "first": span.first, "width": width, "num_buckets": max_points - 1}
            rows = connection.execute(_IN_BUCKETS, buckets).all()
        return [
            MetricPoint(
                last_step,
                at,
                # One NaN in a bucket makes its mean NaN: readers must not miss it.
                math.nan if num_nan else _nan_if_null(total) / num,
                _nan_if_null(low),
                _nan_if_null(high),
            )
            for last_step, total, num, low, high, num_nan, at in rows
        ]

    def metric_sample(self, job_id: str, name: str, num_points: int) -> list[tuple[int, float]]:
        """At most `num_points` points (step, value) of a metric, spread over its steps as they are.

        For small curves: each is found by its key, however many points there are between them.
        """
        found = {}
        with self.read() as connection:
            named = connection.execute(_ID_OF_NAME, {"job_id": job_id, "name": name})
            name_id = named.scalar_one_or_none()
            span = select(func.min(metric_points.c.step), func.max(metric_points.c.step))
            first, last = connection.execute(span.where(metric_points.c.name_id == name_id)).one()
            if first is None:
                return []
            pairs = max(1, num_points - 1)
            for step in sorted({first + (last - first) * i // pairs for i in range(num_points)}):
                row = connection.execute(_FROM_STEP, {"name_id": name_id, "step": step}).one()
                found[row.step] = _nan_if_null(row.value)
        return list(found.items())


_MAX_STEP = 2**63 - 1


def _steps(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger)


def _in_buckets() -> Select[Any]:
    """Of each bucket its last step, sum, number, least, greatest, number of NaNs and last time."""
    step, value = metric_points.c.step, metric_points.c.value
    buckets = (
        select(
            func.max(step).label("last_step"),
            # Not `avg`, for which PostgreSQL adds up squares as well, and fails from 1e154 on.
            # Nor a quotient, which fails where it is too small to differ from 0.
            func.sum(value),
            func.count(value),
            func.min(value),
            func.max(value),
            func.count() - func.count(value),
        )
        .where(_WANTED)
        .group_by((step - _steps("first")) * _steps("num_buckets") // _steps("width"))
        .subquery()
    )
    query = select(buckets, metric_points.c.time)
    query = query.join(metric_points, step == buckets.c.last_step).where(_WANTED)
    return query.order_by(buckets.c.last_step)


# Made once: to build one takes as long as to read a thousand points.
_ID_OF_NAME = select(metric_names.c.id).where(
    metric_names.c.job_id == bindparam("job_id"), metric_names.c.name == bindparam("name")
)
_WANTED = (metric_points.c.name_id == bindparam("name_id", type_=Integer)) & (
    metric_points.c.step.between(_steps("from_step"), _steps("to_step"))
)
_STEPS = select(metric_points.c.step).where(_WANTED)
# Ends are found by their keys, and points counted no further than they may be as they are.
_SPAN = select(
    _STEPS.order_by(metric_points.c.step).limit(1).scalar_subquery().label("first"),
    _STEPS.order_by(metric_points.c.step.desc()).limit(1).scalar_subquery().label("last"),
    select(func.count())
    .select_from(_STEPS.limit(bindparam("most", type_=Integer)).subquery())
    .scalar_subquery()
    .label("num_points"),
)
_AS_THEY_ARE = (
    select(metric_points.c.step, metric_points.c.time, metric_points.c.value)
    .where(_WANTED)
    .order_by(metric_points.c.step)
)
_IN_BUCKETS = _in_buckets()


def first_value(connection: Connection, job_id: str, name: str, step: int) -> float | None:
    """The first value of a metric at a step or later; None where there is none yet."""
    named = connection.execute(_ID_OF_NAME, {"job_id": job_id, "name": name})
    wanted = {"name_id": named.scalar_one_or_none(), "step": step}
    row = connection.execute(_FROM_STEP, wanted).one_or_none()
    return None if row is None else _nan_if_null(row.value)


_FROM_STEP = (
    select(metric_points.c.step, metric_points.c.value)
    .where(
        metric_points.c.name_id == bindparam("name_id", type_=Integer),
        metric_points.c.step >= bindparam("step", type_=BigInteger),
    )
    .order_by(metric_points.c.step)
    .limit(1)
)


def _nan_if_null(value: float | None) -> float:
    return math.nan if value is None else value


_BATCH = 5000
_MAX_METRICS = 100
_DAY_S = 86_400.0


def steps_to_drop(points: Sequence[tuple[int, bool]]) -> list[int]:
    """Of each two neighbours (step, is NaN) the second, or the first if only the second is NaN."""
    pairs = zip(points[::2], points[1::2], strict=False)
    return [first[0] if second[1] and not first[1] else second[0] for first, second in pairs]


def prune(engine: Engine, *, days: float, max_points: int, now: float) -> int:
    """Delete points older than `days` (0 keeps them), and thin metrics of above `max_points`.

    `now` is Unix seconds. Returns how many points, of at most 100 metrics by age and 100 by count;
    the rest is left for the next call. Raises `StoreUnavailable`.
    """
    transactions, num_deleted = Transactions(engine), 0
    if days > 0:
        cutoff = now - days * _DAY_S
        for name_id in _read_ids(transactions, metric_names.c.oldest_at < cutoff):
            num_deleted += _drop_old(transactions, name_id, cutoff)
    for name_id in _read_ids(transactions, metric_names.c.num_points > max_points):
        num_deleted += _thin(transactions, name_id, max_points)
    return num_deleted


def _read_ids(transactions: Transactions, wanted: ColumnElement[bool]) -> list[int]:
    query = select(metric_names.c.id).where(wanted).limit(_MAX_METRICS)
    return [row["id"] for row in transactions.rows(query)]


def _drop_old(transactions: Transactions, name_id: int, cutoff: float) -> int:
    points = metric_points.c
    is_old = (points.name_id == name_id) & (points.time < cutoff)
    num_deleted = 0
    while True:
        with transactions.write() as connection:
            query = select(points.step).where(is_old).order_by(points.step).limit(_BATCH)
            steps = list(connection.execute(query).scalars())
            _delete_steps(connection, name_id, steps)
            num_deleted += len(steps)
            if len(steps) < _BATCH:
                _correct_bounds(connection, name_id)
                return num_deleted


def _thin(transactions: Transactions, name_id: int, max_points: int) -> int:
    """Drop every second point below the newest half of `max_points`; returns how many."""
    with transactions.write() as connection:
        known, points = metric_names.c, metric_points.c
        above = update(metric_names).where(known.id == name_id, known.num_points > max_points)
        if connection.execute(above.values(num_points=max_points)).rowcount != 1:
            return 0  # Another replica lowered the bound, and thins the metric now.
        own = points.name_id == name_id
        if connection.execute(select(func.count()).where(own)).scalar_one() <= max_points:
            _correct_bounds(connection, name_id)
            return 0
        from_newest = select(points.step).where(own).order_by(points.step.desc())
        newest = connection.execute(from_newest.offset(max_points // 2).limit(1)).scalar_one()
    num_deleted, last = 0, -1
    while True:
        with transactions.write() as connection:
            between = (own, points.step > last, points.step <= newest)
            query = select(points.step, points.value.is_(None)).where(*between)
            found = connection.execute(query.order_by(points.step).limit(_BATCH)).all()
            dropped = steps_to_drop(found)
            _delete_steps(connection, name_id, dropped)
            num_deleted += len(dropped)
            if len(found) < _BATCH:
                _correct_bounds(connection, name_id)
                return num_deleted
        last = found[-1][0]


def _delete_steps(connection: Connection, name_id: int, steps: Sequence[int]) -> None:
    points = metric_points.c
    # In pieces: SQLite takes 32 766 values at most in a statement, and plans short ones faster.
    for start in range(0, len(steps), 500):
        piece = steps[start : start + 500]
        connection.execute(
            delete(metric_points).where(points.name_id == name_id, points.step.in_(piece))
        )


def _correct_bounds(connection: Connection, name_id: int) -> None:
    """Set both bounds of a metric to the exact values."""
    locked = select(metric_names.c.id).where(metric_names.c.id == name_id).with_for_update()
    connection.execute(locked)
    query = select(func.count(), func.min(metric_points.c.time))
    of_metric = metric_points.c.name_id == name_id
    num_points, oldest_at = connection.execute(query.where(of_metric)).one()
    bounds = update(metric_names).where(metric_names.c.id == name_id)
    connection.execute(bounds.values(num_points=num_points, oldest_at=oldest_at))

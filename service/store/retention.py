"""How long metric points are kept: by age, and by count with older points ever farther apart.

*By age*: points older than so many days are deleted. *By count*: a metric of a job with more
points than allowed keeps the newest half of that number as they are, and of the older ones every
second. A metric that goes on is thus thinned again and again: the older, the coarser, and as the
points to drop are chosen by their place alone, means are not moved. A NaN is never dropped for
its neighbour.

Deletes run in small transactions, so that ingest never waits long. `metric_names` bounds from
above how many points a metric has and from below how old they are, so that no look at the points
is needed to find the metrics that have too many; each look corrects the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select, update

from service.store.tables import metric_names, metric_points
from service.store.transactions import Transactions

_BATCH = 5000
_MAX_METRICS = 100
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Retention:
    """Points older than `days` go; 0 keeps them. More than `max_points` of a metric are thinned."""

    days: float
    max_points: int


def steps_to_drop(points: Sequence[tuple[int, bool]]) -> list[int]:
    """Of each two neighbours (step, is NaN) the second, or the first if only the second is NaN."""
    pairs = zip(points[::2], points[1::2], strict=False)
    return [first[0] if second[1] and not first[1] else second[0] for first, second in pairs]


def prune(transactions: Transactions, retention: Retention, now: float) -> int:
    """Delete what `retention` does not keep at `now` (Unix seconds); returns how many points.

    Looks at no more than 100 metrics each way, so that it ends soon; the rest is for next time.
    """
    num_deleted = 0
    if retention.days > 0:
        cutoff = now - retention.days * _DAY_S
        for name_id in _read_ids(transactions, metric_names.c.oldest_at < cutoff):
            num_deleted += _drop_old(transactions, name_id, cutoff)
    for name_id in _read_ids(transactions, metric_names.c.num_points > retention.max_points):
        num_deleted += _thin(transactions, name_id, retention.max_points)
    return num_deleted


def _read_ids(transactions: Transactions, wanted: object) -> list[int]:
    query = select(metric_names.c.id).where(wanted).limit(_MAX_METRICS)  # type: ignore[arg-type]
    with transactions.read() as connection:
        return list(connection.execute(query).scalars())


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
        if not _claim(connection, name_id, max_points):
            return 0
        if _count(connection, name_id) <= max_points:
            _correct_bounds(connection, name_id)
            return 0
        newest = _step_from_newest(connection, name_id, max_points // 2)
    num_deleted, last = 0, None
    while True:
        with transactions.write() as connection:
            found = _points_between(connection, name_id, last, newest)
            dropped = steps_to_drop(found)
            _delete_steps(connection, name_id, dropped)
            num_deleted += len(dropped)
            if len(found) < _BATCH:
                _correct_bounds(connection, name_id)
                return num_deleted
        last = found[-1][0]


def _claim(connection: Connection, name_id: int, max_points: int) -> bool:
    """Lower the bound to the limit; False if another replica did, which thins the metric now."""
    known = metric_names.c
    above = update(metric_names).where(known.id == name_id, known.num_points > max_points)
    return connection.execute(above.values(num_points=max_points)).rowcount == 1


def _count(connection: Connection, name_id: int) -> int:
    query = select(func.count()).where(metric_points.c.name_id == name_id)
    return int(connection.execute(query).scalar_one())


def _step_from_newest(connection: Connection, name_id: int, num_points: int) -> int:
    """The step that so many points lie above."""
    points = metric_points.c
    query = select(points.step).where(points.name_id == name_id).order_by(points.step.desc())
    return int(connection.execute(query.offset(num_points).limit(1)).scalar_one())


def _points_between(
    connection: Connection, name_id: int, after: int | None, to_step: int
) -> list[tuple[int, bool]]:
    points = metric_points.c
    query = select(points.step, points.value.is_(None)).where(
        points.name_id == name_id, points.step <= to_step
    )
    if after is not None:
        query = query.where(points.step > after)
    found = connection.execute(query.order_by(points.step).limit(_BATCH))
    return [(step, bool(is_nan)) for step, is_nan in found]


def _delete_steps(connection: Connection, name_id: int, steps: Sequence[int]) -> None:
    points = metric_points.c
    # In pieces: SQLite takes 32 766 values at most in a statement, and plans short ones faster.
    for start in range(0, len(steps), 500):
        piece = steps[start : start + 500]
        connection.execute(
            delete(metric_points).where(points.name_id == name_id, points.step.in_(piece))
        )


def _correct_bounds(connection: Connection, name_id: int) -> None:
    """Set both bounds of a metric to what is true."""
    locked = select(metric_names.c.id).where(metric_names.c.id == name_id).with_for_update()
    connection.execute(locked)
    query = select(func.count(), func.min(metric_points.c.time))
    of_metric = metric_points.c.name_id == name_id
    num_points, oldest_at = connection.execute(query.where(of_metric)).one()
    bounds = update(metric_names).where(metric_names.c.id == name_id)
    connection.execute(bounds.values(num_points=num_points, oldest_at=oldest_at))

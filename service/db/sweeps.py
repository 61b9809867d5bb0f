"""Sweeps and their trials. Every method of the store raises `StoreUnavailable`.

A trial's number is its key: of two that would make the next trial of a sweep one succeeds, and none
once the sweep is cancelled.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, RowMapping, delete, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from service.db.engine import Transactions, repeated
from service.db.metrics import first_value
from service.db.queries import select_jobs
from service.db.rows import faults_of, job_of
from service.db.tables import jobs, sweep_trials, sweeps
from service.domain.models import Job, JobStatus
from service.domain.sweeps import Observed, Sweep, SweepStatus, Trial
from service.errors import ServiceError, SweepEnded, SweepNotEnded, SweepNotFound

_LIVE = (SweepStatus.RUNNING.value, SweepStatus.CANCELLING.value)
# Columns of their own; all else is in `definition`.
_COLUMNS = ("id", "project", "status", "message", "created_at", "ended_at")
_SWEEP: TypeAdapter[Sweep] = TypeAdapter(Sweep)


class SweepStore(Transactions):
    # ---- sweeps

    def create(self, sweep: Sweep) -> None:
        fields = asdict(sweep)
        row = {name: fields.pop(name) for name in _COLUMNS}
        self.execute(insert(sweeps), {**row, "status": sweep.status.value, "definition": fields})

    def get(self, sweep_id: str) -> Sweep:
        """Read a sweep; raises `SweepNotFound`."""
        with self.read() as connection:
            return _read(connection, sweep_id)

    def list_sweeps(
        self, projects: Collection[str] | None, *, after: str | None = None, limit: int = 50
    ) -> tuple[list[Sweep], str | None]:
        """Sweeps of some projects, or of all, newest first, behind the sweep with the id `after`.

        The cursor is the id of the last one of the page. Raises `SweepNotFound` where there is no
        sweep `after`.
        """
        place = (sweeps.c.created_at, sweeps.c.id)
        query = select(sweeps).order_by(*(column.desc() for column in place)).limit(limit + 1)
        if projects is not None:
            query = query.where(sweeps.c.project.in_(projects))
        if after is not None:
            last = self.rows(select(*place).where(sweeps.c.id == after))
            if not last:
                raise SweepNotFound(after)
            query = query.where(tuple_(*place) < tuple_(*last[0].values()))
        found = self.rows(query)
        page = found[:limit]
        following = page[-1]["id"] if len(found) > limit else None
        return self.readable(page, _sweep_of), following

    def list_live(self) -> list[Sweep]:
        """Sweeps that have not ended, oldest first."""
        query = select(sweeps).where(sweeps.c.status.in_(_LIVE)).order_by(sweeps.c.created_at)
        return self.readable(self.rows(query), _sweep_of)

    @repeated
    def cancel(self, sweep_id: str) -> Sweep:
        """Let no further trials begin; raises `SweepNotFound` or `SweepEnded`."""
        with self.write() as connection:
            sweep = _read(connection, sweep_id)
            if sweep.status.is_terminal:
                raise SweepEnded(sweep_id, sweep.status)
            _change(connection, sweep_id, status=SweepStatus.CANCELLING.value)
            return _read(connection, sweep_id)

    @repeated
    def end(self, sweep_id: str, status: SweepStatus, message: str, now: float) -> None:
        """Note how a sweep has ended, unless that is known, or it was cancelled meanwhile."""
        from_ = _LIVE if status is SweepStatus.CANCELLED else _LIVE[:1]
        with self.write() as connection:
            _change(connection, sweep_id, from_, status=status.value, message=message, ended_at=now)

    @repeated
    def delete(self, sweep_id: str) -> None:
        """Forget a sweep and its trials, not their jobs; `SweepNotFound` or `SweepNotEnded`."""
        with self.write() as connection:
            if not _read(connection, sweep_id).status.is_terminal:
                raise SweepNotEnded(sweep_id)
            connection.execute(delete(sweep_trials).where(sweep_trials.c.sweep_id == sweep_id))
            connection.execute(delete(sweeps).where(sweeps.c.id == sweep_id))

    # ---- trials

    def add_trial(self, trial: Trial) -> bool:
        """Store a new trial; False if there is one of its number, or the sweep ends."""
        try:
            with self.write() as connection:
                locked = select(sweeps.c.status).where(sweeps.c.id == trial.sweep_id)
                status = connection.execute(locked.with_for_update()).scalar_one_or_none()
                if status != SweepStatus.RUNNING.value:
                    return False
                connection.execute(insert(sweep_trials), asdict(trial))
        except IntegrityError:
            return False
        return True

    @repeated
    def change_trial(self, trial: Trial, **values: Any) -> None:
        own = (sweep_trials.c.sweep_id == trial.sweep_id, sweep_trials.c.number == trial.number)
        self.execute(update(sweep_trials).where(*own).values(**values))

    def observe(self, sweep: Sweep) -> list[Observed]:
        """The trials of a sweep with their jobs, in order, and what was reached of the metric."""
        query = select(sweep_trials).where(sweep_trials.c.sweep_id == sweep.id)
        found = [_trial_of(row) for row in self.rows(query.order_by(sweep_trials.c.number))]
        ids = [trial.job_id for trial in found if trial.job_id is not None]
        rows = self.rows(select_jobs().where(jobs.c.id.in_(ids)))
        readable = {job.id: job for job in self.readable(rows, job_of)}
        ended = {each.value for each in JobStatus if each.is_terminal}  # of those known here
        live = {row["id"] for row in rows if row["status"] not in ended}
        pairs = [(trial, readable.get(trial.job_id or "")) for trial in found]
        return [
            Observed(trial, job, self._reached(sweep, trial, job), not job and trial.job_id in live)
            for trial, job in pairs
        ]

    def _reached(self, sweep: Sweep, trial: Trial, job: Job | None) -> float | None:
        """The first value of the metric at the next rung of a trial or later, if it is there."""
        stopping = sweep.early_stopping
        if stopping is None or trial.job_id is None or trial.stopped_at is not None:
            return None
        step = stopping.rung_step(len(trial.rungs))
        # Each trial is looked at every 2 s: only one that is told to be there is asked for more.
        if job is not None and job.progress.step < step:
            return None
        with self.read() as connection:
            return first_value(connection, trial.job_id, sweep.metric, step)


def _change(
    connection: Connection, sweep_id: str, statuses: Sequence[str] = _LIVE, **values: Any
) -> None:
    chosen = (sweeps.c.id == sweep_id, sweeps.c.status.in_(statuses))
    connection.execute(update(sweeps).where(*chosen).values(**values))


def _read(connection: Connection, sweep_id: str) -> Sweep:
    query = select(sweeps).where(sweeps.c.id == sweep_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise SweepNotFound(sweep_id)
    return _sweep_of(row)


def _sweep_of(row: RowMapping) -> Sweep:
    # A spec of an earlier version may name steps to trace.
    row["definition"]["spec"].get("training", {}).pop("trace", None)
    try:
        return _SWEEP.validate_python({name: row[name] for name in _COLUMNS} | row["definition"])
    except ValidationError as error:
        raise ServiceError(
            f"sweep {row['id']} cannot be read ({faults_of(error)}); was it stored by another "
            "version of the service? Run that version"
        ) from error


def _trial_of(row: RowMapping) -> Trial:
    return Trial(**{**row, "rungs": tuple(row["rungs"])})

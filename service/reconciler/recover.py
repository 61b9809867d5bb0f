"""Rebuilds a lost database from run storage: `shardloom recover`.

Every run folder has `job.json`, the specs of the attempts and the records of their drivers. From
these the rows are made again, metrics and timelines included. A job that has ended according to
`job.json` stays ended. Of any other the newest attempt is taken to be live: the reconciler then
asks the cluster, so a job that still trains goes on, and one that ended meanwhile ends as its
driver reported. While its rows are being made a job is PAUSED, so that nothing happens to it; an
interrupted recovery is repeated and goes on where it stopped.

A `job.json` has a seal by the service's secret key, since code of jobs can write there. One without
it is left alone unless it is said that all are to be believed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.db.jobs import JobStore
from service.domain.lifecycle import MAX_ATTEMPTS, finish
from service.domain.models import Attempt, EndReason, Job, JobStatus, ReportedEnd, attempt_id
from service.errors import (
    AttemptNotFound,
    JobNotFound,
    JobUnreadable,
    RecordRefused,
    ServiceError,
)
from service.files import make_private
from service.jobs.run_storage import read_jobs
from service.observability.metrics import ServiceMetrics
from service.reconciler.outbox import OutboxCollector
from service.settings import Settings, faults_of
from trainer.protocol.events import Moment
from trainer.protocol.run_dir import RunDir
from trainer.spec.job import JobSpec

logger = logging.getLogger(__name__)
# Of attempts: a job that is paused or loses its hosts may have more than it may have failures.
_MAX_INDEX = 10_000
# Of a timeline, looked at for the end of an attempt.
_NUM_LINES = 1000
_MARK = "being recovered from run storage"
_NO_SEAL = (
    "it has no seal by this service's secret key: a job changed it, an older version wrote it, or "
    "the key is another one; add that key behind the present one, after a comma, or look at the "
    "file and recover with --believe-all"
)


@dataclass
class Recovery:
    """Ids of recovered jobs, of those known already, and folders left alone (with the reason)."""

    recovered: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def recover_jobs(
    store: JobStore,
    settings: Settings,
    clock: Callable[[], float] = time.time,
    *,
    believe_all: bool = False,
) -> Recovery:
    """Make the rows of every job in run storage that the store does not know; raises OSError.

    Where a `job.json` has no seal of this service it is left alone, unless `believe_all`.
    """
    found = Recovery()
    collector = OutboxCollector(store, settings, ServiceMetrics(), clock)
    for folder, document, is_sealed in read_jobs(settings):
        try:
            known = _known(store, folder.name)
        except JobUnreadable as error:
            found.refused[folder.name] = str(error)
            continue
        if known is not None and known.message != _MARK:
            found.known.append(known.id)
            continue
        try:
            job, end = known or _job_of(folder, document), _end_in(document)
            if not (is_sealed or believe_all):
                raise ValueError(_NO_SEAL)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            found.refused[folder.name] = f"job.json cannot be used: {error}"
            continue
        try:
            _recover(store, collector, RunDir(folder), job, end)
        except (OSError, RecordRefused, ValueError, OverflowError) as error:
            # Jobs write there: what one of them made must not stand in the way of the others.
            found.refused[folder.name] = f"it cannot be recovered: {error}"
            continue
        found.recovered.append(job.id)
    return found


def _known(store: JobStore, job_id: str) -> Job | None:
    try:
        return store.get_job(job_id)
    except JobNotFound:
        return None


def _job_of(folder: Path, document: dict[str, Any] | None) -> Job:
    """The job of a run folder, not yet stored; raises ValueError, KeyError or TypeError."""
    if document is None or document["id"] != folder.name:
        raise ValueError("it is damaged, or of another job")
    spec = JobSpec.model_validate(document["spec"], context={"stored": True})
    return Job(
        id=folder.name,
        name=spec.name,
        spec=spec,
        status=JobStatus.PAUSED,
        created_at=_moment(document["created_at"]),
        project=spec.project,
        priority=spec.priority,
        queued_at=_moment(document["queued_at"]),
        num_failures=min(int(document["num_failures"]), MAX_ATTEMPTS),
        message=_MARK,
    )


def _moment(value: Any) -> float:
    return TypeAdapter[float](Moment).validate_python(value)


def _end_in(document: dict[str, Any] | None) -> ReportedEnd | None:
    """The end according to `job.json`, if any; raises ValueError, KeyError or TypeError."""
    told = document.get("ended") if document else None
    if told is None:
        return None
    return ReportedEnd(EndReason(told["reason"]), str(told["message"]), _moment(told["ended_at"]))


def _recover(
    store: JobStore, collector: OutboxCollector, run_dir: RunDir, job: Job, end: ReportedEnd | None
) -> None:
    if _known(store, job.id) is None:
        store.create_job(job, idempotency_key=None, request_hash="")
    attempts = list(_attempts_of(run_dir, job.id))
    for attempt in attempts[:-1]:
        _add(store, collector, attempt)
    for attempt in attempts[-1:]:
        _add(store, collector, attempt, may_live=end is None, untold_end=end)
    job = replace(store.get_job(job.id), message="", status=JobStatus.QUEUED)
    newest = store.get_attempt(attempts[-1].id) if attempts else None
    if end is not None:
        ended = finish(job, end.reason, end.message, end.time, newest)
        store.update_job(ended.job, timeline=ended.timeline)
    else:
        store.update_job(_going_on(job, newest))
    logger.info("job %s (%s) is back with %d attempt(s)", job.id, job.name, len(attempts))


def _going_on(job: Job, newest: Attempt | None) -> Job:
    """A live job, as far as its folder tells."""
    if newest is None:
        return job
    reported = newest.reported_end.reason if newest.reported_end else None
    status = JobStatus.RUNNING if job.started_at is not None else JobStatus.STARTING
    # One that its driver reported as paused waits for a user to resume it.
    return replace(job, status=status, pause_requested=reported is EndReason.PAUSED)


def _attempts_of(run_dir: RunDir, job_id: str) -> Iterator[Attempt]:
    """Attempts that have a spec in a folder, in order, as they were when they were submitted."""
    prefix = f"{job_id}-a"
    specs = run_dir.root.glob(f"attempts/{prefix}*/spec.json")
    found = {path.parent.name.removeprefix(prefix) for path in specs}
    for index in range(_MAX_INDEX):
        if str(index) not in found:
            continue
        name = attempt_id(job_id, index)
        written_at = run_dir.attempt(name).spec_path.stat().st_mtime
        yield Attempt(
            id=name,
            job_id=job_id,
            index=index,
            created_at=written_at,
            last_submit_at=written_at,
            submitted_at=written_at,
        )


def _add(
    store: JobStore,
    collector: OutboxCollector,
    attempt: Attempt,
    *,
    may_live: bool = False,
    untold_end: ReportedEnd | None = None,
) -> None:
    """Store an attempt and what its driver recorded; one that may not live has ended, with the
    `untold_end` where its driver has told none.
    """
    job = replace(store.get_job(attempt.job_id), current_attempt_id=attempt.id)
    try:
        store.get_attempt(attempt.id)
    except AttemptNotFound:
        store.update_job(job, attempt=attempt)
    while collector.collect(attempt.job_id, attempt.index):
        pass
    told = store.get_attempt(attempt.id)
    if may_live or told.end_reason is not None:
        return
    last_at = _last_told_at(store, told)
    message = "nothing on run storage says how it ended"
    forgotten = ReportedEnd(EndReason.FORGOTTEN, message, last_at)
    end = told.reported_end or untold_end or forgotten
    # What is reported bears the time of its arrival, which is now.
    ended_at = last_at if told.reported_end else end.time
    ended = replace(told, end_reason=end.reason, message=end.message, ended_at=ended_at)
    store.update_job(store.get_job(attempt.job_id), attempt=ended)


def _last_told_at(store: JobStore, attempt: Attempt) -> float:
    """When a driver told the end of its attempt, else the newest of the lines about it."""
    for kinds in (("attempt_ended",), ()):
        lines = store.list_timeline(attempt.job_id, kinds=kinds, newest=True, limit=_NUM_LINES)
        times = [line.time for line in lines if line.attempt_id == attempt.id]
        if times:
            return max(times)
    return attempt.created_at


def main(*, believe_all: bool) -> int:
    """Recover with the settings of the environment; the exit code of the command.

    1 if a folder had to be left alone, 3 if nothing can be recovered now.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        settings = Settings()
        make_private(settings.home)
        store = JobStore.open(settings.database_url)
        found = recover_jobs(store, settings, believe_all=believe_all)
        store.close()
    except ValidationError as error:
        logger.error("%s", "\n".join(faults_of(error)))
        return 3
    except (ServiceError, OSError) as error:
        logger.error("jobs cannot be recovered: %s", error)
        return 3
    logger.info("%d job(s) recovered, %d known already", len(found.recovered), len(found.known))
    for folder, why in found.refused.items():
        logger.error("%s: left alone: %s", folder, why)
    return 1 if found.refused else 0

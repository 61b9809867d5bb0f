"""Runs scheduling passes: reads queue and cluster, and stores what `policy.admit` decides.

Every replica of the service computes each pass, and so knows the positions of the queued jobs,
which are never stored. One at a time carries it out, under a lock in the store that every start and
preemption renews, so that no capacity is allocated twice. Each is one compare-and-set write, so a
pass that is cut off is completed by the next. While the cluster does not answer nothing starts on
it and nothing is preempted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from service.backends.base import Backend, has_own_cluster
from service.db.jobs import JobStore
from service.db.projects import Lock, ProjectStore, hold_lock
from service.domain.lifecycle import Decision, preempt, start
from service.domain.models import Job, JobStatus
from service.domain.timeline import ServiceEvent, timeline_event
from service.errors import (
    BackendUnreachable,
    LockLost,
    ServiceError,
    StaleVersion,
    StoreUnavailable,
)
from service.jobs.run_storage import limit_growth
from service.observability.metrics import ServiceMetrics
from service.scheduler.policy import (
    Capacity,
    Preemption,
    QueuePosition,
    Start,
    admit,
    is_starting,
)
from service.settings import Settings
from service.storage import in_time

logger = logging.getLogger(__name__)
_LOCK = "queue"
# A pass takes far less; a replica that dies in one delays the others for this long.
_LOCK_S = 10.0
_LIFT_INTERVAL_S = 60.0
# A job may wait for days: the cluster is not asked for its hosts every second.
_CAPACITY_AGE_S = 3.0


@dataclass
class SchedulerRunner:
    """Schedules the queued jobs of `store` on `backend`; `clock` gives Unix seconds.

    `telemetry` is told whether the shared cluster answered, and who left the queue.
    """

    store: JobStore
    backend: Backend
    settings: Settings
    clock: Callable[[], float]
    telemetry: ServiceMetrics

    def __post_init__(self) -> None:
        self._projects = ProjectStore(self.store.engine)
        self._seen: tuple[float, Capacity] | None = None
        self._lifts_at = 0.0
        # Replaced as a whole: any thread may read them.
        self._places: Mapping[str, QueuePosition] = {}
        self._live: dict[str, Job] = {}
        self._faulty: set[str] = set()
        self._untold: set[str] = set()
        self._message = ""
        self._writer = ThreadPoolExecutor(1, "growth-limits")
        self._written: Future[None] | None = None

    def admit(self) -> list[Job] | None:
        """Run a pass; the live jobs as it left them, None where nothing is queued."""
        # Jobs may have been kept from growing by this replica, or by one that died.
        # Later than an interval that is due only where the clock was set back.
        may_be_limited = not 0 < self._lifts_at - self.clock() <= _LIFT_INTERVAL_S
        if not (self.store.has_queued_jobs() or may_be_limited):
            self._places = {}
            return None
        replica, now = self.settings.replica_id, self.clock()
        with hold_lock(self.store, _LOCK, replica, now, _LOCK_S) as lock:
            return self._pass(lock)

    def placed(self, job: Job) -> Job:
        """A job with its position in the queue and why it waits, as of the last pass."""
        place = self._places.get(job.id) if job.status is JobStatus.QUEUED else None
        if place is None:
            return job
        facts = {name: value for name, value in vars(place).items() if name != "job"}
        note = replace(job.queue_note, **facts)
        return replace(job, queue_note=note, message=job.message or self._message)

    def close(self) -> None:
        """Wait for the growth limits that are being written."""
        self._writer.shutdown()

    def _pass(self, lock: Lock | None) -> list[Job]:
        live, now = self.store.list_live_jobs(), self.clock()
        self._live = {job.id: job for job in live}
        queued = [job for job in live if job.status is JobStatus.QUEUED]
        running = [job for job in live if not job.status.is_at_rest]
        quotas = {project.name: project for project in self._projects.list()}
        own = [job for job in queued if has_own_cluster(job)]
        is_growing = self.settings.cluster_max_workers is not None
        is_shared = len(own) < len(queued) or is_growing or any(map(is_starting, running))
        try:
            capacity = self._capacity() if is_shared else Capacity()
        except BackendUnreachable as error:
            self.telemetry.backend_asked("shared", False)
            admission = admit(own, running, quotas, Capacity(), now)
            shared = [job for job in queued if not has_own_cluster(job)]
            admission.places += [
                QueuePosition(job, None, "the cluster does not answer") for job in shared
            ]
            self._message, limits = str(error), None
        else:
            admission = admit(queued, running, quotas, capacity, now)
            self._message, limits = "", admission.growth_limits
        self._places = {place.job.id: place for place in admission.places}
        # A job that cannot be looked at is logged once.
        for job_id in admission.faults.keys() - self._faulty:
            logger.error("job %s cannot be scheduled", job_id, exc_info=admission.faults[job_id])
        self._faulty = {*admission.faults}
        if lock is not None:
            if limits is not None:
                self._limit_growth(running, limits)
            if admission.starts:
                # They are limited, too, once they have files.
                self._lifts_at = now
            for preemption in admission.preemptions:
                self._guarded(preemption.job, self._preempt, preemption, now, lock)
            for begun in admission.starts:
                self._guarded(begun.job, self._start, begun, now, lock)
        return list(self._live.values())

    def _limit_growth(self, running: Sequence[Job], limits: Mapping[str, int]) -> None:
        """Limit how far elastic jobs may grow, and lift earlier limits, in another thread."""
        self._lifts_at = self.clock() + (0.0 if limits else _LIFT_INTERVAL_S)
        if self._written is None or self._written.done():
            elastic = [job for job in running if job.spec.parallelism.is_elastic]
            self._written = self._writer.submit(self._write_limits, elastic, limits)

    def _write_limits(self, elastic: Sequence[Job], limits: Mapping[str, int]) -> None:
        untold = {}
        for job in elastic:
            write = partial(limit_growth, self.settings, job, limits.get(job.id))
            try:
                in_time(self.settings.runs_dir, write)
            except OSError as error:
                untold[job.id] = error
        for job_id in untold.keys() - self._untold:
            text = "job %s is not told how far it may grow, trying again: %s"
            logger.warning(text, job_id, untold[job_id])
        self._untold = set(untold)

    def _capacity(self) -> Capacity:
        """The capacity of the cluster, under the setting; up to 3 s old.

        Raises `BackendUnreachable`.
        """
        if self._seen is None or not 0.0 <= self.clock() - self._seen[0] < _CAPACITY_AGE_S:
            self._seen = None
            if self.settings.queue_capacity == "unlimited":
                # Capacity is not counted, but the cluster has to answer.
                self.backend.check()
                found = Capacity()
            else:
                found = Capacity(self.backend.hosts(), self.settings.cluster_max_workers)
            self._seen = (self.clock(), found)
            self.telemetry.backend_asked("shared", True)
        return self._seen[1]

    @staticmethod
    def _guarded(job: Job, act: Callable[..., object], *args: object) -> None:
        """Act on a job; one that was written meanwhile is left for the next pass.

        An error of one job, such as unreadable files, does not delay others.
        """
        try:
            act(*args)
        except StaleVersion as error:
            logger.debug("job %s: %s", job.id, error)
        except (OSError, ServiceError) as error:
            if isinstance(error, StoreUnavailable | LockLost):
                raise
            logger.warning("job %s stays in the queue for now: %s", job.id, error)

    def _preempt(self, preemption: Preemption, now: float, lock: Lock) -> None:
        victim = preemption.job
        self._store(preempt(victim, preemption.by, now, self.settings.pause_grace_s), lock)
        waiting = self.store.get_job(preemption.by.id)
        logger.info("job %s makes way for job %s", victim.id, waiting.id)
        message = f"{victim.named_for(waiting)} of priority {victim.priority} makes way"
        told = timeline_event(waiting, None, now, ServiceEvent.PREEMPTING, message)
        self._store(Decision(waiting, None, timeline=(told,)), lock)

    def _start(self, begun: Start, now: float, lock: Lock) -> None:
        known = begun.job.queue_note
        note = replace(known, workers=begun.workers, max_workers=begun.max_workers)
        self._store(start(begun.job, now, note), lock)
        self.telemetry.left_queue(begun.job)

    def _store(self, decision: Decision, lock: Lock) -> None:
        self._live[decision.job.id] = self.store.update_job(
            decision.job,
            attempt=decision.attempt,
            timeline=decision.timeline,
            fence=lambda connection: lock.keep(connection, self.clock()),
        )
        for told in decision.timeline:
            logger.info("job %s: %s", decision.job.id, told.message)

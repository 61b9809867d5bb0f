"""Runs scheduling passes: reads queue and cluster, and stores what `policy.admit` decides.

One replica of the service does so at a time, under a lock in the store, so that no capacity is
allocated twice. Each start, preemption and position is one compare-and-set write, so a pass that
is cut off is completed by the next. While the cluster does not answer nothing starts on it and
nothing is preempted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.backends.base import Backend, has_own_cluster
from service.db.jobs import JobStore
from service.db.projects import ProjectStore, hold_lock
from service.domain.lifecycle import Decision, preempt, start
from service.domain.models import Job, JobStatus, QueueState
from service.domain.timeline import timeline_event
from service.errors import BackendUnreachable, ServiceError, StaleVersion, StoreUnavailable
from service.jobs.run_storage import limit_growth
from service.scheduler.policy import Admission, Capacity, Preemption, QueuePosition, Start, admit
from service.settings import Settings

logger = logging.getLogger(__name__)
_LOCK = "queue"
# A pass takes far less; a replica that dies in one delays the others for this long.
_LOCK_S = 10.0
# Positions further behind would be rewritten with every start ahead of them.
MAX_PLACES = 200
# Positions written in one pass, which the reconciler waits for.
_MAX_NOTES = 500
_LIFT_INTERVAL_S = 60.0
# A job may wait for days: the cluster is not asked for its hosts every second.
_CAPACITY_AGE_S = 3.0


@dataclass
class SchedulerRunner:
    """Schedules the queued jobs of `store` on `backend`; `clock` gives Unix seconds.

    `before_start` is called with a job that is about to get another attempt, `note_answer` with
    whether the backend answered.
    """

    store: JobStore
    backend: Backend
    settings: Settings
    clock: Callable[[], float]
    before_start: Callable[[Job], None] = lambda job: None
    note_answer: Callable[[bool], None] = lambda has_answered: None

    def __post_init__(self) -> None:
        self._projects = ProjectStore(self.store.engine)
        self._seen: tuple[float, Capacity] | None = None
        self._lifts_at = 0.0

    def admit(self) -> None:
        """Run a pass, unless another replica does or nothing is queued."""
        # Jobs may have been kept from growing by this replica, or by one that died.
        may_be_limited = self.clock() >= self._lifts_at
        if not (self.store.has_queued_jobs() or may_be_limited):
            return
        replica, now = self.settings.replica_id, self.clock()
        with hold_lock(self.store, _LOCK, replica, now, _LOCK_S) as is_held:
            if is_held:
                self._pass()

    def _pass(self) -> None:
        live, now = self.store.list_live_jobs(), self.clock()
        queued = [job for job in live if job.status is JobStatus.QUEUED]
        running = [job for job in live if not job.status.is_at_rest]
        if not queued and self.settings.cluster_max_workers is None:
            self._limit_growth(running, {})
            return
        quotas = {project.name: project for project in self._projects.list()}
        own = [job for job in queued if has_own_cluster(job)]
        try:
            is_shared = len(own) < len(queued) or self.settings.cluster_max_workers is not None
            capacity = self._capacity() if is_shared else Capacity()
        except BackendUnreachable as error:
            self.note_answer(False)
            shared = [job for job in queued if not has_own_cluster(job)]
            silent = [QueuePosition(job, None, "the cluster does not answer") for job in shared]
            self._note_all(silent, str(error))
            self._carry_out(admit(own, running, quotas, Capacity(), now), now)
            return
        admission = admit(queued, running, quotas, capacity, now)
        self._carry_out(admission, now)
        self._limit_growth(running, admission.growth_limits)

    def _limit_growth(self, running: Sequence[Job], limits: Mapping[str, int]) -> None:
        """Limit how far elastic jobs may grow, and lift earlier limits."""
        for job in running:
            if job.spec.parallelism.is_elastic:
                self._guarded(job, limit_growth, self.settings, job, limits.get(job.id))
        self._lifts_at = self.clock() + (0.0 if limits else _LIFT_INTERVAL_S)

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
            self.note_answer(True)
        return self._seen[1]

    def _carry_out(self, admission: Admission, now: float) -> None:
        for preemption in admission.preemptions:
            self._guarded(preemption.job, self._preempt, preemption, now)
        for begun in admission.starts:
            if self.clock() - now < _LOCK_S:
                self._guarded(begun.job, self._start, begun, now)
        self._note_all(admission.places)

    def _note_all(self, places: Sequence[QueuePosition], message: str = "") -> None:
        """Store changed positions, at most `_MAX_NOTES` in one pass."""
        changed = [
            (place, noted) for place in places if (noted := _noted(place, message)) != place.job
        ]
        for place, noted in changed[:_MAX_NOTES]:
            self._guarded(place.job, self.store.update_job, noted)

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
            if isinstance(error, StoreUnavailable):
                raise
            logger.warning("job %s stays in the queue for now: %s", job.id, error)

    def _preempt(self, preemption: Preemption, now: float) -> None:
        grace_s = self.settings.pause_grace_s
        victim = preemption.job
        self._store(preempt(victim, preemption.by, now, grace_s))
        waiting = self.store.get_job(preemption.by.id)
        logger.info("job %s makes way for job %s", victim.id, waiting.id)
        message = f"{victim.named_for(waiting)} of priority {victim.priority} makes way"
        told = timeline_event(waiting, None, now, "preempting", message)
        self._store(Decision(waiting, None, timeline=(told,)))

    def _start(self, begun: Start, now: float) -> None:
        self.before_start(begun.job)
        # That may have raised the version: a job that changed otherwise is left.
        job = self.store.get_job(begun.job.id)
        if replace(job, version=begun.job.version) != begun.job:
            raise StaleVersion(job.id, begun.job.version)
        note = QueueState(workers=begun.workers, max_workers=begun.max_workers)
        self._store(start(job, now, note))

    def _store(self, decision: Decision) -> None:
        self.store.update_job(decision.job, attempt=decision.attempt, timeline=decision.timeline)
        for told in decision.timeline:
            logger.info("job %s: %s", decision.job.id, told.message)


def _noted(place: QueuePosition, message: str) -> Job:
    """A job with its position; `message` is an error of its cluster."""
    position, reason = place.position, place.reason
    if position is not None and position > MAX_PLACES:
        position, reason = None, f"more than {MAX_PLACES} jobs are ahead"
    note = replace(QueueState.of(place.job), position=position, reason=reason)
    return replace(place.job, queue_note=note.document, message=message)

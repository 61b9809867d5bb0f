"""The reconciler: observes live jobs, decides, stores the decision and acts on the backend.

It is level-triggered: each pass starts from the stored state and what the cluster reports now, so
a crash at any point is repaired by the next pass. An action is stored before it is carried out (an
attempt's row before its submission, which has the same id), so repeating it is harmless. A write
that lost a race (`StaleVersion`) is dropped; the next pass decides anew.

The loop itself waits for the database only. One thread schedules the queue, another asks the
backend for all attempts at once, and live jobs are reconciled in a thread pool, never one twice at
the same time, so that a slow backend delays that job alone; those that a user wants cancelled or
paused have threads of their own. The threads take turns in computing (`_ComputeSlot`), as under the
GIL eight that compute would delay a request eight times as long as one. No backend call happens
inside a transaction, and calls to run storage have a deadline (`service.storage`), but for those of
housekeeping: nobody waits for its thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from service.backends.base import Backend
from service.db.engine import write_in_background
from service.db.jobs import JobStore
from service.domain.lifecycle import (
    NOT_ASKED,
    PAUSING,
    Action,
    Decision,
    decide,
    end_attempt,
    submission_accepted,
)
from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    Observation,
    ObservedState,
    attempt_id,
)
from service.errors import (
    BackendUnreachable,
    ServiceError,
    StaleVersion,
    StoreUnavailable,
    SubmissionRefused,
)
from service.files import make_writable
from service.jobs.actions import copy_resize_request
from service.jobs.code_archives import CodeGone
from service.jobs.run_storage import (
    ask_to_pause,
    note_rewind,
    run_dir_of,
    update_job_file,
    withdraw_pause,
    write_job,
)
from service.observability.logging_setup import about
from service.observability.metrics import CLUSTERS, ServiceMetrics
from service.observability.tracing import Tracing
from service.reconciler.housekeeping import Housekeeper
from service.reconciler.outbox import OutboxCollector
from service.reconciler.submission import (
    QuotaTooSmall,
    plan_attempt,
    submission_of,
    write_spec,
)
from service.scheduler.runner import SchedulerRunner
from service.settings import Settings
from service.storage import in_time
from trainer.spec.job import JobSpec

logger = logging.getLogger(__name__)
_SLOT_TIMEOUT_S = 0.05


class _ComputeSlot:
    """Lets one thread compute at a time; one that has waited `timeout_s` goes ahead regardless.

    So a thread that is stuck, on storage that hangs for instance, delays others that long only.
    """

    def __init__(self, timeout_s: float = _SLOT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._slot = threading.Semaphore(1)
        self._mine = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._mine.is_held = self._slot.acquire(timeout=self._timeout_s)
        try:
            yield
        finally:
            if self._mine.is_held:
                self._slot.release()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Wait for something else, outside of the slot."""
        if not self._mine.is_held:
            yield
            return
        self._slot.release()
        try:
            yield
        finally:
            self._mine.is_held = self._slot.acquire(timeout=self._timeout_s)


_ALIVE = (ObservedState.PENDING, ObservedState.RUNNING, ObservedState.UNREACHABLE)
_NOTHING: Future[None] = Future()
_NOTHING_SUBMITTED = Observation(ObservedState.UNREACHABLE, "nothing is submitted")
_NEVER_SENT = Observation(ObservedState.NOT_FOUND, "it was never sent")
_NOTHING_SEEN: Mapping[str, Observation] = MappingProxyType({})
_MIN_INTERVAL_S = 0.25
# In each pass, so that replicas that start together share the jobs.
_MAX_NEW_LEASES = 64
# From so many attempts on the backend is asked for all at once: Ray's answer holds every job that
# it ran, others' as well.
_OBSERVE_ALL_FROM = 16
NUM_THREADS = 8
_NUM_URGENT_THREADS = 4
# A pass takes far less where the database and the cluster answer.
_SCHEDULING_S = 0.2


class Reconciler:
    """Drives every live job of `store` on `backend`; `clock` gives Unix seconds.

    `dispatched_at` is when it last went through the jobs.
    """

    def __init__(
        self,
        store: JobStore,
        backend: Backend,
        settings: Settings,
        telemetry: ServiceMetrics,
        clock: Callable[[], float] = time.time,
        tracing: Tracing | None = None,
    ) -> None:
        self._store = store
        self._tracing = tracing or Tracing()
        self._backend = backend
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._outboxes = OutboxCollector(store, settings, telemetry, clock)
        self._housekeeper = Housekeeper(store, settings, clock)
        self._queue = SchedulerRunner(store, backend, settings, clock, telemetry)
        # By `resources.cluster`.
        self._is_reachable = dict.fromkeys(CLUSTERS, True)
        self._slot = _ComputeSlot()
        # What is being done or waits for a thread; None while the backend is asked of a job. The
        # lock is for whoever begins a job of which it is asked: a user's request does not wait.
        self._busy: dict[str, Future[None] | None] = {}
        self._beginning = threading.Lock()
        # Versions of jobs of which nothing follows while they run: time alone changes nothing.
        self._settled: dict[str, int] = {}
        # Versions that jobs had when they were last begun, since the last look at all of them.
        self._begun: dict[str, int] = {}
        self._woken = threading.Event()
        self._closing = threading.Event()
        executor = partial(ThreadPoolExecutor, initializer=write_in_background)
        # By `resources.cluster`: where one kind does not answer the other is looked after.
        self._pools = {each: executor(NUM_THREADS, f"reconcile-{each}") for each in CLUSTERS}
        self._observers = {each: executor(1, f"observe-{each}") for each in CLUSTERS}
        self._urgent = executor(_NUM_URGENT_THREADS, "reconcile-urgent")
        # Jobs that are in there already, which keep their turn.
        self._hurried: set[str] = set()
        self._scheduler = executor(1, "schedule")
        self._late: Future[list[Job] | None] | None = None
        # Whether there was a wake since the last scheduling pass began.
        self._is_told = False
        self.dispatched_at = clock()
        self._thread = threading.Thread(target=self._loop, name="reconciler", daemon=True)

    # ---- the loop

    def start(self) -> None:
        """Begin to reconcile, now and at every interval."""
        self._thread.start()
        self._housekeeper.start()

    def wake(self) -> None:
        """Schedule, and reconcile the jobs that were written, now instead of at the interval."""
        self._is_told = True
        self._woken.set()

    @property
    def has_died(self) -> bool:
        """Whether the loop has ended although nobody closed it."""
        was_started = self._thread.ident is not None
        return was_started and not self._thread.is_alive() and not self._closing.is_set()

    def close(self) -> None:
        """Stop, and wait for the jobs that are being reconciled."""
        self._closing.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        others = *self._observers.values(), self._urgent, *self._pools.values()
        for executor in (self._scheduler, *others):
            executor.shutdown(cancel_futures=True)
        self._queue.close()
        self._housekeeper.close()
        try:
            self._store.release_leases(self._settings.replica_id)
        except StoreUnavailable as error:
            logger.warning("other replicas take over the jobs late: %s", error)

    def _loop(self) -> None:
        write_in_background()
        all_due_at = time.monotonic()
        while not self._closing.is_set():
            # Cleared before the pass: a wake during it must cause another one.
            self._woken.clear()
            is_due = time.monotonic() >= all_due_at
            if is_due:
                all_due_at = time.monotonic() + self._settings.reconcile_interval_s
            try:
                self._dispatch(written_only=not is_due)
                self.dispatched_at = self._clock()
            except Exception as error:  # nothing may end the loop
                _log_error("cannot reconcile the jobs", error)
            # A hundred submissions in a second cause a few passes, not a hundred.
            self._closing.wait(_MIN_INTERVAL_S)
            self._woken.wait(self._settings.reconcile_interval_s)

    def placed(self, job: Job) -> Job:
        """A job with its position in the queue, if it is queued."""
        return self._queue.placed(job)

    def _dispatch(self, *, written_only: bool = False) -> None:
        """Begin to reconcile every live job, or those that were written since they last were.

        A wake tells of what was written; the cluster is asked of all others at each interval.
        """
        # An older version of the service does nothing to jobs that a newer one migrated.
        self._store.ping()
        was_late = self._late is not None
        scheduled = self._schedule()
        jobs = self._store.list_live_jobs() if scheduled is None else scheduled
        if scheduled is None or not was_late:
            # What a late pass read is older than what was seen meanwhile.
            self._telemetry.saw_live_jobs(jobs)
        leased = set(
            self._store.claim_live_jobs(
                self._settings.replica_id,
                lease_s=self._settings.lease_s,
                now=self._clock(),
                limit=_MAX_NEW_LEASES,
            )
        )
        due = [job for job in jobs if job.id in leased and not _rests(job)]
        if written_only:
            due = [job for job in due if self._begun.get(job.id) != job.version]
        else:
            self._begun.clear()
        self._begin(due)
        for job_id, index in self._store.attempts_to_collect(self._clock()):
            name = f"{job_id}, late records of attempt {index}"
            if name not in self._busy:
                late = self._pools["shared"].submit(self._settle, job_id, index)
                self._busy[name] = late
                late.add_done_callback(partial(self._release, name))

    def _settle(self, job_id: str, index: int) -> None:
        """Take the late records of an attempt; then nobody asks the backend for it any more."""
        if self._outboxes.collect_late(job_id, index):
            try:
                self._backend.forget(attempt_id(job_id, index))
            except BackendUnreachable as error:  # which then keeps it
                logger.info("attempt %s: not forgotten: %s", attempt_id(job_id, index), error)

    def _schedule(self) -> list[Job] | None:
        """Let the queue be scheduled; the live jobs as that left them, so that what starts is
        reconciled in the same pass. None where they are to be read anew.
        """
        if self._late is not None:
            # Its end wakes the loop: another one at once would leave no time between them.
            late = self._late
            if not late.done():
                return None
            self._late = None
            return None if self._is_told else _live_after(late)
        self._is_told = False
        scheduled = self._scheduler.submit(self._queue.admit)
        scheduled.add_done_callback(partial(_log_failure, "cannot schedule the queue"))
        if wait([scheduled], timeout=_SCHEDULING_S).not_done:
            self._late = scheduled
            scheduled.add_done_callback(lambda _: self._woken.set())
            return None
        return _live_after(scheduled)

    def _begin(self, due: Sequence[Job]) -> None:
        """Let jobs be reconciled that are not already; those with a request of a user first."""
        observed: dict[str, list[Job]] = {each: [] for each in CLUSTERS}
        for job in due:
            is_requested = job.cancel_requested or job.pause_requested
            waiting = self._busy.get(job.id)
            if is_requested and waiting is not None and job.id not in self._hurried:
                waiting.cancel()  # Succeeds where it has not begun, and is made anew below.
            with self._beginning:
                doing = self._busy.get(job.id, _NOTHING)
                if doing is not _NOTHING and not (is_requested and doing is None):
                    continue
                self._begun[job.id] = job.version
                if is_requested:
                    self._hurried.add(job.id)
                    self._submit_job(self._urgent, job.id, _NOTHING_SEEN)
                elif job.current_attempt_id is None:
                    self._submit_job(self._pool_of(job), job.id, _NOTHING_SEEN)
                else:
                    observed[job.spec.resources.cluster].append(job)
        for cluster, jobs in observed.items():
            if len(jobs) < _OBSERVE_ALL_FROM:
                for job in jobs:
                    self._submit_job(self._pool_of(job), job.id, _NOTHING_SEEN)
                continue
            self._busy |= dict.fromkeys(job.id for job in jobs)
            self._observers[cluster].submit(self._observe_all, jobs)

    def _pool_of(self, job: Job) -> ThreadPoolExecutor:
        return self._pools[job.spec.resources.cluster]

    def _observe_all(self, jobs: Sequence[Job]) -> None:
        seen = _NOTHING_SEEN
        try:
            ids = [job.current_attempt_id for job in jobs if job.current_attempt_id is not None]
            seen = self._backend.observe_all(ids)
        except Exception as error:  # each is observed by itself
            _log_error("cannot observe all attempts", error)
        for job in jobs:
            known = seen.get(job.current_attempt_id or "")
            is_running = known is not None and known.state is ObservedState.RUNNING
            with self._beginning:
                if self._busy.get(job.id, _NOTHING) is not None:
                    continue  # Begun meanwhile.
                if is_running and self._settled.get(job.id) == job.version:
                    del self._busy[job.id]
                else:
                    self._submit_job(self._pool_of(job), job.id, seen)

    def _submit_job(
        self, pool: ThreadPoolExecutor, job_id: str, seen: Mapping[str, Observation]
    ) -> None:
        asked_at = time.perf_counter()

        def begin() -> None:
            self._telemetry.late_s.observe(time.perf_counter() - asked_at)
            self.reconcile(job_id, seen)

        future = pool.submit(begin)
        self._busy[job_id] = future
        future.add_done_callback(partial(self._release, job_id))

    def _release(self, job_id: str, future: Future[None]) -> None:
        self._busy.pop(job_id, None)
        self._hurried.discard(job_id)
        _log_failure(f"job {job_id}: reconciling failed", future)

    # ---- one job

    def reconcile(self, job_id: str, seen: Mapping[str, Observation] = _NOTHING_SEEN) -> None:
        """Take a job as far as it goes now; a lost race is left to the next pass.

        `seen` is what was observed of many attempts a moment ago.
        """
        with about(job_id=job_id), self._telemetry.reconcile_s.time(), self._slot.taken():
            try:
                self._reconcile(job_id, seen)
            except StaleVersion as error:
                logger.debug("job %s: %s", job_id, error)

    def _reconcile(self, job_id: str, seen: Mapping[str, Observation]) -> None:
        job, attempt = self._store.get_job_and_attempt(job_id)
        if attempt is not None and attempt.index and attempt.last_submit_at is None:
            # Workers that outlived the attempt before may have saved since its end was observed.
            self._outboxes.collect(job.id, attempt.index - 1)
            job, attempt = self._store.get_job_and_attempt(job_id)
        observation = self._observe(job, attempt, seen)
        is_over = observation is not _NEVER_SENT and observation.state not in _ALIVE
        if attempt is not None and is_over:
            if self._outboxes.collect(job.id, attempt.index) and not job.cancel_requested:
                return  # What the job came to is in the portions that follow.
            observed = attempt
            job, attempt = self._store.get_job_and_attempt(job_id)
            if not _is_as_observed(observed, attempt):
                # Another replica submitted or ended it meanwhile: the observation is outdated.
                return
        decision = decide(job, attempt, observation, self._clock())
        self._settled.pop(job.id, None)
        if _is_settled(job, attempt, observation, decision):
            self._settled[job.id] = job.version
        stored = self._apply(job, attempt, decision)
        if decision.attempt is not None:
            self._act(decision.action, stored, decision.attempt)

    def _observe(
        self, job: Job, attempt: Attempt | None, seen: Mapping[str, Observation]
    ) -> Observation:
        if attempt is None or attempt.end_reason is not None:
            return _NOTHING_SUBMITTED
        if attempt.last_submit_at is None and attempt.submitted_at is None:
            return _NEVER_SENT
        known = seen.get(attempt.id)
        if known is not None and known.state in _ALIVE:
            observation = known
        else:
            # An end is looked at closely: what was seen may be from before the submission.
            with self._slot.aside():
                observation = self._backend.observe(attempt.id)
        self._note_reachability(job.spec.resources.cluster, observation)
        return observation

    def _note_reachability(self, cluster: str, observation: Observation) -> None:
        """Log when a kind of cluster becomes unreachable and when it is back, not in between."""
        is_reachable = observation.state is not ObservedState.UNREACHABLE
        self._telemetry.backend_asked(cluster, is_reachable)
        if is_reachable != self._is_reachable[cluster]:
            self._is_reachable[cluster] = is_reachable
            change = "answers again" if is_reachable else observation.message
            logger.warning("backend %s, %s cluster: %s", self._backend.name, cluster, change)

    def _apply(self, job: Job, attempt: Attempt | None, decision: Decision) -> Job:
        """Store a decision if it changes anything; raises `StaleVersion`."""
        if decision.job == job and decision.attempt == attempt:
            return job
        stored = self._store.update_job(
            decision.job, attempt=decision.attempt, timeline=decision.timeline
        )
        for line in decision.timeline:
            logger.info("job %s: %s", job.id, line.message)
        self._telemetry.attempt_stored(attempt, decision.attempt)
        if stored.status.is_terminal and not job.status.is_terminal:
            self._telemetry.job_ended(stored, decision.attempt)
            with self._slot.aside():
                update_job_file(stored, self._settings)
        return stored

    # ---- actions

    def _act(self, action: Action, job: Job, attempt: Attempt) -> None:
        if action is Action.SUBMIT:
            # Stored before the call: once sent, only time tells that it did not arrive.
            tried = replace(attempt, last_submit_at=self._clock())
            job = self._apply(job, attempt, Decision(job, tried))
            self._apply(job, tried, self._submit(job, tried))
        elif action is Action.PAUSE:
            self._pause(job, attempt)
        elif action is Action.STOP:
            try:
                with self._slot.aside():
                    self._backend.stop(attempt.id)
            except BackendUnreachable as error:
                self._log_unanswered(action, job, attempt, error)

    def _pause(self, job: Job, attempt: Attempt) -> None:
        message = PAUSING
        try:
            self._on_storage(partial(ask_to_pause, self._settings, attempt))
            if not self._store.get_job(job.id).pause_requested:
                # Withdrawn meanwhile, before there was a file to remove.
                self._on_storage(partial(withdraw_pause, self._settings, job.id, attempt.id))
        except OSError as error:
            message = f"{NOT_ASKED}: {error}"
            if message != job.message:
                logger.warning("attempt %s: cannot pause, trying again: %s", attempt.id, error)
        self._apply(job, attempt, Decision(replace(job, message=message), attempt))

    def _submit(self, job: Job, attempt: Attempt) -> Decision:
        try:
            following = plan_attempt(self._store, job, attempt, self._clock())
            self._on_storage(partial(self._prepare, job, attempt, following.spec))
            submission = submission_of(job, attempt, following, self._settings)
            with self._tracing.submitting(job, attempt), self._slot.aside():
                self._backend.submit(submission)
        except BackendUnreachable as error:
            self._log_unanswered(Action.SUBMIT, job, attempt, error)
            # It did not say whether it took the attempt: the submission is repeated.
            return Decision(replace(job, message=str(error)), attempt)
        except SubmissionRefused as error:
            reason, message = EndReason.SUBMISSION_REFUSED, str(error)
        except CodeGone as error:
            reason, message = EndReason.BAD_SPEC, str(error)
        except QuotaTooSmall as error:
            reason, message = EndReason.NO_ROOM, str(error)
        except OSError as error:
            if not self._is_own_fault(error):
                # No failure: it is nothing of the job's, and nothing was sent.
                logger.warning("attempt %s: cannot submit, trying again: %s", attempt.id, error)
                message = f"the job waits for run storage (SHARDLOOM_RUNS_DIR): {error}"
                return Decision(replace(job, message=message), attempt)
            reason = EndReason.STORAGE_ERROR
            message = f"cannot write the spec to run storage ({error})"
        else:
            return submission_accepted(job, attempt, self._clock(), following.notes)
        return end_attempt(job, attempt, reason, message, self._clock())

    def _is_own_fault(self, error: OSError) -> bool:
        """Whether run storage refuses a job's files while it takes those of others."""
        if not isinstance(error, PermissionError | IsADirectoryError):
            return False
        try:
            self._on_storage(partial(make_writable, self._settings.runs_dir))
        except OSError:
            return False
        return True

    def _prepare(self, job: Job, attempt: Attempt, spec: JobSpec) -> None:
        """Write what an attempt finds on run storage."""
        write_job(job, self._settings)
        write_spec(spec, attempt, self._settings)
        note_rewind(job, attempt, self._settings)
        if attempt.index:
            copy_resize_request(self._store, run_dir_of(self._settings, job.id), job.id, attempt.id)

    def _on_storage(self, call: Callable[[], None]) -> None:
        with self._slot.aside():
            in_time(self._settings.runs_dir, call)

    def _log_unanswered(
        self, action: Action, job: Job, attempt: Attempt, error: BackendUnreachable
    ) -> None:
        self._telemetry.backend_asked(job.spec.resources.cluster, False)
        logger.warning("attempt %s: cannot %s, trying again: %s", attempt.id, action, error)


def _log_failure(what: str, future: Future[Any]) -> None:
    _log_error(what, None if future.cancelled() else future.exception())


def _is_as_observed(observed: Attempt, attempt: Attempt | None) -> bool:
    """Whether an attempt is still the submission that was observed."""
    if attempt is None or attempt.id != observed.id or attempt.end_reason is not None:
        return False
    submitted = (attempt.last_submit_at, attempt.submitted_at)
    return submitted == (observed.last_submit_at, observed.submitted_at)


def _is_settled(
    job: Job, attempt: Attempt | None, observation: Observation, decision: Decision
) -> bool:
    """Whether nothing follows for a job until it is written or observed otherwise."""
    is_running = observation.state is ObservedState.RUNNING
    has_reported = attempt is None or attempt.reported_end is not None
    return is_running and not has_reported and decision == Decision(job, attempt)


def _live_after(scheduled: Future[list[Job] | None]) -> list[Job] | None:
    return None if scheduled.cancelled() or scheduled.exception() else scheduled.result()


def _rests(job: Job) -> bool:
    """Whether a job has nothing to reconcile until the scheduler or a user moves it."""
    return job.status.is_at_rest and not job.cancel_requested and not job.pause_requested


def _log_error(what: str, error: BaseException | None) -> None:
    """Log an error, if any; with a traceback where it is not one of the service's own."""
    if error is not None:
        trace = None if isinstance(error, ServiceError) else error
        logger.error("%s, trying again: %s", what, error, exc_info=trace)

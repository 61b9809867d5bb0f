"""The reconciler: observes live jobs, decides, stores the decision and acts on the backend.

It is level-triggered: each pass starts from the stored state and what the cluster reports now, so
a crash at any point is repaired by the next pass. An action is stored before it is carried out (an
attempt's row before its submission, which has the same id), so repeating it is harmless. A write
that lost a race (`StaleVersion`) is dropped; the next pass decides anew.

Live jobs are reconciled in a thread pool, never one twice at the same time, so that a slow backend
delays that job alone. The threads take turns in computing (`_ComputeSlot`), as under the GIL eight
that compute would delay a request eight times as long as one. No backend call happens inside a
transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from service.backends.base import Backend
from service.db.engine import write_in_background
from service.db.jobs import JobStore
from service.domain.lifecycle import (
    Action,
    Decision,
    decide,
    end_attempt,
    submission_accepted,
)
from service.domain.models import Attempt, EndReason, Job, Observation, ObservedState
from service.errors import (
    BackendUnreachable,
    ServiceError,
    StaleVersion,
    StoreUnavailable,
    SubmissionRefused,
)
from service.jobs.actions import copy_resize_request, finish_deletions
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
from service.observability.metrics import ServiceMetrics
from service.observability.tracing import Tracing
from service.reconciler.housekeeping import Housekeeper
from service.reconciler.outbox import OutboxCollector
from service.reconciler.submission import plan_attempt, submission_of, write_spec
from service.scheduler.runner import SchedulerRunner
from service.settings import Settings

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
_NOTHING_SUBMITTED = Observation(ObservedState.UNREACHABLE, "nothing is submitted")
_LOG_TAIL_CHARS = 2000
_MIN_INTERVAL_S = 0.25
# In each pass, so that replicas that start together share the jobs.
_MAX_NEW_LEASES = 64


class Reconciler:
    """Drives every live job of `store` on `backend`; `clock` gives Unix seconds."""

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
        self._queue = SchedulerRunner(
            store,
            backend,
            settings,
            clock,
            before_start=self._collect_last,
            note_answer=telemetry.backend_asked,
        )
        self._is_reachable = True
        self._slot = _ComputeSlot()
        # Only the loop adds to it, and threads of the pool take their own job out.
        self._busy: set[str] = set()
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(
            settings.reconcile_threads, "reconcile", initializer=write_in_background
        )
        self._thread = threading.Thread(target=self._loop, name="reconciler", daemon=True)

    # ---- the loop

    def start(self) -> None:
        """Begin to reconcile, now and at every interval."""
        deletions = self._pool.submit(finish_deletions, self._store, self._settings)
        deletions.add_done_callback(partial(_log_failure, "finishing deletions failed"))
        self._thread.start()

    def wake(self) -> None:
        """Reconcile all jobs now instead of at the next interval."""
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
        self._pool.shutdown(cancel_futures=True)
        try:
            self._store.release_leases(self._settings.replica_id)
        except StoreUnavailable as error:
            logger.warning("other replicas take over the jobs late: %s", error)

    def _loop(self) -> None:
        write_in_background()
        while not self._closing.is_set():
            # Cleared before the pass: a wake during it must cause another one.
            self._woken.clear()
            try:
                self._dispatch()
            except Exception as error:  # nothing may end the loop
                _log_error("cannot reconcile the jobs", error)
            # A hundred submissions in a second cause a few passes, not a hundred.
            self._closing.wait(_MIN_INTERVAL_S)
            self._woken.wait(self._settings.reconcile_interval_s)

    def _dispatch(self) -> None:
        try:
            self._queue.admit()
        except Exception as error:  # running jobs must be reconciled all the same
            _log_error("cannot schedule the queue", error)
        jobs = self._store.list_live_jobs()
        self._telemetry.saw_live_jobs(jobs)
        leased = set(
            self._store.claim_live_jobs(
                self._settings.replica_id,
                lease_s=self._settings.lease_s,
                now=self._clock(),
                limit=_MAX_NEW_LEASES,
            )
        )
        for job in jobs:
            if job.id in leased and job.id not in self._busy and not _rests(job):
                self._busy.add(job.id)
                future = self._pool.submit(self._telemetry.timed_wait(self.reconcile), job.id)
                future.add_done_callback(partial(self._release, job.id))
        for job_id, index in self._outboxes.take_due():
            late = self._pool.submit(self._outboxes.collect, job_id, index)
            late.add_done_callback(partial(_log_failure, f"job {job_id}: reconciling failed"))
        if self._housekeeper.take_due():
            done = self._pool.submit(self._housekeeper.run)
            done.add_done_callback(partial(_log_failure, "housekeeping failed"))

    def _release(self, job_id: str, future: Future[None]) -> None:
        self._busy.discard(job_id)
        _log_failure(f"job {job_id}: reconciling failed", future)

    # ---- one job

    def run_once(self) -> None:
        """Schedule, reconcile every live job once in this thread, and return."""
        self._queue.admit()
        for job in self._store.list_live_jobs():
            if not _rests(job):
                self.reconcile(job.id)
        for job_id, index in self._outboxes.take_due():
            self._outboxes.collect(job_id, index)

    def reconcile(self, job_id: str) -> None:
        """Take a job as far as it goes now; a lost race is left to the next pass."""
        with about(job_id=job_id), self._telemetry.reconcile_s.time(), self._slot.taken():
            try:
                self._reconcile(job_id)
            except StaleVersion as error:
                logger.debug("job %s: %s", job_id, error)

    def _reconcile(self, job_id: str) -> None:
        job, attempt = self._load(job_id)
        observation = self._observe(attempt)
        if attempt is not None and observation.state not in _ALIVE:
            self._outboxes.collect(job.id, attempt.index)
            observed = attempt
            job, attempt = self._load(job_id)
            if not _is_as_observed(observed, attempt):
                # Another replica submitted or ended it meanwhile: the observation is outdated.
                return
        decision = decide(job, attempt, observation, self._clock())
        stored = self._apply(job, attempt, decision)
        if decision.attempt is not None:
            if decision.attempt.end_reason is not None and decision.attempt != attempt:
                self._outboxes.collect_later(job.id, decision.attempt.index)
            self._act(decision.action, stored, decision.attempt)

    def _collect_last(self, job: Job) -> None:
        """Collect what workers that outlived their driver wrote after its end was observed."""
        if job.current_attempt_id is not None:
            self._outboxes.collect(job.id, job.num_attempts - 1)

    def _load(self, job_id: str) -> tuple[Job, Attempt | None]:
        # Job first: its version then covers the attempt as well (see `service.db.jobs`).
        job = self._store.get_job(job_id)
        if job.current_attempt_id is None:
            return job, None
        return job, self._store.get_attempt(job.current_attempt_id)

    def _observe(self, attempt: Attempt | None) -> Observation:
        if attempt is None or attempt.end_reason is not None:
            return _NOTHING_SUBMITTED
        with self._slot.aside():
            observation = self._backend.observe(attempt.id)
        self._note_reachability(observation)
        if observation.state is ObservedState.FAILED and attempt.reported_end is None:
            with self._slot.aside():
                tail = self._backend.tail_driver_log(attempt.id, _LOG_TAIL_CHARS)
            parts = [part for part in (observation.message, tail) if part]
            return replace(observation, message="\n".join(parts))
        return observation

    def _note_reachability(self, observation: Observation) -> None:
        """Log when the backend becomes unreachable and when it is back, not every pass between."""
        is_reachable = observation.state is not ObservedState.UNREACHABLE
        self._telemetry.backend_asked(is_reachable)
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            change = "answers again" if is_reachable else observation.message
            logger.warning("backend %s: %s", self._backend.name, change)

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
            self._telemetry.job_ended(stored)
            update_job_file(stored, self._settings)
        return stored

    # ---- actions

    def _act(self, action: Action, job: Job, attempt: Attempt) -> None:
        if action is Action.SUBMIT:
            if not self._backend.may_submit(attempt.id):
                return  # Backing off; the job's message is about the last try.
            # Stored before the call: once sent, only time tells that it did not arrive.
            tried = replace(attempt, last_submit_at=self._clock())
            job = self._apply(job, attempt, Decision(job, tried))
            self._apply(job, tried, self._submit(job, tried))
        elif action is Action.PAUSE:
            ask_to_pause(self._settings, attempt)
            if not self._store.get_job(job.id).pause_requested:
                # Withdrawn meanwhile, before there was a file to remove.
                withdraw_pause(self._settings, job.id, attempt.id)
        elif action is Action.STOP:
            try:
                with self._slot.aside():
                    self._backend.stop(attempt.id)
            except BackendUnreachable as error:
                self._log_unanswered(action, attempt, error)

    def _submit(self, job: Job, attempt: Attempt) -> Decision:
        try:
            following = plan_attempt(self._store, job, attempt, self._clock())
            write_job(job, self._settings)
            write_spec(following.spec, attempt, self._settings)
            note_rewind(job, attempt, self._settings)
            copy_resize_request(self._store, run_dir_of(self._settings, job.id), job.id, attempt.id)
            submission = submission_of(job, attempt, following, self._settings)
            with self._tracing.submitting(job, attempt), self._slot.aside():
                self._backend.submit(submission)
        except BackendUnreachable as error:
            self._log_unanswered(Action.SUBMIT, attempt, error)
            # It did not say whether it took the attempt: the submission is repeated.
            return Decision(replace(job, message=str(error)), attempt)
        except SubmissionRefused as error:
            reason, message = EndReason.SUBMISSION_REFUSED, str(error)
        except CodeGone as error:
            reason, message = EndReason.BAD_SPEC, str(error)
        except OSError as error:
            reason = EndReason.STORAGE_ERROR
            message = f"cannot write the spec to run storage ({error}); check SHARDLOOM_RUNS_DIR"
        else:
            return submission_accepted(job, attempt, self._clock(), following.notes)
        return end_attempt(job, attempt, reason, message, self._clock())

    def _log_unanswered(self, action: Action, attempt: Attempt, error: BackendUnreachable) -> None:
        self._telemetry.backend_asked(False)
        logger.warning("attempt %s: cannot %s, trying again: %s", attempt.id, action, error)


def _log_failure(what: str, future: Future[None]) -> None:
    _log_error(what, None if future.cancelled() else future.exception())


def _is_as_observed(observed: Attempt, attempt: Attempt | None) -> bool:
    """Whether an attempt is still the submission that was observed."""
    if attempt is None or attempt.id != observed.id or attempt.end_reason is not None:
        return False
    submitted = (attempt.last_submit_at, attempt.submitted_at)
    return submitted == (observed.last_submit_at, observed.submitted_at)


def _rests(job: Job) -> bool:
    """Whether a job has nothing to reconcile until the scheduler or a user moves it."""
    return job.status.is_at_rest and not job.cancel_requested and not job.pause_requested


def _log_error(what: str, error: BaseException | None) -> None:
    """Log an error, if any; with a traceback where it is not one of the service's own."""
    if error is not None:
        trace = None if isinstance(error, ServiceError) else error
        logger.error("%s, trying again: %s", what, error, exc_info=trace)

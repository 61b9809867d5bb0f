"""The loop that makes jobs happen: load, observe, decide, store, act.

It is level-triggered: each look starts from what is stored and what the cluster says now, so a
crash at any point is mended by the next look. What is about to be done is stored before it is
done (an attempt's row before its submission, whose id it is), so repeating it is harmless. A
write that lost the race against another (`StaleVersion`) is dropped: the next look decides anew.

Each live job is looked at in a thread pool, never twice at the same time, so that a slow answer
delays that job alone. No backend call happens inside a transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from service.backends.base import Backend
from service.domain import Attempt, EndReason, Job, Observation, ObservedState
from service.errors import BackendUnreachable, ServiceError, StaleVersion, SubmissionRefused
from service.lifecycle import Action, Decision, decide, submission_accepted, submission_failed
from service.outbox import unread_batches
from service.settings import Settings
from service.store.base import JobStore
from service.submission import run_dir_of, submission_of, write_spec
from service.telemetry import Telemetry

logger = logging.getLogger(__name__)

_ENDED = frozenset(
    {
        ObservedState.SUCCEEDED,
        ObservedState.FAILED,
        ObservedState.STOPPED,
        ObservedState.NOT_FOUND,
    }
)
_NOTHING_SUBMITTED = Observation(ObservedState.UNREACHABLE, "nothing is submitted")
_LOG_TAIL_CHARS = 2000


class Reconciler:
    """Drives every live job of `store` on `backend`; `clock` gives Unix seconds."""

    def __init__(
        self,
        store: JobStore,
        backend: Backend,
        settings: Settings,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._backend = backend
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._is_reachable = True
        self._busy: set[str] = set()
        self._busy_lock = threading.Lock()
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(settings.reconcile_threads, "reconcile")
        self._thread = threading.Thread(target=self._loop, name="reconciler", daemon=True)

    # ---- the loop

    def start(self) -> None:
        """Begin looking at jobs, now and at every interval."""
        self._thread.start()

    def wake(self) -> None:
        """Look at all jobs at once instead of at the next interval."""
        self._woken.set()

    def close(self) -> None:
        """Stop looking, and wait for the looks that are under way."""
        self._closing.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _loop(self) -> None:
        while not self._closing.is_set():
            # Cleared before the look: a wake during it must cause another one.
            self._woken.clear()
            try:
                self._dispatch()
            except ServiceError:
                logger.exception("cannot load the live jobs; trying again")
            self._woken.wait(self._settings.reconcile_interval_s)

    def _dispatch(self) -> None:
        jobs = self._store.list_live_jobs()
        self._telemetry.saw_live_jobs(jobs)
        for job in jobs:
            if self._take(job.id):
                future = self._pool.submit(self.reconcile, job.id)
                future.add_done_callback(partial(self._release, job.id))

    def _take(self, job_id: str) -> bool:
        with self._busy_lock:
            is_free = job_id not in self._busy
            self._busy.add(job_id)
        return is_free

    def _release(self, job_id: str, future: Future[None]) -> None:
        with self._busy_lock:
            self._busy.discard(job_id)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            logger.error("job %s: look failed; trying again", job_id, exc_info=error)

    # ---- one job

    def run_once(self) -> None:
        """Look at every live job once, one after another, and return when done."""
        for job in self._store.list_live_jobs():
            self.reconcile(job.id)

    def reconcile(self, job_id: str) -> None:
        """Take a job as far as it goes now."""
        with self._telemetry.reconcile_s.time():
            try:
                # A new attempt is submitted in the same look that stored it.
                while self._look(job_id):
                    pass
            except StaleVersion as error:
                logger.debug("job %s: %s", job_id, error)

    def _look(self, job_id: str) -> bool:
        """Observe, decide, store and act; True when it made a new attempt."""
        job, attempt = self._load(job_id)
        observation = self._observe(attempt)
        if attempt is not None and observation.state in _ENDED:
            self._collect_outbox(job, attempt)
            job, attempt = self._load(job_id)
        decision = decide(job, attempt, observation, self._clock())
        stored = self._apply(job, attempt, decision)
        if decision.attempt is not None:
            self._act(decision.action, stored, decision.attempt)
        return stored.current_attempt_id != job.current_attempt_id

    def _load(self, job_id: str) -> tuple[Job, Attempt | None]:
        # Job first: its version then vouches for the attempt as well (see `service.store.sql`).
        job = self._store.get_job(job_id)
        if job.current_attempt_id is None:
            return job, None
        return job, self._store.get_attempt(job.current_attempt_id)

    def _observe(self, attempt: Attempt | None) -> Observation:
        if attempt is None or attempt.end_reason is not None:
            return _NOTHING_SUBMITTED
        observation = self._backend.observe(attempt.id)
        self._note_reachability(observation)
        if observation.state is ObservedState.FAILED and attempt.reported_end is None:
            tail = self._backend.tail_driver_log(attempt.id, _LOG_TAIL_CHARS)
            parts = [part for part in (observation.message, tail) if part]
            return Observation(observation.state, "\n".join(parts))
        return observation

    def _note_reachability(self, observation: Observation) -> None:
        """Log when the backend goes away and when it is back, not every look in between."""
        is_reachable = observation.state is not ObservedState.UNREACHABLE
        if not is_reachable:
            self._telemetry.backend_was_unreachable()
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            news = "answers again" if is_reachable else observation.message
            logger.warning("backend %s: %s", self._backend.name, news)

    def _collect_outbox(self, job: Job, attempt: Attempt) -> None:
        """Take the records that the driver left behind; raises OSError if storage fails."""
        outbox_dir = run_dir_of(self._settings, job.id).attempt(attempt.id).outbox_dir
        positions = self._store.stream_positions(attempt.id)
        for batch in unread_batches(outbox_dir, positions, self._clock()):
            self._store.append_events(attempt.id, batch, self._clock())
            self._telemetry.received_events(len(batch.events))

    def _apply(self, job: Job, attempt: Attempt | None, decision: Decision) -> Job:
        """Store a decision if it changes anything; raises `StaleVersion`."""
        if decision.job == job and decision.attempt == attempt:
            return job
        stored = self._store.update_job(
            decision.job, attempt=decision.attempt, timeline=decision.timeline
        )
        for line in decision.timeline:
            logger.info("job %s: %s", job.id, line.message)
        if stored.status.is_terminal and not job.status.is_terminal:
            self._telemetry.job_ended(stored)
        return stored

    # ---- actions

    def _act(self, action: Action, job: Job, attempt: Attempt) -> None:
        try:
            if action is Action.SUBMIT:
                self._apply(job, attempt, self._submit(job, attempt))
            elif action is Action.STOP:
                self._backend.stop(attempt.id)
        except BackendUnreachable as error:
            self._telemetry.backend_was_unreachable()
            logger.warning("attempt %s: cannot %s, trying again: %s", attempt.id, action, error)

    def _submit(self, job: Job, attempt: Attempt) -> Decision:
        try:
            write_spec(job, attempt, self._settings)
            self._backend.submit(submission_of(job, attempt, self._settings))
        except SubmissionRefused as error:
            reason, message = EndReason.SUBMISSION_REFUSED, str(error)
        except OSError as error:
            reason = EndReason.STORAGE_ERROR
            message = f"cannot write the spec to run storage ({error}); check SHARDLOOM_RUNS_DIR"
        else:
            return submission_accepted(job, attempt, self._clock())
        return submission_failed(job, attempt, reason, message, self._clock())

"""The loop of sweeps: observes the trials of each, decides, stores, acts.

A step that is cut off anywhere is completed by the next: a trial is stored before its job is made,
by an idempotency key of its own, and a comparison before the job that lost it is paused. Of several
replicas one at a time goes through the sweeps, under a lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from service.db.auth import KeyStore
from service.db.jobs import JobStore
from service.db.projects import hold_lock
from service.db.sweeps import SweepStore
from service.domain.models import Job
from service.domain.sweeps import Observed, Sweep, SweepStatus, Trial, decide
from service.errors import (
    IdempotencyConflict,
    JobEnded,
    JobNotFound,
    ServiceError,
    StorageUnavailable,
    StoreUnavailable,
)
from service.jobs.actions import cancel_job, pause_job
from service.jobs.submit import UNREADABLE, submit_job
from service.settings import Settings
from service.sweeps.search import spec_of_trial, suggest
from trainer.spec.base import SpecError

logger = logging.getLogger(__name__)
_LOCK = "sweeps"
# A pass takes far less; a replica that dies in one delays the others for this long.
_LOCK_S = 60.0
_POLL_S = 2.0
# Passes in a row that may fail over a sweep, and for how long, before it is given up.
_MAX_FAULTS, _PATIENCE_S = 3, 60.0
# For so long a trial waits for storage; a path that nobody may read stays so.
_OUTAGE_S = 86_400.0
# What is wrong with the service or its host, not with a sweep.
_PASSING = (OSError, MemoryError, RuntimeError)


@dataclass
class SweepRunner:
    """Runs the sweeps of `store` until closed; `clock` gives Unix seconds.

    `jobs_changed` is called where jobs were made, or asked to stop, `job_ended` with one that a
    cancellation ended at once.
    """

    store: SweepStore
    jobs: JobStore
    keys: KeyStore
    settings: Settings
    jobs_changed: Callable[[], None]
    job_ended: Callable[[Job], None]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        # How many there were in a row, and when the first was.
        self._faults: dict[str, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="sweeps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Go through the sweeps now."""
        self._woken.set()

    def close(self) -> None:
        self._closing.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self.poll()
            except ServiceError as error:
                logger.warning("sweeps are delayed: %s", error)
            except Exception:  # the loop must outlive any failed pass
                logger.exception("a pass over the sweeps failed, trying again")
            self._woken.wait(_POLL_S)
            self._woken.clear()

    def poll(self) -> None:
        """One pass over all sweeps that have not ended."""
        live = self.store.list_live()
        if not live:
            return
        # An older version of the service does nothing to sweeps that a newer one migrated.
        self.jobs.ping()
        with hold_lock(self.store, _LOCK, self.settings.replica_id, self.clock(), _LOCK_S) as lock:
            if lock is None:
                return
            for sweep in live:
                self._advance_guarded(sweep)

    def _advance_guarded(self, sweep: Sweep) -> None:
        """Advance a sweep; what is wrong with it must not delay the others."""
        try:
            self._advance(sweep)
        except StoreUnavailable:
            raise
        except ServiceError as error:
            logger.warning("sweep %s is delayed: %s", sweep.id, error)
        except _PASSING:
            logger.exception("sweep %s is delayed", sweep.id)
        except Exception as error:
            logger.exception("sweep %s cannot go on", sweep.id)
            self._give_up(sweep, error)
        else:
            self._faults.pop(sweep.id, None)

    def _give_up(self, sweep: Sweep, error: Exception) -> None:
        """End a sweep over which passes failed again and again; one that is cancelled goes on."""
        now = self.clock()
        num_before, since = self._faults.get(sweep.id, (0, now))
        self._faults[sweep.id] = (num_before + 1, since)
        if num_before + 1 >= _MAX_FAULTS and now - since >= _PATIENCE_S:
            # What others raise may tell more than users should know; the log has it.
            is_of_values = isinstance(error, ValueError | ArithmeticError)
            cause = f"{error!r:.300}" if is_of_values else type(error).__name__
            message = (
                f"it cannot go on ({cause}), and leaves the jobs of its trials as they are; "
                "begin another with other parameters"
            )
            self.store.end(sweep.id, SweepStatus.FAILED, message, now)

    def _advance(self, sweep: Sweep) -> None:
        trials = self.store.observe(sweep)
        step = decide(sweep, trials)
        for rung in step.rungs:
            trial = trials[rung.number].trial
            rungs = (*trial.rungs, rung.value)
            self.store.change_trial(trial, rungs=rungs, stopped_at=rung.stop_at)
        for number in step.pause:
            self._pause(trials[number].trial)
        for number in step.cancel:
            self._cancel(trials[number].trial)
        for number in step.submit:
            self._submit(sweep, trials[number].trial)
        for _ in range(step.num_new):
            trial = Trial(sweep.id, len(trials), suggest(sweep, trials), self.clock())
            if not self.store.add_trial(trial):
                break
            trials.append(Observed(trial))
            self._submit(sweep, trial)
        if step.end is not None:
            self.store.end(sweep.id, step.end, step.message, self.clock())
            logger.info("sweep %s: %s %s", sweep.id, step.end, step.message)

    def _submit(self, sweep: Sweep, trial: Trial) -> None:
        try:
            spec = spec_of_trial(sweep, trial.number, trial.values)
            job = submit_job(
                self.jobs,
                self.keys,
                self.settings,
                spec,
                secrets=self.keys.secrets_of(sweep.id),
                idempotency_key=f"{sweep.id}/{trial.number}",
                actor=sweep.created_by,
            )
        except (SpecError, IdempotencyConflict) as error:
            may_pass = self.clock() - trial.created_at < _OUTAGE_S and _is_of_storage(error)
            if sweep.status is SweepStatus.RUNNING and may_pass:
                raise StorageUnavailable(str(error)) from error
            # Such as values that are not legal together: the search goes on without them.
            self.store.change_trial(trial, message=str(error))
            return
        self.store.change_trial(trial, job_id=job.id)
        self.jobs_changed()

    def _pause(self, trial: Trial) -> None:
        assert trial.job_id is not None, "only a trial with a job is compared"
        # One that has ended meanwhile needs no stopping any more.
        with suppress(JobEnded, JobNotFound):
            pause_job(self.jobs, self.settings, trial.job_id, actor=trial.sweep_id)
        self.store.change_trial(trial, is_paused=True)
        self.jobs_changed()

    def _cancel(self, trial: Trial) -> None:
        assert trial.job_id is not None, "only a trial with a job is cancelled"
        with suppress(JobEnded, JobNotFound):
            job = cancel_job(self.jobs, self.settings, trial.job_id, actor=trial.sweep_id)
            if job.status.is_terminal:
                self.job_ended(job)
        self.jobs_changed()


def _is_of_storage(error: Exception) -> bool:
    """Whether a spec was refused only because storage does not show what it names."""
    return isinstance(error, SpecError) and all(each.code == UNREADABLE for each in error.problems)

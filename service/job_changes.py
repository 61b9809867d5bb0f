"""What a user can do to a job that exists: cancel, pause, resume, clone, restart, delete.

The reconciler and the queue carry out what is asked here; whoever asks learns of it at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from service.artifact_errors import CheckpointNotFound
from service.domain import Checkpoint, Job, JobStatus
from service.errors import StorageUnavailable
from service.job_checkpoints import Left, place_of, remove_checkpoints
from service.job_errors import (
    JobAtWork,
    JobEnded,
    JobNotEnded,
    JobNotFound,
    JobNotPaused,
    JobUnreadable,
    StaleVersion,
    VersionChanged,
)
from service.lifecycle import Decision
from service.requests import request_cancel, request_pause, request_restart, request_resume
from service.run_files import (
    buried_jobs,
    buried_places,
    bury,
    forget_job,
    note_course,
    remove_buried,
    run_dir_of,
    unbury,
    withdraw_pause,
)
from service.settings import Settings
from service.store.base import JobStore
from trainer.spec import JobSpec, check_depth, set_values, validate_spec

logger = logging.getLogger(__name__)

_MAX_TRIES = 5


def cancel_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    actor: str = "user",
    version: int | None = None,
) -> Job:
    """Ask a job to stop; the reconciler carries it out. Raises `JobNotFound` or `JobEnded`.

    As all changes, it raises `VersionChanged` unless the job is at `version`, where one is given,
    and `StaleVersion` only if others kept writing the job meanwhile.
    """

    def change(job: Job) -> Decision:
        _check_lives(job)
        return request_cancel(job, time.time(), actor)

    cancelled = _change(store, job_id, change, version)
    if cancelled.status.is_terminal:
        note_course(cancelled, settings)
    return cancelled


def pause_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    actor: str = "user",
    version: int | None = None,
) -> Job:
    """Ask a job to save, give its workers back and keep its place in the queue.

    Raises `JobNotFound` or `JobEnded`, the latter also while it is being cancelled.
    """

    def change(job: Job) -> Decision:
        _check_lives(job)
        if job.cancel_requested:
            raise JobEnded(job.id, job.status)
        return request_pause(job, time.time(), settings.pause_grace_s, actor)

    return _change(store, job_id, change, version)


def resume_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    actor: str = "user",
    version: int | None = None,
) -> Job:
    """Let a paused job wait for its workers again. Raises `JobNotFound` or `JobNotPaused`."""

    def change(job: Job) -> Decision:
        if job.status is not JobStatus.PAUSED and not job.pause_requested:
            raise JobNotPaused(job.id, job.status)
        return request_resume(job, time.time(), actor)

    resumed = _change(store, job_id, change, version)
    if resumed.current_attempt_id is not None and not resumed.pause_requested:
        try:
            withdraw_pause(settings, job_id, resumed.current_attempt_id)
        except OSError as error:
            # The driver then ends all the same, and another attempt follows at once.
            logger.warning("job %s: the pause could not be withdrawn: %s", job_id, error)
    return resumed


def restart_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    *,
    step: int | None = None,
    path: str | None = None,
    actor: str = "user",
    version: int | None = None,
) -> Job:
    """Let a job that has ended or rests go on from one of its checkpoints, by default the newest.

    Later checkpoints count no more, and are removed once the new attempt has committed one.
    Raises `JobNotFound`, `JobAtWork`, `CheckpointNotFound` or `StorageUnavailable`.
    """

    def change(job: Job) -> Decision:
        is_at_rest = job.status in (JobStatus.QUEUED, JobStatus.PAUSED)
        if not (job.status.is_terminal or is_at_rest):
            raise JobAtWork(job.id, job.status, "pause or cancel it, and wait until it has stopped")
        chosen = _chosen(store.list_checkpoints(job.id), job.id, step, path)
        _recall_files(settings, job.id)
        return request_restart(job, chosen.path, chosen.step, time.time(), actor)

    restarted = _change(store, job_id, change, version)
    note_course(restarted, settings)
    return restarted


def _recall_files(settings: Settings, job_id: str) -> None:
    """Give a job back the files that a deletion which was cut off took from it."""
    try:
        unbury(settings, job_id)
    except OSError as error:
        raise StorageUnavailable(f"cannot restore the files of job {job_id}: {error}") from error


def _chosen(
    checkpoints: list[Checkpoint], job_id: str, step: int | None, path: str | None
) -> Checkpoint:
    fitting = [
        each
        for each in checkpoints
        if (step is None or each.step == step)
        and (path is None or path in (each.path, Path(each.path).name))
    ]
    if not fitting:
        wanted = path or (f"at step {step}" if step is not None else "yet")
        raise CheckpointNotFound(job_id, wanted, [each.step for each in checkpoints])
    return max(fitting, key=lambda each: (each.step, each.created_at))


def cloned_spec(
    job: Job, changes: Mapping[str, Any], patch: Mapping[str, Any] | None, name: str | None
) -> JobSpec:
    """The spec of a job with changes: a JSON merge patch, then values by dotted path.

    Raises `SpecError` for what is not legal any more.
    """
    document: Any = job.spec.model_dump(mode="json", exclude_none=True)
    if patch is not None:
        check_depth(patch, "patch")
        document = merged(document, patch)
    if name is not None:
        document = {**document, "name": name}
    return validate_spec(set_values(document, changes))


def merged(document: Any, patch: Any) -> Any:
    """A document after a JSON merge patch (RFC 7396): null removes, lists are replaced whole."""
    if not isinstance(patch, Mapping):
        return patch
    known = document if isinstance(document, Mapping) else {}
    rest = {key: value for key, value in known.items() if key not in patch}
    changed = {key: merged(known.get(key), value) for key, value in patch.items()}
    return rest | {key: value for key, value in changed.items() if patch[key] is not None}


def delete_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    *,
    artifacts: bool = True,
    version: int | None = None,
) -> list[Left]:
    """Delete a job that has ended, with run folder and checkpoints unless `artifacts` is False.

    What is left of its checkpoints elsewhere. The folder is renamed first and removed last, so that
    a deletion that was cut off anywhere can be asked for again, or is finished at the next start.
    Raises `JobNotFound`, `JobNotEnded` or `StorageUnavailable`.
    """
    job = store.get_job(job_id)
    _check_version(job, version)
    if not job.status.is_terminal:
        raise JobNotEnded(job_id, job.status)
    set_aside = bury if artifacts else unbury
    try:
        set_aside(settings, job_id)
        try:
            store.delete_job(job_id)
        except JobNotEnded:
            # Somebody restarted it in this moment.
            unbury(settings, job_id)
            raise
        if not artifacts:
            forget_job(settings, job_id)
            return []
        # Once more: a service that started, or a restart that failed, may have undone it.
        bury(settings, job_id)
        left = remove_checkpoints(place_of(job.spec.checkpoint.path, job_id))
        remove_buried(settings, job_id)
    except OSError as error:
        raise StorageUnavailable(f"cannot delete the files of job {job_id}: {error}") from error
    return left


def finish_deletions(store: JobStore, settings: Settings) -> None:
    """Mend what deletions that were cut off left behind.

    A job whose rows had gone loses its files, too; one that is still there gets its folder back,
    as its checkpoints are still listed. Where it has a folder again, the old one is left to its
    next restart or deletion: a job that runs is not given other files under its feet.
    """
    for job_id in buried_jobs(settings):
        try:
            _mend(store, settings, job_id)
        except OSError as error:
            logger.warning("the buried files of job %s stay for now: %s", job_id, error)


def _mend(store: JobStore, settings: Settings, job_id: str) -> None:
    if not _is_stored(store, job_id):
        for place in buried_places(settings, job_id):
            for left in remove_checkpoints(place_of(place, job_id)):
                logger.warning("job %s is deleted, but not %s: %s", job_id, left.path, left.why)
        remove_buried(settings, job_id)
    elif not run_dir_of(settings, job_id).root.exists():
        unbury(settings, job_id)
        logger.info("job %s was not deleted after all: it has its files again", job_id)


def _is_stored(store: JobStore, job_id: str) -> bool:
    try:
        store.get_job(job_id)
    except JobNotFound:
        return False
    except JobUnreadable:
        return True
    return True


def _check_version(job: Job, wanted: int | None) -> None:
    if wanted is not None and job.version != wanted:
        raise VersionChanged(job.id, wanted, job.version)


def _check_lives(job: Job) -> None:
    if job.status.is_terminal:
        raise JobEnded(job.id, job.status)


def _change(
    store: JobStore, job_id: str, change: Callable[[Job], Decision], version: int | None
) -> Job:
    """Store what a request makes of a job; read it again while others write it."""
    for tries_left in reversed(range(_MAX_TRIES)):
        job = store.get_job(job_id)
        _check_version(job, version)
        decision = change(job)
        if decision.job == job:
            return job
        try:
            return store.update_job(decision.job, timeline=decision.timeline)
        except StaleVersion:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")

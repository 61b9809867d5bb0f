"""Actions on existing jobs: cancel, pause, resume, restart, clone, delete, resize, drain.

Each action writes the job, or a line of its timeline, and returns; the reconciler and the scheduler
carry it out. The newest resize request of the timeline holds all that is wanted: the number of
workers and every host to leave. A file of the attempt says the same to its driver, and each new
attempt gets a copy. Repeating an action changes nothing.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tenacity import retry, retry_if_exception_type, stop_after_attempt

from service import errors
from service.auth.permissions import is_allowed, roots_of
from service.db.jobs import JobStore
from service.domain.lifecycle import (
    Decision,
    request_cancel,
    request_pause,
    request_restart,
    request_resume,
)
from service.domain.membership import current_membership, sizes_of_job
from service.domain.models import (
    Checkpoint,
    Job,
    JobStatus,
    RemainingPath,
    TimelineEvent,
)
from service.domain.sharding import STARTED, newest_workers
from service.domain.timeline import DRAIN, RESIZE, RESIZE_KINDS, latest_resize_request
from service.jobs.run_storage import (
    empty_trash,
    move_to_trash,
    restore_from_trash,
    run_dir_of,
    trashed_checkpoint_paths,
    trashed_jobs,
    update_job_file,
    withdraw_pause,
    write_json,
)
from service.settings import Settings
from service.storage import in_time
from trainer.protocol.requests import ResizeRequest
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import remove_untrusted
from trainer.spec import validate_spec
from trainer.spec.base import MAX_WORKERS, FieldProblem
from trainer.spec.job import JobSpec
from trainer.spec.parse import set_values

logger = logging.getLogger(__name__)
_MAX_TRIES = 5
# Sizes that a message names.
_MAX_LISTED = 20
# Of the lines about workers the newest: drivers may tell any number.
_MAX_STARTED = 100
_TRIAL_LABELS = ("sweep", "trial")
_REMOTE = "the service deletes no objects: `aws s3 rm --recursive` or `gcloud storage rm -r` does"


def remove_checkpoints(checkpoint_path: str | None, job_id: str) -> list[RemainingPath]:
    """Delete what a job kept below its `checkpoint.path`, if any; what is left of it."""
    if checkpoint_path is None:
        return []  # They lie in its run folder.
    if "://" in checkpoint_path:
        # The query has an endpoint, which nobody needs to see.
        above = checkpoint_path.partition("?")[0]
        return [RemainingPath(f"{above.rstrip('/')}/{job_id}", _REMOTE)]
    place = f"{checkpoint_path.rstrip('/')}/{job_id}"
    folder = Path(place)
    try:
        if not folder.parent.is_dir():
            return [RemainingPath(place, "the service's host does not see the folder above it")]
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # It never was, or others do the same, who have the rest of it.
    except OSError as error:
        logger.warning("checkpoints at %s stay: %s", place, error)
        return [RemainingPath(place, f"it cannot be deleted: {error}")]
    return []


class ChangedBy(TypedDict, total=False):
    """Who changes a job (`user` if nobody is named), and at which of its versions (None: at any).

    Changes raise `VersionChanged` where it is at none of them, and `StaleVersion` only if others
    kept writing it meanwhile.
    """

    actor: str
    versions: frozenset[int] | None


def cancel_job(store: JobStore, settings: Settings, job_id: str, **by: Unpack[ChangedBy]) -> Job:
    """Ask a job to stop; the reconciler carries it out. Raises `JobNotFound` or `JobEnded`."""

    def change(job: Job, actor: str) -> Decision:
        if job.status.is_terminal:
            raise errors.JobEnded(job.id, job.status)
        return request_cancel(job, time.time(), actor)

    cancelled = change_job(store, job_id, change, **by)
    if cancelled.status.is_terminal:
        update_job_file(cancelled, settings)
    return cancelled


def pause_job(store: JobStore, settings: Settings, job_id: str, **by: Unpack[ChangedBy]) -> Job:
    """Ask a job to save, give its workers back and keep its place in the queue.

    Raises `JobNotFound` or `JobEnded`, the latter also while it is being cancelled.
    """

    def change(job: Job, actor: str) -> Decision:
        if job.status.is_terminal or job.cancel_requested:
            raise errors.JobEnded(job.id, job.status)
        return request_pause(job, time.time(), settings.pause_grace_s, actor)

    return change_job(store, job_id, change, **by)


def resume_job(store: JobStore, settings: Settings, job_id: str, **by: Unpack[ChangedBy]) -> Job:
    """Let a paused job wait for its workers again. Raises `JobNotFound` or `JobNotPaused`."""

    def change(job: Job, actor: str) -> Decision:
        if job.status is not JobStatus.PAUSED and not job.pause_requested:
            raise errors.JobNotPaused(job.id, job.status)
        return request_resume(job, time.time(), actor)

    resumed = change_job(store, job_id, change, **by)
    if resumed.current_attempt_id is not None and not resumed.pause_requested:
        try:
            in_time(
                settings.runs_dir,
                partial(withdraw_pause, settings, job_id, resumed.current_attempt_id),
            )
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
    **by: Unpack[ChangedBy],
) -> Job:
    """Let a job that has ended or rests go on from one of its checkpoints, by default the newest.

    Later checkpoints count no more, and are removed once the new attempt has committed one.
    Raises `JobNotFound`, `JobActive`, `JobEnded`, `CheckpointNotFound` or `StorageUnavailable`.
    """

    def change(job: Job, actor: str) -> Decision:
        if not (job.status.is_terminal or job.status.is_at_rest):
            raise errors.JobActive(job.id, job.status)
        chosen = _chosen(store.list_checkpoints(job.id), job.id, step, path)
        is_done = job.status is JobStatus.SUCCEEDED and chosen.step >= job.progress.total_steps > 0
        if is_done:
            why = f"all {chosen.step} steps are trained; name an earlier checkpoint, or clone it"
            raise errors.JobEnded(job.id, why)
        with errors.reaching_storage(f"cannot restore the files of job {job_id}: "):
            # A deletion which was cut off may have taken them.
            in_time(settings.runs_dir, partial(restore_from_trash, settings, job_id))
        return request_restart(job, chosen.path, chosen.step, time.time(), actor)

    restarted = change_job(store, job_id, change, **by)
    update_job_file(restarted, settings)
    return restarted


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
        if not checkpoints:
            wanted += " (clone the job to begin anew)"
        raise errors.CheckpointNotFound(job_id, wanted, [each.step for each in checkpoints])
    return max(fitting, key=lambda each: (each.step, each.created_at))


def spec_of_clone(spec: JobSpec) -> JobSpec:
    """The spec that a clone begins with: one of a sweep's trial is no trial of it."""
    labels = {name: text for name, text in spec.labels.items() if name not in _TRIAL_LABELS}
    return spec.model_copy(update={"labels": labels})


def document_of(spec: JobSpec) -> dict[str, Any]:
    """A spec in which values can be set by path: what it does not have is left out."""
    document = spec.model_dump(mode="json", exclude_none=True)
    # Left out it would be the default, unlike all others.
    document["data"]["split"]["validation"] = spec.data.split.validation
    return document


def cloned_spec(job: Job, changes: Mapping[str, Any], name: str | None) -> JobSpec:
    """The spec of a job with changes, which are values by dotted path.

    Raises `SpecError` for what is not legal any more.
    """
    document = document_of(spec_of_clone(job.spec))
    if name is not None:
        document = {**document, "name": name}
    return validate_spec(set_values(document, changes))


def delete_job(
    store: JobStore,
    settings: Settings,
    job_id: str,
    *,
    artifacts: bool = True,
    versions: frozenset[int] | None = None,
) -> list[RemainingPath]:
    """Delete a job that has ended, with run folder and checkpoints unless `artifacts` is False.

    What is left of its checkpoints elsewhere. The folder is renamed first and removed last, so that
    a deletion that was cut off anywhere can be asked for again, or is finished within an hour.
    Raises `JobNotFound`, `JobNotEnded` or `StorageUnavailable`.
    """
    job = store.get_job(job_id)
    _check_version(job, versions)
    if not job.status.is_terminal:
        raise errors.JobNotEnded(job_id, job.status)
    set_aside = move_to_trash if artifacts else restore_from_trash
    with errors.reaching_storage(f"cannot delete the files of job {job_id}: "):
        set_aside(settings, job_id)
        try:
            store.delete_job(job_id)
        except errors.JobNotEnded:
            # Somebody restarted it in this moment.
            restore_from_trash(settings, job_id)
            raise
        if not artifacts:
            # Or the folder that stays would be taken for one of a job that is to be recovered.
            remove_untrusted(run_dir_of(settings, job_id).job_path, settings.runs_dir)
            return []
        # Once more: `finish_deletions`, or a restart that failed, may have undone it.
        move_to_trash(settings, job_id)
        left = remove_checkpoints(job.spec.checkpoint.path, job_id)
        empty_trash(settings, job_id)
        return left


def finish_deletions(store: JobStore, settings: Settings) -> None:
    """Finish or undo deletions that were cut off.

    A job whose rows had gone loses its files, too; one that is still there gets its folder back,
    as its checkpoints are still listed. Where it has a folder again, the old one is left to its
    next restart or deletion: a running job is not given other files.
    """
    for job_id in trashed_jobs(settings):
        try:
            _finish_deletion(store, settings, job_id)
        except OSError as error:
            logger.warning("the trashed files of job %s stay for now: %s", job_id, error)


def _finish_deletion(store: JobStore, settings: Settings, job_id: str) -> None:
    try:
        store.get_job(job_id)
    except errors.JobNotFound:
        for path in trashed_checkpoint_paths(settings, job_id):
            # A job may have made what looks like the trash of another one.
            if not is_allowed(path, roots_of(settings)):
                continue
            for left in remove_checkpoints(path, job_id):
                logger.warning("job %s is deleted, but not %s: %s", job_id, left.path, left.why)
        empty_trash(settings, job_id)
        return
    except errors.JobUnreadable:
        pass  # It is stored all the same.
    if not run_dir_of(settings, job_id).root.exists():
        restore_from_trash(settings, job_id)
        logger.info("job %s was not deleted after all: it has its files again", job_id)


def _check_version(job: Job, wanted: frozenset[int] | None) -> None:
    if wanted is not None and job.version not in wanted:
        asked = " or ".join(map(str, sorted(wanted)))
        raise errors.VersionChanged(job.id, asked, job.version)


@retry(
    retry=retry_if_exception_type(errors.StaleVersion),
    stop=stop_after_attempt(_MAX_TRIES),
    reraise=True,
)
def change_job(
    store: JobStore,
    job_id: str,
    change: Callable[[Job, str], Decision],
    actor: str = "user",
    versions: frozenset[int] | None = None,
) -> Job:
    """Store what `change` makes of a job for `actor`, anew while others write the job meanwhile."""
    job = store.get_job(job_id)
    _check_version(job, versions)
    decision = change(job, actor)
    if decision == Decision(job, None):
        return job
    return store.update_job(decision.job, timeline=decision.timeline)


# ---- resize and drain


def request_resize(
    store: JobStore, settings: Settings, job_id: str, num_workers: int, **by: Unpack[ChangedBy]
) -> ResizeRequest:
    """Ask a running job for another number of workers.

    Raises `JobNotFound`, `InvalidRequest`, and as conflicts `JobNotRunning` and `LayoutUnknown`,
    and `StorageUnavailable`.
    """

    def change(job: Job, known: ResizeRequest) -> ResizeRequest:
        check_size(job, num_workers)
        return known.model_copy(update={"workers": num_workers})

    message = f"resize to {num_workers} workers requested"
    return _ask(store, settings, job_id, change, RESIZE, message, **by)


def request_drain(
    store: JobStore,
    settings: Settings,
    job_id: str,
    host: str,
    *,
    undo: bool = False,
    **by: Unpack[ChangedBy],
) -> ResizeRequest:
    """Ask a running job to leave a host, or with `undo` to use it again.

    Raises as `request_resize`, `InvalidRequest` for a host that has none of the job's workers.
    """

    def change(job: Job, known: ResizeRequest) -> ResizeRequest:
        if undo:
            return known.model_copy(update={"drain_hosts": known.drain_hosts - {host}})
        if host not in known.drain_hosts:
            told = partial(store.list_timeline, kinds=(STARTED,), limit=_MAX_STARTED, newest=True)
            hosts = known_hosts(job, told(job.id))
            if host not in hosts:
                known_ones = ", ".join(hosts) or "none yet"
                message = f"no worker of the job is on '{host}'; its hosts: {known_ones}"
                raise errors.InvalidRequest([FieldProblem("host", "host", message)])
        return known.model_copy(update={"drain_hosts": known.drain_hosts | {host}})

    message = f"host {host} may be used again" if undo else f"drain of host {host} requested"
    return _ask(store, settings, job_id, change, DRAIN, message, **by)


def legal_sizes(job: Job) -> list[int]:
    """The numbers of workers that a job can train with, to choose from; raises `LayoutUnknown`."""
    # A job of an earlier version may have any bounds.
    return list(_legal_sizes(job)[:MAX_WORKERS])


def _legal_sizes(job: Job) -> range:
    sizes = sizes_of_job(job)
    group = sizes.shard_group_size
    if group is None:
        raise errors.LayoutUnknown(job.id)
    return range(sizes.min_workers, _most_workers(job) + 1, group)


def _most_workers(job: Job) -> int:
    """The most workers of a job in this attempt, as its quota left them when that started."""
    most = job.spec.parallelism.world_size
    return min(most, job.queue_note.max_workers or most)


def check_size(job: Job, num_workers: int) -> None:
    """Raise `InvalidRequest` if a job cannot train with so many workers, and `LayoutUnknown`."""
    legal, sizes = _legal_sizes(job), job.spec.parallelism
    if num_workers in legal:
        return
    if not sizes.is_elastic:
        message = (
            f"the job was submitted with {sizes.world_size} workers and keeps them; submit it with "
            "parallelism.workers: {min, max} to change its size while it trains"
        )
        raise errors.InvalidRequest([FieldProblem("workers", "fixed_size", message)])
    why = f"it trains with {sizes.min_workers} to {sizes.world_size} workers"
    why += f" in groups of {legal.step}"
    if sizes.num_hosts_needed:
        why += f", and survive needs {sizes.num_hosts_needed} groups"
    if (most := _most_workers(job)) < sizes.world_size:
        why += f", and the quota of project {job.project} left it {most} when it started: raise it"
        why += ", then pause and resume the job"
    first = ", ".join(map(str, legal[:_MAX_LISTED]))
    rest = f", ... {legal[-1]}" if legal[_MAX_LISTED:] else ""
    message = f"{num_workers} workers do not fit: {why}; possible: {first}{rest}"
    raise errors.InvalidRequest([FieldProblem("workers", "size", message)])


def known_hosts(job: Job, lines: Iterable[TimelineEvent]) -> list[str]:
    """Hosts that workers of the job's newest attempt are or were on."""
    own = [line for line in lines if line.attempt_id == job.current_attempt_id]
    workers, membership = newest_workers(own), current_membership(job)
    hosts = set(workers.hosts if workers else ())
    if membership is not None:
        hosts.update(*(member.hosts for member in membership.members))
        hosts.update(*(gone.hosts for gone in membership.gone))
    return sorted(hosts)


def copy_resize_request(store: JobStore, run_dir: RunDir, job_id: str, attempt_id: str) -> None:
    """Tell a new attempt what is wanted of the job already; raises OSError."""
    request = _requested(store, job_id)
    if request.id:
        path = run_dir.attempt(attempt_id).resize_request_path
        write_json(path, request.model_dump(), run_dir.runs_dir)


def _ask(
    store: JobStore,
    settings: Settings,
    job_id: str,
    change: Callable[[Job, ResizeRequest], ResizeRequest],
    kind: str,
    message: str,
    **by: Unpack[ChangedBy],
) -> ResizeRequest:
    def ask(job: Job, actor: str) -> Decision:
        if job.status is not JobStatus.RUNNING or job.current_attempt_id is None:
            raise errors.JobNotRunning(job.id, "to place anew", job.status)
        known = _requested(store, job_id)
        changed = change(job, known)
        if changed == known:
            return Decision(job, None)
        data = {**changed.model_dump(), "id": f"r-{secrets.token_hex(4)}"}
        attempt_id, now = job.current_attempt_id, time.time()
        event = TimelineEvent(0, job.id, attempt_id, now, kind, message, actor, data)
        # The version of the job lets one of two requests through, and a stopping job none.
        return Decision(job, None, timeline=(event,))

    return _place(store, run_dir_of(settings, job_id), change_job(store, job_id, ask, **by))


def _place(store: JobStore, run_dir: RunDir, job: Job) -> ResizeRequest:
    """Show the driver what the timeline wants, until nobody has changed it meanwhile."""
    assert job.current_attempt_id is not None
    path = run_dir.attempt(job.current_attempt_id).resize_request_path
    request = _requested(store, job.id)
    for _ in range(_MAX_TRIES if request.id else 0):
        with errors.reaching_storage():
            write_json(path, request.model_dump(), run_dir.runs_dir)
        placed, request = request, _requested(store, job.id)
        if placed == request:
            break
    return request


def _requested(store: JobStore, job_id: str) -> ResizeRequest:
    newest = store.list_timeline(job_id, kinds=RESIZE_KINDS, limit=1, newest=True)
    return latest_resize_request(newest)

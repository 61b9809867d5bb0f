"""What a user can do to jobs, whatever the door (REST, dashboard): plan, submit, cancel, find."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from service.api.schemas import JobPlan
from service.domain import Job, JobStatus
from service.errors import JobEnded, JobNotFound, StaleVersion
from service.ids import new_job_id
from service.lifecycle import request_cancel
from service.store.base import JobStore
from trainer.parallel.layout import Layout
from trainer.spec import FieldProblem, JobSpec, SpecError

_MANIFEST_NAME = "manifest.json"
_MAX_CANCEL_TRIES = 5
_MAX_SHOWN_CHARS = 200


def check_data(spec: JobSpec) -> None:
    """Look at the data folder that a spec names; raises `SpecError` naming the field."""
    problem = _data_problem(spec.data.path)
    if problem is not None:
        raise SpecError([problem])


def _data_problem(path: str) -> FieldProblem | None:
    if "://" in path:
        message = f"{path}: data behind a URL is not supported yet; give a folder"
        return FieldProblem("data.path", "not_supported_yet", message)
    folder = Path(path)
    if not folder.is_absolute():
        message = f"'{path}' is relative, but service and cluster have other working folders"
        return FieldProblem("data.path", "relative_path", f"{message}; give an absolute path")
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        shown = path if len(path) <= _MAX_SHOWN_CHARS else f"{path[:_MAX_SHOWN_CHARS]}..."
        message = f"cannot look at {shown} ({error.strerror}); check the path and its rights"
        return FieldProblem("data.path", "unreadable_path", message)
    if not is_folder:
        message = f"{path} is not a folder; prepare one with `shardloom data prepare`"
        return FieldProblem("data.path", "missing_path", message)
    return _manifest_problem(folder / _MANIFEST_NAME)


def _manifest_problem(path: Path) -> FieldProblem | None:
    again = "prepare the data again with `shardloom data prepare`"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        message = f"{path} is missing, so the folder was never finished; {again}"
        return FieldProblem("data.path", "missing_manifest", message)
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read ({error}); {again}"
        return FieldProblem("data.path", "unreadable_manifest", message)
    if not isinstance(manifest, dict):
        message = f"{path} is not a manifest; {again}"
        return FieldProblem("data.path", "unreadable_manifest", message)
    return None


def layout_of(spec: JobSpec) -> Layout:
    """The groups that a spec forms."""
    group = spec.parallelism.shard_group_size
    assert isinstance(group, int), "validate_spec refuses 'auto'"
    return Layout(spec.parallelism.world_size, group, spec.parallelism.placement)


def plan_of(spec: JobSpec) -> JobPlan:
    """What a dry run answers."""
    layout = layout_of(spec)
    return JobPlan(
        spec=spec,
        world_size=layout.world_size,
        shard_group_size=layout.shard_group_size,
        num_replicas=layout.num_replicas,
        placement=layout.placement,
        sharding_groups=[list(group) for group in layout.sharding_groups],
        replica_groups=[list(group) for group in layout.replica_groups],
        moment_scale=spec.moment_scale,
    )


def submit_job(store: JobStore, spec: JobSpec, *, idempotency_key: str | None) -> Job:
    """Store a new job, or return the one that the key made.

    Raises `IdempotencyConflict`, or `SpecError` if the data is not there. A repeated submit is
    answered as the first one was, whatever happened to the data since.
    """
    request_hash = _hash_of(spec)
    if idempotency_key is not None:
        known = store.find_submitted(idempotency_key, request_hash)
        if known is not None:
            return known
    check_data(spec)
    now = time.time()
    job = Job(
        id=new_job_id(now), name=spec.name, spec=spec, status=JobStatus.QUEUED, created_at=now
    )
    return store.create_job(job, idempotency_key=idempotency_key, request_hash=request_hash)


def _hash_of(spec: JobSpec) -> str:
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def cancel_job(store: JobStore, job_id: str) -> Job:
    """Ask a job to stop; the reconciler carries it out. Raises `JobNotFound` or `JobEnded`.

    Raises `StaleVersion` only if others kept writing the job meanwhile.
    """
    for tries_left in reversed(range(_MAX_CANCEL_TRIES)):
        job = store.get_job(job_id)
        if job.status.is_terminal:
            raise JobEnded(job_id, job.status)
        if job.cancel_requested:
            return job
        asked = request_cancel(job, time.time())
        try:
            return store.update_job(asked.job, timeline=asked.timeline)
        except StaleVersion:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def find_job(store: JobStore, reference: str) -> Job:
    """The job with this id, else the newest with this name, else the one whose id starts so.

    Raises `JobNotFound`, also where a prefix fits several jobs.
    """
    try:
        return store.get_job(reference)
    except JobNotFound:
        named, _ = store.list_jobs(name=reference, limit=1)
    if named:
        return named[0]
    # Ids sort by text and pages go down from a cursor: "~" comes after every character of an id.
    near, _ = store.list_jobs(after=f"{reference}~", limit=2)
    matches = [job for job in near if reference and job.id.startswith(reference)]
    if len(matches) != 1:
        raise JobNotFound(reference)
    return matches[0]

"""What is submitted for an attempt: its spec file, the driver's command and its environment."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from functools import partial

from service.auth.crypto import master_keys_of
from service.backends.base import Submission
from service.db.jobs import JobStore
from service.domain.models import Attempt, Job
from service.domain.retries import NextAttempt, next_attempt, with_parallelism
from service.jobs.code_archives import give_code
from service.jobs.run_storage import run_dir_of
from service.observability.tracing import traceparent_of
from service.settings import Settings
from trainer.protocol.untrusted import remove_untrusted, replace_untrusted
from trainer.spec.job import JobSpec

STOP_WAIT_S = 20
# Each attempt tells one, and drivers may tell any number.
_MAX_LAYOUTS = 500


class QuotaTooSmall(Exception):
    """So many workers as a project's quota leaves are not legal in the job's spec."""


def plan_attempt(store: JobStore, job: Job, attempt: Attempt, now: float) -> NextAttempt:
    """What an attempt runs, given those that ended before it and its project's quota.

    Raises `QuotaTooSmall`.
    """
    known_attempts = store.list_attempts(job.id) if attempt.index else []
    ended = [each for each in known_attempts if each.index < attempt.index]
    told = partial(store.list_timeline, kinds=("layout_chosen",), limit=_MAX_LAYOUTS, newest=True)
    chosen = told(job.id) if ended else []
    sizes = {each.attempt_id: each.data.get("shard_group_size") for each in chosen}
    known = {name: size for name, size in sizes.items() if name and isinstance(size, int)}
    following = next_attempt(job, ended, known, now)
    most, spec = job.queue_note.max_workers, following.spec
    if not most:
        return following
    size = spec.parallelism.shard_group_size
    if size != "auto":
        # It may be larger than when the quota was counted.
        most = most // size * size
    bounds = {"min": spec.parallelism.min_workers, "max": most}
    bounded = with_parallelism(spec, workers=bounds)
    if bounded is None:
        raise QuotaTooSmall(
            f"the quota of project {job.project} left it {most} workers, which survive, min_groups "
            "or the size of the tables does not allow; free some, or raise the quota"
        )
    return replace(following, spec=bounded)


def submission_of(
    job: Job, attempt: Attempt, following: NextAttempt, settings: Settings
) -> Submission:
    """The driver's command and environment for an attempt."""
    avoided = (f"{host}={until:.0f}" for host, until in following.avoided_hosts)
    failures_left = max(0, job.spec.retry.max_failures - job.num_failures)
    optional: dict[str, str] = {}
    if settings.driver_ca_file:
        optional["SHARDLOOM_CA_FILE"] = str(settings.driver_ca_file)
    # How far the job's cluster can grow, if it does: the driver then asks for capacity.
    has_own = following.spec.resources.cluster == "own"
    sizes = following.spec.parallelism
    most = sizes.world_size + sizes.spare_workers if has_own else settings.cluster_max_workers
    if has_own:
        # In a Secret. The environment of a Ray job is shown to all who may use the cluster.
        optional["SHARDLOOM_ATTEMPT_TOKEN"] = _token_of(attempt, settings)
    elif not settings.runs_shared:
        # For one driver to exchange for the token.
        code = master_keys_of(settings).mac("attempt-codes", attempt.id)
        optional["SHARDLOOM_ATTEMPT_CODE"] = code
    if not settings.runs_shared:
        optional["SHARDLOOM_RUNS_SHARED"] = "false"
    if most:
        optional["SHARDLOOM_CLUSTER_MAX_WORKERS"] = str(most)
    if settings.otlp_endpoint:
        # The driver continues the trace of the job's submission.
        optional["OTEL_EXPORTER_OTLP_ENDPOINT"] = settings.otlp_endpoint
        optional["SHARDLOOM_TRACEPARENT"] = traceparent_of(job.id)
    return Submission(
        attempt_id=attempt.id,
        job_id=job.id,
        spec=following.spec,
        entrypoint=f"{shlex.quote(settings.trainer_python)} -m trainer.driver",
        env={
            "SHARDLOOM_JOB_ID": job.id,
            "SHARDLOOM_ATTEMPT_ID": attempt.id,
            "SHARDLOOM_RUN_DIR": str(run_dir_of(settings, job.id).root),
            "SHARDLOOM_SERVICE_URL": settings.service_url,
            "SHARDLOOM_MAX_WORKER_FAILURES": str(failures_left),
            "SHARDLOOM_END_ON": " ".join(following.end_on),
            "SHARDLOOM_AVOIDED_HOSTS": " ".join(avoided),
            "SHARDLOOM_LOG_MAX_BYTES": str(settings.log_max_bytes),
            **optional,
            "PYTHONUNBUFFERED": "1",
            # By default Ray sends SIGTERM and 3 s later SIGKILL: too short to report.
            "RAY_JOB_STOP_SIGNAL": "SIGINT",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        },
        metadata={"shardloom_job_id": job.id, "shardloom_job_name": job.name},
    )


def write_spec(spec: JobSpec, attempt: Attempt, settings: Settings) -> None:
    """Write the spec that an attempt will run, atomically, the code that it names, and its token.

    They need not outlive the machine: an attempt whose files are lost has lost its driver, too.
    Raises `CodeGone`, and OSError.
    """
    run_dir = run_dir_of(settings, attempt.job_id)
    give_code(settings, spec, run_dir)
    content = spec.model_dump_json(indent=2).encode()
    files = run_dir.attempt(attempt.id)
    replace_untrusted(files.spec_path, content, settings.runs_dir, durable=False)
    if spec.resources.cluster == "shared" and settings.runs_shared:
        token = _token_of(attempt, settings).encode()
        replace_untrusted(files.token_path, token, settings.runs_dir, mode=0o600, durable=False)


def remove_token(job_id: str, attempt: str, settings: Settings) -> None:
    """Remove the token of an attempt that has ended, if its driver never read it."""
    with suppress(OSError):
        remove_untrusted(
            run_dir_of(settings, job_id).attempt(attempt).token_path, settings.runs_dir
        )


def _token_of(attempt: Attempt, settings: Settings) -> str:
    """Derived from the attempt's id, so it need not be stored."""
    return master_keys_of(settings).attempt_token(attempt.id)

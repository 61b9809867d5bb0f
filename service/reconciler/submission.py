"""What is submitted for an attempt: its spec file, the driver's command and its environment."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from service.auth.crypto import master_keys_of
from service.backends.base import Submission, need_of
from service.db.jobs import JobStore
from service.domain.lifecycle import remaining_failures
from service.domain.models import Attempt, Job, QueueState
from service.domain.retries import NextAttempt, next_attempt
from service.jobs.code_archives import give_code
from service.jobs.run_storage import run_dir_of, write_text
from service.observability.tracing import traceparent_of
from service.settings import Settings
from trainer.spec import validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

STOP_WAIT_S = 20


def plan_attempt(store: JobStore, job: Job, attempt: Attempt, now: float) -> NextAttempt:
    """What an attempt runs, given those that ended before it and its project's quota."""
    ended = [each for each in store.list_attempts(job.id) if each.index < attempt.index]
    lines = store.list_timeline(job.id, limit=1000, kinds=("layout_chosen",)) if ended else []
    sizes = {each.attempt_id: each.data.get("shard_group_size") for each in lines}
    known = {name: size for name, size in sizes.items() if name and isinstance(size, int)}
    following = next_attempt(job, ended, known, now)
    most = QueueState.of(job).max_workers
    return replace(following, spec=_with_at_most(following.spec, most)) if most else following


def _with_at_most(spec: JobSpec, max_workers: int) -> JobSpec:
    """The spec with a lower bound of workers at the top; as it is where that is not legal."""
    document = spec.model_dump(mode="json")
    bounds = {"min": spec.parallelism.min_workers, "max": max_workers}
    document["parallelism"]["workers"] = bounds
    try:
        return validate_spec(document)
    except SpecError:
        return spec


def submission_of(
    job: Job, attempt: Attempt, following: NextAttempt, settings: Settings
) -> Submission:
    """The driver's command, environment and code for an attempt."""
    code = following.spec.model.code
    code_path = run_dir_of(settings, job.id).code_path(code) if code else None
    avoided = (f"{host}={until:.0f}" for host, until in following.avoided_hosts)
    return Submission(
        attempt_id=attempt.id,
        job_id=job.id,
        entrypoint=f"{shlex.quote(settings.trainer_python)} -m trainer.driver",
        env={
            "SHARDLOOM_JOB_ID": job.id,
            "SHARDLOOM_ATTEMPT_ID": attempt.id,
            "SHARDLOOM_RUN_DIR": str(run_dir_of(settings, job.id).root),
            "SHARDLOOM_SERVICE_URL": settings.service_url,
            # Derived from the attempt's id, so it need not be stored.
            "SHARDLOOM_ATTEMPT_TOKEN": master_keys_of(settings).attempt_token(attempt.id),
            **(
                {"SHARDLOOM_CA_FILE": str(settings.driver_ca_file)}
                if settings.driver_ca_file
                else {}
            ),
            **_growth(following.spec, settings),
            "SHARDLOOM_MAX_WORKER_FAILURES": str(remaining_failures(job)),
            "SHARDLOOM_END_ON": " ".join(following.end_on),
            "SHARDLOOM_AVOIDED_HOSTS": " ".join(avoided),
            "SHARDLOOM_LOG_MAX_BYTES": str(settings.log_max_bytes),
            **_tracing(job, settings),
            "PYTHONUNBUFFERED": "1",
            # By default Ray sends SIGTERM and 3 s later SIGKILL: too short to report.
            "RAY_JOB_STOP_SIGNAL": "SIGINT",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        },
        metadata={"shardloom_job_id": job.id, "shardloom_job_name": job.name},
        code_uris=(code_path.as_uri(),) if code_path else (),
        cluster=need_of(following.spec),
    )


def _growth(spec: JobSpec, settings: Settings) -> dict[str, str]:
    """How far the job's cluster can grow, if it does: the driver then asks for capacity."""
    is_own = spec.resources.cluster == "own"
    most = spec.parallelism.world_size if is_own else settings.cluster_max_workers
    return {"SHARDLOOM_CLUSTER_MAX_WORKERS": str(most)} if most else {}


def _tracing(job: Job, settings: Settings) -> dict[str, str]:
    """Lets the driver continue the OpenTelemetry trace of the job's submission."""
    endpoint = settings.otlp_endpoint
    if not endpoint:
        return {}
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "SHARDLOOM_TRACEPARENT": traceparent_of(job.id),
    }


def write_spec(spec: JobSpec, attempt: Attempt, settings: Settings) -> Path:
    """Write the spec that an attempt will run, atomically, and the code that it names.

    Raises `CodeGone`, and OSError.
    """
    run_dir = run_dir_of(settings, attempt.job_id)
    give_code(settings, spec, run_dir)
    return write_text(run_dir.attempt(attempt.id).spec_path, spec.model_dump_json(indent=2))

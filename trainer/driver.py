"""The driver of an attempt: one Ray job that runs worker groups until the training ends.

    python -m trainer.driver      with the SHARDLOOM_* variables that `DriverContext` reads

It checks versions and data, runs a Ray Train TorchTrainer, restarts the workers from the newest
checkpoint when they were lost or their copies diverged and the budget allows, and posts the outbox
to the service. Its last
record says why the attempt ended; its exit code is 0 only when training completed.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from trainer import events, failures
from trainer.data.errors import DataError
from trainer.data.manifest import load_manifest
from trainer.data.resolve import resolve_tables
from trainer.failures import Failure
from trainer.outbox import EventWriter, OutboxPoster
from trainer.ray_worker import WorkerConfig, start_log
from trainer.run_dir import AttemptDir, RunDir
from trainer.spec import JobSpec, SpecError, load_spec
from trainer.versions import check_versions, installed_versions

logger = logging.getLogger("trainer.driver")  # __name__ is __main__ here

POST_TIMEOUT_S = 10.0
EXIT_CODES = {failures.COMPLETED: 0, failures.CANCELLED: 130}
EXIT_EVICTED = 143
CLUSTER_LOSS_GRACE_S = 3.0


@dataclass(frozen=True)
class DriverContext:
    """What the control plane tells a driver, by environment variables."""

    job_id: str
    attempt_id: str
    run_dir: Path
    service_url: str | None
    max_worker_failures: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> DriverContext:
        """Read the SHARDLOOM_* variables; a missing one is a KeyError that names it."""
        return cls(
            job_id=env["SHARDLOOM_JOB_ID"],
            attempt_id=env["SHARDLOOM_ATTEMPT_ID"],
            run_dir=Path(env["SHARDLOOM_RUN_DIR"]),
            service_url=env.get("SHARDLOOM_SERVICE_URL"),
            max_worker_failures=int(env.get("SHARDLOOM_MAX_WORKER_FAILURES", "0")),
        )

    @property
    def files(self) -> AttemptDir:
        """Files of this attempt."""
        return RunDir(self.run_dir).attempt(self.attempt_id)


def prepare_spec(context: DriverContext) -> JobSpec:
    """The attempt's spec with table sizes taken from the data; raises SpecError or DataError."""
    spec = load_spec(context.files.spec_path.read_text())
    return resolve_tables(spec, load_manifest(Path(spec.data.path)))


def run_attempt(context: DriverContext, writer: EventWriter) -> Failure | None:
    """Train to the end, restarting workers within the budget where it helps; None if completed."""
    try:
        spec = prepare_spec(context)
    except SpecError as error:
        return Failure(failures.BAD_SPEC, str(error))
    except DataError as error:
        return Failure(failures.DATA_ERROR, str(error))
    writer.write(
        events.AttemptStarted(
            time=time.time(),
            world_size=spec.parallelism.world_size,
            versions=installed_versions(),
        )
    )
    note_shortage(spec, writer)
    run_index = 0
    while True:
        failure = run_workers(WorkerConfig(spec, context.run_dir, context.attempt_id, run_index))
        if failure is None:
            return None
        run_index += 1
        restart = failures.should_restart(failure, run_index, context.max_worker_failures)
        if failure.reason in failures.RESTARTABLE:
            writer.write(
                events.WorkersLost(
                    time=time.time(),
                    run_index=run_index - 1,
                    reason=failure.reason,
                    message=failure.message,
                    will_restart=restart,
                )
            )
        if not restart:
            return failure


def run_workers(config: WorkerConfig) -> Failure | None:
    """One worker group run: a TorchTrainer from start to end; None when it completed."""
    # Imported late: a faulty spec is reported seconds sooner without Ray and torch.
    from ray.exceptions import RayError
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    from trainer.ray_worker import ray_train_loop

    resources = config.spec.resources
    use_gpu = wants_gpu(config.spec)
    trainer = TorchTrainer(
        ray_train_loop,
        train_loop_config={"worker": config},
        torch_config=TorchConfig(
            backend="nccl" if use_gpu else "gloo",
            timeout_s=int(max(resources.collective_timeout_s, 1)),
        ),
        scaling_config=ScalingConfig(
            num_workers=config.spec.parallelism.world_size,
            use_gpu=use_gpu,
            resources_per_worker=demand_per_worker(config.spec, use_gpu),
        ),
        run_config=RunConfig(
            name=f"{config.attempt_id}-r{config.run_index}",
            storage_path=str(config.run_dir / "ray"),
            # Restarts are ours to count, preempted workers' too.
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=0),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        logger.error("%s", error)
        return classify(error)
    except RayError as error:  # the controller itself is gone, alone or with the cluster
        # When the whole cluster goes, its parts go one by one, and this driver is among them.
        time.sleep(CLUSTER_LOSS_GRACE_S)
        if not cluster_answers():
            raise Evicted(f"the cluster is gone: {_first_line(error)}") from error
        return Failure(failures.WORKERS_LOST, f"Ray Train was lost: {_first_line(error)}")
    return None


def cluster_answers() -> bool:
    """Whether somebody listens at the cluster's address (GCS)."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=POST_TIMEOUT_S):
            return True
    except OSError:
        return False


def demand_per_worker(spec: JobSpec, use_gpu: bool) -> dict[str, float]:
    """Ray resources of one worker."""
    return {"CPU": spec.resources.cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})


def shortage(
    demand_per_worker: Mapping[str, float], num_workers: int, cluster: Mapping[str, float]
) -> str | None:
    """What a cluster of that size lacks for the job, in a sentence; None when all fits."""
    lacks = [
        f"{num_workers * amount:g} {name} (the cluster has {cluster.get(name, 0):g})"
        for name, amount in demand_per_worker.items()
        if num_workers * amount > cluster.get(name, 0)
    ]
    if not lacks:
        return None
    return (
        f"{num_workers} workers need {' and '.join(lacks)}: waiting until the cluster grows; "
        "else cancel, and lower parallelism.workers or resources.cpus_per_worker"
    )


def note_shortage(spec: JobSpec, writer: EventWriter) -> None:
    """Say so in the timeline when the workers do not fit, because they then wait in silence."""
    import ray

    num_workers = spec.parallelism.world_size
    lack = shortage(demand_per_worker(spec, wants_gpu(spec)), num_workers, ray.cluster_resources())
    if lack:
        writer.write(events.Note(time=time.time(), level="warning", message=lack))


def wants_gpu(spec: JobSpec) -> bool:
    """Whether to train on GPUs: as asked, or when the cluster has one for every worker."""
    import ray

    if spec.resources.device != "auto":
        return spec.resources.device == "cuda"
    return ray.cluster_resources().get("GPU", 0) >= spec.parallelism.world_size


def classify(error: Exception) -> Failure:
    """The cause behind a Ray Train error."""
    by_rank: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not by_rank:
        return Failure(failures.WORKERS_LOST, _first_line(error))
    return failures.explain([_classify_rank(rank, by_rank[rank]) for rank in sorted(by_rank)])


def _classify_rank(rank: int, error: Exception) -> Failure:
    from ray.exceptions import RayError
    from ray.train.v2._internal.exceptions import RayTrainError

    if isinstance(error, failures.WorkerFailure):
        return Failure(error.reason, f"rank {rank}: {error.message}")
    if isinstance(error, RayError | RayTrainError):
        message = f"rank {rank} was lost: {_first_line(error)}"
        return Failure(failures.WORKERS_LOST, message, is_death=True)
    return Failure(failures.TRAINING_ERROR, f"rank {rank}: {type(error).__name__}: {error}")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


class Stopped(Exception):
    """The attempt was asked to stop: SIGINT, by Ctrl-C or by a cancel through Ray Jobs."""


class Evicted(Exception):
    """Driver or cluster is being shut down, which nobody asked of the job.

    It ends without a report, so that the control plane counts it as lost and starts another.
    """


def run_until_stopped(context: DriverContext, writer: EventWriter) -> Failure | None:
    """`run_attempt` in a thread, so that a signal ends it at once; raises `Stopped`, `Evicted`.

    Ray Train would otherwise take SIGINT for itself and wait for the workers to abort.
    """
    import ray

    def _stop(signum: int, frame: object) -> None:
        raise Stopped

    def _evict(signum: int, frame: object) -> None:
        raise Evicted("SIGTERM")

    outcome: queue.Queue[Failure | BaseException | None] = queue.Queue()

    def _run() -> None:
        try:
            outcome.put(run_attempt(context, writer))
        except BaseException as error:  # handed to the main thread, which raises it
            outcome.put(error)

    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    # After ray.init, which takes SIGTERM for itself.
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _evict)
    threading.Thread(target=_run, name="attempt", daemon=True).start()
    result = outcome.get()
    if isinstance(result, BaseException):
        raise result
    return result


def end_attempt(context: DriverContext, writer: EventWriter) -> events.AttemptEnded:
    """Run the attempt and say how it ended; raises `Evicted` when that is not for us to say."""
    mismatches = check_versions()
    if mismatches:
        message = "; ".join(mismatch.message for mismatch in mismatches)
        return _ended(context, Failure(failures.VERSION_MISMATCH, message))
    try:
        return _ended(context, run_until_stopped(context, writer))
    except Stopped:
        return _ended(context, Failure(failures.CANCELLED, "stopped on request"))
    except Evicted:
        raise
    except Exception as error:  # whatever it is, the control plane must learn of it
        logger.exception("the driver failed")
        return _ended(context, Failure(failures.TRAINING_ERROR, f"{type(error).__name__}: {error}"))


def _ended(context: DriverContext, failure: Failure | None) -> events.AttemptEnded:
    if failure is not None:
        return events.AttemptEnded(time=time.time(), reason=failure.reason, message=failure.message)
    from trainer.elastic.checkpoint import list_committed

    newest = list_committed(RunDir(context.run_dir).checkpoints_dir)[-1]
    return events.AttemptEnded(
        time=time.time(),
        reason=failures.COMPLETED,
        message=f"training completed after {newest.commit.step} steps",
        final_metrics=newest.commit.metrics,
    )


def main() -> int:
    """Run the attempt that the environment names; the exit code of the Ray job."""
    context = DriverContext.from_env(os.environ)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    start_log(context.files.log_path("driver"))
    logger.info("driver of %s is process %d", context.attempt_id, os.getpid())
    writer = EventWriter(context.files.stream_path("driver"))
    poster = None
    if context.service_url:
        url = f"{context.service_url}/v1/attempts/{context.attempt_id}/events"
        # The service is near; a proxy of the cluster's environment is for the world outside.
        http = httpx.Client(timeout=POST_TIMEOUT_S, trust_env=False)
        poster = OutboxPoster(context.files, http, url)
        poster.start()
    try:
        ended = end_attempt(context, writer)
    except Evicted as eviction:
        logger.warning("the driver is evicted: %s", eviction)
        return EXIT_EVICTED
    logger.info("attempt ended: %s: %s", ended.reason, ended.message)
    writer.write(ended)
    if poster:
        poster.close(POST_TIMEOUT_S)
    return EXIT_CODES.get(ended.reason, 1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's background threads must not hold up the end of a stopped driver.
    os._exit(code)

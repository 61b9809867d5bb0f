"""The driver of an attempt: one Ray job that runs workers until the training ends.

    python -m trainer.driver      with the SHARDLOOM_* variables that `DriverContext` reads

It checks versions and data, chooses the layout, and keeps the workers alive: all of them as one
(`trainer.elastic.job_runs`) or each sharding group by itself (`trainer.elastic.supervisor`), as the
layout's failure domain says. It posts the outbox to the service. Its last record says why the
attempt ended; its exit code is 0 only when training completed.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trainer import events, failures
from trainer.attempt import Attempt, DriverContext, Outcome, run_lives
from trainer.autoscale import hosts_to_come
from trainer.cluster import (
    Host,
    demand_per_worker,
    kill_on,
    note_shortage,
    read_hosts,
    wants_gpu,
)
from trainer.data.errors import DataError, StorageError, StorageRefusedError
from trainer.elastic.run_lock import hold_run
from trainer.export.on_success import export_on_success
from trainer.failures import Failure
from trainer.outbox import EventWriter, OutboxPoster
from trainer.prepare import NoLayout, await_host, choose_layout, layout_chosen, prepare_spec
from trainer.process_log import start_log
from trainer.ray_autoscaler import RayAutoscaler
from trainer.room import Room
from trainer.run_dir import RunDir
from trainer.secret_env import SecretsUnavailable, fetch_secrets, secret_names
from trainer.sinks.start import NO_SINKS, Sinks, open_sinks
from trainer.spec import JobSpec, SpecError
from trainer.train_run import Evicted, launch
from trainer.versions import check_versions, installed_versions

logger = logging.getLogger("trainer.driver")  # __name__ is __main__ here

POST_TIMEOUT_S = 10.0
# The service knows the end by then; an attempt that follows would take what is left.
SINK_TIMEOUT_S = 10.0
EXIT_CODES = {failures.COMPLETED: 0, failures.CANCELLED: 130, failures.PAUSED: 75}
EXIT_EVICTED = 143

# Ray Train's helpers, for every TorchTrainer: look at the workers once a second.
TRAIN_SETTINGS = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1"}
# Where every group has a TorchTrainer of its own: no helpers that nobody asks, quick despair of a
# host that has gone, and the drain notices of Ray are the supervisor's business.
GROUP_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


def run_attempt(context: DriverContext, writer: EventWriter) -> Failure | None:
    """Train to the end, restarting workers within the budget where it helps; None if completed."""
    try:
        attempt = open_attempt(context, writer)
        failure = run_lives(attempt, lives_of(attempt))
        if attempt.room:
            attempt.room.close()
        if failure is None:
            export_on_success(attempt.spec, RunDir(context.run_dir), writer.write)
        return failure
    except SpecError as error:
        return Failure(failures.BAD_SPEC, str(error))
    except StorageRefusedError as error:
        return Failure(failures.DATA_ERROR, str(error))
    except StorageError as error:
        return Failure(failures.STORAGE_ERROR, str(error))
    except DataError as error:
        return Failure(failures.DATA_ERROR, str(error))
    except NoLayout as error:
        return error.failure


def open_attempt(context: DriverContext, writer: EventWriter) -> Attempt:
    """Check and resolve the spec, and say that the attempt has started.

    Raises SpecError, DataError or NoLayout.
    """
    spec = prepare_spec(context, partial(_warn, writer))
    use_gpu, room = wants_gpu(spec), None
    if context.cluster_max_workers is not None:
        use_gpu, room = open_room(context, spec, writer)
    choice = choose_layout(spec, hosts_to_use(context, spec, use_gpu), partial(_warn, writer))
    if choice:
        spec = spec.with_layout(choice.layout)
    # An export years later must not depend on what the data says by then.
    context.files.resolved_spec_path.write_text(spec.model_dump_json(), encoding="utf-8")
    writer.write(
        events.AttemptStarted(
            time=time.time(),
            world_size=choice.layout.world_size if choice else spec.parallelism.world_size,
            versions=installed_versions(),
        )
    )
    if choice:
        writer.write(layout_chosen(choice))
    return Attempt(context, spec, writer, use_gpu, room)


def _warn(writer: EventWriter, message: str) -> None:
    writer.write(events.Note(time=time.time(), level="warning", message=message))


def open_room(context: DriverContext, spec: JobSpec, writer: EventWriter) -> tuple[bool, Room]:
    """Whether to train on GPUs, and what asks the autoscaler of the cluster for room.

    Waits for a first host where it depends on what hosts are like. Raises `NoLayout`.
    """

    def room_with(use_gpu: bool) -> Room:
        demand = demand_per_worker(spec, use_gpu)
        return Room(RayAutoscaler(demand), partial(read_hosts, demand), demand, writer.write)

    use_gpu = wants_gpu(spec, may_grow=True)
    room = room_with(use_gpu)
    await_host(spec, context, room)
    if use_gpu == wants_gpu(spec, may_grow=True):
        return use_gpu, room
    room.close()
    return not use_gpu, room_with(not use_gpu)


def hosts_to_use(
    context: DriverContext, spec: JobSpec, use_gpu: bool
) -> Callable[[], Sequence[Host]]:
    """What gives the hosts to choose a layout for: those that there are, or will be."""
    most = context.cluster_max_workers
    if most is None:
        return partial(hosts_for, spec, use_gpu)
    return lambda: hosts_to_come(hosts_for(spec, use_gpu), most)


def hosts_for(spec: JobSpec, use_gpu: bool) -> list[Host]:
    """The hosts of the cluster, by room for workers of `spec`."""
    return read_hosts(demand_per_worker(spec, use_gpu))


def lives_of(attempt: Attempt) -> Callable[[int], Outcome]:
    """What runs one life of the workers, as the failure domain has it."""
    # Imported late: what they need takes seconds, and a faulty spec is reported without.
    if attempt.spec.parallelism.failure_domain == "replica_group":
        from trainer.elastic.ray_coordinator import RayCoordinator
        from trainer.elastic.supervisor import Setting, Supervisor

        _set_unless_given(GROUP_SETTINGS)
        setting = Setting(attempt, RayCluster(attempt), launch)
        return Supervisor(setting, partial(RayCoordinator, attempt)).live

    import ray.util

    from trainer.elastic.job_runs import JobRuns
    from trainer.elastic.job_watch import JobWatch

    _set_unless_given(TRAIN_SETTINGS)
    if attempt.room is None:
        note_shortage(attempt.spec, attempt.writer)
    watch = JobWatch(attempt, ray.util.get_node_ip_address())
    return JobRuns(attempt, RayCluster(attempt).read_hosts, launch, watch=watch).live


def _set_unless_given(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


class RayCluster:
    """The cluster that Ray connects this process to, as one attempt sees it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def read_hosts(self) -> list[Host]:
        """Live hosts by address, by what is free for this job."""
        if self._attempt.room:
            return self._attempt.room.read_hosts()
        return hosts_for(self._attempt.spec, self._attempt.use_gpu)

    kill_on = staticmethod(kill_on)


class Stopped(Exception):
    """The attempt was asked to stop: SIGINT, by Ctrl-C or by a cancel through Ray Jobs."""


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


def end_attempt(
    context: DriverContext, writer: EventWriter, sinks: Sinks = NO_SINKS
) -> events.AttemptEnded:
    """Run the attempt and say how it ended; raises `Evicted` when that is not for us to say."""
    mismatches = check_versions()
    if mismatches:
        message = "; ".join(mismatch.message for mismatch in mismatches)
        return _ended(context, Failure(failures.VERSION_MISMATCH, message))
    try:
        context = with_secrets(context)
        # Not before: some of the secrets may be for them.
        sinks.start()
        with hold_run(context.run_dir, context.attempt_id, on_lost=_evict_this_process):
            return _ended(context, run_until_stopped(context, writer))
    except SecretsUnavailable as error:
        return _ended(context, error.failure)
    except failures.WorkerFailure as error:  # the folder is another attempt's
        return _ended(context, Failure(error.reason, error.message))
    except Stopped:
        return _ended(context, Failure(failures.CANCELLED, "stopped on request"))
    except Evicted:
        raise
    except Exception as error:  # whatever it is, the control plane must learn of it
        logger.exception("the driver failed")
        evidence = failures.evidence_of(error)
        message = f"{type(error).__name__}: {error}"
        return _ended(context, Failure(failures.TRAINING_ERROR, message, evidence=evidence))


def with_secrets(context: DriverContext) -> DriverContext:
    """The context with the secrets of its job, which this process has in its environment then.

    Raises `SecretsUnavailable`.
    """
    if not context.service_url or not secret_names(RunDir(context.run_dir).secret_names_path):
        return context
    url = f"{context.service_url}/v1/attempts/{context.attempt_id}/secrets"
    with context.connect(POST_TIMEOUT_S) as http:
        secrets = fetch_secrets(http, url)
    secrets.set_in(os.environ)
    return replace(context, secrets=secrets)


def _evict_this_process() -> None:
    """After another attempt has taken the run folder, this one only does harm."""
    os.kill(os.getpid(), signal.SIGTERM)


def _ended(context: DriverContext, failure: Failure | None) -> events.AttemptEnded:
    try:
        return _completed(context) if failure is None else _failed(failure)
    except StorageError as error:
        # Of what is trained nothing is lost: the next attempt finds it complete.
        return _failed(Failure(failures.STORAGE_ERROR, str(error)))


def _failed(failure: Failure) -> events.AttemptEnded:
    return events.AttemptEnded(
        time=time.time(),
        reason=failure.reason,
        message=failure.message,
        evidence=dict(failure.evidence),
    )


def _completed(context: DriverContext) -> events.AttemptEnded:
    """How training ended, by its last checkpoint; raises `StorageError` where that is away."""
    from trainer.elastic.checkpoint import list_committed
    from trainer.elastic.checkpoint_folder import checkpoints_of
    from trainer.elastic.rewind import read_rewind

    rewind = read_rewind(RunDir(context.run_dir).rewind_path)
    is_left_out = rewind.supersedes if rewind else lambda name: False
    spec = context.read_resolved_spec()
    newest = list_committed(checkpoints_of(context.run_dir, spec.checkpoint.path), is_left_out)[-1]
    return events.AttemptEnded(
        time=time.time(),
        reason=failures.COMPLETED,
        message=f"training completed after {newest.commit.step} steps",
        final_metrics=newest.commit.metrics,
    )


def main() -> int:
    """Run the attempt that the environment names; the exit code of the Ray job."""
    context = DriverContext.from_env(os.environ)
    start_log(context.files.log_path("driver"))
    logger.info("driver of %s is process %d", context.attempt_id, os.getpid())
    writer = EventWriter(context.files.stream_path("driver"))
    poster = None
    if context.service_url:
        url = f"{context.service_url}/v1/attempts/{context.attempt_id}/events"
        poster = OutboxPoster(context.files, context.connect(POST_TIMEOUT_S), url)
        poster.start()
    sinks = open_sinks(context, writer)
    try:
        ended = end_attempt(context, writer, sinks)
    except Evicted as eviction:
        logger.warning("the driver is evicted: %s", eviction)
        return EXIT_EVICTED
    logger.info("attempt ended: %s: %s", ended.reason, ended.message)
    writer.write(ended)
    if poster:
        poster.close(POST_TIMEOUT_S)
    sinks.close(SINK_TIMEOUT_S)
    return EXIT_CODES.get(ended.reason, 1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ray's background threads must not hold up the end of a stopped driver.
    os._exit(code)

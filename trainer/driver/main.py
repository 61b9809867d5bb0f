"""The driver of an attempt: one Ray job that runs workers until training ends.

    python -m trainer.driver      with the SHARDLOOM_* variables that `DriverContext` reads

It checks versions and data, chooses the layout, and keeps the workers alive: all of them as one
(`trainer.driver.job_runner`) or each sharding group by itself (`trainer.driver.group_runner`), as
the layout's failure domain says. It posts the outbox to the service. Its last record says why the
attempt ended; its exit code is 0 only when training completed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import httpx
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from trainer import failures
from trainer.coordination.detection import ReplacementPolicy
from trainer.data.inputs import resolve_inputs
from trainer.data.reader import find_data
from trainer.driver.attempt import (
    PAUSED_EARLY,
    POST_TIMEOUT_S,
    Attempt,
    AttemptFailed,
    DriverContext,
    Outcome,
    claim,
    run_with_restarts,
    warn,
)
from trainer.driver.autoscale import (
    CapacityDemand,
    CapacityManager,
    CapacityRequest,
    RayAutoscaler,
)
from trainer.driver.cluster import Host, num_gpus, read_facts, read_hosts, shortage
from trainer.driver.node_check import Check, NodeChecker, check_hosts
from trainer.driver.preload import is_preloading, share_environment, start_warm_workers
from trainer.driver.process_log import start_log
from trainer.driver.ray_train import Evicted, in_thread, launch
from trainer.driver.run_lock import hold_run
from trainer.errors import DataError, StorageError, StorageRefusedError
from trainer.export.requests import export_on_success
from trainer.failures import EndReason, Failure
from trainer.layout.choice import Choice
from trainer.layout.cost import ClusterError
from trainer.layout.hosts import Site, choose_on, demand_per_worker, site_of, wants_gpu
from trainer.layout.layout import LayoutError
from trainer.layout.plans import PlanSite, why_not_held
from trainer.protocol import events
from trainer.protocol.mirror import MirrorThread
from trainer.protocol.outbox import EventWriter, OutboxPoster
from trainer.protocol.run_dir import RunDir, write_whole
from trainer.protocol.untrusted import NotRegular, read_untrusted
from trainer.protocol.versions import check_versions, installed_versions
from trainer.protocol.worker_config import SecretEnv
from trainer.sinks import open_sinks
from trainer.sinks.base import Feed
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec
from trainer.storage import Location

logger = logging.getLogger("trainer.driver")  # __name__ is __main__ here
# The service knows the end by then; the next attempt sends what is left.
SINK_TIMEOUT_S = 10.0
EXIT_CODES: dict[str, int] = {"completed": 0, "cancelled": 130, "paused": 75}
EXIT_EVICTED = 143
WARM_WORKERS_TIMEOUT_S = 10.0
_POLL_S = 1.0
_SCALES = TypeAdapter(dict[str, tuple[FiniteFloat, FiniteFloat]])
# Ray Train, in the domain `job`: check the workers once a second. `JobRunner` and `GroupRunLoop`
# read Ray's drain notices themselves.
TRAIN_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
# With a TorchTrainer for each group: no optional helpers, short timeouts for hosts that are gone.
GROUP_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}


def is_layout_given(spec: JobSpec) -> bool:
    """Whether the layout does not depend on the hosts."""
    return spec.parallelism.is_resolved and spec.parallelism.survive is None


def look_at_cluster(spec: JobSpec, use_gpu: bool, max_workers: int | None) -> Site:
    """The cluster as the job finds it, as large as it may grow."""
    return site_of(spec, read_facts(), max_workers, use_gpu=use_gpu)


def choose_layout(
    spec: JobSpec,
    look: Callable[[], Site],
    report: Callable[[str], None],
    is_pause_wanted: Callable[[], bool],
    wait: Callable[[float], None] = time.sleep,
) -> Choice | None:
    """The best layout on the hosts; None where the layout is given and hosts are missing.

    Where more hosts would help it waits for them, up to `recovery.start_grace_s`; `report` is told
    once. Raises `AttemptFailed`, also when the job is paused first.
    """
    grace_s = spec.recovery.start_grace_s
    waited_s = 0.0
    while True:
        site = look()
        try:
            return choose_on(spec, site)
        except LayoutError as error:
            if is_layout_given(spec):
                return None
            is_hopeless = why_not_held(spec, site.worker_bytes) is not None
            if is_hopeless or waited_s >= grace_s:
                reason = EndReason.BAD_SPEC if is_hopeless else EndReason.NO_ROOM
                raise AttemptFailed(Failure(reason, str(error))) from None
            if not waited_s:
                report(f"{error}; waiting up to {grace_s:.0f} s for more")
        if is_pause_wanted():
            raise AttemptFailed(PAUSED_EARLY)
        wait(_POLL_S)
        waited_s += _POLL_S


def await_host(spec: JobSpec, context: DriverContext, capacity: CapacityManager) -> None:
    """Wait for a first host for a worker, where layout or device depend on the hosts.

    Requests one from the autoscaler; later ones are assumed to be like it. Raises `AttemptFailed`
    when the job is paused first.
    """
    if is_layout_given(spec) and spec.resources.device != "auto":
        return
    while not any(host.num_slots for host in capacity.read_hosts()):
        demand = CapacityDemand(0, 1, 1, (CapacityRequest(1),))
        capacity.seek(demand, capacity.read_free_hosts())
        if context.is_pause_wanted:
            raise AttemptFailed(PAUSED_EARLY)
        time.sleep(_POLL_S)


def layout_chosen(choice: Choice) -> events.LayoutChosen:
    layout = choice.layout
    return events.LayoutChosen(
        time=time.time(),
        **vars(layout),
        num_replicas=layout.num_replicas,
        failure_domain=choice.failure_domain,
        num_hosts=choice.num_hosts,
        num_hosts_survived=choice.num_hosts_survived,
        memory_overhead_bytes=choice.memory_overhead_bytes or 0,
        sync_latency_s=choice.sync_latency_s,
        reason=choice.reason,
    )


def run_attempt(context: DriverContext, writer: EventWriter) -> Failure | None:
    """Train to the end with restarts within the retry budget; None if completed.

    Raises `SpecError`, `DataError` or `AttemptFailed`.
    """
    attempt = open_attempt(context, writer)
    failure = run_with_restarts(attempt, runner_for(attempt))
    if attempt.capacity:
        attempt.capacity.close()
    if failure is None:
        export_on_success(attempt.spec, RunDir(context.run_dir), writer.write)
    return failure


def keep_scales(spec: JobSpec, run: RunDir) -> JobSpec:
    """The spec with mean and deviation of each number as the first attempt found them.

    The model was trained by these; of rows that came since, others would be measured.
    """
    try:
        known = _SCALES.validate_json(read_untrusted(run.scales_path, run.root))
    except (FileNotFoundError, NotRegular, ValidationError):
        return spec
    features = [
        each.model_copy(update=dict(zip(("mean", "std"), known[each.name], strict=True)))
        if each.name in known and None in (each.mean, each.std)
        else each
        for each in spec.features
    ]
    return spec.model_copy(update={"features": tuple(features)})


def resolved(spec: JobSpec, run: RunDir, report: Callable[[str], None]) -> JobSpec:
    """The spec with all that the data tells, by scales that later attempts keep, too."""
    spec = resolve_inputs(keep_scales(spec, run), report)
    scaled = [each for each in spec.features if each.transform == "standardise"]
    if scaled:
        scales = {each.name: (each.mean, each.std) for each in scaled}
        write_whole(run.scales_path, json.dumps(scales).encode())
    return spec


def open_attempt(context: DriverContext, writer: EventWriter) -> Attempt:
    """Resolve the spec, and report that the attempt has started.

    Raises SpecError, DataError or AttemptFailed.
    """
    import ray

    report = partial(warn, writer)
    spec = resolved(context.read_spec(), RunDir(context.run_dir), report)
    data = ray.put(find_data(spec))
    use_gpu, capacity, max_workers = wants_gpu(spec, num_gpus()), None, context.cluster_max_workers
    if max_workers is not None:
        use_gpu, capacity = open_capacity(context, spec, writer)
    look = partial(look_at_cluster, spec, use_gpu, max_workers)
    choice = choose_layout(spec, look, report, lambda: context.is_pause_wanted)
    if choice:
        spec = spec.with_layout(choice.layout.shard_group_size, choice.layout.placement)
    # An export years later must not depend on what the data says by then.
    write_whole(context.files.resolved_spec_path, spec.model_dump_json().encode())
    writer.write(
        events.AttemptStarted(
            time=time.time(),
            world_size=choice.layout.world_size if choice else spec.parallelism.world_size,
            versions=installed_versions(),
        )
    )
    if choice:
        writer.write(layout_chosen(choice))
    cluster = None
    # Where too little is known nothing is predicted, and groups plan with TorchRec's figures.
    with suppress(ClusterError):
        cluster = PlanSite.of_site(look()).cluster
    return Attempt(context, spec, writer, use_gpu, capacity, cluster=cluster, data=data)


def open_capacity(
    context: DriverContext, spec: JobSpec, writer: EventWriter
) -> tuple[bool, CapacityManager]:
    """Whether to train on GPUs, and the capacity requests of an autoscaling cluster.

    Waits for a first host where that depends on the kind of hosts. Raises `AttemptFailed`.
    """

    def manager(use_gpu: bool) -> CapacityManager:
        demand = demand_per_worker(spec, use_gpu)
        return CapacityManager(
            RayAutoscaler(demand), partial(read_hosts, demand), demand, writer.write
        )

    use_gpu = wants_gpu(spec, num_gpus(), may_grow=True)
    capacity = manager(use_gpu)
    await_host(spec, context, capacity)
    if use_gpu == wants_gpu(spec, num_gpus(), may_grow=True):
        return use_gpu, capacity
    capacity.close()
    return not use_gpu, manager(not use_gpu)


def runner_for(attempt: Attempt) -> Callable[[int], Outcome]:
    """Runs the workers of one run index, as the failure domain requires."""
    demand = demand_per_worker(attempt.spec, attempt.use_gpu)
    find_hosts = attempt.capacity.read_hosts if attempt.capacity else partial(read_hosts, demand)
    record = attempt.host_record()
    if (least := attempt.spec.recovery.min_node_speed) is not None:
        find_hosts = NodeChecker(
            find_hosts, partial(_start_check, attempt), record, least, attempt.writer.write
        )
    # Imported late, as that takes seconds and a faulty spec is reported without.
    if attempt.spec.parallelism.failure_domain == "replica_group":
        from trainer.driver.coordinator_actor import RayCoordinator
        from trainer.driver.group_runner import GroupRunLoop

        _set_unless_given(GROUP_SETTINGS)
        policy = ReplacementPolicy(attempt.spec.recovery.replace_stragglers)
        size: int | None = None

        def run_once(index: int) -> Outcome:
            nonlocal size
            coordinator = RayCoordinator(attempt, index)
            loop = GroupRunLoop(
                attempt, find_hosts, launch, coordinator, record, policy, index, size=size
            )
            failure = loop.run()
            size = loop.size
            return failure

        return run_once

    import ray.util

    from trainer.driver.job_runner import HangMonitor, JobRunner
    from trainer.elastic.coordinator.server import prepare_process

    prepare_process()  # each worker connects to the monitor
    _set_unless_given(TRAIN_SETTINGS)
    # The fewest workers would wait in silence.
    lack = shortage(demand, attempt.spec.parallelism.min_workers, ray.cluster_resources())
    if lack and attempt.capacity is None:
        warn(attempt.writer, lack)
    monitor = HangMonitor(attempt, ray.util.get_node_ip_address())
    return JobRunner(attempt, find_hosts, launch, monitor, record).run_once


def _start_check(
    attempt: Attempt, new: Sequence[Host], hosts: Sequence[Host]
) -> Future[dict[str, Check]]:
    folder = Location.parse(attempt.spec.checkpoint.path or attempt.context.run_dir)
    work = partial(check_hosts, new, hosts, folder, use_gpu=attempt.use_gpu)
    return in_thread(work, "node check")


def _set_unless_given(settings: dict[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def run_until_stopped(context: DriverContext, writer: EventWriter) -> Failure | None:
    """`run_attempt` in a thread, so that a signal ends it at once.

    Raises KeyboardInterrupt (Ctrl-C, or a cancel through Ray Jobs) or `Evicted` (SIGTERM). Ray
    Train would otherwise take SIGINT for itself and wait for the workers to abort.
    """
    import ray

    def _evict(signum: int, frame: object) -> None:
        raise Evicted("SIGTERM")

    share_environment(os.environ)
    ray.init(log_to_driver=False, logging_level=logging.WARNING)
    # After ray.init, which takes SIGTERM for itself.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _evict)
    return in_thread(partial(run_attempt, context, writer), "attempt").result()


def end_attempt(
    context: DriverContext, writer: EventWriter, feeds: Sequence[Feed] = ()
) -> events.AttemptEnded:
    """Run the attempt in a folder that no other one uses; how it ended. Raises `Evicted`."""
    try:
        check_lease(context)
        context = with_secrets(context)
        # Only now: some of the secrets may be for them.
        for feed in feeds:
            feed.start()
        if mismatches := check_versions():
            raise AttemptFailed(Failure(EndReason.VERSION_MISMATCH, "; ".join(mismatches)))
        # Should another attempt take the run folder, this one ends.
        evict = partial(os.kill, os.getpid(), signal.SIGTERM)
        with hold_run(context.run_dir, context.attempt_id, on_lost=evict):
            failure = run_until_stopped(context, writer)
            if failure is None:
                return _completed(context)
    except SpecError as error:
        failure = Failure(EndReason.BAD_SPEC, str(error))
    except DataError as error:
        # Nothing that was trained is lost with storage: the next attempt finds it.
        comes_back = isinstance(error, StorageError) and not isinstance(error, StorageRefusedError)
        reason = EndReason.STORAGE_ERROR if comes_back else EndReason.DATA_ERROR
        failure = Failure(reason, str(error))
    except AttemptFailed as error:
        failure = error.failure
    except KeyboardInterrupt:
        failure = Failure(EndReason.CANCELLED, "stopped on request")
    except Evicted:
        raise
    except Exception as error:  # reported to the control plane, whatever it is
        logger.exception("the driver failed")
        failure = failure_behind(error, context)
    return events.AttemptEnded(
        time=time.time(),
        reason=failure.reason,
        message=failure.message,
        evidence=failure.facts,
    )


def failure_behind(error: Exception, context: DriverContext) -> Failure:
    """The failure behind an unexpected error; storage or Ray that does not answer may come back."""
    from ray.exceptions import RayError

    reason, message = EndReason.TRAINING_ERROR, f"{type(error).__name__}: {error}"
    # Without a number it is none of the operating system's, as a time-out of Ray.
    if isinstance(error, RayError) or (isinstance(error, OSError) and error.errno is None):
        reason = EndReason.DRIVER_LOST
        message += "; does the head node of Ray answer, or is it short of CPUs or memory?"
    elif isinstance(error, OSError):
        reason = EndReason.STORAGE_ERROR
        message += f"; is the storage of {context.run_dir} full, or away from the driver's host?"
    return Failure(reason, message, evidence=failures.evidence_of(error))


def check_lease(context: DriverContext) -> None:
    """Raise `AttemptFailed` where the service has gone on without this attempt.

    A busy head of Ray may start a driver long after it was asked to, when the job was cancelled or
    tried again. Without an answer, or with one of an earlier service, the attempt goes on.
    """
    if not context.service_url:
        return
    url = f"{context.service_url}/v1/attempts/{context.attempt_id}/lease"
    with context.connect(POST_TIMEOUT_S) as http, suppress(httpx.HTTPError, ValueError):
        answer = http.get(url)
        if answer.is_success and answer.json() == {"is_current": False}:
            message = "it started too late: the service has ended this attempt already"
            raise AttemptFailed(Failure(EndReason.CANCELLED, message))


def with_secrets(context: DriverContext) -> DriverContext:
    """Fetch the job's secrets into the context and the environment; raises `AttemptFailed`."""
    if not context.service_url or not RunDir(context.run_dir).secret_names_path.exists():
        return context
    url = f"{context.service_url}/v1/attempts/{context.attempt_id}/secrets"
    with context.connect(POST_TIMEOUT_S) as http:
        secrets = SecretEnv(claim(http, url, {"claim": context.claim}, "secrets"))
    os.environ.update(secrets.values)
    return replace(context, secrets=secrets)


def _completed(context: DriverContext) -> events.AttemptEnded:
    """The end of a completed training, by its last checkpoint; raises `StorageError`."""
    from trainer.checkpoint.files import checkpoints_of, list_committed, superseded_in

    folder = checkpoints_of(context.run_dir, context.read_resolved_spec().checkpoint.path)
    committed = list_committed(folder, superseded_in(context.run_dir))
    if not committed:
        raise StorageError(
            f"{folder} shows the driver's host no checkpoint: mount it there at that path"
        )
    newest = committed[-1]
    return events.AttemptEnded(
        time=time.time(),
        reason=EndReason.COMPLETED,
        message=f"training completed after {newest.commit.step} steps",
        final_metrics=newest.commit.metrics,
    )


def prepare_next_job(context: DriverContext) -> None:
    """Start workers for whichever comes next, as many as this one takes and there is room for."""

    def start_workers() -> None:
        # Where no rank told anything, those that waited for this job may wait for the next one.
        paths = context.files.stream_paths()
        if not any(path.stem.startswith(("workers", "group")) for path in paths):
            return
        spec = context.read_resolved_spec()
        if not wants_gpu(spec, num_gpus()):  # whose workers have an environment of their own
            hosts = read_hosts(demand_per_worker(spec, use_gpu=False))
            room = sum(host.num_slots for host in hosts)
            start_warm_workers(min(spec.parallelism.world_size, room))

    try:
        in_thread(start_workers, "warm workers").result(WARM_WORKERS_TIMEOUT_S)
    except Exception as error:  # the next job then starts its own
        logger.warning("no workers were started for the next job: %s", error)


def start_mirror(context: DriverContext) -> MirrorThread | None:
    """Have the files of the run here, where hosts share no run storage; raises OSError."""
    if context.mirror is None or context.mirror.is_of_service:
        return None
    mirror = MirrorThread(context.mirror)
    mirror.start()
    return mirror


def main() -> int:
    """Run the attempt that the environment names; the exit code of the Ray job."""
    try:
        context = DriverContext.from_env(os.environ)
        mirror = start_mirror(context)
    except (AttemptFailed, OSError) as error:
        # For Ray's log of this driver, the only one that there is yet.
        print(f"the driver cannot start: {error}", file=sys.stderr)
        return 1
    start_log(context.files.log_path("driver"))
    logger.info("driver of %s is process %d", context.attempt_id, os.getpid())
    writer = EventWriter(context.files.stream_path("driver"))
    poster = None
    if context.service_url:
        url = f"{context.service_url}/v1/attempts/{context.attempt_id}/events"
        poster = OutboxPoster(context.files, context.connect(POST_TIMEOUT_S), url)
        poster.start()
    feeds = open_sinks(RunDir(context.run_dir), context.attempt_id, context.job_id, writer)
    try:
        ended = end_attempt(context, writer, feeds)
        logger.info("attempt ended: %s: %s", ended.reason, ended.message)
        if mirror:
            # First what a job that has ended is expected to have, as its export.
            mirror.flush()
        writer.write(ended)
        if poster:
            poster.close(POST_TIMEOUT_S)
        for feed in feeds:
            feed.close(SINK_TIMEOUT_S)
        if is_preloading():
            prepare_next_job(context)
        if mirror:
            mirror.close()
    except Evicted as eviction:
        logger.warning("the driver is evicted: %s", eviction)
        if mirror:
            mirror.close(patience_s=0.0)
        return EXIT_EVICTED
    return EXIT_CODES.get(ended.reason, 1)

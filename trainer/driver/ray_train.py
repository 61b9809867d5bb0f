"""Ray Train: start the workers of one run, enter the engine in each, and classify how they ended.

Ray reports no exit code and no signal of an actor's process; it knows whether the node is gone,
whether its memory monitor ended the worker, and whether the node was preempted. The engine (torch,
TorchRec) is imported within the workers only, so that the driver starts them seconds earlier.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from trainer import failures, fault_injection
from trainer.coordination.client import end_unless_joined, starting_s
from trainer.driver.cluster import NODE_ID_LABEL, cluster_answers, free_placements_of_the_dead
from trainer.driver.preload import WORKER_ENVIRONMENT, import_engine
from trainer.driver.process_log import start_log
from trainer.failures import EndReason, Failure
from trainer.layout.hosts import demand_per_worker
from trainer.protocol.code_archive import CodeError, add_to_path
from trainer.protocol.mirror import MirrorConfig, serve_host
from trainer.protocol.run_dir import RunDir
from trainer.protocol.versions import unlike_driver, versions_here
from trainer.protocol.worker_config import WorkerConfig

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
CLUSTER_LOSS_GRACE_S = 3.0
# Ray's messages of dead nodes and of processes that ended unexpectedly.
_NODE_DIED_SIGNS = ("its node has died", "the node is dead", "node died")
_NODE_IP = re.compile(r"(?:node_ip='|\bip: )(?P<host>[^'\s]+)")
_PID = re.compile(r"\bpid[=:] ?(?P<pid>\d+)")
# What Ray says of an actor that died without saying why, and where it begins to guess.
_UNEXPLAINED = re.compile(
    r"^The actor died unexpectedly before finishing this task\.$|"
    r"^\t(?:class_name|actor_id|pid|name|namespace|ip): .*$|"
    r"^The actor is dead because its worker process has died\.(?: Worker exit type: SYSTEM_ERROR "
    r"Worker exit detail: Worker unexpectedly exits with a connection error code \d+\. [\w ]+\.)?",
    re.MULTILINE,
)
_GUESSES = "Some common causes include"
_EXIT = re.compile(r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>[^.\n]*)")


def classify(error: Exception) -> Failure:
    """The cause behind an error that `TorchTrainer.fit` raised."""
    from ray.train.v2.api.exceptions import ControllerError

    if isinstance(error, ControllerError):
        return _classify_start(error.controller_failure)
    by_rank: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not by_rank:
        return Failure(EndReason.WORKERS_LOST, first_line(error))
    return failures.explain([_classify_rank(rank, by_rank[rank]) for rank in sorted(by_rank)])


def _classify_start(error: Exception) -> Failure:
    from ray.train.v2._internal.exceptions import (
        InsufficientClusterResourcesError,
        WorkerGroupStartupTimeoutError,
    )

    if isinstance(error, WorkerGroupStartupTimeoutError):
        late = "another job has their places, or the hosts are slow to start them"
        message = f"not all of {error.num_workers} workers came in time: {late}"
        return Failure(EndReason.NO_ROOM, message)
    if isinstance(error, InsufficientClusterResourcesError):
        return Failure(EndReason.NO_ROOM, f"no room for the workers: {first_line(error)}")
    message = f"the workers did not start: {first_line(error)}"
    return _death(error, message, _evidence_of_death(error))


def _classify_rank(rank: int, error: Exception) -> Failure:
    from ray.exceptions import RayError
    from ray.train.v2._internal.exceptions import RayTrainError

    place = {"rank": str(rank)}
    if isinstance(error, failures.WorkerFailure):
        message, evidence = f"rank {rank}: {error.message}", place | error.evidence
        return Failure(error.reason, message, evidence=evidence, blamed_host=error.blamed_host)
    if isinstance(error, RayError | RayTrainError):
        cause = getattr(error, "health_check_failure", error)  # around which Ray tells of its actor
        evidence = place | _evidence_of_death(error)
        is_known = {"pid", "host"} <= evidence.keys()
        process = f" (pid {evidence['pid']} on {evidence['host']})" if is_known else ""
        return _death(error, f"rank {rank}{process} was lost: {first_line(cause)}", evidence)
    evidence = place | failures.evidence_of(error)
    message = f"rank {rank}: {type(error).__name__}: {error}"
    return Failure(failures.reason_of(error), message, evidence=evidence)


def _death(error: Exception, message: str, evidence: Mapping[str, str]) -> Failure:
    """The failure of workers that died; a host that was taken away is not to blame."""
    reason = _reason_of_death(getattr(error, "health_check_failure", error))
    blamed = "" if reason is EndReason.PREEMPTED else evidence.get("host", "")
    return Failure(reason, message, is_death=True, evidence=evidence, blamed_host=blamed)


def _reason_of_death(error: BaseException) -> EndReason:
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

    # Without Ray's list of common causes, which names all of them for any death.
    text = str(error).partition(_GUESSES)[0].lower()
    if isinstance(error, RayActorError) and error.preempted:
        return EndReason.PREEMPTED
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return EndReason.HOST_OOM
    if isinstance(error, NodeDiedError) or any(sign in text for sign in _NODE_DIED_SIGNS):
        return EndReason.HOST_LOST
    return EndReason.WORKERS_LOST


def _evidence_of_death(error: BaseException) -> dict[str, str]:
    text = str(error)
    evidence = {"error": type(getattr(error, "health_check_failure", error)).__name__}
    if found := _NODE_IP.search(text):
        evidence["host"] = found["host"]
    if found := _PID.search(text):
        evidence["pid"] = found["pid"]
    if found := _EXIT.search(text):
        evidence["exit"] = f"{found['type']}: {found['detail'].strip()}"
    return evidence


def first_line(error: BaseException) -> str:
    """The first words of an error's text, on one line; of a death what Ray knows of its cause."""
    text = failures.without_statistics(str(error)).strip()
    told = _UNEXPLAINED.sub("", text.partition(_GUESSES)[0])
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    unexplained = "its process ended without a word" if text else type(error).__name__
    return " ".join(lines[:3]) or unexplained


def ray_train_loop(config: dict[str, WorkerConfig]) -> None:
    """Entry point of a Ray Train worker; raises `WorkerFailure`."""
    import ray.train
    import ray.util

    from trainer.driver.torch_backend import let_gloo_use_address

    # A TCPStore client resolves its peer's name; without a name server that would stall for 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # Collectives of NCCL that are remembered, for the log of a worker that hangs in one.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    worker = config["worker"]
    os.environ.update(worker.secrets.values)
    rank = ray.train.get_context().get_world_rank()
    # An address, not Ray's node id: what counts for a placement is which ranks share a machine.
    host = ray.util.get_node_ip_address()
    if worker.mirror and not worker.mirror.is_of_service:
        follow_run(worker.mirror)
    end_unless_joined(starting_s(worker.spec.recovery))
    check_machine(worker, host)
    reference: Any = worker.data
    worker = replace(worker, data=ray.get(reference) if reference else None)
    add_code(worker)
    let_gloo_use_address(host)
    start_log(RunDir(worker.run_dir).attempt(worker.attempt_id).log_path(worker.log_source(rank)))
    logger.info(
        "%s of worker group run %d is process %d on %s",
        worker.log_source(rank),
        worker.run_index,
        os.getpid(),
        socket.gethostname(),
    )
    fault_injection.install(worker, rank)
    import_engine()
    if worker.group:
        from trainer.elastic.group_session import run_group_worker

        run_group_worker(worker, worker.group, host)
    else:
        from trainer.training.worker import run_worker

        run_worker(worker, host=host)


def follow_run(mirror: MirrorConfig) -> None:
    """Have the files of the run on a host that shares no run storage; raises `WorkerFailure`."""
    try:
        serve_host(mirror)
    except (OSError, subprocess.SubprocessError) as error:
        raise failures.WorkerFailure(EndReason.STORAGE_ERROR, str(error)) from error


def add_code(worker: WorkerConfig) -> None:
    """Put the user's code on the module path, if there is any; raises `WorkerFailure`."""
    if worker.spec.model.code is None:
        return
    try:
        add_to_path(RunDir(worker.run_dir).code_path(worker.spec.model.code))
    except (OSError, CodeError) as error:
        message = f"the job's code cannot be unpacked: {error}"
        raise failures.WorkerFailure(EndReason.STORAGE_ERROR, message) from error


def check_machine(worker: WorkerConfig, host: str) -> None:
    """Raise `WorkerFailure` where this machine is not set up as the driver's.

    Before anything is written: a folder that is not the shared one would take it in silence.
    """
    blame = partial(failures.WorkerFailure, blamed_host=host)
    if unlike := unlike_driver(worker.versions, versions_here()):
        message = f"{host} is set up differently: {'; '.join(unlike)}; install the same there"
        raise blame(EndReason.VERSION_MISMATCH, message)
    spec_path = RunDir(worker.run_dir).attempt(worker.attempt_id).resolved_spec_path
    if not spec_path.exists():
        message = (
            f"{host} does not see {spec_path}, which the driver has written: mount the service's "
            "run storage (SHARDLOOM_RUNS_DIR) there at the same path"
        )
        raise blame(EndReason.STORAGE_ERROR, message)


class Evicted(Exception):
    """Driver or cluster is being shut down: the attempt ends without a report.

    The control plane counts it as lost and starts another.
    """


@dataclass(frozen=True)
class TrainRun:
    """Workers to start: `num_workers` of them, one on each of `node_ids` where these are given.

    The run ends with `no_room` where there is none on these. Without them Ray waits for room as
    long as it takes, and asks an autoscaler for it.
    """

    config: WorkerConfig
    num_workers: int
    use_gpu: bool = False
    node_ids: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run in Ray, unique within the attempt."""
        config = self.config
        return f"{config.attempt_id}-{config.run_label.partition('-')[2]}"


def in_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Run `work` in a daemon thread, which a driver that is stopped leaves behind."""
    future: Future[Result] = Future()

    def _run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=_run, name=name, daemon=True).start()
    return future


def leave_with_cluster(error: BaseException) -> None:
    """Raise `Evicted` where all of the cluster is gone, not only what `error` tells of."""
    # Its parts go one by one, and this driver is among them.
    time.sleep(CLUSTER_LOSS_GRACE_S)
    if not cluster_answers():
        raise Evicted(f"the cluster is gone: {first_line(error)}") from error


def launch(run: TrainRun) -> Future[Failure | None]:
    return in_thread(partial(train, run), run.name)


def train(run: TrainRun) -> Failure | None:
    """Run the workers to their end; None when they ended well. Raises `Evicted`."""
    from ray.exceptions import RayError
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        _trainer(run).fit()
    except TrainingFailedError as error:
        logger.error("%s: %s", run.name, error)
        return classify(error)
    except RayError as error:  # the controller itself is gone, alone or with the cluster
        leave_with_cluster(error)
        free_placements_of_the_dead()
        return Failure(_reason_of_death(error), f"Ray Train was lost: {first_line(error)}")
    return None


def _trainer(run: TrainRun) -> Any:
    from ray.train import RunConfig
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )
    from ray.train.v2.api.config import FailureConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from trainer.driver.torch_backend import ProcessGroupConfig

    class Trainer(DataParallelTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Without two that keep an actor each: for Ray Data, which reads nothing here, and to
            free placement groups, as `train` does; it asks the head about its controller once a
            second."""
            left_out = (DatasetsCallback, PlacementGroupCleanerCallback)
            found = super()._create_default_callbacks()
            return [each for each in found if not isinstance(each, left_out)]

    spec = run.config.spec
    return Trainer(
        ray_train_loop,
        train_loop_config={"worker": run.config},
        backend_config=ProcessGroupConfig(
            backend="nccl" if run.use_gpu else "gloo",
            timeout_s=int(max(spec.resources.collective_timeout_s, 1)),
        ),
        scaling_config=ScalingConfig(
            num_workers=run.num_workers,
            use_gpu=run.use_gpu,
            resources_per_worker=demand_per_worker(spec, run.use_gpu),
            label_selector=[{NODE_ID_LABEL: each} for each in run.node_ids] or None,
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(run.config.run_dir / "ray"),
            worker_runtime_env={} if run.use_gpu else WORKER_ENVIRONMENT,  # type: ignore[call-arg]
            # Restarts are ours to count.
            failure_config=FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=0 if run.node_ids else -1,
            ),
        ),
    )

"""The training loop of one rank, requests to stop, and the reason of each failure.

    driver ──► stop-request.json {"run_index", "cause"}     read by rank 0 at every report
    rank 0 ──► stopping-RUN_INDEX                           when a checkpoint for it is saved
    rank 0 ──► completed-RUN_INDEX                          when all is trained

They are files of the attempt; `trainer.protocol.requests` says what the mark tells the driver.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer import failures
from trainer.checkpoint.save_load import CheckpointError, CheckpointMismatch, CheckpointRefused
from trainer.coordination.client import CoordinatorLost, Identity, Refused, report_heartbeats
from trainer.errors import DataError, StorageError, StorageRefusedError
from trainer.failures import EndReason
from trainer.layout.layout import Layout, LayoutError
from trainer.models.user_module import users_error
from trainer.parallel.mesh import MeshGroups, build_groups
from trainer.parallel.planner import PlanError
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec
from trainer.training.session import Session

logger = logging.getLogger(__name__)
# End reason by exception; the first that matches counts.
_REASONS: dict[type[Exception], EndReason] = {
    # Before its base class: storage that is away comes back, refused credentials do not.
    StorageRefusedError: EndReason.DATA_ERROR,
    StorageError: EndReason.STORAGE_ERROR,
    DataError: EndReason.DATA_ERROR,
    CheckpointMismatch: EndReason.BAD_SPEC,
    CheckpointRefused: EndReason.BAD_SPEC,
    CheckpointError: EndReason.STORAGE_ERROR,
    LayoutError: EndReason.BAD_SPEC,
    PlanError: EndReason.BAD_SPEC,
    failures.DivergenceError: EndReason.DIVERGED,
    failures.NonFiniteRows: EndReason.ROWS_SKIPPED,
    failures.NonFiniteLoss: EndReason.NON_FINITE,
    failures.UserCodeError: EndReason.USER_CODE,
    Refused: EndReason.WORKERS_LOST,
    CoordinatorLost: EndReason.WORKERS_LOST,
}


def train(session: Session) -> dict[str, float]:
    """Run the session to its end; returns the final metrics. Every rank takes equal steps."""
    try:
        session.restore()
        session.announce()
        session.speed.restart()
        if not session.is_finished:
            _take_steps(session)
        elif session.has_skipped:
            _validate_and_save(session)
    finally:
        session.close()
    if session.is_finished:
        leave_mark(session.config, AttemptDir.completed_path)
    return session.final_metrics


def _take_steps(session: Session) -> None:
    for batch, step in session.batches():
        session.train_step(batch, step)
        if session.is_sync_step():
            session.synchronise()
        session.tracer.end_step(session.state.step)
        session.checkpoints.poll()
        if session.is_report_step():
            session.report()
        if _validate_and_save(session):
            break


def _validate_and_save(session: Session) -> bool:
    """Do what is due behind a step; whether training ends with it."""
    is_best = session.validate() if session.is_validation_step() else False
    if session.is_finished and not session.is_report_step():
        session.report()  # validation ended the run between two reports
    is_save_due = session.is_checkpoint_step() or (is_best and session.spec.checkpoint.keep_best)
    if is_save_due:
        session.land_report()  # which may say that a stop is wanted: one save is enough
    if session.is_finished:
        session.save_checkpoint(is_best)
        return True
    can_save = session.may_save and not session.saves.is_too_early
    must_stop = session.is_asked_to_stop and can_save
    if is_save_due or must_stop:
        session.save_checkpoint(is_best)
    if must_stop:
        session.await_save()  # `close` gives up sooner
        # Else the save failed: they train on until a report asks again.
        must_stop = session.checkpoints.settled_step == session.state.step
        session.is_asked_to_stop = must_stop
    if must_stop:
        leave_mark(session.config, AttemptDir.stopping_path)
    return must_stop


def run_worker(config: WorkerConfig, host: str | None = None) -> dict[str, float]:
    """Train as one rank of an initialised default process group; the final metrics.

    Raises `WorkerFailure` with a reason that the control plane knows.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    identity = Identity(0, config.run_index, rank, num_ranks, host or "localhost")
    reporting = report_heartbeats(config.watch_address, identity, config.token)
    # One thread issues all collectives here, in an order that is the same on all ranks. NCCL keeps
    # it, so that kernels of several groups cannot wait for each other crosswise.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with named_failures(config.spec.model.module), reporting as heartbeat:
        prepare_process(config)
        return train(Session(config, groups_of(config, layout_of(config.spec), host), heartbeat))


def prepare_process(config: WorkerConfig) -> None:
    """Settings of this process, whatever it trains."""
    torch.set_num_threads(config.spec.resources.threads_per_worker)
    # Of CUDA alone. Each is set, as by torch's defaults products are fp32 and convolutions TF32.
    is_tf32 = config.spec.training.dense_precision == "tf32"
    backends: Any = torch.backends  # mypy does not know all of them
    for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        each.fp32_precision = "tf32" if is_tf32 else "ieee"


def groups_of(config: WorkerConfig, layout: Layout, host: str | None) -> MeshGroups:
    """The process groups of `layout` over the default one. Collective."""
    timeout_s = config.spec.resources.collective_timeout_s
    # As the driver chose with the backend: seeing a GPU is not enough, as on a host with fewer GPUs
    # than workers all would take the same one.
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    return build_groups(layout, device, timeout_s, host)


def leave_mark(config: WorkerConfig, path: Callable[[AttemptDir, int], Path]) -> None:
    """Rank 0 leaves the mark by which the driver knows how these workers ended well."""
    if dist.get_rank() == 0:
        path(RunDir(config.run_dir).attempt(config.attempt_id), config.run_index).touch()


@contextmanager
def named_failures(module: str | None = None) -> Iterator[None]:
    """Raise whatever goes wrong inside as a `WorkerFailure` with its reason.

    What comes out of the code of the user's own `module` is the user's.
    """
    try:
        yield
    except Exception as error:
        found: Exception = error
        if module and not isinstance(error, tuple(_REASONS)):
            found = users_error(error, module) or error
        reason = next((each for kind, each in _REASONS.items() if isinstance(found, kind)), None)
        if reason is not None:
            logger.error("%s", found)
        elif isinstance(error, OSError | RuntimeError | MemoryError):
            logger.exception("the worker fails")
            is_storage = isinstance(error, OSError)
            reason = EndReason.STORAGE_ERROR if is_storage else failures.reason_of(error)
        else:
            raise
        # What an error came from does not survive the way to the driver by itself.
        evidence = failures.evidence_of(found)
        raise failures.WorkerFailure(reason, str(found), evidence) from error


def layout_of(spec: JobSpec) -> Layout:
    parallelism = spec.parallelism
    return Layout(parallelism.world_size, parallelism.group_size, parallelism.placement)

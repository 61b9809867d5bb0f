"""The per-rank loop, on one screen: build groups, restore, then step, sync, report, save."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer import failures
from trainer.data.errors import DataError, StorageError, StorageRefusedError
from trainer.elastic import faults
from trainer.elastic.checkpoint import CheckpointError, CheckpointMisfit, CheckpointRefused
from trainer.elastic.member import CoordinatorLost, Refused
from trainer.elastic.stop_request import is_due
from trainer.elastic.watched import watched
from trainer.models.module import users_error
from trainer.parallel.divergence import DivergenceError
from trainer.parallel.groups import MeshGroups, build_groups
from trainer.parallel.layout import Layout, LayoutError
from trainer.parallel.plan import PlanError
from trainer.parallel.sync import is_sync_step
from trainer.ray_worker import WorkerConfig
from trainer.session import Session
from trainer.spec import JobSpec

logger = logging.getLogger(__name__)

# What a worker can say of its own end; the message tells the rest.
_REASONS: dict[type[Exception], str] = {
    # Before its kin: storage that is away comes back, bad data and credentials do not get better.
    StorageRefusedError: failures.DATA_ERROR,
    StorageError: failures.STORAGE_ERROR,
    DataError: failures.DATA_ERROR,
    CheckpointMisfit: failures.BAD_SPEC,
    CheckpointRefused: failures.BAD_SPEC,
    CheckpointError: failures.STORAGE_ERROR,
    LayoutError: failures.BAD_SPEC,
    PlanError: failures.BAD_SPEC,
    DivergenceError: failures.DIVERGED,
    failures.RowsPoisoned: failures.ROWS_SKIPPED,
    failures.NonFiniteLoss: failures.NON_FINITE,
    failures.UserCodeError: failures.USER_CODE,
    Refused: failures.WORKERS_LOST,
    CoordinatorLost: failures.WORKERS_LOST,
}


def train(session: Session) -> dict[str, float]:
    """Run the session to its end; returns the final metrics. Every rank takes equal steps."""
    try:
        take_steps(session)
    finally:
        session.close()
    return session.final_metrics


def take_steps(session: Session) -> None:
    """The loop itself, from the newest checkpoint on."""
    session.restore()
    session.announce()
    session.speed.restart()
    if session.is_finished:
        return
    sync_spec = session.spec.parallelism.sync
    for batch, position, wait_s in session.batches():
        session.train_step(batch, position, wait_s)
        if is_sync_step(session.state.step, sync_spec):
            session.synchronise()
        session.tracer.end_step(session.state.step)
        session.checkpoints.poll()
        if session.is_report_step(session.state.step):
            session.report()
        is_best = session.validate() if session.is_validation_step() else False
        if session.is_finished and not session.is_report_step(session.state.step):
            session.report()  # validation ended the run between two reports
        must_stop = is_due(session.config, session.is_report_step(session.state.step))
        is_worth_keeping = is_best and session.spec.checkpoint.keep_best
        if session.is_checkpoint_step() or is_worth_keeping or must_stop:
            session.save_checkpoint(is_best)
        if session.is_finished or must_stop:
            break


def run_worker(config: WorkerConfig, host: str | None = None) -> dict[str, float]:
    """One life of one rank inside an initialised default process group.

    Raises `WorkerFailure` with a reason that the control plane knows.
    """
    with named_failures(config.spec.model.module), watched(config, host) as pulse:
        prepare_process(config)
        return train(Session(config, groups_of(config, layout_of(config.spec), host), pulse))


def prepare_process(config: WorkerConfig) -> None:
    """Settings of this process, whatever it trains."""
    torch.set_num_threads(config.spec.resources.threads_per_worker)
    faults.arm(config.group.incarnation if config.group else config.run_index)


def groups_of(config: WorkerConfig, layout: Layout, host: str | None) -> MeshGroups:
    """The process groups of `layout` over the default one. Collective."""
    timeout_s = config.spec.resources.collective_timeout_s
    return build_groups(layout, worker_device(), timeout_s, host)


@contextmanager
def named_failures(module: str | None = None) -> Iterator[None]:
    """Raise whatever goes wrong inside as a `WorkerFailure` with its reason.

    What comes out of the code of the user's own `module` is the user's.
    """
    try:
        with _users_named(module):
            yield
    except tuple(_REASONS) as error:
        logger.error("%s", error)
        raise _worker_failure(_reason(error), error) from None
    except OSError as error:
        logger.exception("storage fails")
        raise _worker_failure(failures.STORAGE_ERROR, error) from error
    except (RuntimeError, MemoryError) as error:
        logger.exception("the worker fails")
        raise _worker_failure(failures.reason_of(error), error) from error


@contextmanager
def _users_named(module: str | None) -> Iterator[None]:
    try:
        yield
    except tuple(_REASONS):
        raise
    except Exception as error:
        found = users_error(error, module) if module else None
        if found is None:
            raise
        raise found from error


def _reason(error: Exception) -> str:
    return next(reason for kind, reason in _REASONS.items() if isinstance(error, kind))


def _worker_failure(reason: str, error: Exception) -> failures.WorkerFailure:
    # What an error came from does not survive the way to the driver by itself.
    return failures.WorkerFailure(reason, str(error), failures.evidence_of(error))


def layout_of(spec: JobSpec) -> Layout:
    """The 2D layout that a spec asks for."""
    parallelism = spec.parallelism
    return Layout(parallelism.world_size, parallelism.group_size, parallelism.placement)


def worker_device() -> torch.device:
    """Device of this worker, which the driver chose with the backend.

    Seeing a GPU is not enough: on a host with fewer GPUs than workers all would take the same one.
    """
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

"""Restore() returns a value that Session applies.

Warm start: weights and optimizer state out of another job's checkpoint, whole or by table.

Step, data position and schedule start anew. The other job may have had any T, L and sharding.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer.checkpoint.files import Folder, folder_at, is_folder, read_commit
from trainer.checkpoint.manager import resumed_state
from trainer.checkpoint.save_load import (
    CheckpointError,
    CheckpointMismatch,
    CommittedCheckpoint,
    is_intact,
    newest_intact,
    of_first,
)
from trainer.checkpoint.state_dict import METERS, Part, load_packed, load_state
from trainer.data.position import SkippedRows, without
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.protocol.run_dir import RunDir
from trainer.spec.job import JobSpec

if TYPE_CHECKING:
    from trainer.training.session import Session

_FIELD = "checkpoint.warm_start"


def warm_start(
    spec: JobSpec,
    model: TwoDParallel,
    optimizers: Optimizers,
    group: dist.ProcessGroup | None = None,
) -> CommittedCheckpoint | None:
    """Load what `checkpoint.warm_start` asks for, if it asks; what was loaded.

    Collective; storage is waited for in `group` (all ranks; default: the default group).
    Raises `CheckpointMismatch` where the checkpoint lacks what is asked for, and `CheckpointError`
    where there is none that is whole.
    """
    wanted = spec.checkpoint.warm_start
    if wanted is None:
        return None
    found = find_source(folder_at(wanted.path), group)
    part = Part(frozenset(wanted.tables) if wanted.tables else None, wanted.dense)
    if part.dense:
        optimizers.init_state()
    try:
        load_state(found.path, model, optimizers.combined, part, group)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"{_FIELD}: {error}. To take less, name tables in {_FIELD}.tables, or leave out the "
            f"dense part with {_FIELD}.dense: false"
        ) from error
    written_scale = found.commit.moment_scale or spec.moment_scale
    # Moments that were not loaded are zero.
    optimizers.rescale_moments(spec.moment_scale / written_scale)
    return found


def find_source(path: Folder, group: dist.ProcessGroup | None = None) -> CommittedCheckpoint:
    """The checkpoint at `path`, or the newest that is whole in that folder, or of that run.

    Collective over `group`. Raises `CheckpointError` on every rank, or `StorageError` where remote
    storage is away.
    """
    named, folder = of_first(lambda: _look_at(path), group)
    if named is not None:
        if not is_intact(named, group):
            raise CheckpointError(f"{_FIELD}.path: checkpoint {path} is damaged; use another one")
        return named
    if folder is None:
        raise CheckpointError(
            f"{_FIELD}.path: there is no folder {path} that the workers' hosts can see; name a "
            "checkpoint, or a folder of checkpoints, on storage that they share"
        )
    found, damaged = newest_intact(folder, group=group)
    if found is None:
        raise CheckpointError(
            f"{_FIELD}.path: {folder} holds no checkpoint that is whole ({len(damaged)} damaged)"
        )
    return found


def _look_at(path: Folder) -> tuple[CommittedCheckpoint | None, Folder | None]:
    """(the checkpoint that `path` is, the folder of checkpoints that it names instead)."""
    commit = read_commit(path)
    if commit is not None:
        return CommittedCheckpoint(path, commit), None
    inside = path / "checkpoints"
    if is_folder(inside):
        return None, inside
    return None, path if is_folder(path) else None


# Where a session starts: its job's newest checkpoint, another job's, or the seed.

logger = logging.getLogger(__name__)


def restore(session: Session) -> None:
    """Continue from the newest intact checkpoint of the job, else from another job's.

    The latter where `checkpoint.warm_start` names one. Collective over all ranks.
    """
    found = session.checkpoints.newest()
    if found is None:
        _start_warm(session)
    else:
        _resume(session, found)
    _leave_out_rows(session)


def _resume(session: Session, found: CommittedCheckpoint) -> None:
    state = resumed_state(found.commit, session.row_order)
    session.optimizers.init_state()
    group = session.checkpoints.group
    load_state(found.path, session.model, session.optimizers.combined, group=group)
    written_scale = found.commit.moment_scale or session.spec.moment_scale
    session.optimizers.rescale_moments(session.spec.moment_scale / written_scale)
    session.train_meter.load_state(load_packed(found.path, METERS, group))
    session.sync.reset()
    session.state = state
    session.origin = found.path.name
    session.final_metrics = dict(found.commit.metrics)
    logger.info("resumed from %s at step %d", found.path.name, session.state.step)


def _start_warm(session: Session) -> None:
    found = warm_start(session.spec, session.model, session.optimizers, session.checkpoints.group)
    if found is None:
        return
    session.sync.reset()
    session.origin = f"warm-{found.path.name}"
    message = f"warm start from checkpoint {found.path}, at step {found.commit.step}"
    session.note("info", message)


def _leave_out_rows(session: Session) -> None:
    """Take the rows that earlier lives found to spoil the model for done."""
    skipped = SkippedRows.read(RunDir(session.config.run_dir).skipped_rows_path)
    position, num_rows = session.state.position, session.shape.num_rows
    session.state.position = without(position, skipped)
    more = session.state.position.rows_done(num_rows) - position.rows_done(num_rows)
    session.state.rows_skipped += more
    session.finite.begin_at(session.state.position)
    session.total_steps = session.planned_steps()

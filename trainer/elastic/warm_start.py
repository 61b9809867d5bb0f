"""Warm start: weights and optimizer state out of another job's checkpoint, whole or by table.

Step, data position and schedule start anew. The other job may have had any T, L and sharding.
"""

from __future__ import annotations

import torch.distributed as dist

from trainer.elastic.checkpoint import (
    CheckpointError,
    CheckpointMisfit,
    CommittedCheckpoint,
    is_intact,
    newest_intact,
    of_first,
)
from trainer.elastic.checkpoint_folder import Folder, folder_at, is_folder
from trainer.elastic.marker import read_commit
from trainer.elastic.training_state import Part, load_state
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.two_d import TwoDParallel
from trainer.spec import JobSpec

_FIELD = "checkpoint.warm_start"


def warm_start(
    spec: JobSpec,
    model: TwoDParallel,
    optimizers: Optimizers,
    group: dist.ProcessGroup | None = None,
) -> CommittedCheckpoint | None:
    """Load what `checkpoint.warm_start` asks for, if it asks; what was loaded.

    Collective; storage is waited for in `group` (all ranks; default: the default group).
    Raises `CheckpointMisfit` where the checkpoint lacks what is asked for, and `CheckpointError`
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
    except CheckpointMisfit as error:
        raise CheckpointMisfit(
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

"""Warm start: weights and optimizer state out of another job's checkpoint, whole or by table.

Step, data position and schedule start anew. The other job may have had any T, L and sharding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.elastic.checkpoint import (
    CheckpointError,
    CheckpointMisfit,
    CommittedCheckpoint,
    is_intact,
    newest_intact,
)
from trainer.elastic.marker import read_commit
from trainer.elastic.training_state import Part, load_state
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.two_d import TwoDParallel
from trainer.spec import JobSpec

_FIELD = "checkpoint.warm_start"


def warm_start(
    spec: JobSpec, model: TwoDParallel, optimizers: Optimizers
) -> CommittedCheckpoint | None:
    """Load what `checkpoint.warm_start` asks for, if it asks; what was loaded. Collective.

    Raises `CheckpointMisfit` where the checkpoint lacks what is asked for, and `CheckpointError`
    where there is none that is whole.
    """
    wanted = spec.checkpoint.warm_start
    if wanted is None:
        return None
    found = find_source(Path(wanted.path))
    part = Part(frozenset(wanted.tables) if wanted.tables else None, wanted.dense)
    if part.dense:
        optimizers.init_state()
    try:
        load_state(found.path, model, optimizers.combined, part)
    except CheckpointMisfit as error:
        raise CheckpointMisfit(
            f"{_FIELD}: {error}. To take less, name tables in {_FIELD}.tables, or leave out the "
            f"dense part with {_FIELD}.dense: false"
        ) from error
    written_scale = found.commit.moment_scale or spec.moment_scale
    # Moments that were not loaded are zero.
    optimizers.rescale_moments(spec.moment_scale / written_scale)
    return found


def find_source(path: Path) -> CommittedCheckpoint:
    """The checkpoint at `path`, or the newest that is whole in that folder, or of that run.

    Collective. Raises `CheckpointError` on every rank.
    """
    # Rank 0's view counts.
    box: list[Any] = [_look_at(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    named, folder = box[0]
    if named is not None:
        if not is_intact(named):
            raise CheckpointError(f"{_FIELD}.path: checkpoint {path} is damaged; use another one")
        return named
    if folder is None:
        raise CheckpointError(
            f"{_FIELD}.path: there is no folder {path} on the workers' hosts; name a checkpoint, "
            "or a folder of checkpoints, on storage that they share"
        )
    found, damaged = newest_intact(folder)
    if found is None:
        raise CheckpointError(
            f"{_FIELD}.path: {folder} holds no checkpoint that is whole ({len(damaged)} damaged)"
        )
    return found


def _look_at(path: Path) -> tuple[CommittedCheckpoint | None, Path | None]:
    """(the checkpoint that `path` is, the folder of checkpoints that it names instead)."""
    commit = read_commit(path)
    if commit is not None:
        return CommittedCheckpoint(path, commit), None
    inside = path / "checkpoints"
    if inside.is_dir():
        return None, inside
    return None, path if path.is_dir() else None

"""Where a run starts: its own newest checkpoint, another job's (warm start), or neither.

A warm start takes weights and optimizer state, whole or by table, out of a checkpoint of any T, L
and sharding; step, data position and schedule start anew. Storage that is away raises
`StorageError`; a checkpoint that does not fit raises `CheckpointMismatch`, one that would run code
`CheckpointRefused`, a missing one `CheckpointError`. Both functions load model and optimizers in
place and are collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from trainer.checkpoint.files import (
    CommittedCheckpoint,
    Folder,
    RowOrder,
    folder_at,
    read_commit,
    superseded_in,
)
from trainer.checkpoint.manager import CheckpointManager, TrainState, resumed_state
from trainer.checkpoint.save_load import (
    CheckpointError,
    CheckpointMismatch,
    is_intact,
    newest_intact,
    of_first,
)
from trainer.checkpoint.state_dict import METERS, load_packed, load_state
from trainer.errors import StorageError
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.spec.job import JobSpec

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_FIELD = "checkpoint.warm_start"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds beside the model and its optimizers, for the session to go on from.

    `meters` is what the metrics took in since the last report, `message` what happened, in words;
    with a `level` it is for the job's timeline.
    """

    origin: str
    message: str
    level: Literal["info", "warning"] | None = None
    state: TrainState = field(default_factory=TrainState)
    metrics: dict[str, float] = field(default_factory=dict)
    meters: Mapping[str, torch.Tensor] = field(default_factory=dict)


def restore(
    spec: JobSpec,
    checkpoints: CheckpointManager,
    row_order: RowOrder,
    model: TwoDParallel,
    optimizers: Optimizers,
) -> Restored | None:
    """Load the newest intact checkpoint of the job, else what `checkpoint.warm_start` names.

    None where there is neither. One that retention of a running group removes while it is read is
    followed by the next. Collective over all ranks.
    """
    group = checkpoints.group

    def load(found: CommittedCheckpoint) -> Restored:
        state = resumed_state(found.commit, row_order)
        load_state(found.path, model, optimizers.combined, group=group)
        _rescale_moments(spec, optimizers, found)
        return Restored(
            origin=found.path.name,
            message=f"resumed from {found.path.name} at step {state.step}",
            state=state,
            metrics=dict(found.commit.metrics),
            meters=load_packed(found.path, METERS, group),
        )

    restored = _load_first(checkpoints.newest, load)
    if restored is not None:
        return restored
    warm = warm_start(spec, model, optimizers, checkpoints.runs_dir, group)
    if warm is None:
        return None
    message = f"warm start from checkpoint {warm.path}, at step {warm.commit.step}"
    origin = f"warm-{warm.path.name}"
    wanted = spec.checkpoint.warm_start
    is_chosen = wanted is not None and wanted.tables is not None
    if is_chosen or warm.commit.row_order.encodings in (None, row_order.encodings):
        return Restored(origin, message, "info")
    message += (
        ". Its data had other vocabularies or hash sizes, so rows of tables may stand for other "
        "values here: prepare the data with the same ones, or name in checkpoint.warm_start.tables "
        "those whose ids mean the same"
    )
    return Restored(origin, message, "warning")


def _load_first(
    find: Callable[[], CommittedCheckpoint | None], load: Callable[[CommittedCheckpoint], Result]
) -> Result | None:
    """What `load` makes of the checkpoint that `find` finds, if any.

    Where that was removed while it was read, of the one that is then found.
    """
    found = find()
    while found is not None:
        try:
            return load(found)
        except CheckpointMismatch:
            raise
        except (CheckpointError, StorageError):
            read, found = found, find()
            # Half of it may have been loaded: only another one can be started from.
            if found is None or found.path == read.path:
                raise
            logger.warning("checkpoint %s was removed while it was read", read.path.name)
    return None


def warm_start(
    spec: JobSpec,
    model: TwoDParallel,
    optimizers: Optimizers,
    runs_dir: Path,
    group: dist.ProcessGroup | None = None,
) -> CommittedCheckpoint | None:
    """Load what `checkpoint.warm_start` names, if anything; the checkpoint that was loaded.

    `runs_dir` has the run folders of this job and others. Collective; storage is waited for in
    `group` (all ranks; default: the default group). Raises `CheckpointMismatch` where the
    checkpoint lacks what is asked for, and `CheckpointError` where there is none that is whole.
    """
    wanted = spec.checkpoint.warm_start
    if wanted is None:
        return None

    def load(found: CommittedCheckpoint) -> CommittedCheckpoint:
        try:
            load_state(found.path, model, optimizers.combined, wanted, group)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(
                f"{_FIELD}: {error}. To take less, name tables in {_FIELD}.tables, or leave out "
                f"the dense part with {_FIELD}.dense: false"
            ) from error
        _rescale_moments(spec, optimizers, found)
        return found

    return _load_first(lambda: find_source(folder_at(wanted.path), runs_dir, group), load)


def _rescale_moments(spec: JobSpec, optimizers: Optimizers, found: CommittedCheckpoint) -> None:
    # Moments that were not loaded are zero.
    optimizers.rescale_moments(spec.moment_scale / found.commit.moment_scale)


def find_source(
    path: Folder, runs_dir: Path, group: dist.ProcessGroup | None = None
) -> CommittedCheckpoint:
    """The checkpoint at `path`, or the newest that is whole in that folder, or of that run.

    Those that a rewind of the run has left behind are no newest ones. Collective over `group`.
    Raises `CheckpointError` on every rank, or `StorageError` where storage is away.
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
    # The run's folder holds this one, or is in `runs_dir` where `checkpoint.path` is elsewhere.
    run_dirs = [folder.parent, runs_dir / folder.parent.name]
    is_superseded = superseded_in(*(each for each in run_dirs if isinstance(each, Path)))
    found, damaged = newest_intact(folder, is_superseded, group)
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
    return None, next((each for each in (path / "checkpoints", path) if each.is_dir()), None)

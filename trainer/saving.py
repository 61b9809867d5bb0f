"""A session's checkpoints: saving with its commit marker, retention, and finding what to resume.

`trainer.elastic.checkpoint` knows files and markers; here is what a run does with them and what it
tells the control plane about it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import events
from trainer.data.position import DataPosition
from trainer.elastic import checkpoint
from trainer.parallel.groups import MeshGroups
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)


@dataclass
class State:
    """Where training stands; what a resumed run continues from."""

    step: int = 0
    position: DataPosition = field(default_factory=DataPosition)
    rows_trained: int = 0
    best: float | None = None


class Checkpoints:
    """The checkpoints of one job, as one rank of one worker group run sees them."""

    def __init__(
        self, config: WorkerConfig, groups: MeshGroups, emit: Callable[[events.Event], None]
    ) -> None:
        self._config = config
        self._groups = groups
        self._emit = emit
        self._folder = RunDir(config.run_dir).checkpoints_dir

    def save(
        self, tensors: dict[str, Any], state: State, metrics: dict[str, float], is_best: bool
    ) -> None:
        """Write a checkpoint, marker last, then apply retention. Collective over all ranks.

        Raises `CheckpointError` on every rank.
        """
        started = time.perf_counter()
        folder = self._folder / f"step-{state.step:08d}-{self._config.run_label}"
        files = checkpoint.save(folder, tensors)
        commit = self._commit(state, metrics, is_best, files)
        checkpoint.write_commit(folder, commit)
        if self._groups.rank == 0:
            self._publish(folder, commit, time.perf_counter() - started)

    def _commit(
        self,
        state: State,
        metrics: dict[str, float],
        is_best: bool,
        files: dict[str, checkpoint.FileRecord],
    ) -> checkpoint.Commit:
        layout = self._groups.layout
        return checkpoint.Commit(
            step=state.step,
            epoch=state.position.epoch,
            row=state.position.row,
            rows_trained=state.rows_trained,
            world_size=layout.world_size,
            shard_group_size=layout.shard_group_size,
            placement=layout.placement,
            time=time.time(),
            is_best=is_best,
            best=state.best,
            moment_scale=self._config.spec.moment_scale,
            metrics=dict(metrics),
            files=files,
        )

    def _publish(self, folder: Path, commit: checkpoint.Commit, duration_s: float) -> None:
        self._emit(
            events.CheckpointCommitted(
                time=time.time(),
                step=commit.step,
                path=str(folder),
                size_bytes=commit.size_bytes,
                duration_s=duration_s,
                is_best=commit.is_best,
                metrics=commit.metrics,
            )
        )
        policy = self._config.spec.checkpoint
        committed = checkpoint.list_committed(self._folder)
        for old in checkpoint.superseded(committed, policy.keep_last, policy.keep_best):
            self._remove(old)

    def _remove(self, old: checkpoint.CommittedCheckpoint) -> None:
        try:
            checkpoint.remove_checkpoint(old.path)
        except OSError as error:
            # The new checkpoint is safe; the old one is tried again after the next save.
            logger.warning("checkpoint %s could not be removed: %s", old.path.name, error)
            return
        self._emit_deleted(old)

    def _emit_deleted(self, old: checkpoint.CommittedCheckpoint) -> None:
        self._emit(
            events.CheckpointDeleted(time=time.time(), step=old.commit.step, path=str(old.path))
        )

    def newest(self) -> checkpoint.CommittedCheckpoint | None:
        """The newest intact checkpoint, if any; rank 0 clears away what is none. Collective."""
        if self._groups.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_uncommitted(self._folder)
        found, damaged = checkpoint.newest_intact(self._folder)
        if self._groups.rank == 0:
            self._set_aside(damaged)
        return found

    def _set_aside(self, damaged: Iterable[checkpoint.CommittedCheckpoint]) -> None:
        for each in damaged:
            checkpoint.set_aside(each)
            message = f"checkpoint {each.path.name} is damaged: set aside, using the one before"
            logger.warning(message)
            self._emit(events.Note(time=time.time(), level="error", message=message))
            self._emit_deleted(each)


def state_of(commit: checkpoint.Commit) -> State:
    """Where the run that wrote `commit` stood."""
    return State(
        step=commit.step,
        position=DataPosition(epoch=commit.epoch, row=commit.row),
        rows_trained=commit.rows_trained,
        best=commit.best,
    )

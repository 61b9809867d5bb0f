"""The checkpoints of a run: saving beside the training, retention, and finding the one to resume.

At most one save is under way, and one that is due meanwhile waits for it: were it left out, a slow
disk would make checkpoints rarer than `checkpoint.every_steps` promises. (Where groups are failure
domains it is put off instead, as others would wait for the leader.) A save that failed is due again
at the next sync, later when it fails again and again. The wait shows as
`checkpoint/stall_s` (seconds that training stood still for a save) beside `checkpoint/write_s`
(seconds from there, or from its start, until the marker was on storage).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.distributed.checkpoint import SavePlanner

from trainer.checkpoint import save_load
from trainer.checkpoint.files import (
    FAULTS,
    Commit,
    CommittedCheckpoint,
    Folder,
    RowOrder,
    beyond_retention,
    checkpoints_of,
    folder_name,
    is_empty,
    list_committed,
    place_of,
    remove_folder,
    remove_uncommitted,
    set_aside,
    superseded_in,
)
from trainer.checkpoint.save_load import CheckpointError, CheckpointMismatch, SharePlanner, Staging
from trainer.coordination.messages import EarlyStoppingState, LeaderProgress, Ledger
from trainer.coordination.sync_tuner import TunerState
from trainer.data.position import (
    START,
    BatchShape,
    DataPosition,
    Step,
    ledger_of,
    position_of,
    step_start,
)
from trainer.errors import StorageError
from trainer.failures import EndReason, WorkerFailure, restart_delay_s
from trainer.parallel.collectives import in_background
from trainer.parallel.mesh import MeshGroups
from trainer.protocol import events
from trainer.protocol.requests import read_rewind
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig

logger = logging.getLogger(__name__)
_BEAT_S = 5.0
_SAVED = b'"kind":"checkpoint_committed"'


# What a state, the marker of a checkpoint and a ledger hold under the same name.
_SHARED = ("rows_trained", "best", "commit", "rows_skipped", "plateau", "tuning")


@dataclass
class TrainState:
    """Where training stands; what a resumed run continues from.

    `reached` is where in the data, or the step that led there. `commit` counts the committed syncs
    where groups are failure domains. `tuning` is that of the sync interval, as of the last save or
    commit.
    """

    step: int = 0
    reached: DataPosition | Step = START
    rows_trained: int = 0
    best: float | None = None
    commit: int = 0
    rows_skipped: int = 0
    plateau: EarlyStoppingState | None = None
    tuning: TunerState | None = None

    @classmethod
    def at(cls, step: int, position: DataPosition, record: Commit | Ledger) -> TrainState:
        """The state at `step` and `position`, with what `record` holds beside them."""
        return cls(step, position, **_shared(record))

    @property
    def position(self) -> DataPosition:
        return self.reached.end if isinstance(self.reached, Step) else self.reached

    @property
    def ledger(self) -> Ledger:
        """What groups go on from."""
        led = LeaderProgress(step=self.step, epoch=self.position.epoch, saved_step=self.step)
        return ledger_of(self.position).model_copy(update={**_shared(self), "led": led})


def _shared(record: TrainState | Commit | Ledger) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _SHARED}


@dataclass(frozen=True)
class PendingSave:
    """A save under way: its step, how long it held training up, its end (seconds it took)."""

    step: int
    stall_s: float
    end: futures.Future[float]


@dataclass(frozen=True)
class SaveStanding:
    """How the saves of a run stand: one counts once its marker is on storage.

    `saved_step` is the step of the newest that does, 0 where none was saved here. `has_failed` says
    that the newest did not succeed, `is_blocked` that the next has to wait: for one that is under
    way, or for storage to recover.
    """

    saved_step: int = 0
    has_failed: bool = False
    is_blocked: bool = False

    @property
    def is_due_again(self) -> bool:
        return self.has_failed and not self.is_blocked

    @property
    def is_too_early(self) -> bool:
        """Whether saves have failed and storage is given time."""
        return self.has_failed and self.is_blocked


class CheckpointManager:
    """The checkpoints of one job, as one rank of one worker group run sees them.

    `newest_commit` is the committed sync in the newest checkpoint that this rank saved or found,
    None before there is any. `row_order` is of the rows that positions count. `group` is all ranks,
    with a timeout long enough for slow storage. Building it is collective over all ranks.
    """

    def __init__(
        self,
        config: WorkerConfig,
        groups: MeshGroups,
        emit: Callable[[events.Event], None],
        row_order: RowOrder,
    ) -> None:
        self._config = config
        self._row_order = row_order
        self._groups = groups
        self._emit = emit
        self._folder = checkpoints_of(config.run_dir, config.spec.checkpoint.path)
        self.runs_dir = RunDir(config.run_dir).runs_dir
        self.group = groups.long_timeout_group
        self._staging = Staging(groups)
        self._pending: PendingSave | None = None
        self.newest_commit: int | None = None
        self._saved_step = 0
        self._num_failed = 0  # saves in a row
        self._retry_at = 0.0

    @property
    def standing(self) -> SaveStanding:
        """As this rank sees it: others may not know yet that a save has ended."""
        is_early = self._num_failed > 0 and time.monotonic() < self._retry_at
        is_blocked = self._pending is not None or is_early
        return SaveStanding(self._saved_step, self._num_failed > 0, is_blocked)

    @property
    def settled_step(self) -> int | None:
        """Step of the newest save that succeeded; None while one is under way, as far as known."""
        return None if self._pending else self._saved_step

    def save(
        self,
        tensors: dict[str, Any],
        state: TrainState,
        metrics: dict[str, float],
        is_best: bool,
        is_last: bool,
        started_s: float,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint, marker last, then apply retention. Collective over all ranks.

        Asynchronous but for the last of the run, which is done when this returns. `started_s` (of
        `time.perf_counter`) is when training stopped for it; `beat` as for `wait`. A failure is an
        error in the timeline, at the last save `CheckpointError` on every rank.
        """
        self.wait(beat)
        commit = self._commit(state, metrics, is_best)
        name = folder_name(commit.step, self._config.run_label)
        is_beside = self._config.spec.checkpoint.asynchronous and not is_last
        planner: SavePlanner = SharePlanner(self._groups)
        if is_beside:
            planner, tensors = self._staging.stage(tensors), {}
        write = partial(self._write, self._folder / name, commit, tensors, planner)
        end = in_background(write, "checkpoint", self._groups.device)
        if not is_beside:
            await_end(end, beat)
        self._pending = PendingSave(commit.step, time.perf_counter() - started_s, end)
        if is_last:
            self._settle(must_succeed=True)
        else:
            self.poll()

    def poll(self) -> None:
        """Report a save that has ended meanwhile, if one has. At every step; no collective.

        Raises RuntimeError where the ranks lost each other in it.
        """
        if self._pending and self._pending.end.done():
            self._settle()

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the save under way, if any, and report it; raises as `poll` does.

        `beat` is called every few seconds: for as long as storage may take, the rank does not hang.
        """
        if self._pending:
            await_end(self._pending.end, beat)
            self._settle()

    def close(self) -> None:
        """Let the save under way end; give it up where its peers do not answer."""
        if self._pending is None:
            return
        end = self._pending.end
        futures.wait([end], self._groups.timeout.total_seconds())
        if not end.done() or isinstance(end.exception(), RuntimeError):
            # The ranks have lost each other, which is said elsewhere.
            logger.warning("the save at step %d is given up", self._pending.step)
            self._pending = None
        self.wait()

    def _settle(self, must_succeed: bool = False) -> None:
        assert self._pending, "there is a save to settle"
        pending, self._pending = self._pending, None
        try:
            write_s = pending.end.result()
        except (CheckpointError, *FAULTS) as error:
            if must_succeed:
                raise
            self._num_failed += 1
            self._retry_at = time.monotonic() + restart_delay_s(self._num_failed)
            if self._num_failed == 1:
                self._report_error(str(error))
            else:
                logger.error("%s (%d times in a row)", error, self._num_failed)
            return
        self._num_failed, self._saved_step = 0, pending.step
        values = {"checkpoint/stall_s": pending.stall_s, "checkpoint/write_s": write_s}
        self._emit_once(events.Metrics(time=time.time(), step=pending.step, values=values))

    def _write(
        self, folder: Folder, commit: Commit, tensors: dict[str, Any], planner: SavePlanner
    ) -> float:
        """Files, marker, retention; seconds until the marker was there. Collective."""
        started = time.perf_counter()
        files = save_load.save(folder, tensors, planner, self.group)
        commit = replace(commit, files=files)
        save_load.write_commit(folder, commit, self._check_owner, self.group)
        duration_s = time.perf_counter() - started
        self.newest_commit = commit.commit
        if self._groups.rank == 0:
            self._publish(folder, commit, duration_s)
        return duration_s

    def _commit(self, state: TrainState, metrics: dict[str, float], is_best: bool) -> Commit:
        position = state.position
        return Commit(
            **_shared(state),
            step=state.step,
            epoch=position.epoch,
            row=position.row,
            **vars(self._groups.layout),
            time=time.time(),
            is_best=is_best,
            moment_scale=self._config.spec.moment_scale,
            metrics=dict(metrics),
            open_epochs=ledger_of(position).open_epochs,
            row_order=self._row_order,
        )

    def _publish(self, folder: Folder, commit: Commit, duration_s: float) -> None:
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
        try:
            self._retain()
        except FAULTS as error:
            # The new checkpoint is safe; older ones are tried again after the next save.
            logger.warning("old checkpoints stay for now: %s", error)

    def _retain(self) -> None:
        committed = list_committed(self._folder)
        # The run was rewound behind these, and now has a checkpoint after the rewind.
        is_superseded = superseded_in(self._config.run_dir)
        old = [each for each in committed if is_superseded(each.path.name)]
        kept = [each for each in committed if each not in old]
        old += beyond_retention(kept, self._config.spec.checkpoint)
        for each in old:
            self._drop(each.path, remove_folder, "removed")

    def _drop(self, folder: Folder, drop: Callable[[Folder], None], done: str) -> None:
        """Remove a checkpoint, or set it aside; where that fails it is tried again next time."""
        try:
            drop(folder)
        except FAULTS as error:
            logger.warning("checkpoint %s could not be %s: %s", folder.name, done, error)
            return
        step, *_ = place_of(folder.name)
        self._emit(events.CheckpointDeleted(time=time.time(), step=step, path=str(folder)))

    def newest(self) -> CommittedCheckpoint | None:
        """The newest intact checkpoint, if any; rank 0 clears away what is none. Collective.

        Raises `CheckpointError` on every rank where nothing can be written or another attempt holds
        the run folder, `CheckpointMismatch` where the one that a rewind chose is not there,
        `StorageError` where storage goes away meanwhile or lacks what was saved there, and
        `WorkerFailure` where hosts do not share the folder.
        """
        self._check_shared(save_load.prepare_folder(self._folder, self.group))
        save_load.of_first(self._clean_up, self.group)
        found, damaged = save_load.newest_intact(
            self._folder, superseded_in(self._config.run_dir), self.group
        )
        if self._groups.rank == 0:
            for each in damaged:
                self._set_aside(each.path)
        save_load.of_first(lambda: self._check_found(found), self.group)
        if found:
            self.newest_commit = found.commit.commit
        return found

    def _check_found(self, found: CommittedCheckpoint | None) -> None:
        """Raise where to go on from `found`, or from the start, would lose what was saved."""
        # Another group may be saving its first one. What is set aside is there, too.
        if found is None and self._has_saved() and is_empty(self._folder):
            raise StorageError(
                f"{self._folder} is empty, though the job has saved checkpoints there: mount its "
                "storage at that path. If they were deleted, clone the job: that starts anew"
            )
        rewind = read_rewind(RunDir(self._config.run_dir).rewind_path)
        if rewind is None:
            return
        name = found.path.name if found else ""
        is_of_before = name != rewind.checkpoint and place_of(name)[1] < rewind.attempt_index
        if is_of_before and not self._has_saved(rewind.attempt_index):
            raise CheckpointMismatch(
                f"checkpoint {rewind.checkpoint}, from which the job was to go on, is gone or "
                "damaged; restart it from another one"
            )

    def _has_saved(self, since: int = 0) -> bool:
        """Whether the job has told of a checkpoint in attempt `since` or a later one."""
        for path in RunDir(self._config.run_dir).root.glob("attempts/*-a*/outbox/*.jsonl"):
            if int(path.parts[-3].rpartition("-a")[2]) < since:
                continue
            with path.open("rb") as records:
                if any(_SAVED in record for record in records):
                    return True
        return False

    def _check_shared(self, blind: Sequence[int]) -> None:
        """Raise `WorkerFailure` where there are ranks that do not see what rank 0 writes."""
        if not blind:
            return
        sites = self._groups.sites
        host, writer = sites[blind[0]].host, sites[0].host
        message = (
            f"{host} does not see what {writer} writes to {self._folder}: mount the same storage "
            "on every host at that path (checkpoint.path), or name object storage"
        )
        # The fewer are to blame.
        blamed = host if 2 * len(blind) <= len(sites) else writer
        raise WorkerFailure(EndReason.STORAGE_ERROR, message, blamed_host=blamed)

    def _check_owner(self) -> None:
        """Raise `CheckpointError` where another attempt holds the run folder.

        This one may not have noticed yet, as when its host stood still.
        """
        owner = RunDir(self._config.run_dir).lock_owner()
        if owner not in (None, self._config.attempt_id):
            raise CheckpointError(
                f"attempt {self._config.attempt_id} may not save: run folder "
                f"{self._config.run_dir} is {owner}'s by now, which goes on in its place"
            )

    def _clean_up(self) -> None:
        self._check_owner()
        for folder in remove_uncommitted(self._folder, self._is_garbage):
            self._set_aside(folder)

    def _is_garbage(self, name: str) -> bool:
        """Whether an unfinished checkpoint may go: another group may be writing one right now."""
        group, attempt = self._config.group, self._config.attempt_id.rpartition("-")[2]
        if group is None:
            return True
        return f"-{attempt}-" not in name or f"-g{group.group}i" in name

    def _set_aside(self, folder: Folder) -> None:
        self._report_error(f"checkpoint {folder.name} is damaged: set aside, using the one before")
        self._drop(folder, set_aside, "set aside")

    def _report_error(self, message: str) -> None:
        logger.error("%s", message)
        self._emit_once(events.Note(time=time.time(), level="error", message=message))

    def _emit_once(self, event: events.Event) -> None:
        if self._groups.rank == 0:
            self._emit(event)


def await_end(end: futures.Future[Any], beat: Callable[[], None]) -> None:
    """Wait for `end`, whatever it comes to; `beat` is called every few seconds meanwhile."""
    while futures.wait([end], _BEAT_S).not_done:
        beat()


def state_of(commit: Commit) -> TrainState:
    """Where the run that wrote `commit` stood."""
    position = DataPosition(epoch=commit.epoch, row=commit.row)
    if commit.open_epochs:
        position = position_of(Ledger(epoch=commit.epoch, open_epochs=commit.open_epochs))
    return TrainState.at(commit.step, position, commit)


def resumed_state(commit: Commit, row_order: RowOrder) -> TrainState:
    """Where a run that reads rows in `row_order` goes on from `commit`.

    Raises `CheckpointMismatch` where the ids of the data stand for other values, and where the
    commit lies inside an epoch of other rows: numbers of rows would stand for others now, so that
    some would be trained twice and some never. Between epochs other rows harm nobody.
    """
    state, written = state_of(commit), commit.row_order
    if written.encodings not in (None, row_order.encodings):
        raise CheckpointMismatch(
            "the training data was prepared anew, with other vocabularies or hashes, since the "
            f"checkpoint at step {commit.step}: its ids stand for other values than the rows of "
            "the tables. Put the data back as it was, or submit a new job"
        )
    if written.digest == row_order.digest:
        return state
    start = step_start(state.position, BatchShape(written.num_rows, 1, 1))
    if start.row or start.done or start.later:
        raise CheckpointMismatch(
            f"the training data has changed since the checkpoint at step {commit.step} (files, row "
            f"groups or order; {written.num_rows:,} rows then, {row_order.num_rows:,} now), and "
            f"epoch {start.epoch} is half done: some of its rows would be trained twice and others "
            "never. Put the data back as it was, or submit a new job with checkpoint.warm_start"
        )
    return replace(state, reached=start)

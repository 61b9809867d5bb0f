"""Saving and loading checkpoints: torch.distributed.checkpoint files, then the marker.

A folder without COMMIT.json is what a save that was cut off has left. Storage is a disk or an
object store (`trainer.checkpoint.files`, `trainer.checkpoint.remote_io`); what is in the files is
the business of `trainer.checkpoint.state_dict`.

An asynchronous save copies in memory what this rank will write and writes it from a thread, which
has a process group of its own, as its collectives must never interleave with those of the training.
The M replicas of a shard share the work, and all T ranks that of what each holds: who writes which
piece follows from the layout, so no rank asks another. The copies live in buffers that are kept
from save to save: S / T bytes a rank for tables of S bytes (on GPUs see `lock_exactly`).
"""

from __future__ import annotations

import heapq
import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.utils.serialization import config as serialization_config

from trainer.checkpoint.files import (
    FAULTS,
    CheckpointGone,
    Commit,
    CommittedCheckpoint,
    Folder,
    explain,
    list_committed,
    matches,
    remove_folder,
    remove_probe,
    sees_probe,
    unreadable,
    write_marker,
    write_probe,
)
from trainer.checkpoint.remote_io import (
    METADATA,
    RemoteWriter,
    SafeLoadPlanner,
    num_bytes_of,
    reader_for,
)
from trainer.errors import DataError, SourceMissingError, StorageError, StorageRefusedError
from trainer.parallel.mesh import MeshGroups
from trainer.protocol.run_dir import FileRecord, file_record
from trainer.storage import Location

Result = TypeVar("Result")


class CheckpointError(Exception):
    """A save or a load failed; the message names folder, cause and remedy."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint holds other tables, another model or other optimizers than the job."""


class CheckpointRefused(CheckpointError):
    """No retry helps: storage refuses checkpoints (credentials, bucket), or one would run code."""


def save(
    folder: Folder,
    state: dict[str, Any],
    planner: SavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Write `state` to `folder` and return its files. Collective over `group` (default: all ranks).

    A `planner` of its own may bring the tensors along; `state` is then empty. `group` spans all
    ranks. Raises `CheckpointError` on every rank when any of them failed; the folder is then
    removed. An error of the group itself is a RuntimeError, on any rank.
    """
    try:
        # A third of a save's CPU time, for what SHA-256 finds as well.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            if isinstance(folder, Location):
                writer = RemoteWriter(folder)
                dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
                everyone = _gather(lambda: writer.records, group)
            else:
                dcp.save(state, checkpoint_id=folder, planner=planner, process_group=group)
                everyone = _gather(lambda: _records_on_disk(folder), group)
        return {name: record for records in everyone for name, record in records.items()}
    except (CheckpointException, *FAULTS) as error:
        _discard(folder, error)


def write_commit(
    folder: Folder,
    commit: Commit,
    check: Callable[[], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Rank 0 puts the marker in place, unless `check` raises `CheckpointError`.

    Collective; raises `CheckpointError` on every rank.
    """

    def write() -> None:
        check()
        write_marker(folder, commit)

    try:
        of_first(write, group)
    except FAULTS as error:
        _discard(folder, error)


def of_first(read: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What rank 0 finds, on every rank; storage that failed it fails them all. Collective.

    The others wait as long as `group` lets them, which should be longer than storage is waited for.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = read()
        except (*FAULTS, CheckpointError) as error:
            box[1] = _as_storage_fault(error)
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _as_storage_fault(error: BaseException) -> BaseException:
    # A file of a checkpoint that was there before is missing: no fault of the user's data.
    return StorageError(str(error)) if isinstance(error, SourceMissingError) else error


def _discard(folder: Folder, error: BaseException) -> NoReturn:
    cause = explain(folder.parent, _cause(error))
    message = f"checkpoint {folder.name} could not be written: {cause}"
    if dist.get_rank() == 0:
        with suppress(*FAULTS):  # garbage without a marker; the next attempt clears it away
            remove_folder(folder)
    raise CheckpointError(f"{message}. Earlier checkpoints are untouched") from error


def _gather(read: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """What each rank reads, on every rank; `FAULTS` of any rank are raised on all, and so is what
    is no checkpoint. Collective."""
    mine: Result | Exception
    try:
        mine = read()
    except (*FAULTS, pickle.UnpicklingError) as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    for each in everyone:
        if isinstance(each, Exception):
            raise each
    return everyone


def _records_on_disk(folder: Path) -> dict[str, FileRecord]:
    """Files that this rank wrote: on shared storage a host may see those of others late."""
    rank = dist.get_rank()
    # DCP writes one, even of nothing. To look for it each rank would list what all have written.
    names = [f"__{rank}_0{DEFAULT_SUFFIX}"] + ([METADATA] if rank == 0 else [])
    return {name: file_record(folder / name) for name in names}


def _cause(error: BaseException) -> BaseException:
    causes = getattr(error, "failures", None) or {0: (error, None)}
    return next(iter(causes.values()))[0]


def prepare_folder(checkpoints_dir: Folder, group: dist.ProcessGroup | None = None) -> list[int]:
    """Make the folder of checkpoints and try to write there; ranks that do not see what rank 0
    wrote. Collective.

    Raises `CheckpointError` on every rank, so that a job does not train for hours before its first
    checkpoint fails; `CheckpointRefused` where it never could be written.
    """
    try:
        probe = of_first(lambda: write_probe(checkpoints_dir), group)
        is_seen = _gather(lambda: sees_probe(checkpoints_dir, probe), group)
        of_first(lambda: remove_probe(checkpoints_dir, probe), group)
    except FAULTS as error:
        kind = CheckpointRefused if isinstance(error, StorageRefusedError) else CheckpointError
        cause = explain(checkpoints_dir, error)
        raise kind(f"checkpoints cannot be written: {cause}") from error
    return [rank for rank, seen in enumerate(is_seen) if not seen]


def is_intact(checkpoint: CommittedCheckpoint, group: dist.ProcessGroup | None = None) -> bool:
    """Whether every file still has its recorded size and checksum. Collective: ranks share work.

    `group` spans all ranks and waits for the one that reads most, or whose storage is away.
    Raises `StorageError` on every rank where storage is away, which proves nothing, and
    `CheckpointGone` where a rank finds neither a file nor the marker.
    """
    names = sorted(checkpoint.commit.files)[dist.get_rank() :: dist.get_world_size()]
    files = checkpoint.commit.files
    verdicts = _gather(
        lambda: all(matches(checkpoint.path, name, files[name]) for name in names), group
    )
    return all(verdicts)


def newest_intact(
    checkpoints_dir: Folder,
    is_ignored: Callable[[str], bool] = lambda name: False,
    group: dist.ProcessGroup | None = None,
) -> tuple[CommittedCheckpoint | None, list[CommittedCheckpoint]]:
    """Newest checkpoint that exists and is undamaged, and the damaged ones after it.

    Collective over `group` (all ranks): rank 0's listing counts, without those whose name
    `is_ignored`. One that is removed while it is read is left out; raises `StorageError` where
    rank 0 still lists what another rank does not see.
    """
    gone: list[Folder] = []
    while True:
        damaged: list[CommittedCheckpoint] = []
        committed = of_first(lambda: list_committed(checkpoints_dir, is_ignored), group)
        for checkpoint in reversed(committed):
            try:
                if is_intact(checkpoint, group):
                    return checkpoint, damaged
            except CheckpointGone:
                if checkpoint.path in gone:
                    raise
                gone.append(checkpoint.path)
                break
            damaged.append(checkpoint)
        else:
            return None, damaged


def load(folder: Folder, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` in place from `folder`, and replace its objects.

    Collective over `group`, which spans all ranks.

    Raises `CheckpointMismatch` when the checkpoint holds other tables or shapes, `StorageError`
    where storage is away, and `CheckpointRefused` where it would run code.
    """
    reader, planner = reader_for(folder), SafeLoadPlanner()

    def read_metadata() -> None:
        reader.read_metadata()

    try:
        # Before DCP does, which loses what that raises.
        if dist.is_initialized():
            _gather(read_metadata, group)
        else:
            read_metadata()
        dcp.load(  # noqa: TID251 - reader and planner are ours
            state, storage_reader=reader, planner=planner, process_group=group
        )
    except (CheckpointException, *FAULTS, pickle.UnpicklingError) as error:
        if isinstance(cause := _cause(error), DataError):
            raise _as_storage_fault(cause) from error
        if isinstance(cause, OSError):
            raise unreadable(folder, cause) from error
        if isinstance(cause, pickle.UnpicklingError):
            raise refused(folder, cause) from error
        raise CheckpointMismatch(
            f"checkpoint {folder.name} does not fit this model: {_cause(error)}; was the spec "
            "changed?"
        ) from error


def refused(folder: Folder, error: Exception) -> CheckpointRefused:
    """The error for content that `torch.load(weights_only=True)` does not take."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    what = f"{found[1]}, which may run code" if found else f"no value ({type(error).__name__})"
    return CheckpointRefused(
        f"checkpoint {folder} is refused: it holds {what}; something else than Shardloom wrote it, "
        "or it was tampered with. Use another checkpoint"
    )


def assign_writes(items: Iterable[WriteItem], place: int, num_places: int) -> list[WriteItem]:
    """Those of `items` that the rank at `place` writes, of `num_places` that hold the same.

    Each of them divides the items alike: the largest first, to whom has the fewest bytes.
    """
    found = []
    holders = [(0, holder) for holder in range(num_places)]
    by_size = sorted(items, key=lambda i: (-num_bytes_of(i), i.index.fqn, i.index.offset or ()))
    for item in by_size:
        num_bytes, holder = holders[0]
        heapq.heapreplace(holders, (num_bytes + num_bytes_of(item), holder))
        if holder == place:
            found.append(item)
    return found


class SharePlanner(DefaultSavePlanner):
    """Saves of a state what is this rank's to write: no piece is another rank's as well."""

    def __init__(self, groups: MeshGroups) -> None:
        super().__init__()
        replicas = groups.mesh.replica_groups[groups.shard_index]
        self._copy = replicas.index(groups.rank), len(replicas)
        self._rank = groups.rank, groups.layout.world_size

    def create_local_plan(self) -> SavePlan:
        """The share of what this rank holds. Not collective."""
        held = super().create_local_plan()
        whole = [item for item in held.items if item.type != WriteItemType.SHARD]
        # Of a table with few rows several ranks of a sharding group hold none.
        shards = [i for i in held.items if i.type == WriteItemType.SHARD and num_bytes_of(i)]
        items = assign_writes(shards, *self._copy) + assign_writes(whole, *self._rank)
        # Rank 0 joins those of all ranks.
        names = {item.index.fqn: held.planner_data[item.index.fqn] for item in items}
        self.plan = replace(held, items=items, planner_data=names)
        return self.plan


class StagedPlanner(DefaultSavePlanner):
    """Saves what this rank's `share` names, taking it from `copies` instead of a state."""

    def __init__(
        self, share: SavePlan, copies: Mapping[MetadataIndex, torch.Tensor | bytes]
    ) -> None:
        super().__init__()
        self._share = share
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """The share, in which no piece is that of another rank as well."""
        self.plan = self._share
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        copy = self._copies[write_item.index]
        return io.BytesIO(copy) if isinstance(copy, bytes) else copy


def lock_exactly() -> None:
    """Let page-locked memory of more than 256 MiB take as much as was asked for.

    Torch rounds the rest up to a power of two, to use it again. What the user has set of this
    (`PYTORCH_ALLOC_CONF`) stays, and so do all other settings.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    if "pinned_max" not in settings:
        # Not pinned_max_round_threshold_mb: what is not rounded must not be used again, as torch
        # takes it for larger than it is (pytorch#192722).
        exactly = "pinned_max_cached_size_mb:256"
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, exactly))))


class Staging:
    """Copies of what this rank writes. One save at a time: the next one fills the same buffers."""

    def __init__(self, groups: MeshGroups) -> None:
        if groups.device.type == "cuda":
            lock_exactly()
        self._groups = groups
        self._share: SavePlan | None = None
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, state: dict[str, Any]) -> StagedPlanner:
        """Copy this rank's share of `state`. Later ones have the same names and shapes."""
        live = SharePlanner(self._groups)
        live.set_up_planner(state)
        share = self._share = self._share or live.create_local_plan()
        copies = {item.index: self._copy(item, live.resolve_data(item)) for item in share.items}
        if self._groups.device.type == "cuda":
            torch.cuda.synchronize(self._groups.device)
        return StagedPlanner(share, copies)

    def _copy(self, item: WriteItem, value: torch.Tensor | io.BytesIO) -> torch.Tensor | bytes:
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(value, io.BytesIO), "DCP hands objects over as bytes"
            return value.getvalue()
        assert isinstance(value, torch.Tensor), "DCP hands everything else over as tensors"
        buffer = self._buffers.get(item.index)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[item.index] = buffer
        return buffer.copy_(value, non_blocking=True)

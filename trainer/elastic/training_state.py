"""What a checkpoint holds of a model and its optimizers, whatever way the tables are sharded.

Every tensor is stored by its name and by its place in the whole: a table's weights by row and
column, so that any (T, L, placement) and any sharding type can load them. What TorchRec's state
dicts do not give in that form, the row-wise moments of column shards, is brought into it here
(`trainer.elastic.column_shards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.optim.keyed import CombinedOptimizer

from trainer.elastic import checkpoint
from trainer.elastic.checkpoint import CheckpointError
from trainer.elastic.column_shards import Columns, moment_key, moments_of, stored_columns
from trainer.parallel.two_d import TwoDParallel

_TABLE_STATE = "optim.state.sparse_."
_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class RowMoments:
    """Row-wise moments of one shard of a table on this rank.

    `values` [rows of the shard] is the live tensor; `key` names the moments of whole rows of the
    table, which has `num_rows` rows and the columns `whole`.
    """

    key: str
    num_rows: int
    whole: Columns
    columns: Columns
    row_offset: int
    values: torch.Tensor

    @property
    def place(self) -> tuple[int, int]:
        """First row and number of rows."""
        return self.row_offset, self.values.numel()


def state_to_save(model: TwoDParallel, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """Everything of `model` and `optimizer`, live, by the names that a checkpoint has for it."""
    state, moments = _named_state(model, optimizer)
    tensors = _MomentTensors(model.groups.device_mesh)
    for each in moments:
        tensors.add(each, each.columns, each.values)
    return state | tensors.by_key()


def load_state(folder: Path, model: TwoDParallel, optimizer: CombinedOptimizer) -> None:
    """Fill `model` and `optimizer` in place from the checkpoint in `folder`. Collective.

    State that a first step would create must exist. Raises `CheckpointError` on every rank when
    the checkpoint holds other tables, shapes or optimizer state.
    """
    state, moments = _named_state(model, optimizer)
    sizes = _stored_sizes(folder)
    _refuse(folder, [*_misfits(state, sizes), *_moment_misfits(moments, sizes)])
    tensors = _MomentTensors(model.groups.device_mesh)
    sources = [(each, _read(each, sizes, tensors)) for each in moments]
    checkpoint.load(folder, state | tensors.by_key())
    for each, stored in sources:
        if each.columns not in stored:
            each.values.copy_(moments_of(each.columns, stored))


def _named_state(
    model: TwoDParallel, optimizer: CombinedOptimizer
) -> tuple[dict[str, Any], list[RowMoments]]:
    """State by its name in a checkpoint, and apart from it the row-wise moments of tables."""
    weights = model.state_dict()
    state: dict[str, Any] = {f"model.{name}": value for name, value in weights.items()}
    row_wise: dict[str, torch.Tensor] = {}
    for parameter, states in optimizer.state_dict()["state"].items():
        for name, value in states.items():
            key = f"optim.state.{parameter}.{name}"
            is_row_wise = key.startswith(_TABLE_STATE) and value.dim() == 1
            (row_wise if is_row_wise else state)[key] = value
    return state, list(_row_moments(model, row_wise, weights))


def _row_moments(
    model: TwoDParallel, row_wise: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Iterator[RowMoments]:
    for key, value in row_wise.items():
        parameter, table, _ = key.removeprefix(_TABLE_STATE).rsplit(".", 2)
        num_rows, num_columns = weights[parameter].shape
        whole = Columns(0, num_columns)
        if not isinstance(value, DTensor):
            yield RowMoments(key, num_rows, whole, whole, 0, value)
            continue
        for shard in model.table_shards():
            if shard.table != table or not shard.weight.numel():
                continue
            columns = Columns(shard.column_offset, shard.column_offset + shard.weight.shape[1])
            (values,) = shard.states.values()
            yield RowMoments(key, num_rows, whole, columns, shard.row_offset, values)


class _MomentTensors:
    """Tensors [rows] that exchange moments with a checkpoint, put together shard by shard."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._num_rows: dict[str, int] = {}
        self._chunks: dict[str, dict[tuple[int, int], torch.Tensor]] = {}

    def add(self, moments: RowMoments, columns: Columns, values: torch.Tensor) -> torch.Tensor:
        """Exchange the rows of `moments`, but those of `columns`, by `values`; gives what is used.

        That is an earlier tensor where another column shard with the same rows has brought one.
        """
        key = moment_key(moments.key, columns, moments.whole)
        self._num_rows[key] = moments.num_rows
        return self._chunks.setdefault(key, {}).setdefault(moments.place, values)

    def by_key(self) -> dict[str, DTensor]:
        """What DCP takes, by key."""
        return {key: self._tensor(self._num_rows[key], c) for key, c in self._chunks.items()}

    def _tensor(self, num_rows: int, chunks: Mapping[tuple[int, int], torch.Tensor]) -> DTensor:
        offsets = [(row_offset,) for row_offset, _ in chunks]
        return DTensor.from_local(
            LocalShardsWrapper(list(chunks.values()), offsets),
            self._mesh,
            (Replicate(), Shard(0)),
            run_check=False,
            shape=torch.Size([num_rows]),
            stride=(1,),
        )


def _read(
    moments: RowMoments, sizes: Mapping[str, torch.Size], tensors: _MomentTensors
) -> dict[Columns, torch.Tensor]:
    """Ask for every stored range that shares columns; where each will be, by its columns."""
    into = {}
    for columns in stored_columns(moments.key, moments.whole, sizes):
        if not moments.columns.num_shared(columns):
            continue
        is_same = columns == moments.columns
        values = moments.values if is_same else torch.empty_like(moments.values)
        into[columns] = tensors.add(moments, columns, values)
    return into


def _stored_sizes(folder: Path) -> dict[str, torch.Size]:
    """Size of each tensor in a checkpoint. Collective: rank 0 reads; raises `CheckpointError`."""
    box: list[dict[str, torch.Size] | OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            stored = FileSystemReader(folder).read_metadata().state_dict_metadata
            box[0] = {k: v.size for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}
        except OSError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if not isinstance(box[0], dict):
        raise CheckpointError(f"checkpoint {folder.name} could not be read: {box[0]}")
    return box[0]


def _misfits(state: Mapping[str, Any], sizes: Mapping[str, torch.Size]) -> Iterator[str]:
    """What keeps `state` from being loaded out of tensors of `sizes`, in words."""
    for key, value in state.items():
        if key not in sizes:
            yield f"it has no {_spoken(key)}"
        elif sizes[key] != value.size():
            yield (
                f"{_spoken(key)} is {_shape(sizes[key])} in the checkpoint and "
                f"{_shape(value.size())} in this job"
            )


def _moment_misfits(
    moments: Iterable[RowMoments], sizes: Mapping[str, torch.Size]
) -> Iterator[str]:
    for each in moments:
        stored = stored_columns(each.key, each.whole, sizes)
        found = {sizes[moment_key(each.key, columns, each.whole)] for columns in stored}
        num_shared = sum(each.columns.num_shared(columns) for columns in stored)
        if not stored:
            yield f"it has no {_spoken(each.key)}"
        elif found != {torch.Size([each.num_rows])} or num_shared != each.columns.width:
            ranges = ", ".join(f"{c.start} to {c.stop - 1}" for c in stored)
            shapes = " and ".join(sorted(map(_shape, found)))
            yield (
                f"{_spoken(each.key)} is {shapes} for columns {ranges} in the checkpoint; this job "
                f"needs [{each.num_rows}] for columns {each.columns.start} to "
                f"{each.columns.stop - 1}"
            )


def _spoken(key: str) -> str:
    """What a person calls the tensor `key`."""
    parts = key.split(".")
    if key.startswith(_TABLE_STATE):
        return f"optimizer state of table {parts[-2]}"
    if "embedding_bags" in parts or "embeddings" in parts:
        return f"table {parts[-2]}"
    return key


def _shape(size: torch.Size) -> str:
    return str(list(size))


def _refuse(folder: Path, problems: Sequence[str]) -> None:
    """Raise `CheckpointError` on every rank when any has `problems`. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(problems))
    found = list(dict.fromkeys(problem for problems in everyone for problem in problems))
    if not found:
        return
    listed = "; ".join(found[:_MAX_PROBLEMS])
    more = f"; and {len(found) - _MAX_PROBLEMS} more" if len(found) > _MAX_PROBLEMS else ""
    raise CheckpointError(
        f"checkpoint {folder.name} does not fit this job: {listed}{more}. Tables, model and "
        "optimizers must be those that wrote it; sharding, workers and placement may differ"
    )

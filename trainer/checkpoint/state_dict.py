"""What a checkpoint holds of a model and its optimizers, whatever way the tables are sharded.

Every tensor is stored by its name and by its place in the whole: a table's weights by row and
column, so that any (T, L, placement) and any sharding type can load them. What TorchRec's state
dicts do not give in that form is the row-wise moments of column shards.

Row-wise AdaGrad keeps one number a row, v, to which each step adds the mean of g^2 over the
*columns of the shard*. A table in C column shards thus has C moments a row. A checkpoint stores the
moments of each column range under a key of its own, and those of a whole row under the plain key.
Loaded into other columns, v becomes the mean over them, each column counting with the v of the
range that it was stored in. So moments of

- the same columns are loaded bitwise;
- several ranges loaded into their union are what the union would have had with the same gradients,
  because a mean of means weighted by width is the mean (up to one rounding);
- a range loaded into parts of it are the same for each part, the mean being all that is known.

Going from whole rows to columns and back is bitwise, too: the mean of equal numbers is formed in
fp64, where it is exact.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.optim.keyed import CombinedOptimizer

from trainer.checkpoint import save_load
from trainer.checkpoint.files import Folder
from trainer.checkpoint.remote_io import reader_for
from trainer.checkpoint.save_load import CheckpointError, CheckpointMismatch, CheckpointRefused
from trainer.parallel.model import TwoDParallel
from trainer.parallel.sharding import ids_by_table, misfits, settle
from trainer.spec.training import WarmStartSpec

METERS = "meters"
"""Key of what the metrics took in since the last report (`pack`)."""
_TABLE_STATE, _DENSE_STATE = "optim.state.sparse_.", "optim.state.dense_."
# Where TorchRec keeps tables by name, and the ids of dynamic ones.
_TABLE_MODULES = frozenset({"embedding_bags", "embeddings", "_managed_collision_modules"})
_MAX_PROBLEMS = 5
_SUFFIX = re.compile(r"\.columns_(\d+)_(\d+)$")


def _num_shared(columns: range, others: range) -> int:
    return len(range(max(columns.start, others.start), min(columns.stop, others.stop)))


def moment_key(key: str, columns: range, whole: range) -> str:
    """Where a checkpoint keeps the moments of `columns`; `key` is that of whole rows."""
    return key if columns == whole else f"{key}.columns_{columns.start}_{columns.stop}"


def stored_columns(key: str, whole: range, stored_keys: Iterable[str]) -> list[range]:
    """The column ranges whose moments a checkpoint holds, in order; `key` is that of whole rows."""
    ranges = []
    for stored in stored_keys:
        if stored == key:
            ranges.append(whole)
        elif stored.startswith(key) and (found := _SUFFIX.fullmatch(stored, len(key))):
            ranges.append(range(int(found[1]), int(found[2])))
    return sorted(ranges, key=lambda columns: columns.start)


def moments_of(wanted: range, stored: Mapping[range, torch.Tensor]) -> torch.Tensor:
    """Moments [rows] fp64 of the columns `wanted`, from the [rows] of each range that shares any.

    The ranges must cover `wanted` and not overlap.
    """
    terms = [values.double() * _num_shared(wanted, columns) for columns, values in stored.items()]
    return torch.stack(terms).sum(0) / len(wanted)


@dataclass(frozen=True)
class RowMoments:
    """Row-wise moments of one shard of a table on this rank.

    `values` [rows of the shard] is the live tensor; `key` names the moments of whole rows of the
    table, which has `num_rows` rows and the columns `whole`.
    """

    key: str
    num_rows: int
    whole: range
    columns: range
    row_offset: int
    values: torch.Tensor


def state_to_save(model: TwoDParallel, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """Everything of `model` and `optimizer`, live, by the names that a checkpoint has for it.

    Dynamic tables first admit the ids that they have seen: what they keep apart is not stored.
    """
    settle(model)
    state, moments = _named_state(model, optimizer)
    tensors, whole = _MomentTensors(model.groups.device_mesh), model.data_parallel_tables()
    for each in moments:
        if table_of(each.key, whole):  # no shard: all ranks have the same
            state[each.key] = each.values
        else:
            tensors.add(each, each.columns, each.values)
    return state | tensors.by_key()


def load_state(
    folder: Folder,
    model: TwoDParallel,
    optimizer: CombinedOptimizer,
    part: WarmStartSpec | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill `model` and `optimizer`, or `part` of them, in place from the checkpoint in `folder`.

    Collective; storage is waited for in `group` (all ranks; default: the default group).
    Raises `CheckpointMismatch` on every rank when the checkpoint holds other tables, shapes,
    buckets of dynamic ids or optimizer state.
    """
    state, moments = _named_state(model, optimizer)
    tables = {table for sharded in model.group_plan.plan.values() for table in sharded}
    if part is not None:
        state = {key: value for key, value in state.items() if _is_in(part, key, tables)}
        moments = [each for each in moments if _is_in(part, each.key, tables)]
    try:
        sizes = save_load.of_first(lambda: stored_sizes(folder), group)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder.name} could not be read: {error}") from error
    state = dict(_without_unused(state, sizes))
    _raise_mismatch(folder, _problems(state, moments, sizes, tables))
    tensors = _MomentTensors(model.groups.device_mesh)
    sources = [(each, _read(each, sizes, tensors)) for each in moments]
    save_load.load(folder, state | tensors.by_key(), group)
    for each, stored in sources:
        if each.columns not in stored:
            each.values.copy_(moments_of(each.columns, stored))
    model.drop_caches()
    _raise_mismatch(folder, misfits(model))
    for _, ids in ids_by_table(model):
        ids.reload()


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Small tensors as one object in a checkpoint, whose sizes may differ from save to save."""
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def load_packed(
    folder: Folder, key: str, group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """What `pack` made of the tensors at `key`. Collective."""
    state: dict[str, Any] = {key: b""}
    save_load.load(folder, state, group)
    try:
        return torch.load(io.BytesIO(state[key]), weights_only=True)  # noqa: TID251
    except Exception as error:  # whatever the content makes the reader raise
        raise save_load.refused(folder, error) from error


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
    shards = defaultdict(list)
    for shard in model.table_shards():
        shards[shard.table].append(shard)
    for key, value in row_wise.items():
        parameter, table, _ = key.removeprefix(_TABLE_STATE).rsplit(".", 2)
        num_rows, num_columns = weights[parameter].shape
        whole = range(num_columns)
        if not isinstance(value, DTensor):
            yield RowMoments(key, num_rows, whole, whole, 0, value)
            continue
        for shard in shards[table]:
            if not shard.weight.numel():
                continue
            columns = range(shard.column_offset, shard.column_offset + shard.weight.shape[1])
            (values,) = shard.states.values()  # what is row-wise has one, by another name
            yield RowMoments(key, num_rows, whole, columns, shard.row_offset, values)


class _MomentTensors:
    """Tensors [rows] that exchange moments with a checkpoint, put together shard by shard."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._num_rows: dict[str, int] = {}
        self._chunks: dict[str, dict[tuple[int, int], torch.Tensor]] = {}

    def add(self, moments: RowMoments, columns: range, values: torch.Tensor) -> torch.Tensor:
        """Exchange the rows of `moments`, but those of `columns`, by `values`; gives what is used.

        That is an earlier tensor where another column shard with the same rows has brought one.
        """
        key = moment_key(moments.key, columns, moments.whole)
        self._num_rows[key] = moments.num_rows
        place = (moments.row_offset, moments.values.numel())
        return self._chunks.setdefault(key, {}).setdefault(place, values)

    def by_key(self) -> dict[str, DTensor]:
        return {
            key: DTensor.from_local(
                LocalShardsWrapper(list(chunks.values()), [(start,) for start, _ in chunks]),
                self._mesh,
                (Replicate(), Shard(0)),
                run_check=False,
                shape=torch.Size([self._num_rows[key]]),
                stride=(1,),
            )
            for key, chunks in self._chunks.items()
        }


def _read(
    moments: RowMoments, sizes: Mapping[str, torch.Size], tensors: _MomentTensors
) -> dict[range, torch.Tensor]:
    """Ask for every stored range that shares columns; where each will be, by its columns."""
    into = {}
    for columns in stored_columns(moments.key, moments.whole, sizes):
        if not _num_shared(moments.columns, columns):
            continue
        is_same = columns == moments.columns
        values = moments.values if is_same else torch.empty_like(moments.values)
        into[columns] = tensors.add(moments, columns, values)
    return into


def _without_unused(
    state: Mapping[str, Any], sizes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Any]]:
    """`state` without what early versions kept of no dense parameter that had got no gradient."""
    kept = {key.rpartition(".")[2] for key in sizes if key.startswith(_DENSE_STATE)}
    for key, value in state.items():
        is_dense = key.startswith(_DENSE_STATE) and key.rpartition(".")[2] in kept
        if key in sizes or not is_dense:
            yield key, value


def stored_sizes(folder: Folder) -> dict[str, torch.Size]:
    """Size of each tensor in a checkpoint.

    Raises `CheckpointRefused`, OSError or a `DataError`.
    """
    try:
        stored = reader_for(folder).read_metadata().state_dict_metadata
    except pickle.UnpicklingError as error:
        raise CheckpointRefused(str(error)) from error
    return {k: each.size for k, each in stored.items() if isinstance(each, TensorStorageMetadata)}


def _problems(
    state: Mapping[str, Any],
    moments: Sequence[RowMoments],
    sizes: Mapping[str, torch.Size],
    tables: Collection[str],
) -> Iterator[str]:
    """What keeps `state` and `moments` from being loaded out of tensors of `sizes`, in words."""
    there = {table for key in sizes if (table := name_in_table_place(key))}
    missing = {table for key in state if (table := table_of(key, tables))} - there
    yield from (f"it has no table {table}" for table in sorted(missing))
    if missing:
        yield f"its tables are {', '.join(sorted(there)) or 'none'}"
    for key, value in state.items():
        if table_of(key, tables) in missing:
            continue
        if key not in sizes:
            yield f"it has no {_describe(key, tables)}"
        elif sizes[key] != value.size():
            yield (
                f"{_describe(key, tables)} is {list(sizes[key])} in the checkpoint and "
                f"{list(value.size())} in this job"
            )

    for each in moments:
        if table_of(each.key, tables) in missing:
            continue
        stored = stored_columns(each.key, each.whole, sizes)
        found = {sizes[moment_key(each.key, columns, each.whole)] for columns in stored}
        num_shared = sum(_num_shared(each.columns, columns) for columns in stored)
        if not stored:
            yield f"it has no {_describe(each.key, tables)}"
        elif found != {torch.Size([each.num_rows])} or num_shared != len(each.columns):
            ranges = ", ".join(f"{c.start} to {c.stop - 1}" for c in stored)
            shapes = " and ".join(sorted(str(list(size)) for size in found))
            yield (
                f"{_describe(each.key, tables)} is {shapes} for columns {ranges} in the "
                f"checkpoint; this job needs [{each.num_rows}] for columns {each.columns.start} to "
                f"{each.columns.stop - 1}"
            )


def table_of(key: str, tables: Collection[str]) -> str | None:
    """Which of `tables` the tensor `key` of a checkpoint belongs to; None for the dense part."""
    # Modules of a user's own may have the names of TorchRec's, and hold anything.
    return name if (name := name_in_table_place(key)) in tables else None


def name_in_table_place(key: str) -> str | None:
    """The table, if it is one, that the tensor `key` belongs to, by the name of its module."""
    parts = _SUFFIX.sub("", key).split(".")
    is_weight = not (key.startswith(_DENSE_STATE) or _TABLE_MODULES.isdisjoint(parts[-3:-2]))
    return parts[-2] if is_weight or key.startswith(_TABLE_STATE) else None


def _is_in(part: WarmStartSpec, key: str, tables: Collection[str]) -> bool:
    """Whether a warm start takes the tensor `key` of a checkpoint."""
    table = table_of(key, tables)
    if table is None:
        return part.dense
    return part.tables is None or table in part.tables


def _describe(key: str, tables: Collection[str]) -> str:
    """The tensor `key` in words."""
    table = table_of(key, tables)
    if table is None:
        return key
    return f"optimizer state of table {table}" if key.startswith(_TABLE_STATE) else f"table {table}"


def _raise_mismatch(folder: Folder, problems: Iterable[str]) -> None:
    """Raise `CheckpointError` on every rank when any has `problems`. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(problems))
    found = list(dict.fromkeys(problem for problems in everyone for problem in problems))
    if not found:
        return
    listed = "; ".join(found[:_MAX_PROBLEMS])
    more = f"; and {len(found) - _MAX_PROBLEMS} more" if len(found) > _MAX_PROBLEMS else ""
    raise CheckpointMismatch(
        f"checkpoint {folder.name} does not fit this job: {listed}{more}. Tables, model and "
        "optimizers must be those that wrote it; sharding, workers and placement may differ"
    )

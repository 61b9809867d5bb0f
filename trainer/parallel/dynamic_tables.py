"""Dynamic tables sharded: TorchRec's collections over `trainer.parallel.dynamic_ids`.

Collectives: TorchRec's input and output distribution over the *sharding group* at each lookup;
`read_metrics` makes one all-reduce over all ranks. The others make none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from trainer.parallel.dynamic_ids import BucketedIds, Tally, mix


class _FreshRows(BaseShardedManagedCollisionEmbeddingCollection):
    """TorchRec's sharded collections, with admitted rows that start anew on any device.

    TorchRec resets them by a CUDA kernel, and draws their weights from the generator of the
    process, whose state no checkpoint has.
    """

    @torch.no_grad()
    def _evict(self, evictions_per_table: dict[str, torch.Tensor | None]) -> None:
        for table, rows in evictions_per_table.items():
            if rows is not None:
                self._start_anew(table, rows)

    def _start_anew(self, table: str, rows: torch.Tensor) -> None:
        kernel, index = self._table_to_tbe_and_index[table]
        weight = kernel.split_embedding_weights()[int(index)]
        ids = self.ids_of(table)
        config = self._embedding_module._table_name_to_config[table]
        first = self._managed_collision_collection._table_to_offset[table]
        bound = config.num_embeddings**-0.5
        shares = uniform(rows + first, weight.shape[1], int(ids._current_iter_tensor.item()))
        weight[rows] = ((2 * shares - 1) * bound).to(weight.dtype)
        states = kernel.get_optimizer_state()
        for state in states[int(index)].values() if states else ():
            state[rows] = 0

    def ids_of(self, table: str) -> BucketedIds:
        """The ids of this rank's shard of a table."""
        found = self._managed_collision_collection._managed_collision_modules[table]
        assert isinstance(found, BucketedIds)
        return found

    def settle(self) -> None:
        """Admit what was seen since the last admission."""
        modules = self._managed_collision_collection._managed_collision_modules
        for module in modules.values():
            assert isinstance(module, BucketedIds)
            module.admit()
        self._evict(self._managed_collision_collection.evict())


def uniform(rows: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """float32 [n, dim] in [0, 1), a function of (step, row, column) alone: int64 [n] rows."""
    columns = torch.arange(dim, device=rows.device)
    places = mix((rows[:, None] * dim + columns) ^ mix(torch.tensor(step, device=rows.device)))
    return (places >> 38).float() / 2**24


class ShardedDynamicBags(_FreshRows, ShardedManagedCollisionEmbeddingBagCollection):
    """Dynamic tables of pooled features."""


class ShardedDynamicLists(_FreshRows, ShardedManagedCollisionEmbeddingCollection):
    """Dynamic tables of sequences."""


class DynamicBagSharder(ManagedCollisionEmbeddingBagCollectionSharder):
    """Sharder of dynamic tables of pooled features: row-wise, which is all that TorchRec has."""

    def __init__(self, bags: EmbeddingBagCollectionSharder) -> None:
        super().__init__(bags, ManagedCollisionCollectionSharder())

    def shard(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicBags:
        """Shard `module` over the sharding group of `env`. Collective over all ranks."""
        on = device or torch.device("cuda")
        return ShardedDynamicBags(module, params, self._e_sharder, self._mc_sharder, env, on)


class DynamicListSharder(ManagedCollisionEmbeddingCollectionSharder):
    """Sharder of dynamic tables of sequences: row-wise."""

    def __init__(self, lists: EmbeddingCollectionSharder) -> None:
        super().__init__(lists, ManagedCollisionCollectionSharder())

    def shard(
        self,
        module: ManagedCollisionEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedDynamicLists:
        """Shard `module` over the sharding group of `env`. Collective over all ranks."""
        on = device or torch.device("cuda")
        return ShardedDynamicLists(module, params, self._e_sharder, self._mc_sharder, env, on)


def sharded_tables(model: nn.Module) -> Iterator[_FreshRows]:
    """Collections of dynamic tables in `model`."""
    return (each for each in model.modules() if isinstance(each, _FreshRows))


def ids_by_table(model: nn.Module) -> Iterator[tuple[str, BucketedIds]]:
    """(table, ids of this rank's shard) of every dynamic table."""
    for collection in sharded_tables(model):
        modules = collection._managed_collision_collection._managed_collision_modules
        yield from ((table, collection.ids_of(table)) for table in modules)


def settle(model: nn.Module) -> None:
    """Let every dynamic table admit what it has seen: before its ids are saved."""
    for each in sharded_tables(model):
        each.settle()


def misfits(model: nn.Module) -> list[str]:
    """What keeps the ids that this rank has loaded from being used, in words."""
    return [
        f"the ids of table {table} were written with another dynamic.num_buckets than "
        f"{ids.buckets()}, or are damaged"
        for table, ids in ids_by_table(model)
        if not ids.has_sound_places()
    ]


def reload(model: nn.Module) -> None:
    """Take the ids of every dynamic table as they are: after they were loaded."""
    for each in model.modules():
        if isinstance(each, BucketedIds):
            each.reload()


def read_metrics(model: nn.Module, device: torch.device) -> dict[str, float]:
    """How full each dynamic table is, and what happened since the last call, by metric name.

    `fill` is the share of the rows that belong to an id, `shared` that of the lookups by ids
    without a row; `admitted` and `evicted` count ids. All-reduces over all ranks; none without
    dynamic tables.
    """
    found = list(ids_by_table(model))
    if not found:
        return {}
    rows = [
        [*map(int, astuple(ids.tally)), ids.num_own_rows, int(ids.open_slots())] for _, ids in found
    ]
    totals = torch.tensor(rows, dtype=torch.int64, device=device)
    dist.all_reduce(totals)
    values = {}
    for (table, ids), total in zip(found, totals.tolist(), strict=True):
        num_lookups, num_shared, num_admitted, num_evicted, num_rows, num_free = total
        values[f"dynamic/{table}/fill"] = 1 - num_free / num_rows
        values[f"dynamic/{table}/shared"] = num_shared / max(1, num_lookups)
        values[f"dynamic/{table}/admitted"] = float(num_admitted)
        values[f"dynamic/{table}/evicted"] = float(num_evicted)
        ids.tally = Tally()
    return values

"""Sharding: TorchRec's sharders for every kind of table, and the sharded model of a job.

The stock sharders hide row-wise, table-row-wise and grid sharding from the planner on CPU, though
they work there; and they average the gradients of data-parallel tables over all T ranks, also in
2D. Here each sharding group averages its own, as it does for every other table, and the replicas
meet at syncs. Dynamic tables are TorchRec's collections over `trainer.models.managed_collision`.

Collectives: TorchRec's input and output distribution over the *sharding group* at each lookup; one
all-reduce (AVG) of the gradients of data-parallel tables over the *sharding group* in each backward
pass.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from functools import cache, partial
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.mc_embedding import (
    ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection,
)
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from trainer.layout.cost import Cluster
from trainer.models.managed_collision import BucketedIds, Tally, mix
from trainer.models.networks import build_model
from trainer.parallel.collectives import Part
from trainer.parallel.mesh import MeshGroups
from trainer.parallel.model import TwoDParallel, compile_networks
from trainer.parallel.optimizer import fused_optimizer_params
from trainer.parallel.planner import PlanError, make_plan, table_plans
from trainer.parallel.row_store import weight_rows
from trainer.protocol import events
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import AllToAllSpec
from trainer.spec.tables import SEQUENCE_SHARDING_TYPES, ShardingTypeName

_COMM_TYPES = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


def build_parallel_model(
    spec: JobSpec, groups: MeshGroups, cluster: Cluster | None = None
) -> tuple[TwoDParallel, list[events.TablePlan]]:
    """The sharded model and how each table is sharded. Collective over all ranks.

    `cluster` is what is known of the hosts. Dense parameters start from the seed alone; each shard
    from the seed and its own index, and the copies of a shard are made equal.
    """
    if spec.training.dense_compile:
        _check_compiler(groups.device)
    torch.manual_seed(spec.training.seed)
    model = build_model(spec, groups.device)
    table_sharders = sharders(spec)
    plan = make_plan(model, spec, groups, table_sharders, cluster)
    torch.manual_seed(spec.training.seed + 1 + groups.shard_index)
    parallel = TwoDParallel(model, groups, plan, table_sharders, spec)
    if spec.training.dense_compile:
        compile_networks(parallel.module)
    return parallel, table_plans(plan, spec)


def _check_compiler(device: torch.device) -> None:
    """Raise `PlanError` where torch.compile has nothing to compile with."""
    # They take seconds to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        missing = "a C++ compiler"
    else:
        if device.type == "cpu" or has_triton():
            return
        missing = "Triton"
    raise PlanError(
        f"training.dense_compile needs {missing} on the host of every worker, and there is none "
        f"on {socket.gethostname()}; install it in the image of the workers, or set it to false"
    )


def sharders(spec: JobSpec) -> list[ModuleSharder[nn.Module]]:
    """Sharders of every embedding module that a model may hold.

    Tables in host memory are pinned there: managed memory would move to the GPU by pages.
    """
    fused_params = fused_optimizer_params(spec.optimizer.sparse, spec.moment_scale)
    fused_params["uvm_host_mapped"] = True
    codecs = _codecs(spec.parallelism.all_to_all)
    bags = BagSharder(fused_params, codecs)
    lists = SequenceSharder(fused_params, codecs)
    return [
        bags,
        lists,
        DynamicBagSharder(bags, ManagedCollisionCollectionSharder()),
        DynamicListSharder(lists, ManagedCollisionCollectionSharder()),
    ]


def _codecs(precision: AllToAllSpec) -> dict[str, QuantizedCommCodecs] | None:
    """How embeddings and their gradients are packed on their way; None where both are fp32.

    Row-wise reduce-scatters add up in this precision too.
    """
    config = QCommsConfig(
        forward_precision=_COMM_TYPES[precision.forward],
        backward_precision=_COMM_TYPES[precision.backward],
    )
    # For CPU TorchRec takes fp16 where bf16 is asked for, as if gloo had no bf16. It has.
    return get_qcomm_codecs_registry(config, device=torch.device("cuda"))


class GroupShardedBags(ShardedEmbeddingBagCollection):
    """Sharded EmbeddingBagCollection whose data-parallel tables are averaged over its group."""

    def init_data_parallel(self) -> None:
        """Wrap the data-parallel lookups by DDP. Collective over the sharding group."""
        assert isinstance(self._env, ShardingEnv2D)
        for index, sharding in enumerate(self._embedding_shardings):
            if isinstance(sharding, DpPooledEmbeddingSharding):
                self._lookups[index] = DistributedDataParallel(
                    self._lookups[index],
                    device_ids=[self._device] if self._device.type == "cuda" else None,
                    process_group=self._env.sharding_pg,
                    gradient_as_bucket_view=True,
                    static_graph=True,
                )


class BagSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that train exactly, whatever the device."""
        return list(get_args(ShardingTypeName))

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> GroupShardedBags:
        """Shard `module` over the sharding group of `env`. Collective over all ranks."""
        return GroupShardedBags(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


class SequenceSharder(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SEQUENCE_SHARDING_TYPES)


class _DynamicTables(BaseShardedManagedCollisionEmbeddingCollection):
    """TorchRec's sharded collections, with admitted rows that are reset on any device.

    TorchRec resets them by a CUDA kernel, and draws their weights from the generator of the
    process, whose state no checkpoint has.
    """

    @torch.no_grad()
    def _evict(self, evictions_per_table: dict[str, torch.Tensor | None]) -> None:
        # Each call splits all tables of a kernel.
        split = cache(lambda each: (each.split_embedding_weights(), each.get_optimizer_state()))
        for table, rows in evictions_per_table.items():
            if rows is None:
                continue
            kernel, index = self._table_to_tbe_and_index[table]
            index = int(index)
            weights, states = split(kernel)
            weight = weights[index]
            config = self._embedding_module._table_name_to_config[table]
            first = self._managed_collision_collection._table_to_offset[table]
            bound = config.num_embeddings**-0.5
            shares = uniform(
                rows + first, weight.shape[1], int(self.ids[table]._current_iter_tensor.item())
            )
            values = ((2 * shares - 1) * bound).to(weight.dtype)
            weight_rows(kernel, index, weight).write(values, rows)
            for state in states[index].values() if states else ():
                state[rows] = 0

    @property
    def ids(self) -> Mapping[str, BucketedIds]:
        """The ids of this rank's shard of each table."""
        found: Any = self._managed_collision_collection._managed_collision_modules
        return found

    def settle(self) -> None:
        """Admit what was seen since the last admission."""
        for ids in self.ids.values():
            ids.admit()
        self._evict(self._managed_collision_collection.evict())


def uniform(rows: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """float32 [n, dim] in [0, 1), a function of (step, row, column) alone: int64 [n] rows."""
    columns = torch.arange(dim, device=rows.device)
    places = mix((rows[:, None] * dim + columns) ^ mix(torch.tensor(step, device=rows.device)))
    return (places >> 38).float() / 2**24


class ShardedDynamicBags(_DynamicTables, ShardedManagedCollisionEmbeddingBagCollection):
    """Dynamic tables of pooled features."""


class ShardedDynamicLists(_DynamicTables, ShardedManagedCollisionEmbeddingCollection):
    """Dynamic tables of sequences."""


class _DynamicSharder:
    """Shards dynamic tables row-wise, which is all that TorchRec has, into `sharded_type`."""

    sharded_type: type[_DynamicTables]

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        sharder: Any = self
        on = device or torch.device("cuda")
        return self.sharded_type(module, params, sharder._e_sharder, sharder._mc_sharder, env, on)


class DynamicBagSharder(_DynamicSharder, ManagedCollisionEmbeddingBagCollectionSharder):
    sharded_type = ShardedDynamicBags


class DynamicListSharder(_DynamicSharder, ManagedCollisionEmbeddingCollectionSharder):
    sharded_type = ShardedDynamicLists


def _collections(model: nn.Module) -> Iterator[_DynamicTables]:
    return (each for each in model.modules() if isinstance(each, _DynamicTables))


def ids_by_table(model: nn.Module) -> Iterator[tuple[str, BucketedIds]]:
    """(table, ids of this rank's shard) of every dynamic table."""
    for collection in _collections(model):
        yield from collection.ids.items()


def settle(model: nn.Module) -> None:
    """Let every dynamic table admit what it has seen: before its ids are saved."""
    for each in _collections(model):
        each.settle()


def misfits(model: nn.Module) -> list[str]:
    """What keeps the ids that this rank has loaded from being used, in words."""
    return [
        f"the ids of table {table} were written with another dynamic.num_buckets than "
        f"{ids.buckets()}, or are damaged"
        for table, ids in ids_by_table(model)
        if not ids.has_sound_places()
    ]


def report_parts(model: nn.Module) -> Iterator[Part]:
    """How full each dynamic table is, and what happened since the last report, by metric name.

    `fill` is the share of the rows that belong to an id, `shared` that of the lookups by ids
    without a row; `admitted` and `evicted` count ids.
    """
    for table, ids in ids_by_table(model):
        free = ids.open_slots().double()
        # Filled in on the device: a copy from the host would wait for it, as reading would.
        counts = [torch.zeros_like(free) + each for each in (*astuple(ids.tally), ids.num_own_rows)]
        ids.tally = Tally()
        yield Part(torch.cat([*counts, free]), partial(_dynamic_metrics, table))


def _dynamic_metrics(table: str, totals: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
    num_lookups, num_shared, num_admitted, num_evicted, num_rows, num_free = totals.tolist()
    return {
        f"dynamic/{table}/fill": 1 - num_free / num_rows,
        f"dynamic/{table}/shared": num_shared / max(1, num_lookups),
        f"dynamic/{table}/admitted": num_admitted,
        f"dynamic/{table}/evicted": num_evicted,
    }

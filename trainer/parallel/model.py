"""The 2D-parallel model: tables sharded over L ranks, M replicas of them, dense part by DDP.

    sharding group 0:  rank a [shard 0]   rank b [shard 1]  ...   lookups: all-to-all inside
    sharding group 1:  rank c [shard 0]   rank d [shard 1]  ...   lookups: all-to-all inside
                            |                  |
                     replica group 0     replica group 1          sync: averages the replicas

TorchRec's own DMPCollection refuses CPU; this wrapper is device-neutral. It takes the mesh of the
true topology, places a copy of the plan on this rank's sharding group and leaves the rest to
TorchRec. `trainer.parallel.sync` averages the replicas.

With `parallelism.dense: every_step` DDP averages dense gradients over all T ranks, so no group can
be a step ahead of another. With `at_sync` it averages them over the L ranks of the sharding group
only, and a sync averages the M replicas of the dense part as it does the tables (local SGD): no
collective crosses the sharding groups in between. The gradient is then a mean over L ranks instead
of T: its expectation stays, its variance is M times as high.

With `training.accumulate_steps` gradients of a window's batches add up on their ranks and are
averaged with the last of them. DDP has two ways to know parameters that get no gradient, and its
`static_graph` averages in the first pass whatever it is told: it looks for them in the graph then.

With `training.dense_precision: bf16` the forward pass runs under torch.autocast, and DDP's
gradients travel as bf16. Lookups stay as they are: neither FBGEMM nor TorchRec has kernels for
autocast. `tf32` is a setting of the process (`trainer.training.worker.prepare_process`).

With `training.dense_compile` torch.compile takes the largest modules without tables in them, each
by itself: lookups, whose sizes change with every batch, and their collectives stay as they are.
Only calls in training are compiled; a validation would compile all again, in the midst of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import comm
from torchrec.distributed.batched_embedding_kernel import (
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import (
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingEnv2D,
    ShardingPlan,
    ShardingType,
)

from trainer.parallel.mesh import MeshGroups, form_node_groups
from trainer.parallel.planner import node_size, place_plan
from trainer.parallel.row_store import FlatRows, RowStore, weight_rows
from trainer.spec.job import JobSpec


class DenseDataParallelWrapper(DefaultDataParallelWrapper):
    """Starts the dense part equal on all ranks, then wraps it by DDP over `group`, where that has
    ranks to average over and any of it is trained, as DDP insists.

    DDP itself only makes the ranks of its own group equal, and there may be M of those.
    """

    def __init__(self, groups: MeshGroups, group: dist.ProcessGroup, **options: bool) -> None:
        super().__init__(**options)
        self._groups = groups
        self._group = group

    def _ddp_wrap(
        self,
        dmp: DistributedModelParallel,
        env: ShardingEnv,
        device: torch.device,
        ddp_ignore_param_names: set[str],
    ) -> None:
        _start_equal(dmp.module, self._groups.global_group, device)
        dense = (p for name, p in dmp.named_parameters() if name not in ddp_ignore_param_names)
        if self._group.size() > 1 and any(parameter.requires_grad for parameter in dense):
            # `ShardingEnv.from_process_group` would form one more group, of ranks 0 to L - 1.
            group_env = copy(env)
            group_env.process_group = self._group
            super()._ddp_wrap(dmp, group_env, device, ddp_ignore_param_names)


@torch.no_grad()
def _start_equal(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of `group` the first one's dense part, on `device`. Collective."""
    source = dist.get_process_group_ranks(group)[0]
    # NCCL takes nothing that is on the host, where TorchRec makes some parts of its modules.
    module.to(device)
    for _, tensor in dense_part(module):
        # Contiguous, as NCCL demands and gloo takes for granted; what is expanded only once.
        once = tensor[tuple(slice(None, None if stride else 1) for stride in tensor.stride())]
        values = once.contiguous()
        dist.broadcast(values, source, group=group)
        once.copy_(values)


def _dense_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of each, once, without sharded embedding modules and what is in them."""
    sharded = {each for each in module.modules() if isinstance(each, ShardedModule)}
    return module.named_modules(sharded)  # which it takes for visited


def dense_part(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, without those of sharded embedding modules.

    `module` is the bare one (`DistributedModelParallel.module`), not wrapped by DDP.
    """
    for prefix, each in _dense_modules(module):
        yield from each.named_parameters(prefix, recurse=False)
        yield from each.named_buffers(prefix, recurse=False)


def compile_networks(module: nn.Module) -> None:
    """Let torch.compile take what `module` trains outside of its tables; names stay the same.

    The first step compiles, which takes a minute or so. Call it once tables are sharded.
    """
    for network in _networks(module):
        _compile(network)


def _networks(module: nn.Module) -> list[nn.Module]:
    """The largest modules below `module` in which no table is, once each."""
    found: dict[nn.Module, None] = {}
    for child in module.children():
        # Containers are not called themselves.
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_container or any(isinstance(each, ShardedModule) for each in child.modules()):
            found |= dict.fromkeys([] if isinstance(child, ShardedModule) else _networks(child))
        else:
            found[child] = None
    return list(found)


def _compile(network: nn.Module) -> None:
    plain = network.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    # nn.Module.compile does nothing for torch's own containers: their calls are never traced. And
    # all that it compiles shares one limit of variants, beyond which torch gives up.
    compiler: Any = torch.compile  # mypy does not know all of its options
    compiled = compiler(call, dynamic=False, isolate_recompiles=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if network.training else plain)(*args, **kwargs)

    network.forward = forward


def stored_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Buffers of the dense part that belong to its state, such as those of a BatchNorm, each once.

    As they are now, for a module may replace its buffers, and as real numbers (`as_real`).
    """
    found = [
        buffer
        for _, each in _dense_modules(module)
        for name, buffer in each.named_buffers(recurse=False)
        if name not in each._non_persistent_buffers_set
    ]
    return [as_real(buffer) for buffer in dict.fromkeys(found)]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; of a complex one a view [..., 2], whose mean and bits are those of its parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def share_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of `group` the mean of each stored buffer, or the first rank's where it is no
    floating-point number: each rank has its own, of the rows that it saw. Collective.
    """
    first = dist.get_process_group_ranks(group)[0]
    for buffer in stored_buffers(module):
        values = buffer.contiguous()  # as NCCL demands and gloo takes for granted
        if buffer.is_floating_point():
            # In float64 the sum of equal, narrower values is exact, and does not overflow.
            total = values.double()
            dist.all_reduce(total, group=group)
            values = total / dist.get_world_size(group)
        else:
            dist.broadcast(values, first, group=group)
        buffer.copy_(values)


class MeshShardingEnv(ShardingEnv2D):
    """ShardingEnv2D that finds a rank's shard in the mesh instead of computing it.

    The stock class derives it from the rank number, which only holds when ranks are numbered
    host by host; a cluster promises no such thing.
    """

    def __init__(self, groups: MeshGroups, node_size: int | None) -> None:
        super().__init__(
            sharding_pg=groups.sharding_group,
            replica_pg=groups.replica_group,
            global_pg=groups.global_group,
            device_mesh=groups.device_mesh,
            node_group_size=node_size or groups.ranks_per_host,
            use_inter_host_allreduce=groups.layout.placement == "inter_host",
        )
        self._shard_of = {
            rank: shard for group in groups.mesh.sharding_groups for shard, rank in enumerate(group)
        }

    def remap_rank(self, rank: int, sharding_type: ShardingType) -> int:
        """Position of global `rank` in its sharding group, from 0 to L - 1."""
        return self._shard_of[rank]


@dataclass(frozen=True)
class TableShard:
    """One shard of one table on this rank.

    `weight` is a view [local_rows, local_cols] of table number `kernel_index` inside an FBGEMM
    kernel; `states` are views of its optimizer state, [local_rows] or [local_rows, local_cols],
    by name. `row_offset` and `column_offset` place the shard in the whole table. Of a cached table
    `weight` is out of date where the cache has a row; `rows` has each where it is.
    """

    table: str
    kernel: SplitTableBatchedEmbeddingBagsCodegen
    kernel_index: int
    weight: torch.Tensor
    states: dict[str, torch.Tensor]
    row_offset: int
    column_offset: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """`weight`, then the optimizer state."""
        return (self.weight, *self.states.values())

    @cached_property
    def rows(self) -> tuple[RowStore, ...]:
        """The rows of `weight`, then those of the optimizer state."""
        weight = weight_rows(self.kernel, self.kernel_index, self.weight)
        return (weight, *map(FlatRows, self.states.values()))


class TwoDParallel(DistributedModelParallel):
    """A TorchRec model whose tables are sharded inside L ranks and replicated over M groups.

    Collective: every rank builds it with the same `plan` (made for one sharding group). Replicas
    start equal: the tables of each replica group are broadcast from its first rank, the dense
    parameters by DDP.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: MeshGroups,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
        spec: JobSpec,
    ) -> None:
        self.groups = groups
        self.group_plan = plan
        self._is_bf16 = spec.training.dense_precision == "bf16"
        accumulates = spec.training.accumulate_steps > 1
        at_sync = spec.parallelism.dense_policy == "at_sync"
        size = node_size(plan)
        if size is not None:
            # TorchRec keeps one pair for the whole process and forms it, if there is none, from
            # rank arithmetic that only holds when ranks are numbered host by host.
            comm._INTRA_PG_2D, comm._CROSS_PG_2D = form_node_groups(groups, size)
        super().__init__(
            module,
            env=MeshShardingEnv(groups, size),
            device=groups.device,
            plan=place_plan(plan, groups.sharding_placements),
            sharders=sharders,
            data_parallel_wrapper=DenseDataParallelWrapper(
                groups,
                groups.sharding_group if at_sync else groups.global_group,
                static_graph=not accumulates,
                find_unused_parameters=accumulates,
            ),
        )
        self._broadcast_tables()
        wrapped = self._dmp_wrapped_module
        if self._is_bf16 and isinstance(wrapped, DistributedDataParallel):
            # TorchRec's `allreduce_comm_precision` averages over the default group, not this one;
            # and torch refuses its hook by name without CUDA, as if gloo had no bf16.
            wrapped.register_comm_hook(
                wrapped.process_group, lambda group, bucket: bf16_compress_hook(group, bucket)
            )

    def averaging(self, is_on: bool) -> AbstractContextManager[None]:
        """Whether a forward and backward pass in the block averages the dense part's gradients.

        Where not they add up on each rank, until a pass averages them all; a model that does that
        was built to. Those of data-parallel tables are averaged in each.
        """
        wrapped = self._dmp_wrapped_module
        if is_on or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return cast("AbstractContextManager[None]", wrapped.no_sync())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives, its dense part computed in the precision asked for."""
        device = self.groups.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._is_bf16):
            return super().forward(*args, **kwargs)

    @torch.no_grad()
    def _broadcast_tables(self) -> None:
        """Make all replicas of every shard equal to that of the replica group's first rank.

        Data-parallel tables have no shards: all ranks take the first rank's. Collective.
        """
        source = dist.get_process_group_ranks(self.groups.replica_group)[0]
        for kernel in self.embedding_kernels():
            for weight in kernel.split_embedding_weights():
                dist.broadcast(weight, source, group=self.groups.replica_group)
        first = dist.get_process_group_ranks(self.groups.global_group)[0]
        for table in self.data_parallel_tables().values():
            dist.broadcast(table.detach(), first, group=self.groups.global_group)

    def embedding_kernels(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM kernels that hold this rank's shards, in module order."""
        return [lookup._emb_module for lookup in _lookups(self._dmp_wrapped_module)]

    def flush_caches(self) -> None:
        """Write cached rows to their tables, for who reads these as a whole."""
        for kernel in self.embedding_kernels():
            kernel.flush()

    def drop_caches(self) -> None:
        """Take tables as they are, after they were flushed and written as a whole."""
        for kernel in self.embedding_kernels():
            kernel.reset_cache_states()

    def table_shards(self) -> list[TableShard]:
        """This rank's shards in kernel order, the same on every rank of a replica group."""
        return [
            shard
            for lookup in _lookups(self._dmp_wrapped_module)
            for shard in _shards_of(lookup._emb_module, lookup._config.embedding_tables)
        ]

    def data_parallel_tables(self) -> dict[str, nn.Parameter]:
        """Tables sharded data_parallel, [num_embeddings, embedding_dim] each, by table name.

        They are whole on every rank, have ordinary gradients (averaged over the sharding group)
        and no kernel that updates them inside backward.
        """
        return {
            name: module.embedding_bags[name].weight
            for module in self._dmp_wrapped_module.modules()
            if isinstance(module, ShardedEmbeddingBagCollection)
            for name, sharding in module.module_sharding_plan.items()
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        }


def _lookups(module: nn.Module) -> Iterator[BatchedFusedEmbedding | BatchedFusedEmbeddingBag]:
    if isinstance(module, BatchedFusedEmbedding | BatchedFusedEmbeddingBag):
        yield module
        return
    # TorchRec keeps its lookups in plain lists, which nn.Module.children does not see.
    for lookup in getattr(module, "_lookups", ()):
        yield from _lookups(lookup)
    for child in module.children():
        yield from _lookups(child)


def _shards_of(
    kernel: SplitTableBatchedEmbeddingBagsCodegen, tables: Sequence[ShardedEmbeddingTable]
) -> Iterator[TableShard]:
    weights, states = kernel.split_embedding_weights(), kernel.get_optimizer_state()
    for index, (table, weight) in enumerate(zip(tables, weights, strict=True)):
        assert table.local_metadata is not None, "TorchRec places every shard that it makes"
        row, column = (*table.local_metadata.shard_offsets, 0)[:2]
        # SGD has no state at all, not even an empty entry for each table.
        state = dict(states[index]) if states else {}
        yield TableShard(table.name, kernel, index, weight, state, row, column)

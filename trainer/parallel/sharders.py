"""TorchRec's sharders, offering on every device what trains exactly there.

The stock sharders hide row-wise, table-row-wise and grid sharding from the planner on CPU, though
they work there; and they average the gradients of data-parallel tables over all T ranks, also in
2D. Here each sharding group averages its own, as it does for every other table, and the copies
meet at syncs: groups stay independent in between and the optimizer sees the same gradients
however a table is sharded.

Collectives: one all-reduce (AVG) of the gradients of data-parallel tables over the *sharding
group* in each backward pass. The rest is TorchRec's.
"""

from __future__ import annotations

from typing import Any

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
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from trainer.parallel.dynamic_tables import DynamicBagSharder, DynamicListSharder
from trainer.spec import AllToAllSpec, JobSpec

POOLED_SHARDING_TYPES = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)
SEQUENCE_SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")
_COMM_TYPES = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


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
    """Sharder of pooled tables."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that train exactly, whatever the device."""
        return list(POOLED_SHARDING_TYPES)

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
    """Sharder of tables whose vectors stay apart."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that train exactly, whatever the device."""
        return list(SEQUENCE_SHARDING_TYPES)


def sharders(spec: JobSpec, fused_params: dict[str, Any]) -> list[ModuleSharder[nn.Module]]:
    """Sharders of every embedding module that a model may hold.

    `fused_params` are FBGEMM's, the optimizer of the tables among them.
    """
    codecs = _codecs(spec.parallelism.all_to_all)
    bags = BagSharder(fused_params, codecs)
    lists = SequenceSharder(fused_params, codecs)
    return [bags, lists, DynamicBagSharder(bags), DynamicListSharder(lists)]


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

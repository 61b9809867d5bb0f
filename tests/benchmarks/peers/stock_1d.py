"""The peers of stock TorchRec: 1D over all ranks, laid out in each way that its users have, and 2D.

One DistributedModelParallel over the default group, row-wise AdaGrad fused into backward, Adam for
the dense part, DDP. Model, optimizers and batches are those of the 2D side; nothing of Shardloom
runs but the class of the batches. What differs from variant to variant is the sharding plan:

    planner          TorchRec's planner with its stock sharder, told of two hosts
    table_wise       the planner, tables whole
    column_wise      the planner, tables cut into columns
    row_wise         rows over all ranks
    table_row_wise   each table's rows over the ranks of one host
    pipelined        table_wise under TrainPipelineSparseDist
    fp16_wire        table_wise, embeddings and gradients sent as fp16 (not the same numbers: it is
                     measured, but no peer of the fp32 side)

STOCK_2D is `pipelined` in two copies, one on each host, that DMPCollection averages every 16 steps.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import model_parallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from tests.benchmarks.two_d_workload import IN_1D
from tests.benchmarks.workload import NUM_DENSE, OVER_LAYERS, Workload
from trainer.data.batches import Batch

FP16_WIRE = "fp16_wire"
VARIANTS = (
    "planner",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "pipelined",
    FP16_WIRE,
)
STOCK_2D, STOCK_2D_COPIES, STOCK_2D_SYNC_STEPS = "stock_2d", 2, 16
CPU = torch.device("cpu")
SPARSE_LR, SPARSE_EPS, DENSE_LR = 0.05, 1e-8, 1e-3


class AnySharder(EmbeddingBagCollectionSharder):
    """The stock sharder, which on CPU hides the row-wise types from the planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return super().sharding_types("cuda")


class PipelinedBatch(Batch, Pipelineable):
    """A batch that says of itself that it can be pipelined; TorchRec asks for that by class."""


class ClickModel(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._is_dlrm = isinstance(network, DLRM)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross-entropy, logits [B, 1]) of a batch."""
        # TorchRec's pipeline traces this, so that no batch can be asked what it has.
        sequences = () if self._is_dlrm else (batch.sequences,)
        logits = self.network(batch.dense, batch.sparse, *sequences)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits.detach()


class CpuDMPCollection(DMPCollection):
    """DMPCollection on CPUs, which it refuses by an assert, and by numbering them as if GPUs."""

    _source = textwrap.dedent(inspect.getsource(DMPCollection.__init__))
    _source = _source.replace('device.type == "cuda" or', 'device.type == "cpu" or')
    _source = _source.replace("super().", "super(DMPCollection, self).")
    exec(_source, vars(model_parallel) | {"DMPCollection": DMPCollection}, _made := {})
    __init__ = _made["__init__"]

    def _remap_sharding_plan(self, plan: Any, *args: Any, **options: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **options)
        for module in plan.plan.values():
            for table in module.values():
                for shard in table.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")


def fused_adagrad(lr: float, eps: float) -> dict[str, Any]:
    """What a stock sharder is told of the optimizer of the tables."""
    return {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr, "eps": eps}


def dense_adam(model: nn.Module, **options: float) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, **options))


def sharded(
    network: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    tables: list[str],
    sharding: str | None,
    device: torch.device = CPU,
    num_copies: int = 1,
) -> DistributedModelParallel:
    """The model over all ranks, by the planner; `sharding` is that of all tables. Collective.

    Copies are laid over hosts one after the other.
    """
    model = ClickModel(network)
    world_size = dist.get_world_size()
    only = ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size // num_copies,
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            compute_device=device.type,
        ),
        constraints=dict.fromkeys(tables, only) if sharding else None,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if num_copies == 1:
        return DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    return CpuDMPCollection(
        model,
        device,
        plan,
        world_size,
        world_size // num_copies,
        dist.group.WORLD,
        sharders=sharders,
        use_inter_host_allreduce=True,
    )


class StockTrainer:
    sync_s = 0.0  # of 2D not told apart

    def __init__(
        self,
        variant: str,
        workload: Workload = IN_1D,
        device: torch.device = CPU,
    ) -> None:
        kind = EmbeddingBagCollectionSharder if variant == "planner" else AnySharder
        sharder = kind(
            fused_params=fused_adagrad(SPARSE_LR, SPARSE_EPS),
            qcomm_codecs_registry=_fp16_codecs() if variant == FP16_WIRE else None,
        )
        types = dict.fromkeys(("pipelined", FP16_WIRE, STOCK_2D), "table_wise") | {"planner": None}
        self._variant, self._device = variant, device
        self._model = sharded(
            _dlrm(workload),
            [sharder],
            workload.tables,
            types.get(variant, variant),
            device,
            STOCK_2D_COPIES if variant == STOCK_2D else 1,
        )
        self._optimizer = dense_adam(self._model, lr=DENSE_LR)

    def embedding_kernels(self) -> list[Any]:
        return [
            kernel
            for module in self._model.modules()
            # TorchRec keeps its lookups in plain lists, which nn.Module.modules does not see.
            for lookup in getattr(module, "_lookups", ())
            for kernel in lookup.modules()
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
        ]

    def train(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Train a step for each item that is taken."""
        if self._variant in ("pipelined", STOCK_2D):
            yield from self._train_pipelined(batches)
        for batch in batches:
            self._optimizer.zero_grad()
            loss, _ = self._model(batch)
            loss.backward()
            self._optimizer.step()
            yield

    def _train_pipelined(self, batches: Iterator[Batch]) -> Iterator[None]:
        pipeline = TrainPipelineSparseDist(
            self._model,
            self._optimizer,
            self._device,
            dmp_collection_sync_interval_batches=STOCK_2D_SYNC_STEPS,
        )
        pipelined = (PipelinedBatch(**vars(batch)) for batch in batches)
        while True:
            pipeline.progress(pipelined)
            yield


def _dlrm(workload: Workload) -> DLRM:
    tables = [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=workload.embedding_dim,
            num_embeddings=workload.table_rows,
            feature_names=[feature],
        )
        for table, feature in zip(workload.tables, workload.features, strict=True)
    ]
    return DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=list(workload.dense_layers),
        over_arch_layer_sizes=list(OVER_LAYERS),
    )


def _fp16_codecs() -> Any:
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    return get_qcomm_codecs_registry(config, device=torch.device("cpu"))

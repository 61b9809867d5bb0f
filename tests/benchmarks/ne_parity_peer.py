"""The peer of the NE parity benchmark: 1D training with stock TorchRec and nothing of ours.

Stock DistributedModelParallel over all ranks, stock sharder and planner (every table table-wise),
stock FBGEMM row-wise AdaGrad. Only rows and starting weights are shared with our side.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.benchmarks.ne_parity_case import TABLES, Settings, stock_network
from trainer.data.batches import Batch


class ClickModel(nn.Module):
    """A network with its loss."""

    def __init__(self, network: DLRM) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross-entropy, logits [B, 1]) of a batch."""
        logits = self.network(batch.dense, batch.sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, logits.detach()


def stock_model(settings: Settings) -> DistributedModelParallel:
    """The model sharded over all ranks. Collective."""
    world, size = dist.group.WORLD, dist.get_world_size()
    assert world is not None
    model = ClickModel(stock_network(settings))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": settings.sparse_lr,
            "eps": settings.sparse_eps,
        }
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, local_world_size=size, compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES},
    )
    plan = planner.collective_plan(model, [sharder], world)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


class StockOptimizers:
    """Row-wise AdaGrad in the tables and Adam elsewhere, both rates falling linearly to 0."""

    def __init__(self, model: DistributedModelParallel, settings: Settings) -> None:
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._dense = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p))
        self._fused = model.fused_optimizer
        self._settings = settings

    def begin_step(self, step: int) -> None:
        """Set the rates of `step`, counted from 1, and drop gradients."""
        settings = self._settings
        left = 1 - (step - 1) / max(settings.num_steps - 1, 1)
        for optimizer, lr in ((self._fused, settings.sparse_lr), (self._dense, settings.dense_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * left
            # In the fused optimizer this hands the rate to the kernels.
            optimizer.zero_grad()

    def step(self) -> None:
        """Update the dense part; the tables were updated inside backward."""
        self._dense.step()

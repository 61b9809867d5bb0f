"""DLRM and DCN v2 from a job spec, on TorchRec's own model classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.models.dlrm import DLRM, DLRM_DCN

from trainer.data.batches import Batch
from trainer.spec import EmbeddingTableSpec, InteractionSpec, JobSpec

_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": nn.functional.mse_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}


class Recommender(nn.Module):
    """A network with its loss: `forward(batch)` gives (loss, outputs).

    `loss` is a scalar, the mean over the batch's real rows; `outputs` is [B] in the unit that the
    model learns: the normalised label for `mse`, the logit for `bce`.
    """

    def __init__(self, network: nn.Module, loss: str) -> None:
        super().__init__()
        self.network = network
        self._loss = _LOSSES[loss]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and outputs of one batch; rows with weight 0 do not count."""
        outputs = self.network(batch.dense, batch.sparse).squeeze(1)
        losses = self._loss(outputs, batch.label, reduction="none")
        loss = (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1.0)
        return loss, outputs.detach()


def build_model(spec: JobSpec, device: torch.device) -> Recommender:
    """The model of `spec`: tables on the meta device (sharding fills them), the rest on `device`.

    Every table's `num_embeddings` must be resolved to a number.
    """
    tables = EmbeddingBagCollection(
        tables=[_table_config(table, spec) for table in spec.embedding_tables],
        device=torch.device("meta"),
    )
    common = {
        "embedding_bag_collection": tables,
        "dense_in_features": len(spec.dense_features),
        "dense_arch_layer_sizes": list(spec.model.dense_arch.layer_sizes),
        "over_arch_layer_sizes": list(spec.model.over_arch.layer_sizes),
        "dense_device": device,
    }
    if spec.model.arch == "dlrm":
        return Recommender(DLRM(**common), spec.model.task.loss)
    cross = spec.model.interaction_arch or InteractionSpec()
    network = DLRM_DCN(
        dcn_num_layers=cross.num_layers, dcn_low_rank_dim=cross.low_rank_dim, **common
    )
    return Recommender(network, spec.model.task.loss)


def _table_config(table: EmbeddingTableSpec, spec: JobSpec) -> EmbeddingBagConfig:
    assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
    return EmbeddingBagConfig(
        name=table.name,
        embedding_dim=table.embedding_dim,
        num_embeddings=table.num_embeddings,
        feature_names=[f.name for f in spec.sparse_features if f.table == table.name],
        pooling=_POOLING[table.pooling],
    )

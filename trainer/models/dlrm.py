"""DLRM and DCN v2 from a job spec, put together from TorchRec's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DenseArch, InteractionArch

from trainer.data.batches import Batch
from trainer.models.layers import cross_arch, over_arch
from trainer.models.module import UserRecommender, build_user_model
from trainer.models.movielens import MovieLensNetwork
from trainer.models.sparse import SparseArch
from trainer.spec import JobSpec, TaskSpec

_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": nn.functional.mse_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}
# Keeps the mean over rows that all have weight 0 from being NaN.
_LEAST_WEIGHT = torch.finfo(torch.float32).tiny


class Network(nn.Module):
    """DLRM (Naumov et al. 2019), or DCN v2 (Wang et al. 2021) in its place where they interact.

    TorchRec's DLRM class takes pooled features only, so its parts are put together here.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        model = spec.model
        self.sparse_arch = SparseArch(spec, device)
        self.dense_arch = DenseArch(
            len(spec.dense_features), list(model.dense_arch.layer_sizes), device
        )
        num_features = len(self.sparse_arch.sparse_feature_names)
        dim = spec.embedding_tables[0].embedding_dim
        self.inter_arch, crossed_size = _interaction(spec, num_features, dim)
        self.over_arch = over_arch(crossed_size, model.over_arch.layer_sizes, device)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: KeyedJaggedTensor,
        sequences: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Logits or values, [B, K]."""
        embedded_dense = self.dense_arch(dense)
        embedded_sparse = self.sparse_arch(sparse, sequences)
        crossed = self.inter_arch(dense_features=embedded_dense, sparse_features=embedded_sparse)
        return self.over_arch(crossed)


def _interaction(spec: JobSpec, num_features: int, dim: int) -> tuple[nn.Module, int]:
    """How F sparse features and the dense one meet, and the size of what comes out."""
    if spec.model.arch == "dlrm":
        num_pairs = num_features * (num_features + 1) // 2
        return InteractionArch(num_features), dim + num_pairs
    return cross_arch(spec, num_features, dim)


class Recommender(nn.Module):
    """A network with its loss: `forward(batch)` gives (loss, outputs).

    `loss` is a scalar: the sum over the K tasks of the task's weight times the mean of its losses
    over the batch's rows, weighted by `batch.weight`. `outputs` is [B, K] in the units that the
    model learns: the normalised label for `mse`, the logit for `bce`.
    """

    def __init__(self, network: nn.Module, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.network = network
        self._tasks = tuple(tasks)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and outputs of one batch; rows with weight 0 do not count."""
        outputs = self.network(batch.dense, batch.sparse, batch.sequences)
        losses = [
            task.weight * _LOSSES[task.loss](outputs[:, k], batch.label[:, k], reduction="none")
            for k, task in enumerate(self._tasks)
        ]
        total = (torch.stack(losses).sum(0) * batch.weight).sum()
        return total / batch.weight.sum().clamp(min=_LEAST_WEIGHT), outputs.detach()


def build_model(spec: JobSpec, device: torch.device) -> Recommender | UserRecommender:
    """The model of `spec`: tables on the meta device (sharding fills them), the rest on `device`.

    Every table's `num_embeddings` must be resolved to a number.
    """
    if spec.model.module is not None:
        return build_user_model(spec, device)
    network = MovieLensNetwork if spec.model.arch == "movielens" else Network
    return Recommender(network(spec, device), spec.model.tasks)

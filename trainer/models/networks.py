"""Networks that a job spec can name: DLRM, DCN v2, and the MovieLens transformer; `build_model`.

They are put together from TorchRec's parts around `trainer.models.sparse.SparseArch`; a network of
the user's own is built by `trainer.models.user_module`. Outputs are [B, K] for the K tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DenseArch, InteractionArch, InteractionDCNArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet

from trainer.data.batches import Batch
from trainer.models.sparse import History, SparseArch, attend
from trainer.models.user_module import UserRecommender, build_user_model
from trainer.spec.job import JobSpec
from trainer.spec.model import InteractionSpec, TransformerSpec

_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": nn.functional.mse_loss,
    "bce": nn.functional.binary_cross_entropy_with_logits,
}
# Keeps means and shares of rows that all have weight 0 from being NaN.
LEAST_WEIGHT = torch.finfo(torch.float32).tiny


def build_model(spec: JobSpec, device: torch.device) -> Recommender | UserRecommender:
    """The model of `spec`: tables on the meta device (sharding fills them), the rest on `device`.

    Every table's `num_embeddings` must be resolved to a number.
    """
    if spec.model.module is not None:
        return build_user_model(spec, device)
    return Recommender(Network(spec, device), spec)


class Recommender(nn.Module):
    """A network with its loss: `forward(batch)` gives (loss, outputs).

    `loss` is a scalar: the sum over the K tasks of the task's weight times the mean of its losses
    over the batch's rows, weighted by `batch.weight`. `outputs` is [B, K] in the units that the
    model learns: the normalised label for `mse`, the logit for `bce`. Both are float32, whatever
    the network computes in.
    """

    def __init__(self, network: nn.Module, spec: JobSpec) -> None:
        super().__init__()
        self.network = network
        self._tasks = spec.model.tasks
        self._has_row_weights = spec.data.has_row_weights

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and outputs of one batch; rows with weight 0 do not count."""
        outputs = self.network(batch.dense, batch.sparse, batch.sequences).float()
        counted, label = outputs, batch.label
        if self._has_row_weights:
            # Before the loss: an infinite one times 0 is NaN, and so would its gradient be.
            counts = batch.weight[:, None] > 0
            counted, label = (torch.where(counts, each, 0) for each in (outputs, label))
        losses = [
            task.weight * _LOSSES[task.loss](counted[:, k], label[:, k], reduction="none")
            for k, task in enumerate(self._tasks)
        ]
        total = (reduce(torch.add, losses) * batch.weight).sum()
        return total / batch.weight.sum().clamp(min=LEAST_WEIGHT), outputs.detach()


class Network(nn.Module):
    """DLRM (Naumov et al. 2019), or DCN v2 (Wang et al. 2021) in its place where they interact.

    Arch `movielens` is the published MovieLens-32M design: ids, genres, description tokens, year
    and a history (`model.transformer.sequence`), which `HistoryEncoder` reads next to the
    candidate. Its two vectors meet those of all other features and the dense one in low-rank cross
    layers (DCN v2) and fully connected ones.

    TorchRec's DLRM class takes pooled features only, so its parts are put together here.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        model, transformer = spec.model, spec.model.transformer
        dim = spec.embedding_tables[0].embedding_dim
        self.sparse_arch = SparseArch(spec, device, transformer.sequence if transformer else None)
        names = self.sparse_arch.sparse_feature_names
        num_vectors = len(names)
        self.history_encoder: HistoryEncoder | None = None
        if transformer is not None:
            limits = {feature.name: feature.length_limit for feature in spec.sequence_features}
            limit = limits[transformer.sequence]
            self.history_encoder = HistoryEncoder(transformer, dim, limit, device)
            self._candidate_place = names.index(transformer.candidate)
            num_vectors += HistoryEncoder.num_outputs
        self.dense_arch = DenseArch(
            len(spec.dense_features), list(model.dense_arch.layer_sizes), device
        )
        if model.arch == "dlrm":
            self.inter_arch: nn.Module = PairwiseInteraction(num_vectors)
            crossed_size = dim + num_vectors * (num_vectors + 1) // 2
        else:
            cross = model.interaction_arch or InteractionSpec()
            crossed_size = (num_vectors + 1) * dim
            layers = LowRankCrossNet(crossed_size, cross.num_layers, cross.low_rank_dim)
            self.inter_arch = InteractionDCNArch(num_vectors, layers)
        self.dropout = nn.Dropout(transformer.dropout if transformer else 0.0)
        sizes = list(model.over_arch.layer_sizes)
        if len(sizes) == 1:  # which TorchRec's OverArch refuses
            self.over_arch: nn.Module = nn.Linear(crossed_size, sizes[0], device=device)
        else:
            self.over_arch = OverArch(crossed_size, sizes, device)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: KeyedJaggedTensor,
        sequences: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Logits or values, [B, K]."""
        embedded_dense = self.dense_arch(dense)
        vectors, history = self.sparse_arch.with_history(sparse, sequences)
        if self.history_encoder is not None:
            assert history is not None, "arch movielens has a sequence"
            encoded = self.history_encoder(history, vectors[:, self._candidate_place])
            vectors = torch.cat([vectors, encoded], dim=1)
        crossed = self.inter_arch(dense_features=embedded_dense, sparse_features=vectors)
        return self.over_arch(self.dropout(crossed))


class PairwiseInteraction(InteractionArch):
    """TorchRec's, which picks the products of all pairs by two indices; the gradient of that adds
    one element after the other. One index into a row's products has the same results, sooner.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__(num_sparse_features)
        first, second = self.triu_indices
        self.register_buffer("pairs", first * (self.F + 1) + second, persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """[B, D] and [B, F, D] -> [B, D + F (F + 1) / 2]."""
        vectors = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        picked = products.gather(1, self.pairs.expand(products.shape[0], -1))
        return torch.cat((dense_features, picked), dim=1)


class HistoryEncoder(nn.Module):
    """Transformer encoder over a history and a candidate; an empty history is legal.

        ratings   r_1 ... r_N            candidate
        movies    e_1 ... e_N                c           x_i = W [e_i, r_i e_i] + position(i)
                   |       |                 |           position counts from the most recent
                  x_1 ... x_N               x_0
                   '---- encoder, padding masked ---'
                  h_1 ... h_N               h_0 -> first output: the candidate among the history
                   '---- sum_i a_i r_i h_i ---------> second output, a = softmax(h_0 . h_i)

    After Behavior Sequence Transformer (Chen et al. 2019), where the candidate enters the encoder
    as one more item; the second output weighs what was rated before by how it was rated.

    The candidate is never masked, so that no softmax is over nothing. What an empty history adds
    is exactly zero.
    """

    num_outputs = 2

    def __init__(
        self, spec: TransformerSpec, dim: int, max_length: int, device: torch.device
    ) -> None:
        super().__init__()
        self.project = nn.Linear(2 * dim, dim, device=device)
        self.position = nn.Parameter(torch.zeros(max_length + 1, dim, device=device))
        layer = nn.TransformerEncoderLayer(
            dim,
            spec.num_heads,
            spec.feedforward_dim,
            spec.dropout,
            batch_first=True,
            norm_first=True,
            device=device,
        )
        self.encoder = nn.TransformerEncoder(
            layer, spec.num_layers, nn.LayerNorm(dim, device=device), enable_nested_tensor=False
        )

    def forward(self, history: History, candidate: torch.Tensor) -> torch.Tensor:
        """Histories and candidates [B, D] -> [B, 2, D]: candidate in context, rated history."""
        is_padding, ratings = history.is_padding, history.ratings
        if ratings is None:
            ratings = history.vectors.new_ones(is_padding.shape)
        ratings = ratings.masked_fill(is_padding, 0.0)
        rated = torch.cat([history.vectors, history.vectors * ratings.unsqueeze(2)], dim=2)
        alone = torch.cat([candidate, torch.zeros_like(candidate)], dim=1)
        tokens = torch.cat(
            [
                self.project(alone).unsqueeze(1) + self.position[-1],
                self.project(rated) + self.position[:-1][history.recency],
            ],
            dim=1,
        )
        mask = nn.functional.pad(is_padding, (1, 0), value=False)
        encoded = self.encoder(tokens, src_key_padding_mask=mask)
        in_context = encoded[:, 0]
        weighed = attend(in_context, encoded[:, 1:], is_padding, ratings)
        return torch.stack([in_context, weighed], dim=1)

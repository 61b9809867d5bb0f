"""Arch `movielens`: a transformer over the user's history, then DCN v2 over all features."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.models.dlrm import DenseArch

from trainer.models.history import HistoryEncoder
from trainer.models.layers import cross_arch, over_arch
from trainer.models.sparse import SparseArch
from trainer.spec import JobSpec


class MovieLensNetwork(nn.Module):
    """The published MovieLens-32M design: ids, genres, description tokens, year and a history.

    The history (`model.transformer.sequence`) is read by `HistoryEncoder` next to the candidate;
    its two vectors, those of all other features and the dense one meet in low-rank cross layers
    (DCN v2, Wang et al. 2021) and fully connected ones. Every lookup is TorchRec's.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        model, transformer = spec.model, spec.model.transformer
        assert transformer is not None, "the spec of arch movielens was checked"
        limits = {feature.name: feature.length_limit for feature in spec.sequence_features}
        self._sequence, self._candidate = transformer.sequence, transformer.candidate
        dim = spec.embedding_tables[0].embedding_dim
        self.sparse_arch = SparseArch(spec, device, encoded=transformer.sequence)
        self.history_encoder = HistoryEncoder(transformer, dim, limits[self._sequence], device)
        self.dense_arch = DenseArch(
            len(spec.dense_features), list(model.dense_arch.layer_sizes), device
        )
        names = self.sparse_arch.sparse_feature_names
        self._candidate_place = names.index(self._candidate)
        self.inter_arch, size = cross_arch(spec, len(names) + HistoryEncoder.num_outputs, dim)
        self.dropout = nn.Dropout(transformer.dropout)
        self.over_arch = over_arch(size, model.over_arch.layer_sizes, device)

    def forward(
        self,
        dense: torch.Tensor,
        sparse: KeyedJaggedTensor,
        sequences: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Logits or values, [B, K]."""
        assert sequences is not None, "arch movielens has a sequence"
        embedded_dense = self.dense_arch(dense)
        vectors, history = self.sparse_arch.with_history(sparse, sequences)
        encoded = self.history_encoder(history, vectors[:, self._candidate_place])
        crossed = self.inter_arch(
            dense_features=embedded_dense, sparse_features=torch.cat([vectors, encoded], dim=1)
        )
        return self.over_arch(self.dropout(crossed))

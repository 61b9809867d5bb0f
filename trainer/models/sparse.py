"""The sparse half of a model: pooled and sequence lookups as one vector for each feature.

`SparseArch` is public: a network of the user's own may hold its tables in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.types import DataType

from trainer.models.managed_collision import META, with_dynamic_ids
from trainer.spec.data import FeatureSpec
from trainer.spec.job import JobSpec

_DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}


@dataclass(frozen=True)
class History:
    """B sequences, such as users' histories, most recent last and padded at the end.

    `vectors` [B, N, D], `lengths` [B] of what is there, `ratings` [B, N] or None for 1 each;
    anything at padding.
    """

    vectors: torch.Tensor
    lengths: torch.Tensor
    ratings: torch.Tensor | None

    @property
    def is_padding(self) -> torch.Tensor:
        """[B, N] bool."""
        return self._places >= self.lengths[:, None]

    @property
    def recency(self) -> torch.Tensor:
        """[B, N] int64: 0 for the most recent one, 1 for the one before; N - 1 at padding."""
        recency = self.lengths[:, None].long() - 1 - self._places
        return torch.where(recency < 0, self.vectors.shape[1] - 1, recency)

    @property
    def _places(self) -> torch.Tensor:
        return torch.arange(self.vectors.shape[1], device=self.vectors.device)


class AttentionPooling(nn.Module):
    """Reduces a sequence of vectors to one by attention (`attend`) with a learned query.

    It starts at 0, that is, with the mean of the sequence.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(dim, device=device))

    def forward(self, history: History) -> torch.Tensor:
        """[B, D]; ratings are weights."""
        return attend(self.query, history.vectors, history.is_padding, history.ratings)


def attend(
    query: torch.Tensor,
    vectors: torch.Tensor,
    is_padding: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """sum_i softmax_i(q . e_i / sqrt(D)) w_i e_i over what is no padding; 0 where there is nothing.

    `query` [D] or [B, D] and `vectors` [B, N, D] -> [B, D]; `is_padding` and `weights` are [B, N].
    """
    scores = (vectors @ query.unsqueeze(-1)).squeeze(2) / math.sqrt(query.shape[-1])
    # The least finite number instead of -inf: softmax of an empty sequence must not be NaN.
    scores = scores.masked_fill(is_padding, torch.finfo(scores.dtype).min)
    shares = scores.softmax(dim=1) * ~is_padding
    if weights is not None:
        shares = shares * weights
    return (shares.unsqueeze(1) @ vectors).squeeze(1)


class SparseArch(nn.Module):
    """One float32 vector of D for each sparse feature, from at most two collections of tables.

    Pooled features come from an EmbeddingBagCollection, sequences from an EmbeddingCollection and
    `AttentionPooling`; either may be missing. Tables of half precision are looked up by FBGEMM
    with float32 results, which unsharded modules do not give; hence the casts.

    `pooling: mean` is a sum that is divided here by the row's number of ids, weighted or not.
    TorchRec's own mean depends on the sharding: with weights, row-wise divides by their sum and
    table-wise by the number of ids, and FBGEMM's CPU backward forgets the division altogether;
    without weights, row-wise adds 1e-6 to the divisor.

    The sequence `encoded` is not pooled: `with_history` gives its vectors to a model to read.
    """

    is_mean: torch.Tensor
    keys: torch.Tensor

    def __init__(self, spec: JobSpec, device: torch.device, encoded: str | None = None) -> None:
        super().__init__()
        self.embedding_bag_collection = _bags(spec, dynamic=False)
        bags, lists = _bags(spec, dynamic=True), _lists(spec, dynamic=True)
        ids = spec.dynamic_tables
        self.dynamic_bags = with_dynamic_ids(bags, ids) if bags is not None else None
        self.dynamic_lists = with_dynamic_ids(lists, ids) if lists is not None else None
        self.embedding_collection = _lists(spec, dynamic=False)
        names = _names_by_table(spec.pooled_features)
        self._pooled_names = [
            name for table in spec.embedding_tables for name in names.get(table.name, ())
        ]
        self._ids = [f.name for f in spec.sequence_features if not f.is_sequence]
        self._encoded = encoded
        self._limits = {f.name: f.length_limit for f in spec.sequence_features}
        self._sequences = [f.name for f in spec.features if f.is_sequence and f.name != encoded]
        dim = spec.embedding_tables[0].embedding_dim
        self.attention = nn.ModuleList(AttentionPooling(dim, device) for _ in self._sequences)
        pooling = {table.name: table.pooling for table in spec.embedding_tables}
        means = {f.name for f in spec.pooled_features if f.table and pooling[f.table] == "mean"}
        self._has_means = bool(means)
        is_mean = torch.tensor([name in means for name in self._pooled_names], device=device)
        self.register_buffer("is_mean", is_mean, persistent=False)
        key_of = {feature.name: key for key, feature in enumerate(spec.pooled_features)}
        keys = torch.tensor([key_of[name] for name in self._pooled_names], device=device)
        self.register_buffer("keys", keys, persistent=False)  # of `_pooled_names` in batches

    @property
    def sparse_feature_names(self) -> list[str]:
        """Features in the order of the output: pooled ones by table, then ids, then sequences."""
        return [*self._pooled_names, *self._ids, *self._sequences]

    def forward(
        self, sparse: KeyedJaggedTensor, sequences: KeyedJaggedTensor | None = None
    ) -> torch.Tensor:
        """[B, F, D] in the order of `sparse_feature_names`, of a batch. Collective when sharded."""
        return self.with_history(sparse, sequences)[0]

    def with_history(
        self, sparse: KeyedJaggedTensor, sequences: KeyedJaggedTensor | None = None
    ) -> tuple[torch.Tensor, History | None]:
        """As `forward`, and the vectors of the sequence `encoded`, if any. Collective likewise."""
        bags, lists = self.embedding_bag_collection, self.embedding_collection
        # All lookups are under way before any is waited for.
        pooled = [bags(sparse)] if bags is not None else []
        if self.dynamic_bags is not None:
            pooled.append(self.dynamic_bags(sparse)[0])
        if sequences is None:
            return self._pooled(pooled, sparse), None
        unpooled = [lists(unweighted(sequences))] if lists is not None else []
        if self.dynamic_lists is not None:
            unpooled.append(self.dynamic_lists(unweighted(sequences))[0])
        found = {name: vectors for each in unpooled for name, vectors in each.items()}
        history = self._history(self._encoded, found, sequences) if self._encoded else None
        vectors = [self._pooled(pooled, sparse)] if pooled else []
        return torch.cat([*vectors, *self._attended(found, sequences)], dim=1), history

    def _pooled(self, pooled: list[KeyedTensor], sparse: KeyedJaggedTensor) -> torch.Tensor:
        # By name, because the plan decides the order of the values.
        sums = {name: value for each in pooled for name, value in each.to_dict().items()}
        stacked = torch.stack([sums[name] for name in self._pooled_names], dim=1).float()
        if not self._has_means:
            return stacked
        lengths = sparse.lengths().view(len(self.keys), -1).index_select(0, self.keys).T
        divisors = torch.where(self.is_mean, lengths.clamp(min=1), 1)
        return stacked / divisors.unsqueeze(2)

    def _attended(
        self, embedded: dict[str, JaggedTensor], sequences: KeyedJaggedTensor
    ) -> list[torch.Tensor]:
        """[B, 1, D] of each id and each sequence that is pooled."""
        vectors = [embedded[name].to_padded_dense(1).float() for name in self._ids]
        for name, attention in zip(self._sequences, self.attention, strict=True):
            vectors.append(attention(self._history(name, embedded, sequences)).unsqueeze(1))
        return vectors

    def _history(
        self, name: str, embedded: dict[str, JaggedTensor], sequences: KeyedJaggedTensor
    ) -> History:
        """The vectors of one sequence with their weights, where any sequence has some."""
        jagged, limit = embedded[name], self._limits[name]
        vectors, weights = jagged.to_padded_dense(limit).float(), None
        if sequences.weights_or_none() is not None:
            weights = sequences[name].to_padded_dense_weights(limit)
        return History(vectors, jagged.lengths(), weights)


def unweighted(jagged: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids without their weights, as an EmbeddingCollection takes them."""
    if jagged.weights_or_none() is None:
        return jagged
    return KeyedJaggedTensor(
        keys=jagged.keys(),
        values=jagged.values(),
        lengths=jagged.lengths(),
        length_per_key=jagged.length_per_key_or_none(),
        offset_per_key=jagged.offset_per_key_or_none(),
    )


def _bags(spec: JobSpec, *, dynamic: bool) -> EmbeddingBagCollection | None:
    """The tables of pooled features, on the meta device; None where there are none."""
    tables = [
        EmbeddingBagConfig(**fields, pooling=PoolingType.SUM)
        for fields in _table_fields(spec, spec.pooled_features, dynamic)
    ]
    if not tables:
        return None
    is_weighted = spec.is_weighted and not dynamic
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted, device=META)


def _lists(spec: JobSpec, *, dynamic: bool) -> EmbeddingCollection | None:
    """The tables of sequences, on the meta device; None where there are none."""
    fields = _table_fields(spec, spec.sequence_features, dynamic)
    tables = [EmbeddingConfig(**each) for each in fields]
    return EmbeddingCollection(tables=tables, device=META) if tables else None


def _table_fields(
    spec: JobSpec, features: Sequence[FeatureSpec], dynamic: bool
) -> Iterator[dict[str, Any]]:
    """Fields of TorchRec's configuration of each table that some of `features` look up."""
    names_by_table = _names_by_table(features)
    for table in spec.embedding_tables:
        names = names_by_table.get(table.name, [])
        if names and (table.dynamic is not None) == dynamic:
            assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
            yield {
                "name": table.name,
                "embedding_dim": table.embedding_dim,
                "num_embeddings": table.num_embeddings,
                "feature_names": names,
                "data_type": _DATA_TYPES[table.data_type],
            }


def _names_by_table(features: Sequence[FeatureSpec]) -> dict[str | None, list[str]]:
    """Names of the features of each table, in order; there may be thousands of both."""
    found: dict[str | None, list[str]] = {}
    for feature in features:
        found.setdefault(feature.table, []).append(feature.name)
    return found

"""Lookups of dynamic tables: TorchRec's managed collision over `trainer.parallel.dynamic_ids`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from trainer.parallel.dynamic_ids import BucketedIds
from trainer.spec import DynamicSpec

META = torch.device("meta")


def dynamic_bags(
    configs: Sequence[EmbeddingBagConfig],
    specs: Mapping[str, DynamicSpec],
    device: torch.device = META,
) -> ManagedCollisionEmbeddingBagCollection:
    """The tables of `configs`, each with the ids of its spec; sharding fills those on META.

    Called with raw ids it gives (KeyedTensor, None), a collective where it is sharded.
    """
    bags = EmbeddingBagCollection(tables=list(configs), is_weighted=False, device=device)
    ids = _ids_of(bags.embedding_bag_configs(), specs, device)
    return ManagedCollisionEmbeddingBagCollection(bags, ids)


def dynamic_lists(
    configs: Sequence[EmbeddingConfig],
    specs: Mapping[str, DynamicSpec],
    device: torch.device = META,
) -> ManagedCollisionEmbeddingCollection:
    """As `dynamic_bags`, but vectors stay apart: (vectors by feature, None)."""
    lists = EmbeddingCollection(tables=list(configs), device=device)
    ids = _ids_of(lists.embedding_configs(), specs, device)
    return ManagedCollisionEmbeddingCollection(lists, ids)


def _ids_of(
    configs: Sequence[EmbeddingBagConfig] | Sequence[EmbeddingConfig],
    specs: Mapping[str, DynamicSpec],
    device: torch.device,
) -> ManagedCollisionCollection:
    ids = {
        config.name: BucketedIds(config.num_embeddings, specs[config.name], device)
        for config in configs
    }
    return ManagedCollisionCollection(ids, configs)

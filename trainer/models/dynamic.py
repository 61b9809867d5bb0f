"""Lookups of dynamic tables: TorchRec's managed collision over `trainer.parallel.dynamic_ids`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from trainer.parallel.dynamic_ids import BucketedIds
from trainer.spec import DynamicSpec

META = torch.device("meta")


def dynamic_bags(
    configs: Sequence[EmbeddingBagConfig], specs: Sequence[DynamicSpec], device: torch.device = META
) -> ManagedCollisionEmbeddingBagCollection:
    """The tables of `configs`, each with the ids of its spec; sharding fills those on META.

    Called with raw ids it gives (KeyedTensor, None), a collective where it is sharded.
    """
    ids = {
        config.name: BucketedIds(config.num_embeddings, spec, device)
        for config, spec in zip(configs, specs, strict=True)
    }
    bags = EmbeddingBagCollection(tables=list(configs), is_weighted=False, device=device)
    return ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection(ids, bags.embedding_bag_configs())
    )

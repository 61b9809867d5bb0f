"""Layers that several architectures share, put together from TorchRec's parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.models.dlrm import InteractionDCNArch, OverArch
from torchrec.modules.crossnet import LowRankCrossNet

from trainer.spec import InteractionSpec, JobSpec


def cross_arch(spec: JobSpec, num_vectors: int, dim: int) -> tuple[nn.Module, int]:
    """Low-rank cross layers of DCN v2 over `num_vectors` vectors of `dim` and the dense one.

    Returns the module, [B, D] and [B, F, D] -> [B, (F + 1) D], and the size of what comes out.
    """
    cross = spec.model.interaction_arch or InteractionSpec()
    size = (num_vectors + 1) * dim
    network = LowRankCrossNet(size, cross.num_layers, cross.low_rank_dim)
    return InteractionDCNArch(num_vectors, network), size


def over_arch(in_features: int, layer_sizes: Sequence[int], device: torch.device) -> nn.Module:
    """Fully connected layers with ReLU between them, [B, in_features] -> [B, layer_sizes[-1]]."""
    if len(layer_sizes) == 1:  # which TorchRec's OverArch refuses
        return nn.Linear(in_features, layer_sizes[0], device=device)
    return OverArch(in_features, list(layer_sizes), device)

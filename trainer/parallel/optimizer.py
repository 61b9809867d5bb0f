"""Optimizers: moment-scaled row-wise AdaGrad in the tables, a keyed one for the dense part.

In 2D the second moment v of a row grows M times faster than in 1D, because each of the M groups
divides its gradient by L instead of T. Algorithm 1 of the 2D sparse parallelism paper divides it
by c again: w -= lr / (sqrt(v / c) + eps) * g. That is FBGEMM's stock kernel with lr * sqrt(c) and
eps * sqrt(c), so no kernel of our own is needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainer.spec import DenseOptimizerSpec, SparseOptimizerSpec

_DENSE_OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


def fused_optimizer_params(spec: SparseOptimizerSpec, moment_scale: float) -> dict[str, Any]:
    """FBGEMM parameters of row-wise AdaGrad with moment scale c = `moment_scale`."""
    root = math.sqrt(moment_scale)
    return {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": spec.lr * root,
        "eps": spec.eps * root,
    }


def dense_optimizer(model: nn.Module, spec: DenseOptimizerSpec) -> KeyedOptimizerWrapper:
    """Optimizer of every parameter that is not updated inside backward."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    kind = _DENSE_OPTIMIZERS[spec.name]
    return KeyedOptimizerWrapper(
        dense, lambda params: kind(params, lr=spec.lr, weight_decay=spec.weight_decay)
    )


def combine(model: DistributedModelParallel, dense: KeyedOptimizerWrapper) -> CombinedOptimizer:
    """Both optimizers under one state dict, which is what a checkpoint stores."""
    return CombinedOptimizer([("sparse_", model.fused_optimizer), ("dense_", dense)])

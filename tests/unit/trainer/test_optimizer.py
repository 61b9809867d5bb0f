"""Fused sparse optimizers on real FBGEMM kernels, against the formulas written in plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as FusedKernel,
)

from trainer.parallel.optimizer import WeightDecay, fused_optimizer_params
from trainer.spec import SparseOptimizerSpec

NUM_ROWS, DIM = 13, 8
# Bags of every kind: ids twice in one bag, in two bags, alone, and an empty bag.
IDS = torch.tensor([3, 3, 5, 5, 7, 0, 12, 3])
OFFSETS = torch.tensor([0, 3, 3, 5, 8])


def _kernel(spec: SparseOptimizerSpec, moment_scale: float) -> FusedKernel:
    kernel = FusedKernel(
        [(NUM_ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        **fused_optimizer_params(spec, moment_scale),
    )
    generator = torch.Generator().manual_seed(0)
    kernel.split_embedding_weights()[0].copy_(torch.randn(NUM_ROWS, DIM, generator=generator))
    return kernel


def _gradient(step: int) -> torch.Tensor:
    """Gradient of the pooled output, [num_bags, DIM]."""
    return torch.randn(len(OFFSETS) - 1, DIM, generator=torch.Generator().manual_seed(step))


def _row_gradient(weight: torch.Tensor, step: int) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    pooled = torch.nn.functional.embedding_bag(IDS, leaf, OFFSETS[:-1], mode="sum")
    return torch.autograd.grad(pooled, leaf, _gradient(step))[0]


def _expected(
    weight: torch.Tensor, spec: SparseOptimizerSpec, moment_scale: float, num_steps: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and moments after `num_steps` by the formulas in the optimizer's docstring."""
    if spec.name == "sgd":
        for step in range(num_steps):
            weight = weight - spec.lr * _row_gradient(weight, step)
        return weight, None
    moment = torch.zeros(NUM_ROWS, 1 if spec.name == "row_wise_adagrad" else DIM)
    for step in range(num_steps):
        gradient = _row_gradient(weight, step)
        squares = gradient**2
        moment += squares.mean(1, keepdim=True) if moment.shape[1] == 1 else squares
        weight = weight - spec.lr / ((moment / moment_scale).sqrt() + spec.eps) * gradient
    return weight, moment


@pytest.mark.parametrize("moment_scale", [1.0, 2.5, 4.0])
@pytest.mark.parametrize("name", ["adagrad", "row_wise_adagrad"])
def test_adagrads_follow_algorithm_1_with_duplicate_ids(name: str, moment_scale: float) -> None:
    spec = SparseOptimizerSpec(name=name, lr=0.1, eps=0.01)
    kernel = _kernel(spec, moment_scale)
    weight, moment = _expected(
        kernel.split_embedding_weights()[0].clone(), spec, moment_scale, num_steps=5
    )
    for step in range(5):
        kernel(IDS, OFFSETS).backward(_gradient(step))
    (state,) = kernel.get_optimizer_state()[0].values()
    torch.testing.assert_close(kernel.split_embedding_weights()[0], weight, atol=1e-6, rtol=0)
    assert moment is not None
    torch.testing.assert_close(state, moment.view(state.shape), atol=1e-5, rtol=1e-6)


def test_sgd_follows_its_formula_with_duplicate_ids() -> None:
    spec = SparseOptimizerSpec(name="sgd", lr=0.1)
    kernel = _kernel(spec, 1.0)
    weight, _ = _expected(kernel.split_embedding_weights()[0].clone(), spec, 1.0, num_steps=5)
    for step in range(5):
        kernel(IDS, OFFSETS).backward(_gradient(step))
    torch.testing.assert_close(kernel.split_embedding_weights()[0], weight, atol=1e-6, rtol=0)


def test_moment_scale_c_makes_a_step_root_c_longer_at_equal_moments() -> None:
    spec = SparseOptimizerSpec(lr=0.1, eps=1e-12)
    plain, scaled = _kernel(spec, 1.0), _kernel(spec, 4.0)
    before = plain.split_embedding_weights()[0].clone()
    for kernel in (plain, scaled):
        kernel(IDS, OFFSETS).backward(_gradient(0))
    step, scaled_step = (k.split_embedding_weights()[0] - before for k in (plain, scaled))
    torch.testing.assert_close(scaled_step, math.sqrt(4.0) * step, atol=1e-6, rtol=1e-5)


def test_weight_decay_shrinks_every_row_of_every_table() -> None:
    weights = [torch.full((2, 3), 2.0), torch.full((4, 1), -1.0)]
    decay = WeightDecay(weights, weight_decay=0.5)
    decay(lr=0.1)
    decay(lr=0.2)
    for weight, start in zip(weights, (2.0, -1.0), strict=True):
        torch.testing.assert_close(weight, torch.full_like(weight, start * 0.95 * 0.9))


def test_no_weight_decay_touches_nothing() -> None:
    weights = [torch.full((2, 3), 2.0)]
    WeightDecay(weights, weight_decay=0.0)(lr=1.0)
    assert torch.equal(weights[0], torch.full((2, 3), 2.0))

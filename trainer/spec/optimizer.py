"""`optimizer`: what updates the tables, what updates the rest, and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from trainer.spec.base import SpecModel


class SparseOptimizerSpec(SpecModel):
    """Optimizer of the embedding tables, fused into their backward pass.

    `weight_decay` shrinks *every* row at each step (w *= 1 - lr * weight_decay), also those that
    the step did not look up, so it costs a pass over the whole tables.

    `max_gradient` clamps each number of the gradient of a looked-up vector to +-max_gradient,
    before the gradients of the same row are added up (FBGEMM's gradient clipping).
    """

    name: Literal["row_wise_adagrad", "adagrad", "sgd"] = "row_wise_adagrad"
    lr: PositiveFloat = 0.05
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient: PositiveFloat | None = None

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer keeps second moments, which moment scaling is about."""
        return self.name != "sgd"

    @property
    def changes_untouched_rows(self) -> bool:
        """Whether a step also changes rows that it did not look up."""
        return self.weight_decay > 0

    def state_bytes_per_row(self, embedding_dim: int) -> int:
        """Bytes of optimizer state that a row of `embedding_dim` columns has."""
        return {"row_wise_adagrad": 4, "adagrad": 4 * embedding_dim, "sgd": 0}[self.name]


class DenseOptimizerSpec(SpecModel):
    """Optimizer of everything that is not an embedding table."""

    name: Literal["adam", "adagrad", "sgd"] = "adam"
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class ScheduleSpec(SpecModel):
    """Learning rates over the run, the same factor for tables and dense part.

    They rise linearly over `warmup_steps`, then fall to `min_ratio` of their value at the last
    step along a line or half a cosine, or stay (`constant`).
    """

    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class OptimizerSpec(SpecModel):
    """Sparse and dense optimizers; without a schedule their learning rates stay."""

    sparse: SparseOptimizerSpec = SparseOptimizerSpec()
    dense: DenseOptimizerSpec = DenseOptimizerSpec()
    schedule: ScheduleSpec | None = None

"""`model`: the network, its layers, and what it learns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from trainer.spec.base import Identifier, SpecModel, only
from trainer.spec.data import LabelSpec
from trainer.spec.module import CodeId, ModulePath
from trainer.spec.problems import problem


class LayersSpec(SpecModel):
    """Sizes of a stack of fully connected layers, input side first."""

    layer_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class InteractionSpec(SpecModel):
    """Low-rank cross layers of DCN v2 (`dcn_v2` only)."""

    num_layers: PositiveInt = 2
    low_rank_dim: PositiveInt = 32


class TaskSpec(SpecModel):
    """What is learned: `mse` regression (RMSE, MAE) or `bce` classification (NE, AUC).

    `label` is `data.label` unless it is set; `weight` multiplies the task's loss in the sum.
    """

    name: Identifier = "rating"
    loss: Literal["mse", "bce"]
    label: LabelSpec | None = None
    weight: PositiveFloat = 1.0
    metrics: tuple[Literal["rmse", "mae", "ne", "auc"], ...] = ()

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        allowed = ("rmse", "mae") if self.loss == "mse" else ("ne", "auc")
        wrong = [metric for metric in self.metrics if metric not in allowed]
        if wrong:
            raise problem(
                "metric_mismatch",
                f"metric {wrong[0]!r} does not fit loss {self.loss!r}; use {' or '.join(allowed)}",
                "metrics",
            )
        return self

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics to report; the natural pair of the loss where none is named."""
        return self.metrics or (("rmse", "mae") if self.loss == "mse" else ("ne", "auc"))


def _one_task(tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    if len(tasks) > 1:
        raise problem("not_supported_yet", "more than one task is not supported yet")
    return tasks


_NO_LAYERS = {"layer_sizes": (1,)}


class ModelSpec(SpecModel):
    """The network: TorchRec's DLRM or its DCN v2 variant, or a class of the user's (`module`)."""

    arch: Annotated[Literal["dlrm", "dcn_v2", "movielens"], only("dlrm", "dcn_v2")] = "dlrm"
    dense_arch: LayersSpec
    over_arch: LayersSpec
    interaction_arch: InteractionSpec | None = None
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1), AfterValidator(_one_task)]
    module: ModulePath | None = None
    code: CodeId | None = None
    options: Annotated[
        dict[str, JsonValue],
        Field(default_factory=dict, description="Whatever `module` wants to know; JSON values."),
    ]

    @model_validator(mode="before")
    @classmethod
    def _leave_layers_to_module(cls, data: Any) -> Any:
        # A module of the user's has layers of its own; those of the spec are there if it wants.
        if isinstance(data, dict) and data.get("module"):
            return {"dense_arch": _NO_LAYERS, "over_arch": _NO_LAYERS} | data
        return data

    @model_validator(mode="after")
    def _check_module(self) -> Self:
        for field, is_set in (("code", self.code), ("options", self.options)):
            if is_set and self.module is None:
                raise problem("unexpected_field", "it is for a `module` of your own", field)
        return self

    @model_validator(mode="after")
    def _check_arch(self) -> Self:
        if self.arch == "dlrm" and self.interaction_arch is not None:
            raise problem("unexpected_section", "it belongs to arch 'dcn_v2'", "interaction_arch")
        return self

    @property
    def task(self) -> TaskSpec:
        """The one task of the model."""
        return self.tasks[0]

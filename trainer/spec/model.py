"""`model`: the network, its layers, and what it learns.

`model.module` names a class `package.mod:Class` of the user's own. Its code is installed on every
host of the cluster, or travels with the job: `model.code` is the id of an archive that
`shardloom submit --code DIR` (or `POST /v1/code`) has uploaded.
"""

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

from trainer.spec.base import MODULE_PATTERN, Bounds, Count, Identifier, SpecModel, problem
from trainer.spec.data import LabelSpec

ModulePath = Annotated[
    str,
    Field(
        pattern=MODULE_PATTERN,
        max_length=255,
        description="A torch module of your own, as in `package.mod:Class`.",
    ),
]
CodeId = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the uploaded code that holds `module`; --code sets it.",
    ),
]
# Each is a module of its own.
NumLayers = Annotated[PositiveInt, Bounds("more than any network has", most=1000)]


class LayersSpec(SpecModel):
    """Sizes of a stack of fully connected layers, input side first."""

    layer_sizes: Annotated[tuple[Count, ...], Field(min_length=1)]


class InteractionSpec(SpecModel):
    """Low-rank cross layers of DCN v2 (arch `dcn_v2` and `movielens`)."""

    num_layers: NumLayers = 2
    low_rank_dim: Count = 32


class TransformerSpec(SpecModel):
    """How arch `movielens` reads the user's history: an encoder over the vectors of a sequence.

    `sequence` is the feature with what came before, most recent last; its weights, if any, are the
    ratings. `candidate` is the `id` feature of what is to be rated. `dropout` is that of the
    encoder and of the crossed features.
    """

    sequence: Identifier
    candidate: Identifier
    num_layers: NumLayers = 1
    num_heads: Count = 2
    feedforward_dim: Count = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1


MetricName = Literal["rmse", "mae", "ne", "auc", "calibration", "logloss"]
_METRICS_OF_LOSS: dict[str, tuple[MetricName, ...]] = {
    "mse": ("rmse", "mae", "auc"),
    "bce": ("ne", "auc", "calibration", "logloss"),
}


class TaskSpec(SpecModel):
    """What is learned: `mse` regression or `bce` classification, and how it is measured.

    `label` is `data.label` unless it is set; `weight` multiplies the task's loss in the sum.
    Metrics of `mse` are rmse, mae and, with `auc_threshold`, the auc of predictions for whether
    the label in its own unit reaches it; those of `bce` ne, auc, calibration and logloss (nats).
    The first one decides which checkpoint is best.
    """

    name: Identifier = "rating"
    loss: Literal["mse", "bce"]
    label: LabelSpec | None = None
    weight: PositiveFloat = 1.0
    metrics: tuple[MetricName, ...] = ()
    auc_threshold: float | None = None

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        allowed = _METRICS_OF_LOSS[self.loss]
        wrong = [metric for metric in self.metrics if metric not in allowed]
        if wrong:
            raise problem(
                "metric_mismatch",
                f"metric {wrong[0]!r} does not fit loss {self.loss!r}; use {' or '.join(allowed)}",
                "metrics",
            )
        if len(set(self.metrics)) < len(self.metrics):
            raise problem("duplicate_metric", "each metric is reported once", "metrics")
        if self.is_binary and self.auc_threshold is not None:
            message = "labels of a bce task are 0 and 1; remove it"
            raise problem("unexpected_threshold", message, "auc_threshold")
        if not self.is_binary and "auc" in self.metrics and self.auc_threshold is None:
            raise problem(
                "missing_threshold",
                "the auc of an mse task needs auc_threshold: from which label on a row is positive",
                "auc_threshold",
            )
        return self

    @property
    def is_binary(self) -> bool:
        """Whether labels are 0 or 1 and outputs logits; else both are numbers in the label's unit,
        which its offset and scale normalise."""
        return self.loss == "bce"

    @property
    def metric_names(self) -> tuple[MetricName, ...]:
        """Metrics to report; the natural ones of the loss where none is named."""
        if self.metrics:
            return self.metrics
        if self.is_binary:
            return ("ne", "auc")
        return ("rmse", "mae") if self.auc_threshold is None else ("rmse", "mae", "auc")


def _distinct_names(tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise problem("duplicate_name", f"tasks need names that differ, got {', '.join(names)}")
    return tasks


_NO_LAYERS = {"layer_sizes": (1,)}


class ModelSpec(SpecModel):
    """The network: TorchRec's DLRM, its DCN v2 variant, or a class of the user's (`module`).

    `movielens` is DCN v2 after a transformer encoder over what the user rated before.
    """

    arch: Literal["dlrm", "dcn_v2", "movielens"] = "dlrm"
    dense_arch: LayersSpec
    over_arch: LayersSpec
    interaction_arch: InteractionSpec | None = None
    transformer: TransformerSpec | None = None
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1), AfterValidator(_distinct_names)]
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
    def _check_arch(self) -> Self:
        for field, is_set in (("code", self.code), ("options", self.options)):
            if is_set and self.module is None:
                raise problem("unexpected_field", "it is for a `module` of your own", field)
        if self.arch == "dlrm" and self.interaction_arch is not None:
            message = "it belongs to arch 'dcn_v2' or 'movielens'"
            raise problem("unexpected_section", message, "interaction_arch")
        if self.module is None and self.arch == "movielens" and self.transformer is None:
            raise problem(
                "missing_section", "arch 'movielens' needs it: it names the history", "transformer"
            )
        if self.arch != "movielens" and self.transformer is not None:
            raise problem("unexpected_section", "it belongs to arch 'movielens'", "transformer")
        return self

    @property
    def watched_metric(self) -> str:
        """Reported name, without `validation/`, of the metric that decides which is best."""
        return self.metric_names[0]

    @property
    def metric_names(self) -> list[str]:
        """Reported names, without `train/` or `validation/`, of the metrics of all tasks."""
        return [
            metric if len(self.tasks) == 1 else f"{task.name}/{metric}"
            for task in self.tasks
            for metric in task.metric_names
        ]

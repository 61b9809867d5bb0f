"""The job spec: what a user writes in YAML or JSON, checked before anything runs.

`load_spec` is the front door: it parses text, applies `--set` overrides and returns a
frozen `JobSpec`, or raises `SpecError` whose problems each name the path of the field.
What the design foresees but this version cannot do is refused as "not supported yet";
it is never silently ignored. Pydantic only: the control plane and the client import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from trainer.spec_problems import FieldProblem, SpecError, problem, problems_of
from trainer.spec_reading import apply_overrides, parse_document

__all__ = [
    "FieldProblem",
    "JobSpec",
    "SpecError",
    "apply_overrides",
    "json_schema",
    "load_spec",
    "parse_document",
    "validate_spec",
]

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
LABEL_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?$"
IDENTIFIER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"


def _refuse(value: Any) -> Any:
    if value is None:
        return None
    raise problem("not_supported_yet", "not supported yet in this version; remove it")


NotYet = Annotated[
    Any,
    BeforeValidator(_refuse),
    Field(deprecated=True, description="Not supported yet: refused when set."),
]


def _only(*supported: object) -> AfterValidator:
    """Accept only what this version can do of what the design allows."""

    def check(value: Any) -> Any:
        if value in supported:
            return value
        choices = " or ".join(repr(choice) for choice in supported)
        raise problem("not_supported_yet", f"{value!r} is not supported yet; use {choices}")

    return AfterValidator(check)


class SpecModel(BaseModel):
    """Base of every section: unknown keys are errors and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]


class LabelSpec(SpecModel):
    """The column to predict and, when it was normalised, how to undo that.

    The model learns `(column - offset_column) / scale_column`; metrics are reported in the
    unit of `column`, so a star rating's RMSE is in stars whatever the normalisation was.
    """

    column: Identifier
    offset_column: Identifier | None = None
    scale_column: Identifier | None = None


class SplitSpec(SpecModel):
    """Names of the folders under `data.path` that hold each part."""

    train: Label = "train"
    validation: Label | None = "validation"


class DataSpec(SpecModel):
    """Where the rows are. `path` is a folder written by `shardloom data prepare`."""

    format: Literal["parquet"] = "parquet"
    path: Annotated[str, Field(min_length=1)]
    label: LabelSpec
    split: SplitSpec = SplitSpec()
    batch_size: Annotated[PositiveInt, Field(description="Rows per rank and step.")] = 256
    shuffle: bool = True


class FeatureSpec(SpecModel):
    """One model input read from one column.

    `id` is one integer a row, `id_list` and `tokens` are lists of them (pooled), `dense` is one
    float. Sparse features name the embedding table they look up; several may share one.
    """

    name: Identifier
    type: Annotated[
        Literal["id", "id_list", "tokens", "dense", "sequence"],
        _only("id", "id_list", "tokens", "dense"),
    ]
    column: Identifier | None = None
    table: Identifier | None = None

    @property
    def source_column(self) -> str:
        """Name of the Parquet column, which is the feature's own name unless `column` is set."""
        return self.column or self.name

    @property
    def is_sparse(self) -> bool:
        """Whether the feature is looked up in an embedding table."""
        return self.type != "dense"

    @model_validator(mode="after")
    def _check_table(self) -> Self:
        if self.is_sparse and self.table is None:
            raise problem(
                "missing_table", f"feature '{self.name}' needs a 'table' to look up", "table"
            )
        if not self.is_sparse and self.table is not None:
            raise problem("unexpected_table", "a dense feature has no 'table'; remove it", "table")
        return self


class TableConstraints(SpecModel):
    """Limits on how the planner may shard one table inside a sharding group."""

    sharding_types: Annotated[
        tuple[Literal["row_wise", "table_wise"], ...], Field(min_length=1)
    ] = ("row_wise", "table_wise")


class EmbeddingTableSpec(SpecModel):
    """One embedding table of shape [num_embeddings, embedding_dim].

    `num_embeddings: auto` takes the vocabulary size from the manifest of the prepared data.
    """

    name: Identifier
    num_embeddings: PositiveInt | Literal["auto"] = "auto"
    embedding_dim: Annotated[PositiveInt, Field(multiple_of=4)]
    pooling: Literal["sum", "mean"] = "sum"
    data_type: Literal["fp32"] = "fp32"
    constraints: TableConstraints = TableConstraints()


class LayersSpec(SpecModel):
    """Sizes of a stack of fully connected layers, input side first."""

    layer_sizes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class InteractionSpec(SpecModel):
    """Low-rank cross layers of DCN v2 (`dcn_v2` only)."""

    num_layers: PositiveInt = 2
    low_rank_dim: PositiveInt = 32


class TaskSpec(SpecModel):
    """What is learned: `mse` regression (RMSE, MAE) or `bce` classification (NE, AUC)."""

    name: Identifier = "rating"
    loss: Literal["mse", "bce"]
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


class ModelSpec(SpecModel):
    """The network: TorchRec's DLRM or its DCN v2 variant."""

    arch: Annotated[Literal["dlrm", "dcn_v2", "movielens"], _only("dlrm", "dcn_v2")] = "dlrm"
    dense_arch: LayersSpec
    over_arch: LayersSpec
    interaction_arch: InteractionSpec | None = None
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1), AfterValidator(_one_task)]
    module: NotYet = None

    @model_validator(mode="after")
    def _check_arch(self) -> Self:
        if self.arch == "dlrm" and self.interaction_arch is not None:
            raise problem("unexpected_section", "it belongs to arch 'dcn_v2'", "interaction_arch")
        return self

    @property
    def task(self) -> TaskSpec:
        """The one task of the model."""
        return self.tasks[0]


class SparseOptimizerSpec(SpecModel):
    """Row-wise AdaGrad, fused into the backward pass of the embedding tables."""

    name: Literal["row_wise_adagrad"] = "row_wise_adagrad"
    lr: PositiveFloat = 0.05
    eps: PositiveFloat = 1e-8


class DenseOptimizerSpec(SpecModel):
    """Optimizer of everything that is not an embedding table."""

    name: Literal["adam", "adagrad", "sgd"] = "adam"
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class OptimizerSpec(SpecModel):
    """Sparse and dense optimizers."""

    sparse: SparseOptimizerSpec = SparseOptimizerSpec()
    dense: DenseOptimizerSpec = DenseOptimizerSpec()
    schedule: NotYet = None


class SyncSpec(SpecModel):
    """How often, and with what, the matching shards of the sharding groups are averaged."""

    every_steps: PositiveInt = 1
    optimizer_state: Annotated[Literal["every", "never", "delayed"], _only("every", "never")] = (
        "every"
    )
    mode: Annotated[Literal["full", "touched_rows"], _only("full")] = "full"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], _only("fp32")] = "fp32"
    overlap: Annotated[bool, _only(False)] = False


class WorkersSpec(SpecModel):
    """Bounds of the world size T. Equal bounds mean a fixed size."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise problem("bounds", f"min ({self.min}) is above max ({self.max})")
        if self.min != self.max:
            raise problem(
                "not_supported_yet", "elastic bounds (min below max) are not supported yet"
            )
        return self


def _refuse_auto(value: int | str) -> int | str:
    if value == "auto":
        raise problem("not_supported_yet", "'auto' is not supported yet; give a number")
    return value


class ParallelismSpec(SpecModel):
    """T workers, in sharding groups of L = `shard_group_size`; M = T / L replicas."""

    workers: PositiveInt | WorkersSpec = 1
    shard_group_size: Annotated[PositiveInt | Literal["auto"], AfterValidator(_refuse_auto)]
    placement: Annotated[
        Literal["intra_host", "inter_host", "auto"], _only("intra_host", "inter_host")
    ] = "intra_host"
    sync: SyncSpec = SyncSpec()
    moment_scale: PositiveFloat | Literal["auto"] = "auto"
    survive: NotYet = None

    @property
    def world_size(self) -> int:
        """T, the number of workers."""
        return self.workers if isinstance(self.workers, int) else self.workers.max

    @property
    def num_replicas(self) -> int:
        """M, the number of sharding groups."""
        assert isinstance(self.shard_group_size, int)
        return self.world_size // self.shard_group_size

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        assert isinstance(self.shard_group_size, int)
        if self.world_size % self.shard_group_size:
            raise problem(
                "not_divisible",
                f"workers ({self.world_size}) must be a multiple of shard_group_size "
                f"({self.shard_group_size}); nearest that fit: {self._nearest_sizes()}",
                "workers",
            )
        if self.moment_scale != "auto" and self.moment_scale > self.num_replicas:
            raise problem(
                "moment_scale",
                f"must be above 0 and at most {self.num_replicas}, the number of replicas M",
                "moment_scale",
            )
        return self

    def _nearest_sizes(self) -> str:
        group = self.shard_group_size
        assert isinstance(group, int)
        below = self.world_size // group * group
        return " or ".join(str(size) for size in (below, below + group) if size)

    @property
    def moment_scale_value(self) -> float:
        """c of the paper's algorithm 1; `auto` is M."""
        return float(self.num_replicas) if self.moment_scale == "auto" else self.moment_scale


class TrainingSpec(SpecModel):
    """Length of the run and what it reports on the way."""

    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    report_every_steps: PositiveInt = 10
    validate_every_steps: PositiveInt | None = None


class CheckpointSpec(SpecModel):
    """A checkpoint every `every_steps` and at the end; the newest `keep_last` and the best stay."""

    every_steps: PositiveInt = 100
    keep_last: PositiveInt = 2
    keep_best: bool = True


class RetrySpec(SpecModel):
    """How many failures (lost workers or a lost driver) the job survives."""

    max_failures: Annotated[int, Field(ge=0)] = 3


class ResourcesSpec(SpecModel):
    """What each worker asks of the Ray cluster."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: PositiveFloat = 1.0
    threads_per_worker: PositiveInt = 1
    collective_timeout_s: PositiveFloat = 60.0


class JobSpec(SpecModel):
    """A whole training job."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    labels: dict[Label, Label] = {}
    data: DataSpec
    features: Annotated[tuple[FeatureSpec, ...], Field(min_length=1)]
    embedding_tables: Annotated[tuple[EmbeddingTableSpec, ...], Field(min_length=1)]
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    parallelism: ParallelismSpec
    training: TrainingSpec = TrainingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    retry: RetrySpec = RetrySpec()
    resources: ResourcesSpec = ResourcesSpec()
    export: NotYet = None

    @property
    def dense_features(self) -> tuple[FeatureSpec, ...]:
        """Dense features in spec order."""
        return tuple(feature for feature in self.features if not feature.is_sparse)

    @property
    def sparse_features(self) -> tuple[FeatureSpec, ...]:
        """Sparse features in spec order, which is the key order of every batch."""
        return tuple(feature for feature in self.features if feature.is_sparse)

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        _check_unique("features", [feature.name for feature in self.features])
        _check_unique("embedding_tables", [table.name for table in self.embedding_tables])
        names = [table.name for table in self.embedding_tables]
        for index, feature in enumerate(self.features):
            if feature.is_sparse and feature.table not in names:
                raise problem(
                    "unknown_table",
                    f"'{feature.table}' is not in embedding_tables ({', '.join(names)})",
                    f"features[{index}].table",
                )
        used = {feature.table for feature in self.sparse_features}
        for index, name in enumerate(names):
            if name not in used:
                raise problem(
                    "unused_table",
                    f"no feature looks up table '{name}'",
                    f"embedding_tables[{index}].name",
                )
        return self

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        model, dims = self.model, {table.embedding_dim for table in self.embedding_tables}
        if not self.dense_features:
            raise problem(
                "no_dense_feature", f"arch '{model.arch}' needs at least one dense one", "features"
            )
        if len(dims) > 1:
            raise problem(
                "mixed_dims",
                f"arch '{model.arch}' needs one embedding_dim for all, got {sorted(dims)}",
                "embedding_tables",
            )
        if model.dense_arch.layer_sizes[-1] not in dims:
            raise problem(
                "dense_arch_width",
                f"the last ({model.dense_arch.layer_sizes[-1]}) must equal embedding_dim "
                f"({dims.pop()})",
                "model.dense_arch.layer_sizes",
            )
        if model.over_arch.layer_sizes[-1] != 1:
            raise problem("over_arch_width", "the last must be 1", "model.over_arch.layer_sizes")
        return self


def _check_unique(section: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise problem(
                "duplicate_name", f"'{name}' is defined more than once", f"{section}[{index}].name"
            )


def validate_spec(document: Any) -> JobSpec:
    """Check a parsed document; raises `SpecError` that names the path of every faulty field."""
    if not isinstance(document, dict):
        raise SpecError(
            [FieldProblem("spec", "not_a_mapping", "the spec must be a mapping of sections")]
        )
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(problems_of(error.errors(include_url=False))) from None


def load_spec(text: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Parse, override and check a spec in YAML or JSON; raises `SpecError`."""
    return validate_spec(apply_overrides(parse_document(text), overrides))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the spec, for editors (`shardloom spec schema`)."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

"""The job spec: what a user writes in YAML or JSON, checked before anything runs.

`load_spec` is the front door: it parses text, applies `--set` overrides and returns a
frozen `JobSpec`, or raises `SpecError` whose problems each name the path of the field.
What the design foresees but this version cannot do is refused as "not supported yet";
it is never silently ignored. Pydantic only: the control plane and the client import this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
IDENTIFIER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"


@dataclass(frozen=True)
class FieldProblem:
    """One thing wrong with a spec.

    `path` is the field in the user's own words, as in `embedding_tables[0].embedding_dim`;
    `code` is stable and machine-readable.
    """

    path: str
    code: str
    message: str


class SpecError(ValueError):
    """A spec that cannot be accepted; `problems` lists every fault found."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.path}: {p.message}" for p in self.problems))


def _problem(code: str, message: str) -> PydanticCustomError:
    # Braces would be read as placeholders of pydantic's message template.
    return PydanticCustomError(code, "{message}", {"message": message})  # type: ignore[arg-type]


def _refuse(value: Any) -> Any:
    if value is None:
        return None
    raise _problem("not_supported_yet", "not supported yet in this version; remove it")


NotYet = Annotated[
    Any,
    BeforeValidator(_refuse),
    Field(default=None, deprecated=True, description="Not supported yet: refused when set."),
]


class SpecModel(BaseModel):
    """Base of every section: unknown keys are errors and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class LabelSpec(SpecModel):
    """The column to predict and, when it was normalised, how to undo that.

    The model learns `(column - offset_column) / scale_column`; metrics are reported in the
    unit of `column`, so a star rating's RMSE is in stars whatever the normalisation was.
    """

    column: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
    offset_column: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)] | None = None
    scale_column: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)] | None = None


class SplitSpec(SpecModel):
    """Names of the folders under `data.path` that hold each part."""

    train: str = "train"
    validation: str | None = "validation"


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

    name: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
    type: Literal["id", "id_list", "tokens", "dense", "sequence"]
    column: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)] | None = None
    table: str | None = None

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
        if self.type == "sequence":
            raise _problem(
                "not_supported_yet", "type 'sequence' is not supported yet; use 'id_list' (pooled)"
            )
        if self.is_sparse and self.table is None:
            raise _problem("missing_table", f"feature '{self.name}' needs a 'table' to look up")
        if not self.is_sparse and self.table is not None:
            raise _problem("unexpected_table", "a dense feature has no 'table'; remove it")
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

    name: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
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

    name: Annotated[str, Field(pattern=IDENTIFIER_PATTERN)] = "rating"
    loss: Literal["mse", "bce"]
    metrics: tuple[Literal["rmse", "mae", "ne", "auc"], ...] = ()

    @model_validator(mode="after")
    def _check_metrics(self) -> Self:
        allowed = ("rmse", "mae") if self.loss == "mse" else ("ne", "auc")
        wrong = [metric for metric in self.metrics if metric not in allowed]
        if wrong:
            raise _problem(
                "metric_mismatch",
                f"metric {wrong[0]!r} does not fit loss {self.loss!r}; use {' or '.join(allowed)}",
            )
        return self

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics to report; the natural pair of the loss where none is named."""
        return self.metrics or (("rmse", "mae") if self.loss == "mse" else ("ne", "auc"))


class ModelSpec(SpecModel):
    """The network: TorchRec's DLRM or its DCN v2 variant."""

    arch: Literal["dlrm", "dcn_v2", "movielens"] = "dlrm"
    dense_arch: LayersSpec
    over_arch: LayersSpec
    interaction_arch: InteractionSpec | None = None
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1)]
    module: NotYet

    @model_validator(mode="after")
    def _check_arch(self) -> Self:
        if self.arch == "movielens":
            raise _problem("not_supported_yet", "arch 'movielens' is not supported yet; use 'dlrm'")
        if len(self.tasks) > 1:
            raise _problem("not_supported_yet", "more than one task is not supported yet")
        if self.arch == "dlrm" and self.interaction_arch is not None:
            raise _problem("unexpected_section", "'interaction_arch' belongs to arch 'dcn_v2'")
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
    schedule: NotYet


class SyncSpec(SpecModel):
    """How often, and with what, the matching shards of the sharding groups are averaged."""

    every_steps: PositiveInt = 1
    optimizer_state: Literal["every", "never", "delayed"] = "every"
    mode: Literal["full", "touched_rows"] = "full"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    overlap: bool = False

    @model_validator(mode="after")
    def _refuse_future(self) -> Self:
        for field, supported in (("mode", "full"), ("dtype", "fp32"), ("overlap", False)):
            if getattr(self, field) != supported:
                raise _problem(
                    "not_supported_yet", f"'{field}' other than {supported!r} is not supported yet"
                )
        if self.optimizer_state == "delayed":
            raise _problem("not_supported_yet", "optimizer_state 'delayed' is not supported yet")
        return self


class WorkersSpec(SpecModel):
    """Bounds of the world size T. Equal bounds mean a fixed size."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise _problem("bounds", f"min ({self.min}) is above max ({self.max})")
        if self.min != self.max:
            raise _problem(
                "not_supported_yet", "elastic bounds (min below max) are not supported yet"
            )
        return self


class ParallelismSpec(SpecModel):
    """T workers, in sharding groups of L = `shard_group_size`; M = T / L replicas."""

    workers: PositiveInt | WorkersSpec = 1
    shard_group_size: PositiveInt | Literal["auto"]
    placement: Literal["intra_host", "inter_host", "auto"] = "intra_host"
    sync: SyncSpec = SyncSpec()
    moment_scale: PositiveFloat | Literal["auto"] = "auto"
    survive: NotYet

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
        for field in ("shard_group_size", "placement"):
            if getattr(self, field) == "auto":
                raise _problem("not_supported_yet", f"{field} 'auto' is not supported yet")
        if self.world_size % self.shard_group_size:
            raise _problem(
                "not_divisible",
                f"workers ({self.world_size}) must be a multiple of shard_group_size "
                f"({self.shard_group_size}); nearest that fit: {self._nearest_sizes()}",
            )
        if self.moment_scale != "auto" and self.moment_scale > self.num_replicas:
            raise _problem(
                "moment_scale", f"moment_scale must be in (0, {self.num_replicas}], the replicas M"
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
    labels: dict[str, str] = {}
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
    export: NotYet

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
        _check_unique("feature", [feature.name for feature in self.features])
        _check_unique("embedding table", [table.name for table in self.embedding_tables])
        tables = {table.name for table in self.embedding_tables}
        used = {feature.table for feature in self.sparse_features}
        for feature in self.sparse_features:
            if feature.table not in tables:
                raise _problem(
                    "unknown_table",
                    f"feature '{feature.name}' names table '{feature.table}', which is not in "
                    f"embedding_tables ({', '.join(sorted(tables))})",
                )
        if unused := sorted(tables - used):
            raise _problem("unused_table", f"no feature looks up table '{unused[0]}'")
        return self

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if not self.dense_features:
            raise _problem(
                "no_dense_feature", f"arch '{self.model.arch}' needs at least one dense feature"
            )
        dims = {table.embedding_dim for table in self.embedding_tables}
        if len(dims) > 1:
            raise _problem(
                "mixed_dims",
                f"arch '{self.model.arch}' needs one embedding_dim for all tables, got "
                f"{sorted(dims)}",
            )
        if self.model.dense_arch.layer_sizes[-1] not in dims:
            raise _problem(
                "dense_arch_width",
                f"the last of model.dense_arch.layer_sizes ({self.model.dense_arch.layer_sizes[-1]})"
                f" must equal embedding_dim ({dims.pop()})",
            )
        if self.model.over_arch.layer_sizes[-1] != 1:
            raise _problem("over_arch_width", "the last of model.over_arch.layer_sizes must be 1")
        return self


def _check_unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise _problem("duplicate_name", f"{what} '{name}' is defined more than once")


def _path(location: tuple[int | str, ...]) -> str:
    # pydantic adds the tag of a union's branch ("int", "WorkersSpec"); users never wrote that.
    parts = [p for p in location if not (isinstance(p, str) and re.search(r"[A-Z\[\]]|^int$", p))]
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "spec"


_MESSAGES = {
    "extra_forbidden": "unknown field; check the spelling against `shardloom spec schema`",
    "missing": "required field is missing",
}


def validate_spec(document: Any) -> JobSpec:
    """Check a parsed document; raises `SpecError` that names the path of every faulty field."""
    if not isinstance(document, dict):
        raise SpecError(
            [FieldProblem("spec", "not_a_mapping", "the spec must be a mapping of sections")]
        )
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        found = {
            (_path(e["loc"]), e["type"]): FieldProblem(
                _path(e["loc"]), e["type"], _MESSAGES.get(e["type"], e["msg"])
            )
            for e in error.errors(include_url=False)
        }
        raise SpecError(list(found.values())) from None


def parse_document(text: str) -> Any:
    """Parse YAML (of which JSON is a part); raises `SpecError` with the line of a syntax fault."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "spec"
        problem = getattr(error, "problem", None) or "not valid YAML or JSON"
        raise SpecError([FieldProblem(where, "syntax", str(problem))]) from None


def apply_overrides(document: Any, overrides: Sequence[str]) -> Any:
    """Return `document` with each `path.to[0].field=value` set; values are read as YAML.

    Missing sections are made on the way; a list index must exist. Raises `SpecError`.
    """
    result = json.loads(json.dumps(document))
    for override in overrides:
        path, separator, text = override.partition("=")
        keys: list[str | int] = [
            int(key[1:-1]) if key.startswith("[") else key
            for key in re.findall(r"\[\d+\]|[^.\[\]]+", path)
        ]
        if not separator or not keys:
            raise SpecError(
                [FieldProblem(override, "override", "an override reads path.to.field=value")]
            )
        _set_path(result, keys, parse_document(text), path)
    return result


def _set_path(document: Any, keys: list[str | int], value: Any, path: str) -> None:
    *parents, last = keys
    for key, following in zip(parents, keys[1:], strict=True):
        if isinstance(document, dict) and isinstance(key, str):
            document = document.setdefault(key, [] if isinstance(following, int) else {})
        else:
            document = _item(document, key, path)
    if isinstance(document, dict) and isinstance(last, str):
        document[last] = value
    else:
        _item(document, last, path)
        document[last] = value


def _item(document: Any, key: str | int, path: str) -> Any:
    try:
        return document[key]
    except (KeyError, IndexError, TypeError):
        raise SpecError(
            [FieldProblem(path, "override", f"nothing to set at {key!r} in the spec")]
        ) from None


def load_spec(text: str, overrides: Sequence[str] = ()) -> JobSpec:
    """Parse, override and check a spec in YAML or JSON; raises `SpecError`."""
    return validate_spec(apply_overrides(parse_document(text), overrides))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the spec, for editors (`shardloom spec schema`)."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

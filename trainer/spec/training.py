"""`training`, `optimizer`, `checkpoint`, `retry`, `recovery`, `resources`, `sinks` and `export`."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    model_validator,
)

from trainer.spec.base import (
    NAME_PATTERN,
    Bounds,
    Count,
    CountOrZero,
    Identifier,
    PathText,
    ReadsFrom,
    Seconds,
    SpecModel,
    WritesTo,
    WritesToUri,
    is_stored,
    problem,
)

Quantization = Literal["int8", "fp16", "none"]
DEFAULT_QUANTIZATION: Quantization = "int8"
CheckpointChoice = Literal["newest", "best"]
DensePrecision = Literal["fp32", "tf32", "bf16"]
SparseOptimizerName = Literal["row_wise_adagrad", "adagrad", "sgd"]
DenseOptimizerName = Literal["adam", "adagrad", "sgd"]


class _Optimizer(NamedTuple):
    """What it is called, and keeps: fp32 numbers for each row of a table, and for each weight.

    Second moments that grow are sums of squared gradients; others are means of the newest ones.
    """

    label: str
    num_per_row: int
    num_per_weight: int
    grows: bool = False


OPTIMIZERS = {
    "row_wise_adagrad": _Optimizer("row-wise AdaGrad", 1, 0, grows=True),
    "adagrad": _Optimizer("AdaGrad", 0, 1, grows=True),
    "adam": _Optimizer("Adam", 0, 2),
    "sgd": _Optimizer("SGD", 0, 0),
}


def _one_shard(shards: int) -> int:
    if shards > 1:
        raise problem(
            "not_exportable",
            "exports are not sharded: TorchRec's inference sharding spreads tables over the GPUs "
            "of one process; on the CPU its shards share one memory, and torch.export cannot trace "
            "its kernels. Use 1, and quantize: int8 where memory is short",
        )
    return shards


class ExportSpec(SpecModel):
    """With `on_success` the job ends by exporting the model of one of its checkpoints.

    `quantize` is the precision of the tables in the export, row-wise scaled for `int8`; the dense
    part stays float32.
    """

    on_success: bool = False
    checkpoint: Annotated[
        CheckpointChoice, Field(description="`best` falls back on the newest where none is best.")
    ] = "newest"
    quantize: Quantization = DEFAULT_QUANTIZATION
    shards: Annotated[Count, AfterValidator(_one_shard)] = 1


class SparseOptimizerSpec(SpecModel):
    """Optimizer of the embedding tables, fused into their backward pass.

    `weight_decay` shrinks *every* row at each step (w *= 1 - lr * weight_decay), also those that
    the step did not look up, so it costs a pass over the whole tables.

    `max_gradient` clamps each number of the gradient of a looked-up vector to +-max_gradient,
    before the gradients of the same row are added up (FBGEMM's gradient clipping).
    """

    name: SparseOptimizerName = "row_wise_adagrad"
    lr: PositiveFloat = 0.05
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient: PositiveFloat | None = None

    @property
    def has_state(self) -> bool:
        """Whether there is anything beside the weights to sync."""
        return self.state_bytes_per_row(1) > 0

    @property
    def is_state_by_row(self) -> bool:
        """Whether the state of a row is the same for any width, so that each column shard has it
        for itself."""
        return not OPTIMIZERS[self.name].num_per_weight

    @property
    def has_growing_moments(self) -> bool:
        """Whether second moments grow with the number of steps, which moment scaling is about."""
        return OPTIMIZERS[self.name].grows

    @property
    def changes_untouched_rows(self) -> bool:
        return self.weight_decay > 0

    def state_bytes_per_row(self, embedding_dim: int) -> int:
        """Bytes of optimizer state that a row of `embedding_dim` columns has."""
        state = OPTIMIZERS[self.name]
        return 4 * (state.num_per_row + state.num_per_weight * embedding_dim)


class DenseOptimizerSpec(SpecModel):
    """Optimizer of everything that is not an embedding table."""

    name: DenseOptimizerName = "adam"
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0

    @property
    def num_moments(self) -> int:
        """Numbers kept for each weight."""
        return OPTIMIZERS[self.name].num_per_weight

    @property
    def has_growing_moments(self) -> bool:
        return OPTIMIZERS[self.name].grows


class ScheduleSpec(SpecModel):
    """Learning rates over the run, the same factor for tables and dense part.

    They rise linearly over `warmup_steps`, then fall to `min_ratio` of their value at the last
    step along a line or half a cosine, or stay (`constant`).
    """

    warmup_steps: CountOrZero = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class OptimizerSpec(SpecModel):
    """Sparse and dense optimizers; without a schedule their learning rates stay."""

    sparse: SparseOptimizerSpec = SparseOptimizerSpec()
    dense: DenseOptimizerSpec = DenseOptimizerSpec()
    schedule: ScheduleSpec | None = None


class EarlyStoppingSpec(SpecModel):
    """End the run when validation stands still; the job succeeds.

    That is `patience` validations in a row of which none beat the best before by more than
    `min_delta`, in the first metric of the first task.
    """

    patience: Count
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class TrainingSpec(SpecModel):
    """Length of the run and what it reports on the way.

    When the loss becomes NaN or infinite the job fails, or with `skip` goes back to the newest good
    state and leaves out the rows that did it.

    The dense part takes a step of its own every `accumulate_steps` steps (one batch a worker each),
    by their mean gradient over all rows, weighted as rows are; tables learn from each batch in its
    backward pass. `clip_norm` bounds the Euclidean norm of the whole dense gradient;
    optimizer.sparse.max_gradient is what tables have in its place.
    """

    epochs: Count = 1
    max_steps: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    report_every_steps: Count = 10
    validate_every_steps: Count | None = None
    accumulate_steps: Count = 1
    clip_norm: PositiveFloat | None = None
    dense_precision: Annotated[
        DensePrecision,
        Field(
            description="What the network around the tables computes in, in training and "
            "validation. `tf32`: matrix products and convolutions of fp32 numbers take TF32 (CUDA "
            "only). `bf16`: torch.autocast, and dense gradients travel as bf16. Lookups and "
            "tables, losses, parameters and optimizer state are the same in each; exports compute "
            "in fp32, whatever it was."
        ),
    ] = "fp32"
    dense_compile: Annotated[
        bool,
        Field(
            description="torch.compile the network around the tables, for training only: the first "
            "step compiles. Each worker's host needs a C++ compiler, with CUDA Triton too. Names "
            "in checkpoints, and exports, are the same; losses are within rounding."
        ),
    ] = False
    early_stopping: EarlyStoppingSpec | None = None
    on_non_finite: Literal["fail", "skip"] = "fail"

    @model_validator(mode="before")
    @classmethod
    def _without_trace(cls, data: Any, info: ValidationInfo) -> Any:
        # Earlier versions traced fixed steps; what they wrote holds the field, mostly as null.
        if not isinstance(data, dict) or "trace" not in data:
            return data
        if data["trace"] is not None and not is_stored(info):
            message = "steps are traced while the job runs, by `shardloom trace JOB`; remove it"
            raise problem("removed_field", message, "trace")
        return {name: value for name, value in data.items() if name != "trace"}


class WarmStartSpec(SpecModel):
    """Start from the newest checkpoint in folder `path`, or from that checkpoint itself.

    `path` is absolute or a URL: what `shardloom show JOB` calls files, the job's folder in its
    `checkpoint.path`, or one checkpoint in these.

    `tables` limits it to the named tables (with their optimizer state); `dense` says whether the
    dense part comes along. Step, data position and schedule start anew.
    """

    path: ReadsFrom
    tables: Annotated[tuple[Identifier, ...], Field(min_length=1)] | None = None
    dense: bool = True


class CheckpointSpec(SpecModel):
    """A checkpoint every `every_steps` and at the end.

    They lie in the job's run folder or, where `path` names a folder or a URL (`s3://`, `gs://`),
    there in a folder named by the job's id.
    The newest `keep_last`, the best and the first at or after each multiple of `keep_every_steps`
    stay. With `asynchronous` they are written beside the training, from a copy in memory.
    """

    path: WritesTo | None = None
    every_steps: Count = 100
    keep_last: Count = 2
    keep_best: bool = True
    keep_every_steps: Count | None = None
    asynchronous: bool = True
    warm_start: WarmStartSpec | None = None


class RetrySpec(SpecModel):
    """How many failures (lost workers or a lost driver) the job survives."""

    max_failures: CountOrZero = 3


class RecoverySpec(SpecModel):
    """How fast trouble is noticed, and what follows."""

    heartbeat_timeout_s: Annotated[
        Seconds,
        Field(
            description="A group silent for so long is lost. Where its processes end it is missed "
            "at once, so this is about hosts that vanish; a rank that computes may be unable to "
            "send for over a second."
        ),
    ] = 5.0
    exchange_timeout_s: Annotated[
        Seconds,
        Field(
            description="Longest time of one operation of a sync; NCCL has 30 s to form a group, "
            "if that is not more."
        ),
    ] = 5.0
    hang_factor: Annotated[
        float,
        Field(
            gt=1,
            description="Workers that get nothing done for so many median steps, and at least "
            "`min_hang_s`, hang.",
        ),
    ] = 20.0
    min_hang_s: Annotated[
        Seconds,
        Field(
            description="What takes less is no hang. Outside of steps (start, checkpoint, "
            "validation, a slow read) ten times that are allowed."
        ),
    ] = 60.0
    straggler_factor: Annotated[
        float,
        Field(gt=1, description="A rank slower than this times the median is a straggler."),
    ] = 1.5
    replace_stragglers: Annotated[
        bool,
        Field(
            description="A straggler's workers move, once, to a host that has room for them, and "
            "the slow host is left out as one that fails."
        ),
    ] = False
    start_grace_s: Annotated[
        Seconds, Field(description="A start waits so long for hosts and groups that are missing.")
    ] = 120.0
    exclude_host_after: Annotated[
        Count, Field(description="Failures within an hour after which a host is left out.")
    ] = 3
    exclude_host_s: Annotated[Seconds, Field(description="For so long it is left out.")] = 600.0
    min_node_speed: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Field(
            description="Hosts are checked before workers are placed on them (matrix products, "
            "memory, network, storage; some seconds each). One is left out for `exclude_host_s` "
            "that fails, or is slower in one of these than this share of the median host.",
        ),
    ] = None


class ResourcesSpec(SpecModel):
    """What each worker asks of the Ray cluster, and which cluster that is.

    `memory_bytes_per_worker` is what the planner may fill; by default the memory of the GPU, or
    an equal share of the host's. With `cluster: own` every attempt gets a cluster for itself
    (KubeRay only), admitted by Kueue's LocalQueue `queue` if given, and is ended once its cluster
    is `deadline_s` old: that counts as a failure, and the next one goes on from the newest
    checkpoint.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: Annotated[
        PositiveFloat,
        Bounds("the least that Ray counts", least=1e-4),
        Bounds("more than any host has", most=10_000),
        Field(description="Ray counts CPUs in ten-thousandths."),
    ] = 1.0
    threads_per_worker: Count = 1
    collective_timeout_s: Seconds = 60.0
    memory_bytes_per_worker: Count | None = None
    cluster: Literal["shared", "own"] = "shared"
    queue: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    deadline_s: Annotated[PositiveInt, Field(lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        for name in ("queue", "deadline_s"):
            if self.cluster == "shared" and getattr(self, name) is not None:
                message = f"the shared cluster has no {name}; set resources.cluster to own"
                raise problem("shared_cluster", message, name)
        return self


def _absolute(path: str, info: ValidationInfo) -> str:
    if PurePath(path).is_absolute() or ("://" in path and is_stored(info)):
        return path
    if "://" in path:
        raise problem("no_folder", "is no folder that the driver can write to; give a path")
    message = f"'{path}' is relative, but the driver has another working folder; give an absolute"
    raise problem("relative_path", f"{message} path")


class TensorBoardSpec(SpecModel):
    """Event files for TensorBoard, in a folder of `dir` that has the job's id as its name.

    By default they are in `tensorboard` in the job's run folder.
    """

    dir: Annotated[WritesTo, AfterValidator(_absolute)] | None = None


class MlflowSpec(SpecModel):
    """A run in an MLflow experiment; every attempt of the job goes on in the same run."""

    tracking_uri: Annotated[WritesToUri, Field(examples=["http://mlflow.example:5000"])]
    experiment: Annotated[PathText, Field(max_length=250)] = "shardloom"


class SinksSpec(SpecModel):
    """Each is optional; one that fails is told in the timeline, and training goes on."""

    tensorboard: TensorBoardSpec | None = None
    mlflow: MlflowSpec | None = None

"""`training`, `checkpoint`, `retry` and `resources`: how a run goes and what it may use."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from trainer.spec.base import Identifier, PathText, SpecModel
from trainer.spec.problems import problem

# As Kubernetes names what has a name in a namespace.
QUEUE_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"


class TraceSpec(SpecModel):
    """Steps to record with torch.profiler, on the given ranks.

    A trace ends early where a checkpoint or a validation begins.
    """

    first_step: PositiveInt
    num_steps: Annotated[PositiveInt, Field(le=100)] = 3
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)


class EarlyStoppingSpec(SpecModel):
    """End the run when validation stands still; the job succeeds.

    That is `patience` validations in a row of which none beat the best before by more than
    `min_delta`, in the first metric of the first task.
    """

    patience: PositiveInt
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

    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    report_every_steps: PositiveInt = 10
    validate_every_steps: PositiveInt | None = None
    accumulate_steps: PositiveInt = 1
    clip_norm: PositiveFloat | None = None
    early_stopping: EarlyStoppingSpec | None = None
    on_non_finite: Literal["fail", "skip"] = "fail"
    trace: TraceSpec | None = None


class WarmStartSpec(SpecModel):
    """Start from the newest checkpoint in folder `path`, or from that checkpoint itself.

    `tables` limits it to the named tables (with their optimizer state); `dense` says whether the
    dense part comes along. Step, data position and schedule start anew.
    """

    path: PathText
    tables: Annotated[tuple[Identifier, ...], Field(min_length=1)] | None = None
    dense: bool = True


class CheckpointSpec(SpecModel):
    """A checkpoint every `every_steps` and at the end.

    They lie in the job's run folder or, where `path` names a folder or a URL (`s3://`, `gs://`),
    there in a folder named by the job's id.
    The newest `keep_last`, the best and the first at or after each multiple of `keep_every_steps`
    stay. With `asynchronous` they are written beside the training, from a copy in memory.
    """

    path: PathText | None = None
    every_steps: PositiveInt = 100
    keep_last: PositiveInt = 2
    keep_best: bool = True
    keep_every_steps: PositiveInt | None = None
    asynchronous: bool = True
    warm_start: WarmStartSpec | None = None


class RetrySpec(SpecModel):
    """How many failures (lost workers or a lost driver) the job survives."""

    max_failures: Annotated[int, Field(ge=0)] = 3


class RecoverySpec(SpecModel):
    """How fast trouble is noticed, and what follows.

    A group silent for `heartbeat_timeout_s` is lost. One operation of a sync takes at most
    `exchange_timeout_s`. Workers that get nothing done for `hang_factor` times the median step, and
    at least `min_hang_s`, hang. A rank slower than `straggler_factor` times the median is a
    straggler. A start waits `start_grace_s` for hosts and groups that are missing. A host with
    `exclude_host_after` failures is left out for `exclude_host_s`.
    """

    heartbeat_timeout_s: PositiveFloat = 1.0
    exchange_timeout_s: PositiveFloat = 5.0
    hang_factor: Annotated[float, Field(gt=1)] = 20.0
    min_hang_s: PositiveFloat = 60.0
    straggler_factor: Annotated[float, Field(gt=1)] = 1.5
    replace_stragglers: bool = False
    start_grace_s: PositiveFloat = 120.0
    exclude_host_after: PositiveInt = 3
    exclude_host_s: PositiveFloat = 600.0


class ResourcesSpec(SpecModel):
    """What each worker asks of the Ray cluster, and which cluster that is.

    `memory_bytes_per_worker` is what the planner may fill; by default the memory of the GPU, or
    an equal share of the host's. With `cluster: own` every attempt gets a cluster for itself
    (KubeRay only), admitted by Kueue's LocalQueue `queue` if given, and is ended once its cluster
    is `deadline_s` old: that counts as a failure, and the next one goes on from the newest
    checkpoint.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: PositiveFloat = 1.0
    threads_per_worker: PositiveInt = 1
    collective_timeout_s: PositiveFloat = 60.0
    memory_bytes_per_worker: PositiveInt | None = None
    cluster: Literal["shared", "own"] = "shared"
    queue: Annotated[str, Field(pattern=QUEUE_PATTERN)] | None = None
    deadline_s: Annotated[PositiveInt, Field(lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        for name in ("queue", "deadline_s"):
            if self.cluster == "shared" and getattr(self, name) is not None:
                message = f"the shared cluster has no {name}; set resources.cluster to own"
                raise problem("shared_cluster", message, name)
        return self

"""REST bodies of jobs: jobs, attempts, membership, plans, records, logs, exports, the queue."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from service.domain.models import (
    ChosenLayout,
    EndReason,
    ExcludedHost,
    GoneGroup,
    JobStatus,
    Member,
    MetricPoint,
    Prediction,
    Recovery,
    RemainingPath,
    Value,
)
from service.schemas.common import ApiModel, RequestModel
from trainer.export.artifact import CheckpointName, ExportStatus
from trainer.spec.job import JobSpec
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class QueuePlace(ApiModel):
    """Where a queued job stands: `position` from 1, null while it is not eligible."""

    position: int | None = None
    reason: str = Field(default="", examples=["waiting for 4 of 8 workers; cluster max 6"])


class WaitingJob(ApiModel):
    """A job in the queue."""

    id: str
    name: str
    project: str
    priority: int
    min_workers: int
    world_size: int
    spare_workers: int = 0
    waits_since: float
    retry_at: float | None
    position: int | None
    reason: str
    expected_start_at: float | None = Field(
        default=None,
        description="As running jobs end when they expect to; null where that is not known.",
    )


class RunningJob(ApiModel):
    """A job that holds workers."""

    id: str
    name: str
    project: str
    priority: int
    preemptible: bool
    num_workers: int
    is_pausing: bool
    preempted_by: str | None


class QueueOut(ApiModel):
    """Everything that waits, in the order of its turn, and everything that runs."""

    waiting: list[WaitingJob]
    running: list[RunningJob]


# Variables that configure Python, the loader, Ray or the driver cannot be set by a job.
_OURS = re.compile(r"(PATH|HOME|PYTHON.*|LD_.*|RAY_.*|SHARDLOOM_.*)")


def _is_free(name: str) -> str:
    if _OURS.fullmatch(name):
        raise ValueError(f"{name} is reserved and cannot be a secret; choose another name")
    return name


SecretName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128),
    AfterValidator(_is_free),
]
SecretValue = Annotated[str, StringConstraints(max_length=16_384, pattern=r"^[^\x00]*$")]
Secrets = Annotated[dict[SecretName, SecretValue], Field(max_length=64)]
"""Environment variables of a job that are stored encrypted and never shown."""


class CloneJob(RequestModel):
    """What of the spec the clone has otherwise, by dotted path."""

    name: str | None = Field(default=None, examples=["movielens-larger"])
    set: dict[str, Any] = Field(
        default_factory=dict,
        max_length=200,
        description="Values by path, as `shardloom submit --set` takes them.",
        examples=[{"training.epochs": 3, "parallelism.workers": 8}],
    )
    secrets: Secrets = Field(
        default={}, repr=False, description="Those of the clone: the job's own do not come along."
    )


class DeletedJob(ApiModel):
    """A job that is deleted; `left` has what of its checkpoints is not, with folder or URL."""

    id: str
    left: list[RemainingPath] = Field(default_factory=list)


class RestartJob(RequestModel):
    """The checkpoint to go on from, by step or by path; the newest where neither is given."""

    step: int | None = Field(default=None, ge=0, le=2**63 - 1, examples=[500])
    path: str | None = Field(default=None, min_length=1, max_length=1024)


class ProgressOut(ApiModel):
    """How far a job has come."""

    step: int
    total_steps: int
    epoch: int
    rows: int
    rows_per_s: float
    eta_s: float | None
    percent: float = Field(ge=0, le=100)


class JobSummary(ApiModel):
    """A job as a list shows it."""

    id: str
    name: str
    project: str
    labels: dict[str, str]
    status: JobStatus
    reason: EndReason | None
    message: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    min_workers: int
    world_size: int = Field(description="T, the most workers where their number may change.")
    spare_workers: int = Field(default=0, description="Workers of spare groups, beside T.")
    shard_group_size: int | None = Field(description="L; null while it is auto.")
    num_replicas: int | None = Field(description="M at most workers; null while L is auto.")
    num_attempts: int
    num_failures: int
    progress: ProgressOut
    latest_metrics: dict[str, Value]
    watched_metric: str = Field(default="", description="Of which the best checkpoint is kept.")
    priority: int = 0
    pause_requested: bool = Field(default=False, description="It pauses, or makes way.")
    queue: QueuePlace | None = Field(default=None, description="Null unless it waits.")
    num_current_groups: int | None = Field(default=None, description="Groups that train now.")
    num_wanted_groups: int | None = Field(default=None, description="Groups that should.")
    advice: str = Field(default="", description="What to change, of a job that failed.")


class MembershipOut(ApiModel):
    """Who trains in the newest attempt. Copies are those of the shard with the fewest.

    `host_copies_needed` is what the spec's `survive` asks for, 0 where it asks nothing.
    """

    attempt_id: str
    layout: ChosenLayout | None
    generation: int
    commit: int
    changed_at: float
    num_current: int
    num_wanted: int
    copies_alive: int
    host_copies_alive: int
    host_copies_needed: int
    members: list[Member]
    missing: list[GoneGroup]
    num_losses: int
    num_recoveries: int
    last_recovery: Recovery | None
    excluded_hosts: list[ExcludedHost]
    prediction: Prediction | None = Field(
        default=None, description="The plan of the newest workers, with the fullest rank's memory."
    )


class ComparedOut(ApiModel):
    """A quantity as the plan predicts it, and as the job measured it last.

    `ratio` is measured over predicted; both are null while nothing was measured.
    """

    name: str = Field(examples=["rows/s", "step", "peak memory"])
    unit: Literal["per_s", "s", "steps", "bytes", "ratio"]
    predicted: Value
    measured: Value | None
    ratio: Value | None


class JobDetail(JobSummary):
    """A job with its spec and version; `membership` once the newest attempt told its groups."""

    version: int
    spec: JobSpec
    run_dir: str
    current_attempt_id: str | None
    membership: MembershipOut | None = None
    compared: list[ComparedOut] = Field(
        default=[], description="What the plan predicts beside what was measured."
    )
    secret_names: list[str] = Field(default=[], description="Names of the job's secrets.")


class LayoutOption(ApiModel):
    """A layout and its price. Of a full sync, `sync_bytes` travel from and to each worker."""

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    failure_domain: str
    num_hosts: int
    num_hosts_survived: int
    num_hosts_per_shard: int = Field(description="Hosts with a copy, of the shard with fewest.")
    memory_overhead_bytes: int | None = Field(description="What other copies cost each worker.")
    sync_bytes: int | None
    sync_latency_s: float | None


class JobPlan(ApiModel):
    """What a dry run answers: the checked spec and the groups that it would form.

    Sizes are null, and `layout` with its groups missing, while `auto` cannot be decided. `obstacle`
    says why the job could not start on the cluster as it is. `POST /v1/plans` compares layouts.
    """

    spec: JobSpec
    min_workers: int
    world_size: int
    spare_workers: int = Field(default=0, description="Workers of spare groups, beside T.")
    shard_group_size: int | None
    num_replicas: int | None
    placement: str | None
    sharding_groups: tuple[tuple[int, ...], ...]
    replica_groups: tuple[tuple[int, ...], ...]
    moment_scale: float | None
    cluster: str
    obstacle: str
    reason: str
    after_loss: str
    table_bytes: int | None
    num_hosts_needed: int | None
    layout: LayoutOption | None


class SubmitJob(RequestModel):
    """Body of POST /v1/jobs: the spec as a mapping. Checked by the server."""

    spec: dict[str, Any]
    secrets: Secrets = Field(
        default={}, repr=False, description="Environment variables, kept encrypted, never shown."
    )


class AttemptOut(ApiModel):
    """One submission of a job."""

    id: str
    index: int
    created_at: float
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    end_reason: EndReason | None
    message: str
    num_worker_failures: int
    evidence: dict[str, str] = Field(default={}, description="What the end was read from.")
    advice: str = Field(default="", description="What to change after such an end.")


class MetricSeries(ApiModel):
    """Points of one metric in step order."""

    name: str
    points: list[MetricPoint]


class MetricsOut(ApiModel):
    """Series of a job; `names` lists every metric the job has, asked for or not."""

    names: list[str]
    series: list[MetricSeries]


class RequestTrace(RequestModel):
    """Body of POST /v1/jobs/{job}/traces: the next `num_steps` steps of some ranks."""

    num_steps: int = Field(default=3, ge=1, le=100)
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1, max_length=1024)


class TraceRequested(ApiModel):
    """A request that the workers will answer; `names` are those of the traces to come."""

    id: str
    attempt_id: str
    num_steps: int
    ranks: list[int]
    names: list[str]


class ResizeJob(RequestModel):
    """Body of POST /v1/jobs/{job}/resize."""

    workers: int = Field(ge=1, examples=[6])


class DrainHost(RequestModel):
    """Body of POST /v1/jobs/{job}/drain."""

    host: str = Field(min_length=1, max_length=255, examples=["10.0.0.7"])
    undo: bool = Field(default=False, description="Use the host again.")


class ResizeRequestOut(ApiModel):
    """All that is wanted of a job's workers now; `workers` is null while nobody named a size."""

    id: str
    workers: int | None
    drain_hosts: list[str]


class LogLine(ApiModel):
    """One line of a log. `source` is `driver`, `coordinator`, `rank-N` or `group-G-rank-R`.

    A line that says neither goes on where the one before it ended, as the lines of a traceback do,
    and has the level and time of that one; null while none has said any.
    """

    source: str
    text: str
    rank: int | None = None
    group: int | None = None
    level: str | None = Field(default=None, examples=["warning"])
    time: float | None = None


class LogsOut(ApiModel):
    """Lines of an attempt's logs. `cursor` is opaque: give it as `after` for what came later.

    While `more` is true there may be lines behind it already, though this answer may have none.
    """

    attempt_id: str | None
    sources: list[str]
    lines: list[LogLine]
    cursor: str
    more: bool = False


class RequestExport(RequestModel):
    """Body of POST /v1/jobs/{job}/exports: `checkpoint` is `newest`, `best` or a step."""

    checkpoint: CheckpointName = "newest"
    quantize: Quantization = DEFAULT_QUANTIZATION


class ExportOut(ApiModel):
    """An export of a job, done or not.

    `message` says what is done now, or why it failed; `report` what was measured once it is done:
    how far its predictions are from the trainer's on validation rows.
    """

    id: str
    checkpoint: str
    quantize: Quantization
    status: ExportStatus
    message: str
    created: float
    step: int | None = None
    size_bytes: int | None = None
    report: Annotated[
        dict[str, Any] | None, Field(description="See `trainer/export/report.py`.")
    ] = None

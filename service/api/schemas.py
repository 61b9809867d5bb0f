"""Bodies of the REST API, shared by the server and the client (pydantic only).

Times are Unix seconds, durations `_s`, sizes `_bytes`. Lists are pages: `next` is the value to
give as `after` for the following page, and null on the last one.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from service.api.queue_schemas import QueuePlace
from service.domain import EndReason, JobStatus
from service.secret_types import Secrets
from trainer.spec import JobSpec

Item = TypeVar("Item")

# JSON has no NaN or infinity: both travel as null, which reads back as NaN.
Value = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


class ApiModel(BaseModel):
    """Base of every body. Built from domain dataclasses by attribute."""

    model_config = ConfigDict(from_attributes=True)


class Page(ApiModel, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next: str | None = None


class FieldFault(ApiModel):
    """One faulty field of a request."""

    path: str
    code: str
    message: str


class Problem(ApiModel):
    """RFC 9457 problem details; `code` is stable and machine-readable."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    instance: str | None = None
    fields: list[FieldFault] = []


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
    shard_group_size: int | None = Field(description="L; null while it is auto.")
    num_replicas: int | None = Field(description="M at most workers; null while L is auto.")
    num_attempts: int
    num_failures: int
    progress: ProgressOut
    latest_metrics: dict[str, Value]
    priority: int = 0
    pause_requested: bool = Field(default=False, description="It pauses, or makes way.")
    queue: QueuePlace | None = Field(default=None, description="Null unless it waits.")
    num_current_groups: int | None = Field(default=None, description="Groups that train now.")
    num_wanted_groups: int | None = Field(default=None, description="Groups that should.")
    advice: str = Field(default="", description="What to change, of a job that failed.")


class LayoutOut(ApiModel):
    """The layout that an attempt trains with, why, and its price."""

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    failure_domain: str
    num_hosts: int
    num_hosts_survived: int
    memory_overhead_bytes: int
    sync_latency_s: float | None
    reason: str


class MemberOut(ApiModel):
    """A sharding group: its life, its hosts, and whether it trains (`current`) or copies."""

    group: int
    incarnation: int
    hosts: list[str]
    standing: str


class GoneGroupOut(ApiModel):
    """A group that was lost, or left for a `reason`, and is awaited again."""

    group: int
    incarnation: int
    hosts: list[str]
    time: float
    reason: str
    message: str


class RecoveryOut(ApiModel):
    """How the groups went on after a loss."""

    time: float
    generation: int
    cause: str
    pause_s: float
    syncs_lost: int
    num_tries: int


class ExcludedHostOut(ApiModel):
    """A host on which nothing is placed until `until`."""

    host: str
    num_failures: int
    until: float


class MembershipOut(ApiModel):
    """Who trains in the newest attempt. Copies are those of the shard with the fewest.

    `host_copies_needed` is what the spec's `survive` asks for, 0 where it asks nothing.
    """

    attempt_id: str
    layout: LayoutOut | None
    generation: int
    commit: int
    changed_at: float
    num_current: int
    num_wanted: int
    copies_alive: int
    host_copies_alive: int
    host_copies_needed: int
    members: list[MemberOut]
    missing: list[GoneGroupOut]
    num_losses: int
    num_recoveries: int
    last_recovery: RecoveryOut | None
    excluded_hosts: list[ExcludedHostOut]


class JobDetail(JobSummary):
    """A job with its spec and version; `membership` once the newest attempt told its groups."""

    version: int
    spec: JobSpec
    run_dir: str
    current_attempt_id: str | None
    membership: MembershipOut | None = None
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
    is_chosen: bool


class JobPlan(ApiModel):
    """What a dry run answers: the checked spec and the groups that it would form.

    Sizes are null, and `layout` with its groups missing, while `auto` cannot be decided; `options`
    are what it could become. `obstacle` says why the job could not start on the cluster as it is.
    """

    spec: JobSpec
    min_workers: int
    world_size: int
    shard_group_size: int | None
    num_replicas: int | None
    placement: str | None
    sharding_groups: list[list[int]]
    replica_groups: list[list[int]]
    moment_scale: float | None
    cluster: str
    obstacle: str
    reason: str
    after_loss: str
    table_bytes: int | None
    num_hosts_needed: int | None
    layout: LayoutOption | None
    options: list[LayoutOption]


class CodeOut(ApiModel):
    """Uploaded code: `id` is what `model.code` of a spec names."""

    id: str
    num_files: int
    size_bytes: int = Field(description="Of the files, unpacked.")


class SubmitJob(ApiModel):
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


class TimelineEventOut(ApiModel):
    """One line of a job's timeline. `id` rises along the timeline; SSE uses it as its id."""

    id: int
    attempt_id: str | None
    time: float
    kind: str
    message: str
    actor: str
    data: dict[str, Any]


class MetricPointOut(ApiModel):
    """One downsampled bucket; `value` is the mean, `step` and `time` those of its last point."""

    step: int
    time: float
    value: Value
    min: Value
    max: Value


class MetricSeries(ApiModel):
    """Points of one metric in step order."""

    name: str
    points: list[MetricPointOut]


class MetricsOut(ApiModel):
    """Series of a job; `names` lists every metric the job has, asked for or not."""

    names: list[str]
    series: list[MetricSeries]


class CheckpointOut(ApiModel):
    """A committed checkpoint."""

    step: int
    path: str
    size_bytes: int
    created_at: float
    is_best: bool
    metrics: dict[str, Value]


class RequestTrace(ApiModel):
    """Body of POST /v1/jobs/{job}/traces: the next `num_steps` steps of some ranks."""

    model_config = ConfigDict(extra="forbid")

    num_steps: int = Field(default=3, ge=1, le=100)
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0], min_length=1, max_length=1024)


class TraceRequested(ApiModel):
    """A request that the workers will answer; `names` are those of the traces to come."""

    id: str
    attempt_id: str
    num_steps: int
    ranks: list[int]
    names: list[str]


class TraceOut(ApiModel):
    """A trace in Chrome's format, gzipped: `num_steps` steps of one rank, `step` the last."""

    name: str
    attempt_id: str
    rank: int
    step: int
    num_steps: int
    size_bytes: int
    time: float


class ResizeJob(ApiModel):
    """Body of POST /v1/jobs/{job}/resize."""

    model_config = ConfigDict(extra="forbid")

    workers: int = Field(ge=1, examples=[6])


class DrainHost(ApiModel):
    """Body of POST /v1/jobs/{job}/drain."""

    model_config = ConfigDict(extra="forbid")

    host: str = Field(min_length=1, max_length=255, examples=["10.0.0.7"])
    undo: bool = Field(default=False, description="Use the host again.")


class WishOut(ApiModel):
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


class HostOut(ApiModel):
    """What a live host has in all, whoever uses it now."""

    address: str
    num_cpus: float
    num_gpus: float
    memory_bytes: int


class ClusterOut(ApiModel):
    """The cluster behind the service; `hosts` is empty where the backend does not tell them.

    One that grows by itself has room for `max_workers` in the end.
    """

    reachable: bool
    backend: str
    address: str
    message: str
    max_workers: int | None = None
    hosts: list[HostOut] = []

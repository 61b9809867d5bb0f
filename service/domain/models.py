"""The domain model: jobs, attempts, memberships, projects, and ids of jobs.

A job has attempts, each of which is one submission to a backend. Its *status* is what the control
plane has decided; what the cluster reports is an *observation*, kept apart. Times are Unix seconds,
durations end in `_s`, sizes in `_bytes`. Pure: no FastAPI, SQL or Ray.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, SkipValidation

from trainer.failures import EndReason as EndReason
from trainer.spec.job import JobSpec

# JSON has no NaN or infinity: both travel as null, which reads back as NaN.
Value = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
DEFAULT_PROJECT = "default"


class JobStatus(StrEnum):
    """Where a job is in its life."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)

    @property
    def is_at_rest(self) -> bool:
        """Whether the job waits and nothing runs for it, so that requests take effect at once."""
        return self in (JobStatus.QUEUED, JobStatus.PAUSED)


class ObservedState(StrEnum):
    """What the backend says of a submission.

    UNREACHABLE means that nobody answered: it says nothing about the attempt and must never be
    read as a failure. NOT_FOUND means that the cluster answered and knows no such submission.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    NOT_FOUND = "not_found"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class Observation:
    """The observed state of a submission; `reason` is why it FAILED, where the backend knows."""

    state: ObservedState
    message: str = ""
    reason: EndReason | None = None


@dataclass(frozen=True)
class ReportedEnd:
    """How an attempt ended, as its driver said (`attempt_ended`) or the backend implies.

    `time` is when the record arrived, by the service's clock. `evidence` is what the reason was
    read from: exit code, signal, host, ...
    """

    reason: EndReason
    message: str
    time: float = 0.0
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """How far a job has come; `rows` counts rows trained by all ranks.

    `advanced_at` is when an attempt began to train or its step last changed, `checkpoint_at` when
    the last checkpoint was committed or an attempt began to train, by the service's clock.
    """

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    rows: int = 0
    rows_per_s: float = 0.0
    eta_s: float | None = None
    advanced_at: float | None = None
    checkpoint_at: float | None = None


@dataclass(frozen=True)
class ChosenLayout:
    """The layout that an attempt trains with, why, and its price (as `LayoutChosen` tells)."""

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


@dataclass(frozen=True)
class Prediction:
    """What the planner says of the newest workers, with their tables as they lie.

    `step_s` has the seconds of a step by phase, `memory_bytes` what the fullest rank takes by part;
    what its allocator keeps in reserve is none of it. `lookup_imbalance` is the largest over the
    mean. `sync_every_steps` is where tuning would come to, if the spec asks for that. `cluster` is
    the fingerprint of that which was planned for.
    """

    cluster: str
    samples_per_s: float
    lookup_imbalance: float
    step_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    sync_every_steps: int | None = None


@dataclass(frozen=True)
class Member:
    """A sharding group of a membership; `standing` as the coordinator says.

    `donor` is the group that it copies from.
    """

    group: int
    incarnation: int
    hosts: tuple[str, ...]
    standing: str
    donor: int | None = None


@dataclass(frozen=True)
class GoneGroup:
    """A group that was lost, or left as asked (`reason` says why), and has not joined again."""

    group: int
    incarnation: int
    hosts: tuple[str, ...]
    time: float
    reason: str
    message: str


@dataclass(frozen=True)
class Recovery:
    """How the groups went on after a loss: `pause_s` longer than usual between two syncs."""

    time: float
    generation: int
    cause: str
    pause_s: float
    syncs_lost: int
    num_tries: int


@dataclass(frozen=True)
class ExcludedHost:
    """A host that failed too often or is too slow: nothing goes there until `until` (Unix time)."""

    host: str
    num_failures: int
    until: float


@dataclass(frozen=True)
class Membership:
    """Which groups train in an attempt, derived from its records.

    `world_size` is the number of workers that it should have now, 0 while unknown. `changed_at` is
    the time of the newest membership, 0 before the first; `copies_alive` and `host_copies_alive`
    are those of the shard with the fewest. Counts and `recovery_pause_s` are totals of the attempt.
    """

    attempt_id: str
    layout: ChosenLayout | None = None
    world_size: int = 0
    changed_at: float = 0.0
    generation: int = 0
    commit: int = 0
    copies_alive: int = 0
    host_copies_alive: int = 0
    members: tuple[Member, ...] = ()
    gone: tuple[GoneGroup, ...] = ()
    num_losses: int = 0
    num_recoveries: int = 0
    recovery_pause_s: float = 0.0
    num_divergences: int = 0
    last_recovery: Recovery | None = None
    excluded_hosts: tuple[ExcludedHost, ...] = ()
    prediction: Prediction | None = None


@dataclass(frozen=True)
class QueueState:
    """The scheduler's state of a job.

    `since` is when it was last queued again, or started (Unix seconds). While it waits: its
    `position` (from 1), `reason` and `expected_start_at`, which are not stored. Once it started:
    the `workers` that it was counted with, and the most that its project's quota allows
    (`max_workers`). While it pauses: for how long its workers may save (`grace_s`), `stop_at`, when
    it is stopped whether it saved or not, once they were asked, `stop_sent` once it was, and the
    job that preempts it, if any (`preempted_by`, as `named_for` says). `num_free` is how many
    attempts in a row ended at nobody's cost, since the last pause or restart.
    """

    position: int | None = None
    reason: str = ""
    expected_start_at: float | None = None
    workers: int | None = None
    max_workers: int | None = None
    grace_s: float | None = None
    stop_at: float | None = None
    stop_sent: bool | None = None
    preempted_by: str | None = None
    num_free: int | None = None
    since: float | None = None


def attempt_id(job_id: str, index: int) -> str:
    """Id of attempt `index` (from 0) of a job, which is its submission id as well."""
    return f"{job_id}-a{index}"


@dataclass(frozen=True)
class Attempt:
    """One submission of a job to a backend. `id` is the submission id as well.

    `last_submit_at` is when the backend was last asked to take it, `submitted_at` when it did.
    `num_worker_failures` counts the losses of workers inside the attempt that spent the budget;
    `end_reason` is None while it lives, and `collect_at` is when records are due that its workers
    wrote after its end. Times are Unix seconds.
    """

    id: str
    job_id: str
    index: int
    created_at: float
    last_submit_at: float | None = None
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    end_reason: EndReason | None = None
    message: str = ""
    num_worker_failures: int = 0
    reported_end: ReportedEnd | None = None
    collect_at: float | None = None

    @property
    def evidence(self) -> Mapping[str, str]:
        """What the reason of the end was read from, as far as the driver reported it."""
        return self.reported_end.evidence if self.reported_end else {}


@dataclass(frozen=True)
class Job:
    """A training job as stored; `version` rises by one with every write (compare-and-set).

    `queued_at` (Unix seconds) is when it last entered the queue, and `queue_note` says what it
    waits for there. `resume_from` is the path of the checkpoint that its next attempt must start
    from; without one it starts from its newest.
    """

    id: str
    name: str
    # Newer checks may refuse what was stored.
    spec: SkipValidation[JobSpec]
    status: JobStatus
    created_at: float
    version: int = 1
    project: str = DEFAULT_PROJECT
    reason: EndReason | None = None
    message: str = ""
    cancel_requested: bool = False
    num_failures: int = 0
    retry_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    current_attempt_id: str | None = None
    progress: Progress = field(default_factory=Progress)
    latest_metrics: dict[str, float] = field(default_factory=dict)
    membership: Membership | None = None
    priority: int = 0
    pause_requested: bool = False
    queued_at: float | None = None
    resume_from: str | None = None
    queue_note: QueueState = QueueState()

    def named_for(self, reader: Job) -> str:
        """How this job is called in messages of another one: by name only in the same project."""
        is_shared = self.project == reader.project
        return f"job {self.id} ({self.name})" if is_shared else "a job of another project"

    def is_run_by(self, attempt: Attempt) -> bool:
        """Whether an attempt is the newest of this job and has not ended."""
        return self.current_attempt_id == attempt.id and attempt.end_reason is None

    @property
    def waits_since(self) -> float:
        """When it entered the queue; a retry, a pause and a preemption keep that."""
        return self.created_at if self.queued_at is None else self.queued_at

    @property
    def waits_anew_since(self) -> float:
        """When its present wait in the queue begins: after a pause or a backoff anew."""
        return self.queue_note.since or self.waits_since

    @property
    def num_attempts(self) -> int:
        """How many attempts the job has had, read off the id of the newest."""
        if self.current_attempt_id is None:
            return 0
        return int(self.current_attempt_id.rpartition("-a")[2]) + 1


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint of a job."""

    job_id: str
    step: int
    path: str
    size_bytes: int
    created_at: float
    is_best: bool
    metrics: dict[str, Value]


@dataclass(frozen=True)
class RemainingPath:
    """What a deletion left: folder or URL, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class MetricPoint:
    """One downsampled bucket: `value` is the mean, `step` and `time` those of its last point."""

    step: int
    time: float
    value: Value
    min: Value
    max: Value


@dataclass(frozen=True)
class TimelineEvent:
    """An event of a job's timeline. `id` rises along it: the cursor of pages and of streams."""

    id: int
    job_id: str
    attempt_id: str | None
    time: float
    kind: str
    message: str
    actor: str
    data: dict[str, object]


# Ids of jobs are `job-` and 12 characters that sort by time.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NUM_CHARS = 12
_RANDOM_BITS = 20
# 40 bits of milliseconds since the start of 2025 last until 2059.
_EPOCH_S = 1_735_689_600.0
_SLACK_MS = 1


def new_job_id(now: float) -> str:
    """An id that sorts after every id made a millisecond or more before `now` (Unix seconds)."""
    return _spelled(_elapsed_ms(now) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))


def lowest_job_id(now: float) -> str:
    """An id below every id made at `now` (Unix seconds) or later, though not by much."""
    return _spelled(max(0, _elapsed_ms(now) - _SLACK_MS) << _RANDOM_BITS)


def highest_job_id(now: float) -> str:
    """An id above every id made before `now` (Unix seconds), though not by much."""
    number = (_elapsed_ms(now) + 1 + _SLACK_MS) << _RANDOM_BITS
    return _spelled(min(number, 32**_NUM_CHARS - 1))


def _elapsed_ms(now: float) -> int:
    return max(0, int((now - _EPOCH_S) * 1000))


def _spelled(number: int) -> str:
    digits = [_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_NUM_CHARS))]
    return "job-" + "".join(digits)


@dataclass(frozen=True)
class Project:
    """Quotas of a project; None is no limit. A project without a row has none.

    `max_workers` bounds the workers of its running jobs together, `max_running_jobs` their number.
    """

    name: str
    max_workers: int | None = None
    max_running_jobs: int | None = None
    updated_at: float | None = None

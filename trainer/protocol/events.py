"""Typed records that a running attempt sends to the control plane.

Each writer (the driver, rank 0 of a worker group run) owns one *stream*: a file of JSON lines in
the attempt's outbox. The position of a line in its file is its sequence number, so a record
is known by (attempt, stream, seq) and the control plane can take each exactly once, however
often a batch is sent. Pydantic only: both sides import this.
"""

from __future__ import annotations

import re
import time
from itertools import chain
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

STREAM_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
# Of one record as a line; a longer one counts as damaged.
MAX_RECORD_BYTES = 1 << 22
_MAX_MESSAGE_CHARS = 20_000
_MAX_TEXT_CHARS = 4096


def shortened(message: str) -> str:
    """A message as long as lists of jobs can show: the whole one is in the job's logs."""
    if len(message) <= _MAX_MESSAGE_CHARS:
        return message
    half = _MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} [...] {message[-half:]}"


def _told(message: str) -> str:
    # Names of files, which errors tell, may hold bytes that are no UTF-8: no record can carry them.
    return shortened(message.encode(errors="replace").decode())


# What a 64-bit column can hold.
Count = Annotated[int, Field(ge=0, lt=2**63)]
# Databases multiply it by numbers of points.
Step = Annotated[int, Field(ge=0, lt=2**48)]
# Of workers, groups or hosts. Readers allocate by these, and the scheduler counts with them.
Size = Annotated[int, Field(ge=1, le=2**17)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Unix seconds up to the year 9999.
Moment = Annotated[float, Field(ge=0, lt=253_402_300_800)]
# The longest name in the DNS.
Host = Annotated[str, Field(max_length=253)]
Message = Annotated[
    str,
    Field(max_length=_MAX_MESSAGE_CHARS + 10),
    BeforeValidator(lambda given: _told(given) if isinstance(given, str) else given),
]
# Of letters of any script; pages and files show names, so that none may look like markup.
METRIC_NAME_PATTERN = r"""^[^"'`<>&\\\x00-\x1f\x7f-\x9f]+$"""
_METRIC_NAME = re.compile(METRIC_NAME_PATTERN)


def _well_named(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if _METRIC_NAME.fullmatch(name)}


# By name; a job may report anything, and loses what has no proper name.
Values = Annotated[dict[str, float], AfterValidator(_well_named)]
# What a newer trainer adds is left out: refused, it would hold up all records after it.
_LIMITS = ConfigDict(extra="ignore", frozen=True, str_max_length=_MAX_TEXT_CHARS)


class EventModel(BaseModel):
    """Base of every record. `time` is Unix time in seconds.

    Whoever runs code in a job can write any record, so that none may hold what would be too much
    for its readers.
    """

    # A NaN loss is news worth sending: JSON has no word for it, so it travels as the string "NaN".
    model_config = ConfigDict(**_LIMITS, ser_json_inf_nan="strings")

    time: Moment


class Note(EventModel):
    """Something a person should read, without other consequence."""

    kind: Literal["note"] = "note"
    level: Literal["info", "warning", "error"] = "info"
    message: Message


class AttemptStarted(EventModel):
    """The driver is up and about to start workers."""

    kind: Literal["attempt_started"] = "attempt_started"
    world_size: Size
    versions: dict[str, str] = {}


class EventPart(BaseModel):
    """Base of what records hold."""

    model_config = _LIMITS


class TablePlan(EventPart):
    """How the planner sharded one table inside each sharding group.

    `shards` has, for each shard, the position in the sharding group (0 to L - 1), the first row
    and column that it holds and their number. A data-parallel table is whole at every position, and
    lists none.
    """

    class Shard(EventPart):
        """A rectangle of the table."""

        position: Count
        row_offset: Count
        column_offset: Count
        num_rows: Count
        num_columns: Count

    name: str
    sharding_type: str
    data_type: str
    num_embeddings: Count
    embedding_dim: Count
    size_bytes: Count = Field(description="Weights and optimizer state of one whole copy.")
    shards: list[Shard]


class Prediction(EventPart):
    """What the planner says of these workers, whose tables lie as `tables` tells.

    `step_s` has the seconds of a step by phase, `memory_bytes` what each position of a sharding
    group takes by part, both as `trainer.layout.cost` names them without their units;
    `lookup_imbalance` is the largest over the mean. `sync_every_steps` is None where there is one
    copy, else what the spec says or its tuning would come to. `cluster` is the fingerprint of that
    which was planned for.
    """

    cluster: str
    samples_per_s: Finite
    lookup_imbalance: Finite
    step_s: dict[str, Finite]
    memory_bytes: dict[str, list[Count]]
    sync_every_steps: Count | None = None


class WorkersStarted(EventModel):
    """A worker group run has built its process groups; `resumed_step` is 0 on a fresh start.

    `tables` is empty where it would make the record longer than one may be, `prediction` None where
    too little is known of the cluster.
    """

    kind: Literal["workers_started"] = "workers_started"
    run_index: Count
    world_size: Size
    shard_group_size: Size
    num_replicas: Size
    placement: str
    backend: str
    sharding_groups: list[list[int]]
    replica_groups: list[list[int]]
    hosts: list[Host] = Field(description="Host of each rank, indexed by rank.")
    table_shards: dict[str, str] = Field(description="Sharding type chosen for each table.")
    tables: list[TablePlan] = []
    total_steps: Step
    resumed_step: Step
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        """Readers look positions and ranks up."""
        shards = (shard for table in self.tables for shard in table.shards)
        if any(shard.position >= self.shard_group_size for shard in shards):
            raise ValueError("a shard is at a position that no sharding group has")
        if {*chain(*self.sharding_groups)} != {*chain(*self.replica_groups)}:
            raise ValueError("sharding groups and replica groups are not of the same ranks")
        return self


Phase = Literal[
    "data_wait",
    "input_dist",
    "lookup",
    "output_dist",
    "dense",
    "backward",
    "optimizer",
    "sync",
    "other",
]
"""Phases of a training step in the order in which they happen; the metric is `phase/NAME_s`."""
PHASES: tuple[Phase, ...] = get_args(Phase)
# Name of a metric -> what it says; words in capitals stand for names and numbers of the job.
METRICS = {
    "train/METRIC": "loss and task metrics since the last report; of several tasks "
    "`train/TASK/METRIC`, and `train/loss` is their weighted sum",
    "validation/METRIC": "the same of the validation part; none of no rows, and no `ne` or `auc` "
    "of rows of one class",
    "speed/rows_per_s": "rows a second by all ranks since the last report; without validations and "
    "saves, but where groups are failure domains",
    "speed/steps_per_s": "steps per second, likewise",
    "phase/PHASE_s": f"seconds of a step, mean over the ranks: {', '.join(PHASES)}",
    "phase/lookup_s/POSITION": "the most of the ranks at this position of their sharding groups",
    "data/quarantined_rows": "rows left out since the last report",
    "sync/time_s": "seconds of a sync, the mean since the last report",
    "sync/bytes": "bytes that a rank sent for a sync, likewise",
    "sync/density": "share of the rows that a sync moved, likewise",
    "sync/every_steps": "steps between syncs, where that is `auto`",
    "balance/lookup": "ids looked up: busiest rank over the mean of all (1 is perfect)",
    "balance/gradient": "distinct rows updated: busiest rank over the mean of all",
    "balance/step": "time on work of their own: slowest rank over the mean of all",
    "balance/lookup_time": "time in lookups: slowest rank over the mean of all",
    "table/TABLE/lookups": "ids looked up in a step, over the ranks that report together",
    "table/TABLE/hottest": "share of them that go to the hundredth looked up most of a step's rows",
    "table/TABLE/synced": "share of the table's rows that a sync averages",
    "memory/peak_rss_bytes": "the most host memory that any rank has taken so far",
    "memory/peak_rss_bytes/POSITION": "of the ranks at this position of their sharding groups, "
    "which hold the same shards",
    "memory/host_used_share": "share in use of the memory of the fullest host, or container; at 1 "
    "processes are killed",
    "memory/peak_allocated_bytes": "on GPUs, the most that tensors of any rank have taken so far",
    "memory/peak_allocated_bytes/POSITION": "likewise, of the ranks at this position",
    "memory/peak_reserved_bytes": "on GPUs, the most that PyTorch has held for them so far",
    "memory/gpu_used_bytes": "on GPUs, the most that is taken now, by whatever",
    "memory/alloc_retries": "on GPUs, the most of any rank: how often PyTorch gave back what it "
    "held before it got more, so that memory is short",
    "optimizer/lr_sparse": "learning rate of the tables",
    "optimizer/lr_dense": "learning rate of the dense part",
    "optimizer/gradient_norm": "norm of the dense gradient",
    "checkpoint/write_s": "seconds of a save beside the training",
    "checkpoint/stall_s": "seconds that training waited for it",
    "dynamic/TABLE/fill": "of a dynamic table, share of its rows that belong to an id",
    "dynamic/TABLE/shared": "share of its lookups by ids without a row of their own",
    "dynamic/TABLE/admitted": "ids that got a row since the last report",
    "dynamic/TABLE/evicted": "ids that lost one since the last report",
    "goodput/share": "share of the groups' time that trained rows that count",
    "goodput/lost_s/CAUSE": "group-seconds lost to `start`, `recovery`, `hang`, `checkpoint`, "
    "`validation` (which counts as training where the whole job is one failure domain), `redo`",
    "risk/steps_undurable": "steps that are in no durable checkpoint yet",
    "elastic/groups": "groups that train now",
    "elastic/generation": "number of the membership",
    "elastic/commit_interval_s": "median seconds between commits",
}


class Metrics(EventModel):
    """Values at a step, by name as in `METRICS`."""

    kind: Literal["metrics"] = "metrics"
    step: Step
    values: Values


class Progress(EventModel):
    """How far training has come. `rows` counts rows trained by all ranks, repeats excluded."""

    kind: Literal["progress"] = "progress"
    step: Step
    total_steps: Step
    epoch: Count
    rows: Count
    rows_per_s: float
    eta_s: float


class CheckpointCommitted(EventModel):
    """A checkpoint whose commit marker is on storage: from now on it exists."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    step: Step
    path: str
    size_bytes: Count
    duration_s: Finite
    is_best: bool = False
    metrics: Values = {}


class CheckpointDeleted(EventModel):
    """A checkpoint that retention removed."""

    kind: Literal["checkpoint_deleted"] = "checkpoint_deleted"
    step: Step
    path: str


class Divergence(EventModel):
    """Copies of a shard that should be equal are not.

    `ranks` hold `shard` (0 to L - 1) of `table` with contents that differ from the other copies
    of their replica group; `action` is what follows.
    """

    kind: Literal["divergence"] = "divergence"
    step: Step
    table: str
    shard: Count
    ranks: list[int]
    action: Literal["fail", "rebroadcast"]


class SyncIntervalChanged(EventModel):
    """With `parallelism.sync.every_steps: auto`: the copies are averaged at other steps from here.

    Those whose number `every_steps` divides, rather than `every_steps_before`; where groups are
    failure domains, after leases of so many.
    """

    kind: Literal["sync_interval_changed"] = "sync_interval_changed"
    step: Step
    every_steps_before: Count
    every_steps: Count
    reason: Message


class LayoutChosen(EventModel):
    """The layout that the attempt trains with, why, and its price.

    `num_hosts_survived` hosts may be lost at once with a full copy left. `memory_overhead_bytes`
    is what the other copies cost each rank, S (M - 1) / T, and `sync_latency_s` the time of a full
    sync, 2 S (M - 1) / (T B) (2D sparse parallelism paper, eq. 1); None where B is not known.
    """

    kind: Literal["layout_chosen"] = "layout_chosen"
    world_size: Size
    shard_group_size: Size
    num_replicas: Size
    placement: str
    failure_domain: Literal["job", "replica_group"]
    num_hosts: Count
    num_hosts_survived: Count
    memory_overhead_bytes: Count
    sync_latency_s: Finite | None = None
    reason: Message


GroupState = Literal["initial", "spare", "listening", "current"]
"""`initial`: as the seed or a checkpoint made it; `spare`: holds nothing, is in no round and waits
until it is wanted; `listening`: copying from a peer, hears every round at weight 0; `current`:
holds the newest commit and trains."""
LeaveCause = Literal["resize", "drain", "straggler", "poisoned"]


class GroupMember(EventPart):
    """One sharding group of a membership; `donor` is the group that serves its copy."""

    group: Count
    incarnation: Count
    hosts: list[Host]
    standing: GroupState
    donor: Count | None = None


class MembershipChanged(EventModel):
    """Who is there from this generation on.

    `copies_alive` counts, for the shard with the fewest, the copies held by groups that are
    current; `host_copies_alive` the hosts that those are on.
    """

    kind: Literal["membership_changed"] = "membership_changed"
    generation: Count
    commit: Count
    groups: list[GroupMember]
    copies_alive: Count
    host_copies_alive: Count


class GroupLost(EventModel):
    """A sharding group ended that should have gone on; the others train on.

    One that `is_spare` held nothing.
    """

    kind: Literal["group_lost"] = "group_lost"
    group: Count
    incarnation: Count
    reason: Message
    message: Message
    hosts: list[Host]
    rows_returned: Count = Field(description="Rows of its leases, which others will train.")
    is_spare: bool = False


class GroupJoined(EventModel):
    """A group is current now: from the start, or after copying from a live peer, the `donor`."""

    kind: Literal["group_joined"] = "group_joined"
    group: Count
    incarnation: Count
    hosts: list[Host]
    how: Literal["start", "peer_copy"]
    donor: Count | None = None
    copied_bytes: Count = 0
    duration_s: Finite = Field(default=0.0, description="From its first word to its first lease.")


class GroupLeft(EventModel):
    """A group left as asked: its leases went back and nothing was lost."""

    kind: Literal["group_left"] = "group_left"
    group: Count
    incarnation: Count
    cause: LeaveCause
    hosts: list[Host]


class Recovered(EventModel):
    """The first sync that counted after a group was lost or a round failed.

    `pause_s` is how much longer than usual the other groups were between two commits, validation
    left out, `syncs_lost` the intervals of work that have to be done again.
    """

    kind: Literal["recovered"] = "recovered"
    generation: Count
    commit: Count
    cause: Message
    pause_s: Finite
    syncs_lost: Count
    num_tries: Count


class CapacityRequested(EventModel):
    """The autoscaler of the cluster was asked for room beside that for `num_workers`.

    With fewer than `num_needed` the job waits; with more it trains meanwhile.
    """

    kind: Literal["room_asked"] = "room_asked"
    num_workers: Count
    num_wanted: Count
    num_needed: Count
    resources_per_worker: dict[str, Finite] = {}


class Resized(EventModel):
    """The job trains with another number of workers from here on."""

    kind: Literal["resized"] = "resized"
    world_size_before: Size
    world_size: Size
    cause: str
    restarted: bool


class StragglerFound(EventModel):
    """A rank is persistently slower than the others.

    It takes `own_s` for a step when it waits for nobody, the median rank `median_s`. With `replace`
    its workers move to another host.
    """

    kind: Literal["straggler_found"] = "straggler_found"
    group: Count
    rank: Count
    host: Host
    slowdown: Finite = Field(description="`own_s` over `median_s`.")
    own_s: Finite = 0.0
    median_s: Finite = 0.0
    action: Literal["none", "replace"]


class HangFound(EventModel):
    """A rank got nothing done for too long although its process lives."""

    kind: Literal["hang_found"] = "hang_found"
    group: Count
    rank: Count
    host: Host
    phase: str
    idle_s: Finite


class HostExcluded(EventModel):
    """A host is left out for a while, as it failed too often or is too slow.

    `reason` is what the node check found, or how slow a straggler on it was; empty for failures.
    """

    kind: Literal["host_excluded"] = "host_excluded"
    host: Host
    num_failures: Count
    until: Moment
    reason: Message = ""


class RowsSkipped(EventModel):
    """Rows left out because the loss became NaN or infinite on them.

    They lie between `start` and `stop`: `num_rows` of these, or all.
    """

    kind: Literal["rows_skipped"] = "rows_skipped"
    epoch: Count
    start: Count
    stop: Count
    num_rows: Count | None = None
    reason: Message


class RowsQuarantined(EventModel):
    """Rows left out since the last such event because they cannot be used. Of the first epoch."""

    kind: Literal["rows_quarantined"] = "rows_quarantined"
    file: Message
    reason: Message
    count: Count


class TraceWritten(EventModel):
    """A profiler trace of some steps of one rank lies on run storage (Chrome trace format)."""

    kind: Literal["trace_written"] = "trace_written"
    step: Step = Field(description="The last step in the trace.")
    num_steps: Count
    rank: Count
    path: str
    size_bytes: Count


class WorkersLost(EventModel):
    """A worker group run ended early; the driver restarts it if its budget allows."""

    kind: Literal["workers_lost"] = "workers_lost"
    run_index: Count
    reason: Message
    message: Message
    will_restart: bool
    evidence: dict[str, Message] = {}


class AttemptEnded(EventModel):
    """Last record of an attempt that ended on its own; `reason` is an EndReason value."""

    kind: Literal["attempt_ended"] = "attempt_ended"
    reason: Message
    message: Message
    final_metrics: Values = {}
    evidence: dict[str, Message] = {}


Event = Annotated[
    Note
    | AttemptStarted
    | WorkersStarted
    | Metrics
    | Progress
    | CheckpointCommitted
    | CheckpointDeleted
    | Divergence
    | SyncIntervalChanged
    | LayoutChosen
    | MembershipChanged
    | GroupLost
    | GroupJoined
    | GroupLeft
    | Recovered
    | CapacityRequested
    | Resized
    | StragglerFound
    | HangFound
    | HostExcluded
    | RowsSkipped
    | RowsQuarantined
    | TraceWritten
    | WorkersLost
    | AttemptEnded,
    Field(discriminator="kind"),
]
EVENT_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def write_record(event: Event) -> bytes:
    """The record as a line. Workers are told of without their tables where those take too much."""
    line = event.model_dump_json().encode() + b"\n"
    if len(line) > MAX_RECORD_BYTES and isinstance(event, WorkersStarted) and event.tables:
        return write_record(event.model_copy(update={"tables": []}))
    return line


def read_record(line: bytes, now: float) -> Event:
    """The record on one line of a stream; a damaged line becomes a note, so that numbering holds.

    `now` (Unix seconds) dates that note.
    """
    try:
        return EVENT_ADAPTER.validate_json(line if len(line) <= MAX_RECORD_BYTES else b"")
    except ValidationError:
        return damaged_record(now)


def damaged_record(now: float) -> Note:
    """What takes the place of a record that cannot be read or stored."""
    return Note(
        time=now,
        level="warning",
        message="an event record cannot be read: it was damaged, or a newer version wrote it",
    )


def _readable(given: Any, read: ValidatorFunctionWrapHandler) -> Event:
    try:
        event: Event = read(given)
    except ValidationError:
        return damaged_record(time.time())
    return event


class EventBatch(BaseModel):
    """Consecutive records of one stream; `events[i]` has sequence number `first_seq + i`.

    A note takes the place of one that cannot be read, as in `read_record`.
    """

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")

    stream: Annotated[str, Field(pattern=STREAM_PATTERN)]
    first_seq: Count
    events: Annotated[list[Annotated[Event, WrapValidator(_readable)]], Field(max_length=1000)]


class EventAck(BaseModel):
    """Answer to a batch: everything below `next_seq` of the stream is durable."""

    stream: str
    next_seq: int

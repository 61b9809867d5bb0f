"""Messages between groups and the coordinator: JSON lines over TCP, as pure data.

A *round* (docs/design/elastic.md) is one try at a sync: `Arrive`, `Round`, `Vote`, `RoundResult`.
Ranks send the same messages to their group's agent, which makes one of them for all.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import sub
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from trainer.coordination.sync_tuner import Observation, TunerState
from trainer.protocol.events import GroupState

WATCH_SILENCE_S = 30.0
"""Longest silence of a worker in the domain `job`, where only its peers wait for it."""

Count = Annotated[int, Field(ge=0)]
# Copies trained on rows of weight 0 alone must become equal again: decay and moments moved them.
_LEAST_ROW_WEIGHT = 1e-9
_FAST = 1  # level of compression
_WORD = 8  # bytes of a number
Span = tuple[Count, Count]
"""Rows [start, stop) of an epoch's order."""
Share = tuple[Count, Count]
"""(place, n): the part of the validation rows that one of n groups measures."""


class Message(BaseModel):
    """Base of everything that travels."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Lease(Message):
    """Rows of the order of `epoch` that one group may train between two syncs.

    The spans lie apart and are given in the order in which the ranks of the group share them.
    """

    id: Count
    epoch: Count
    spans: tuple[Span, ...]

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.spans)


class EpochRows(Message):
    """Rows of one epoch that are done: trained by a committed sync, or skipped on purpose.

    Sorted spans that neither overlap nor touch.
    """

    epoch: Count
    done: tuple[Span, ...] = ()


def _pack(epochs: Sequence[EpochRows]) -> list[tuple[int, str]]:
    """Rows of epochs in a few bytes a span: distances between bounds, compressed."""
    return [(each.epoch, _pack_spans(each.done)) for each in epochs]


def _pack_spans(spans: Sequence[Span]) -> str:
    bounds = list(chain.from_iterable(spans))
    distances = list(map(sub, bounds, [0, *bounds]))
    # Gaps apart from lengths, which are much alike, and of all numbers the same byte together.
    packed = struct.pack(f"<{len(bounds)}q", *distances[::2], *distances[1::2])
    planes = b"".join(packed[place::_WORD] for place in range(_WORD))
    return base64.b64encode(zlib.compress(planes, _FAST)).decode()


def _unpack(value: Any) -> Any:
    """What `_pack` made of epochs; other values, such as epochs, are left to their validation."""
    is_packed = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if not is_packed:
        return value
    return [{"epoch": epoch, "done": _unpack_spans(text)} for epoch, text in value]


def _unpack_spans(text: str) -> list[Span]:
    try:
        planes = zlib.decompress(base64.b64decode(text))
        packed, num_words = bytearray(len(planes)), len(planes) // _WORD
        for place in range(_WORD):
            packed[place::_WORD] = planes[place * num_words : (place + 1) * num_words]
        distances = struct.unpack(f"<{num_words}q", packed)
    except (zlib.error, struct.error) as error:
        raise ValueError(f"no packed spans: {error}") from None
    half = len(distances) // 2
    gaps_and_lengths = zip(distances[:half], distances[half:], strict=True)
    bounds = list(accumulate(chain.from_iterable(gaps_and_lengths)))
    return list(zip(bounds[::2], bounds[1::2], strict=True))


class EarlyStoppingState(Message):
    """How long validation has stood still: `num_validations` since one found `best`."""

    best: float | None = None
    num_validations: Count = 0


class LeaderProgress(Message):
    """Up to which step and epoch a leader has done what it does for all groups.

    That a save was begun counts in `step`; `saved_step` is that of the newest durable checkpoint.
    """

    step: Count = 0
    epoch: Count = 0
    saved_step: Count = 0


class Ledger(Message):
    """What the committed syncs add up to.

    `commit` counts them. Epochs below `epoch` are complete; `open_epochs` holds those begun from
    there on. `rows_trained` counts rows trained by committed syncs, `rows_skipped` rows left out on
    purpose. `round` is the round that made `commit`: a number of commits alone does not say which
    try it was. `led` says up to where some leader has validated and saved what was due: what a
    leader was lost over stays due for the next. `quarantined` is (an epoch, how many bad rows its
    commits left out), of the epoch that was trained last. As JSON `open_epochs` are packed: every
    lane of every group adds a span.
    """

    commit: Count = 0
    round: Count = 0
    epoch: Count = 0
    open_epochs: Annotated[
        tuple[EpochRows, ...],
        BeforeValidator(_unpack),
        PlainSerializer(_pack, when_used="json"),
    ] = ()
    rows_trained: Count = 0
    rows_skipped: Count = 0
    best: float | None = None
    plateau: EarlyStoppingState | None = None
    metrics: dict[str, float] = {}
    led: LeaderProgress = LeaderProgress()
    quarantined: tuple[Count, Count] = (0, 0)
    tuning: TunerState | None = Field(default=None, description="Where the interval is tuned.")

    @property
    def rows_done(self) -> int:
        return self.rows_trained + self.rows_skipped


class RankProcess(Message):
    """The process of one rank of a group; `donor` is where it serves its shard, and the store of a
    generation (host:port)."""

    rank: Count
    host: str
    pid: Count
    donor: str


class Hello(Message):
    """First words on a connection, also after the coordinator was restarted: for whom it speaks.

    It may be said again on the same connection with another `standing`: as `listening` with
    nothing at hand a group asks whether there is somebody to copy from (`Welcome.has_current`), and
    comes again as `initial` when there is not.

    An agent speaks for all `ranks` of its group, a rank for itself alone. `incarnation` counts the
    lives of a group: a newer one fences the older. `origin` names the state that an `initial` group
    starts from. `leases` are those that the group holds. `plan` is a checksum of which rows of
    which tables each of its ranks holds: copies that differ in it cannot be averaged.
    """

    kind: Literal["hello"] = "hello"
    group: Count
    incarnation: Count
    ranks: Annotated[tuple[RankProcess, ...], Field(min_length=1)]
    origin: str
    standing: GroupState
    ledger: Ledger
    leases: tuple[Lease, ...] = ()
    members: tuple[tuple[Count, Count], ...] = Field(
        default=(), description="(group, incarnation) of the last round this group was in."
    )
    round: Count = Field(default=0, description="The highest round that this group was in.")
    generation: Count = Field(default=0, description="The highest generation that it was in.")
    plan: str = ""


class Welcome(Message):
    """Answer to `Hello`."""

    kind: Literal["welcome"] = "welcome"
    has_current: bool = Field(
        default=False, description="Whether some group holds commits that are worth copying."
    )


HeartbeatPhase = Literal["start", "train", "data_wait", "validation", "checkpoint"]
"""What a rank is at: in all but `train` it may stand still for longer (`UNTIMED_FACTOR`)."""


class Heartbeat(Message):
    """Says that the process of `rank` lives; `progress` counts what its main thread got done, and
    `num_steps` the steps that it began.

    `step_time_s` is the median time of its newest steps without waiting for other groups,
    `local_s` what of a step it waited for no rank at all, reading included; 0 if unknown. It
    `is_waiting` for the rest of its group, or for an answer.
    """

    rank: Count = 0
    progress: Count
    num_steps: Count = 0
    phase: HeartbeatPhase
    step_time_s: float = 0.0
    local_s: float = 0.0
    is_waiting: bool = False


class Heartbeats(Message):
    """The heartbeats that a connection has heard since it sent the last ones."""

    kind: Literal["heartbeats"] = "heartbeats"
    ranks: tuple[Heartbeat, ...]


class GroupEnded(Message):
    """A rank has ended, or contradicts the others of its group, which cannot go on."""

    kind: Literal["ended"] = "ended"
    reason: Literal["connection", "stale"]
    message: str


class Report(Message):
    """What the leader tells the others by way of the ledger; fields left None say nothing."""

    best: float | None = None
    plateau: EarlyStoppingState | None = None
    metrics: dict[str, float] = {}
    led: LeaderProgress | None = None
    validation_error: float | None = Field(default=None, description="Of a new one; 0: perfect.")
    has_finished: bool = False


class Arrive(Message):
    """A group is ready for the next sync, having trained `leases` (ids, whole ones) since the last.

    Its copy weighs `weight`, the sum of its rows' weights, or `num_rows` where None. `has_copied`
    says that a listener's copy is complete; `is_poisoned` that this group's loss or a gradient
    became NaN or infinite, so its interval must not count. `may_overlap` says that the group could
    train on while the averages are formed. `needs_exact` asks for a round that `is_exact`, as
    before a save. `measured` is the share of the validation rows that it has measured on `commit`,
    if any, and `synced` what the last sync and its steps took. `num_quarantined` of its rows were
    left out.
    """

    kind: Literal["arrive"] = "arrive"
    commit: Count
    leases: tuple[Count, ...] = ()
    num_rows: Count = 0
    train_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="What the leases took, without waiting for other groups."
    )
    weight: Annotated[float, Field(ge=0)] | None = None
    has_copied: bool = False
    is_poisoned: bool = False
    may_overlap: bool = False
    needs_exact: bool = False
    measured: Share | None = None
    synced: Observation | None = None
    num_quarantined: Count = 0
    report: Report | None = None
    copied_bytes: Count = Field(default=0, description="What a listener has copied so far.")

    @property
    def copy_weight(self) -> float:
        """How much its copy counts: never nothing where rows were trained, as it has changed."""
        if self.weight is None:
            return float(self.num_rows)
        return max(self.weight, _LEAST_ROW_WEIGHT * self.num_rows)


Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RoundMember(Message):
    """One group in a round, by its place in the replica groups."""

    group: Count
    incarnation: Count
    standing: GroupState
    hosts: tuple[str, ...] = Field(default=(), description="Host of each rank.")


def host_of(members: Sequence[RoundMember]) -> int:
    """The place of the group with which the others meet: the first that trains, if one does."""
    return next((i for i, each in enumerate(members) if each.standing == "current"), 0)


class Roster(Message):
    """Who is in the rounds that this connection is told of from now on.

    It precedes the first round of a connection and any whose members differ. With `gone` it is a
    change of the last one: these groups are not in it any more, and `members` are new, or others
    than before.
    """

    kind: Literal["roster"] = "roster"
    members: tuple[RoundMember, ...]
    gone: tuple[Count, ...] | None = None

    def since(self, before: Roster) -> Roster:
        """This whole one as a change of a whole one."""
        known = {each.group: each for each in before.members}
        new = tuple(each for each in self.members if known.pop(each.group, None) != each)
        return Roster(members=new, gone=tuple(known))

    def after(self, before: Roster) -> Roster:
        """The whole one after this, of which `before` was told."""
        if self.gone is None:
            return self
        members = {each.group: each for each in (*before.members, *self.members)}
        for group in self.gone:
            del members[group]
        return Roster(members=tuple(member for _, member in sorted(members.items())))


class Round(Message):
    """Answer to `Arrive`: average with these, then vote.

    `generation` changes with the members and after every round that failed. Process groups are
    formed anew for it; `stores` (host:port) are where the ranks of each shard meet, by rank:
    with one of the groups. `weights` go by member, and one of weight 0 hears without counting.
    `commit` is the number that this sync will have. With `is_idle` there is
    nothing to average; with `is_exact` everything that differs is averaged, in full precision,
    whatever the policy. With `joins_validation` the sums over all shares of the validation rows are
    added up. `donors` are where a listener copies its shards from, by rank. With
    `overlaps` all ranks of the group train on from here, and apply the averages when they have
    trained what they hold. It travels without `members`, which are those of the newest `Roster`.
    """

    kind: Literal["round"] = "round"
    round: Count
    generation: Count
    members: tuple[RoundMember, ...] = ()
    weights: tuple[Weight, ...] = ()
    commit: Count
    is_idle: bool = False
    is_exact: bool = False
    joins_validation: bool = False
    overlaps: bool = False
    stores: tuple[str, ...] = ()
    donors: tuple[str, ...] = ()


Checksums = tuple[tuple[str, int], ...]
"""(table or whatever else, checksum) of one rank: alike on the same rank of all groups."""


class Vote(Message):
    """Whether a group holds the averages of `round`; it applies nothing before the verdict.

    Without `ok`, `error` says why, and `suspects` are the groups that it could not reach.
    One that `gave_up` as the round had failed for others knows nothing itself. `checksums` are, by
    rank, of all that must be equal on the copies, where that is to be compared: what the round
    leaves alone, and the averages.
    """

    kind: Literal["vote"] = "vote"
    round: Count
    commit: Count
    ok: bool
    error: str = ""
    suspects: tuple[Count, ...] = ()
    gave_up: bool = False
    checksums: tuple[Checksums, ...] = ()


class RoundResult(Message):
    """Answer to `Vote`. When `committed`, every rank of the round applies its averages.

    `ledger` is the newest one and `leases` are all that the group holds now, in the order to train
    them. `leader` is the group that saves and reports, and `share` what this one measures where
    validation is due. `standing` is the group's own from here on; a listener whose `standing` is
    `initial` starts its copy over, and not before the next `Round`: until then its donor may not
    have applied this sync. After `should_leave` or `has_finished` the group ends. One that was not
    asked for (`Answered.id` 0) says that `round` has failed, to ranks that may still be waiting in
    a collective of it. To a listener that it was committed without, a round was not committed.
    """

    kind: Literal["verdict"] = "verdict"
    committed: bool
    round: Count = 0
    ledger: Ledger
    leases: tuple[Lease, ...] = ()
    leader: Count = 0
    share: Share = (0, 1)
    standing: GroupState = "current"
    should_leave: bool = False
    has_finished: bool = False
    num_saves: Count = Field(
        default=0, description="Checkpoints that the driver has asked for, to be saved soon."
    )


class Rejection(Message):
    """Answer to anything: `fenced` ends the process, since another life of its group counts.

    A spare that is not wanted any more is `dismissed`, and ends well.
    """

    kind: Literal["refusal"] = "refusal"
    reason: Literal["fenced", "failed", "dismissed"]
    message: str


Request = Annotated[Hello | Heartbeats | Arrive | Vote | GroupEnded, Field(discriminator="kind")]
Answer = Annotated[Welcome | Roster | Round | RoundResult | Rejection, Field(discriminator="kind")]


class Numbered(Message):
    """One line to the coordinator: `id` comes back with the answer. Heartbeats have none."""

    id: Count
    body: Request


class Answered(Message):
    """One line from the coordinator; `id` 0 answers nothing but tells something at once."""

    id: Count
    body: Answer

"""View models of the groups section: who trained when, copies alive, recoveries, losses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.dashboard import format
from service.domain.membership import (
    CURRENT,
    FOR_GOOD,
    copies_needed,
    group_size,
    is_degraded,
    membership_of,
    missing,
    num_current,
    num_wanted,
)
from service.domain.metrics import Goodput, goodput_of, steps_at_risk
from service.domain.models import Checkpoint, Job, JobStatus, Membership, TimelineEvent
from service.domain.timeline import latest_resize_request

TONES = {"current": "good", "listening": "active", "initial": "neutral", "gone": "bad"}
WORDS = {
    "current": "trains",
    "listening": "copies from a peer",
    "initial": "starts",
    "gone": "is gone",
}
_DOMAINS = {
    "replica_group": "A lost host takes down its groups; the others train on.",
    "job": "A lost worker restarts all of them from the newest checkpoint.",
}


@dataclass(frozen=True)
class Span:
    """A time in which a group had one standing; `left` and `width` in percent of the row."""

    left: float
    width: float
    tone: str
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """The life of one group number, with the hosts that it was on last."""

    group: int
    hosts: str
    standing: str
    tone: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Fact:
    """One line of the facts; `tone` colours what needs attention."""

    name: str
    text: str
    tone: str = "neutral"
    hint: str = ""


@dataclass(frozen=True)
class GroupsView:
    """The section; `rows` are empty where the job told no groups."""

    rows: tuple[TimelineRow, ...]
    since: str
    until: str
    facts: tuple[Fact, ...]
    goodput: Goodput | None

    @property
    def has_content(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.rows or self.facts or self.goodput)


def groups_view(
    job: Job, timeline: Sequence[TimelineEvent], checkpoints: Sequence[Checkpoint], now: float
) -> GroupsView:
    """The section of a job; `now` is Unix time in seconds."""
    lines = [line for line in timeline if line.attempt_id == job.current_attempt_id]
    changes = standings_over_time(lines)
    end = job.ended_at or now
    start = changes[0][0] if changes else end
    return GroupsView(
        rows=_timeline_rows(changes, lines, end),
        since=format.clock(start - job.created_at),
        until=format.clock(end - job.created_at),
        facts=tuple(_facts(job, timeline, checkpoints, now)),
        goodput=goodput_of(job.latest_metrics),
    )


def standings_over_time(lines: Iterable[TimelineEvent]) -> list[tuple[float, dict[int, str]]]:
    """(time, standing by group) after each change, in the order of time; `gone` after a loss."""
    changes: list[tuple[float, dict[int, str]]] = []
    known: dict[int, str] = {}
    for line in sorted(lines, key=lambda line: line.time):
        data: Mapping[str, Any] = line.data
        match line.kind:
            case "membership_changed":
                present = {each["group"]: each["standing"] for each in data["groups"]}
                known = {**dict.fromkeys(known, "gone"), **present}
            case "group_left" if data["cause"] in FOR_GOOD:
                known = {group: known[group] for group in known if group != data["group"]}
            case "group_lost" | "group_left":
                known = {**known, data["group"]: "gone"}
            case "resized":
                # The job goes on without those that are gone.
                known = {group: known[group] for group in known if known[group] != "gone"}
            case _:
                continue
        changes.append((line.time, known))
    return changes


def _timeline_rows(
    changes: Sequence[tuple[float, dict[int, str]]], lines: Sequence[TimelineEvent], end: float
) -> tuple[TimelineRow, ...]:
    if not changes:
        return ()
    hosts = {each["group"]: ", ".join(dict.fromkeys(each["hosts"])) for each in _told_groups(lines)}
    groups = sorted({group for _, standings in changes for group in standings})
    newest = changes[-1][1]
    return tuple(
        TimelineRow(
            group=group,
            hosts=hosts.get(group, ""),
            standing=WORDS.get(newest.get(group, "gone"), newest.get(group, "")),
            tone=TONES.get(newest.get(group, "gone"), "neutral"),
            spans=_spans(changes, group, end),
        )
        for group in groups
    )


def _spans(
    changes: Sequence[tuple[float, dict[int, str]]], group: int, end: float
) -> tuple[Span, ...]:
    """The standings of one group, neighbours of one kind joined."""
    start = changes[0][0]
    whole_s = max(end - start, 1e-9)
    runs: list[tuple[float, str]] = []
    for at, standings in changes:
        standing = standings.get(group, "")
        if not runs or runs[-1][1] != standing:
            runs.append((at, standing))
    ends = [*(at for at, _ in runs[1:]), end]
    return tuple(
        Span(
            left=100 * (at - start) / whole_s,
            width=100 * max(0.0, until - at) / whole_s,
            tone=TONES.get(standing, "neutral"),
            title=f"group {group} {WORDS.get(standing, standing)}, {format.duration(until - at)}",
        )
        for (at, standing), until in zip(runs, ends, strict=True)
        if standing
    )


def _told_groups(lines: Iterable[TimelineEvent]) -> Iterator[Mapping[str, Any]]:
    """Each group of each membership, in the order of time."""
    for line in lines:
        groups = line.data.get("groups") if line.kind == "membership_changed" else None
        yield from groups if isinstance(groups, list) else ()


def _facts(
    job: Job, timeline: Sequence[TimelineEvent], checkpoints: Sequence[Checkpoint], now: float
) -> list[Fact]:
    held = job.membership
    is_own = held is not None and held.attempt_id == job.current_attempt_id
    facts = _membership_facts(job, held, now) if held is not None and is_own else []
    wanted = latest_resize_request(timeline)
    if not job.status.is_terminal and (wanted.workers or wanted.drain_hosts):
        size = [f"{wanted.workers} workers"] if wanted.workers else []
        text = ", ".join([*size, *(f"without {host}" for host in sorted(wanted.drain_hosts))])
        facts.append(Fact("Wanted", text, "active"))
    at_risk = _at_risk_text(job, checkpoints)
    if at_risk:
        hint = "Steps that the newest durable checkpoint does not hold"
        facts.append(Fact("At risk", at_risk, hint=hint))
    return facts


def _membership_facts(job: Job, membership: Membership, now: float) -> list[Fact]:
    facts = []
    if membership_of(job) is not None and job.status is JobStatus.RUNNING:
        facts += [_training_fact(job, membership), _copies_fact(job, membership)]
    recovery = membership.last_recovery
    if recovery is not None:
        redo = "nothing to redo"
        if recovery.syncs_lost:
            redo = f"{recovery.syncs_lost} sync interval(s) to redo"
        ago = format.duration(now - recovery.time)
        text = f"in {format.latency(recovery.pause_s)}, {redo}, {ago} ago"
        hint = f"{membership.num_losses} group(s) lost so far; cause: {recovery.cause}"
        facts.append(Fact("Last recovery", text, "good", hint))
    layout = membership.layout
    if layout is not None:
        domain = layout.failure_domain.replace("_", " ")
        facts.append(Fact("Failure domain", f"{domain}. {_DOMAINS[layout.failure_domain]}"))
        facts.append(Fact("Layout", f"{layout.reason} ({_price(membership)})"))
    excluded = [host for host in membership.excluded_hosts if host.until > now]
    if excluded and not job.status.is_terminal:
        names = (f"{host.host} for {format.duration(host.until - now)}" for host in excluded)
        facts.append(Fact("Left out", ", ".join(names), "warn", "Hosts that failed too often"))
    return facts


def _training_fact(job: Job, membership: Membership) -> Fact:
    counts = f"{num_current(membership)} of {num_wanted(membership)} groups"
    text = f"{counts}, generation {membership.generation}, commit {membership.commit:,}"
    return Fact("Training", text, "warn" if is_degraded(job) else "good")


def _copies_fact(job: Job, membership: Membership) -> Fact:
    copies, hosts = membership.copies_alive, membership.host_copies_alive
    text = f"{copies} of each shard, on {hosts} host{'' if hosts == 1 else 's'}"
    needed = copies_needed(job)
    if not needed:
        return Fact("Copies alive", text)
    if hosts < needed:
        return Fact("Copies alive", f"{text}; survive needs {needed}", "warn")
    return Fact("Copies alive", f"{text}; {needed - 1} more may be lost", "good")


def _price(membership: Membership) -> str:
    layout = membership.layout
    assert layout is not None
    price = f"{format.size(layout.memory_overhead_bytes)} more a worker"
    if layout.sync_latency_s is not None:
        price += f", {format.latency(layout.sync_latency_s)} a full sync"
    return price


def _at_risk_text(job: Job, checkpoints: Sequence[Checkpoint]) -> str:
    if job.status is not JobStatus.RUNNING:
        return ""
    steps = steps_at_risk(job.latest_metrics)
    if steps is None:
        newest = max((checkpoint.step for checkpoint in checkpoints), default=0)
        steps = max(0, job.progress.step - newest)
    rows = steps * job.spec.parallelism.world_size * job.spec.data.batch_size
    saved = f"since the checkpoint of step {checkpoints[-1].step:,}" if checkpoints else "so far"
    return f"{steps:,} steps ({format.compact(rows)} rows) {saved}"


@dataclass(frozen=True)
class GroupRow:
    """One group: a full copy of the tables, or the place of one that is awaited.

    `hosts` has that of each rank, empty where nobody is there.
    """

    group: int
    standing: str
    tone: str
    life: int
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class ShardCopies:
    """Copies of one shard that are alive; `tone` is `warn` below what the spec asks."""

    text: str
    title: str
    tone: str


@dataclass(frozen=True)
class MemberGrid:
    """The groups as they are now: a row each, and under every shard its copies alive."""

    rows: tuple[GroupRow, ...]
    hosts: tuple[str, ...]
    copies: tuple[ShardCopies, ...]


def member_grid(job: Job, timeline: Sequence[TimelineEvent]) -> MemberGrid | None:
    """The newest membership of a job as a diagram; None where it told none or has ended."""
    membership = membership_of(job)
    if membership is None or job.status.is_terminal:
        return None
    lines = [line for line in timeline if line.attempt_id == job.current_attempt_id]
    # In the order in which they came, so that each keeps its colour.
    hosts = tuple(dict.fromkeys(host for each in _told_groups(lines) for host in each["hosts"]))
    rows = _rows(membership)
    num_shards = max((len(row.hosts) for row in rows), default=0)
    needed = copies_needed(job)
    copies = tuple(
        _copies_of(rows, shard, num_wanted(membership), needed) for shard in range(num_shards)
    )
    return MemberGrid(rows, hosts, copies)


def _rows(membership: Membership) -> tuple[GroupRow, ...]:
    size = group_size(membership)
    present = [
        GroupRow(
            group=member.group,
            standing=WORDS.get(member.standing, member.standing),
            tone=TONES.get(member.standing, "neutral"),
            life=member.incarnation,
            # A group tells a host for each rank, or one for all.
            hosts=member.hosts if len(member.hosts) == size else member.hosts[:1] * size,
        )
        for member in membership.members
    ]
    awaited = [
        GroupRow(gone.group, "gone", "bad", gone.incarnation, ("",) * size)
        for gone in missing(membership)
    ]
    return tuple(sorted([*present, *awaited], key=lambda row: row.group))


def _copies_of(rows: Sequence[GroupRow], shard: int, num_groups: int, needed: int) -> ShardCopies:
    alive = [row.hosts[shard] for row in rows if row.standing == WORDS[CURRENT]]
    num_hosts = len(set(alive))
    is_enough = num_hosts >= needed if needed else len(alive) >= num_groups
    return ShardCopies(
        text=f"{len(alive)} of {num_groups}",
        title=f"{len(alive)} copies of shard {shard} on {num_hosts} host(s)"
        + (f"; survive needs {needed}" if needed else ""),
        tone="good" if is_enough else "warn",
    )

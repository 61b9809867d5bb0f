"""View models of a job's groups: who trained when, who holds which shard, now and before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from service.domain.membership import (
    CURRENT,
    FOR_GOOD,
    apply_event,
    group_size,
    membership_of,
    missing,
    num_wanted,
)
from service.domain.models import Job, Member, Membership, TimelineEvent
from service.domain.timeline import counted
from service.schemas.wording import Fact, clock, duration, standing_of
from trainer.protocol.events import EVENT_ADAPTER, Event


@dataclass(frozen=True)
class Span:
    """A time in which a group had one standing; `left` and `width` in percent of the row."""

    left: float
    width: float
    tone: str
    title: str


@dataclass(frozen=True)
class TimelineRow:
    """The life of one group number, with the hosts that it was on last and its last standing."""

    group: int
    hosts: str
    standing: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Lanes:
    """Who trained when; `rows` are empty where the job told no groups."""

    rows: tuple[TimelineRow, ...]
    since: str
    until: str


def lanes_of(job: Job, timeline: Sequence[TimelineEvent], now: float) -> Lanes:
    """The lanes of a job's newest attempt; `now` is Unix time in seconds."""
    lines = [line for line in timeline if line.attempt_id == job.current_attempt_id]
    changes = standings_over_time(lines)
    end = job.ended_at or now
    start, _ = changes[0] if changes else (end, {})
    hosts = {each["group"]: ", ".join(dict.fromkeys(each["hosts"])) for each in _told_groups(lines)}
    newest = changes[-1][1] if changes else {}
    rows = []
    for group in sorted({group for _, standings in changes for group in standings}):
        standing, _ = standing_of(newest.get(group, "gone"))
        spans = _spans(changes, group, end)
        rows.append(TimelineRow(group, hosts.get(group, ""), standing, spans))
    return Lanes(tuple(rows), clock(start - job.created_at), clock(end - job.created_at))


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
            case "group_left" | "group_lost" if (
                data.get("is_spare") or data.get("cause") in FOR_GOOD
            ):
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
    spans = []
    for (at, standing), until in zip(runs, ends, strict=True):
        if standing:
            word, tone = standing_of(standing)
            left, width = 100 * (at - start) / whole_s, 100 * max(0.0, until - at) / whole_s
            spans.append(Span(left, width, tone, f"group {group} {word}, {duration(until - at)}"))
    return tuple(spans)


def _told_groups(lines: Iterable[TimelineEvent]) -> Iterator[Mapping[str, Any]]:
    """Each group of each membership, in the order of time; once where it is the same object."""
    seen: set[int] = set()
    for line in lines:
        groups = line.data.get("groups") if line.kind == "membership_changed" else None
        for each in groups if isinstance(groups, list) else ():
            if id(each) not in seen:
                seen.add(id(each))
                yield each


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
class MemberGrid:
    """The groups as they are now: a row each, and under every shard its copies alive.

    A shard with fewer copies than the spec asks for has the tone `warn`.
    """

    rows: tuple[GroupRow, ...]
    hosts: tuple[str, ...]
    copies: tuple[Fact, ...]


def member_grid(job: Job, timeline: Sequence[TimelineEvent]) -> MemberGrid | None:
    """The newest membership of a job as a diagram; None where it told none or has ended."""
    membership = membership_of(job)
    if membership is None or job.status.is_terminal:
        return None
    lines = [line for line in timeline if line.attempt_id == job.current_attempt_id]
    return _grid(membership, lines, job.spec.parallelism.num_hosts_needed)


def _grid(membership: Membership, lines: Sequence[TimelineEvent], needed: int) -> MemberGrid:
    """A membership as a diagram; `lines` are those of its attempt until then."""
    # In the order in which they came, so that each keeps its colour.
    hosts = tuple(dict.fromkeys(host for each in _told_groups(lines) for host in each["hosts"]))
    size, num_groups = group_size(membership), num_wanted(membership)
    served = {each.donor: each.group for each in membership.members if each.donor is not None}
    rows = [
        # A group tells a host for each rank, or one for all.
        GroupRow(
            member.group,
            *_standing(member, served.get(member.group)),
            member.incarnation,
            member.hosts if len(member.hosts) == size else member.hosts[:1] * size,
        )
        for member in membership.members
    ]
    training = [
        row.hosts
        for row, member in zip(rows, membership.members, strict=True)
        if member.standing == CURRENT
    ]
    copies = tuple(
        _copies_of(shard, [each[shard] for each in training], num_groups, needed)
        for shard in range(size)
    )
    for gone in missing(membership):
        rows.append(GroupRow(gone.group, *standing_of("gone"), gone.incarnation, ("",) * size))
    return MemberGrid(tuple(sorted(rows, key=lambda row: row.group)), hosts, copies)


def _standing(member: Member, served: int | None) -> tuple[str, str]:
    """The standing of a group in words, with its tone; `served` is the one that copies from it."""
    word, tone = standing_of(member.standing)
    if member.donor is not None:
        word = f"copies from {member.donor}"
    return word if served is None else f"{word}, serves {served}", tone


# Kinds of events after which the groups are others.
MOMENTS = frozenset(
    {
        *("workers_started", "workers_lost", "membership_changed", "resized"),
        *("group_lost", "group_left", "group_joined"),
    }
)


_MAX_MOMENTS = 200


def moments_of(timeline: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """The events of a job's life after which its groups were others, in the order of time; of many
    the newest.
    """
    found = (line for line in timeline if line.kind in MOMENTS)
    return sorted(found, key=lambda line: line.time)[-_MAX_MOMENTS:]


def grid_then(
    job: Job, timeline: Sequence[TimelineEvent], moment: TimelineEvent
) -> tuple[MemberGrid | None, list[TimelineEvent]]:
    """The membership right after an event, and the events of that attempt until then.

    None where groups were no failure domains.
    """
    lines = [line for line in timeline if line.attempt_id == moment.attempt_id]
    lines = sorted((line for line in lines if line.time <= moment.time), key=lambda line: line.time)
    lines = lines[: lines.index(moment) + 1]
    # Only the newest counts: each tells all groups.
    changes = [line for line in lines if line.kind == "membership_changed"][-1:]
    membership: Membership | None = None
    for line in lines:
        if line.kind == "membership_changed" and line not in changes:
            continue
        event = _event_of(line)
        if event is not None and line.attempt_id is not None:
            membership = apply_event(membership, line.attempt_id, event)
    if membership is None or not membership.changed_at:
        return None, lines
    return _grid(membership, lines, job.spec.parallelism.num_hosts_needed), lines


# Kinds of records that say which groups there are.
_RECORDS = MOMENTS - {"workers_started", "workers_lost"} | {"layout_chosen"}


def _event_of(line: TimelineEvent) -> Event | None:
    """The record that an event of the timeline was made from; None where it is another one."""
    if line.kind not in _RECORDS:
        return None
    told = {"kind": line.kind, "time": line.time, "message": line.message}
    try:
        return EVENT_ADAPTER.validate_python({**line.data, **told})
    except ValidationError:
        return None  # of another version


def _copies_of(shard: int, alive: Sequence[str], num_groups: int, needed: int) -> Fact:
    """The copies of a shard, of which `alive` has the hosts."""
    num_hosts = len(set(alive))
    is_enough = num_hosts >= needed if needed else len(alive) >= num_groups
    hint = f"{len(alive)} copies of shard {shard} on {counted(num_hosts, 'host')}"
    if needed:
        hint += f"; survive needs {needed}"
    tone = "good" if is_enough else "warn"
    return Fact(f"shard {shard}", f"{len(alive)} of {num_groups}", tone, hint)

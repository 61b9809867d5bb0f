"""The 2D diagram where each group is a world of its own: who holds which shard now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.dashboard.groups_view import TONES, WORDS
from service.domain import Job, Membership, TimelineEvent
from service.membership import (
    CURRENT,
    copies_needed,
    group_size,
    membership_of,
    missing,
    num_wanted,
)


@dataclass(frozen=True)
class ShardCell:
    """One rank of a group; `host_index` picks its colour, None where nobody is there."""

    rank: int
    host: str
    host_index: int | None


@dataclass(frozen=True)
class GroupRow:
    """One group: a full copy of the tables, or the place of one that is awaited."""

    group: int
    standing: str
    tone: str
    life: int
    cells: tuple[ShardCell, ...]


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


def member_grid(job: Job, timeline: Sequence[TimelineEvent], num_colours: int) -> MemberGrid | None:
    """The newest membership of a job as a diagram; None where it told none or has ended."""
    membership = membership_of(job)
    if membership is None or job.status.is_terminal:
        return None
    hosts = _hosts_seen(timeline, job.current_attempt_id)
    rows = _rows(membership, hosts, num_colours)
    num_shards = max((len(row.cells) for row in rows), default=0)
    needed = copies_needed(job)
    copies = tuple(
        _copies_of(rows, shard, num_wanted(membership), needed) for shard in range(num_shards)
    )
    return MemberGrid(rows, hosts, copies)


def _rows(membership: Membership, hosts: Sequence[str], num_colours: int) -> tuple[GroupRow, ...]:
    size = group_size(membership)
    index_of = {host: index % num_colours for index, host in enumerate(hosts)}
    present = [
        GroupRow(
            group=member.group,
            standing=WORDS.get(member.standing, member.standing),
            tone=TONES.get(member.standing, "neutral"),
            life=member.incarnation,
            cells=tuple(
                ShardCell(rank, host, index_of.get(host, 0))
                for rank, host in enumerate(_host_of_ranks(member.hosts, size))
            ),
        )
        for member in membership.members
    ]
    awaited = [
        GroupRow(
            group=gone.group,
            standing="gone",
            tone="bad",
            life=gone.incarnation,
            cells=tuple(ShardCell(rank, "", None) for rank in range(size)),
        )
        for gone in missing(membership)
    ]
    return tuple(sorted([*present, *awaited], key=lambda row: row.group))


def _host_of_ranks(hosts: Sequence[str], size: int) -> list[str]:
    """Host of each rank, where a group told one for each rank or one for all."""
    return list(hosts) if len(hosts) == size else list(hosts[:1]) * size


def _hosts_seen(timeline: Iterable[TimelineEvent], attempt_id: str | None) -> tuple[str, ...]:
    """Every host of an attempt in the order in which it came, so that it keeps its colour."""
    seen: dict[str, None] = {}
    for line in timeline:
        groups = line.data.get("groups") if line.kind == "membership_changed" else None
        if line.attempt_id == attempt_id and isinstance(groups, list):
            seen.update(dict.fromkeys(host for each in groups for host in each["hosts"]))
    return tuple(seen)


def _copies_of(rows: Sequence[GroupRow], shard: int, num_groups: int, needed: int) -> ShardCopies:
    alive = [row.cells[shard].host for row in rows if row.standing == WORDS[CURRENT]]
    num_hosts = len(set(alive))
    is_enough = num_hosts >= needed if needed else len(alive) >= num_groups
    return ShardCopies(
        text=f"{len(alive)} of {num_groups}",
        title=f"{len(alive)} copies of shard {shard} on {num_hosts} host(s)"
        + (f"; survive needs {needed}" if needed else ""),
        tone="good" if is_enough else "warn",
    )

"""One try at a sync: who is in it, with what, and how they voted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.elastic.detect import RankId
from trainer.elastic.protocol import Arrive, RoundMember
from trainer.elastic.roster import Group


@dataclass
class OpenRound:
    """A round that its members were told of.

    `leases` are the trained ones by group; `starts` and `promoted` are the groups that become
    current when it commits: those that begin the run, and those whose copy is then exact. `sums`
    are over all ranks that count.
    """

    number: int
    generation: int
    commit: int
    members: tuple[RoundMember, ...]
    voters: frozenset[RankId]
    leases: Mapping[int, tuple[int, ...]]
    sums: Mapping[str, float]
    starts: frozenset[int]
    promoted: frozenset[int]
    yes: set[RankId] = field(default_factory=set)

    @property
    def groups(self) -> frozenset[int]:
        """Numbers of the groups in it."""
        return frozenset(member.group for member in self.members)

    @property
    def weight(self) -> float:
        """Of all copies: the rows that those which count were trained on, by their weights."""
        return sum(member.weight for member in self.members)

    @property
    def is_unanimous(self) -> bool:
        """Whether every rank of every group holds the averages."""
        return self.yes == self.voters

    @property
    def means(self) -> dict[str, float]:
        """The sums, per row by its weight."""
        if not self.weight:
            return {}
        return {name: total / self.weight for name, total in self.sums.items()}


def form_round(
    number: int, generation: int, commit: int, groups: Sequence[Group], starts: Collection[int]
) -> OpenRound:
    """A round of `groups`, which are all ready, in the order of their numbers."""
    return OpenRound(
        number=number,
        generation=generation,
        commit=commit,
        members=tuple(group.as_member() for group in groups),
        voters=frozenset(group.rank_id(rank) for group in groups for rank in group.ranks),
        leases={g.group: g.arrivals[0].leases for g in groups if g.is_current},
        sums=_sums([arrival for g in groups if g.is_current for arrival in g.arrivals]),
        starts=frozenset(starts),
        promoted=frozenset(group.group for group in groups if _is_copied(group)),
    )


def _is_copied(group: Group) -> bool:
    has_heard_all = group.has_begun and not group.must_restart
    return (
        not group.is_current
        and has_heard_all
        and all(arrival.has_copied for arrival in group.arrivals)
    )


def _sums(arrivals: Sequence[Arrive]) -> dict[str, float]:
    names = {name for arrival in arrivals for name in arrival.sums}
    return {name: sum(arrival.sums.get(name, 0.0) for arrival in arrivals) for name in names}

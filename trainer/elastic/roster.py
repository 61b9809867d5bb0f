"""The groups as the coordinator knows them: who is there, what each rank asked, how each stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.elastic.detect import RankId
from trainer.elastic.protocol import Arrive, Hello, RoundMember, Standing, Vote
from trainer.events import GroupMember, MembershipChanged


@dataclass
class RankState:
    """One rank of a group.

    `request` is what it asked last and waits for, under `request_id`; `round` the round that it
    was given and has not voted on.
    """

    hello: Hello
    request: Arrive | Vote | None = None
    request_id: int = 0
    round: int | None = None


class Group:
    """One life of a sharding group.

    `is_pristine` says that its state is still what the seed or a checkpoint made it. For a
    listener, `has_begun` says that it copies and has missed no committed round since, and
    `must_restart` that it has missed one or holds what must not count.
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.group, self.incarnation = hello.group, hello.incarnation
        self.num_ranks = hello.num_ranks
        self.joined_at = now
        self.ranks: dict[int, RankState] = {}
        self.standing: Standing = "initial"
        self.is_pristine = True
        self.has_begun = False
        self.must_restart = False
        self.leave_cause: str | None = None
        self.donor: int | None = None
        # What its ranks had copied when they came to its last round.
        self.copied_bytes = 0

    def greet(self, hello: Hello) -> None:
        """Take in the first words of a rank, or its words after it reconnected."""
        known = self.ranks.get(hello.rank)
        if known is None:
            self.ranks[hello.rank] = RankState(hello)
        else:
            known.hello = hello
        if not self.is_current:
            said = {state.hello.standing for state in self.ranks.values()}
            self.is_pristine = self.donor is None and said == {"initial"}
            self.standing = "initial" if self.is_pristine else "listening"

    @property
    def is_current(self) -> bool:
        """Whether it holds the newest commit and trains."""
        return self.standing == "current"

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are there."""
        return len(self.ranks) == self.num_ranks

    @property
    def is_ready(self) -> bool:
        """Whether all of its ranks wait for the next round."""
        waiting = (isinstance(state.request, Arrive) for state in self.ranks.values())
        return self.is_complete and all(waiting)

    @property
    def arrivals(self) -> list[Arrive]:
        """What the ranks arrived with, by rank."""
        requests = (state.request for _, state in sorted(self.ranks.items()))
        return [request for request in requests if isinstance(request, Arrive)]

    @property
    def origin(self) -> tuple[int, str]:
        """The state that it starts from: commits that it holds, and its name."""
        hello = self.ranks[0].hello
        return hello.ledger.commit, hello.origin

    @property
    def hosts(self) -> list[str]:
        """Host of each rank."""
        return [state.hello.host for _, state in sorted(self.ranks.items())]

    def rank_id(self, rank: int) -> RankId:
        """The full name of one of its ranks."""
        return RankId(self.group, self.incarnation, rank)

    def demote(self) -> None:
        """What it holds must not count any more: it is to copy everything from another group."""
        self.standing, self.is_pristine = "listening", False
        self.has_begun, self.must_restart = False, True

    def miss_round(self) -> None:
        """A round committed without it."""
        self.must_restart |= self.has_begun

    def as_member(self) -> RoundMember:
        """Its place in the next round, by what its ranks arrived with."""
        weight = self.arrivals[0].copy_weight if self.is_current else 0.0
        return RoundMember(
            group=self.group,
            incarnation=self.incarnation,
            weight=weight,
            standing=self.standing,
            hosts=tuple(self.hosts),
        )


def disagreement(group: Group) -> str | None:
    """What the ranks of a group that is ready contradict each other in, if anything."""
    seen = {(arrival.leases, arrival.num_rows, arrival.commit) for arrival in group.arrivals}
    if len(seen) > 1:
        return f"its ranks arrived with different leases, rows or commits: {sorted(seen)}"
    return None


def choose_donor(listener: Group, current: Iterable[Group], groups: Mapping[int, Group]) -> Group:
    """Whom a listener copies from: the same group as before while it lives, else the least used.

    Among equals the highest number, as the lowest leads and so has more to do.
    """
    able = list(current)
    for each in able:
        if each.group == listener.donor:
            return each
    users = [other.donor for other in groups.values() if other is not listener]
    return min(able, key=lambda each: (users.count(each.group), -each.group))


def choose_start(groups: Iterable[Group]) -> list[Group]:
    """The groups that begin the run: by the most commits, then by the commonest origin."""
    able = list(groups)
    origins = [group.origin for group in able]
    best = max(able, key=lambda g: (g.origin[0], origins.count(g.origin), -g.group)).origin
    return [group for group in able if group.origin == best]


def copies_alive(groups: Iterable[Group]) -> tuple[int, int]:
    """Copies of the shard with the fewest, and the hosts that the copies of a shard are on."""
    hosts_by_group = [group.hosts for group in groups if group.is_current]
    num_hosts = [len(set(hosts)) for hosts in zip(*hosts_by_group, strict=False)]
    return len(hosts_by_group), min(num_hosts, default=0)


def describe(
    groups: Iterable[Group], generation: int, commit: int, now: float
) -> MembershipChanged:
    """Who is there, as an event."""
    present = [group for group in groups if group.is_complete]
    num_copies, num_hosts = copies_alive(present)
    return MembershipChanged(
        time=now,
        generation=generation,
        commit=commit,
        groups=[
            GroupMember(
                group=group.group,
                incarnation=group.incarnation,
                hosts=group.hosts,
                standing=group.standing,
            )
            for group in sorted(present, key=lambda group: group.group)
        ],
        copies_alive=num_copies,
        host_copies_alive=num_hosts,
    )

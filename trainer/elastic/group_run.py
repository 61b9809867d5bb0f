"""One life of one sharding group as the driver sees it, and the ports that a supervisor needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from trainer.cluster import Host
from trainer.elastic.hosts import GroupPhase, PlacedGroup
from trainer.elastic.status import CoordinatorStatus, GroupStatus
from trainer.failures import Failure


class Coordinator(Protocol):
    """The coordinator of one life of the job's groups; no call raises or waits for long."""

    @property
    def actor_name(self) -> str | None:
        """Name of its Ray actor."""

    @property
    def address(self) -> str | None:
        """Where it listens (host:port), if it is no Ray actor."""

    def status(self) -> CoordinatorStatus | None:
        """Everything it knows; None, which means nothing, when it did not answer."""

    def expect(self, groups: Collection[int]) -> None:
        """Begin when these groups are there."""

    def retire(self, group: int, cause: str) -> None:
        """Let a group go after the next sync."""

    def drop(self, group: int, incarnation: int, reason: str) -> None:
        """This life of a group is lost."""

    def stop(self) -> None:
        """End it."""


class Cluster(Protocol):
    """Hosts, and a hand on their processes."""

    def read_hosts(self) -> list[Host]:
        """Live hosts by address."""

    def kill_on(self, host: Host, pids: Collection[int]) -> None:
        """SIGKILL processes of ours on a host, without waiting."""


@dataclass
class GroupRun:
    """A life of a group: `hosts` has the host of each rank, `future` becomes how it ended.

    `pids` go by host, once the coordinator knows them; it `is_known` then. `was_current` stays true
    when the group was current once. `leave_cause` is why it was asked to leave, `lost_at` when it
    was given up.
    """

    group: int
    incarnation: int
    hosts: tuple[str, ...]
    future: Future[Failure | None]
    is_known: bool = False
    was_current: bool = False
    is_leaving: bool = False
    leave_cause: str | None = None
    lost_at: float | None = None
    is_killed: bool = False
    pids: dict[str, set[int]] = field(default_factory=dict)

    @property
    def life(self) -> tuple[int, int]:
        """(group, incarnation)."""
        return self.group, self.incarnation

    @property
    def name(self) -> str:
        """How people are told of it."""
        again = f", life {self.incarnation + 1}" if self.incarnation else ""
        return f"group {self.group} on {', '.join(sorted(set(self.hosts)))}{again}"

    @property
    def placed(self) -> PlacedGroup:
        """As the policy wants to see it."""
        phase: GroupPhase = "training" if self.was_current else "starting"
        return PlacedGroup(self.group, self.hosts, "leaving" if self.is_leaving else phase)

    def take(self, status: GroupStatus) -> None:
        """Learn what the coordinator knows of this life."""
        self.is_known = True
        self.was_current |= status.standing == "current"
        self.is_leaving |= status.leave_cause is not None
        for rank in status.ranks:
            self.pids.setdefault(rank.host, set()).add(rank.pid)


def with_unseen_taken(hosts: Sequence[Host], runs: Iterable[GroupRun]) -> list[Host]:
    """The hosts without the room of groups that start, which the cluster may still call free."""
    taken = Counter(host for run in runs if not run.is_known for host in run.hosts)
    return [replace(host, num_free=max(0, host.num_free - taken[host.address])) for host in hosts]

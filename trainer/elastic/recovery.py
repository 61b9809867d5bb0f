"""What a coordinator that was restarted makes of the words of the groups that were there before.

Nothing about the run is stored: every rank keeps the newest ledger, its group's leases and the
members of its last round. A sync counts if any rank heard so; its round then stands in the newest
ledger. The others hear so when they repeat their vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainer.elastic.protocol import Hello, Lease, Ledger
from trainer.elastic.roster import Group


@dataclass
class Recovery:
    """Waits until `deadline` for every group that some rank saw in its last round."""

    deadline: float
    expected: set[tuple[int, int]] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    def is_over(self, groups: Mapping[int, Group], now: float) -> bool:
        """Whether everybody who is expected came back, or the time for it has passed."""
        return now >= self.deadline or all(
            group in self.lost or _is_back(groups.get(group), life) for group, life in self.expected
        )


def _is_back(group: Group | None, life: int) -> bool:
    return group is not None and group.is_complete and group.incarnation >= life


def _hellos(groups: Iterable[Group]) -> list[Hello]:
    return [state.hello for group in groups for state in group.ranks.values()]


def newest_ledger(groups: Iterable[Group]) -> Ledger:
    """The ledger with the most commits that a rank of a current group holds."""
    ledgers = [hello.ledger for hello in _hellos(groups) if hello.standing == "current"]
    return max(ledgers, key=_extent, default=Ledger())


def _extent(ledger: Ledger) -> tuple[int, int]:
    return ledger.commit, ledger.rows_trained + ledger.rows_skipped


def was_current(group: Group) -> bool:
    """Whether a group was current before: what one of its ranks heard, all of them will."""
    return any(state.hello.standing == "current" for state in group.ranks.values())


def is_veteran(group: Group) -> bool:
    """Whether a group was in some round before."""
    return any(state.hello.members for state in group.ranks.values())


def contradicts(group: Group, ledger: Ledger) -> bool:
    """Whether a rank of the group holds the newest commit by another round than `ledger`."""
    held = (state.hello.ledger for state in group.ranks.values())
    return any(each.commit == ledger.commit and each.round != ledger.round for each in held)


def leases_of(group: Group) -> tuple[Lease, ...]:
    """The leases of a group, by those of its ranks that heard the newest verdict."""
    hellos = [state.hello for state in group.ranks.values()]
    return max(hellos, key=lambda hello: hello.ledger.commit).leases

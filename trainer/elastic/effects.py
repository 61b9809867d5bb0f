"""What the coordinator is to do after a message: answers, events, and the record of a commit."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from trainer.elastic.detect import RankId
from trainer.elastic.protocol import Answer, Count, Lease, Message, RoundMember
from trainer.events import Event


@dataclass(frozen=True)
class Reply:
    """Send `body` to a rank, as the answer to its request `id`; 0 where it asked nothing."""

    to: RankId
    id: int
    body: Answer


@dataclass(frozen=True)
class Announce:
    """Tell the control plane."""

    event: Event


class CommitRecord(Message):
    """One committed sync, as a line of the journal.

    `leases` are those that it covers, by group, and `skipped` the leases left out since the last
    one. A coordinator that ends between writing this and telling the groups has not committed:
    of several records with the same `commit` the last one counts.
    """

    commit: Count
    round: Count
    generation: Count
    members: tuple[RoundMember, ...]
    leases: dict[int, tuple[Lease, ...]] = Field(default={})
    skipped: tuple[Lease, ...] = ()


Effect = Reply | Announce | CommitRecord

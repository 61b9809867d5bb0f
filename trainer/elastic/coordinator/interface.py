"""What goes into the coordinator and comes out of it, as plain data.

`MembershipPolicy` configures it; `Effect` is what it does after a message: answers and events;
`CoordinatorStatus` is a snapshot of the run for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainer.coordination.detection import RankId
from trainer.coordination.messages import Answer, Count, Message
from trainer.failures import Failure
from trainer.protocol.events import Event, GroupState, StragglerFound
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import SyncSpec
from trainer.spec.training import RecoverySpec


@dataclass(frozen=True)
class Reply:
    """Send `body` to a speaker, as the answer to its request `id`; 0 where it asked nothing."""

    to: RankId
    id: int
    body: Answer


Effect = Reply | Event
"""An event goes to the control plane."""


@dataclass(frozen=True)
class MembershipPolicy:
    """What the coordinator goes by; times are the job's own (`recovery`).

    The job starts once `num_groups` groups have arrived, or a while after the first one. No rows
    are handed out while fewer than `min_groups` hold the state. `rows_per_step` are those that the
    whole job takes at once. The book's leases are of the least interval of `sync`. With
    `holds_suspicions` nobody is lost for silence or a hang at once where that would take most of
    the copies.
    """

    num_groups: int
    min_groups: int = 1
    rows_per_step: int = 1
    sync: SyncSpec = field(default_factory=SyncSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    holds_suspicions: bool = True
    on_non_finite: Literal["fail", "skip"] = "fail"
    on_divergence: Literal["fail", "rebroadcast"] = "fail"

    @property
    def vote_timeout_s(self) -> float:
        """So long after the first group of a round has voted, one that has not is lost."""
        return 2 * self.recovery.exchange_timeout_s

    @classmethod
    def of(cls, spec: JobSpec, num_groups: int) -> MembershipPolicy:
        check = spec.parallelism.divergence_check
        return cls(
            num_groups=num_groups,
            min_groups=spec.parallelism.min_groups,
            rows_per_step=spec.parallelism.world_size * spec.data.batch_size,
            sync=spec.parallelism.sync,
            recovery=spec.recovery,
            on_non_finite=spec.training.on_non_finite,
            on_divergence=check.action if check else "fail",
        )


class GroupStatus(Message):
    """One connected group; `processes` are (host, process id) of its ranks."""

    group: Count
    incarnation: Count
    standing: GroupState
    processes: tuple[tuple[str, Count], ...] = ()


class Departure(Message):
    """An incarnation that is over: lost (`is_lost`), or left as asked.

    `host` is that of the rank that hangs or is silent, if it is known.
    """

    group: Count
    incarnation: Count
    reason: str
    message: str
    is_lost: bool
    host: str = ""


class CoordinatorStatus(Message):
    """A snapshot of the run. `departures` and `stragglers` are the newest ones, oldest first; what
    to do about a straggler, and what to tell of it, is the driver's.

    With `failure` the run cannot go on.
    """

    has_finished: bool
    groups: tuple[GroupStatus, ...]
    departures: tuple[Departure, ...] = ()
    stragglers: tuple[StragglerFound, ...] = ()
    failure: Failure | None = None

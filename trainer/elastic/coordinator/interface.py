"""What goes into the coordinator and comes out of it, as plain data.

`MembershipPolicy` configures it; `Effect` is what it does after a message: answers and events;
`CoordinatorStatus` is a snapshot of the run for the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from trainer.coordination.client import finding_s
from trainer.coordination.detection import RankId
from trainer.coordination.messages import Answer, Count, GroupState, Message
from trainer.failures import Failure
from trainer.protocol.events import Event, StragglerFound
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import SyncSpec


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
    """Time limits (seconds) and reactions of the coordinator.

    The job starts once `num_groups` groups have arrived, or `start_grace_s` after the first one. A
    rank that is silent for `heartbeat_timeout_s` is lost with its group, and so is one that has not
    voted `vote_timeout_s` after the first group of the round, or that makes no progress for longer
    than `hang_factor` median steps and `min_hang_s` (ten times that outside of training). With
    `holds_suspicions` nobody is lost so at once where that would take most of the copies. A
    coordinator that was restarted waits `recovery_grace_s` for the groups of the one before.
    `rows_per_step` are those that the whole job takes at once. No rows are handed out while fewer
    than `min_groups` groups hold the state. The book's leases are of the least interval of `sync`.
    """

    num_groups: int
    min_groups: int = 1
    rows_per_step: int = 1
    sync: SyncSpec = field(default_factory=SyncSpec)
    start_grace_s: float = 120.0
    heartbeat_timeout_s: float = 1.0
    vote_timeout_s: float = 10.0
    recovery_grace_s: float = 3.0
    hang_factor: float = 20.0
    min_hang_s: float = 60.0
    holds_suspicions: bool = True
    straggler_factor: float = 1.5
    on_non_finite: Literal["fail", "skip"] = "fail"
    on_divergence: Literal["fail", "rebroadcast"] = "fail"

    @classmethod
    def of(cls, spec: JobSpec, num_groups: int) -> MembershipPolicy:
        recovery, check = spec.recovery, spec.parallelism.divergence_check
        return cls(
            num_groups=num_groups,
            # What was left to a choice may have come out smaller.
            min_groups=min(spec.parallelism.min_groups, num_groups),
            rows_per_step=spec.parallelism.world_size * spec.data.batch_size,
            sync=spec.parallelism.sync,
            vote_timeout_s=2 * recovery.exchange_timeout_s,
            recovery_grace_s=finding_s(recovery.heartbeat_timeout_s),
            on_non_finite=spec.training.on_non_finite,
            on_divergence=check.action if check else "fail",
            **recovery.model_dump(include={each.name for each in fields(cls)}),
        )


class GroupStatus(Message):
    """One connected group; `processes` are (host, process id) of its ranks."""

    group: Count
    incarnation: Count
    standing: GroupState
    processes: tuple[tuple[str, Count], ...] = ()


class Departure(Message):
    """An incarnation that is over: lost (`is_lost`), or left as asked.

    `host` is that of the rank that hangs or is silent.
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

"""What the coordinator says of the run when asked: plain data that travels between processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.elastic.protocol import Count, Ledger, Message, Standing

RunPhase = Literal["starting", "recovering", "running", "finished", "failed"]
"""`starting`: no group is current; `recovering`: this coordinator was restarted and waits for the
groups of the one before."""


class RankStatus(Message):
    """One rank; `idle_s` is the time since it got something done, as far as it said."""

    rank: Count
    host: str
    pid: Count
    phase: str = ""
    step: Count = 0
    step_time_s: float = 0.0
    idle_s: float = 0.0


class GroupStatus(Message):
    """One group that is there. `rows_leased` are the rows it holds."""

    group: Count
    incarnation: Count
    standing: Standing
    is_complete: bool
    leave_cause: str | None = None
    rows_leased: Count = 0
    ranks: tuple[RankStatus, ...] = ()


class Departure(Message):
    """A life of a group that is over: lost (`is_lost`), or left as asked. `at` is Unix time."""

    group: Count
    incarnation: Count
    reason: str
    message: str
    is_lost: bool
    at: float


class RunFailure(Message):
    """Why the run cannot go on; `reason` is one of `trainer.failures`."""

    reason: str
    message: str


class CoordinatorStatus(Message):
    """Everything at one moment. `departures` are the newest ones, oldest first."""

    phase: RunPhase
    generation: Count
    ledger: Ledger
    leader: Count | None
    groups: tuple[GroupStatus, ...]
    departures: tuple[Departure, ...] = ()
    failure: RunFailure | None = None
    metrics: dict[str, float] = Field(default={})

    @property
    def commit(self) -> int:
        """Syncs committed."""
        return self.ledger.commit

    @property
    def has_finished(self) -> bool:
        """Whether the run is done."""
        return self.phase == "finished"

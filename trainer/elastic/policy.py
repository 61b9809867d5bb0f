"""How patient the coordinator is, and what it does about what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.spec import JobSpec

WATCH_SILENCE_S = 30.0
"""In the domain `job` only its peers wait for a silent worker, so a busy machine gets time."""


@dataclass(frozen=True)
class MembershipPolicy:
    """Times are in seconds.

    The job starts once `num_groups` groups have arrived, or `start_grace_s` after the first one. A
    rank that is silent for `heartbeat_timeout_s` is lost with its group, and so is one that has not
    voted `vote_timeout_s` after the first vote of its round, or that stands still for longer than
    `hang_factor` median steps and `min_hang_s` (ten times that outside of training). A coordinator
    that was restarted waits `recovery_grace_s` for the groups of the one before. A group that
    refused `max_refusals` rounds since the last commit is lost, as the fault is likely to be its
    own. `rows_per_step` are those that the whole job takes at once.
    """

    num_groups: int
    rows_per_step: int = 1
    start_grace_s: float = 120.0
    heartbeat_timeout_s: float = 1.0
    vote_timeout_s: float = 10.0
    recovery_grace_s: float = 3.0
    hang_factor: float = 20.0
    min_hang_s: float = 60.0
    straggler_factor: float = 1.5
    straggler_window_s: float = 10.0
    replace_stragglers: bool = False
    on_non_finite: Literal["fail", "skip"] = "fail"
    max_refusals: int = 5
    leases_held: int = 2
    metrics_every_s: float = 10.0

    @classmethod
    def of(cls, spec: JobSpec, num_groups: int) -> MembershipPolicy:
        """What a job asks for."""
        recovery = spec.recovery
        return cls(
            num_groups=num_groups,
            rows_per_step=spec.parallelism.world_size * spec.data.batch_size,
            start_grace_s=recovery.start_grace_s,
            heartbeat_timeout_s=recovery.heartbeat_timeout_s,
            vote_timeout_s=2 * recovery.exchange_timeout_s,
            recovery_grace_s=max(3.0, 2 * recovery.heartbeat_timeout_s),
            hang_factor=recovery.hang_factor,
            min_hang_s=recovery.min_hang_s,
            straggler_factor=recovery.straggler_factor,
            replace_stragglers=recovery.replace_stragglers,
            on_non_finite=spec.training.on_non_finite,
        )

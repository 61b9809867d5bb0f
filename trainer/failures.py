"""Why a run ended, in words that the control plane knows: pure classification.

A reason decides what happens next: lost workers, and copies of a shard that diverged, are started
again from the newest checkpoint while the budget lasts; bad data, a bad spec or an error in
training would only fail again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

COMPLETED = "completed"
CANCELLED = "cancelled"
WORKERS_LOST = "workers_lost"
BAD_SPEC = "bad_spec"
DATA_ERROR = "data_error"
STORAGE_ERROR = "storage_error"
TRAINING_ERROR = "training_error"
VERSION_MISMATCH = "version_mismatch"
DIVERGED = "diverged"

# What another life of the workers, resumed from a checkpoint, may not run into again.
RESTARTABLE = frozenset({WORKERS_LOST, DIVERGED})

_PEER_LOST_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timeout waiting",
    "socket closed",
    "pair closure",
    "connect timeout",
    "failed to recv",
    "application timeout",
    "nccl communicator was aborted",
)


class WorkerFailure(Exception):
    """A worker's end, in a form that survives the way to the driver."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite."""


@dataclass(frozen=True)
class Failure:
    """Why a rank, or a whole worker group run, ended.

    `is_death` says that the rank's process itself is gone, which explains its peers' errors.
    """

    reason: str
    message: str
    is_death: bool = False


def is_peer_loss(message: str) -> bool:
    """Whether a collective failed because another rank went away, which is not the cause."""
    lowered = message.lower()
    return any(sign in lowered for sign in _PEER_LOST_SIGNS)


def explain(failures: Collection[Failure]) -> Failure:
    """Pick the cause among the ranks' failures.

    A fault that a rank named itself comes first. A dead rank explains whatever its peers ran into,
    and a lost peer explains nothing.
    """
    unexplained = Failure(WORKERS_LOST, "the workers ended without a word")
    return min(failures, key=_rank_of_cause, default=unexplained)


def _rank_of_cause(failure: Failure) -> int:
    if failure.reason not in (WORKERS_LOST, TRAINING_ERROR):
        return 0
    if failure.is_death:
        return 1
    return 2 if failure.reason == TRAINING_ERROR else 3


def should_restart(failure: Failure, num_failures: int, max_failures: int) -> bool:
    """Whether the workers start again; `num_failures` counts this failure too."""
    return failure.reason in RESTARTABLE and num_failures <= max_failures

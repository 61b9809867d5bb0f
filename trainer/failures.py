"""Why a run ended, in words that the control plane knows: pure classification.

A reason decides what happens next: lost workers are restarted while the budget lasts; bad data, a
bad spec or an error in training would only fail again.
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

_PEER_LOST_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timeout waiting",
    "socket closed",
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
    """The one cause that explains the end of a worker group run."""

    reason: str
    message: str


def is_peer_loss(message: str) -> bool:
    """Whether a collective failed because another rank went away, which is not the cause."""
    lowered = message.lower()
    return any(sign in lowered for sign in _PEER_LOST_SIGNS)


def explain(failures: Collection[Failure]) -> Failure:
    """Pick the cause among the ranks' failures; a lost peer explains nothing by itself."""
    causes = [failure for failure in failures if failure.reason != WORKERS_LOST]
    if causes:
        return causes[0]
    if failures:
        return next(iter(failures))
    return Failure(WORKERS_LOST, "the workers ended without a word")


def should_restart(failure: Failure, num_failures: int, max_failures: int) -> bool:
    """Whether the workers start again; `num_failures` counts this failure too."""
    return failure.reason == WORKERS_LOST and num_failures <= max_failures

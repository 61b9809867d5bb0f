"""The Backend protocol: a place that runs attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from service.domain import Observation


@dataclass(frozen=True)
class Submission:
    """An attempt as a backend needs it; submitting the same id twice must be harmless.

    `code_uris` are archives (file://...zip) that driver and workers have on their module path.
    """

    attempt_id: str
    job_id: str
    entrypoint: str
    env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    code_uris: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostFacts:
    """What a live host of the cluster has in all, whoever uses it now."""

    address: str
    num_cpus: float
    num_gpus: float
    memory_bytes: int


class Backend(Protocol):
    """Runs submissions. Methods raise `BackendUnreachable` when nobody answers in time."""

    name: str
    address: str

    def submit(self, submission: Submission) -> None:
        """Start an attempt; a known id is accepted without effect.

        Raises `SubmissionRefused` when the backend answered no, `BackendUnreachable` when it did
        not answer (the submission may or may not have arrived).
        """

    def observe(self, attempt_id: str) -> Observation:
        """Say what is known of an attempt; never raises, UNREACHABLE is an observation."""

    def stop(self, attempt_id: str) -> None:
        """Ask an attempt to end; stopping an ended or unknown one is harmless."""

    def tail_driver_log(self, attempt_id: str, num_chars: int = 4000) -> str:
        """End of the driver's output, for the message of a failure; empty when not to be had."""

    def check(self) -> str:
        """Return a line about the cluster; raises `BackendUnreachable`."""

    def hosts(self) -> tuple[HostFacts, ...] | None:
        """Live hosts of the cluster; None if it does not tell them. Raises `BackendUnreachable`."""

    def close(self) -> None:
        """Release connections."""

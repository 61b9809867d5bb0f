"""The Backend protocol: a place that runs attempts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from service.domain import Observation


@dataclass(frozen=True)
class ClusterNeed:
    """What a cluster must hold for a job; only backends that make clusters look at it.

    It must hold `min_workers` and may grow to `max_workers`, in groups of `group_size` (None:
    not decided yet), on at least `num_hosts` hosts. Each worker takes `cpus_per_worker` CPUs, and a
    GPU unless `device` says otherwise. `queue` and `deadline_s` are those of `resources`.
    """

    is_own: bool = False
    queue: str | None = None
    deadline_s: int | None = None
    min_workers: int = 1
    max_workers: int = 1
    group_size: int | None = None
    num_hosts: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: float = 1.0
    job_name: str = ""
    project: str = ""
    priority: int = 0


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
    cluster: ClusterNeed = ClusterNeed()


@dataclass(frozen=True)
class HostFacts:
    """What a live host of the cluster has in all, whoever uses it now."""

    address: str
    num_cpus: float
    num_gpus: float
    memory_bytes: int


class Backend(Protocol):
    """Runs submissions. Methods raise `BackendUnreachable` when nobody answers in time.

    `makes_clusters` says whether a job may ask for a cluster of its own.
    """

    name: str
    address: str
    makes_clusters: bool

    def submit(self, submission: Submission) -> None:
        """Start an attempt; a known id is accepted without effect.

        Raises `SubmissionRefused` when the backend answered no, `BackendUnreachable` when it did
        not answer (the submission may or may not have arrived).
        """

    def may_submit(self, attempt_id: str) -> bool:
        """Whether to submit now; False for a while after troubles that take time to mend."""

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

    def own_hosts(self, need: ClusterNeed) -> tuple[HostFacts, ...] | None:
        """Hosts that a cluster of a job's own would have at most; None where there are none such.

        Raises `SubmissionRefused` where no worker would fit, and `BackendUnreachable`.
        """

    def close(self) -> None:
        """Release connections."""

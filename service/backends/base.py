"""The `Backend` protocol: a place that runs attempts; and what a cluster must hold for a job."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.domain.models import Job, Observation
from service.errors import BackendUnreachable, SubmissionRefused
from trainer.layout.hosts import HostFacts
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec


@dataclass(frozen=True)
class Submission:
    """An attempt as a backend needs it; submitting the same id twice must be harmless."""

    attempt_id: str
    job_id: str
    spec: JobSpec
    entrypoint: str
    env: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Runs submissions. Methods raise `BackendUnreachable` when nobody answers in time.

    `makes_clusters` says whether a job may ask for a cluster of its own; those of
    `isolated_projects` must.
    """

    name: str
    address: str
    makes_clusters: bool = False
    isolated_projects: frozenset[str] = frozenset()

    def submit(self, submission: Submission) -> None:
        """Start an attempt; a known id is accepted without effect.

        Raises `SubmissionRefused` when the backend answered no, `BackendUnreachable` when it did
        not answer (the submission may or may not have arrived).
        """

    def observe(self, attempt_id: str) -> Observation:
        """Say what is known of an attempt; never raises, UNREACHABLE is an observation.

        The message of one that FAILED ends with the end of its driver's log, where that is known.
        """

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        """What one request tells of many attempts; those left out are observed by themselves."""
        return {}

    def stop(self, attempt_id: str) -> None:
        """Ask an attempt to end; stopping an ended or unknown one is harmless."""

    def forget(self, attempt_id: str) -> None:
        """Delete what the backend keeps of an attempt that has ended, if it need not keep it."""
        return

    def check(self) -> str:
        """Return a line about the cluster; raises `BackendUnreachable`."""

    def hosts(self) -> tuple[HostFacts, ...] | None:
        """Live hosts of the cluster; None if it does not tell them. Raises `BackendUnreachable`."""

    def own_hosts(self, spec: JobSpec) -> tuple[HostFacts, ...] | None:
        """Hosts that a cluster of a job's own would have at most; None where there are none such.

        Raises `SubmissionRefused` where no worker would fit, and `BackendUnreachable`.
        """
        return None

    def close(self) -> None:
        """Release connections, where there are any."""
        return


class ClusterWatch:
    """What `Backend.check` and `hosts` said last; the backend is asked in a thread, so that nobody
    waits for a cluster.

    `every_s` is how old an answer is at most when it is asked for anew.
    """

    def __init__(self, backend: Backend, every_s: float = 10.0) -> None:
        self._backend = backend
        self._every_s = every_s
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._asked_at = self._answered_at = -math.inf
        self._answer: tuple[bool | None, str] = (None, "it has not answered yet")
        self._hosts: tuple[HostFacts, ...] = ()

    def latest(self, wait_s: float = 0.5) -> tuple[bool | None, str]:
        """Whether the cluster answered, and a line about it; None while nothing is known.

        Waits for an answer for `wait_s` seconds at most; one that is too old says nothing any more.
        """
        with self._lock:
            asking = self._asking
            if asking is None and time.monotonic() - self._asked_at >= self._every_s:
                self._asked_at = time.monotonic()
                asking = threading.Thread(target=self._ask, name="cluster check", daemon=True)
                self._asking = asking
                asking.start()
        if asking is not None:
            asking.join(wait_s)
        age_s = time.monotonic() - self._answered_at
        if asking is not None and asking.is_alive() and self._every_s < age_s < math.inf:
            return None, f"it has not answered yet; its last answer is {age_s:.0f} s old"
        return self._answer

    def hosts(self) -> tuple[HostFacts, ...]:
        """The hosts of its last answer, however old; none where that was a failure."""
        self.latest()
        return self._hosts

    def _ask(self) -> None:
        hosts: tuple[HostFacts, ...] = ()
        try:
            answer = (True, self._backend.check())
            hosts = self._backend.hosts() or ()
        except Exception as error:  # whatever it is, the probe says so
            answer = (False, str(error) or type(error).__name__)
        self._answer, self._hosts, self._answered_at = answer, hosts, time.monotonic()
        self._asking = None


def has_own_cluster(job: Job) -> bool:
    return job.spec.resources.cluster == "own"


def cluster_text(spec: JobSpec) -> str:
    resources = spec.resources
    if resources.cluster == "shared":
        return "shared"
    return f"its own, by Kueue queue {resources.queue}" if resources.queue else "its own"


def check_cluster(backend: Backend, spec: JobSpec) -> None:
    """Raise `SpecError` where a job asks for a cluster that is not to be had.

    A backend that does not answer now is taken to say yes.
    """
    if spec.resources.cluster == "shared":
        if spec.project in backend.isolated_projects:
            message = (
                f"the project {spec.project} is isolated (SHARDLOOM_KUBERAY_NAMESPACES), and the "
                "shared cluster is one trust domain of all its jobs: set it to own"
            )
            raise SpecError([FieldProblem("resources.cluster", "isolated_project", message)])
        return
    if not backend.makes_clusters:
        message = (
            f"the backend {backend.name} has one cluster for all jobs; set it to shared, or run "
            "the service with SHARDLOOM_BACKEND=kuberay"
        )
        raise SpecError([FieldProblem("resources.cluster", "no_own_clusters", message)])
    try:
        backend.own_hosts(spec)
    except SubmissionRefused as error:
        raise SpecError([FieldProblem("resources", "no_room", str(error))]) from None
    except BackendUnreachable:
        return


def hosts_for(backend: Backend, spec: JobSpec) -> tuple[HostFacts, ...]:
    """Hosts that a cluster of a job's own will have, if known: a plan can do without."""
    try:
        return backend.own_hosts(spec) or ()
    except (BackendUnreachable, SubmissionRefused):
        return ()

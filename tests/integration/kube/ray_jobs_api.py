"""Where the operator stand-in runs jobs: a real Ray by its Jobs API, or a script of the test."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import httpx

from tests.integration.kube.rayjob_states import TERMINAL_JOB, JobInfo


class RayAway(Exception):
    """Ray does not answer."""


@dataclass(frozen=True)
class RayJobRequest:
    """A job as it is submitted to Ray. `env` is what the pods of the cluster have set."""

    job_id: str
    entrypoint: str
    runtime_env: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    num_cpus: float | None = None
    num_gpus: float | None = None


class Ray(Protocol):
    """Jobs on the cluster of a RayJob; methods raise `RayAway`."""

    address: str

    def submit(self, request: RayJobRequest) -> None:
        """Start a job."""

    def info(self, job_id: str) -> JobInfo | None:
        """How a job is; None if Ray does not know it."""

    def stop(self, job_id: str) -> None:
        """End a job, if it is there."""


class RealRay:
    """Jobs on one Ray that really runs; each RayJob's cluster is taken to be this one."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.address, headers=headers, timeout=30)

    def submit(self, request: RayJobRequest) -> None:
        """Start a job; what the pods would have in their environment becomes its runtime env."""
        variables = {**request.env, **request.runtime_env.get("env_vars", {})}
        body = {
            "entrypoint": request.entrypoint,
            "submission_id": request.job_id,
            "runtime_env": {**request.runtime_env, "env_vars": variables},
            "metadata": request.metadata,
            "entrypoint_num_cpus": request.num_cpus,
            "entrypoint_num_gpus": request.num_gpus,
        }
        self._call("POST", "/api/jobs/", json=body).raise_for_status()

    def info(self, job_id: str) -> JobInfo | None:
        """How a job is; None if Ray does not know it."""
        answer = self._call("GET", f"/api/jobs/{job_id}")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        said = answer.json()
        return JobInfo(
            said["status"],
            said.get("message") or "",
            said.get("start_time") or 0,
            said.get("end_time") or 0,
        )

    def stop(self, job_id: str) -> None:
        """End a job, if it is there."""
        self._call("POST", f"/api/jobs/{job_id}/stop")

    def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise RayAway(str(error)) from error


class ScriptedRay:
    """A Ray that exists only as the test tells it: jobs run until the test ends them."""

    address = "http://ray-head.invalid:8265"

    def __init__(self) -> None:
        self.submitted: list[RayJobRequest] = []
        self.is_away = False
        self._jobs: dict[str, JobInfo] = {}
        self._lock = threading.Lock()

    def submit(self, request: RayJobRequest) -> None:
        """Note a job as running."""
        self._check_there()
        with self._lock:
            self.submitted.append(request)
            self._jobs[request.job_id] = JobInfo(
                "RUNNING", "Job is currently running.", int(time.time() * 1000)
            )

    def info(self, job_id: str) -> JobInfo | None:
        """What the test said of a job last."""
        self._check_there()
        with self._lock:
            return self._jobs.get(job_id)

    def stop(self, job_id: str) -> None:
        """End a job that runs."""
        self._check_there()
        with self._lock:
            known = self._jobs.get(job_id)
            is_live = known is not None and known.status not in TERMINAL_JOB
        if is_live:
            self.finish(job_id, "STOPPED", "Job was intentionally stopped.")

    def finish(self, job_id: str, status: str = "SUCCEEDED", message: str = "") -> None:
        """End a job in SUCCEEDED, FAILED or STOPPED."""
        with self._lock:
            end_ms, known = int(time.time() * 1000), self._jobs[job_id]
            self._jobs[job_id] = replace(known, status=status, message=message, end_ms=end_ms)

    def forget(self, job_id: str) -> None:
        """Lose a job, as a head that starts again without fault tolerance does."""
        with self._lock:
            del self._jobs[job_id]

    def _check_there(self) -> None:
        if self.is_away:
            raise RayAway("the test says that Ray is away")

"""The REST API in a test's hands: a client, and the reconciler when the test says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi.testclient import TestClient

from service.backends.fake import FakeBackend, Script
from service.reconciler import Reconciler
from service.settings import Settings
from service.store.sql import SqlJobStore
from service.submission import run_dir_of
from service.telemetry import Telemetry
from tests.unit.service.builders import attempt_ended, batch, spec_document, workers_started
from trainer.events import EventBatch

# In local mode the service answers for no other host.
LOOPBACK_URL = "http://127.0.0.1:8700"


@dataclass
class Api:
    """A client of an app whose reconciler runs only when a test says so."""

    http: TestClient
    store: SqlJobStore
    backend: FakeBackend
    settings: Settings

    def submit(self, **changes: Any) -> str:
        """Id of a new job."""
        response = self.http.post("/v1/jobs", json={"spec": spec_document(**changes)})
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def start(self, **changes: Any) -> str:
        """Id of a new job whose first attempt was submitted."""
        job_id = self.submit(**changes)
        self.look()
        return job_id

    def look(self) -> None:
        reconciler = Reconciler(self.store, self.backend, self.settings, Telemetry())
        reconciler.run_once()
        reconciler.close()

    def end(self, job_id: str) -> None:
        """Let a job that was never submitted end."""
        assert self.http.post(f"/v1/jobs/{job_id}:cancel").status_code == 202

    def post_events(self, attempt_id: str, records: EventBatch) -> Any:
        return self.http.post(
            f"/v1/attempts/{attempt_id}/events",
            content=records.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )

    def log(self, attempt_id: str, source: str, text: str) -> None:
        """Append to a log file as a process of the attempt would."""
        job_id = attempt_id.rpartition("-a")[0]
        path = run_dir_of(self.settings, job_id).attempt(attempt_id).log_path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)


def problem_in(response: Any, status: int, code: str) -> dict[str, Any]:
    """The problem document of a response, which must have this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["title"]
    assert problem["detail"]
    return problem


def running(api: Api, **changes: Any) -> str:
    """Id of a job whose workers train."""
    job_id = api.submit(**changes)
    api.backend.play(job_id, Script(("running",)))
    api.look()
    api.post_events(f"{job_id}-a0", batch(workers_started()))
    return job_id


def end(api: Api, job_id: str, reason: str = "completed") -> None:
    """The driver of the newest attempt ends."""
    attempt_id = api.store.get_job(job_id).current_attempt_id
    assert attempt_id is not None
    api.post_events(attempt_id, batch(attempt_ended(reason), stream="driver"))
    api.backend.play(attempt_id, Script(("failed",)))
    api.look()

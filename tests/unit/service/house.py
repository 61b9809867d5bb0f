"""A control plane in a test's hands: real store, scripted backend, a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.backends.fake import FakeBackend, Script
from service.domain import Job, JobStatus
from service.reconciler import Reconciler
from service.settings import Settings
from service.store.sql import SqlJobStore
from service.submission import run_dir_of
from service.telemetry import Telemetry
from tests.unit.service.builders import NOW, queued_job
from trainer.events import Event


@dataclass
class House:
    """A control plane in a test's hands; `now` is its clock."""

    store: SqlJobStore
    backend: FakeBackend
    settings: Settings
    now: float = NOW

    def reconciler(self) -> Reconciler:
        """A reconciler as a service just started would have it."""
        return Reconciler(self.store, self.backend, self.settings, Telemetry(), lambda: self.now)

    def look(self, num_times: int = 1, *, every_s: float = 1.0) -> None:
        """Let a fresh reconciler look at every job."""
        reconciler = self.reconciler()
        for _ in range(num_times):
            reconciler.run_once()
            self.now += every_s
        reconciler.close()

    def submit(self, *observations: str, max_failures: int = 3) -> Job:
        """A queued job whose attempts follow a script."""
        job = queued_job(max_failures=max_failures)
        self.store.create_job(job, idempotency_key=None, request_hash="h")
        if observations:
            self.backend.play(job.id, Script(observations))
        return job

    def status(self, job: Job) -> JobStatus:
        return self.store.get_job(job.id).status

    def leave(self, job: Job, *events: Event, stream: str = "driver") -> Path:
        """Records in the outbox of the first attempt, as its driver would leave them."""
        path = run_dir_of(self.settings, job.id).attempt(f"{job.id}-a0").stream_path(stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(event.model_dump_json() + "\n" for event in events))
        return path

"""What the service says of itself to Prometheus. One registry per app, so tests do not mix."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.domain import Job, JobStatus


class Telemetry:
    """Counters and gauges of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._live_jobs = Gauge(
            "shardloom_live_jobs", "Jobs that have not ended.", ["status"], registry=self.registry
        )
        self._ended_jobs = Counter(
            "shardloom_ended_jobs",
            "Jobs that ended since the service started.",
            ["status", "reason"],
            registry=self.registry,
        )
        self._unreachable = Counter(
            "shardloom_backend_unreachable",
            "Requests that the backend did not answer.",
            registry=self.registry,
        )
        self._events = Counter(
            "shardloom_events_received", "Records received from drivers.", registry=self.registry
        )
        self.reconcile_s = Histogram(
            "shardloom_reconcile_seconds",
            "Time of one look at one job, backend included.",
            registry=self.registry,
        )

    def saw_live_jobs(self, jobs: Iterable[Job]) -> None:
        """Set the number of live jobs per status."""
        tally = Tally(job.status for job in jobs)
        for status in JobStatus:
            if not status.is_terminal:
                self._live_jobs.labels(status.value).set(tally[status])

    def job_ended(self, job: Job) -> None:
        """Count a job that just ended."""
        reason = job.reason.value if job.reason else ""
        self._ended_jobs.labels(job.status.value, reason).inc()

    def backend_was_unreachable(self) -> None:
        """Count a request that was not answered."""
        self._unreachable.inc()

    def received_events(self, num_events: int) -> None:
        """Count records of a batch."""
        self._events.inc(num_events)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

"""Prometheus metrics of the service; one registry per app.

With several replicas on one database, aggregate what each replica did (requests, jobs that it let
out of the queue, ends that it wrote, events that it received) by `sum`, and what all of them see in
the store (live jobs, the series of each job) by `max`, as `deploy/observability/rules` does.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import Connection, Engine, event

from service.domain.models import Attempt, EndReason, Job, JobStatus
from service.domain.webhooks import DeliveryState
from service.observability.job_metrics import JobCollector
from trainer.protocol.events import Event, Metrics
from trainer.spec.training import ResourcesSpec

CLUSTERS: tuple[str, ...] = get_args(ResourcesSpec.model_fields["cluster"].annotation)
"""Kinds of clusters, as `resources.cluster` names them."""
_WAIT_BUCKETS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 24 * 3600)
_REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STORE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_BEGAN = "shardloom_began"


class ServiceMetrics:
    """Counters and gauges of one service; `clock` gives Unix seconds.

    At most `max_jobs` live jobs have series of their own.
    """

    def __init__(self, clock: Callable[[], float] = time.time, max_jobs: int = 1000) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        # Ids of live jobs that had not trained yet at the last look.
        self._unstarted: set[str] = set()
        self._live = JobCollector(clock, max_jobs)
        self.registry.register(self._live)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._live_jobs = gauge("shardloom_live_jobs", "Jobs that have not ended.", ["status"])
        self._queue_wait_s = histogram(
            "shardloom_queue_wait_seconds",
            "Time that a job waited in the queue until this replica made an attempt.",
            buckets=_WAIT_BUCKETS,
        )
        self._submit_to_running_s = histogram(
            "shardloom_submit_to_running_seconds",
            "Time from the submission of a job until its workers trained for the first time.",
            buckets=_WAIT_BUCKETS,
        )
        self._ended_jobs = counter(
            "shardloom_ended_jobs",
            "Jobs whose end this replica stored; where retries were exhausted, by the last reason.",
            ["status", "reason"],
        )
        self._ended_attempts = counter(
            "shardloom_ended_attempts", "Attempts whose end this replica stored.", ["reason"]
        )
        self._submitted_attempts = counter(
            "shardloom_submitted_attempts", "Attempts that the backend took from this replica."
        )
        self._polled_at = clock()
        lag_s = gauge(
            "shardloom_reconcile_lag_seconds",
            "Time since the reconciler last listed the live jobs.",
        )
        lag_s.set_function(lambda: clock() - self._polled_at)
        self.late_s = histogram(
            "shardloom_reconcile_wait_seconds",
            "Time that a job waited for a thread of the reconciler.",
            buckets=_REQUEST_BUCKETS,
        )
        self.reconcile_s = histogram(
            "shardloom_reconcile_seconds", "Time of one look at one job, backend included."
        )
        self._unreachable = counter(
            "shardloom_backend_unreachable",
            "Requests that the backend did not answer, by kind of cluster.",
            ["cluster"],
        )
        self._answered_at = gauge(
            "shardloom_backend_answered_timestamp_seconds",
            "When the backend last answered this replica; 0 before it was asked.",
            ["cluster"],
        )
        self._unanswered_at = gauge(
            "shardloom_backend_unanswered_timestamp_seconds",
            "When the backend last left a request of this replica unanswered; 0 if it never did.",
            ["cluster"],
        )
        for cluster in CLUSTERS:
            for each in (self._unreachable, self._answered_at, self._unanswered_at):
                each.labels(cluster)
        self._events = counter("shardloom_events_received", "Records received from drivers.")
        self._points = counter("shardloom_points_received", "Metric points received from drivers.")
        self.webhook_tries = counter(
            "shardloom_webhook_tries",
            "Tries to deliver a message to a webhook, by what the message became.",
            ["state"],
        )
        self._request_s = histogram(
            "shardloom_request_seconds",
            "Time until the answer to a request began.",
            ["method", "route", "status"],
            buckets=_REQUEST_BUCKETS,
        )
        self.followers = gauge("shardloom_stream_followers", "Streams that are followed now.")
        self._store_s = histogram(
            "shardloom_store_seconds",
            "Time of one transaction of the store.",
            ["kind"],
            buckets=_STORE_BUCKETS,
        )
        # Counters start at 0: to Prometheus, 1 after nothing is no increase.
        for reason in EndReason:
            self._ended_attempts.labels(reason.value)
            self._ended_jobs.labels(JobStatus.FAILED.value, reason.value)
        self._ended_jobs.labels(JobStatus.SUCCEEDED.value, EndReason.COMPLETED.value)
        self._ended_jobs.labels(JobStatus.CANCELLED.value, EndReason.CANCELLED.value)
        for state in DeliveryState:
            self.webhook_tries.labels(state.value)

    def saw_live_jobs(self, jobs: Iterable[Job]) -> None:
        """Set the number of live jobs per status, and note who waits no more."""
        jobs = list(jobs)
        self._polled_at = self._clock()
        tally = Tally(job.status for job in jobs)
        for status in JobStatus:
            if not status.is_terminal:
                self._live_jobs.labels(status.value).set(tally[status])
        for job in jobs:
            self._note_start(job)
        self._unstarted = {job.id for job in jobs if job.started_at is None}
        self._live.saw(jobs)

    def job_ended(self, job: Job, last: Attempt | None = None) -> None:
        self._note_start(job)
        reason = job.reason
        if reason is EndReason.RETRIES_EXHAUSTED and last is not None:
            reason = last.end_reason
        self._ended_jobs.labels(job.status.value, reason.value if reason else "").inc()

    def attempt_stored(self, before: Attempt | None, after: Attempt | None) -> None:
        """Count an attempt that was taken or that ended with what was just stored."""
        if after is None or (before is not None and before.id != after.id):
            return
        if after.submitted_at is not None and (before is None or before.submitted_at is None):
            self._submitted_attempts.inc()
        if after.end_reason is not None and (before is None or before.end_reason is None):
            self._ended_attempts.labels(after.end_reason.value).inc()

    def left_queue(self, job: Job) -> None:
        """Note how long a job waited whose attempt was just made."""
        self._queue_wait_s.observe(max(0.0, self._clock() - job.waits_anew_since))

    def _note_start(self, job: Job) -> None:
        """Note how long a job took to train; those that did before the first look are left out."""
        if job.id in self._unstarted and job.started_at is not None:
            self._unstarted.discard(job.id)
            self._submit_to_running_s.observe(max(0.0, job.started_at - job.created_at))

    def backend_asked(self, cluster: str, has_answered: bool) -> None:
        """Note whether a kind of cluster answered a request, and count it if not."""
        if has_answered:
            self._answered_at.labels(cluster).set(self._clock())
        else:
            self._unreachable.labels(cluster).inc()
            self._unanswered_at.labels(cluster).set(self._clock())

    def received_events(self, events: Iterable[Event]) -> None:
        events = list(events)
        self._events.inc(len(events))
        self._points.inc(sum(len(each.values) for each in events if isinstance(each, Metrics)))

    def answered(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count a request by the template of its route."""
        self._request_s.labels(method, route, str(status)).observe(duration_s)

    def watch(self, engine: Engine) -> None:
        """Time every transaction of a store."""

        def _begin(connection: Connection) -> None:
            connection.info[_BEGAN] = time.perf_counter()

        def _end(connection: Connection) -> None:
            if connection.invalidated:
                return  # Its `info` went with it.
            began: Any = connection.info.pop(_BEGAN, None)
            if began is not None:
                is_write = connection.get_execution_options().get("is_write", False)
                kind = "write" if is_write else "read"
                self._store_s.labels(kind).observe(time.perf_counter() - began)

        event.listen(engine, "begin", _begin)
        event.listen(engine, "commit", _end)
        event.listen(engine, "rollback", _end)

    def render(self) -> bytes:
        return generate_latest(self.registry)

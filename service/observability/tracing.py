"""OpenTelemetry traces of the service: submissions, requests to the cluster, event ingest.

Trace and root span ids are derived from the job's id, so that every replica knows them without
storing anything. Drivers continue the trace by `SHARDLOOM_TRACEPARENT` in their environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from service.domain.models import Attempt, Job
from service.settings import Settings

_chosen: ContextVar[str] = ContextVar("chosen_trace", default="")


def traceparent_of(job_id: str) -> str:
    """The trace context of a job's submission, in W3C's format."""
    return f"00-{_trace_id(job_id):032x}-{_span_id(job_id):016x}-01"


def _trace_id(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"trace {job_id}".encode()).digest()[:16]) or 1


def _span_id(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"span {job_id}".encode()).digest()[:8]) or 1


class Tracing:
    """Makes spans where a collector is set, and costs nothing elsewhere."""

    def __init__(self, exporter: Any = None) -> None:
        self._provider: Any = None if exporter is None else _provider(exporter)
        self._tracer: Any = self._provider and self._provider.get_tracer("shardloom.service")

    @classmethod
    def from_settings(cls, settings: Settings) -> Tracing:
        """Traces to the collector of the settings, if they name one."""
        if not settings.otlp_endpoint:
            return cls()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=5))

    def submitted(self, job: Job, began_at: float) -> None:
        """The span that the trace of a job begins with; `began_at` is in Unix seconds.

        A submission that was only repeated has none.
        """
        if self._tracer is None or job.created_at < began_at:
            return
        from opentelemetry.context import Context

        token = _chosen.set(job.id)
        try:
            span = self._tracer.start_span(
                "submit job",
                context=Context(),
                start_time=int(began_at * 1e9),
                attributes={"shardloom.job_id": job.id},
            )
        finally:
            _chosen.reset(token)
        span.set_attribute("shardloom.job_name", job.name)
        span.end()

    @contextmanager
    def submitting(self, job: Job, attempt: Attempt) -> Iterator[None]:
        """The span of handing an attempt to the cluster, in the trace of its job."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(
            "submit attempt",
            context=_context_of(job.id),
            attributes={"shardloom.job_id": job.id, "shardloom.attempt_id": attempt.id},
        ):
            yield

    @contextmanager
    def ingesting(self, attempt_id: str, num_events: int) -> Iterator[None]:
        """The span of taking a batch of records, linked with the trace of their job."""
        if self._tracer is None:
            yield
            return
        from opentelemetry.trace import Link, get_current_span

        job_id = attempt_id.rpartition("-a")[0]
        link = Link(get_current_span(_context_of(job_id)).get_span_context())
        facts = {"shardloom.attempt_id": attempt_id, "shardloom.num_events": num_events}
        with self._tracer.start_as_current_span("ingest", links=[link], attributes=facts):
            yield

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(exporter: Any) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class _Ids(RandomIdGenerator):
        """Random ids, but for the span that a job's trace begins with."""

        def generate_trace_id(self) -> int:
            return _trace_id(_chosen.get()) if _chosen.get() else super().generate_trace_id()

        def generate_span_id(self) -> int:
            return _span_id(_chosen.get()) if _chosen.get() else super().generate_span_id()

    provider = TracerProvider(
        resource=Resource.create({"service.name": "shardloom"}),
        id_generator=_Ids(),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _context_of(job_id: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent_of(job_id)})

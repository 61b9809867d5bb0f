"""OpenTelemetry spans of an attempt, made from its records. Needs `opentelemetry-sdk`.

attempt
├── start workers      from the start of the attempt, or the loss of the last ones
├── save checkpoint    one for each that was committed
└── events             groups lost and joined, recoveries, resizes, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.protocol.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Event,
    Metrics,
    Progress,
    WorkersLost,
    WorkersStarted,
)

_GOOD_ENDS = ("completed", "cancelled", "paused")
_FLUSH_TIMEOUT_MS = 5000


@dataclass
class SpanSink:
    """Sends the spans of one attempt to the collector at `endpoint` (OTLP over HTTP).

    `traceparent` is that of the job's submission, in W3C's format. `exporter` is for tests.
    """

    name = "opentelemetry"
    endpoint: str
    traceparent: str
    attempt_id: str
    exporter: Any = None
    _provider: Any = None
    _tracer: Any = None
    _attempt: Any = None
    # When the workers began to be awaited: again and again, in a job with losses.
    _awaited: list[float] = field(default_factory=list)

    def open(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "shardloom-driver"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        endpoint = f"{self.endpoint.rstrip('/')}/v1/traces"
        exporter = self.exporter or OTLPSpanExporter(endpoint=endpoint, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("shardloom.driver")

    def take(self, events: Sequence[Event]) -> None:
        """Make spans of some records; those of metrics and progress say nothing here."""
        for event in events:
            if not isinstance(event, Metrics | Progress):
                self._take(event)

    def _take(self, event: Event) -> None:
        if self._attempt is None:
            self._begin(event.time)
        match event:
            case AttemptStarted():
                self._awaited.append(event.time)
            case WorkersStarted():
                # Streams are read one after another: a later loss may be known already.
                since = max((t for t in self._awaited if t <= event.time), default=event.time)
                facts = {"run_index": event.run_index, "world_size": event.world_size}
                self._span("start workers", since, event.time, facts)
            case WorkersLost():
                self._awaited.append(event.time)
                self._note(event)
            case CheckpointCommitted():
                facts = {"step": event.step, "size_bytes": event.size_bytes}
                self._span("save checkpoint", event.time - event.duration_s, event.time, facts)
            case AttemptEnded():
                self._end(event)
            case _:
                self._note(event)

    def _begin(self, time: float) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": self.traceparent}
        self._attempt = self._tracer.start_span(
            "attempt",
            context=TraceContextTextMapPropagator().extract(carrier),
            start_time=_ns(time),
            attributes={"shardloom.attempt_id": self.attempt_id},
        )

    def _span(self, name: str, began: float, ended: float, facts: dict[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._attempt)
        attributes = {f"shardloom.{key}": value for key, value in facts.items()}
        span = self._tracer.start_span(
            name, context=context, start_time=_ns(began), attributes=attributes
        )
        span.end(_ns(max(began, ended)))

    def _note(self, event: Event) -> None:
        told = event.model_dump(mode="json", exclude={"kind", "time"})
        plain = {key: v for key, v in told.items() if isinstance(v, str | int | float | bool)}
        self._attempt.add_event(event.kind, plain, _ns(event.time))

    def _end(self, event: AttemptEnded) -> None:
        from opentelemetry.trace import StatusCode

        self._attempt.set_attribute("shardloom.reason", event.reason)
        if event.reason not in _GOOD_ENDS:
            self._attempt.set_status(StatusCode.ERROR, event.message)
        self._attempt.end(_ns(event.time))
        self._provider.force_flush(_FLUSH_TIMEOUT_MS)

    def close(self) -> None:
        """Send what is left; an attempt that did not end well has no end of its own."""
        if self._attempt is not None and self._attempt.is_recording():
            self._attempt.end()
        self._provider.shutdown()


def _ns(time: float) -> int:
    return int(time * 1e9)

"""What the service tells of itself: metrics, structured logs, traces."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.api.middleware import ids_in
from service.domain.models import JobStatus
from service.observability.logging_setup import (
    JsonFormatter,
    TextFormatter,
    about,
    add_ids,
    known_ids,
)
from service.observability.metrics import ServiceMetrics
from service.observability.tracing import Tracing, traceparent_of
from service.reconciler.submission import submission_of
from service.settings import Settings
from tests.harness.builders import NOW, attempt_of, batch, checkpoint, queued_job
from tests.harness.http_stub import http_stub
from tests.harness.service import Api
from trainer.protocol.events import Metrics


def _value(telemetry: ServiceMetrics, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


# ---- metrics


def test_answers_are_counted_by_route_and_transactions_of_the_store_by_kind(api: Api) -> None:
    job_id = api.submit()
    api.http.get(f"/v1/jobs/{job_id}")
    api.http.get("/v1/jobs/nobody")
    api.http.get("/nowhere")
    api.http.get("/v1/jobs", headers={"Host": "other.example"})
    text = api.http.get("/metrics").text
    count = "shardloom_request_seconds_count"
    assert f'{count}{{method="POST",route="/v1/jobs",status="201"}} 1.0' in text
    assert f'{count}{{method="GET",route="/v1/jobs/{{job}}",status="200"}} 1.0' in text
    assert f'{count}{{method="GET",route="/v1/jobs/{{job}}",status="404"}} 1.0' in text
    assert f'{count}{{method="GET",route="(no route)",status="404"}} 1.0' in text
    assert f'{count}{{method="GET",route="(before routing)",status="' in text
    assert job_id not in text
    for kind in ("read", "write"):
        assert f'shardloom_store_seconds_count{{kind="{kind}"}}' in text


def test_records_points_and_jobs_that_end_in_the_queue_are_counted(api: Api) -> None:
    job_id = api.start()
    points = Metrics(time=NOW, step=1, values={"a": 1.0, "b": 2.0})
    api.post_events(f"{job_id}-a0", batch(points, checkpoint(1)))
    api.end(api.submit())
    text = api.http.get("/metrics").text
    assert 'shardloom_ended_jobs_total{reason="cancelled",status="CANCELLED"} 1.0' in text
    assert "shardloom_events_received_total 2.0" in text
    assert "shardloom_points_received_total 2.0" in text


@pytest.mark.parametrize("has_ended", [True, False])
def test_the_time_until_a_job_trains_is_told_once(has_ended: bool) -> None:
    telemetry, job = ServiceMetrics(lambda: NOW + 60), replace(queued_job(), created_at=NOW)
    starting = replace(job, status=JobStatus.STARTING, current_attempt_id=f"{job.id}-a0")
    running = replace(starting, status=JobStatus.RUNNING, started_at=NOW + 30)
    for seen in (job, starting, *([] if has_ended else [running, running])):
        telemetry.saw_live_jobs([seen])
    telemetry.job_ended(replace(running, status=JobStatus.SUCCEEDED))
    assert _value(telemetry, "shardloom_submit_to_running_seconds_sum") == 30
    assert _value(telemetry, "shardloom_submit_to_running_seconds_count") == 1


def test_a_job_that_trained_when_the_service_started_is_not_observed() -> None:
    restarted = ServiceMetrics(lambda: NOW + 60)
    running = replace(queued_job(), status=JobStatus.RUNNING, started_at=NOW + 30)
    for _ in range(2):
        restarted.saw_live_jobs([running])
    restarted.job_ended(replace(running, status=JobStatus.SUCCEEDED))
    assert _value(restarted, "shardloom_submit_to_running_seconds_count") == 0


def test_the_loop_tells_how_long_it_has_not_looked() -> None:
    now = [NOW]
    telemetry = ServiceMetrics(lambda: now[0])
    telemetry.saw_live_jobs([queued_job()])
    now[0] += 42
    assert _value(telemetry, "shardloom_reconcile_lag_seconds") == 42
    assert _value(telemetry, "shardloom_live_jobs", status="QUEUED") == 1


# ---- logs


def _record(message: str = "it is %s", *args: Any, **changes: Any) -> logging.LogRecord:
    record = logging.LogRecord("service.x", logging.WARNING, "x.py", 1, message, args, None)
    record.created, record.msecs = NOW, 250.0
    vars(record).update(changes)
    add_ids(record)
    return record


def test_a_json_line_has_the_ids_at_hand() -> None:
    with about(request_id="req-1", job_id="job-1"):
        record = _record("it is %s", "here")
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "service.x",
        "message": "it is here",
        "request_id": "req-1",
        "job_id": "job-1",
    }
    assert known_ids() == {}


def test_a_json_line_is_one_line_even_with_a_traceback() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(_record("it\nbroke", exc_info=info))
    assert "\n" not in line
    assert "ValueError: a\nb" in json.loads(line)["traceback"]


def test_a_text_line_has_ids_that_it_does_not_name_itself() -> None:
    with about(request_id="req-1", job_id="job-1"):
        record = _record("job-1 waits")
    assert TextFormatter().format(record).endswith("service.x: job-1 waits [request_id=req-1]")
    assert TextFormatter().format(_record("plain")).endswith("service.x: plain")


def test_what_is_logged_begins_no_line_of_its_own_and_steers_no_terminal() -> None:
    forged = "x\n2027-01-15 08:00:00 INFO service.app: all is well\r\x1b[2J"
    first, *others = TextFormatter().format(_record("job %s failed", forged)).split("\n")
    assert "job x" in first
    assert others == ["    2027-01-15 08:00:00 INFO service.app: all is well\\r\\x1b[2J failed"]


def test_ids_are_read_off_the_path() -> None:
    job, attempt = "job-0000000000ab", "job-0000000000ab-a12"
    assert ids_in(f"/v1/jobs/{job}/logs") == {"job_id": job}
    assert ids_in(f"/v1/attempts/{attempt}/events") == {"job_id": job, "attempt_id": attempt}
    for path in ("/v1/jobs/my-name", "/metrics"):
        assert ids_in(path) == {}


# ---- traces


def test_the_trace_of_a_job_begins_with_its_submission_and_holds_its_attempts() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    job = replace(queued_job(), created_at=NOW + 1)
    tracing.submitted(job, NOW)
    tracing.submitted(job, NOW + 60)  # the same, which was only repeated
    with tracing.submitting(job, attempt_of(job)):
        pass
    with tracing.ingesting(f"{job.id}-a0", 3):
        pass
    tracing.close()
    root, *others = exporter.get_finished_spans()
    spans = {span.name: span for span in others}
    assert (root.name, spans.keys()) == ("submit job", {"submit attempt", "ingest"})
    trace, parent = traceparent_of(job.id).split("-")[1:3]
    assert (f"{root.context.trace_id:032x}", f"{root.context.span_id:016x}") == (trace, parent)
    assert root.parent is None
    attempt = spans["submit attempt"]
    assert attempt.context.trace_id == root.context.trace_id
    assert attempt.parent.span_id == root.context.span_id
    assert attempt.context.span_id != root.context.span_id
    [link] = spans["ingest"].links
    assert link.context.span_id == root.context.span_id
    assert spans["ingest"].attributes["shardloom.num_events"] == 3


def test_a_clone_begins_a_trace_of_its_own(api: Api) -> None:
    exporter, context = InMemorySpanExporter(), api.http.app.state.context  # type: ignore[attr-defined]
    tracing = Tracing(exporter)
    object.__setattr__(context, "tracing", tracing)
    first = api.submit()
    clone = api.http.post(f"/v1/jobs/{first}:clone", json={}).json()["id"]
    tracing.close()
    begun = [span.attributes["shardloom.job_id"] for span in exporter.get_finished_spans()]
    assert begun == [first, clone]


def test_a_collector_of_the_settings_is_sent_spans(tmp_path: Path) -> None:
    with http_stub() as collector:
        tracing = Tracing.from_settings(Settings(home=tmp_path, otlp_endpoint=collector.url))
        tracing.submitted(replace(queued_job(), created_at=NOW), NOW)
        tracing.close()
    assert [request.path for request in collector.received] == ["/v1/traces"]


def test_a_driver_is_told_of_the_trace_only_where_there_is_a_collector(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert Settings(home=tmp_path).otlp_endpoint == "http://127.0.0.1:4318"
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    monkeypatch.setenv("SHARDLOOM_OTLP_ENDPOINT", "http://c:4318")
    with_collector = _env(Settings(home=tmp_path))
    assert with_collector["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4318"
    assert with_collector["SHARDLOOM_TRACEPARENT"].startswith("00-")
    monkeypatch.delenv("SHARDLOOM_OTLP_ENDPOINT")
    assert "SHARDLOOM_TRACEPARENT" not in _env(Settings(home=tmp_path))


def _env(settings: Settings) -> dict[str, str]:
    from service.domain.retries import NextAttempt

    job = queued_job()
    return submission_of(job, attempt_of(job), NextAttempt(job.spec), settings).env

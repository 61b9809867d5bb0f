"""Traces of service and driver as a collector receives them: one trace for one job."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.harness.builders import batch, spec_document
from tests.harness.http_stub import HttpStub, http_stub
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, scaled, wait_for
from trainer.protocol.events import AttemptEnded, AttemptStarted
from trainer.protocol.outbox import EventWriter

pytestmark = pytest.mark.slow

# What the driver does for its sinks, without the training.
_DRIVER = """
import os
from trainer.driver.attempt import DriverContext
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir
from trainer.sinks import open_sinks
context = DriverContext.from_env(os.environ)
writer = EventWriter(context.files.stream_path("driver"))
for feed in open_sinks(RunDir(context.run_dir), context.attempt_id, context.job_id, writer):
    feed.close(10.0)
"""


def _spans(stub: HttpStub) -> dict[str, Any]:
    """Spans by name, from what the collector was sent."""
    found = {}
    for request in stub.received:
        assert request.path == "/v1/traces"
        body = request.body
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                found.update({span.name: span for span in scope.spans})
    return found


def test_submission_driver_and_ingest_are_told_to_a_collector(tmp_path: Path) -> None:
    with http_stub() as collector:
        settings = {
            "SHARDLOOM_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "SHARDLOOM_LOG_FORMAT": "json",
        }
        with ServiceProcess(tmp_path, free_port(), settings) as service:
            response = httpx.post(
                f"{service.url}/v1/jobs", json={"spec": spec_document()}, trust_env=False
            )
            job = response.json()["id"]
            record = wait_for(lambda: service.cluster.record(f"{job}-a0"), "the submission")
            writer = EventWriter(service.attempt_files(job).stream_path("driver"))
            writer.write(AttemptStarted(time=time.time(), world_size=2))
            writer.write(AttemptEnded(time=time.time(), reason="completed", message="done"))
            token = service.attempt_files(job).token_path.read_text()
            environment = {**os.environ, **record.env}
            command = [sys.executable, "-c", _DRIVER]
            subprocess.run(command, env=environment, check=True, timeout=scaled(60))
            started = batch(AttemptStarted(time=time.time(), world_size=2), stream="driver")
            service.post_events(f"{job}-a0", started, token)
            wanted = {"submit job", "submit attempt", "ingest"}
            wait_for(lambda: {*_spans(collector)} >= wanted, f"the spans {wanted}")
        spans = _spans(collector)
        root = spans["submit job"]
        for name in ("submit attempt", "attempt"):
            assert spans[name].trace_id == root.trace_id
            assert spans[name].parent_span_id == root.span_id
        assert spans["ingest"].links[0].trace_id == root.trace_id
        assert f'"job_id": "{job}"' in service.log()

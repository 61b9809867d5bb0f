"""Where a job's metrics and spans can go beside the service; none of it can hold up training.

Light: the threads of sinks import their libraries.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from trainer.protocol.events import Note
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir
from trainer.sinks.base import Feed, Sink
from trainer.sinks.mlflow import MlflowSink
from trainer.sinks.opentelemetry import SpanSink
from trainer.sinks.tensorboard import TensorBoardSink
from trainer.spec.training import SinksSpec

logger = logging.getLogger(__name__)


def open_sinks(run_dir: RunDir, attempt_id: str, job_id: str, writer: EventWriter) -> list[Feed]:
    """Feeds of the sinks that the attempt's spec asks for, none where the spec is faulty."""

    def _warn(message: str) -> None:
        writer.write(Note(time=time.time(), level="warning", message=message))

    try:
        document = json.loads(run_dir.attempt(attempt_id).spec_path.read_bytes())
        wanted = SinksSpec.model_validate(document.get("sinks") or {})
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("no sinks: %s", error)
        return []
    sinks: list[Sink] = []
    if wanted.tensorboard:
        shared = wanted.tensorboard.dir
        folder = Path(shared) / job_id if shared else run_dir.tensorboard_dir
        sinks.append(TensorBoardSink(folder))
    if wanted.mlflow:
        uri, experiment = wanted.mlflow.tracking_uri, wanted.mlflow.experiment
        sinks.append(MlflowSink(uri, experiment, job_id, document))
    feeds = [Feed(sink, run_dir, attempt_id, _warn) for sink in sinks]
    # The service names a collector and the trace of the job.
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    traceparent = os.environ.get("SHARDLOOM_TRACEPARENT")
    if endpoint and traceparent:
        spans = SpanSink(endpoint, traceparent, attempt_id)
        feeds.append(Feed(spans, run_dir, attempt_id, _warn, is_of_attempt=True))
    return feeds

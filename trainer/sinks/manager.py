"""The sinks that a job's spec asks for. Light: their libraries are imported in threads."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from trainer.driver.attempt import DriverContext
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir
from trainer.sinks.base import Feed, JobFacts, Sink, note_of
from trainer.sinks.mlflow import MlflowSink
from trainer.sinks.opentelemetry import SpanSink
from trainer.sinks.tensorboard import TensorBoardSink
from trainer.spec.training import SinksSpec

logger = logging.getLogger(__name__)


class Sinks:
    """The sinks of an attempt, each fed by a thread of its own."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = feeds

    def start(self) -> None:
        """Begin feeding."""
        for feed in self._feeds:
            feed.start()

    def close(self, timeout_s: float) -> None:
        """Feed what is left; each for at most `timeout_s`."""
        for feed in self._feeds:
            feed.close(timeout_s)


NO_SINKS = Sinks(())


def open_sinks(context: DriverContext, writer: EventWriter) -> Sinks:
    """What the spec of the attempt asks for; whatever is wrong with the spec is told elsewhere."""
    run_dir = RunDir(context.run_dir)

    def _warn(message: str) -> None:
        writer.write(note_of(message))

    try:
        document = json.loads(context.files.spec_path.read_bytes())
        wanted = SinksSpec.model_validate(document.get("sinks") or {})
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        logger.warning("no sinks: %s", error)
        return NO_SINKS
    sinks = sinks_of(wanted, run_dir, JobFacts(context.job_id, document))
    feeds = [Feed(sink, run_dir, context.attempt_id, _warn) for sink in sinks]
    if spans := spans_of(context.attempt_id, os.environ):
        feeds.append(Feed(spans, run_dir, context.attempt_id, _warn, is_of_attempt=True))
    return Sinks(feeds)


def spans_of(attempt_id: str, env: Mapping[str, str]) -> SpanSink | None:
    """The sink of spans, where the service names a collector and the trace of the job."""
    endpoint, traceparent = env.get("OTEL_EXPORTER_OTLP_ENDPOINT"), env.get("SHARDLOOM_TRACEPARENT")
    return SpanSink(endpoint, traceparent, attempt_id) if endpoint and traceparent else None


def sinks_of(wanted: SinksSpec, run_dir: RunDir, job: JobFacts) -> list[Sink]:
    """The sinks of a `sinks` section."""
    sinks: list[Sink] = []
    if wanted.tensorboard:
        folder = wanted.tensorboard.dir
        sinks.append(TensorBoardSink(Path(folder) if folder else run_dir.tensorboard_dir))
    if wanted.mlflow:
        sinks.append(MlflowSink(wanted.mlflow.tracking_uri, wanted.mlflow.experiment, job))
    return sinks

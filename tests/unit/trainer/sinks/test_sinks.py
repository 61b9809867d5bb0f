"""Sinks of a job's metrics: fed from files of records, read back with the tools' own readers."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.harness.builders import NOW, attempt_ended, workers_lost, workers_started
from tests.harness.http_stub import http_stub
from tests.harness.wait import scaled
from trainer.protocol import events as events_module
from trainer.protocol.outbox import EventWriter, read_batch
from trainer.protocol.run_dir import RunDir
from trainer.sinks import open_sinks
from trainer.sinks.base import Feed
from trainer.sinks.mlflow import MlflowSink
from trainer.sinks.opentelemetry import SpanSink
from trainer.sinks.tensorboard import TensorBoardSink

JOB = "job-0000000000ab"
_STARTED = events_module.AttemptStarted(time=NOW, world_size=2)
TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


class _List:
    """A sink that keeps what it takes, or fails as long as a test says."""

    name = "list"

    def __init__(self) -> None:
        self.taken: list[events_module.Event] = []
        self.error: Exception | None = None
        self.is_closed = False

    def open(self) -> None:
        """Nothing to open."""

    def take(self, events: Sequence[events_module.Event]) -> None:
        if self.error:
            raise self.error
        self.taken += events

    def close(self) -> None:
        self.is_closed = True


def _metrics(step: int, **values: float) -> events_module.Metrics:
    return events_module.Metrics(
        time=NOW + step, step=step, values=values or {"train/loss": 1.0 / step}
    )


def _write(
    run_dir: RunDir, attempt: int, *records: events_module.Event, stream: str = "workers-0"
) -> None:
    writer = EventWriter(run_dir.attempt(f"{JOB}-a{attempt}").stream_path(stream))
    for record in records:
        writer.write(record)


def _feed(sink, run_dir: RunDir, attempt: int = 0, warnings: list[str] | None = None) -> Feed:
    warn = (warnings if warnings is not None else []).append
    return Feed(sink, run_dir, f"{JOB}-a{attempt}", warn)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / JOB)


def test_every_record_is_taken_once_across_attempts(run_dir: RunDir) -> None:
    _write(run_dir, 0, _metrics(1), _metrics(2))
    first = _List()
    feed = _feed(first, run_dir)
    assert feed.feed()
    assert feed.feed()
    # The driver is killed before its sink takes the third one.
    _write(run_dir, 0, _metrics(3))
    _write(run_dir, 1, _metrics(4))
    second = _List()
    assert _feed(second, run_dir, 1).feed()
    assert [event.step for event in first.taken + second.taken] == [1, 2, 3, 4]


def test_a_sink_that_fails_is_told_once_and_given_everything_later(run_dir: RunDir) -> None:
    _write(run_dir, 0, _metrics(1))
    _write(run_dir, 1, _metrics(2))
    sink, warnings = _List(), list[str]()
    sink.error = ConnectionError("nobody there\nat all")
    feed = _feed(sink, run_dir, 1, warnings)
    assert [feed.feed() for _ in range(3)] == [False] * 3
    [warning] = warnings
    assert "list does not take the job's records: ConnectionError: nobody there" in warning
    sink.error = None
    assert feed.feed()
    assert [event.step for event in sink.taken] == [1, 2]


def test_attempts_that_are_over_are_read_to_their_end_and_then_left_alone(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(3):
        _write(run_dir, attempt, _metrics(attempt + 1))
    sink, opened = _List(), list[str]()

    def read_and_tell(path: Path, offset: int) -> tuple[list[events_module.Event], int]:
        events, offset = read_batch(path, offset)
        if not events:
            opened.append(path.parents[1].name)
        return events, offset

    monkeypatch.setattr("trainer.sinks.base.read_batch", read_and_tell)
    feed = _feed(sink, run_dir, 2)
    feed.feed()
    _write(run_dir, 2, _metrics(4))
    feed.feed()
    assert opened == [f"{JOB}-a0", f"{JOB}-a1", f"{JOB}-a2", f"{JOB}-a2"]
    assert [event.step for event in sink.taken] == [1, 2, 3, 4]


def test_an_attempt_is_read_on_while_the_next_one_waits_for_the_run_folder(run_dir: RunDir) -> None:
    _write(run_dir, 0, _metrics(1))
    _write(run_dir, 1, _STARTED, stream="driver")
    sink = _List()
    feed = _feed(sink, run_dir, 1)
    feed.feed()
    # A record that is being written waits until it is whole.
    path = run_dir.attempt(f"{JOB}-a0").stream_path("workers-0")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    feed.feed()
    path.write_bytes(whole)
    _write(run_dir, 0, _metrics(2))
    _write(run_dir, 1, _metrics(3))
    feed.feed()
    assert [event.step for event in sink.taken if event.kind == "metrics"] == [1, 2, 3]


def test_a_feed_in_its_thread_takes_what_is_left_when_it_is_closed(run_dir: RunDir) -> None:
    sink = _List()
    feed = _feed(sink, run_dir)
    feed.start()
    _write(run_dir, 0, *(_metrics(step) for step in range(1, 1200)))
    feed.close(scaled(10))
    assert [event.step for event in sink.taken] == list(range(1, 1200))
    assert sink.is_closed


def test_a_feed_that_was_never_started_hands_over_nothing_when_it_is_closed(
    run_dir: RunDir,
) -> None:
    # A driver that started too late: its job has gone on in another attempt.
    _write(run_dir, 0, attempt_ended("cancelled"))
    sink, warnings = _List(), list[str]()
    _feed(sink, run_dir, 0, warnings).close(scaled(10))
    assert (sink.taken, warnings) == ([], [])
    assert not run_dir.sink_path(sink.name).exists()


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_a_sink_has_not_taken_at_the_end_is_told(run_dir: RunDir, is_slow: bool) -> None:
    sink, warnings, released = _List(), list[str](), threading.Event()
    sink.error = ConnectionError("nobody there")
    if is_slow:
        sink.open = released.wait
    feed = _feed(sink, run_dir, 0, warnings)
    feed.start()
    _write(run_dir, 0, attempt_ended("completed"))
    feed.close(0.1 if is_slow else scaled(10))
    released.set()
    assert warnings[-1] == "list has not taken all of the job's records"
    assert not any("offered again" in warning for warning in warnings)


def test_tensorboard_reads_the_metrics_of_all_attempts_as_one_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    _write(run_dir, 0, *(_metrics(step) for step in (10, 20)))
    sink = TensorBoardSink(run_dir.tensorboard_dir)
    first = _feed(sink, run_dir)
    assert first.feed()
    failed = sink._writer
    _write(run_dir, 0, _metrics(30))
    with monkeypatch.context() as patch:
        patch.setattr(EventFileWriter, "flush", Mock(side_effect=OSError("no space left")))
        assert not first.feed()
    assert first.feed() and sink._writer is not failed, "a failed writer fails for ever"
    _write(run_dir, 1, _resumed(20), _metrics(30), _metrics(40, **{"train/loss": math.nan}))
    _feed(TensorBoardSink(run_dir.tensorboard_dir), run_dir, 1).feed()
    board = EventAccumulator(str(run_dir.tensorboard_dir))
    board.Reload()
    found = board.Scalars("train/loss")
    # The step that was trained twice counts once.
    assert [scalar.step for scalar in found] == [10, 20, 30, 40]
    assert found[0].value == pytest.approx(0.1)
    assert found[0].wall_time == NOW + 10
    assert math.isnan(found[-1].value)


def _resumed(step: int) -> events_module.WorkersStarted:
    return workers_started().model_copy(update={"resumed_step": step})


def test_attempts_of_a_job_are_one_run_in_mlflow(run_dir: RunDir, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    spec = {
        "name": "ratings",
        "labels": {"team": "ml", "cost//center": "7"},
        "features": [{"name": "a"}],
        "model": {"options": {"rate (%)": 5, "/../x/": 6, "y/" * 200: 7}},
        "training": {"epochs": 3},
    }
    metrics = _metrics(10, **{"train/loss": 0.1, "clicks (%)": 2.0})
    _write(run_dir, 0, _STARTED, metrics, attempt_ended("paused"), stream="driver")
    _feed(MlflowSink(uri, "recommenders", JOB, spec), run_dir).feed()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("recommenders")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.end_time) == ("SCHEDULED", None)
    assert run.data.tags["shardloom.reason"] == "paused"

    _write(run_dir, 1, _STARTED, stream="driver")
    feed = _feed(MlflowSink(uri, "recommenders", JOB, spec), run_dir, 1)
    feed.feed()
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    _write(run_dir, 1, attempt_ended("workers_lost"))
    feed.feed()
    assert client.get_run(run.info.run_id).info.status == "FAILED"

    _write(run_dir, 2, _STARTED, stream="driver")
    feed = _feed(MlflowSink(uri, "recommenders", JOB, spec), run_dir, 2)
    feed.feed()
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    _write(run_dir, 2, *(_metrics(step) for step in range(20, 1300)), attempt_ended("completed"))
    feed.feed()
    [same] = client.search_runs([experiment.experiment_id])
    assert (same.info.run_id, same.info.status) == (run.info.run_id, "FINISHED")
    assert same.data.params["training.epochs"] == "3"
    assert not [name for name in same.data.params if name.startswith("features")]
    options = {name: same.data.params[f"model.options.{name}"] for name in ("rate ___", "_../x_")}
    assert options == {"rate ___": "5", "_../x_": "6"}
    labels = same.data.tags["label.team"], same.data.tags["label.cost_/center"]
    assert labels == ("ml", "7") and same.data.metrics["clicks ___"] == 2
    history = client.get_metric_history(same.info.run_id, "train/loss")
    assert [point.step for point in history] == [10, *range(20, 1300)]
    assert history[0].timestamp == (NOW + 10) * 1000


def test_parameters_that_mlflow_did_not_take_are_sent_again(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    feed = _feed(MlflowSink(uri, "recommenders", JOB, {"name": "ratings"}), run_dir)
    _write(run_dir, 0, _STARTED)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", Mock(side_effect=OSError("away")))
        assert not feed.feed()
    assert feed.feed()
    client = MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("recommenders").experiment_id])
    assert run.data.params == {"name": "ratings"}


def test_mlflow_that_answers_no_request_is_given_up_soon(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MAX_RETRIES", "TIMEOUT"):
        # Set, so that what the sink sets is undone.
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
        monkeypatch.delenv(f"MLFLOW_HTTP_REQUEST_{name}")
    with http_stub(503) as away:
        assert not _feed(MlflowSink(away.url, "recommenders", JOB, {}), run_dir).feed()
    assert len(away.received) == 2


def test_an_attempt_is_a_span_in_the_trace_of_its_job(run_dir: RunDir) -> None:
    exporter = InMemorySpanExporter()
    sink = SpanSink("", TRACEPARENT, f"{JOB}-a0", exporter)
    saved = events_module.CheckpointCommitted(
        time=NOW + 50, step=10, path="p", size_bytes=7, duration_s=2.0
    )
    _write(
        run_dir, 0, _STARTED, _resumed(0), _metrics(1), saved, workers_lost(), attempt_ended("hang")
    )
    assert _feed(sink, run_dir).feed()
    sink.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"attempt", "start workers", "save checkpoint"}
    attempt = spans["attempt"]
    assert f"{attempt.context.trace_id:032x}" == "ab" * 16
    assert f"{attempt.parent.span_id:016x}" == "cd" * 8
    assert attempt.attributes["shardloom.reason"] == "hang"
    assert [event.name for event in attempt.events] == ["workers_lost"]
    assert spans["save checkpoint"].parent.span_id == attempt.context.span_id
    assert spans["save checkpoint"].start_time == int((NOW + 48) * 1e9)


def test_only_a_span_of_an_attempt_that_failed_is_an_error(tmp_path: Path) -> None:
    for reason, is_error in (("paused", False), ("cancelled", False), ("hang", True)):
        run_dir, exporter = RunDir(tmp_path / reason), InMemorySpanExporter()
        sink = SpanSink("", TRACEPARENT, f"{JOB}-a0", exporter)
        _write(run_dir, 0, _STARTED, attempt_ended(reason))
        _feed(sink, run_dir).feed()
        [attempt] = [span for span in exporter.get_finished_spans() if span.name == "attempt"]
        assert (attempt.status.status_code is StatusCode.ERROR) == is_error


def test_the_collector_that_a_driver_is_told_of_is_sent_spans(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(run_dir, 0, _STARTED, attempt_ended("completed"), stream="driver")
    files = run_dir.attempt(f"{JOB}-a0")
    files.spec_path.write_text("{}")
    with http_stub() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("SHARDLOOM_TRACEPARENT", TRACEPARENT)
        [feed] = open_sinks(run_dir, f"{JOB}-a0", JOB, EventWriter(files.stream_path("driver")))
        feed.start()
        feed.close(scaled(10))
    assert [request.path for request in collector.received] == ["/v1/traces"]


def test_a_driver_starts_what_its_spec_asks_for_and_feeds_it_to_the_end(run_dir: RunDir) -> None:
    files = run_dir.attempt(f"{JOB}-a0")
    files.root.mkdir(parents=True)
    writer = EventWriter(files.stream_path("driver"))
    # A faulty spec starts no sink.
    for spec in ("", "[]", "{}", '{"sinks": 7}', '{"sinks": {"nobody": {}}}'):
        files.spec_path.write_text(spec)
        assert open_sinks(run_dir, f"{JOB}-a0", JOB, writer) == []
    # A folder that jobs share has one for each.
    shared = run_dir.root.parent / "boards"
    files.spec_path.write_text(f'{{"sinks": {{"tensorboard": {{"dir": "{shared}"}}}}}}')
    [feed] = open_sinks(run_dir, f"{JOB}-a0", JOB, writer)
    feed.start()
    feed.close(scaled(30))
    assert [*shared.iterdir()] == [shared / JOB] and [*(shared / JOB).iterdir()]
    files.spec_path.write_text('{"name": "x", "sinks": {"tensorboard": {}}}')
    [feed] = open_sinks(run_dir, f"{JOB}-a0", JOB, writer)
    both = '{"sinks": {"tensorboard": {}, "mlflow": {"tracking_uri": "http://mlflow:5000"}}}'
    files.spec_path.write_text(both)
    assert len(open_sinks(run_dir, f"{JOB}-a0", JOB, writer)) == 2
    feed.start()
    _write(run_dir, 0, _metrics(1))
    feed.close(scaled(30))
    [written] = run_dir.tensorboard_dir.iterdir()
    assert b"train/loss" in written.read_bytes()

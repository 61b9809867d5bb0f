"""Paths of one job's files on run storage, for service, driver and workers.

RUN_DIR/                         one per job
  checkpoints/step-00000100/     DCP files, and COMMIT.json written last
  skipped-rows.json              rows left out because the loss became NaN on them
  sinks/mlflow.json              how far a sink has come, and what it remembers
  tensorboard/                   event files, where the spec asks for them
  job.json                       what the service needs to know the job again from this folder
  exports/x-ID/                  an export of the model, see `trainer.export.requests`
  code/ID.zip                    code of the user's module, as it was uploaded
  rewind.json                    the checkpoint that the job went back to: {"checkpoint", ...}
  attempts/ATTEMPT_ID/
    spec.json                    the spec as this attempt runs it
    resolved-spec.json           the same with sizes and statistics from the data, and the layout
    outbox/STREAM.jsonl          event records; a line's position is its sequence number
    logs/driver.log, rank-0.log  one per process; rank-0@OFFSET.log goes on where a file is full
    trace-request.json           steps that somebody wants traced: {"id", "num_steps", "ranks"}
    resize-request.json          size or hosts to leave: {"id", "workers", "drain_hosts"}
    stop-request.json            the workers shall save and stop: {"run_index", "cause"}
    stopping-0                   workers of that run index do so
    pause-request.json           the attempt shall save and end: {"id"}
    traces/ID-rank0.json.gz      traces in Chrome's format; ID is `spec` or that of the request
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COMMIT_MARKER = "COMMIT.json"


def stream_order(path: Path) -> tuple[str, int]:
    """Sort key of stream files: `workers-2` before `workers-10`, as later runs overrule."""
    name, _, number = path.stem.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (path.stem, -1)


def trace_name(trace_id: str, rank: int) -> str:
    """File name of the trace of one rank."""
    return f"{trace_id}-rank{rank}.json.gz"


@dataclass(frozen=True)
class AttemptDir:
    """Files of one attempt."""

    root: Path

    @property
    def spec_path(self) -> Path:
        """The spec of this attempt, as JSON."""
        return self.root / "spec.json"

    @property
    def resolved_spec_path(self) -> Path:
        """The same with table sizes, statistics and layout, as JSON; the driver writes it."""
        return self.root / "resolved-spec.json"

    @property
    def outbox_dir(self) -> Path:
        """Folder of the event streams."""
        return self.root / "outbox"

    @property
    def logs_dir(self) -> Path:
        """Folder of the log files, one per process."""
        return self.root / "logs"

    @property
    def trace_request_path(self) -> Path:
        """The newest request for a trace, as JSON; written by the service, read by the workers."""
        return self.root / "trace-request.json"

    @property
    def resize_request_path(self) -> Path:
        """The newest request for a size or for leaving hosts, as JSON; the driver reads it."""
        return self.root / "resize-request.json"

    @property
    def growth_limit_path(self) -> Path:
        """While it exists the attempt grows no further; written by the service, as JSON."""
        return self.root / "growth-limit.json"

    @property
    def stop_request_path(self) -> Path:
        """The newest request to save and stop, as JSON; written by the driver for the workers."""
        return self.root / "stop-request.json"

    @property
    def pause_request_path(self) -> Path:
        """While it exists the attempt shall save and end; written by the service for the driver."""
        return self.root / "pause-request.json"

    def stopping_path(self, run_index: int) -> Path:
        """Mark of workers that stop because they were asked to."""
        return self.root / f"stopping-{run_index}"

    @property
    def traces_dir(self) -> Path:
        """Folder of the traces."""
        return self.root / "traces"

    def trace_path(self, trace_id: str, rank: int) -> Path:
        """Trace of one rank; `trace_id` is `spec` for what the spec asks for."""
        return self.traces_dir / trace_name(trace_id, rank)

    def stream_paths(self) -> list[Path]:
        """Files of all streams, those of earlier worker group runs first."""
        return sorted(self.outbox_dir.glob("*.jsonl"), key=stream_order)

    def stream_path(self, stream: str) -> Path:
        """File of one event stream."""
        return self.outbox_dir / f"{stream}.jsonl"

    def log_path(self, source: str) -> Path:
        """Log file of one process: `driver` or `rank-N`."""
        return self.logs_dir / f"{source}.log"


@dataclass(frozen=True)
class RunDir:
    """Files of one job, across its attempts."""

    root: Path

    @property
    def skipped_rows_path(self) -> Path:
        """Rows that the job leaves out, as JSON; absent while there are none."""
        return self.root / "skipped-rows.json"

    @property
    def job_path(self) -> Path:
        """What the service needs to know the job again when its store is lost, as JSON."""
        return self.root / "job.json"

    @property
    def secret_names_path(self) -> Path:
        """Names of the secrets that the job's processes need; missing where there are none."""
        return self.root / "secret-names.json"

    def code_path(self, code: str) -> Path:
        """Archive of the user's code, by its id."""
        return self.root / "code" / f"{code}.zip"

    @property
    def rewind_path(self) -> Path:
        """The checkpoint that the job was told to go on from, as JSON; absent if none was."""
        return self.root / "rewind.json"

    @property
    def checkpoints_dir(self) -> Path:
        """Folder of the checkpoints, committed or not."""
        return self.root / "checkpoints"

    @property
    def exports_dir(self) -> Path:
        """Folder of the exports of the job's model, done or not."""
        return self.root / "exports"

    @property
    def tensorboard_dir(self) -> Path:
        """Event files for TensorBoard, unless the spec names another folder."""
        return self.root / "tensorboard"

    def sink_path(self, name: str) -> Path:
        """How far a sink has come with the job's records, as JSON."""
        return self.root / "sinks" / f"{name}.json"

    def attempt(self, attempt_id: str) -> AttemptDir:
        """Files of one attempt."""
        return AttemptDir(self.root / "attempts" / attempt_id)

"""One job's files on run storage, for service, driver and workers: paths, records, writing.

RUN_DIR/                         one per job
  checkpoints/step-00000100-a0-r0/  DCP files, and COMMIT.json written last
  run.lock                       the attempt that holds this folder, see `trainer.driver.run_lock`
  skipped-rows.json              rows left out because the loss became NaN on them, if any
  sinks/mlflow.json              how far a sink has come, and what it remembers
  tensorboard/                   event files, where the spec asks for them and names no folder
  job.json                       what the service needs to know the job again from this folder
  secret-names.json              names of the secrets that the job's processes need, if any
  exports/x-ID/                  an export of the model, see `trainer.export.requests`
  code/ID.zip                    code of the user's module, as it was uploaded
  scales.json                    mean and deviation of numbers, by feature, as first measured
  rewind.json                    the checkpoint that the job went back to: {"checkpoint", ...}
  attempts/ATTEMPT_ID/
    spec.json                    the spec as this attempt runs it
    token                        what its driver shows the service, until it has read it (mode 0600)
    resolved-spec.json           the same with sizes and statistics from the data, and the layout
    outbox/STREAM.jsonl          event records; a line's position is its sequence number
    logs/driver.log, rank-0.log  one per process; rank-0@OFFSET.log goes on where a file is full
    trace-request.json           steps that somebody wants traced: {"id", "num_steps", "ranks"}
    resize-request.json          size or hosts to leave: {"id", "workers", "drain_hosts"}
    growth-limit.json            while it exists the attempt grows no further: {"max_workers"}
    stop-request.json            the workers shall save and stop: {"run_index", "cause"}
    stopping-0, completed-0      how workers of that run index ended: so, or with all trained
    pause-request.json           while it exists the attempt shall save and end: {"id"}
    traces/ID-rank0.json.gz      traces in Chrome's format; ID is that of the request
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.protocol.untrusted import replace_untrusted

COMMIT_MARKER = "COMMIT.json"


@dataclass(frozen=True)
class FileRecord:
    """What a marker says of one file of a checkpoint or an export."""

    size_bytes: int
    sha256: str


def file_record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Put a file in place: whole and durable, or not at all; raises OSError.

    `mode` holds the most rights of it.
    """
    replace_untrusted(path, content, path.parent, make=False, mode=mode)


def fsync_folder(folder: Path) -> None:
    """Make what was created or renamed in `folder` survive a power loss; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stream_order(path: Path) -> tuple[str, int]:
    """Sort key of stream files: `workers-2` before `workers-10`, as later runs overrule."""
    name, _, number = path.stem.rpartition("-")
    return (name, int(number)) if number.isdecimal() else (path.stem, -1)


def trace_name(trace_id: str, rank: int) -> str:
    return f"{trace_id}-rank{rank}.json.gz"


class AttemptDir:
    def __init__(self, root: Path) -> None:
        self.root = root
        # Trusted, other than what jobs make in it (`trainer.protocol.untrusted`).
        self.runs_dir = root.parents[2]
        self.spec_path = root / "spec.json"
        self.token_path = root / "token"
        self.resolved_spec_path = root / "resolved-spec.json"
        self.outbox_dir = root / "outbox"
        self.logs_dir = root / "logs"
        self.traces_dir = root / "traces"
        self.trace_request_path = root / "trace-request.json"
        self.resize_request_path = root / "resize-request.json"
        self.growth_limit_path = root / "growth-limit.json"
        self.stop_request_path = root / "stop-request.json"
        self.pause_request_path = root / "pause-request.json"

    def stopping_path(self, run_index: int) -> Path:
        """Mark of workers that stop because they were asked to."""
        return self.root / f"stopping-{run_index}"

    def completed_path(self, run_index: int) -> Path:
        """Mark of workers that have trained to the end."""
        return self.root / f"completed-{run_index}"

    def trace_path(self, trace_id: str, rank: int) -> Path:
        """Trace of one rank; `trace_id` is that of the request."""
        return self.traces_dir / trace_name(trace_id, rank)

    def stream_paths(self) -> list[Path]:
        """Files of all streams, those of earlier worker group runs first."""
        return sorted(self.outbox_dir.glob("*.jsonl"), key=stream_order)

    def stream_path(self, stream: str) -> Path:
        return self.outbox_dir / f"{stream}.jsonl"

    def log_path(self, source: str) -> Path:
        return self.logs_dir / f"{source}.log"


class RunDir:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs_dir = root.parent
        self.lock_path = root / "run.lock"
        self.skipped_rows_path = root / "skipped-rows.json"
        self.job_path = root / "job.json"
        self.secret_names_path = root / "secret-names.json"
        self.rewind_path = root / "rewind.json"
        self.scales_path = root / "scales.json"
        self.checkpoints_dir = root / "checkpoints"
        self.exports_dir = root / "exports"
        self.tensorboard_dir = root / "tensorboard"

    def lock_owner(self) -> str | None:
        """The attempt that holds the folder; None where nobody says so, or storage is away."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self.lock_path.read_bytes())["name"])
        return None

    def code_path(self, code: str) -> Path:
        """Archive of the user's code, by its id."""
        return self.root / "code" / f"{code}.zip"

    def sink_path(self, name: str) -> Path:
        """How far a sink has come with the job's records, as JSON."""
        return self.root / "sinks" / f"{name}.json"

    def attempt(self, attempt_id: str) -> AttemptDir:
        return AttemptDir(self.root / "attempts" / attempt_id)

"""Traces of some training steps by torch.profiler, as the spec says or asked for while running.

    service ──► trace-request.json {"id", "num_steps", "ranks"}     read by each rank at its reports
    rank r  ──► traces/ID-rankR.json.gz, then the event TraceWritten

No collective is needed: every rank looks for the request itself and writes its own file and its
own event, so ranks may trace steps a report apart. The file appears whole or not at all, and a
trace that lies there already is never made again, so a request stays where it is: workers that
start anew find it answered. A trace shows training only: a validation or a checkpoint ends it.
Steps show as `ProfilerStep#N`, phases as `shardloom/NAME`; shapes and stacks are left out, which
keeps a file small enough to be opened in Perfetto at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.profiler import ProfilerActivity, profile, record_function

from trainer import events
from trainer.metrics import Speedometer
from trainer.run_dir import AttemptDir
from trainer.spec import TraceSpec

logger = logging.getLogger(__name__)

SPEC_TRACE = "spec"


class TraceRequest(BaseModel):
    """Steps that somebody wants traced, from the next one on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # The id becomes part of a path.
    id: Annotated[str, Field(pattern=r"^t-[0-9a-f]{8}$")]
    num_steps: Annotated[int, Field(ge=1, le=100)]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class _Wanted:
    """A trace that this rank makes once those before it are made."""

    id: str
    num_steps: int


@dataclass
class _Recording:
    """A trace in the making."""

    wanted: _Wanted
    profiler: profile
    num_steps: int = 0
    step: int = 0
    step_range: record_function | None = None


class Tracer:
    """Records traces on one rank; `emit` writes an event of this rank."""

    def __init__(
        self,
        files: AttemptDir,
        rank: int,
        spec: TraceSpec | None,
        speed: Speedometer,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._files = files
        self._rank = rank
        self._spec = spec
        self._speed = speed
        self._emit = emit
        self._recording: _Recording | None = None
        self._waiting: deque[_Wanted] = deque()
        self._seen_version: tuple[int, int] | None = None

    def poll(self) -> None:
        """Look for a request that this rank has not seen; it begins with the next step."""
        path = self._files.trace_request_path
        try:
            found = path.stat()
            if (version := (found.st_mtime_ns, found.st_ino)) == self._seen_version:
                return
            text = path.read_bytes()
        except OSError:
            return  # nobody asks, or storage is away and the next report looks again
        self._seen_version = version
        try:
            request = TraceRequest.model_validate_json(text)
        except ValidationError as error:
            self._refuse(path, error)
            return
        self._want(_Wanted(request.id, request.num_steps), request.ranks)

    def begin_step(self, step: int) -> None:
        """Start a recording if one is due at `step` (counted from 1)."""
        spec = self._spec
        if spec and step == spec.first_step:
            self._want(_Wanted(SPEC_TRACE, spec.num_steps), spec.ranks)
        if self._recording is None and self._waiting:
            with self._speed.paused():
                self._recording = _start(self._waiting.popleft())
            self._speed.phases.annotate = True
        if self._recording:
            self._recording.step_range = record_function(f"ProfilerStep#{step}")
            self._recording.step_range.__enter__()

    def end_step(self, step: int) -> None:
        """Count a step that is over, its sync included; the last one wanted ends the recording."""
        recording = self._recording
        if recording is None:
            return
        assert recording.step_range is not None, "begin_step comes first"
        recording.step_range.__exit__(None, None, None)
        recording.step = step
        recording.num_steps += 1
        if recording.num_steps == recording.wanted.num_steps:
            self.stop()

    def stop(self) -> None:
        """End the recording, if any, and write what it has; a full disk costs only the trace."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._speed.phases.annotate = False
        path = self._files.trace_path(recording.wanted.id, self._rank)
        with self._speed.paused():
            recording.profiler.stop()
            try:
                _write(recording.profiler, path)
            except OSError as error:
                self._note("error", f"trace {path.name} cannot be written: {error}")
                return
        self._emit(
            events.TraceWritten(
                time=time.time(),
                step=recording.step,
                num_steps=recording.num_steps,
                rank=self._rank,
                path=str(path),
                size_bytes=path.stat().st_size,
            )
        )

    def _want(self, wanted: _Wanted, ranks: Collection[int]) -> None:
        is_written = self._files.trace_path(wanted.id, self._rank).exists()
        if self._rank in ranks and not is_written:
            self._waiting.append(wanted)

    def _refuse(self, path: Path, error: ValidationError) -> None:
        if self._rank != 0:
            return
        path.unlink(missing_ok=True)
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
            for fault in error.errors(include_url=False)
        )
        self._note("warning", f"the request for a trace is refused and removed: {faults}")

    def _note(self, level: Literal["warning", "error"], message: str) -> None:
        logger.warning("%s", message)
        self._emit(events.Note(time=time.time(), level=level, message=message))


def _start(wanted: _Wanted) -> _Recording:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    recording = _Recording(wanted, profile(activities=activities))
    recording.profiler.start()
    return recording


def _write(profiler: profile, path: Path) -> None:
    """Export to a name of its own, then move into place."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)

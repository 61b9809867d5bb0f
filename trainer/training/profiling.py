"""Where the time of a run goes: phases of a step, throughput, traces by torch.profiler.

    data_wait    waiting for the reader's next batch
    input_dist   starting the all-to-all of the next batch's ids before the forward pass and going
                 on with it after that, on CPUs after the last output all-to-all; and waiting for
                 this batch's in each sharded module
    lookup       reading and pooling rows, until the output all-to-all starts
    output_dist  from there until its result was waited for, dense work in between included
    dense        the rest of the forward pass
    backward     gradients, their all-to-all and all-reduce, and the fused update of the tables
    optimizer    updates outside backward: dense part, data-parallel tables, weight decay
    sync         averaging the replicas
    other        everything else between two steps: batch to device, metrics, bookkeeping

A phase lasts until the next one begins, so the phases of a step add up to its time exactly. On CUDA
the boundaries are events on the current stream: phases are what the device did, and nobody waits
for them but what pauses the training.

    service ──► trace-request.json {"id", "num_steps", "ranks"}     read by each rank at its reports
    rank r  ──► traces/ID-rankR.json.gz, then the event TraceWritten

Tracing needs no collective, so ranks may trace steps a report apart. A trace that exists already is
not made again: restarted workers find the request answered. A validation or a checkpoint ends a
trace. Steps show as `ProfilerStep#N`, phases as `shardloom/NAME`; shapes and stacks are left out,
which keeps a file small enough for Perfetto.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import nn
from torch.profiler import profile, record_function
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable

from trainer.parallel.sync import SyncReport
from trainer.protocol import events
from trainer.protocol.events import PHASES, Phase
from trainer.protocol.run_dir import AttemptDir

logger = logging.getLogger(__name__)
# In these a rank waits for no other, so that they show which rank has more to do.
LOCAL_PHASES: tuple[Phase, ...] = ("lookup", "dense", "optimizer")
# Reading holds others up too, but has no part in how a plan divides the work.
_OWN_PHASES: tuple[Phase, ...] = ("data_wait", *LOCAL_PHASES)
# Marks kept before the older half is added up: on CUDA each is an event.
_MAX_MARKS = 2048


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def is_past(self, mark: float) -> bool:
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class CudaClock:
    """Time of the device's current stream: a mark is an event behind all work launched so far."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed `mark`; does not wait."""
        return mark.query()

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from `start` to `end`; waits until the device has passed `end`."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> HostClock | CudaClock:
    return CudaClock() if device.type == "cuda" else HostClock()


def local_s(seconds: Mapping[Phase, float]) -> float:
    """Seconds of those by phase in which a rank waits for no other, reading included."""
    return sum(seconds[phase] for phase in _OWN_PHASES)


class PhaseTimes:
    """Seconds that each phase took since the last report, on this rank.

    While `annotate` is set, phases also show as `shardloom/NAME` ranges in a torch profiler.
    """

    def __init__(self, clock: HostClock | CudaClock) -> None:
        self.annotate = False
        self._clock = clock
        self.is_paused = False
        self.restart()

    def restart(self) -> None:
        """Start a new window in phase `other`, forgetting what was measured."""
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._current: Phase = "other"
        self._ended: list[Phase] = []  # phases between consecutive marks
        self._marks: list[Any] = [self._clock.mark()]

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`; does nothing while paused."""
        if self.is_paused or phase == self._current:
            return
        self._mark_end()
        self._current = phase
        if len(self._ended) > _MAX_MARKS:
            self._add_up(_MAX_MARKS // 2)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """`phase` inside the block, and what came before after it."""
        before = self._current
        with self.begun(phase):
            yield
        self.enter(before)

    def begun(self, phase: Phase) -> AbstractContextManager[Any]:
        """Begin `phase`, which lasts until another begins; the block is its range in a trace."""
        self.enter(phase)
        # Hooks divide the forward pass further, so its range is not only the dense part.
        return self.shown("forward" if phase == "dense" else phase)

    def shown(self, name: str) -> AbstractContextManager[Any]:
        """A range in the profiler's trace, if there is one to annotate."""
        if not self.annotate:
            return nullcontext()
        return torch.profiler.record_function(f"shardloom/{name}")

    @contextmanager
    def paused(self) -> Iterator[bool]:
        """Leave the block out: validation, checkpoints and traces are no part of a step.

        Gives whether it is the outermost of nested blocks.
        """
        if self.is_paused:
            yield False
            return
        self._mark_end()
        self._add_up(len(self._ended))
        self.is_paused = True
        yield True
        self.is_paused = False
        self._marks = [self._clock.mark()]

    def read(self, num_steps: int) -> dict[Phase, float]:
        """Mean seconds per step by phase in this window of `num_steps`; starts the next one.

        What the device has not done yet counts there, as waiting for it would empty its queue.
        """
        self._mark_end()
        self._current = "other"
        # Marks are passed in order.
        end = bisect_left(self._marks, True, lo=1, key=lambda mark: not self._clock.is_past(mark))
        self._add_up(end - 1)
        steps = max(num_steps, 1)
        means = {phase: seconds / steps for phase, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return means

    def _mark_end(self) -> None:
        self._ended.append(self._current)
        self._marks.append(self._clock.mark())

    def _add_up(self, count: int) -> None:
        """Turn the oldest `count` marks into seconds."""
        for phase, (start, end) in zip(self._ended[:count], pairwise(self._marks), strict=False):
            self._seconds[phase] += self._clock.elapsed_s(start, end)
        del self._ended[:count], self._marks[:count]


class ForwardPhases:
    """Hooks that mark the phases inside a model's forward pass."""

    def __init__(self, model: nn.Module, times: PhaseTimes) -> None:
        self._times = times
        self._num_awaited = 0
        self._range: AbstractContextManager[Any] = nullcontext()
        model.register_forward_pre_hook(self._begin_forward)
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
                self._watch(module)

    def _watch(self, module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection) -> None:
        module.register_forward_pre_hook(self._begins("input_dist"))
        # TorchRec keeps these parts in plain lists.
        for lookup in module._lookups:
            lookup.register_forward_pre_hook(self._begins("lookup"))
        for dist in module._output_dists:
            dist.register_forward_pre_hook(self._begins("output_dist"))
        module.register_forward_hook(self._end_module)

    def _begin_forward(self, _module: nn.Module, _args: Any) -> None:
        self._num_awaited = 0

    def _begins(self, phase: Phase) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._times.enter(phase)
            if self._times.annotate:
                self._close_range()
                self._range = self._times.shown(phase)
                self._range.__enter__()

        return hook

    def _close_range(self) -> None:
        self._range.__exit__(None, None, None)
        self._range = nullcontext()

    def _end_module(self, _module: nn.Module, _args: Any, output: Any) -> None:
        # The wait comes later and has a range of its own by TorchRec.
        self._close_range()
        if isinstance(output, LazyAwaitable):
            self._num_awaited += 1
            output.callbacks.append(self._end_wait)
        else:
            self._times.enter("dense")

    def _end_wait(self, output: Any) -> Any:
        self._num_awaited -= 1
        if self._num_awaited <= 0:
            self._times.enter("dense")
        return output


class Speedometer:
    """Rows and steps per second between reports, and what syncs cost.

    It starts and stops `phases` along with itself.
    """

    def __init__(
        self,
        rows_per_step: int,
        phases: PhaseTimes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.phases = phases
        self._rows_per_step = rows_per_step
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Start a new window now, forgetting what was measured."""
        self.phases.restart()
        self._begin()

    def _begin(self) -> None:
        self._started = self._clock()
        self._paused_s = 0.0
        self.num_steps = 0
        self._syncs: list[SyncReport] = []
        self._num_timed = 0

    def step(self) -> None:
        self.num_steps += 1

    def sync(self, report: SyncReport) -> None:
        self._syncs.append(report)
        self._num_timed += not self.phases.is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out time that is not training (validation, checkpoints, traces); may be nested."""
        started = self._clock()
        with self.phases.paused() as is_outermost:
            yield
        if is_outermost:
            self._paused_s += self._clock() - started

    def read(self, sync_s: float = 0.0) -> dict[str, float]:
        """Values of this window, in which a step spent `sync_s` in phase `sync` on average.

        Starts the next one; `PhaseTimes.read` does so for phases, and keeps what is still to come.
        """
        elapsed_s = max(self._clock() - self._started - self._paused_s, 1e-9)
        steps_per_s = self.num_steps / elapsed_s
        values = {
            "speed/steps_per_s": steps_per_s,
            "speed/rows_per_s": steps_per_s * self._rows_per_step,
        }
        if self._num_timed:
            values["sync/time_s"] = sync_s * self.num_steps / self._num_timed
        if self._syncs:
            values["sync/bytes"] = fmean(each.num_bytes for each in self._syncs)
            values["sync/density"] = fmean(each.density for each in self._syncs)
        self._begin()
        return values


class TraceRequest(BaseModel, extra="forbid", frozen=True):
    """A request to trace steps, from the next one on."""

    # The id becomes part of a path.
    id: Annotated[str, Field(pattern=r"^t-[0-9a-f]{8}$")]
    num_steps: Annotated[int, Field(ge=1, le=100)]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


@dataclass
class _Recording:
    """A trace under way: `num_steps` of `max_steps` are recorded, the last of them `step`."""

    id: str
    max_steps: int
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
        speed: Speedometer,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._files = files
        self._rank = rank
        self._speed = speed
        self._emit = emit
        self._recording: _Recording | None = None
        self._queued: deque[tuple[str, int]] = deque()  # (id, number of steps)
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
            return  # there is no request, or storage is away until the next report
        self._seen_version = version
        try:
            request = TraceRequest.model_validate_json(text)
        except ValidationError as error:
            logger.warning("the request in %s is refused: %s", path.name, error)
            return
        if self._rank not in request.ranks:
            return
        with suppress(OSError):  # storage that is away may be there when the trace is written
            if self._files.trace_path(request.id, self._rank).exists():
                return
        self._queued.append((request.id, request.num_steps))

    def begin_step(self, step: int) -> None:
        """Start a recording if one is asked for and none is under way."""
        if self._recording is None and self._queued:
            with self._speed.paused():
                self._recording = _Recording(*self._queued.popleft(), profile())
                self._recording.profiler.start()
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
        if recording.num_steps == recording.max_steps:
            self.stop()

    def stop(self) -> None:
        """End the recording, if any, and write what it has; a full disk costs only the trace."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        self._speed.phases.annotate = False
        path = self._files.trace_path(recording.id, self._rank)
        with self._speed.paused():
            recording.profiler.stop()
            try:
                size_bytes = _write(recording.profiler, path)
            except OSError as error:
                message = f"trace {path.name} cannot be written: {error}"
                logger.warning("%s", message)
                self._emit(events.Note(time=time.time(), level="error", message=message))
                return
        self._emit(
            events.TraceWritten(
                time=time.time(),
                step=recording.step,
                num_steps=recording.num_steps,
                rank=self._rank,
                path=str(path),
                size_bytes=size_bytes,
            )
        )


def _write(profiler: profile, path: Path) -> int:
    """Export to a name of its own, then move into place; its bytes."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(partial))
        return partial.replace(path).stat().st_size
    finally:
        partial.unlink(missing_ok=True)

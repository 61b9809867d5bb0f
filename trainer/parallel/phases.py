"""Where the time of a step goes: phases that follow each other without gap or overlap.

    data_wait    waiting for the reader's next batch
    input_dist   from the entry of a sharded module to its first lookup: the all-to-all of the ids
    lookup       reading and pooling rows, until the output all-to-all starts
    output_dist  from there until its result was waited for, dense work in between included
    dense        the rest of the forward pass
    backward     gradients, their all-to-all and all-reduce, and the fused update of the tables
    optimizer    updates outside backward: dense part, data-parallel tables, weight decay
    sync         averaging the copies
    other        everything else between two steps: batch to device, metrics, bookkeeping

A phase lasts until the next one begins, so the phases of a step add up to its time exactly. The
boundaries inside the forward pass are hooks on TorchRec's sharded modules and their parts; waiting
for the ids of other ranks happens inside the sharded module, so it counts as input_dist. On CUDA
boundaries are events on the current stream, and phases are what the device did; nothing waits for
them but the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable

Phase = Literal[
    "data_wait",
    "input_dist",
    "lookup",
    "output_dist",
    "dense",
    "backward",
    "optimizer",
    "sync",
    "other",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
# In these a rank waits for no other, so that they show which rank has more to do.
LOCAL_PHASES: tuple[Phase, ...] = ("lookup", "dense", "optimizer")
# Reading holds others up too, but has no part in how a plan divides the work.
_OWN_PHASES: tuple[Phase, ...] = ("data_wait", *LOCAL_PHASES)
# Marks kept before the older half is added up: on CUDA each is an event.
_MAX_MARKS = 2048

Mark = TypeVar("Mark")
Item = TypeVar("Item")


class Clock(Protocol[Mark]):
    """Marks points in time and tells how far two of them are apart."""

    def mark(self) -> Mark:
        """The present."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds from `start` to `end`; may wait until the device has passed `end`."""
        ...


class HostClock:
    """Wall time of this process."""

    def mark(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def elapsed_s(self, start: float, end: float) -> float:
        """Difference of two marks."""
        return end - start


class CudaClock:
    """Time of the device's current stream."""

    def mark(self) -> torch.cuda.Event:
        """An event behind all work that was launched so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds between two events; waits for the later one."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock[Any]:
    """The clock that shows what `device` does."""
    return CudaClock() if device.type == "cuda" else HostClock()


def local_s(seconds: Mapping[Phase, float]) -> float:
    """Seconds of those by phase in which a rank waits for no other, reading included."""
    return sum(seconds[phase] for phase in _OWN_PHASES)


class PhaseTimes(Generic[Mark]):
    """Seconds that each phase took since the last report, on this rank.

    While `annotate` is set, phases also show as `shardloom/NAME` ranges in a torch profiler.
    """

    def __init__(self, clock: Clock[Mark]) -> None:
        self.annotate = False
        self._clock = clock
        self._is_paused = False
        self.restart()

    def restart(self) -> None:
        """Start a new window in phase `other`, forgetting what was measured."""
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        self._current: Phase = "other"
        self._ended: list[Phase] = []  # phases between consecutive marks
        self._marks = [self._clock.mark()]

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin `phase`; does nothing while paused."""
        if self._is_paused or phase == self._current:
            return
        self._mark_end()
        self._current = phase
        if len(self._ended) > _MAX_MARKS:
            self._add_up(_MAX_MARKS // 2)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """`phase` inside the block, and what came before after it."""
        before = self._current
        self.enter(phase)
        # Hooks divide the forward pass further, so its range is not only the dense part.
        with self.shown("forward" if phase == "dense" else phase):
            yield
        self.enter(before)

    def around_each(self, phase: Phase, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, with `phase` while each is waited for."""
        iterator = iter(items)
        while True:
            with self.during(phase):
                found = next(iterator, None)
            if found is None:
                return
            yield found

    def shown(self, name: str) -> AbstractContextManager[Any]:
        """A range in the profiler's trace, if there is one to annotate."""
        if not self.annotate:
            return nullcontext()
        return torch.profiler.record_function(f"shardloom/{name}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out: validation, checkpoints and traces are no part of a step."""
        if self._is_paused:
            yield
            return
        self._mark_end()
        self._add_up(len(self._ended))
        self._is_paused = True
        yield
        self._is_paused = False
        self._marks = [self._clock.mark()]

    def step(self) -> None:
        """Count one step."""
        self._num_steps += 1

    def read(self) -> dict[Phase, float]:
        """Mean seconds per step by phase in this window; starts the next one."""
        self._mark_end()
        self._add_up(len(self._ended))
        num_steps = max(self._num_steps, 1)
        means = {phase: seconds / num_steps for phase, seconds in self._seconds.items()}
        self.restart()
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

    def __init__(self, model: nn.Module, times: PhaseTimes[Any]) -> None:
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

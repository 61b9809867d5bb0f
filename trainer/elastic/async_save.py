"""Saving beside the training: a copy in memory at the step, files and marker from a thread.

Each rank copies just what it will write: ranks agree once which of them writes which piece of the
whole, so no piece is written twice and the M copies of a shard share the work. The copies live in
buffers that are kept from save to save: they cost a rank S / T bytes for tables of S bytes. The
thread then talks over a process group of its own, because its collectives must never interleave
with those of the training.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

Result = TypeVar("Result")


class LivePlanner(DefaultSavePlanner):
    """Saves a state as it is. `before_write` is called on every rank before its files are."""

    def __init__(self, before_write: Callable[[], None]) -> None:
        super().__init__()
        self._before_write = before_write

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Begin to write."""
        self._before_write()
        return super().finish_plan(new_plan)


class StagedPlanner(LivePlanner):
    """Saves what this rank's `share` names, taking it from `copies` instead of a state."""

    def __init__(
        self,
        share: SavePlan,
        copies: Mapping[MetadataIndex, torch.Tensor | bytes],
        before_write: Callable[[], None],
    ) -> None:
        super().__init__(before_write)
        self._share = share
        self._copies = copies

    def create_local_plan(self) -> SavePlan:
        """The share, in which no piece is that of another rank as well."""
        self.plan = self._share
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy of one piece."""
        copy = self._copies[write_item.index]
        return io.BytesIO(copy) if isinstance(copy, bytes) else copy


class Staging:
    """Copies of what this rank writes. One save at a time: the next one fills the same buffers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._shares: dict[tuple[str, ...], SavePlan] = {}
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, state: dict[str, Any], before_write: Callable[[], None]) -> StagedPlanner:
        """Copy this rank's share of `state`.

        Collective over the group when the state has other names than before: all ranks' names
        change together.
        """
        live = DefaultSavePlanner()
        live.set_up_planner(state, is_coordinator=dist.get_rank(self._group) == 0)
        names = tuple(sorted(state))
        if names not in self._shares:
            self._shares[names] = agree_on_share(live, self._group)
        share = self._shares[names]
        copies = {item.index: self._copy(item, live.resolve_data(item)) for item in share.items}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return StagedPlanner(share, copies, before_write)

    def _copy(self, item: WriteItem, value: torch.Tensor | io.BytesIO) -> torch.Tensor | bytes:
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(value, io.BytesIO), "DCP hands objects over as bytes"
            return value.getvalue()
        assert isinstance(value, torch.Tensor), "DCP hands everything else over as tensors"
        buffer = self._buffers.get(item.index)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._buffers[item.index] = buffer
        return buffer.copy_(value, non_blocking=True)


def agree_on_share(live: DefaultSavePlanner, group: dist.ProcessGroup) -> SavePlan:
    """What this rank writes of the state that `live` holds. Collective over `group`.

    Every rank makes the same global plan out of all local ones.
    """
    plans: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(plans, live.create_local_plan(), group=group)
    everyone, _ = live.create_global_plan(plans)
    return everyone[dist.get_rank(group)]


def run_here(task: Callable[[], Result]) -> Future[Result]:
    """Run `task` now; the future tells its end."""
    future: Future[Result] = Future()
    _fulfil(future, task)
    return future


def run_beside(task: Callable[[], Result]) -> Future[Result]:
    """Run `task` in a thread; the future tells its end."""
    future: Future[Result] = Future()
    # A daemon: a rank that fails must not wait at its exit for a peer that never answers.
    threading.Thread(target=_fulfil, args=(future, task), name="checkpoint", daemon=True).start()
    return future


def _fulfil(future: Future[Result], task: Callable[[], Result]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:  # DCP's are BaseExceptions; whoever asks raises it again
        future.set_exception(error)

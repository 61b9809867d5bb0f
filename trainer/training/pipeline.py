"""Pipelined steps: the ids of the next batch are exchanged while the current one is computed.

    step i       wait for the ids of i ─► forward(i) ─► backward(i) ─► optimizer(i)
    batch i+1    copy to the device, counts all-to-all ─┴─► ids all-to-all ─────────► ids are there

As TorchRec's `TrainPipelineSparseDist`, but without tracing the model by torch.fx: what each table
collection reads of a batch is seen in the first forward pass, so any model can be pipelined whose
collections take `batch.sparse` or `batch.sequences` as they are. Batches on their way hold ids and
no rows, so results are bitwise those of steps one after the other, and a run may stop between any
two steps: what was not trained is read again.

On CPUs ids are sent within the forward pass, once the tables' outputs have come: the link is free
until gradients take it, and both at once delay these. On GPUs it is after all was launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable
from torchrec.distributed.train_pipeline import _override_input_dist_forwards
from torchrec.distributed.types import Awaitable, ShardedModule

from trainer.data.batches import Batch
from trainer.models.sparse import unweighted
from trainer.parallel.model import TwoDParallel
from trainer.parallel.planner import kernels_of
from trainer.training.profiling import PhaseTimes

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Reads = Callable[[Batch], KeyedJaggedTensor | None]
# What a collection may read of a batch.
_READS: tuple[Reads, ...] = (
    lambda batch: batch.sparse,
    lambda batch: batch.sequences,
    lambda batch: None if batch.sequences is None else unweighted(batch.sequences),
)


def _is_same(ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> bool:
    """Whether both are the same tensors under the same keys."""
    return (
        ids.keys() == others.keys()
        and ids.values() is others.values()
        and ids.lengths() is others.lengths()
        and ids.weights_or_none() is others.weights_or_none()
    )


@dataclass
class _Exchange:
    """Ids of one batch on their way to the ranks that hold their rows.

    `arriving` gives the ids; before they are sent it is what TorchRec knows of their counts.
    """

    ids: KeyedJaggedTensor
    context: Any
    arriving: Awaitable[Any]


def _exchange_counts(
    exchanges: list[_Exchange], group: dist.ProcessGroup | None
) -> Callable[[], list[Awaitable[Any]]]:
    """Begin to exchange how many ids go where; the result waits for that, and sends the ids.

    Collective over the sharding group: once for all exchanges if it is given as `group`, else once
    for each kind of sharding.
    """
    requests = [each.arriving for each in exchanges]
    if group is None:
        return lambda: [request.wait() for request in requests]
    contexts = [each.context for each in exchanges]
    return FusedKJTListSplitsAwaitable(requests, contexts, group).wait


class _PipelinedForward:
    """Stands in for `forward` of a sharded collection; takes what was exchanged before, if any."""

    def __init__(self, module: ShardedModule, stream: torch.cuda.Stream | None) -> None:
        self._module = module
        self._stream = stream
        self._plain = module.forward
        self.given: list[tuple[Any, ...]] | None = None  # what each call gave, where that is noted
        self._reads: Reads | None = None
        self._exchange: _Exchange | None = None
        self._then: Callable[[], None] | None = None
        module.forward = self

    def choose_reads(self, batch: Batch) -> bool:
        """Whether all that was noted is ids of `batch`, given once; these are sent ahead then."""
        given, self.given = self.given or [], None
        if len(given) != 1 or len(given[0]) != 1:
            return False
        found = [(reads, reads(batch)) for reads in _READS]
        self._reads = next((r for r, ids in found if ids and _is_same(given[0][0], ids)), None)
        return self._reads is not None

    def fuse_counts(self, group: dist.ProcessGroup) -> None:
        """Have all kinds of sharding exchange their counts at once from here on."""
        _override_input_dist_forwards([self._module])

        def plain(*args: Any, **kwargs: Any) -> Any:
            (ids,) = (*args, *kwargs.values())
            exchange = self._start(ids)
            (arriving,) = _exchange_counts([exchange], group)()
            return self._module.compute_and_output_dist(exchange.context, arriving.wait())

        self._plain = plain

    def start(self, batch: Batch) -> _Exchange:
        """Begin the exchange of what the collection reads of a batch."""
        assert self._reads is not None, "`choose_reads` comes first"
        ids = self._reads(batch)
        assert ids is not None, "batches of one job have the same parts"
        return self._start(ids)

    def _start(self, ids: KeyedJaggedTensor) -> _Exchange:
        context = self._module.create_context()
        return _Exchange(ids, context, self._module.input_dist(context, ids))

    def take(self, exchange: _Exchange, then: Callable[[], None] | None = None) -> None:
        """Use `exchange` in the next call; `then` is called once its outputs are there."""
        self._exchange, self._then = exchange, then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        exchange, self._exchange = self._exchange, None
        if self.given is not None:
            self.given.append((*args, *kwargs.values()))
        if exchange is None:
            return self._plain(*args, **kwargs)
        (ids,) = (*args, *kwargs.values())
        if not _is_same(ids, exchange.ids):
            raise ValueError(
                "a table collection was given other ids than in the first step: give each "
                "collection batch.sparse or batch.sequences in every step, or never"
            )
        with _on(self._stream):
            arrived = exchange.arriving.wait()
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            arrived.record_stream(current)
            exchange.context.record_stream(current)
        outputs = self._module.compute_and_output_dist(exchange.context, arrived)
        if isinstance(outputs, Awaitable) and (then := self._then):

            def arrive(outputs: Any) -> Any:
                then()
                return outputs

            outputs.callbacks.append(arrive)
        return outputs


@dataclass
class _Staged(Generic[Item]):
    """A batch on the device, what came with it, and its ids where these are on their way.

    `counts` waits until each rank knows how many ids go where, then sends those of `exchanges`.
    """

    batch: Batch
    item: Item
    exchanges: list[_Exchange] | None = None
    counts: Callable[[], list[Any]] | None = None


class StepPipeline:
    """Runs the forward passes of a model over a stream of batches, one batch ahead.

    All ranks go through equally many batches and ask for the next one at the same steps.
    """

    def __init__(self, model: TwoDParallel, phases: PhaseTimes) -> None:
        self._model = model
        self.phases = phases
        self._device = model.groups.device
        is_cuda = self._device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(priority=-1) if is_cuda else None
        self._dist_stream = torch.cuda.Stream(priority=-1) if is_cuda else None
        # Counts of all tables go over it at once; one rank has none to exchange. On GPUs each kind
        # of sharding sends its own, as TorchRec reads those to be fused back from the device.
        group = model.groups.sharding_group
        self._counts_group = group if group.size() > 1 and not is_cuda else None
        found = _sharded_modules(model.module)
        self._forwards = [_PipelinedForward(module, self._dist_stream) for module in found]
        self.is_ahead: bool | None = None  # None until the first forward pass
        self._current: _Staged[Any] | None = None
        self._following: _Staged[Any] | None = None

    def over(self, items: Iterable[tuple[Batch, Item]]) -> BatchStream[Item]:
        """`items` with batches on the device.

        Streams may be nested, as when a validation begins between two steps.
        """
        return BatchStream(self, items)

    def stage(self, item: tuple[Batch, Item]) -> _Staged[Item]:
        """Begin to copy a batch to the device."""
        if self._copy_stream is None:  # it is there
            return _Staged(*item)
        with _on(self._copy_stream):
            return _Staged(item[0].to(self._device, non_blocking=True), item[1])

    def give(self, staged: _Staged[Any]) -> None:
        """Let whoever asked for a batch use it: what comes next awaits its copy."""
        if self._copy_stream is not None:
            _hand_over(staged.batch, self._copy_stream, torch.cuda.current_stream())

    def enter(self, current: _Staged[Any] | None, following: _Staged[Any] | None) -> None:
        """`forward` is asked for `current` next, and after that for `following`, if any."""
        self._current, self._following = current, following

    def drop(self, staged: _Staged[Any]) -> None:
        """Forget a batch; what was sent of it is awaited. Collective where something was."""
        self._send(staged)
        with _on(self._dist_stream):
            for exchange in staged.exchanges or []:
                exchange.arriving.wait()
        self.enter(None, None)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, outputs) of the batch that a stream gave last. Collective."""
        current, following = self._current, self._following
        assert current is not None and batch is current.batch, "batches come from a stream"
        if self.is_ahead is None:
            return self._observe(batch)
        if not self.is_ahead:
            return self._model(batch)
        if current.exchanges is None:
            self._start(current)
            self._send(current)
        num_awaited = len(self._forwards)

        def send() -> None:
            nonlocal num_awaited
            num_awaited -= 1
            if following and not num_awaited:
                self._send(following)

        for forward, exchange in zip(self._forwards, current.exchanges or [], strict=True):
            forward.take(exchange, None if self._dist_stream else send)
        if following:
            self._start(following)
        found = self._model(batch)
        if following and num_awaited:
            self._send(following)
        return found

    def _observe(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """A plain forward pass, which shows whether batches can be sent ahead. Collective."""
        for forward in self._forwards:
            forward.given = []
        found = self._model(batch)
        # By the plan, which all ranks have: one that went on alone would wait for the others.
        has_caches = any(share < 1 for _, share in kernels_of(self._model.group_plan).values())
        if has_caches and any(len(f.given or ()) > 1 for f in self._forwards):
            raise ValueError(
                "a table collection is called more than once in a step, and a table is cached in "
                "GPU memory: a later call may move rows that the backward pass of an earlier one "
                "writes; call it once, or set parallelism.planner.compute_kernel to fused"
            )
        is_able = [forward.choose_reads(batch) for forward in self._forwards]
        agreed = torch.tensor(int(all(is_able)), device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._model.groups.global_group)
        self.is_ahead = bool(agreed.item())
        if self.is_ahead and self._counts_group:
            for forward in self._forwards:
                forward.fuse_counts(self._counts_group)
        if not self.is_ahead:
            logger.warning(
                "steps are not pipelined: a table collection takes other ids than batch.sparse or "
                "batch.sequences, or is called more than once"
            )
        return found

    def _start(self, staged: _Staged[Any]) -> None:
        """Exchange how many ids go where. Collective over the sharding group."""
        with self.phases.during("input_dist"), _on(self._dist_stream):
            if self._copy_stream is not None and self._dist_stream is not None:
                _hand_over(staged.batch, self._copy_stream, self._dist_stream)
            staged.exchanges = [forward.start(staged.batch) for forward in self._forwards]
            staged.counts = _exchange_counts(staged.exchanges, self._counts_group)

    def _send(self, staged: _Staged[Any]) -> None:
        """Wait for the counts and exchange the ids, once. Collective over the sharding group."""
        if staged.counts is None:
            return
        with self.phases.during("input_dist"), _on(self._dist_stream):
            for exchange, arriving in zip(staged.exchanges or [], staged.counts(), strict=True):
                exchange.arriving = arriving
        staged.counts = None


class BatchStream(Generic[Item]):
    """Iterates over items with batches on the device; each comes when the next has been read.

    Where the items go on after their end, so does the stream.
    """

    def __init__(self, pipeline: StepPipeline, items: Iterable[tuple[Batch, Item]]) -> None:
        self._pipeline = pipeline
        self._items = iter(items)
        self._ahead: _Staged[Item] | None = None

    def __iter__(self) -> Iterator[tuple[Batch, Item]]:
        return self

    def __next__(self) -> tuple[Batch, Item]:
        current = self._ahead or self._read()
        if current is not None:
            self._pipeline.give(current)  # now, or the copy of the next is awaited too
        self._ahead = self._read() if current else None
        self._pipeline.enter(current, self._ahead)
        if current is None:
            raise StopIteration
        return current.batch, current.item

    def _read(self) -> _Staged[Item] | None:
        with self._pipeline.phases.during("data_wait"):  # where that is part of a step
            item = next(self._items, None)
        return None if item is None else self._pipeline.stage(item)

    def take_back(self, is_meant: Callable[[Item], bool]) -> None:
        """Do not give the batch that is ahead, if it is meant. Collective where its ids are."""
        if self._ahead is not None and is_meant(self._ahead.item):
            self._pipeline.drop(self._ahead)
            self._ahead = None


def _sharded_modules(module: nn.Module) -> Iterator[ShardedModule[Any, Any, Any, Any]]:
    """The outermost sharded modules, in order."""
    if isinstance(module, ShardedModule):
        yield module
        return
    for child in module.children():
        yield from _sharded_modules(child)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _hand_over(batch: Batch, source: torch.cuda.Stream, target: torch.cuda.Stream) -> None:
    """Let `target` use what `source` copies."""
    target.wait_stream(source)
    batch.record_stream(target)

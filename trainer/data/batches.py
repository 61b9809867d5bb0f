"""Batches of one rank: tensors and a TorchRec KeyedJaggedTensor, made ahead by a thread.

Rows come from an epoch's order (`position`), or from leases of a replica group. Rows that fill up a
batch repeat others, and bad ones hold made-up ids. In a table whose rows are the ids that weighs
nothing, as their gradients are 0; a dynamic table would count them as seen, keep their ids for it,
and evict others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from trainer.coordination.messages import Lease
from trainer.data.parquet import ParquetSource
from trainer.data.position import (
    START,
    BatchShape,
    DataPosition,
    Span,
    Step,
    Stripes,
    steps_from,
)
from trainer.data.process import ReaderProcess
from trainer.data.quarantine import QuarantinedRows
from trainer.data.reader import RowReader
from trainer.data.rows import FloatArray, Rows, SparseIds
from trainer.spec.job import JobSpec

NUM_PREFETCHED = 4
"""Batches that are made ahead."""
_SLOW_READ_S = 5.0


def drop_padding_ids(
    ids: KeyedJaggedTensor, keys: Collection[str], row_weight: torch.Tensor
) -> KeyedJaggedTensor:
    """`ids` without those that the features `keys` have in rows of weight 0: `row_weight` [B]."""
    names = ids.keys()
    is_chosen = torch.tensor([name in keys for name in names], dtype=torch.bool)
    is_dropped = (is_chosen[:, None] & (row_weight == 0)).ravel()
    if not is_dropped.any():
        return ids
    lengths = ids.lengths()
    is_kept = ~is_dropped.repeat_interleave(lengths)
    weights = ids.weights_or_none()
    return KeyedJaggedTensor(
        keys=names,
        values=ids.values()[is_kept],
        lengths=lengths.masked_fill(is_dropped, 0),
        weights=None if weights is None else weights[is_kept],
    )


@dataclass(frozen=True)
class Batch:
    """B rows of one rank, for a model of K tasks.

    dense float32 [B, num_dense]; label (normalised), label_offset and label_scale float32 [B, K],
    in the order of `spec.model.tasks`. A label in its own unit is
    `label * label_scale + label_offset`. weight float32 [B] is how much a row counts (1 without
    `data.weight_column`), and 0 for rows that only fill up a batch. Rows of weight 0 have no ids of
    dynamic tables.

    `sparse` has the keys of `spec.pooled_features` in order (none, when all are sequences) and,
    where `spec.is_weighted`, a float32 weight for each id. `sequences` has the keys of
    `spec.sequence_features`, each row cut to its last `length_limit` ids, and weights where
    `spec.has_weighted_sequences`; None without sequences. `quarantined` says which rows are bad:
    they hold harmless values and weigh 0.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor
    label_offset: torch.Tensor
    label_scale: torch.Tensor
    weight: torch.Tensor
    sequences: KeyedJaggedTensor | None = None
    quarantined: QuarantinedRows = field(default_factory=Counter)

    @property
    def num_rows(self) -> int:
        """B, padding included."""
        return self.label.shape[0]  # not len(), which torch.export takes for a constant

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = self._parts().items()
        return replace(
            self, **{name: part.to(device, non_blocking=non_blocking) for name, part in parts}
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has used it, as TorchRec's pipelines ask."""
        for part in self._parts().values():
            part.record_stream(stream)

    def _parts(self) -> dict[str, Any]:
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        del parts["quarantined"]
        return {name: part for name, part in parts.items() if part is not None}


def make_batch(rows: Rows, spec: JobSpec) -> Batch:
    """Rows as tensors, all of which count."""
    return _wrap(rows, BatchKeys(spec))


class BatchKeys:
    """Names of a spec's sparse features, looked up once and not for each batch."""

    def __init__(self, spec: JobSpec) -> None:
        self.pooled = [feature.name for feature in spec.pooled_features]
        self.sequences = [feature.name for feature in spec.sequence_features]
        self.is_weighted = spec.is_weighted
        self.has_weighted_sequences = spec.has_weighted_sequences
        tables = spec.dynamic_tables
        self.dynamic = frozenset(f.name for f in spec.sparse_features if f.table in tables)


def _wrap(rows: Rows, keys: BatchKeys, is_counted: FloatArray | None = None) -> Batch:
    """Tensors of rows; `is_counted` [n] is 0 for those that only fill up the batch."""
    weight = rows.row_weight if is_counted is None else rows.row_weight * is_counted
    row_weight = torch.from_numpy(weight)

    def jagged(names: list[str], ids: SparseIds, is_weighted: bool) -> KeyedJaggedTensor:
        found = KeyedJaggedTensor(
            keys=names,
            values=torch.from_numpy(ids.packed()),
            lengths=torch.from_numpy(ids.lengths().ravel()),
            weights=torch.from_numpy(ids.weights()) if is_weighted else None,
        )
        found = drop_padding_ids(found, keys.dynamic, row_weight) if keys.dynamic else found
        # Counts ids while they are on the host: later each step would read them from the device.
        return found.sync()

    pooled, sequences = rows.sparse.split(len(keys.pooled))
    return Batch(
        dense=torch.from_numpy(rows.dense),
        sparse=jagged(keys.pooled, pooled, keys.is_weighted),
        label=torch.from_numpy(rows.label),
        label_offset=torch.from_numpy(rows.offset),
        label_scale=torch.from_numpy(rows.scale),
        weight=row_weight,
        sequences=jagged(keys.sequences, sequences, keys.has_weighted_sequences)
        if keys.sequences
        else None,
    )


StepType = TypeVar("StepType", bound=Step)


class BatchMaker(RowReader):
    """Makes batches of `data.batch_size` rows of a split. For one thread at a time."""

    def __init__(self, source: ParquetSource, spec: JobSpec, shuffle: bool) -> None:
        """Rows are shuffled where the spec says so, too."""
        super().__init__(source, spec, shuffle=shuffle)
        self._keys = BatchKeys(spec)
        self._numbers = np.arange(spec.data.batch_size)

    def make(self, epoch: int, spans: Sequence[Span], is_counted: bool) -> Batch:
        """A batch of the rows of `spans`, or, unless they count, of padding that they give.

        What is missing to a full batch is filled with repeated rows of weight 0. Raises
        `DataError`.
        """
        rows = self.read(epoch, spans)
        num_counted = len(rows) if is_counted else 0
        if num_counted == len(self._numbers):
            batch = _wrap(rows, self._keys)
        else:
            counted = (self._numbers < num_counted).astype(np.float32)
            batch = _wrap(rows.take(np.minimum(self._numbers, len(rows) - 1)), self._keys, counted)
        if rows.faults is None or self.fault_log is None:
            return batch
        return replace(batch, quarantined=self.fault_log.count(rows.faults[:num_counted]))


class _DistantMaker:
    """A `BatchMaker` in another process, which may only have started."""

    def __init__(self, process: ReaderProcess, *arguments: Any) -> None:
        self._process = process
        self._arguments = arguments
        self._number: int | None = None

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._number is None:
            self._number = self._process.make(BatchMaker, *self._arguments)
        return self._process.call(self._number, method, *arguments)

    def expect(self, epoch: int, spans: Sequence[Span]) -> None:
        self._call("expect", epoch, spans)

    def make(self, epoch: int, spans: Sequence[Span], is_counted: bool) -> Batch:
        batch: Batch = self._call("make", epoch, spans, is_counted)
        return batch

    def close(self) -> None:
        if self._number is not None:
            with suppress(RuntimeError, MemoryError):  # it may have ended
                self._process.call(self._number, "close")


class _ReadAhead(Iterator[tuple[Batch, StepType]]):
    """Batches of one rank, all of `data.batch_size` rows, made ahead by one thread.

    Gives (batch, its step). A context manager, or call `close`. A fault found while reading is
    raised to the consumer at the batch that it spoils.
    """

    _steps: Iterator[StepType] = iter(())

    def __init__(
        self,
        source: ParquetSource,
        spec: JobSpec,
        rank: int,
        num_ranks: int,
        *,
        process: ReaderProcess | None = None,
        shuffle: bool = True,
        on_slow_read: Callable[[], None] = lambda: None,
    ) -> None:
        """Batches are made in `process`, if there is one, else by threads here.

        Rows are shuffled where the spec says so, too. `on_slow_read` is called by the consumer when
        a batch has let it wait for seconds, as where storage is away.
        """
        self._on_slow_read = on_slow_read
        self.shape = BatchShape(source.num_rows, num_ranks, spec.data.batch_size)
        self._rank = rank
        arguments = (source, spec, shuffle)
        self._maker = _DistantMaker(process, *arguments) if process else BatchMaker(*arguments)
        # One worker makes them in order, so that they may share a reader.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._planned: deque[StepType] = deque()  # to be read after those of `_steps`
        self._ahead: deque[tuple[StepType, Future[Batch]]] = deque()
        self._stripes: Stripes | None = None

    def _next(self) -> StepType | None:
        """The step after all that were asked for so far; None where there is none."""
        step = next(self._steps, None)
        return self._planned.popleft() if step is None and self._planned else step

    def _read_ahead(self) -> None:
        while len(self._ahead) < NUM_PREFETCHED and (step := self._next()):
            if step.stripes is not self._stripes:
                self._stripes = step.stripes
                self._thread.submit(self._maker.expect, step.epoch, step.stripes.of(self._rank))
            self._ahead.append((step, self._thread.submit(self._make, step)))

    def __next__(self) -> tuple[Batch, StepType]:
        if not self._ahead:
            raise StopIteration
        step, made = self._ahead.popleft()
        if not made.done() and wait([made], timeout=_SLOW_READ_S).not_done:
            self._on_slow_read()
        batch = made.result()
        self._read_ahead()
        return batch, step

    def _make(self, step: Step) -> Batch:
        """This rank's share of a step, of weight 0 where that is empty; raises `DataError`."""
        share = step.stripes.share(step.number, self._rank)
        spans = share or step.stripes.padding(self._rank)
        return self._maker.make(step.epoch, spans, is_counted=bool(share))

    def close(self) -> None:
        """End the threads; what is not begun is dropped. Harmless when called again."""
        self._ahead.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._maker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrainBatches(_ReadAhead[Step]):
    """Batches of one rank for `spec.training.epochs` epochs."""

    def __init__(
        self,
        source: ParquetSource,
        spec: JobSpec,
        rank: int,
        world_size: int,
        position: DataPosition = START,
        *,
        process: ReaderProcess | None = None,
        on_slow_read: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(source, spec, rank, world_size, process=process, on_slow_read=on_slow_read)
        self._steps = steps_from(position, self.shape, spec.training.epochs)
        self._read_ahead()


@dataclass(frozen=True)
class LeaseStep(Step):
    """A step of `lease`."""

    lease: Lease


class LeaseBatches(_ReadAhead[LeaseStep]):
    """Batches of the leases submitted so far, in that order.

    Iterating stops where no more leases were submitted; after another `submit` it goes on. Every
    rank of the group gets equally many batches of `data.batch_size` rows, filled up with rows of
    weight 0 at a lease's end, so that each row counts exactly once. Not for several threads at
    once.
    """

    def submit(self, lease: Lease) -> None:
        """Read `lease` after those submitted before."""
        stripes = Stripes(lease.spans, self.shape.world_size, self.shape.batch_size)
        start = DataPosition(lease.epoch)
        for number in range(stripes.num_steps):
            self._planned.append(LeaseStep(start, stripes, number, lease))
        self._read_ahead()

    def forget(self, ids: Container[int]) -> None:
        """Give no more batches of leases `ids`, which were taken back; others stay in order."""
        for step, made in self._ahead:
            if step.lease.id in ids:
                made.cancel()
        self._ahead = deque(each for each in self._ahead if each[0].lease.id not in ids)
        self._planned = deque(each for each in self._planned if each.lease.id not in ids)
        self._read_ahead()


class ValidationBatches(_ReadAhead[Step]):
    """Every row once over all ranks, unshuffled, in equally many full batches on each rank.

    What is missing at the end is filled with repeated rows of weight 0.
    """

    def __init__(
        self,
        source: ParquetSource,
        spec: JobSpec,
        rank: int,
        world_size: int,
        *,
        process: ReaderProcess | None = None,
    ) -> None:
        super().__init__(source, spec, rank, world_size, process=process, shuffle=False)
        self._steps = steps_from(START, self.shape, epochs=1)
        self._read_ahead()

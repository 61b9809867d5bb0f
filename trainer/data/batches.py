"""Batches of one rank: tensors and a TorchRec KeyedJaggedTensor, made ahead by a thread.

Rows come from an epoch's order (`position`), or from leases of a replica group. Rows that fill up a
batch repeat others, and bad ones hold made-up ids. In a table whose rows are the ids that weighs
nothing, as their gradients are 0; a dynamic table would count them as seen, keep their ids for it,
and evict others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Self

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
    advance,
    rank_rows,
    step_rows,
    step_start,
)
from trainer.data.quarantine import QuarantinedRows
from trainer.data.reader import DEFAULT_CACHE_BYTES, DEFAULT_WINDOW_ROWS, RowReader
from trainer.data.rows import FloatArray, Rows, SparseIds
from trainer.errors import TooFewRowsError
from trainer.spec.job import JobSpec

NUM_PREFETCHED = 4
"""Batches that are made ahead."""


class _ReadAhead:
    """Makes what is iterated over by one thread; a context manager, or call `close`.

    A fault found while reading is raised to the consumer at the batch that it spoils.
    """

    def __init__(self) -> None:
        # One worker runs the tasks in order, so that they may share a reader.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")

    def close(self) -> None:
        """End the thread; what it has not begun is dropped. Harmless when called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    quarantined: tuple[QuarantinedRows, ...] = ()

    @property
    def num_rows(self) -> int:
        """B, padding included."""
        return self.label.shape[0]  # not len(), which torch.export takes for a constant

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = self._parts().items()
        return replace(
            self, **{name: part.to(device, non_blocking=non_blocking) for name, part in parts}
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which a GPU copies without waiting."""
        return replace(self, **{name: part.pin_memory() for name, part in self._parts().items()})

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` has used it, as TorchRec's pipelines ask."""
        for part in self._parts().values():
            part.record_stream(stream)

    def _parts(self) -> dict[str, Any]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        del parts["quarantined"]
        return {name: part for name, part in parts.items() if part is not None}


def make_batch(rows: Rows, spec: JobSpec) -> Batch:
    """Rows as tensors, all of which count."""
    return _wrap(rows, BatchKeys.of(spec))


@dataclass(frozen=True)
class BatchKeys:
    """Names of a spec's sparse features, looked up once and not for each batch."""

    pooled: list[str]
    sequences: list[str]
    is_weighted: bool
    has_weighted_sequences: bool
    dynamic: frozenset[str]

    @classmethod
    def of(cls, spec: JobSpec) -> BatchKeys:
        return cls(
            pooled=[feature.name for feature in spec.pooled_features],
            sequences=[feature.name for feature in spec.sequence_features],
            is_weighted=spec.is_weighted,
            has_weighted_sequences=spec.has_weighted_sequences,
            dynamic=spec.dynamic_features,
        )


def _wrap(rows: Rows, keys: BatchKeys, is_counted: FloatArray | None = None) -> Batch:
    """Tensors of rows; `is_counted` [n] is 0 for those that only fill up the batch."""
    num_pooled = len(keys.pooled)
    weight = rows.row_weight if is_counted is None else rows.row_weight * is_counted
    row_weight = torch.from_numpy(weight)

    def jagged(names: list[str], ids: SparseIds, is_weighted: bool) -> KeyedJaggedTensor:
        found = KeyedJaggedTensor(
            keys=names,
            values=torch.from_numpy(ids.packed()),
            lengths=torch.from_numpy(ids.lengths().ravel()),
            weights=torch.from_numpy(ids.weights()) if is_weighted else None,
        )
        return drop_padding_ids(found, keys.dynamic, row_weight) if keys.dynamic else found

    sequences = rows.sparse.after(num_pooled)
    return Batch(
        dense=torch.from_numpy(rows.dense),
        sparse=jagged(keys.pooled, rows.sparse.first(num_pooled), keys.is_weighted),
        label=torch.from_numpy(rows.label),
        label_offset=torch.from_numpy(rows.offset),
        label_scale=torch.from_numpy(rows.scale),
        weight=row_weight,
        sequences=jagged(keys.sequences, sequences, keys.has_weighted_sequences)
        if keys.sequences
        else None,
    )


class BatchMaker:
    """Makes one rank's batches out of the rows of steps, all of `data.batch_size` rows."""

    def __init__(
        self, reader: RowReader, spec: JobSpec, rank: int, num_ranks: int, *, pin: bool = False
    ) -> None:
        """`pin` puts batches into page-locked memory."""
        self._pin = pin
        self._reader = reader
        self._keys = BatchKeys.of(spec)
        self._batch_size = spec.data.batch_size
        self._rank = rank
        self._num_ranks = num_ranks

    def make(self, epoch: int, rows: list[Span]) -> Batch:
        """This rank's share of `rows`, which one step takes over all ranks; raises `DataError`.

        What is missing to a full batch is filled with repeated rows of weight 0, also where the
        rank's whole share is empty.
        """
        share = rank_rows(rows, self._rank, self._num_ranks)
        some_row = rows[0][0]
        found = self._reader.read(epoch, share or [(some_row, some_row + 1)])
        batch = self._fill(found, len(found) if share else 0)
        return batch.pin_memory() if self._pin else batch

    def _fill(self, rows: Rows, num_counted: int) -> Batch:
        """A full batch, of which the first `num_counted` rows count."""
        places = np.arange(self._batch_size)
        if num_counted == len(places):
            batch = _wrap(rows, self._keys)
        else:
            counted = (places < num_counted).astype(np.float32)
            batch = _wrap(rows.take(np.minimum(places, len(rows) - 1)), self._keys, counted)
        if rows.faults is None or self._reader.fault_log is None:
            return batch
        return replace(batch, quarantined=self._reader.fault_log.count(rows.faults[:num_counted]))


class TrainBatches(_ReadAhead):
    """Batches of one rank for `spec.training.epochs` epochs; gives (batch, position after it)."""

    def __init__(
        self,
        source: ParquetSource,
        spec: JobSpec,
        rank: int,
        world_size: int,
        position: DataPosition = START,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        pin: bool = False,
    ) -> None:
        """Start reading ahead from `position`; raises `DataError` where no step can be filled.

        `pin` puts batches into page-locked memory, for a GPU to copy them from.
        """
        super().__init__()
        self.shape = BatchShape(source.num_rows, world_size, spec.data.batch_size)
        if not self.shape.fills_a_step:
            raise TooFewRowsError(
                f"{source.folder} has {source.num_rows} rows, fewer than one step takes "
                f"({world_size} workers x data.batch_size {spec.data.batch_size}); lower either"
            )
        self._epochs = spec.training.epochs
        reader = RowReader(source, spec, cache_bytes=cache_bytes)
        self._maker = BatchMaker(reader, spec, rank, world_size, pin=pin)
        self._made = self._make(position)
        self._ahead: deque[Future[tuple[Batch, DataPosition] | None]] = deque()
        for _ in range(NUM_PREFETCHED):
            self._request()

    def __next__(self) -> tuple[Batch, DataPosition]:
        if not self._ahead:
            raise StopIteration
        made = self._ahead.popleft().result()
        if made is None:
            self.close()
            raise StopIteration
        self._request()
        return made

    def close(self) -> None:
        """Stop reading ahead; harmless when called again."""
        self._ahead.clear()
        super().close()

    def _request(self) -> None:
        self._ahead.append(self._thread.submit(next, self._made, None))

    def _make(self, position: DataPosition) -> Iterator[tuple[Batch, DataPosition]]:
        while (start := step_start(position, self.shape)).epoch < self._epochs:
            position = advance(start, self.shape)
            yield self._maker.make(start.epoch, step_rows(start, self.shape)), position


def validation_batches(
    source: ParquetSource, spec: JobSpec, rank: int, world_size: int
) -> Iterator[Batch]:
    """Every row once over all ranks, unshuffled, in equally many full batches on each rank.

    What is missing at the end is filled with repeated rows of weight 0. Raises `DataError`.
    """
    shape = BatchShape(source.num_rows, world_size, spec.data.batch_size)
    maker = BatchMaker(RowReader(source, spec, shuffle=False), spec, rank, world_size)
    position = START
    for _ in range(shape.steps_per_epoch):
        yield maker.make(0, step_rows(position, shape))
        position = advance(position, shape)


@dataclass(frozen=True)
class _Step:
    """The rows that one step takes of a lease, over all ranks of the group."""

    lease: Lease
    rows: Span

    @property
    def is_last(self) -> bool:
        return self.rows[1] == self.lease.stop


class LeaseBatches(_ReadAhead):
    """Batches of the leases submitted so far, in that order.

    Iterating gives (batch, lease, whether it is the lease's last) and stops where no more leases
    were submitted; after another `submit` it goes on. Every rank of the group gets equally many
    batches of `data.batch_size` rows, filled up with rows of weight 0 at a lease's end, so that
    each row counts exactly once. Not for several threads at once.
    """

    def __init__(
        self,
        source: ParquetSource,
        spec: JobSpec,
        rank: int,
        num_ranks: int,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        window_rows: int = DEFAULT_WINDOW_ROWS,
        pin: bool = False,
    ) -> None:
        """`rank` of the `num_ranks` ranks of a group; `pin` as for `TrainBatches`."""
        super().__init__()
        self._shape = BatchShape(source.num_rows, num_ranks, spec.data.batch_size)
        reader = RowReader(source, spec, cache_bytes=cache_bytes, window_rows=window_rows)
        self._maker = BatchMaker(reader, spec, rank, num_ranks, pin=pin)
        self._planned: deque[_Step] = deque()
        self._ahead: deque[tuple[_Step, Future[Batch]]] = deque()

    def submit(self, lease: Lease) -> None:
        """Read `lease` after those submitted before."""
        self._planned.extend(self._steps_of(lease))
        self._read_ahead()

    def forget(self, ids: Container[int]) -> None:
        """Give no more batches of leases `ids`, which were taken back; others stay in order."""
        for step, made in self._ahead:
            if step.lease.id in ids:
                made.cancel()
        self._ahead = deque(each for each in self._ahead if each[0].lease.id not in ids)
        self._planned = deque(step for step in self._planned if step.lease.id not in ids)
        self._read_ahead()

    def __next__(self) -> tuple[Batch, Lease, bool]:
        if not self._ahead:
            raise StopIteration
        step, made = self._ahead.popleft()
        batch = made.result()
        self._read_ahead()
        return batch, step.lease, step.is_last

    def close(self) -> None:
        """Stop reading ahead and forget all leases; harmless when called again."""
        self._planned.clear()
        self._ahead.clear()
        super().close()

    def _steps_of(self, lease: Lease) -> Iterator[_Step]:
        for start in range(lease.start, lease.stop, self._shape.rows_per_step):
            yield _Step(lease, (start, min(start + self._shape.rows_per_step, lease.stop)))

    def _read_ahead(self) -> None:
        while self._planned and len(self._ahead) < NUM_PREFETCHED:
            step = self._planned.popleft()
            made = self._thread.submit(self._maker.make, step.lease.epoch, [step.rows])
            self._ahead.append((step, made))

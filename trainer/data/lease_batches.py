"""Batches of leased rows for one rank of a group, made ahead in the order of the leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

from trainer.data.batches import Batch, BatchMaker, train_reader
from trainer.data.position import BatchShape
from trainer.data.read_ahead import NUM_PREFETCHED, ReadAhead
from trainer.data.reader import DEFAULT_CACHE_BYTES, DEFAULT_WINDOW_ROWS
from trainer.data.source import ParquetSource
from trainer.data.spans import Span
from trainer.elastic.protocol import Lease
from trainer.spec import JobSpec


@dataclass(frozen=True)
class _Step:
    """The rows that one step takes of a lease, over all ranks of the group."""

    lease: Lease
    rows: Span

    @property
    def is_last(self) -> bool:
        """Whether it ends the lease."""
        return self.rows[1] == self.lease.stop


class LeaseBatches:
    """Batches of the leases submitted so far, in that order, made by one thread.

    Iterating gives (batch, lease, whether it is the lease's last) and stops where no more leases
    were submitted; after another `submit` it goes on. Every rank of the group gets equally many
    batches of `data.batch_size` rows, filled up with rows of weight 0 at a lease's end, so that
    each row counts exactly once. A fault found while reading is raised at the batch that it spoils.
    Not for several threads at once; use it as a context manager, or call `close`.
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
        self._shape = BatchShape(source.num_rows, num_ranks, spec.data.batch_size)
        reader = train_reader(source, spec, cache_bytes, window_rows)
        self._maker = BatchMaker(reader, spec, rank, num_ranks, pin=pin)
        self._thread = ReadAhead()
        self._planned: deque[_Step] = deque()
        self._ahead: deque[tuple[_Step, Future[Batch]]] = deque()

    @property
    def wait_s(self) -> float:
        """Seconds that the consumer has waited for batches."""
        return self._thread.wait_s

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Batch, Lease, bool]:
        if not self._ahead:
            raise StopIteration
        step, made = self._ahead.popleft()
        batch = self._thread.wait_for(made)
        self._read_ahead()
        return batch, step.lease, step.is_last

    def close(self) -> None:
        """Stop reading ahead and forget all leases; harmless when called again."""
        self._planned.clear()
        self._ahead.clear()
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _steps_of(self, lease: Lease) -> Iterator[_Step]:
        for start in range(lease.start, lease.stop, self._shape.rows_per_step):
            yield _Step(lease, (start, min(start + self._shape.rows_per_step, lease.stop)))

    def _read_ahead(self) -> None:
        while self._planned and len(self._ahead) < NUM_PREFETCHED:
            step = self._planned.popleft()
            made = self._thread.submit(self._maker.make, step.lease.epoch, [step.rows])
            self._ahead.append((step, made))

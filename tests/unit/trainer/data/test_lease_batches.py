"""Batches of leased rows: each row once, equally many for each rank, and only what is leased."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain

import pytest

from tests.harness.wait import scaled
from tests.unit.trainer.data.test_batches import Key, keys_of
from trainer.coordination.messages import Lease
from trainer.data import reader
from trainer.data.batches import LeaseBatches, TrainBatches
from trainer.data.parquet import ParquetSource
from trainer.data.position import DataPosition
from trainer.data.reader import lease_windows, open_source
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.errors import BadValueError


def lease(number: int, start: int, stop: int, epoch: int = 0) -> Lease:
    return Lease(id=number, epoch=epoch, spans=[(start, stop)])


@pytest.fixture
def windowed(monkeypatch) -> None:
    """Splits are decoded in windows of 200 rows."""
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)
    monkeypatch.setattr(reader, "WINDOW_ROWS", 200)


@pytest.fixture
def rows_of(train, make_spec):
    """A function that gives the keys of rows [start, stop) of an epoch's order."""

    def read(start: int, stop: int, epoch: int = 0) -> list[Key]:
        spec = make_spec(batch_size=stop - start, epochs=epoch + 1)
        with TrainBatches(train, spec, 0, 1, DataPosition(epoch, start)) as batches:
            return keys_of(next(batches)[0])

    return read


def test_a_lease_is_trained_whole_by_the_ranks_of_a_group(make_spec, train, rows_of):
    # Rows of a group that was lost come after those of the next epoch.
    leases = [lease(3, 100, 200), lease(4, 40, 77, epoch=1), lease(5, 200, 230)]
    parts, shapes = {3: [], 4: [], 5: []}, []
    for rank in range(2):
        with LeaseBatches(train, make_spec(batch_size=16), rank, num_ranks=2) as batches:
            for each in leases:
                batches.submit(each)
            own = list(batches)
        shapes.append([(step.lease.id, step.is_last) for _, step in own])
        assert {batch.num_rows for batch, _ in own} == {16}
        for batch, step in own:
            parts[step.lease.id] += keys_of(batch)
    wanted = [*[(3, False)] * 3, (3, True), (4, False), (4, True), (5, True)]
    assert shapes[0] == shapes[1] == wanted
    assert Counter(parts[3]) == Counter(rows_of(100, 200))
    assert Counter(parts[4]) == Counter(rows_of(40, 77, epoch=1))
    assert Counter(parts[5]) == Counter(rows_of(200, 230))


def test_ranks_without_rows_get_batches_that_do_not_count(make_spec, train):
    for num_rows, counted in ((1, [0, 0, 1]), (2, [0, 1, 1]), (7, [2, 2, 3])):
        found = []
        for rank in range(3):
            with LeaseBatches(train, make_spec(batch_size=8), rank, num_ranks=3) as batches:
                batches.submit(lease(0, train.num_rows - num_rows, train.num_rows))
                ((batch, step),) = list(batches)
            assert step.is_last
            assert batch.num_rows == 8
            found.append(int(batch.weight.sum()))
        assert found == counted


def test_a_wait_for_storage_is_told(make_spec, train, monkeypatch):
    monkeypatch.setattr("trainer.data.batches._SLOW_READ_S", 0.0)
    is_back = threading.Event()
    read, wait_s = reader.RowReader.read, scaled(30)
    monkeypatch.setattr(
        reader.RowReader, "read", lambda *args: is_back.wait(wait_s) and read(*args)
    )
    spec = make_spec(batch_size=10)
    with LeaseBatches(train, spec, 0, 1, on_slow_read=is_back.set) as batches:
        batches.submit(lease(0, 0, 10))
        assert next(batches)[1].is_last


def test_leases_may_be_submitted_while_iterating_and_after_the_end(make_spec, train):
    with LeaseBatches(train, make_spec(batch_size=10), 0, 1) as batches:
        assert next(batches, None) is None
        batches.submit(lease(0, 0, 20))
        order = [next(batches)[1].lease.id]
        batches.submit(lease(1, 20, 100))
        order += [step.lease.id for _, step in batches]
        batches.submit(lease(2, 100, 110))
        order += [step.lease.id for _, step in batches]
    assert order == [0, 0, *[1] * 8, 2]


def test_leases_taken_back_give_no_more_batches(make_spec, train, rows_of):
    with LeaseBatches(train, make_spec(batch_size=10), 0, 1) as batches:
        for number in range(6):
            batches.submit(lease(number, 30 * number, 30 * number + 30))
        next(batches)
        batches.forget({0, 2, 3})
        assert [next(batches)[1].lease.id for _ in range(2)] == [1, 1]
        batches.forget({1, 4})
        rest = list(batches)
    assert [step.lease.id for _, step in rest] == [5, 5, 5]
    assert keys_of(rest[0][0]) == rows_of(150, 160)


@pytest.mark.usefixtures("windowed")
def test_a_fault_in_leased_rows_is_raised_at_the_batch_that_it_spoils(spoil, make_spec):
    spec = make_spec(shuffle=False, batch_size=16)
    source = open_source(spec, spoil("rating", 0, float("nan")))
    rows = range(source.num_rows)
    bad_row = next(row for row in rows if source.locate(row)[0].endswith("part-00001.parquet"))
    with LeaseBatches(source, spec, 0, 1) as batches:
        batches.submit(lease(0, bad_row, bad_row + 16))
        with pytest.raises(BadValueError, match=r"part-00001\.parquet, row 0, column 'rating'"):
            next(batches)


def test_a_split_that_is_kept_whole_has_no_windows(make_spec, train):
    assert lease_windows(train, make_spec()) == ()


class CountingSource(ParquetSource):
    """Keeps which row groups were read together, that is, which windows were decoded."""

    def __init__(self, source: ParquetSource, opened: list[tuple[int, ...]]) -> None:
        super().__init__(source.folder, source.columns)
        self._opened = opened

    def begin_reading(self, row_groups):
        self._opened.append(tuple(row_groups))
        return super().begin_reading(row_groups)


@pytest.mark.usefixtures("windowed")
def test_ranks_of_groups_decode_each_window_about_once_between_them(make_spec, train, rows_of):
    spec, num_groups, num_ranks = make_spec(batch_size=8), 2, 2
    windows = lease_windows(train, spec)
    assert windows(0) != windows(1)
    book = LeaseBook(train.num_rows, 1, rows_per_lease=32, windows=windows, num_lanes=num_ranks)
    opened: list[tuple[int, ...]] = []
    loaders = [
        [LeaseBatches(CountingSource(train, opened), spec, rank, num_ranks) for rank in range(2)]
        for _ in range(num_groups)
    ]
    taken = Counter()
    while book.num_rows_left:
        for group, ranks in enumerate(loaders):
            if given := book.lease(group):
                for loader in ranks:
                    loader.submit(given)
                    taken.update(key for batch, _ in loader for key in keys_of(batch))
                book.commit([given.id])
    for loader in chain.from_iterable(loaders):
        loader.close()
    assert taken == Counter(rows_of(0, train.num_rows))
    num_windows = len(windows(0)) - 1
    assert num_windows >= 6
    assert len(set(opened)) == num_windows
    assert len(opened) < num_windows + 2 * num_groups * num_ranks

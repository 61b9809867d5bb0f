"""Positions: equal batches per rank, every row once at any world size, rows left out, spans."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.coordination.messages import EpochRows, Ledger
from trainer.data.position import (
    BatchShape,
    DataPosition,
    SkippedRows,
    Span,
    Spans,
    Step,
    ledger_of,
    position_of,
    remaining_steps,
    rows_between,
    steps_from,
    without,
)
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.errors import TooFewRowsError

SHAPES = st.builds(
    BatchShape,
    num_rows=st.integers(1, 300),
    world_size=st.integers(1, 8),
    batch_size=st.integers(1, 40),
)
SPANS = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=5).map(
    lambda pairs: Spans(pairs).spans
)


def listed(spans) -> list[int]:
    return [row for start, stop in spans for row in range(start, stop)]


def rows_of(step: Step, num_ranks: int) -> list[tuple[int, int]]:
    """(epoch, row) of all that the ranks take in a step."""
    ranks = range(num_ranks)
    taken = [row for rank in ranks for row in listed(step.stripes.share(step.number, rank))]
    assert len(taken) == step.num_rows
    return [(step.epoch, row) for row in taken]


def rest_of_run(position: DataPosition, shape: BatchShape, epochs: int) -> list[tuple[int, int]]:
    """(epoch, row) of all steps to the end of the run."""
    steps = steps_from(position, shape, epochs)
    return [row for step in steps for row in rows_of(step, shape.world_size)]


def at(done: tuple[Span, ...]) -> DataPosition:
    return position_of(Ledger(open_epochs=(EpochRows(epoch=0, done=done),)))


@given(SHAPES, SPANS)
def test_each_rank_reads_on_in_a_part_of_its_own_and_all_take_equal_shares(shape, done):
    steps = list(steps_from(at(done), shape, epochs=1))
    ranks = range(shape.world_size)
    shares = [[listed(step.stripes.share(step.number, rank)) for step in steps] for rank in ranks]
    stripes = [[row for share in own for row in share] for own in shares]
    left = set(range(shape.num_rows)) - set(listed(done))
    assert [row for stripe in stripes for row in stripe] == sorted(left)
    for of_step in zip(*shares, strict=True):
        assert max(map(len, of_step)) - min(map(len, of_step)) <= 1
        assert max(map(len, of_step)) <= shape.batch_size
    assert all(step.num_rows == shape.rows_per_step for step in steps[:-1])
    assert len(steps) == remaining_steps(at(done), shape, epochs=1)
    assert [step.is_last for step in steps] == [step is steps[-1] for step in steps]


@given(SHAPES, SPANS, st.integers(0, 10))
def test_a_run_that_resumes_takes_the_steps_of_one_that_did_not_stop(shape, done, num_steps):
    steps = list(steps_from(at(done), shape, epochs=2))
    first = steps[:num_steps]
    resumed = steps_from(first[-1].end if first else at(done), shape, epochs=2)
    ranks = range(shape.world_size)
    for step, again in zip(steps[num_steps:], resumed, strict=True):
        shares = [
            [each.stripes.share(each.number, rank) for rank in ranks] for each in (step, again)
        ]
        assert shares[0] == shares[1]
        assert step.end == again.end


@given(
    num_rows=st.integers(1, 200),
    epochs=st.integers(1, 2),
    out_of_turn=SPANS,
    ahead=SPANS,
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(0, 6)), max_size=4),
)
def test_resuming_at_other_world_sizes_from_any_ledger_takes_the_other_rows_once(
    num_rows, epochs, out_of_turn, ahead, lives
):
    begun = enumerate([Spans(), Spans()])
    begun = {epoch: spans for epoch, spans in begun if epoch < epochs}
    for epoch, spans in zip(begun, [out_of_turn, ahead], strict=False):
        for start, stop in spans:
            begun[epoch].add(min(start, num_rows), min(stop, num_rows))
    done = [(epoch, row) for epoch, spans in begun.items() for row in listed(spans.spans)]
    open_epochs = tuple(EpochRows(epoch=n, done=spans.spans) for n, spans in begun.items())
    position = position_of(Ledger(open_epochs=open_epochs))

    for world_size, batch_size, steps in lives:
        shape = BatchShape(num_rows, world_size, batch_size)
        for step in islice(steps_from(position, shape, epochs), steps):
            done += rows_of(step, world_size)
            position = step.end
            assert position.rows_done(num_rows) == len(done)
        position = position_of(ledger_of(position))
    done += rest_of_run(position, BatchShape(num_rows, 3, 4), epochs)
    assert sorted(done) == [(epoch, row) for epoch in range(epochs) for row in range(num_rows)]


@given(
    num_rows=st.integers(1, 120),
    rows_per_lease=st.integers(1, 30),
    cuts=st.sets(st.integers(1, 119), max_size=5),
    turns=st.lists(st.integers(0, 2), max_size=20),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 9)),
    back_after=st.integers(0, 4),
)
def test_a_run_goes_from_leases_to_ranks_and_back_without_losing_a_row(
    num_rows, rows_per_lease, cuts, turns, shape, back_after
):
    bounds = (0, *sorted(cut for cut in cuts if cut < num_rows), num_rows)
    settings = {"num_rows": num_rows, "epochs": 2, "rows_per_lease": rows_per_lease}
    done: list[tuple[int, int]] = []

    def train(book, groups):
        for group in groups:
            if lease := book.lease(group):
                done.extend((lease.epoch, row) for span in lease.spans for row in range(*span))
                book.commit([lease.id])

    book = LeaseBook(**settings, windows=bounds)
    train(book, turns)
    position = position_of(book.entered_in(Ledger()))
    job = BatchShape(num_rows, *shape)
    for step in islice(steps_from(position, job, 2), back_after):
        done += rows_of(step, job.world_size)
        position = step.end
    book = LeaseBook(**settings, windows=bounds)
    book.restore(ledger_of(position).model_copy(update={"rows_trained": len(done)}))
    while book.num_rows_left:
        train(book, range(3))
    assert sorted(done) == [(epoch, row) for epoch in range(2) for row in range(num_rows)]


def test_epochs_beyond_the_last_of_a_shortened_run_take_no_steps():
    shape = BatchShape(num_rows=10, world_size=1, batch_size=4)
    position = DataPosition(0, 4, later=((1, ((0, 2),)),))
    assert remaining_steps(position, shape, epochs=1) == 2
    assert remaining_steps(position, shape, epochs=3) == 2 + 2 + 3


def test_a_step_may_have_fewer_rows_than_ranks():
    shape = BatchShape(num_rows=2, world_size=3, batch_size=8)
    (step,) = steps_from(DataPosition(), shape, epochs=1)
    assert [step.stripes.share(0, rank) for rank in range(3)] == [[], [(0, 1)], [(1, 2)]]
    assert [step.stripes.padding(rank) for rank in range(3)] == [[(0, 1)], [(0, 1)], [(1, 2)]]
    with pytest.raises(TooFewRowsError, match=r"3 workers x data\.batch_size 8"):
        shape.check(Path("train"))


CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=12)


@given(CHANGES, st.integers(0, 30), st.integers(0, 35))
def test_spans_hold_the_rows_added_and_not_removed_and_gaps_are_the_others(changes, start, stop):
    spans, rows = Spans(), set()
    for is_in, first, last in changes:
        (spans.add if is_in else spans.remove)(first, last)
        (rows.update if is_in else rows.difference_update)(range(first, last))
    assert len(spans) == len(rows)
    assert listed(spans.spans) == sorted(rows)
    bounds = [bound for span in spans.spans for bound in span]
    assert bounds == sorted(set(bounds))
    gaps = spans.gaps(start, stop)
    assert listed(gaps) == [row for row in range(start, stop) if row not in rows]
    assert spans.gap(start, stop) == (gaps[0] if gaps else None)


def test_skipped_rows_are_read_again_and_grow(tmp_path: Path) -> None:
    path = tmp_path / "skipped.json"
    assert SkippedRows.read(path) == SkippedRows()
    SkippedRows().with_rows([(1, ((0, 10),))]).write(path)
    SkippedRows.read(path).with_rows([(1, ((10, 15),)), (0, ((3, 4),))]).write(path)
    assert SkippedRows.read(path).epochs == ((0, ((3, 4),)), (1, ((0, 15),)))
    path.write_text('{"epochs": [[0')
    with pytest.raises(OSError, match="remove it to train all rows"):
        SkippedRows.read(path)


def test_rows_between_two_positions_cross_the_end_of_an_epoch_and_leave_out_what_was_done() -> None:
    before, after = DataPosition(0, 80), DataPosition(1, 20)
    assert rows_between(before, after, 100) == [(0, ((80, 100),)), (1, ((0, 20),))]
    assert rows_between(DataPosition(0, 100), after, 100) == [(1, ((0, 20),))]
    before = DataPosition(0, 10, done=((20, 30),))
    assert rows_between(before, DataPosition(0, 40), 100) == [(0, ((10, 20), (30, 40)))]


def test_skipped_rows_of_an_epoch_that_is_over_change_no_position() -> None:
    assert without(DataPosition(1), SkippedRows(epochs=((0, ((0, 5),)),))) == DataPosition(1)


@given(
    num_rows=st.integers(20, 200),
    world_size=st.integers(1, 4),
    bad_step=st.integers(0, 30),
    num_bad_steps=st.integers(1, 4),
    resumed_steps=st.integers(0, 30),
)
def test_a_resumed_run_takes_every_row_but_the_skipped_ones(
    num_rows: int, world_size: int, bad_step: int, num_bad_steps: int, resumed_steps: int
) -> None:
    shape = BatchShape(num_rows, world_size, 5)
    finite_at = _after(DataPosition(), shape, bad_step)
    skipped = SkippedRows().with_rows(
        rows_between(finite_at, _after(finite_at, shape, num_bad_steps), num_rows)
    )
    start = _after(DataPosition(), shape, min(resumed_steps, bad_step))
    position = without(start, skipped)
    num_skipped = sum(stop - first for _, spans in skipped.epochs for first, stop in spans)
    assert position.rows_done(num_rows) == start.rows_done(num_rows) + num_skipped
    epochs = position.epoch + 60
    end = _after(position, shape, remaining_steps(position, shape, epochs))
    assert end.rows_done(num_rows) == epochs * num_rows


def _after(position: DataPosition, shape: BatchShape, num_steps: int) -> DataPosition:
    for step in islice(steps_from(position, shape, 10**9), num_steps):
        position = step.end
    return position

"""The lease book: every row of every epoch is done exactly once, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.harness.properties import examples
from trainer.coordination.messages import Lease, Ledger
from trainer.elastic.coordinator.leases import LeaseBook, LeaseError, lease_lengths

GROUPS = st.integers(0, 3)


def spans_of(leases) -> list[tuple[int, int, int]]:
    return [(lease.epoch, *span) for lease in leases for span in lease.spans]


def start_of(lease: Lease | None) -> int:
    assert lease is not None
    return lease.spans[0][0]


@pytest.mark.parametrize(
    ("speeds", "lengths"),
    [
        ([], []),
        ([0.0, 0.0], [1.0, 1.0]),
        ([100.0, 120.0], [1.0, 1.0]),  # noise
        ([100.0, 300.0], [0.5, 1.5]),
        ([100.0, 300.0, 0.0], [0.5, 1.5, 1.0]),  # a group that nobody has timed yet
        ([1.0, 100.0, 100.0, 100.0], [0.5, 1.32, 1.32, 1.32]),
        ([100.0] * 9 + [900.0], [5 / 9] * 9 + [2.0]),
    ],
)
def test_a_lease_is_as_long_as_its_group_is_fast_within_bounds(speeds, lengths):
    found = lease_lengths(dict(enumerate(speeds)))
    assert list(found.values()) == pytest.approx(lengths, abs=0.01)


def test_leases_of_another_length_are_of_whole_steps():
    book = LeaseBook(num_rows=100, epochs=1, rows_per_lease=16, num_lanes=2, rows_per_step=4)
    rows = [book.lease(group, length).num_rows for group, length in enumerate([0.6, 1.4, 0.01])]
    assert rows == [8, 24, 4]


def test_rows_of_a_lost_group_are_leased_again():
    book = LeaseBook(num_rows=12, epochs=1, rows_per_lease=4)
    lost = [book.lease(0), book.lease(0)]
    kept = book.lease(1)
    assert book.give_back(0) == 8
    assert book.held(0) == () and book.held(1) == (kept,)
    again = [book.lease(1), book.lease(2)]
    assert spans_of(again) == spans_of(lost)
    assert {each.id for each in again}.isdisjoint({each.id for each in lost})
    with pytest.raises(LeaseError, match=f"nobody holds lease {lost[0].id}"):
        book.commit([lost[0].id])


def leased(book: LeaseBook, num_groups: int) -> Iterator[tuple[int, Lease]]:
    """(group, lease) by turns, until all rows are trained."""
    while book.num_rows_left:
        for group in range(num_groups):
            if lease := book.lease(group):
                yield group, lease
                book.commit([lease.id])


def test_groups_keep_to_windows_of_their_own_and_share_only_the_last():
    book = LeaseBook(1200, 1, 30, windows=tuple(range(0, 1201, 100)))
    touched: set[tuple[int, int]] = set()
    for group, lease in leased(book, 3):
        for start, stop in lease.spans:
            touched |= {(group, row // 100) for row in range(start, stop)}
    assert {window for _, window in touched} == set(range(12))
    assert len(touched) <= 12 + 2


def test_a_lease_is_cut_only_where_another_group_begins():
    book = LeaseBook(1000, 1, 30, windows=tuple(range(0, 1001, 100)))
    sizes = [lease.num_rows for _, lease in leased(book, 2)]
    assert sum(sizes) == 1000
    assert sum(size < 30 for size in sizes) <= 3


def test_the_window_of_a_lost_group_is_another_groups_alone():
    book = LeaseBook(200, 1, 10, windows=(0, 100, 200))
    book.commit([book.lease(0).id, book.lease(1).id])
    book.give_back(1)
    assert start_of(book.lease(2)) == 110
    assert start_of(book.lease(0)) == 10


def test_a_group_holds_the_window_in_which_its_lease_ends():
    book = LeaseBook(400, 1, 120, windows=(0, 100, 200, 300, 400))
    leases = [book.lease(0), book.lease(1), book.lease(0)]
    assert spans_of(leases) == [(0, 0, 120), (0, 300, 400), (0, 120, 240)]
    book.give_back(0)
    assert start_of(book.lease(2)) == 0
    # More groups than windows share them.
    book = LeaseBook(100, 1, 10, windows=(0, 50, 100))
    leases = [book.lease(group) for group in range(10)]
    assert sorted(spans_of(leases)) == [(0, start, start + 10) for start in range(0, 100, 10)]


def test_each_lane_of_a_group_keeps_to_windows_of_its_own():
    book = LeaseBook(1200, 1, 30, windows=tuple(range(0, 1201, 100)), num_lanes=3)
    leases = list(leased(book, 2))
    assert leases[0][1].spans == ((0, 10), (600, 610), (300, 310))
    touched: set[tuple[int, int, int]] = set()
    for group, lease in leases:
        for lane, span in enumerate(lease.spans):
            touched |= {(group, lane, row // 100) for row in range(*span)}
    assert len(touched) <= 12 + 2 * 3
    # Where there are no windows, lanes lie side by side.
    assert LeaseBook(100, 1, 30, num_lanes=3).lease(0).spans == ((0, 30),)


def test_a_ledger_stays_small_over_many_rows_and_small_leases():
    bounds = tuple(range(0, 32_000_001, 64_000))
    book = LeaseBook(32_000_000, 1, 16_384, windows=bounds)
    for _ in leased(book, 4):
        assert all(len(rows.done) <= 8 for rows in book.entered_in(Ledger()).open_epochs)


def test_windows_may_differ_from_epoch_to_epoch():
    book = LeaseBook(10, 2, 5, windows=lambda epoch: [(0, 6, 10), (0, 2, 10)][epoch])
    begun = []
    for _ in range(2):
        leases = [book.lease(0), book.lease(1), book.lease(2)]
        begun.append([start_of(lease) for lease in leases if lease])
        book.commit([lease.id for lease in leases if lease])
    assert begun == [[0, 6, 5], [0, 5]]


def test_a_restarted_coordinator_takes_over_what_groups_hold():
    old = LeaseBook(num_rows=20, epochs=1, rows_per_lease=4)
    done, held, lost = old.lease(0), old.lease(0), old.lease(1)
    old.commit([done.id])
    ledger = old.entered_in(Ledger())

    book = LeaseBook(20, 1, 4)
    book.restore(ledger)
    for _ in range(2):  # every rank of a group tells the same
        assert book.adopt([done, held], group=0) == (held,)
    assert book.held(0) == (held,)
    assert spans_of([book.lease(2)]) == spans_of([lost])
    assert book.adopt([lost], group=1) == ()
    new = book.lease(2)
    assert new.id > lost.id
    assert start_of(new) == 12


def test_leases_outside_the_run_are_not_taken_over():
    book = LeaseBook(num_rows=10, epochs=1, rows_per_lease=4)
    strange = [Lease(id=7, epoch=1, spans=[(0, 4)]), Lease(id=8, epoch=0, spans=[(8, 12)])]
    assert book.adopt(strange, group=0) == ()
    assert book.lease(0).id == 9
    later = LeaseBook(num_rows=10, epochs=2, rows_per_lease=4)
    later.restore(Ledger(epoch=1))
    assert later.adopt([Lease(id=3, epoch=0, spans=[(0, 4)])], group=0) == (), "that epoch is over"


class Job(RuleBasedStateMachine):
    """Groups that train, fail, skip and restart in any order, on a book with its coordinator."""

    @initialize(
        num_rows=st.integers(1, 40),
        epochs=st.integers(1, 3),
        rows_per_lease=st.integers(1, 12),
        cuts=st.sets(st.integers(1, 39), max_size=6),
        max_rows=st.none() | st.integers(0, 120),
        num_lanes=st.integers(1, 4),
    )
    def begin(self, num_rows, epochs, rows_per_lease, cuts, max_rows, num_lanes):
        bounds = (0, *sorted(cut for cut in cuts if cut < num_rows), num_rows)
        sizes = {"num_rows": num_rows, "epochs": epochs, "rows_per_lease": rows_per_lease}
        windows = {"windows": lambda epoch: bounds if epoch % 2 else (0, num_rows)}
        self.settings = sizes | windows | {"max_rows": max_rows, "num_lanes": num_lanes}
        self.num_rows, self.rows_per_lease = num_rows, rows_per_lease
        self.total = min(epochs * num_rows, epochs * num_rows if max_rows is None else max_rows)
        self.book = LeaseBook(**self.settings)
        self.done: list[tuple[int, int]] = []
        self.out: dict[int, tuple[int, Lease]] = {}
        self.ids: set[int] = set()

    def rows(self, lease: Lease) -> list[tuple[int, int]]:
        return [(lease.epoch, row) for span in lease.spans for row in range(*span)]

    @rule(group=GROUPS)
    def take_a_lease(self, group):
        lease = self.book.lease(group)
        if lease is None:
            return
        assert 0 < lease.num_rows <= self.rows_per_lease
        assert lease.id not in self.ids
        assert lease.epoch == self.book.entered_in(Ledger()).epoch
        self.ids.add(lease.id)
        self.out[lease.id] = group, lease

    @rule(groups=st.sets(GROUPS))
    def commit_the_first_lease_of_some_groups(self, groups):
        firsts = [self.book.held(group)[:1] for group in sorted(groups)]
        leases = [lease for first in firsts for lease in first]
        self.book.commit([lease.id for lease in leases])
        for lease in leases:
            del self.out[lease.id]
            self.done += self.rows(lease)

    @rule(group=GROUPS)
    def lose_a_group(self, group):
        lost = [lease for holder, lease in self.out.values() if holder == group]
        assert self.book.give_back(group) == sum(lease.num_rows for lease in lost)
        for lease in lost:
            del self.out[lease.id]

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def skip_a_lease(self, data):
        lease_id = data.draw(st.sampled_from(sorted(self.out)))
        _, lease = self.out.pop(lease_id)
        assert self.book.skip(lease_id) == lease
        self.done += self.rows(lease)

    @rule(told=st.sets(GROUPS))
    def restart_the_coordinator(self, told):
        held = {group: self.book.held(group) for group in sorted(told)}
        ledger = Ledger.model_validate_json(self.book.entered_in(Ledger()).model_dump_json())
        self.book = LeaseBook(**self.settings)
        self.book.restore(ledger)
        for group, leases in held.items():
            assert self.book.adopt(leases, group) == leases
        self.out = {k: (group, lease) for k, (group, lease) in self.out.items() if group in told}
        # Ids of leases that nobody told of may come again; their groups are lost.
        self.ids = set(self.out)

    @invariant()
    def no_row_is_done_twice_or_leased_twice(self):
        out = [row for _, lease in self.out.values() for row in self.rows(lease)]
        assert len(set(self.done + out)) == len(self.done) + len(out)
        assert self.book.num_rows_left == self.total - len(self.done)

    def teardown(self):
        if not hasattr(self, "book"):
            return
        for group in range(4):
            self.lose_a_group(group)
        while self.book.num_rows_left:
            before = len(self.done)
            for group in range(4):
                self.take_a_lease(group)
            self.commit_the_first_lease_of_some_groups(set(range(4)))
            assert len(self.done) > before
        assert len(self.done) == self.total
        epoch, rest = divmod(self.total, self.num_rows)
        whole = {(n, row) for n in range(epoch) for row in range(self.num_rows)}
        assert whole <= set(self.done)
        assert {n for n, _ in self.done} <= set(range(epoch + bool(rest)))


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=examples(150, fast=40), stateful_step_count=30)

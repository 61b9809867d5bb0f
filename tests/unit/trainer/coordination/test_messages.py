"""What travels in fewer bytes than it has arrives as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.coordination.messages import EpochRows, Ledger, Roster, RoundMember
from trainer.data.position import Spans

SPANS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**20)))


@given(st.lists(SPANS, max_size=3))
def test_the_rows_of_a_ledger_travel_packed(epochs: list[list[tuple[int, int]]]) -> None:
    spans = [Spans((start, start + length) for start, length in epoch) for epoch in epochs]
    ledger = Ledger(
        commit=3,
        open_epochs=tuple(EpochRows(epoch=n, done=rows.spans) for n, rows in enumerate(spans)),
    )
    assert Ledger.model_validate_json(ledger.model_dump_json()) == ledger


def test_the_lanes_of_many_groups_take_few_bytes_and_what_is_no_rows_is_refused() -> None:
    done = tuple((lane * 10**6 + lane % 7, lane * 10**6 + 640) for lane in range(4096))
    rows = Ledger(open_epochs=(EpochRows(epoch=0, done=done),)).model_dump_json()
    assert len(rows) < 4096 * 4
    for damaged in ("no base64", "bm8gcm93cw==", rows.split('"')[7][:40]):
        with pytest.raises(ValidationError, match="open_epochs"):
            Ledger.model_validate_json(f'{{"open_epochs": [[0, "{damaged}"]]}}')


def member(group: int, incarnation: int) -> RoundMember:
    return RoundMember(group=group, incarnation=incarnation, standing="current")


GROUPS = st.dictionaries(st.integers(0, 5), st.integers(0, 1))


@given(GROUPS, GROUPS)
def test_members_travel_as_what_has_changed(before: dict[int, int], after: dict[int, int]) -> None:
    old, new = (
        Roster(members=tuple(member(*each) for each in sorted(g.items()))) for g in (before, after)
    )
    change = new.since(old)
    assert change.after(old) == new
    unchanged = before.items() & after.items()
    assert not {(each.group, each.incarnation) for each in change.members} & unchanged
    assert new.after(old) == new

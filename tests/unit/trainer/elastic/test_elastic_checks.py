"""The checks that the chaos tests rest on find what they are there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.elastic_checks import check_copies, check_journal, check_rows, commit_times

NUM_ROWS = 8


def commit(number: int, group: int = 0, **overrides: Any) -> dict[str, Any]:
    record = {
        "event": "committed",
        "time": float(number),
        "group": group,
        "incarnation": 0,
        "rank": 0,
        "standing": "current",
        "hash": f"state {number}",
        "commit": number,
        "epoch": 0,
        "open_epochs": [],
        "rows_trained": 0,
        "rows_skipped": 0,
    }
    return record | overrides


def lease(start: int, stop: int) -> dict[str, Any]:
    return {"event": "trained", "time": 0.0, "epoch": 0, "start": start, "stop": stop}


def rows_done(number: int, done: list[list[int]], rows: int) -> dict[str, Any]:
    opened = [{"epoch": 0, "done": done}]
    return commit(number, open_epochs=opened, rows_trained=rows)


WHOLE_RUN = [
    lease(0, 4),
    rows_done(1, [[0, 4]], 4),
    lease(4, 8),
    commit(2, epoch=1, rows_trained=NUM_ROWS),
]


def test_a_run_that_counts_every_row_once_passes() -> None:
    assert check_rows(WHOLE_RUN, NUM_ROWS, epochs=1)["commit"] == 2


def test_rows_that_nobody_trained_are_found() -> None:
    with pytest.raises(AssertionError, match="nobody trained"):
        check_rows([record for record in WHOLE_RUN if record != lease(4, 8)], NUM_ROWS, 1)


def test_rows_that_count_twice_are_found() -> None:
    twice = [*WHOLE_RUN[:-1], commit(2, epoch=1, rows_trained=NUM_ROWS + 4)]
    with pytest.raises(AssertionError, match="12 rows by number, 8 by span"):
        check_rows(twice, NUM_ROWS, 1)


def test_rows_that_were_left_out_are_found() -> None:
    with pytest.raises(AssertionError, match="4 rows were not trained"):
        check_rows(WHOLE_RUN[:2], NUM_ROWS, 1)


def test_rows_that_stop_counting_are_found() -> None:
    with pytest.raises(AssertionError, match="do not any more"):
        check_rows([*WHOLE_RUN[:2], rows_done(2, [[0, 2]], 2)], NUM_ROWS, 1)


def test_ledgers_that_differ_between_ranks_are_found() -> None:
    with pytest.raises(AssertionError, match="ledgers differ"):
        check_rows([*WHOLE_RUN, commit(2, group=1, epoch=1, rows_trained=4)], NUM_ROWS, 1)


def test_copies_that_differ_after_a_commit_are_found() -> None:
    assert check_copies([commit(1), commit(1, group=1)]) == 1
    with pytest.raises(AssertionError, match="copies of shard 0 differ"):
        check_copies([commit(1), commit(1, group=1, hash="another")])


def test_a_group_that_only_listens_need_not_be_equal_yet() -> None:
    listener = commit(1, group=1, hash="half", standing="listening")
    assert check_copies([commit(1), listener]) == 0


def test_a_commit_is_known_when_the_first_rank_knows() -> None:
    assert commit_times([commit(1), commit(1, group=1, time=0.5)]) == {1: 0.5}


def entry(number: int, *leases: tuple[int, int]) -> dict[str, Any]:
    held = [{"epoch": 0, "start": start, "stop": stop} for start, stop in leases]
    return {"commit": number, "leases": {"0": held}, "skipped": []}


def test_a_journal_is_held_against_all_rows() -> None:
    check_journal([entry(1, (0, 4)), entry(2, (4, 8))], NUM_ROWS, 1)
    with pytest.raises(AssertionError, match="more than once"):
        check_journal([entry(1, (0, 4)), entry(2, (2, 8))], NUM_ROWS, 1)
    with pytest.raises(AssertionError, match="counts 4 rows"):
        check_journal([entry(1, (0, 4))], NUM_ROWS, 1)


def test_a_commit_that_nobody_heard_of_does_not_count() -> None:
    check_journal([entry(1, (0, 6)), entry(1, (0, 4)), entry(2, (4, 8))], NUM_ROWS, 1)

"""The checks that the chaos tests rest on find what they are there to find."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.elastic_checks import check_copies, check_rows

NUM_ROWS = 8


def commit(number: int, group: int = 0, **overrides: Any) -> dict[str, Any]:
    record = {"event": "committed", "time": float(number), "group": group, "incarnation": 0}
    record |= {"rank": 0, "standing": "current", "hash": f"state {number}", "commit": number}
    record |= {"epoch": 0, "open_epochs": [], "rows_trained": 0, "rows_skipped": 0}
    return record | overrides


def rows_done(number: int, done: list[list[int]], rows: int) -> dict[str, Any]:
    return commit(number, open_epochs=[{"epoch": 0, "done": done}], rows_trained=rows)


FIRST, SECOND = (
    {"event": "trained", "time": 0.0, "epoch": 0, "spans": [[start, start + 4]]} for start in (0, 4)
)
WHOLE_RUN = [FIRST, rows_done(1, [[0, 4]], 4), SECOND, commit(2, epoch=1, rows_trained=NUM_ROWS)]


def test_rows_that_do_not_count_once_are_found() -> None:
    assert check_rows(WHOLE_RUN, NUM_ROWS, epochs=1)["commit"] == 2
    told_by_another_group = commit(1, group=1, rows_trained=4)
    del told_by_another_group["open_epochs"]
    assert check_rows([told_by_another_group, *WHOLE_RUN], NUM_ROWS, epochs=1)["commit"] == 2
    for records, message in (
        ([record for record in WHOLE_RUN if record != SECOND], "nobody trained"),
        ([*WHOLE_RUN[:-1], commit(2, epoch=1, rows_trained=12)], "12 rows by number, 8 by span"),
        (WHOLE_RUN[:2], "4 rows were not trained"),
        ([*WHOLE_RUN[:2], rows_done(2, [[0, 2]], 2)], "do not any more"),
        ([*WHOLE_RUN, commit(2, group=1, epoch=1, rows_trained=4)], "ledgers differ"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_rows(records, NUM_ROWS, 1)


def test_copies_that_differ_after_a_commit_are_found_unless_one_only_listens() -> None:
    assert check_copies([commit(1), commit(1, group=1)]) == 1
    with pytest.raises(AssertionError, match="copies of shard 0 differ"):
        check_copies([commit(1), commit(1, group=1, hash="another")])
    assert check_copies([commit(1), commit(1, group=1, hash="half", standing="listening")]) == 0

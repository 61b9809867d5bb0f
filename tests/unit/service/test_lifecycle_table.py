"""The stored tables of decisions are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.domain import EndReason, JobStatus, ObservedState
from service.lifecycle_table import REQUESTS, SITUATIONS, decisions, observations, reasons

STORED = Path(__file__).parent / "lifecycle_decisions.txt"
ARCHITECTURE = Path(__file__).parents[3] / "ARCHITECTURE.md"


def test_every_decision_is_the_stored_one() -> None:
    stored = STORED.read_text().splitlines()
    assert decisions() == stored, (
        "a decision changed: if it shall, write the table anew with "
        f"`python -m service.lifecycle_table > {STORED.name}`"
    )


def test_the_stored_table_leaves_no_case_out() -> None:
    lines = STORED.read_text().splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert len(lines) == len(heads) * (1 + len(ObservedState))
    for status in JobStatus:
        for request in REQUESTS:
            for situation in SITUATIONS:
                start = f"{status} / asked: {request} / {situation}"
                found = [h for h in heads if h == start or h.startswith(f"{start} / reported: ")]
                reported = [name for h in found for name in h.rpartition(": ")[2].split(", ")]
                every = ["none", *EndReason] if situation == "live" else [request]
                told = reported if situation == "live" else [request] * len(found)
                assert sorted(told) == sorted(every if situation == "live" else told)
                assert len(told) == len(every)


@pytest.mark.parametrize(("name", "table"), [("reasons", reasons), ("observations", observations)])
def test_the_architecture_shows_what_the_code_does(name: str, table: object) -> None:
    assert callable(table)
    text = ARCHITECTURE.read_text()
    _, _, rest = text.partition(f"<!-- begin {name} ")
    shown = rest.partition("-->\n")[2].partition(f"<!-- end {name} -->")[0]
    assert shown.splitlines() == table(), (
        f"print it with `python -m service.lifecycle_table {name}`"
    )

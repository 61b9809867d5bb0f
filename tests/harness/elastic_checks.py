"""What must hold of every elastic job, whatever befell it: checked on the records of its ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]
Rows = set[tuple[int, int]]
"""(epoch, row of its order)."""


def check_copies(records: Iterable[Record]) -> int:
    """After each commit all copies of a shard are equal; the number of comparisons."""
    hashes: dict[tuple[int, int], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        is_exact = record["event"] == "committed" and record["hash"] is not None
        if is_exact and record["standing"] == "current":
            who = f"group {record['group']} life {record['incarnation']}"
            hashes[record["commit"], record["rank"]][record["hash"]].append(who)
    for (commit, rank), found in hashes.items():
        assert len(found) == 1, f"after commit {commit} copies of shard {rank} differ: {found}"
    return sum(len(who) - 1 for found in hashes.values() for who in found.values())


def check_rows(records: Iterable[Record], num_rows: int, epochs: int) -> Record:
    """Every row counts exactly once in each epoch; the newest ledger.

    The rows of syncs, by the ledgers of two commits in a row of which a leader told the rows, are
    whole leases that somebody trained and that no other sync counted.
    """
    ledgers = _ledgers(records)
    trained = [_rows_of(record) for record in records if record["event"] == "trained"]
    counted: Rows = set()
    rows_before = 0
    for commit in sorted(ledgers):
        ledger = ledgers[commit]
        done = _done(ledger, num_rows)
        assert counted <= done, f"rows that had counted do not any more after commit {commit}"
        _check_is_union(done - counted, trained, f"commit {commit}")
        rows = ledger["rows_trained"] + ledger["rows_skipped"]
        assert rows == len(done), f"{rows} rows by number, {len(done)} by span: commit {commit}"
        assert rows >= rows_before
        counted, rows_before = done, rows
    newest = ledgers[max(ledgers)]
    everything = {(epoch, row) for epoch in range(epochs) for row in range(num_rows)}
    assert counted == everything, f"{len(everything - counted)} rows were not trained"
    return newest


def _ledgers(records: Iterable[Record]) -> dict[int, Record]:
    """The ledger of each commit by a leader, who alone knows the rows; all heard the same of it."""
    known: dict[tuple[int, str], Record] = {}
    ledgers: dict[int, Record] = {}
    for record in records:
        if record["event"] != "committed":
            continue
        for field in {"epoch", "open_epochs", "rows_trained", "rows_skipped"} & record.keys():
            other = known.setdefault((record["commit"], field), record)
            assert other[field] == record[field], f"ledgers differ: {other}, {record}"
        if "open_epochs" in record:
            ledgers[record["commit"]] = record
    return ledgers


def _done(ledger: Record, num_rows: int) -> Rows:
    rows = {(epoch, row) for epoch in range(ledger["epoch"]) for row in range(num_rows)}
    for opened in ledger["open_epochs"]:
        rows |= {
            (opened["epoch"], row) for start, stop in opened["done"] for row in range(start, stop)
        }
    return rows


def _rows_of(lease: Record) -> Rows:
    return {(lease["epoch"], row) for span in lease["spans"] for row in range(*span)}


def _check_is_union(rows: Rows, trained: Iterable[Rows], what: str) -> None:
    left = set(rows)
    for lease in trained:
        if lease <= rows:
            left -= lease
    assert not left, f"{len(left)} rows count with {what} that nobody trained as a lease"

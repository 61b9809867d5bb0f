"""Parts of a long preparation: done once, checked, dropped where the work is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.prepare.journal import JOURNAL_NAME, Facts, Journal

WORK = {"options": {"a": 1}}


class Maker:
    """Writes a part and counts how often it was asked to."""

    def __init__(self, content: str = "part") -> None:
        self.calls = 0
        self._content = content

    def __call__(self, path: Path) -> Facts:
        self.calls += 1
        path.write_text(self._content)
        return {"rows": 3}


def test_a_finished_part_is_not_made_again(tmp_path):
    make = Maker()
    first = Journal(tmp_path, WORK).part("deep/one", make)
    journal = Journal(tmp_path, WORK)
    assert journal.part("deep/one", make) == first
    assert (make.calls, journal.num_resumed, first.facts) == (1, 1, {"rows": 3})
    assert (tmp_path / "deep" / "one").read_text() == "part"


def test_other_work_starts_anew(tmp_path):
    make = Maker()
    Journal(tmp_path, WORK).part("one", make)
    journal = Journal(tmp_path, {"options": {"a": 2}})
    assert (journal.find("one"), (tmp_path / "one").exists()) == (None, False)
    journal.part("one", make)
    assert make.calls == 2


@pytest.mark.parametrize("damage", ["PART", "cut", None])
def test_a_part_that_is_damaged_or_gone_is_made_again(tmp_path, damage):
    make = Maker()
    Journal(tmp_path, WORK).part("one", make)
    (tmp_path / "one").unlink()
    if damage:
        (tmp_path / "one").write_text(damage)
    Journal(tmp_path, WORK).part("one", make)
    assert make.calls == 2
    assert (tmp_path / "one").read_text() == "part"


def test_a_line_cut_by_a_kill_costs_only_its_part(tmp_path):
    journal = Journal(tmp_path, WORK)
    for name in ("one", "two"):
        journal.part(name, Maker())
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-20])
    again = Maker()
    resumed = Journal(tmp_path, WORK)
    assert resumed.names() == ("one",)
    resumed.part("two", again)
    resumed.part("three", again)
    assert Journal(tmp_path, WORK).names() == ("one", "two", "three")


def test_a_part_that_fails_is_not_recorded(tmp_path):
    def fail(path: Path) -> Facts:
        path.write_text("half")
        raise OSError("disk full")

    journal = Journal(tmp_path, WORK)
    with pytest.raises(OSError, match="disk full"):
        journal.part("one", fail)
    assert journal.find("one") is None
    assert not (tmp_path / "one").exists()

"""Criteo lines that cannot be read: left out and counted, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.harness.files import digest
from tests.unit.trainer.datasets.criteo.test_prepare import FAULTS, SMALL, line, rows_of, write
from trainer.data.manifest import load_manifest, verify_checksums
from trainer.datasets.cli import app
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import BadLines, parse_lines
from trainer.errors import BadValueError, CorruptFileError, TooFewRowsError, TooManyBadRowsError

OPTIONS = CriteoOptions(min_count=3, num_partitions=4, on_bad_line="skip", **SMALL)
# 32 KiB hold about 120 lines, and two blocks are a run.
NUM_LINES = 1200
BAD = {300: line(label=7), 301: "", 700: line(count="x"), 1150: line(raw_id="zz"), 90: "a,b"}


def good_line(number: int) -> str:
    return line(number % 2, number, f"{number % 50:08x}")


def raw(path: Path, bad: dict[int, str] = BAD, num_lines: int = NUM_LINES) -> Path:
    """A file of numbered rows, of which some cannot be read."""
    return write(path, [bad.get(number, good_line(number)) for number in range(num_lines)])


def prepared(path: Path, out: Path, **options: object) -> Path:
    prepare_criteo([path], out, options=OPTIONS.model_copy(update=options))
    return out


def numbers_of(folder: Path) -> list[int]:
    """The lines that the rows came from, by their counts."""
    rows = pl.concat([rows_of(folder, "train"), rows_of(folder, "validation")])
    return sorted(np.expm1(rows["int_0"].to_numpy().astype(np.float64)).round().astype(int))


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path):
    path = raw(tmp_path / "day_0")
    out = prepared(path, tmp_path / "out")
    manifest = load_manifest(out)
    verify_checksums(out, manifest)
    assert numbers_of(out) == [n for n in range(NUM_LINES) if n not in BAD]
    kinds = ("columns", "count", "empty", "id", "label")
    assert manifest.counts == {"bad_lines": 5} | {f"bad_lines_{kind}": 1 for kind in kinds}
    assert manifest.bad_lines[0].startswith(f"{path}, line 91: 1 tab-separated columns")
    assert manifest.bad_lines[1] == f"{path}, line 301, column 'label': '7' is not 0 or 1"
    # What is held out is the end of the file, bad lines or not.
    rows = rows_of(out, "validation")
    assert np.expm1(rows["int_0"].min()).round() == NUM_LINES * 0.9


def test_every_kind_of_fault_can_be_left_out(tmp_path):
    bad = [line for lines, _, _ in FAULTS.values() for line in lines]
    path = write(tmp_path / "day_0", [good_line(1)] * 100 + bad + [good_line(2)] * 100)
    path.write_bytes(path.read_bytes() + line(raw_id="h\u00e9").encode("latin-1") + b"\r\n")
    manifest = load_manifest(prepared(path, tmp_path / "out", max_bad_lines=0.2))
    assert manifest.counts["bad_lines"] == len(bad) + 1
    assert manifest.counts["bad_lines_encoding"] == 1
    assert sum(split.num_rows for split in manifest.splits.values()) == 200


def test_more_bad_lines_than_may_be_are_refused(tmp_path):
    path = raw(tmp_path / "day_0")
    for bound, message in (
        (0.001, "3 of its 1200 lines are bad .* more than the share 0.001"),
        (4, "5 of its 1200 lines .* more than the 4 of --max-bad-lines"),
    ):
        with pytest.raises(TooManyBadRowsError, match=message) as found:
            prepared(path, tmp_path / "out", max_bad_lines=bound)
        assert "line 91: 1 tab-separated" in str(found.value)
        assert not (tmp_path / "out").exists()
    days = tmp_path / "days"
    days.mkdir()
    raw(days / "day_0", {})
    write(days / "day_1", [good_line(n).replace("\t", ",") for n in range(100)])
    # A wholly wrong file is refused whatever the bound.
    for bound in (0.5, 1000):
        with pytest.raises(TooManyBadRowsError, match=r"day_1: \d+ of its 100 .* separated by com"):
            prepared(days, tmp_path / "out", max_bad_lines=bound)


def test_bad_lines_of_all_files_count_where_the_bound_is_a_number(tmp_path):
    days = tmp_path / "days"
    days.mkdir()
    for day in range(3):
        raw(days / f"day_{day}", {5: "", 9: ""}, 100)
    with pytest.raises(TooManyBadRowsError, match=r"day_2: 2 of its 100 .* with 4 of other files"):
        prepared(days, tmp_path / "out", max_bad_lines=5)
    assert load_manifest(prepared(days, tmp_path / "out", max_bad_lines=6)).counts["bad_lines"] == 6


def test_a_stretch_of_bad_lines_longer_than_a_run_is_left_out(tmp_path):
    bad = dict.fromkeys(range(200, 600), "x")
    path = raw(tmp_path / "day_0", bad)
    out = prepared(path, tmp_path / "out", max_bad_lines=400, run_blocks=1, block_bytes=16_384)
    assert numbers_of(out) == [n for n in range(NUM_LINES) if n not in bad]
    path = raw(tmp_path / "day_1", dict.fromkeys(range(90, 100), ""), 100)
    with pytest.raises(TooFewRowsError, match="90 training rows and 0 validation rows are left"):
        prepared(path, tmp_path / "none", max_bad_lines=0.2)


@given(st.sets(st.integers(0, 699)))
def test_good_lines_come_in_order_wherever_the_bad_ones_are(bad_numbers):
    lines = ["?" if number in bad_numbers else good_line(number) for number in range(700)]
    bad = BadLines()
    rows = parse_lines("\n".join(lines).encode(), "day", 1, bad)
    good = [number for number in range(700) if number not in bad_numbers]
    assert rows["line"].to_list() == rows["int_0"].to_list() == good
    assert bad.total == len(bad_numbers)
    if good:
        text = "\n".join(good_line(number) for number in good).encode()
        assert parse_lines(text, "day", 1).drop("line").equals(rows.drop("line"))


@given(
    field=st.sampled_from(["label", "count", "raw_id"]),
    cell=st.from_regex(r"[ ]{0,2}[+-]?(0{0,9}[0-9aF]{0,3}|[0-9]{17,20})[ ]?", fullmatch=True),
)
def test_whether_a_line_is_left_out_does_not_depend_on_its_neighbours(field, cell):
    lines = [good_line(0), line(**{field: cell})]
    found = []
    for neighbour in (good_line(2), "?"):
        bad = BadLines()
        rows = parse_lines("\n".join([*lines, neighbour]).encode(), "day", 1, bad)
        found.append((1 in rows["line"], bad.total - (neighbour == "?")))
    assert found[0] == found[1]


@pytest.fixture
def days(tmp_path: Path) -> Path:
    """Three days, the second of which has a bad line near its end."""
    folder = tmp_path / "days"
    folder.mkdir()
    for day in range(3):
        raw(folder / f"day_{day}", {550: line(count="1.5")} if day == 1 else {}, 600)
    return folder


def test_what_is_left_out_can_be_decided_after_the_fault(days, tmp_path, before_parts):
    out, made = tmp_path / "out", []
    with before_parts(lambda name: "/runs/" in name and made.append(int(Path(name).stem))):
        with pytest.raises(BadValueError, match=r"day_1, line 551, column 'int_0'") as found:
            prepared(days, out, on_bad_line="fail")
        assert str(tmp_path / ".out.partial") in found.value.__notes__[0]
        bad_run = made.pop()
        made.clear()
        prepared(days, out)
        assert bad_run == made[0] > 0, "what was read before was read again"
    assert digest(out) == digest(prepared(days, tmp_path / "fresh"))


def test_how_to_go_on_is_said_where_one_can(days, tmp_path):
    kept = tmp_path / ".out.partial"
    for options, way in (
        ({"on_bad_line": "fail"}, "with --on-bad-line skip"),
        ({"max_bad_lines": 0.001}, "with more --max-bad-lines"),
    ):
        with pytest.raises((BadValueError, TooManyBadRowsError)) as found:
            prepared(days, tmp_path / "out", **options)
        (note,) = found.value.__notes__
        assert str(kept) in note and way in note
        assert kept.exists()
    write(days / "day_1", ["x"] * 100)
    with pytest.raises(TooManyBadRowsError, match="not one can be read") as found:
        prepared(days, tmp_path / "out", max_bad_lines=1000)
    assert not hasattr(found.value, "__notes__")
    assert not kept.exists()


def test_what_a_laxer_try_left_out_is_no_longer_left_out(days, tmp_path, killed_at):
    with killed_at("result/", 1):
        prepared(days, tmp_path / "out")
    with pytest.raises(CorruptFileError, match=r"line 551, column 'int_0': '1\.5'"):
        prepared(days, tmp_path / "out", on_bad_line="fail")


def test_lines_that_were_left_out_before_a_kill_are_counted_afterwards(days, tmp_path, killed_at):
    with killed_at("result/", 1):
        prepared(days, tmp_path / "out")
    out = prepared(days, tmp_path / "out")
    assert load_manifest(out).counts["bad_lines"] == 1
    assert digest(out) == digest(prepared(days, tmp_path / "fresh"))


@pytest.mark.parametrize("num_lines", [600, 100])
def test_a_file_that_was_changed_meanwhile_starts_it_anew(days, tmp_path, killed_at, num_lines):
    # As a kill at the very end leaves it: results of the file as it was are there, too.
    with killed_at("result/", 6):
        prepared(days, tmp_path / "out")
    raw(days / "day_1", {}, num_lines)
    out = prepared(days, tmp_path / "out")
    assert digest(out) == digest(prepared(days, tmp_path / "fresh"))
    assert len(numbers_of(out)) == 1200 + num_lines


def test_the_command_reports_what_was_left_out(days, tmp_path):
    out = tmp_path / "out"
    command = ["prepare", "criteo", str(days), str(out), "--min-count", "2"]
    bound = ["--on-bad-line", "skip", "--max-bad-lines"]
    refused = CliRunner().invoke(app, [*command, *bound, "0.0001"])
    assert "more than the share 0.0001" in refused.stderr
    done = CliRunner().invoke(app, [*command, *bound, "1"])
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "bad lines │ 1" in text
    assert "left out: " in text and "line 551" in text

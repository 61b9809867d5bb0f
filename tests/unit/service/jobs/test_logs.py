"""Logs of attempts: what lines say, which of them a reader wants, and files read in pieces."""

from __future__ import annotations

import time
from itertools import accumulate
from logging import CRITICAL, ERROR, INFO, WARNING
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import InvalidRequest
from service.jobs import logs
from service.jobs.logs import (
    Head,
    LogPosition,
    as_zip,
    contains,
    following,
    head_of,
    list_sources,
    logs_of,
    read_new,
    tail_position,
)
from tests.harness.properties import examples
from tests.harness.wait import scaled
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.untrusted import list_untrusted


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("[W1121 20:51:59.123456 socket.cpp:7] retrying", WARNING),
        ("E1121 20:51:59.123456 12 file.cc:9] bad", ERROR),
        ("[rank0]:W1121 21:41:38.411000 25015 torch/fx/x.py:3] slow", WARNING),
        ("Fatal Python error: Aborted", CRITICAL),
        ("*** SIGABRT received at time=1795296551 on cpu 0 ***", CRITICAL),
        ("terminate called after throwing an instance of 'c10::Error'", CRITICAL),
        ("Traceback (most recent call last):", ERROR),
    ],
)
def test_lines_without_a_time_may_say_a_level(text: str, level: int) -> None:
    assert head_of(text) == Head(level)


def test_lines_of_libraries_say_level_and_local_time() -> None:
    ours = head_of("2026-11-21T20:51:59.250Z WARNING trainer.training.worker: slow")
    assert ours == Head(WARNING, 1795294319.25), "ours in UTC"
    for text, level in (
        ("2026-11-21 21:51:59,250 ERROR x: no", ERROR),
        ("2026/11/21 21:41:24 INFO mlflow.store: tables", INFO),
        ("2026-11-21 21:29:02,548\tWARNING worker.py:2038 -- x", WARNING),
        ("[2026-11-21 21:29:11,863 E 30686 30686] logging.cc:474: y", ERROR),
    ):
        head = head_of(text)
        assert head is not None, text
        assert (head.level, time.localtime(head.time).tm_hour) == (level, 21)


def test_other_lines_say_nothing() -> None:
    for text in ("", "step 5", "  File x", "2026-11-21", "2026-13-99T99:99:99.000Z NOISE x"):
        assert head_of(text) is None
    # A time that no calendar has is none.
    assert head_of("2026-13-41T20:51:59.000Z INFO x: y") == Head(INFO, None)


def test_lines_without_a_head_go_on_from_the_one_before() -> None:
    lines = [
        "starting",
        "2026-11-21T20:51:59.000Z INFO a: x",
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "ValueError: no",
        "2026-11-21T20:52:00.000Z INFO a: y",
        "Fatal Python error: Segmentation fault",
        "Thread 1:",
    ]
    heads = list(accumulate(lines, following, initial=Head()))[1:]
    levels = [head.level for head in heads]
    assert levels == [None, INFO, *[ERROR] * 3, INFO, *[CRITICAL] * 2]
    times = [head.time for head in heads]
    assert times[0] is None
    assert times[1:5] == [1795294319.0] * 4
    assert times[5:] == [1795294320.0] * 3


def test_a_search_finds_text_and_what_lies_around_a_star() -> None:
    for text, wanted, is_in in (
        ("step 5 loss 0.1", "loss", True),
        ("step 5 loss 0.1", "STEP*LOSS", True),
        ("step 5 loss 0.1", "loss*step", False),
        ("aXbXc", "a*b*c*", True),
        ("ab", "a*a", False),
        ("a*b", "a*b", True),
        ("(a+)+$", "(a+)+$", True),
        ("anything", "", True),
    ):
        assert contains(text, wanted) is is_in, (text, wanted)


@given(text=st.text(max_size=50), pieces=st.lists(st.text("ab*", max_size=4), max_size=4))
def test_what_is_cut_out_of_a_text_is_found_in_it(text: str, pieces: list[str]) -> None:
    assert contains(text.join(["<", *pieces, ">"]), "*".join(["<", *pieces, ">"]))


def test_a_search_over_a_long_line_ends_soon() -> None:
    began = time.perf_counter()
    assert not contains("a" * 1_000_000, "*".join("a" * 90) + "*b")
    assert time.perf_counter() - began < scaled(10.0)


# ---- files in pieces


@pytest.fixture
def files(tmp_path: Path) -> AttemptDir:
    """An attempt with a driver and two ranks."""
    found = AttemptDir(tmp_path)
    found.logs_dir.mkdir()
    found.log_path("rank-10").write_text("ten\n")
    found.log_path("rank-2").write_text("two\n")
    found.log_path("driver").write_text("up\nready\nhalf a li")
    (found.logs_dir / "secrets.log").write_text("no\n")
    return found


def _texts(files: AttemptDir, position: LogPosition, *, is_final: bool = False) -> list[str]:
    return [
        piece.text for piece in read_new(files, position, list_sources(files), is_final=is_final)
    ]


def test_sources_are_the_driver_then_ranks_and_groups_in_number_order(files: AttemptDir) -> None:
    assert list_sources(files) == ["driver", "rank-2", "rank-10"]
    for name in ("group-10-rank-0", "group-2-rank-1", "group-2-rank-0", "coordinator"):
        files.log_path(name).touch()
    assert list_sources(files)[:2] == ["driver", "coordinator"]
    groups = [name for name in list_sources(files) if name.startswith("group")]
    assert groups == ["group-2-rank-0", "group-2-rank-1", "group-10-rank-0"]
    assert list(read_new(files, LogPosition("a"), ["rank-7"], is_final=True)) == []


def test_a_line_being_written_waits_until_it_is_whole_or_final(files: AttemptDir) -> None:
    assert _texts(files, LogPosition("a")) == ["up", "ready", "two", "ten"]
    assert _texts(files, LogPosition("a"), is_final=True)[:3] == ["up", "ready", "half a li"]


def test_reading_goes_on_behind_a_position(files: AttemptDir) -> None:
    *_, last = read_new(files, LogPosition("a"), list_sources(files), is_final=False)
    with files.log_path("driver").open("a") as log:
        log.write("ne\nmore\n")
    position = LogPosition.decode(last.position.encode())
    assert _texts(files, position) == ["half a line", "more"]


def test_bytes_that_are_no_text_do_not_stop_the_reader(files: AttemptDir) -> None:
    files.log_path("driver").write_bytes(b"\xff\xfe\rbar\r\nok\n")
    pieces = read_new(files, LogPosition("a"), ["driver"], is_final=False)
    assert [piece.text for piece in pieces] == ["\ufffd\ufffd\rbar", "ok"]


@settings(max_examples=examples(60))
@given(
    lines=st.lists(st.integers(0, 30_000), max_size=12),
    num_lines=st.integers(0, 15),
    is_open=st.booleans(),
)
def test_a_tail_is_the_last_lines_whatever_their_length(
    tmp_path: Path, lines: list[int], num_lines: int, is_open: bool
) -> None:
    files = AttemptDir(tmp_path)
    files.logs_dir.mkdir(exist_ok=True)
    texts = [f"{number}:" + "x" * size for number, size in enumerate(lines)]
    content = "\n".join(texts) + ("" if is_open or not texts else "\n")
    files.log_path("driver").write_text(content)
    position = tail_position(files, "a", ["driver"], num_lines)
    found = [piece.text for piece in read_new(files, position, ["driver"], is_final=True)]
    assert found == (texts[-num_lines:] if num_lines else [])


def test_however_many_logs_there_are_little_is_read_of_their_tails_and_at_once(
    files: AttemptDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_TAILS_BYTES", 20_000)
    monkeypatch.setattr(logs, "_MAX_POLL_BYTES", 150_000)
    monkeypatch.setattr(logs, "MAX_POLL_LINES", 15_000)
    sources = [f"rank-{rank}" for rank in range(20)]
    for name in sources:
        files.log_path(name).write_text("\n" * 100_000)
    position = tail_position(files, "a", sources, 100_000)
    assert set(position.offsets.values()) == {99_000}
    first = list(read_new(files, position, sources, is_final=False))
    assert [first[-1].source, len(first)] == ["rank-14", 15_000]
    rest = list(read_new(files, first[-1].position, sources, is_final=False))
    assert (rest[0].source, len(rest)) == ("rank-15", 5_000)
    assert [each[-1].is_cut for each in (first, rest)] == [True, False]
    long = [f"rank-{rank}" for rank in range(20, 30)]
    for name in long:
        files.log_path(name).write_text(("x" * 999 + "\n") * 100)
    begun = {piece.source for piece in read_new(files, position, long, is_final=False)}
    assert begun == {"rank-20", "rank-21", "rank-22"}
    monkeypatch.setattr(logs, "_TAILS_S", -1.0)
    with pytest.raises(InvalidRequest, match="20 logs are too many"):
        tail_position(files, "a", sources, 1)


def test_reading_the_logs_of_many_ranks_lists_their_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "job")
    files = run_dir.attempt("a")
    files.logs_dir.mkdir(parents=True)
    for rank in range(20):
        files.log_path(f"rank-{rank}").write_text("a line\n")
    listed: list[Path] = []

    def listing(folder: Path, within: Path) -> list[Path]:
        listed.append(folder)
        return list_untrusted(folder, within)

    monkeypatch.setattr(logs, "list_untrusted", listing)
    sources = [f"rank-{rank}" for rank in range(20)]
    position = tail_position(files, "a", sources, 1)
    assert len(list(read_new(files, position, sources, is_final=True))) == 20
    assert b"".join(as_zip(logs_of(run_dir, ["a"])))
    assert len(listed) == 4, "for its tail, new lines, the names of a download and what it holds"

"""What log lines say about themselves, and which of them a reader wants."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.log_lines import (
    Head,
    Level,
    LogFilter,
    contains,
    group_of,
    head_of,
    rank_of,
    with_heads,
)


def test_a_line_of_ours_says_its_level_and_its_time_in_utc() -> None:
    head = head_of("2026-11-21T20:51:59.250Z WARNING trainer.worker: slow")
    assert head == Head(Level.WARNING, 1795294319.25)


def test_a_line_of_pythons_logging_is_in_local_time() -> None:
    head = head_of("2026-11-21 20:51:59,250 ERROR x: no")
    assert head is not None
    assert head.time is not None
    assert time.localtime(head.time).tm_hour == 20


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("[W1121 20:51:59.123456 socket.cpp:7] retrying", Level.WARNING),
        ("E1121 20:51:59.123456 12 file.cc:9] bad", Level.ERROR),
        ("[rank0]:W1121 21:41:38.411000 25015 torch/fx/x.py:3] slow", Level.WARNING),
        ("Fatal Python error: Aborted", Level.CRITICAL),
        ("*** SIGABRT received at time=1795296551 on cpu 0 ***", Level.CRITICAL),
        ("terminate called after throwing an instance of 'c10::Error'", Level.CRITICAL),
        ("Traceback (most recent call last):", Level.ERROR),
    ],
)
def test_lines_without_a_time_may_say_a_level(text: str, level: Level) -> None:
    assert head_of(text) == Head(level)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("2026/11/21 21:41:24 INFO mlflow.store: tables", Level.INFO),
        ("2026-11-21 21:29:02,548\tWARNING worker.py:2038 -- x", Level.WARNING),
        ("[2026-11-21 21:29:11,863 E 30686 30686] logging.cc:474: y", Level.ERROR),
    ],
)
def test_lines_of_libraries_say_level_and_time(text: str, level: Level) -> None:
    head = head_of(text)
    assert head is not None
    assert (head.level, time.localtime(head.time).tm_hour) == (level, 21)


@pytest.mark.parametrize(
    "text", ["", "step 5", "  File x", "2026-11-21", "2026-13-99T99:99:99.000Z NOISE x"]
)
def test_other_lines_say_nothing(text: str) -> None:
    assert head_of(text) is None


def test_a_time_that_no_calendar_has_is_no_time() -> None:
    assert head_of("2026-13-41T20:51:59.000Z INFO x: y") == Head(Level.INFO, None)


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
    levels = [head.level for _, head in with_heads(Head(), lines)]
    assert levels == [None, Level.INFO, *[Level.ERROR] * 3, Level.INFO, *[Level.CRITICAL] * 2]
    times = [head.time for _, head in with_heads(Head(), lines)]
    assert times[0] is None
    assert times[1:5] == [1795294319.0] * 4
    assert times[5:] == [1795294320.0] * 3


def test_names_of_logs_say_rank_and_group() -> None:
    names = ("rank-3", "group-2-rank-1", "driver")
    assert [rank_of(name) for name in names] == [3, 1, None]
    assert [group_of(name) for name in names] == [None, 2, None]


def test_a_filter_takes_what_fits_every_wish() -> None:
    wanted = LogFilter(ranks=(0, 3), min_level=Level.WARNING, text="lost", since=10.0, until=20.0)
    assert wanted.takes_source("rank-3")
    assert wanted.takes_source("group-1-rank-0")
    assert not wanted.takes_source("rank-1")
    assert not wanted.takes_source("driver")
    assert wanted.takes(Head(Level.ERROR, 10.0), "peer LOST")
    for head, text in (
        (Head(Level.INFO, 10.0), "lost"),
        (Head(None, 10.0), "lost"),
        (Head(Level.ERROR, 9.9), "lost"),
        (Head(Level.ERROR, 20.0), "lost"),
        (Head(Level.ERROR, None), "lost"),
        (Head(Level.ERROR, 10.0), "found"),
    ):
        assert not wanted.takes(head, text)


def test_no_wish_takes_everything() -> None:
    assert LogFilter().takes(Head(), "")
    assert LogFilter().takes_source("driver")


@pytest.mark.parametrize(
    ("text", "wanted", "is_in"),
    [
        ("step 5 loss 0.1", "loss", True),
        ("step 5 loss 0.1", "STEP*LOSS", True),
        ("step 5 loss 0.1", "loss*step", False),
        ("aXbXc", "a*b*c*", True),
        ("ab", "a*a", False),
        ("a*b", "a*b", True),
        ("(a+)+$", "(a+)+$", True),
        ("anything", "", True),
    ],
)
def test_a_search_finds_text_and_what_lies_around_a_star(
    text: str, wanted: str, is_in: bool
) -> None:
    assert contains(text, wanted) is is_in


@given(text=st.text(max_size=50), pieces=st.lists(st.text("ab*", max_size=4), max_size=4))
def test_what_is_cut_out_of_a_text_is_found_in_it(text: str, pieces: list[str]) -> None:
    assert contains(text.join(["<", *pieces, ">"]), "*".join(["<", *pieces, ">"]))


def test_a_search_over_a_long_line_takes_no_time() -> None:
    began = time.perf_counter()
    assert not contains("a" * 1_000_000, "*".join("a" * 90) + "*b")
    assert time.perf_counter() - began < 1.0

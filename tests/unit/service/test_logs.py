"""Reading log files in pieces: whole lines, positions, tails."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.artifact_errors import LogNotFound
from service.errors import InvalidRequest
from service.logs import (
    LogPosition,
    check_source,
    list_sources,
    read_new,
    tail_position,
)
from trainer.run_dir import AttemptDir


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
    return [piece.text for piece in read_new(files, position, None, is_final=is_final)]


def test_sources_are_the_driver_then_ranks_in_number_order(files: AttemptDir) -> None:
    assert list_sources(files) == ["driver", "rank-2", "rank-10"]


def test_sources_of_groups_come_by_group_and_rank(files: AttemptDir) -> None:
    for name in ("group-10-rank-0", "group-2-rank-1", "group-2-rank-0", "coordinator"):
        files.log_path(name).touch()
    assert list_sources(files)[:2] == ["driver", "coordinator"]
    assert [name for name in list_sources(files) if name.startswith("group")] == [
        "group-2-rank-0",
        "group-2-rank-1",
        "group-10-rank-0",
    ]


@pytest.mark.parametrize(
    "source",
    ["../spec", "rank-1/../../x", "group-1", "group-x-rank-1", "secrets", "rank-", "", "driver\n"],
)
def test_only_log_names_are_accepted(source: str) -> None:
    with pytest.raises(LogNotFound, match="the attempt has: driver"):
        check_source(source, ["driver"])


def test_a_line_being_written_waits_until_it_is_whole_or_final(files: AttemptDir) -> None:
    assert _texts(files, LogPosition("a")) == ["up", "ready", "two", "ten"]
    assert _texts(files, LogPosition("a"), is_final=True)[:3] == ["up", "ready", "half a li"]


def test_reading_goes_on_behind_a_position(files: AttemptDir) -> None:
    *_, last = read_new(files, LogPosition("a"), None, is_final=False)
    with files.log_path("driver").open("a") as log:
        log.write("ne\nmore\n")
    position = LogPosition.decode(last.position.encode())
    assert _texts(files, position) == ["half a line", "more"]


def test_a_missing_log_has_no_lines(files: AttemptDir) -> None:
    assert list(read_new(files, LogPosition("a"), "rank-7", is_final=True)) == []


def test_bytes_that_are_no_text_do_not_stop_the_reader(files: AttemptDir) -> None:
    files.log_path("driver").write_bytes(b"\xff\xfe\rbar\r\nok\n")
    pieces = read_new(files, LogPosition("a"), "driver", is_final=False)
    assert [piece.text for piece in pieces] == ["\ufffd\ufffd\rbar", "ok"]


# No database can be asked for such an attempt.
NUL_CURSOR = LogPosition("a\x00b").encode()


@pytest.mark.parametrize("cursor", ["%%%", "AAAA", "W10", "WzEsMl0", "bnVsbA", NUL_CURSOR])
def test_a_foreign_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="not a cursor"):
        LogPosition.decode(cursor)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    position = tail_position(files, "a", "driver", num_lines)
    found = [piece.text for piece in read_new(files, position, "driver", is_final=True)]
    assert found == (texts[-num_lines:] if num_lines else [])

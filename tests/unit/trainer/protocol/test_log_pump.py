"""The chain of files that a log is, read back by the service; sizes, gaps and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.jobs.logs import MAX_TAIL_BYTES, LogPosition, read_at, read_new, tail_offset
from trainer.protocol import log_pump
from trainer.protocol.log_pump import Part, append, parts_of
from trainer.protocol.run_dir import AttemptDir


def test_of_a_log_that_grew_too_long_beginning_and_end_stay(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    lines = [f"line {number:04d}\n".encode() for number in range(1000)]
    for line in lines:
        append(log, 400, line)
    assert sum(path.stat().st_size for _, path in parts_of(log)) <= 400 + 4 * len(lines[0])
    assert tail_offset(log, 0) == 10_000
    assert log.read_bytes().startswith(b"line 0000\n")
    assert parts_of(log)[-1][1].read_bytes().endswith(b"line 0999\n")


def test_writers_list_the_folder_only_as_parts_end_and_go_on_where_another_began_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, listed = tmp_path / "rank-0.log", list[Path]()
    monkeypatch.setattr(
        log_pump, "parts_of", lambda log, files=None: listed.append(log) or parts_of(log, files)
    )
    known: list[Part | None] = [None, None]
    lines = [f"line {number:04d}\n".encode() for number in range(700)]
    for number, line in enumerate(lines):
        writer = number // 30 % 2
        known[writer] = append(log, 4000, line, known[writer])
    parts = parts_of(log)
    assert [offset for offset, _ in parts] == [0, 4000, 5000, 6000]
    kept = b"".join(path.read_bytes() for _, path in parts)
    assert kept == b"".join(lines[:100] + lines[400:])
    assert len(listed) == 2 + 6 * (2 + 1), "at first; of each part by who began it, and the other"


def test_a_reader_is_told_what_was_dropped_and_goes_on_behind_it(tmp_path: Path) -> None:
    files = AttemptDir(tmp_path)
    files.logs_dir.mkdir()
    for number in range(1000):
        append(files.log_path("rank-0"), 400, f"line {number:04d}\n".encode())
    position, texts = LogPosition("a"), list[str]()
    while pieces := list(read_new(files, position, ["rank-0"], is_final=True)):
        position = LogPosition.decode(pieces[-1].position.encode())
        texts += [piece.text for piece in pieces]
    gap = next(index for index, text in enumerate(texts) if text.startswith("[shardloom]"))
    assert texts[:gap] == [f"line {number:04d}" for number in range(gap)]
    num_left = len(texts) - gap - 1
    assert texts[gap + 1 :] == [f"line {number:04d}" for number in range(1000 - num_left, 1000)]
    assert texts[gap].startswith(f"[shardloom] {(1000 - gap - num_left) * 10} bytes")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    num_lines=st.integers(0, 12),
    data=st.data(),
)
def test_a_tail_of_a_chain_is_its_last_lines(
    tmp_path: Path, sizes: list[int], num_lines: int, data: st.DataObject
) -> None:
    log = tmp_path / f"rank-{data.draw(st.integers(0, 10**6 - 1))}.log"
    for path in tmp_path.glob(f"{log.stem}*.log"):
        path.unlink()
    texts = [f"{number}:" + "x" * size for number, size in enumerate(sizes)]
    for text in texts:
        append(log, 800, text.encode() + b"\n")
    piece = read_at(log, tail_offset(log, num_lines), 1 << 30)
    found = piece.data.decode().splitlines() if piece else []
    wanted = texts[max(0, len(texts) - num_lines) :]
    # What was dropped cannot be in a tail.
    assert found == wanted[len(wanted) - len(found) :]
    assert len(found) == min(num_lines, len(texts)) or len(parts_of(log)) > 1


def test_looking_for_a_tail_ends_soon(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x" * (20 << 20))
    assert tail_offset(log, 5) == (20 << 20) - MAX_TAIL_BYTES
    log.write_bytes(b"\n" * (4 << 20))
    assert tail_offset(log, 1 << 21) == 1 << 21

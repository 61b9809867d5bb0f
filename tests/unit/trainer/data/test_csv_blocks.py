"""Blocks of whole lines: where they end, with quotes that are closed and quotes that are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.errors import CorruptFileError
from trainer.data.prepare.csv_blocks import BlockReader, _last_line_end
from trainer.data.prepare.csv_reader import integer, text
from trainer.data.storage import Location

COLUMNS = (integer("movieId"), text("tag"))
HEADER = "movieId,tag\n"


def reader_of(folder: Path, body: str, block_bytes: int) -> BlockReader:
    path = folder / "tags.csv"
    path.write_text(HEADER + body)
    return BlockReader(Location.parse(path), COLUMNS, block_bytes=block_bytes)


def read_all(reader: BlockReader) -> list[tuple[int, str]]:
    rows, start, line = [], reader.first, 2
    while start < reader.size_bytes:
        block, frame = reader.read(start, line)
        rows += frame.rows()
        start, line = block.end, block.next_line
    return rows


def slow_last_line_end(content: bytes) -> int:
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    return max((end for end in ends if content.count(b'"', 0, end) % 2 == 0), default=0)


@given(st.lists(st.sampled_from([b'"', b"\n", b"x"]), max_size=30).map(b"".join))
def test_the_last_line_ends_at_the_last_newline_outside_quotes(content):
    assert _last_line_end(content) == slow_last_line_end(content)


def test_cells_of_several_lines_stay_whole_in_small_blocks(tmp_path):
    rows = [(number, f'tag "{number}"\nof two lines') for number in range(50)]
    body = "".join('{},"{}"\n'.format(n, tag.replace('"', '""')) for n, tag in rows)
    assert read_all(reader_of(tmp_path, body, block_bytes=40)) == rows


def test_a_stray_quote_in_a_large_block_is_named_at_once(tmp_path):
    lines = [f'{number},"a tag"\n' for number in range(300_000)]
    lines[1000] = '1000,"a tag\n'
    reader = reader_of(tmp_path, "".join(lines), block_bytes=1 << 20)
    begin = time.monotonic()
    with pytest.raises(CorruptFileError, match=r"tags\.csv, line 1002: .*quote left open"):
        read_all(reader)
    # Milliseconds; counting again for each line took minutes.
    assert time.monotonic() - begin < 10


def test_a_stray_quote_in_the_last_block_is_named(tmp_path):
    lines = [f"{number},{'x' * 100}\n" for number in range(3000)]
    lines[100] = f'100,"{"x" * 100}\n'
    with pytest.raises(CorruptFileError, match=r"tags\.csv, line 102: .*quote left open"):
        read_all(reader_of(tmp_path, "".join(lines), block_bytes=1 << 20))

"""Bad csv files are refused with file, line, column and value; blocks end at whole lines."""

from __future__ import annotations

import errno
import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.wait import scaled
from trainer.datasets.io import csv_reader
from trainer.datasets.io.csv_reader import (
    BlockReader,
    CsvColumn,
    integer,
    last_line_end,
    read_blocks,
)
from trainer.errors import BadValueError, CorruptFileError, DataError, StorageError
from trainer.storage import Location

COLUMNS = [integer("userId"), CsvColumn("rating", "a number", (0, 5)), CsvColumn("tag")]


def write(tmp_path, body: str):
    path = tmp_path / "ratings.csv"
    path.write_text(body, encoding="utf-8")
    return path


def read_csv(path: Path, columns=COLUMNS):
    return BlockReader(Location.parse(path), columns).read()


def test_reads_the_wanted_columns_with_their_types(tmp_path):
    path = write(tmp_path, 'tag,rating,userId,more\n"a, b",3.5,7,x\n,0.5,8,y\n')
    frame = read_csv(path, COLUMNS)
    assert frame.select("userId", "rating", "tag").rows() == [(7, 3.5, "a, b"), (8, 0.5, "")]


def test_numbers_below_zero_are_read_where_bounds_allow_them(tmp_path):
    columns = [CsvColumn("a", "a whole number", (-3, 9)), CsvColumn("b", "a number")]
    assert read_csv(write(tmp_path, "a,b\n-2,-0.5\n9,1\n"), columns).rows() == [(-2, -0.5), (9, 1)]
    with pytest.raises(BadValueError, match="line 3, column 'a': '-3'"):
        read_csv(write(tmp_path, "a,b\n-2,1\n-3,1\n"), columns)


@pytest.mark.parametrize(
    ("line", "column", "value"),
    [
        ("x1,3.5,t", "userId", "x1"),
        ("-4,3.5,t", "userId", "-4"),
        ("1.5,3.5,t", "userId", "1.5"),
        ("\u0663,3.5,t", "userId", "\u0663"),
        (",3.5,t", "userId", ""),
        ("1,,t", "rating", ""),
        ("1,good,t", "rating", "good"),
        ("1,NaN,t", "rating", "NaN"),
        ("1,inf,t", "rating", "inf"),
        ("1,0,t", "rating", "0"),
        ("1,5.5,t", "rating", "5.5"),
        ("99999999999999999999,3,t", "userId", "99999999999999999999"),
    ],
)
def test_a_bad_value_is_named_with_its_line_and_column(tmp_path, line, column, value):
    path = write(tmp_path, f"userId,rating,tag\n1,3,ok\n{2**63 - 1},4,ok\n{line}\n3,2,ok\n")
    with pytest.raises(BadValueError) as raised:
        read_csv(path, COLUMNS)
    error = raised.value
    assert (error.path, error.place) == (str(path), "line 4")
    assert (error.column, error.value) == (column, value)
    assert repr(value) in str(error)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1", "line 4, column 'rating': None is not a number"),
        (b"1;3;t", "line 4, column 'userId': '1;3;t'"),
        (b"1,3,t,more", "line 4: more cells than columns: the header has 3.*quoted"),
        (b"", "line 4: the line is blank"),
        (b"1,3,Caf\xe9", "line 4, column 'tag': bytes that are not UTF-8"),
        (b"1\xff,3,t", "line 4, column 'userId': bytes that are not UTF-8"),
        (b'1,3,"Never closed', "line 4: .*a quote is left"),
        (b'1,3,5" disk', "line 4: a quote is left open"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_without_a_librarys_advice(tmp_path, line, message):
    path = tmp_path / "ratings.csv"
    path.write_bytes(b"userId,rating,tag\n1,3,ok\n2,4,ok\n" + line + b"\n3,2,ok\n")
    with pytest.raises(DataError, match=rf"ratings\.csv, {message}") as raised:
        read_csv(path)
    assert not re.search("infer_schema|malformed", str(raised.value))


def test_lines_may_end_by_carriage_returns_alone_but_not_by_one_among_line_feeds(tmp_path):
    path = write(tmp_path, "userId,rating,tag\r1,3,ok\r")
    assert read_csv(path).rows() == [(1, 3, "ok")]
    path.write_text("userId,ra\rting,tag\n1,3,ok\n")
    with pytest.raises(CorruptFileError, match=r"ratings\.csv, line 1: .*end lines by line feeds"):
        read_csv(path)


def test_a_disk_that_fails_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch):
    stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    monkeypatch.setattr(csv_reader, "_open", Mock(side_effect=stale))
    with pytest.raises(StorageError, match=r"ratings\.csv cannot be read: .*Stale file handle"):
        list(read_blocks(Location.parse(write(tmp_path, "1\n")), 64))


def test_a_line_end_of_two_characters_that_a_block_cuts_is_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"x" * 7 + b"\r\n" + b"y\r\n" * 9)
    with pytest.raises(CorruptFileError, match=r"a\.csv, line 1: longer than 8 bytes"):
        list(read_blocks(Location.parse(path), 8))
    lines = [block.lines for block in read_blocks(Location.parse(path), 16)]
    assert b"".join(lines) == path.read_bytes()


def test_a_header_alone_is_refused(tmp_path):
    with pytest.raises(CorruptFileError, match="has a header but no rows"):
        read_csv(write(tmp_path, "userId,rating,tag\n\n\n"))


def test_a_bad_value_far_down_the_file_is_found_in_one_piece_and_in_blocks(tmp_path):
    lines = [f"{row},x" for row in range(5000)]
    lines[4321] = "six,x"
    message = r"line 4323, column 'movieId': 'six'"
    with pytest.raises(BadValueError, match=message):
        read_csv(write(tmp_path, HEADER + "\n".join(lines) + "\n"), MOVIE_TAGS)
    with pytest.raises(BadValueError, match=message):
        read_all(reader_of(tmp_path, "\n".join(lines) + "\n", block_bytes=64))


def test_a_cell_of_two_lines_counts_as_two(tmp_path):
    path = write(tmp_path, 'userId,rating,tag\n1,3,"two\nlines"\n2,bad,ok\n')
    with pytest.raises(BadValueError, match="line 4"):
        read_csv(path)


MOVIE_TAGS = (integer("movieId"), CsvColumn("tag"))
HEADER = "movieId,tag\n"


def reader_of(folder: Path, body: str, block_bytes: int) -> BlockReader:
    path = folder / "tags.csv"
    path.write_text(HEADER + body)
    return BlockReader(Location.parse(path), MOVIE_TAGS, block_bytes=block_bytes)


def read_all(reader: BlockReader) -> list[tuple[int, str]]:
    return [row for block in reader.blocks() for row in reader.parse(block).rows()]


@given(st.lists(st.sampled_from([b'"', b"\n", b"x"]), max_size=30).map(b"".join))
def test_the_last_line_ends_at_the_last_newline_outside_quotes(content):
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    whole = [end for end in ends if content.count(b'"', 0, end) % 2 == 0]
    assert last_line_end(content) == max(whole, default=0)


def test_cells_of_several_lines_stay_whole_in_small_blocks(tmp_path):
    rows = [(number, f'tag "{number}"\nof two lines') for number in range(50)]
    body = "".join('{},"{}"\n'.format(n, tag.replace('"', '""')) for n, tag in rows)
    assert read_all(reader_of(tmp_path, body, block_bytes=40)) == rows


def test_a_stray_quote_in_a_large_block_is_named_at_once(tmp_path):
    lines = [f'{number},"a tag"\n' for number in range(100_000)]
    lines[1000] = '1000,"a tag\n'
    reader = reader_of(tmp_path, "".join(lines), block_bytes=1 << 18)
    begin_s = time.process_time()
    with pytest.raises(CorruptFileError, match=r"tags\.csv, line 1002: .*quote left open"):
        read_all(reader)
    # A tenth of a second; counting again for each line takes half a minute.
    assert time.process_time() - begin_s < scaled(5)


def test_blank_lines_count_where_something_follows_them(tmp_path):
    for block_bytes in (16, 64, 1024):
        body = "1,a\n2,b\n" + "\n" * 40
        assert read_all(reader_of(tmp_path, body, block_bytes)) == [(1, "a"), (2, "b")]
        with pytest.raises(CorruptFileError, match="line 4: the line is blank"):
            read_all(reader_of(tmp_path, f"{body}3,c\n", block_bytes))

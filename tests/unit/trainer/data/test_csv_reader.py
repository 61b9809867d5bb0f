"""Bad csv files are refused with file, line, column and value."""

from __future__ import annotations

import pytest

from trainer.data.errors import BadValueError, ColumnError, CorruptFileError, SourceMissingError
from trainer.data.prepare.csv_reader import integer, number, read_csv, text

COLUMNS = [integer("userId"), number("rating", above=0, at_most=5), text("tag")]


def write(tmp_path, body: str):
    path = tmp_path / "ratings.csv"
    path.write_text(body, encoding="utf-8")
    return path


def test_reads_the_wanted_columns_with_their_types(tmp_path):
    path = write(tmp_path, 'tag,rating,userId,more\n"a, b",3.5,7,x\n,0.5,8,y\n')
    frame = read_csv(path, COLUMNS)
    assert frame.select("userId", "rating", "tag").rows() == [(7, 3.5, "a, b"), (8, 0.5, "")]


@pytest.mark.parametrize(
    ("line", "column", "value"),
    [
        ("x1,3.5,t", "userId", "x1"),
        ("-4,3.5,t", "userId", "-4"),
        ("1.5,3.5,t", "userId", "1.5"),
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
    path = write(tmp_path, f"userId,rating,tag\n1,3,ok\n2,4,ok\n{line}\n3,2,ok\n")
    with pytest.raises(BadValueError) as raised:
        read_csv(path, COLUMNS)
    error = raised.value
    assert (error.path, error.place) == (str(path), "line 4")
    assert (error.column, error.value) == (column, value)
    assert repr(value) in str(error)


def test_a_bad_value_far_down_the_file_is_found(tmp_path):
    lines = [f"{row},3.0,t" for row in range(5000)]
    lines[4321] = "4321,three,t"
    path = write(tmp_path, "userId,rating,tag\n" + "\n".join(lines) + "\n")
    with pytest.raises(BadValueError, match=r"line 4323, column 'rating': 'three'"):
        read_csv(path, COLUMNS)


def test_the_line_is_right_after_a_cell_that_spans_lines(tmp_path):
    path = write(tmp_path, 'userId,rating,tag\n1,3,"two\nlines"\n2,bad,ok\n')
    with pytest.raises(BadValueError, match="line 4"):
        read_csv(path, COLUMNS)


def test_a_line_cut_short_is_named(tmp_path):
    path = write(tmp_path, "userId,rating,tag\n1,3,ok\n2\n")
    with pytest.raises(BadValueError, match="line 3, column 'rating': None"):
        read_csv(path, COLUMNS)


def test_a_line_with_too_many_cells_is_named(tmp_path):
    path = write(tmp_path, "userId,rating,tag\n1,3,ok\n2,3,ok,more,cells\n")
    with pytest.raises(CorruptFileError, match="line 3: more cells"):
        read_csv(path, COLUMNS)


def test_a_missing_column_is_named(tmp_path):
    path = write(tmp_path, "userId,stars,tag\n1,3,ok\n")
    with pytest.raises(ColumnError, match=r"column 'rating' is missing.*stars"):
        read_csv(path, COLUMNS)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceMissingError, match=r"absent\.csv is missing"):
        read_csv(tmp_path / "absent.csv", COLUMNS)


@pytest.mark.parametrize("body", ["", "userId,rating,tag\n"])
def test_an_empty_file_is_refused(tmp_path, body):
    path = write(tmp_path, body)
    with pytest.raises(CorruptFileError, match="download cut short"):
        read_csv(path, COLUMNS)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_bytes(b"userId,rating,tag\n1,3,\xff\xfe\xfa\n")
    with pytest.raises(CorruptFileError, match=r"ratings\.csv"):
        read_csv(path, COLUMNS)

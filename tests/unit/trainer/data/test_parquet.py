"""Row groups over files: opened by footer, located, read, refused when damaged."""

from __future__ import annotations

import pickle
import shutil
from decimal import Decimal
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data import parquet
from trainer.data.manifest import contents_in
from trainer.data.parquet import ParquetSource, known_contents, read_schema
from trainer.errors import (
    ColumnError,
    CorruptFileError,
    SourceMissingError,
    StorageError,
    TooFewRowsError,
)
from trainer.storage import Location


def write(folder, **files: pa.Table):
    folder.mkdir(exist_ok=True)
    for name, table in files.items():
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=3)
    return folder


def numbers(*values):
    return pa.table({"a": pa.array(values, pa.int64()), "b": pa.array(values, pa.float32())})


def test_row_groups_are_counted_over_files_in_name_order(tmp_path):
    folder = write(tmp_path / "d", two=numbers(9, 8), one=numbers(1, 2, 3, 4))
    source = ParquetSource(folder, ["a"])
    assert source.group_rows.tolist() == [3, 1, 2]
    assert source.num_rows == 6
    assert [source.read_group(n)["a"].to_pylist() for n in (2, 0)] == [[9, 8], [1, 2, 3]]
    assert source.schema.names == ["a"]
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read_group(n) for n in (2, 0)] == [source.read_group(n) for n in (2, 0)]


def test_rows_are_located_in_their_file(tmp_path):
    source = ParquetSource(write(tmp_path / "d", one=numbers(1, 2, 3, 4), two=numbers(9)), ["a"])
    assert source.locate(3) == (str(tmp_path / "d" / "one.parquet"), 3)
    assert source.locate(4) == (str(tmp_path / "d" / "two.parquet"), 0)


def test_empty_and_hidden_files_are_passed_over(tmp_path):
    files = {"a": numbers(), "b": numbers(5), "c": numbers(), ".b": numbers(6), "_b": numbers(7)}
    folder = write(tmp_path / "d", **files)
    source = ParquetSource(folder, ["a"])
    assert len(source.group_rows) == 1 and source.read_group(0)["a"].to_pylist() == [5]
    assert source.locate(0) == (str(folder / "b.parquet"), 0)
    with pytest.raises(TooFewRowsError, match="no rows"):
        ParquetSource(write(tmp_path / "none", a=numbers()), ["a"])


def test_a_missing_or_empty_folder_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "d"):
        with pytest.raises(SourceMissingError, match="prepare the data"):
            ParquetSource(folder, ["a"])
    write(tmp_path / "dt=1", a=numbers(1))
    with pytest.raises(SourceMissingError, match="in subfolders are not read: put them side by"):
        ParquetSource(tmp_path, ["a"])


def test_a_column_that_differs_in_one_file_is_named(tmp_path):
    folder = write(tmp_path / "d", one=numbers(1), two=numbers(1).drop_columns(["b"]))
    with pytest.raises(ColumnError, match=r"two\.parquet: no column 'b'"):
        ParquetSource(folder, ["a", "b"])
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    write(folder, two=twice)
    with pytest.raises(ColumnError, match=r"two\.parquet: several columns 'a'"):
        ParquetSource(folder, ["a"])
    write(folder, two=pa.table({"a": pa.array(["x"])}))
    with pytest.raises(ColumnError, match=r"two\.parquet: column 'a' is string here"):
        ParquetSource(folder, ["a"])


def test_of_a_prepared_folder_one_footer_is_read_and_of_another_all(prepared, tmp_path):
    folder, columns = prepared / "train", ["user_id", "history_liked"]
    known = contents_in(Location.parse(prepared), Location.parse(folder))
    older = {n: each.model_copy(update={"group_rows": ()}) for n, each in known.items()}
    with patch.object(parquet, "read_footer", wraps=parquet.read_footer) as read:
        sources, num_read = [], []
        for in_manifest in (known, older, dict(list(known.items())[1:])):
            with patch.object(parquet, "contents_in", return_value=in_manifest):
                contents = known_contents(Location.parse(prepared), Location.parse(folder))
            sources.append(ParquetSource(folder, columns, contents))
            num_read.append(read.call_count - sum(num_read))
        assert num_read == [1, len(known), len(known)]
        assert [*sources[0].contents] == [*sources[1].contents] == sorted(known)
        for source in sources[1:]:
            assert source.group_rows.tolist() == sources[0].group_rows.tolist()
            assert source.decoded_bytes == sources[0].decoded_bytes
            last = source.num_rows - 1
            assert source.locate(last) == sources[0].locate(last)
        for group in range(len(sources[0].group_rows)):
            assert sources[0].read_group(group) == sources[1].read_group(group)
        assert read.call_count == 3 * len(known), "once for each file"

    for name, error in ((min(known), StorageError), (max(known), CorruptFileError)):
        first, *others = known[name].group_rows
        wrong = known[name].model_copy(update={"group_rows": (first + 1, *others)})
        with pytest.raises(error, match=name):
            source = ParquetSource(folder, columns, known | {name: wrong})
            [source.read_group(group) for group in range(len(source.group_rows))]


def test_a_byte_that_changed_in_a_prepared_file_is_found(prepared, tmp_path):
    folder = shutil.copytree(prepared / "train", tmp_path / "train")
    path = min(folder.glob("*.parquet"))
    source = ParquetSource(folder, ["user_id"])
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="row group 0 cannot be read"):
        source.read_group(0)


def test_booleans_are_integers_decimals_floats_and_categories_what_they_stand_for(tmp_path):
    prices = pa.array([Decimal("1.50"), Decimal("2.00"), None])
    shops, colours = pa.array([7, None, 7]), pa.array(["red", None, "red"])
    offsets = pa.array([0, 2, 2, 3])
    columns = {
        "is_new": pa.array([True, None, False]),
        "price": prices,
        "shop": shops.dictionary_encode(),
        "colour": colours.dictionary_encode(),
        "word": pa.array(["a", None, "b"], pa.string_view()),
        "prices": pa.ListArray.from_arrays(offsets, prices),
        "shops": pa.LargeListArray.from_arrays(offsets, shops.dictionary_encode()),
        "were_new": pa.array([[True, False], None, [None, True]], pa.list_(pa.bool_(), 2)),
    }
    source = ParquetSource(write(tmp_path / "d", one=pa.table(columns)), [*columns])
    lists = [pa.list_(pa.float64()), pa.large_list(pa.int64()), pa.list_(pa.uint8())]
    kinds = [pa.uint8(), pa.float64(), pa.int64(), columns["colour"].type, pa.string(), *lists]
    assert source.schema.types == kinds
    assert read_schema(tmp_path / "d") == source.schema
    assert source.read_group(0).to_pydict() == {
        "is_new": [1, None, 0],
        "price": [1.5, 2.0, None],
        "shop": [7, None, 7],
        "colour": ["red", None, "red"],
        "word": ["a", None, "b"],
        "prices": [[1.5, 2.0], [], [None]],
        "shops": [[7, None], [], [7]],
        "were_new": [[1, 0], None, [None, 1]],
    }


def test_the_decoded_size_counts_list_items(tmp_path):
    lists = pa.table({"ids": pa.array([[1] * 50, [2] * 30], pa.list_(pa.int64()))})
    source = ParquetSource(write(tmp_path / "d", one=lists), ["ids"])
    assert source.decoded_bytes == 8 * (80 + 2)

"""What `data inspect` finds in prepared folders, Parquet and text, and what it suggests."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from decimal import Decimal
from pathlib import Path
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.harness.builders import spec_document
from trainer.data.manifest import load_manifest
from trainer.data.parquet import ParquetSource
from trainer.data.reader import open_source
from trainer.datasets import profile
from trainer.datasets.cli import app
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import DENSE_NAMES, ID_NAMES
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
from trainer.datasets.inspect import DataReport, inspect_data
from trainer.datasets.profile import ColumnReport, ColumnSketch, find_data
from trainer.errors import ColumnError, CorruptFileError, SourceMissingError
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

RUNNER = CliRunner()


def invoke(*arguments: object):
    found = RUNNER.invoke(
        app, ["inspect", *(str(argument) for argument in arguments)], env={"COLUMNS": "200"}
    )
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def inspect(*sources: Path) -> list[DataReport]:
    return [inspect_data(data) for data in find_data([str(source) for source in sources])]


def column(report: DataReport, name: str) -> ColumnReport:
    return next(column for column in report.columns if column.name == name)


def sketch_of(*parts: list) -> ColumnReport:
    sketch = ColumnSketch("column")
    for part in parts:
        sketch.add(pl.Series(part))
    return sketch.report()


def spec_of(report: DataReport, tmp_path: Path) -> JobSpec:
    """The spec of a whole job around the parts that were suggested."""
    suggested = yaml.safe_load(report.suggestion.yaml())
    dims = {table["embedding_dim"] for table in suggested["embedding_tables"]}
    document = spec_document() | suggested
    document["data"] = {"path": str(tmp_path), "label": {"column": report.suggestion.label}}
    document["model"]["dense_arch"] = {"layer_sizes": [*dims]}
    document["model"]["tasks"] = [{"loss": report.suggestion.loss}]
    return validate_spec(document)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> tuple[Path, Path]:
    """4000 generated rows as raw files and as a prepared folder."""
    folder = tmp_path_factory.mktemp("clicks")
    raw, out = folder / "raw", folder / "prepared"
    generate_criteo(raw, CriteoGeneratorOptions(num_rows=4000, max_ids=300, num_days=2))
    prepare_criteo([raw], out, options=CriteoOptions(min_count=1))
    return raw, out


def test_numbers_and_nulls_are_counted_over_all_parts():
    found = sketch_of([1, 2, None, 2], [7, None, 2, 2])
    assert (found.kind, found.num_rows, found.num_nulls) == ("integer", 8, 2)
    assert (found.minimum, found.maximum, found.num_distinct) == (1, 7, 3)
    assert found.mean == pytest.approx(16 / 6)
    assert found.std == pytest.approx(np.std([1, 2, 2, 7, 2, 2]))
    assert found.top_share == pytest.approx(4 / 6)
    assert not found.is_estimate and found.zipf_exponent is None


def test_text_of_numbers_is_taken_for_numbers():
    for kind, *parts in (
        ("integer", ["1", "-20"], ["3"]),
        ("number", ["1", "2"], ["3.5"]),
        ("text", ["1", "2"], ["x3"]),
        ("text", ["a"], ["1"]),
        ("other", [b"raw"]),
    ):
        assert sketch_of(*parts).kind == kind
    nan = sketch_of([1.5, math.nan, None, 2.0])
    assert (nan.kind, nan.num_nulls, nan.num_distinct) == ("number", 2, 2)


def test_infinite_numbers_are_counted_apart():
    for parts, count in (([[1.0, math.inf], [3.0, -math.inf]], 2), ([["1.0", "inf"], ["3"]], 1)):
        found = sketch_of(*parts)
        assert found.num_infinite == count
        assert (found.minimum, found.maximum, found.mean, found.std) == (1, 3, 2, 1)


def test_lists_have_lengths_and_their_items_are_counted():
    found = sketch_of([[1, 2, 2], [], None], [[5, 9], [2, None, None]])
    assert found.lists is not None
    assert (found.lists.mean, found.lists.longest, found.lists.num_empty) == (1.5, 3, 1)
    assert (found.num_nulls, found.num_distinct, found.maximum) == (2, 4, 9), "rows, not items"


@given(st.lists(st.lists(st.integers(0, 50), max_size=40), min_size=1, max_size=6))
def test_cardinality_and_skew_are_exact_while_all_values_fit(parts):
    values = [value for part in parts for value in part]
    with patch.object(profile, "MAX_VALUES", 51):
        found = sketch_of(*([pl.Series(part, dtype=pl.Int64) for part in parts]))
    assert found.num_distinct == len(set(values))
    if values:
        top = max(values.count(value) for value in set(values))
        assert found.top_share == pytest.approx(top / len(values))


def test_cardinality_skew_and_exponent_are_estimated_beyond(monkeypatch):
    rng = np.random.default_rng(0)
    weights = np.arange(1, 200_001.0) ** -1.1
    drawn = rng.choice(200_000, (10, 60_000), p=weights / weights.sum())
    exact = sketch_of(*drawn)
    monkeypatch.setattr(profile, "MAX_VALUES", 8000)
    about = sketch_of(*drawn)
    assert about.is_estimate and not exact.is_estimate
    assert exact.num_distinct == len(np.unique(drawn))
    assert about.num_distinct == pytest.approx(exact.num_distinct, rel=0.05)
    assert about.top_share == pytest.approx(exact.top_share, abs=0.02)
    assert about.zipf_exponent == pytest.approx(1.1, abs=0.1)


def test_raw_criteo_files_are_recognised_and_are_one_data_set(clicks):
    (report,) = inspect(clicks[0])
    assert report.num_rows == 4000 and len(report.data.files) == 2
    assert [found.name for found in report.columns] == ["label", *DENSE_NAMES, *ID_NAMES]
    assert column(report, "label").is_binary
    assert column(report, "cat_2").kind == "text" and column(report, "cat_2").num_nulls > 100
    assert column(report, "int_0").minimum == -1
    assert (report.suggestion.label, report.suggestion.loss) == ("label", "bce")
    assert 0.9 < column(report, "cat_3").zipf_exponent < 1.2


def test_a_spec_of_raw_columns_validates(clicks, tmp_path):
    spec = spec_of(inspect(clicks[0])[0], tmp_path)
    assert len(spec.dense_features) == 13 and len(spec.pooled_features) == 26
    assert all(feature.transform == "log1p" for feature in spec.dense_features)
    assert all(feature.hashing for feature in spec.pooled_features)
    assert all(table.num_embeddings > 3 for table in spec.embedding_tables)


def test_a_spec_of_prepared_columns_validates_and_takes_sizes_from_the_manifest(clicks, tmp_path):
    (report,) = inspect(clicks[1])
    spec = spec_of(report, tmp_path)
    assert report.num_rows == load_manifest(clicks[1]).splits["train"].num_rows
    assert all(table.num_embeddings == "auto" for table in spec.embedding_tables)
    assert not any(f.hashing or f.vocabulary or f.bucketize for f in spec.features)


def test_lists_times_and_parts_of_the_label_have_their_place(prepared, tmp_path):
    (report,) = inspect(prepared)
    spec = spec_of(report, tmp_path)
    types = {feature.name: feature.type for feature in spec.features}
    assert types["genres"] == "id_list" and types["user_id"] == "id" and types["year"] == "dense"
    assert all(feature.transform == "standardise" for feature in spec.dense_features)
    assert not {"timestamp", "user_mean", "rating", "history_ratings"} & set(types)
    assert report.suggestion.label == "rating" and report.suggestion.loss == "mse"
    assert any(note.startswith("timestamp: left out") for note in report.suggestion.notes)
    assert column(report, "genres").lists.longest > 1


def test_files_with_other_columns_are_other_data_sets(csv_folder):
    titles = {Path(report.data.title).name: report for report in inspect(csv_folder)}
    assert set(titles) == {"movies.csv", "ratings.csv", "tags.csv"}
    ratings = titles["ratings.csv"]
    assert ratings.num_rows == 2000
    assert [found.kind for found in ratings.columns] == ["integer", "integer", "number", "integer"]
    assert column(titles["movies.csv"], "title").kind == "text"


def test_delimiter_and_header_are_found(tmp_path):
    for content, columns in {
        "user;item\n1;2\n": ["user", "item"],
        "1,2\n3,4\n": ["column_1", "column_2"],
        "a|b|c\r\n1|2|3\r\n": ["a", "b", "c"],
        "a\tb\r1\t2\r": ["a", "b"],
        '"user, id",x\n"1,5",2\n': ["user, id", "x"],
        ",user_id,click\n0,7,1\n": ["column_1", "user_id", "click"],
        ",1,2\n3,4,5\n": ["column_1", "column_2", "column_3"],
    }.items():
        (tmp_path / "file.csv").write_bytes(content.encode())
        (report,) = inspect(tmp_path / "file.csv")
        assert [found.name for found in report.columns] == columns
        assert report.num_rows == len(content.splitlines()) - ("column_2" not in columns)


def test_quoted_line_feeds_are_read_wherever_a_block_ends(tmp_path, monkeypatch):
    rows = [(number, f'a\n"{number}"\n,;b') for number in range(300)]
    frame = pl.DataFrame(rows, schema=["id", "text"], orient="row")
    for mark, block_bytes in ((",", 64), (";", 100), (",", 1000)):
        frame.write_csv(tmp_path / "a.csv", separator=mark)
        monkeypatch.setattr(profile, "_BLOCK_BYTES", block_bytes)
        (report,) = inspect(tmp_path / "a.csv")
        assert (report.num_rows, column(report, "text").num_distinct) == (300, 300)


def test_compressed_text_and_plain_parquet_are_read(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n3,4\n"))
    colours = pl.Series("colour", ["red", "blue", "red"], dtype=pl.Categorical)
    pl.DataFrame([colours]).write_parquet(tmp_path / "b.parquet")
    (text,) = inspect(tmp_path / "a.csv.gz")
    (parquet,) = inspect(tmp_path / "b.parquet")
    assert (text.num_rows, parquet.num_rows) == (2, 3)
    # A category of pandas is text.
    assert (parquet.columns[0].kind, parquet.columns[0].num_distinct) == ("text", 2)


def test_raw_columns_are_suggested_under_their_names_and_numbers_by_what_was_found(tmp_path):
    frame = pl.DataFrame({"price": [1.5, 2.5, 3.5, None], "y": [0, 1, 1, 0], "_id": list("abcd")})
    frame.write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    feature, _ = report.suggestion.features
    assert spec_of(report, tmp_path).sparse_features[0].name == "_id"
    found = {"mean": 2.5, "std": pytest.approx(0.816497), "missing": 2.5}
    assert feature == {"name": "price", "type": "dense", "transform": "standardise"} | found


def test_names_of_rows_and_hours_with_a_date_are_left_out_and_a_dense_feature_is_missed(tmp_path):
    numbers = range(2000)
    columns = {"id": [f"row {n}" for n in numbers], "hour": [14102100 + n % 24 for n in numbers]}
    columns |= {"site_id": [n % 50 for n in numbers], "click": [n % 2 for n in numbers]}
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    assert [feature["name"] for feature in report.suggestion.features] == ["site_id"]
    row_name, time, dense = report.suggestion.notes
    assert row_name.startswith("id: left out, a value of its own in each row")
    assert time.startswith("hour: left out, a time")
    assert dense.startswith("no dense feature, which every model.arch needs")


def test_integers_that_count_nothing_are_ids_and_many_others_are_doubted(tmp_path):
    numbers = np.arange(4000)
    columns = {"user": numbers // 2 + 2**60, "signed": -(2**62) + numbers // 2 * 2**40}
    columns |= {"item": numbers // 2 * 1000, "num_views": numbers // 2, "y": numbers % 2}
    columns |= {"account_id": numbers // 2 * 10}
    pl.DataFrame(columns).write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    found = {each.name: each for each in spec_of(report, tmp_path).features}
    kinds = {"user": "id", "signed": "id", "account_id": "id", "item": "dense"}
    for name, kind in (kinds | {"num_views": "dense"}).items():
        assert (found[name].type, found[name].hashing is not None) == (kind, kind == "id")
    (doubt,) = report.suggestion.notes
    assert doubt.startswith("item: many distinct integers: if they name things, make it `type: id`")
    pl.DataFrame(columns).select("item", "y").write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    assert yaml.safe_load(report.suggestion.yaml())["embedding_tables"] == []
    assert report.suggestion.notes[-1].startswith("no embedding table, of which a job needs one")


def test_what_is_likely_meant_as_something_else_is_noted(tmp_path):
    rows = ["price,brands,returned,row"]
    rows += [f"{n % 90 / 2},c{n % 7}|c{n % 5},{n % 2},{n + 1}" for n in range(1997)]
    rows += ["n/a,c1,,1998", "n/a,c1,,1999", "n/a,c1,1,2000"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    (report,) = inspect(tmp_path / "a.csv")
    assert (report.suggestion.label, report.suggestion.loss) == ("returned", "bce")
    assert [feature["name"] for feature in report.suggestion.features] == ["price", "brands"]
    price, brands, row, _, label = report.suggestion.notes
    assert price.startswith("price: 3 of 2,000 values are no numbers: if it is one, store")
    assert brands == "brands: holds `|`: if that parts several values, store lists"
    assert row.startswith("row: left out, a value of its own in each row")
    assert label.startswith("returned: 2 nulls, which training refuses")
    # What pandas wrote beside the columns.
    pl.DataFrame({"y": [0, 1], "__index_level_0__": [5, 9]}).write_parquet(tmp_path / "b.parquet")
    (report,) = inspect(tmp_path / "b.parquet")
    assert not report.suggestion.features


def test_no_column_is_suggested_that_training_refuses(tmp_path):
    is_true, prices = pa.array([True, False]), pa.array([Decimal("1.5"), Decimal("2.0")])
    columns = {"price": prices.cast(pa.decimal256(60, 1)), "label": is_true, "is_new": is_true}
    # Digits that are stored as text, lists, and names with little room.
    columns |= {"zip": ["1", "2"], "size": ["1.5", "2"], "u" * 62: [1, 2], "v" * 63: [1, 2]}
    columns["seen"] = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    columns["gaps"] = [[1, None], [2]]
    columns["tags"] = pa.ListArray.from_arrays([0, 1, 2], pa.array(["a", "b"]).dictionary_encode())
    columns["seen_for"] = pa.ListArray.from_arrays([0, 1, 2], prices)
    unread = {"is new?": [0, 1], "image": [b"a", b"b"]}
    pq.write_table(pa.table(columns | unread), tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    suggestion, spec = report.suggestion, spec_of(report, tmp_path)
    assert open_source(spec, tmp_path).columns
    assert (suggestion.label, suggestion.loss) == ("label", "bce")
    found = [feature.name for feature in spec.features]
    assert found == ["price", "is_new", "zip", "size", "u" * 62, "v" * 63, "seen", "gaps", "tags"]
    assert all(each.hashing for each in spec.features[-2:]), "a null is no id of a table"
    assert "seen_for: left out, a list of numbers: use it as weights_column" in suggestion.notes
    assert "image: left out, neither a number nor text: store it as one" in suggestion.notes


def test_bad_files_are_named(tmp_path):
    for name, content, kind, message in (
        ("a.csv", b"x,y\n1,2\n1,2,3\n", CorruptFileError, "lines 1 and 3: .* mend lines with"),
        ("b.parquet", b"PAR1 and no more", CorruptFileError, "is not a whole Parquet file"),
        ("c.csv", b"\xff\xfe\n", CorruptFileError, "line 1: not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(kind, match=f"{name}.*{message}"):
            inspect(tmp_path / name)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(twice, tmp_path / "f.parquet")
    with pytest.raises(ColumnError, match=r"f\.parquet: several columns 'x'"):
        inspect(tmp_path / "f.parquet")
    with pytest.raises(SourceMissingError, match="absent is missing; name a file, or a folder"):
        inspect(tmp_path / "absent")


def test_the_command_shows_tables_json_and_a_spec(clicks, tmp_path):
    shown = invoke(clicks[0])
    assert shown.exit_code == 0
    for text in ("4,000 rows in 2 files", "separated by tabs", "label (bce)", "prepare criteo"):
        assert text in shown.stdout
    narrow = RUNNER.invoke(app, ["inspect", str(clicks[0])], env={"COLUMNS": "60"})
    (line,) = (line for line in narrow.stdout.splitlines() if line.startswith("cat_2 "))
    assert re.search(r"text +[\d,]+ +\d\d?\.\d% +\d\d% +\d\.\d\d +id, hashed, table", line)
    document = json.loads(invoke(clicks[1], "--json").stdout)[0]
    assert document["num_rows"] == 3600
    assert document["suggested"]["label"] == "label"
    assert document["manifest"]["source"] == "criteo"
    parts = yaml.safe_load(invoke(clicks[1], "--spec").stdout)
    assert len(parts["features"]) == 39 and len(parts["embedding_tables"]) == 26
    for name in ("a", "b"):
        pl.DataFrame({name: [1, 2]}).write_csv(tmp_path / f"{name}.csv")
    text = invoke(tmp_path, "--spec").stdout
    assert [part["features"][0]["name"] for part in yaml.safe_load_all(text)] == ["a", "b"]
    assert f"---\n# {tmp_path / 'b.csv'}\n" in text


def test_a_file_without_rows_is_shown_beside_others_and_refused_alone(tmp_path):
    (tmp_path / "empty.csv").write_text("x,y\n")
    failed = invoke(tmp_path)
    assert failed.exit_code == 2 and "there are no rows in" in failed.stderr
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n1,3\n")
    shown = invoke(tmp_path).stdout
    assert "0 rows in 1 file" in shown and "2 rows in 1 file" in shown
    assert [each["num_rows"] for each in json.loads(invoke(tmp_path, "--json").stdout)] == [0, 2]
    assert "x: left out" in invoke(tmp_path, "--spec").stdout


def test_damage_is_found_whatever_is_printed(clicks, tmp_path):
    folder = shutil.copytree(clicks[1], tmp_path / "copy")
    assert json.loads(invoke(folder, "--json").stdout)[0]["num_verified_files"] == 28
    assert "OK: " in invoke(folder).stdout
    (folder / "validation/part-00000.parquet").write_bytes(b"damaged")
    unread = json.loads(invoke(folder, "--json", "--no-verify").stdout)[0]
    assert unread["num_verified_files"] is None
    assert "OK: " not in invoke(folder, "--no-verify").stdout
    for options in ((), ("--json",), ("--spec",)):
        failed = invoke(folder, *options)
        assert failed.exit_code == 2 and "part-00000.parquet is damaged" in failed.stderr
        assert "OK: " not in failed.stdout
    pl.DataFrame({"label": [1.0]}).write_parquet(folder / "train/part-00000.parquet")
    failed = invoke(folder, "--no-verify")
    assert failed.exit_code == 2 and "part-00000.parquet cannot be read to its end" in failed.stderr


def test_notes_tell_what_training_cannot_use_and_json_holds_no_infinities(tmp_path):
    frame = pl.DataFrame({"price": [1.0, math.inf, 2.0, 1e200], "user id": [1, 2, 3, 4]})
    frame = frame.with_columns(pl.col("price").alias("cost\n"), label=pl.Series(list("0110")))
    frame.write_parquet(tmp_path / "a.parquet")
    text = invoke(tmp_path, "--json").stdout
    (document,) = json.loads(text, parse_constant=pytest.fail)
    assert document["columns"][0]["num_infinite"] == 1
    notes = document["suggested"]["notes"]
    infinite = "price: 1 infinite values, which training refuses: mend them, or set "
    assert f"{infinite}data.on_bad_rows to quarantine" in notes
    for name in ("user id", "cost\n"):
        assert f"{name}: left out, its name is no identifier: rename it" in notes
    assert "label: a label is one number a row: store it as such" in notes
    spec = yaml.safe_load(invoke(tmp_path, "--spec").stdout)
    assert [feature["name"] for feature in spec["features"]] == ["price"]
    assert [feature["name"] for feature in document["suggested"]["features"]] == ["price"]


def test_parquet_below_a_folder_counts_only_where_the_folder_has_none_as_in_training(tmp_path):
    (tmp_path / "dt=1").mkdir()
    rows = pl.DataFrame({"click": [0, 1, 1]})
    rows.write_parquet(tmp_path / "dt=1" / "a.parquet")
    (nested,) = inspect(tmp_path)
    assert nested.num_rows == 3
    rows[:1].write_parquet(tmp_path / "late.parquet")
    (found,) = inspect(tmp_path)
    assert found.num_rows == 1 == ParquetSource(tmp_path, ["click"]).num_rows
    (tmp_path / "dt=1").rename(tmp_path / "train")
    assert sum(each.num_rows for each in inspect(tmp_path)) == 4

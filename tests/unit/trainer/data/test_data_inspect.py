"""What `data inspect` finds in prepared folders, Parquet and text, and what it suggests."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from trainer.data import inspect_source
from trainer.data.cli import app
from trainer.data.errors import CorruptFileError, SourceMissingError, TooFewRowsError
from trainer.data.inspect_columns import ColumnReport, ColumnSketch
from trainer.data.inspect_data import DataReport, inspect_data
from trainer.data.inspect_source import find_data
from trainer.data.manifest import load_manifest
from trainer.data.prepare.criteo_format import DENSE_NAMES, ID_NAMES
from trainer.data.prepare.criteo_source import LineBlock
from trainer.data.prepare.generate_criteo import CriteoGeneratorOptions, generate_criteo
from trainer.spec import validate_spec

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


def sketch_of(*parts: list, **options) -> ColumnReport:
    sketch = ColumnSketch("column", **options)
    for part in parts:
        sketch.add(pl.Series(part))
    return sketch.report()


def spec_of(report: DataReport, tmp_path: Path) -> dict:
    """A whole job document around the parts that were suggested."""
    suggested = yaml.safe_load(report.suggestion.yaml())
    dims = {table["embedding_dim"] for table in suggested["embedding_tables"]}
    return {
        "name": "job",
        "data": {"path": str(tmp_path), "label": {"column": report.suggestion.label}},
        **suggested,
        "model": {
            "dense_arch": {"layer_sizes": [*dims]},
            "over_arch": {"layer_sizes": [1]},
            "tasks": [{"loss": report.suggestion.loss}],
        },
        "parallelism": {"shard_group_size": 1},
    }


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> tuple[Path, Path]:
    """The same generator as raw files and as a prepared folder, 4000 rows."""
    folder = tmp_path_factory.mktemp("clicks")
    for kind in ("tsv", "parquet"):
        options = CriteoGeneratorOptions(num_rows=4000, format=kind, max_ids=300, num_days=2)
        generate_criteo(folder / kind, options)
    return folder / "tsv", folder / "parquet"


def test_numbers_and_nulls_are_counted_over_all_parts():
    found = sketch_of([1, 2, None, 2], [7, None, 2, 2])
    assert (found.kind, found.num_rows, found.num_nulls) == ("integer", 8, 2)
    assert (found.minimum, found.maximum, found.num_distinct) == (1, 7, 3)
    assert found.mean == pytest.approx(16 / 6)
    assert found.top_share == pytest.approx(4 / 6)
    assert not found.is_estimate and found.zipf_exponent is None


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=4))
def test_mean_and_deviation_are_those_of_all_values(parts):
    found = sketch_of(*parts)
    values = np.concatenate(parts)
    assert found.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-6)
    assert found.std == pytest.approx(values.std(), rel=1e-6, abs=1e-2)


def test_nan_counts_as_null():
    found = sketch_of([1.5, math.nan, None, 2.0])
    assert (found.kind, found.num_nulls, found.num_distinct) == ("number", 2, 2)


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ((["1", "-20"], ["3"]), "integer"),
        ((["1", "2"], ["3.5"]), "number"),
        ((["1", "2"], ["x3"]), "text"),
        ((["a"], ["1"]), "text"),
        (([True, False],), "integer"),
        (([b"raw"],), "other"),
    ],
)
def test_text_of_numbers_is_taken_for_numbers(parts, kind):
    assert sketch_of(*parts).kind == kind


@pytest.mark.parametrize("parts", [[[1.0, math.inf], [3.0, -math.inf]], [["1.0", "inf"], ["3"]]])
def test_infinite_numbers_are_counted_apart(parts):
    found = sketch_of(*parts)
    assert found.num_infinite == sum("inf" in str(value) for part in parts for value in part)
    assert (found.minimum, found.maximum, found.mean, found.std) == (1, 3, 2, 1)


def test_lists_have_lengths_and_their_items_are_counted():
    found = sketch_of([[1, 2, 2], [], None], [[5], [2, 9]])
    assert found.lists is not None
    assert (found.lists.mean, found.lists.longest, found.lists.num_empty) == (1.5, 3, 1)
    assert (found.num_nulls, found.num_distinct, found.maximum) == (1, 4, 9)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 50), max_size=40), min_size=1, max_size=6))
def test_cardinality_and_skew_are_exact_while_all_values_fit(parts):
    values = [value for part in parts for value in part]
    found = sketch_of(*([pl.Series(part, dtype=pl.Int64) for part in parts]), max_values=51)
    assert found.num_distinct == len(set(values))
    if values:
        top = max(values.count(value) for value in set(values))
        assert found.top_share == pytest.approx(top / len(values))


def test_cardinality_skew_and_exponent_are_estimated_beyond():
    rng = np.random.default_rng(0)
    weights = np.arange(1, 200_001.0) ** -1.1
    drawn = rng.choice(200_000, (10, 60_000), p=weights / weights.sum())
    exact, about = (sketch_of(*drawn, max_values=size) for size in (400_000, 8000))
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
    spec = validate_spec(spec_of(inspect(clicks[0])[0], tmp_path))
    assert len(spec.dense_features) == 13 and len(spec.pooled_features) == 26
    assert all(feature.transform == "log1p" for feature in spec.dense_features)
    assert all(feature.hashing for feature in spec.pooled_features)
    assert all(table.num_embeddings > 3 for table in spec.embedding_tables)


def test_a_spec_of_prepared_columns_validates_and_takes_sizes_from_the_manifest(clicks, tmp_path):
    (report,) = inspect(clicks[1])
    spec = validate_spec(spec_of(report, tmp_path))
    assert report.num_rows == load_manifest(clicks[1]).splits["train"].num_rows
    assert all(table.num_embeddings == "auto" for table in spec.embedding_tables)
    assert not any(feature.encoding for feature in spec.features)


def test_lists_times_and_parts_of_the_label_have_their_place(prepared, tmp_path):
    (report,) = inspect(prepared)
    spec = validate_spec(spec_of(report, tmp_path))
    types = {feature.name: feature.type for feature in spec.features}
    assert types["genres"] == "id_list" and types["user_id"] == "id" and types["year"] == "dense"
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


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("user;item\n1;2\n", ["user", "item"]),
        ("1,2\n3,4\n", ["column_1", "column_2"]),
        ("a|b|c\r\n1|2|3\r\n", ["a", "b", "c"]),
        ('"user, id",x\n"1,5",2\n', ["user, id", "x"]),
        (",user_id,click\n0,7,1\n", ["column_1", "user_id", "click"]),
        (",1,2\n3,4,5\n", ["column_1", "column_2", "column_3"]),
    ],
)
def test_delimiter_and_header_are_found(tmp_path, content, columns):
    (tmp_path / "file.csv").write_bytes(content.encode())
    (report,) = inspect(tmp_path / "file.csv")
    assert [found.name for found in report.columns] == columns
    assert report.num_rows == content.count("\n") - ("column_2" not in columns)


def test_quoted_line_feeds_are_read_wherever_a_block_ends(tmp_path, monkeypatch):
    rows = [(number, f'a\n"{number}"\n,b') for number in range(300)]
    pl.DataFrame(rows, schema=["id", "text"], orient="row").write_csv(tmp_path / "a.csv")
    for block_bytes in (64, 100, 1000):
        monkeypatch.setattr(inspect_source, "_BLOCK_BYTES", block_bytes)
        (report,) = inspect(tmp_path / "a.csv")
        assert (report.num_rows, column(report, "text").num_distinct) == (300, 300)


def test_a_quote_that_nothing_closes_holds_no_more_than_a_long_cell(monkeypatch):
    monkeypatch.setattr(inspect_source, "_MAX_CELL_BYTES", 1000)
    lines = [b'a,"b\n', *[b"c,d\n"] * 2000]
    blocks = [LineBlock(line, number) for number, line in enumerate(lines, start=1)]
    found = list(inspect_source._whole_rows(blocks))
    assert b"".join(block.lines for block in found) == b"".join(lines)
    assert max(len(block.lines) for block in found) <= 1004
    assert [found[1].first_line, found[-1].first_line] == [found[0].num_lines + 1, 2001]


def test_compressed_text_and_plain_parquet_are_read(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n3,4\n"))
    pl.DataFrame({"x": [1, 2, 3]}).write_parquet(tmp_path / "b.parquet")
    (text,) = inspect(tmp_path / "a.csv.gz")
    (parquet,) = inspect(tmp_path / "b.parquet")
    assert (text.num_rows, parquet.num_rows) == (2, 3)


def test_raw_numbers_are_standardised_by_what_was_found(tmp_path):
    frame = pl.DataFrame({"price": [1.5, 2.5, 3.5, None], "y": [0, 1, 1, 0]})
    frame.write_parquet(tmp_path / "a.parquet")
    (feature,) = inspect(tmp_path)[0].suggestion.features
    assert feature == {
        "name": "price",
        "type": "dense",
        "transform": "standardise",
        "mean": 2.5,
        "std": pytest.approx(0.816497),
        "missing": 2.5,
    }


def test_names_that_no_spec_can_hold_are_left_out_with_a_note(tmp_path):
    pl.DataFrame({"user id": [1, 2], "x": [0.5, 1.5]}).write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    assert [feature["name"] for feature in report.suggestion.features] == ["x"]
    assert "user id: left out, its name is no identifier: rename it" in report.suggestion.notes


def test_bad_files_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n1,2,3\n")
    with pytest.raises(CorruptFileError, match=r"a\.csv, between lines 1 and 3: cannot be read"):
        inspect(tmp_path / "a.csv")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptFileError, match=r"b\.parquet is not a whole Parquet file"):
        inspect(tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(CorruptFileError, match=r"c\.csv, line 1: not UTF-8"):
        inspect(tmp_path / "c.csv")
    with pytest.raises(SourceMissingError, match="absent is missing"):
        inspect(tmp_path / "absent")
    (tmp_path / "d.csv").write_text("x,y\n")
    with pytest.raises(TooFewRowsError, match=r"d\.csv holds no rows"):
        inspect(tmp_path / "d.csv")


def test_the_command_shows_tables_json_and_a_spec(clicks, tmp_path):
    shown = invoke(clicks[0])
    assert shown.exit_code == 0
    for text in (
        "4,000 rows in 2 files",
        "text separated by tabs",
        "label (bce)",
        "prepare criteo",
    ):
        assert text in shown.stdout
    document = json.loads(invoke(clicks[1], "--json").stdout)[0]
    assert document["num_rows"] == 3600
    assert document["suggested"]["label"] == "label"
    assert document["manifest"]["source"] == "criteo"
    parts = yaml.safe_load(invoke(clicks[1], "--spec").stdout)
    assert len(parts["features"]) == 39 and len(parts["embedding_tables"]) == 26


def test_the_command_checks_the_sums_of_prepared_folders(clicks):
    assert "OK: " in invoke(clicks[1]).stdout
    assert "OK: " not in invoke(clicks[1], "--no-verify").stdout


def test_damage_is_found_whatever_is_printed(clicks, tmp_path):
    folder = shutil.copytree(clicks[1], tmp_path / "copy")
    assert json.loads(invoke(folder, "--json").stdout)[0]["num_verified_files"] == 2
    unread = json.loads(invoke(folder, "--json", "--no-verify").stdout)[0]
    assert unread["num_verified_files"] is None
    (folder / "validation/part-00000.parquet").write_bytes(b"damaged")
    for option in ("--json", "--spec"):
        failed = invoke(folder, option)
        assert failed.exit_code == 2 and "part-00000.parquet is damaged" in failed.stderr
        assert not failed.stdout


def test_json_holds_no_infinities_and_a_note_says_that_data_does(tmp_path):
    frame = pl.DataFrame({"price": [1.0, math.inf, 2.0, 1e200], "y": [0, 1, 1, 0]})
    frame.write_parquet(tmp_path / "a.parquet")
    text = invoke(tmp_path, "--json").stdout
    (document,) = json.loads(text, parse_constant=pytest.fail)
    assert document["columns"][0]["num_infinite"] == 1
    assert document["suggested"]["notes"] == [
        "price: 1 infinite values, which training refuses: mend them, or set data.on_bad_rows "
        "to quarantine"
    ]


def test_a_category_of_pandas_is_text(tmp_path):
    colours = pl.Series("colour", ["red", "blue", "red"], dtype=pl.Categorical)
    pl.DataFrame([colours]).write_parquet(tmp_path / "a.parquet")
    (report,) = inspect(tmp_path)
    assert (report.columns[0].kind, report.columns[0].num_distinct) == ("text", 2)

"""Integers of all 64 bits in a request: what training made of them, the scorer makes, too."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.export.export_case import make_spec, spec_document
from trainer.errors import ColumnError
from trainer.export.artifact import BadRow
from trainer.export.predict import rows_of_table, scoring_layout, table_of_dicts, with_ids
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

BIG = 2**63 + 12_345
ROW = {"age": 1.0, "price": 2.0, "user": 1, "mean": 3.0, "spread": 1.0}
BITS_64 = st.integers(0, 2**64 - 1)


def spec_with(encoding: dict[str, Any], path: Path = Path("unused"), **feature: Any) -> JobSpec:
    """The small job with another `colour`, whose table has 16 rows."""
    document = spec_document(path)
    colour = {"name": "colour", "type": "id", "table": "colours"} | encoding | feature
    features = [each if each["name"] != "colour" else colour for each in document["features"]]
    return validate_spec(document | {"features": features})


HASHED = spec_with({"hashing": {"num_buckets": 16}})
CUT = spec_with({"bucketize": {"boundaries": [0.0, 2.0**62, 2.0**63, 2.0**63 + 2**60]}})


def colours(spec: JobSpec, table: pa.Table, kind: str | None = None) -> list[int]:
    """The ids that a table of rows gives the feature, whose column was of `kind` in training."""
    layout = scoring_layout(spec, Path(spec.data.path))
    place = [feature.name for feature in spec.pooled_features].index("colour")
    ids = rows_of_table(table, layout, {"colour": kind}).sparse
    return ids.singles[:, sum(ids.is_single[:place])].tolist()


def as_request(spec: JobSpec, values: list[Any], kind: str | None) -> pa.Table:
    layout = scoring_layout(spec, Path(spec.data.path))
    kinds = {} if kind is None else {"colour": kind}
    return table_of_dicts([ROW | {"colour": value} for value in values], layout, kinds)


def as_trained(spec: JobSpec, values: list[Any], kind: pa.DataType) -> pa.Table:
    """The same rows as a file of training data has them, with the column in its own type."""
    table = as_request(spec, [None] * len(values), None)
    index = table.schema.get_field_index("colour")
    return table.set_column(index, "colour", pa.array(values, kind))


@pytest.mark.parametrize("spec", [HASHED, CUT], ids=["hashing", "bucketize"])
@given(st.lists(st.none() | BITS_64 | st.integers(2**63, 2**64 - 1), min_size=1, max_size=8))
def test_a_request_gives_the_ids_that_an_uint64_column_gave(spec, values):
    wanted = colours(spec, as_trained(spec, values, pa.uint64()))
    for kind in ("integer", None):
        assert colours(spec, as_request(spec, values, kind)) == wanted


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8))
def test_a_request_gives_the_ids_that_an_int64_column_gave(values):
    wanted = colours(HASHED, as_trained(HASHED, values, pa.int64()))
    assert colours(HASHED, as_request(HASHED, values, "integer")) == wanted


def test_what_no_64_bits_hold_is_named():
    for values in ([1, 2**64], [2**63, -1], [-1, 2**63], [BIG, 1.5], [BIG, "x"]):
        with pytest.raises(BadRow) as caught:
            as_request(HASHED, values, "integer")
        assert (caught.value.row, caught.value.column) == (1, "colour")
    # Ids of a table are still no larger than it.
    with pytest.raises(BadRow) as caught:
        table_of_dicts([ROW | {"user": BIG}], scoring_layout(HASHED, Path("unused")))
    assert caught.value.column == "user"


def test_booleans_and_decimals_are_the_numbers_that_they_are_in_training():
    layout = scoring_layout(HASHED, Path("unused"))
    as_numbers, as_given = (
        [ROW | dict(zip(("colour", "age", "price"), row, strict=True)) for row in rows]
        for rows in (
            [(1, 0, 1.5), (0, 1, 2.0)],
            [(True, False, Decimal("1.5")), (False, True, Decimal("2.0"))],
        )
    )
    wanted = table_of_dicts(as_numbers, layout, {"colour": "integer"})
    assert table_of_dicts(as_given, layout, {"colour": "integer"}) == wanted
    given, wanted = wanted, rows_of_table(wanted, layout)
    for name in ("colour", "age", "price"):
        values = pa.array([row[name] for row in as_given])
        given = given.set_column(given.schema.get_field_index(name), name, values)
    found = rows_of_table(given, layout)
    assert found.dense.tolist() == wanted.dense.tolist()
    assert found.sparse.singles.tolist() == wanted.sparse.singles.tolist()


def test_a_table_is_hashed_and_cut_as_the_types_of_training_were():
    layout = scoring_layout(HASHED, Path("unused"))
    words = as_trained(HASHED, ["1"], pa.string())
    for kind, table in {"integer": words, "string": as_request(HASHED, [1], None)}.items():
        with pytest.raises(ColumnError, match=r"column 'colour' in the table is .*other ids"):
            rows_of_table(table, layout, {"colour": kind})
    rows_of_table(words, layout, {"colour": "string"})
    # In float32, 3.3 lies below 3.3.
    cut = spec_with({"bucketize": {"boundaries": [3.3]}})
    wanted = colours(cut, as_trained(cut, [3.3], pa.float32()))
    given = as_trained(cut, [3.3], pa.float64())
    assert [colours(cut, given, kind) for kind in ("number", "float32")] == [[2], wanted]
    assert wanted == [1]


def test_dense_integers_are_rounded_and_not_refused():
    spec, large = make_spec(Path("unused")), [2**53 + 1, 2**60 + 1, BIG]
    layout = scoring_layout(spec, Path("unused"))
    rows = rows_of_table(table_of_dicts([ROW | {"age": each} for each in large], layout), layout)
    assert rows.dense[:, 0].tolist() == [2.0**53, 2.0**60, 2.0**63]


def vocabulary(path: Path, dtype: type[pl.DataType], values: list[int]) -> Path:
    path.parent.mkdir(parents=True)
    index = range(1, len(values) + 1)
    frame = pl.DataFrame({"value": pl.Series(values, dtype=dtype), "index": list(index)})
    frame.write_parquet(path)
    return path


def test_vocabularies_of_uint64_are_looked_up_by_features_and_by_raw_values(tmp_path):
    vocabulary(tmp_path / "vocab" / "colour.parquet", pl.UInt64, [7, BIG])
    spec = spec_with({"vocabulary": {"column": "colour"}}, tmp_path)
    values = [7, BIG, BIG + 1, None]
    assert colours(spec, as_trained(spec, values, pa.uint64())) == [1, 2, 0, 0]
    assert colours(spec, as_request(spec, values, "integer")) == [1, 2, 0, 0]
    found = with_ids([{"user": each} for each in [*values, [BIG, 7]]], {"user": "colour"}, tmp_path)
    assert [row["user"] for row in found] == [1, 2, 0, None, [2, 1]]

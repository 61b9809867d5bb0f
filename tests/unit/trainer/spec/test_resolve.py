"""Table sizes left to the data come from the manifest."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.inputs import resolve_inputs
from trainer.data.manifest import load_manifest
from trainer.data.parquet import mean_and_deviation
from trainer.errors import (
    ColumnError,
    CorruptFileError,
    DataError,
    ManifestError,
    SourceMissingError,
    TooFewRowsError,
)
from trainer.spec import validate_spec
from trainer.spec.data import FeatureSpec
from trainer.spec.resolve import check_sizes, fill_statistics, size_tables


def sizes(spec) -> dict[str, int]:
    return {table.name: table.num_embeddings for table in spec.embedding_tables}


def with_table(spec, name: str, num_embeddings):
    tables = tuple(
        table.model_copy(update={"num_embeddings": num_embeddings}) if table.name == name else table
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def test_auto_becomes_the_vocabulary_size_and_a_number_of_the_user_stays(make_spec, prepared):
    vocabularies = load_manifest(prepared).vocab_sizes
    resolved = sizes(make_spec())
    assert resolved["user_id_table"] == vocabularies["user_id"]
    assert resolved["tokens_table"] == vocabularies["tokens"]
    spec = with_table(make_spec(), "user_id_table", 12345)
    assert sizes(size_tables(spec, load_manifest(prepared).vocab_sizes))["user_id_table"] == 12345


def test_a_shared_table_takes_the_largest_vocabulary(make_spec, prepared):
    sizes_there = load_manifest(prepared).vocab_sizes
    spec = with_features(make_spec(), {}, {"column": "movie_id"}, {"column": "user_id"})
    found = sizes(size_tables(spec, sizes_there))
    assert found == {"t": max(sizes_there["movie_id"], sizes_there["user_id"])}


def test_a_column_without_vocabulary_is_named(make_spec):
    with pytest.raises(ManifestError, match=r"features\[2\]\.column.*'genres'"):
        size_tables(with_table(make_spec(), "genres_table", "auto"), {"user_id": 9, "movie_id": 9})


def with_features(spec, table, *features):
    """The spec with `features` alone, one dense one, and one table that all of them look up."""
    document = spec.model_dump(mode="json")
    document["features"] = [
        {"name": "year", "type": "dense"},
        *({"name": f"f{n}", "type": "id", "table": "t"} | f for n, f in enumerate(features)),
    ]
    document["embedding_tables"] = [{"name": "t", "embedding_dim": 4} | table]
    document["parallelism"].pop("survive"), document.pop("export")
    document["model"].pop("module", None)
    return validate_spec(document)


HASHED = {"column": "user_id", "hashing": {"num_buckets": 77}}
BUCKETS = {"column": "year", "bucketize": {"boundaries": [1980, 1990, 2000]}}


def test_encodings_tell_table_sizes_without_a_manifest(make_spec, tmp_path):
    for features, size in (((HASHED,), 77), ((BUCKETS,), 5), ((HASHED, BUCKETS), 77)):
        spec = with_features(make_spec(), {}, *features)
        data = spec.data.model_copy(update={"path": str(tmp_path)})
        assert sizes(resolve_inputs(spec.model_copy(update={"data": data}))) == {"t": size}


def test_a_folder_that_is_not_there_is_named(make_spec, tmp_path):
    spec = make_spec()
    data = spec.data.model_copy(update={"path": str(tmp_path / "absent")})
    with pytest.raises(SourceMissingError, match=r"absent holds no manifest.json.*data\.path"):
        resolve_inputs(spec.model_copy(update={"data": data}))


def test_hashing_to_the_size_of_a_table_needs_one(make_spec):
    hashed = {"column": "user_id", "hashing": {}}
    with pytest.raises(ManifestError, match="nothing says how large table 't' is"):
        resolve_inputs(with_features(make_spec(), {}, hashed))
    spec = with_features(make_spec(), {}, hashed, HASHED)
    assert sizes(resolve_inputs(spec)) == {"t": 77}
    spec = size_tables(with_features(make_spec(), {}, hashed, {}), {"f1": 1})
    with pytest.raises(DataError, match="'t' has 1 rows"):
        check_sizes(spec, {}, {})


def test_a_vocabulary_file_tells_the_size_of_its_table(make_spec, prepared):
    wanted = load_manifest(prepared).vocab_sizes["movie_id"]
    for vocabulary in ({"column": "movie_id"}, {"path": "vocab/movie_id.parquet"}):
        feature = {"column": "user_id", "vocabulary": vocabulary}
        assert sizes(resolve_inputs(with_features(make_spec(), {}, feature))) == {"t": wanted}


def test_a_table_smaller_than_its_ids_is_refused_before_training(make_spec):
    for field, value in (("column", "movie_id"), ("vocabulary", {"column": "movie_id"})):
        feature = {"column": "year", field: value}
        spec = with_features(make_spec(), {"num_embeddings": 5}, feature)
        message = rf"features\[1\]\.{field}: .*table 't' has 5 rows"
        with pytest.raises(DataError, match=message):
            resolve_inputs(spec)


def with_standardised(spec, dense: dict | None = None):
    """The spec with a hashed feature, and `year` standardised; `dense` changes the latter."""
    spec = with_features(spec, {}, HASHED)
    year = spec.features[0].model_copy(update={"transform": "standardise"} | (dense or {}))
    return spec.model_copy(update={"features": (year, *spec.features[1:])})


def test_means_and_deviations_come_from_the_manifest_or_the_spec(make_spec):
    spec = with_standardised(make_spec())
    filled = fill_statistics(spec, {"year_mean": 1990.5, "year_std": 8.0}).features[0]
    assert (filled.mean, filled.std) == (1990.5, 8.0)
    with pytest.raises(ManifestError, match=r"features\[0\]\.transform.*column 'year'"):
        fill_statistics(spec, {"year_mean": 1990.5})
    with pytest.raises(ManifestError, match=r"'year' is 1990\.5 everywhere.*remove"):
        fill_statistics(spec, {"year_mean": 1990.5, "year_std": 0.0})
    spec = with_standardised(make_spec(), {"mean": 1.0, "std": 2.0})
    assert fill_statistics(spec, {}) == spec


def test_means_and_deviations_that_nobody_knows_are_measured(make_spec, prepared):
    spec = with_standardised(make_spec(), {"column": "user_scale"})
    found = resolve_inputs(spec).features[0]
    scales = pl.read_parquet(prepared / "train" / "*.parquet")["user_scale"].cast(pl.Float64)
    assert found.mean == pytest.approx(scales.mean())
    assert found.std == pytest.approx(scales.std(ddof=0))


def test_numbers_that_the_manifest_could_scale_and_the_spec_does_not_are_warned_of(make_spec):
    told: list[str] = []
    found = resolve_inputs(with_standardised(make_spec()), told.append).features[0]
    assert 1900 < found.mean < 2030
    assert told == []
    resolve_inputs(make_spec(), told.append)
    assert len(told) == 1 and "not scaled: year, user_activity; set their transform" in told[0]


def test_large_numbers_with_gaps_are_measured_exactly(tmp_path):
    values = [1e9 + 1, None, 1e9 + 3, float("nan"), 1e9 + 5]
    pq.write_table(pa.table({"x": values}), tmp_path / "part.parquet", row_group_size=2)
    mean, std = mean_and_deviation(tmp_path, "x")
    assert (mean, std) == (1e9 + 3, pytest.approx((8 / 3) ** 0.5))
    # The mean of a thousand times 0.1 is a little off 0.1.
    pq.write_table(pa.table({"x": [0.1] * 1000}), tmp_path / "part.parquet")
    assert mean_and_deviation(tmp_path, "x") == (pytest.approx(0.1), 0)
    pq.write_table(pa.table({"x": pa.nulls(3, pa.float64())}), tmp_path / "part.parquet")
    with pytest.raises(TooFewRowsError, match="column 'x' holds no number"):
        mean_and_deviation(tmp_path, "x")
    for other in ("1.5", [1.5]):
        pq.write_table(pa.table({"x": [other]}), tmp_path / "part.parquet")
        with pytest.raises(ColumnError, match="not a number to standardise"):
            mean_and_deviation(tmp_path, "x")


def test_a_sequence_longer_than_the_prepared_histories_is_warned_of(make_spec):
    document = make_spec().model_dump(mode="json", exclude_unset=True)
    document["embedding_tables"] += [{"name": "seen", "embedding_dim": 4}]
    seen = {"name": "seen", "type": "sequence", "column": "history_movies", "table": "seen"}
    told: list[str] = []
    for max_length in (10, 11):
        features = [*document["features"], seen | {"max_length": max_length}]
        resolve_inputs(validate_spec(document | {"features": features}), told.append)
    told = [warning for warning in told if "max_length" in warning]
    assert len(told) == 1
    assert "max_length is 11" in told[0] and "at most 10 movies" in told[0]


@pytest.mark.parametrize("on_bad_rows", ["fail", "quarantine"])
def test_a_damaged_row_group_is_left_out_of_means_where_its_rows_are(
    make_spec, tmp_path, on_bad_rows
) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    table = pa.table({"x": [1.0, 3.0, 500.0, 900.0]})
    pq.write_table(table, folder / "p.parquet", row_group_size=2, compression="none")
    last = pq.read_metadata(folder / "p.parquet").row_group(1).column(0)
    content = bytearray((folder / "p.parquet").read_bytes())
    begin = last.dictionary_page_offset or last.data_page_offset
    content[begin : begin + last.total_compressed_size] = b"\xff" * last.total_compressed_size
    (folder / "p.parquet").write_bytes(content)
    spec = with_features(make_spec(), {}, HASHED)
    x = FeatureSpec(name="x", type="dense", transform="standardise")
    data = spec.data.model_copy(update={"path": str(tmp_path), "on_bad_rows": on_bad_rows})
    spec = spec.model_copy(update={"features": (x, *spec.features[1:]), "data": data})
    if on_bad_rows == "fail":
        with pytest.raises(CorruptFileError, match="row group 1"):
            resolve_inputs(spec)
    else:
        found = resolve_inputs(spec).features[0]
        assert (found.mean, found.std) == (2.0, 1.0)

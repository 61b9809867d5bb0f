"""Table sizes left to the data come from the manifest."""

from __future__ import annotations

import pytest

from trainer.data.columns import layout_of
from trainer.data.errors import DataError, ManifestError
from trainer.data.manifest import load_manifest
from trainer.data.resolve import resolve_tables


def sizes(spec) -> dict[str, int]:
    return {table.name: table.num_embeddings for table in spec.embedding_tables}


def with_table(spec, name: str, num_embeddings):
    tables = tuple(
        table.model_copy(update={"num_embeddings": num_embeddings}) if table.name == name else table
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def test_auto_becomes_the_vocabulary_size(make_spec, prepared):
    vocabularies = load_manifest(prepared).vocab_sizes
    resolved = sizes(make_spec())
    assert resolved["user_id_table"] == vocabularies["user_id"]
    assert resolved["tokens_table"] == vocabularies["tokens"]


def test_a_shared_table_takes_the_largest_vocabulary(make_spec, prepared):
    spec = make_spec()
    features = tuple(
        feature.model_copy(update={"table": "genres_table"})
        if feature.name in ("movie_id", "genres")
        else feature
        for feature in spec.features
    )
    shared = with_table(spec, "genres_table", "auto").model_copy(update={"features": features})
    manifest = load_manifest(prepared)
    assert (
        sizes(resolve_tables(shared, manifest))["genres_table"]
        == (manifest.vocab_sizes["movie_id"])
    )


def test_a_number_that_the_user_gave_stays(make_spec, prepared):
    spec = with_table(make_spec(), "user_id_table", 12345)
    assert sizes(resolve_tables(spec, load_manifest(prepared)))["user_id_table"] == 12345


def test_a_column_without_vocabulary_is_named(make_spec, prepared):
    manifest = load_manifest(prepared)
    smaller = {name: size for name, size in manifest.vocab_sizes.items() if name != "genres"}
    spec = with_table(make_spec(), "genres_table", "auto")
    with pytest.raises(ManifestError, match=r"features\[2\]\.column.*'genres'"):
        resolve_tables(spec, manifest.model_copy(update={"vocab_sizes": smaller}))


def test_reading_rows_with_an_unresolved_table_is_refused(make_spec):
    with pytest.raises(DataError, match="'tokens_table' is still 'auto'"):
        layout_of(with_table(make_spec(), "tokens_table", "auto"))

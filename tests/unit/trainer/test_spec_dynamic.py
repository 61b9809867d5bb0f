"""Dynamic tables in the spec: what they can be, and why not otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.test_spec import minimal
from trainer.spec import SpecError, validate_spec


def dynamic(table: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """A spec whose first table is dynamic, with changes."""
    document = minimal()
    document["embedding_tables"][0] |= {"num_embeddings": 64, "dynamic": {}} | (table or {})
    document["parallelism"] = {"workers": 2, "shard_group_size": 2}
    return document | sections


def fault_of(document: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    return caught.value.problems[0].code, caught.value.problems[0].message


def test_a_dynamic_table_takes_any_id_below_its_input_hash_size() -> None:
    table = validate_spec(dynamic()).embedding_tables[0]
    assert table.num_ids == 2**62
    table = validate_spec(dynamic({"dynamic": {"input_hash_size": 1000}})).embedding_tables[0]
    assert (table.num_ids, table.num_embeddings) == (1000, 64)


def test_the_ids_of_rows_count_as_memory() -> None:
    table = validate_spec(dynamic()).embedding_tables[0]
    assert table.size_bytes(4) == 64 * (8 * 4 + 4 + 3 * 8)


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ({"num_embeddings": "auto"}, "dynamic_size"),
        ({"num_embeddings": 65}, "dynamic_size"),
        ({"num_embeddings": 16}, "dynamic_size"),
        ({"constraints": {"sharding_types": ["table_wise"]}}, "unsupported_sharding"),
    ],
)
def test_sizes_and_shardings_that_buckets_do_not_allow_are_refused(
    table: dict[str, Any], code: str
) -> None:
    assert fault_of(dynamic(table))[0] == code


@pytest.mark.parametrize(
    "parallelism",
    [
        {"workers": 4, "shard_group_size": 2},
        {"workers": 4, "shard_group_size": "auto"},
        {"workers": {"min": 2, "max": 4}, "shard_group_size": 2},
        {"workers": {"min": 2, "max": 4}, "shard_group_size": "auto"},
    ],
)
def test_more_than_one_copy_is_refused_with_the_reason(parallelism: dict[str, Any]) -> None:
    code, message = fault_of(dynamic(parallelism=parallelism))
    assert code == "dynamic_copies"
    assert "HashZch" in message and "CUDA" in message


def test_a_shard_holds_whole_buckets() -> None:
    three = {"workers": 3, "shard_group_size": 3}
    assert fault_of(dynamic(parallelism=three))[0] == "dynamic_buckets"
    fitting = {"num_embeddings": 72, "dynamic": {"num_buckets": 12}}
    assert validate_spec(dynamic(fitting, parallelism=three)).parallelism.group_size == 3


def test_weights_of_pooled_ids_are_refused_as_they_would_be_dropped() -> None:
    document = dynamic()
    document["features"][0] |= {"type": "id_list", "weights_column": "w"}
    assert fault_of(document)[0] == "dynamic_weights"
    document["features"][0] |= {"type": "sequence"}
    assert validate_spec(document).has_weighted_sequences


def test_ids_that_wait_for_their_admission_count_as_memory() -> None:
    few = validate_spec(dynamic())
    table = few.embedding_tables[0]
    rows_bytes = table.size_bytes(few.optimizer.sparse.state_bytes_per_row(table.embedding_dim))
    features = [each for each in few.sparse_features if each.table == table.name]
    num_lookups = few.data.batch_size * 2 * len(features)
    assert {each.type for each in features} == {"id"}
    assert few.size_bytes(table) == rows_bytes + 24 * 10 * num_lookups
    many = validate_spec(dynamic({"dynamic": {"eviction_interval": 100_000}}))
    # Two shards fold what they have seen when it is 2^20 lookups.
    assert many.size_bytes(many.embedding_tables[0]) == rows_bytes + 24 * (2 * 2**20 + num_lookups)


def test_a_job_whose_waiting_ids_do_not_fit_is_refused_before_it_starts() -> None:
    resources = {"memory_bytes_per_worker": 2**20}
    assert validate_spec(dynamic(resources=resources))
    code, message = fault_of(
        dynamic({"dynamic": {"eviction_interval": 100_000}}, resources=resources)
    )
    assert code == "tables_too_large" or "memory" in message

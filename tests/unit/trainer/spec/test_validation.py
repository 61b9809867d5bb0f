"""Checks across sections of a spec: sizes, layouts, recovery, dynamic tables, encodings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.spec.test_spec import AUTO, SURVIVE, changed, minimal
from trainer.spec import load_spec, validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec


def test_elastic_bounds_are_the_fewest_and_the_most_workers() -> None:
    sizes = changed("parallelism.workers={min: 2, max: 6}").parallelism
    assert (sizes.min_workers, sizes.world_size, sizes.num_replicas) == (2, 6, 3)
    assert sizes.is_elastic
    assert not changed("parallelism.workers={min: 4, max: 4}").parallelism.is_elastic


def test_who_wants_to_survive_a_host_need_not_know_placements() -> None:
    sizes = changed(*SURVIVE.split("; ")).parallelism
    assert sizes.placement == "auto"
    assert sizes.failure_domain == "replica_group"
    assert sizes.dense_policy == "at_sync"
    assert changed().parallelism.placement == "intra_host"


@pytest.mark.parametrize(
    ("changes", "domain"),
    [
        ([], "job"),
        (["placement=inter_host"], "replica_group"),
        (["placement=inter_host", "dense=every_step"], "job"),
        (["placement=inter_host", "sync.overlap=true"], "job"),
        (["placement=auto", "shard_group_size=4"], "job"),
        (["placement=auto", "dense=every_step"], "job"),
        (["placement=auto", "shard_group_size=auto", "survive={hosts: 1}"], "replica_group"),
        (["shard_group_size=auto"], "job"),
        (["placement=auto", "shard_group_size=auto"], None),
        (["placement=auto"], None),
        (["placement=inter_host", "shard_group_size=auto"], None),
    ],
)
def test_the_failure_domain_is_known_where_no_choice_can_change_it(
    changes: list[str], domain: str | None
) -> None:
    sizes = changed(*(f"parallelism.{change}" for change in changes)).parallelism
    if domain is not None:
        assert sizes.failure_domain == domain
    else:
        assert not sizes.is_resolved
        with pytest.raises(ValueError, match="still 'auto'"):
            _ = sizes.failure_domain


def test_checks_that_need_sizes_wait_for_them() -> None:
    for change in (
        "parallelism.sync.every_steps=4",
        "parallelism.dense=at_sync",
        "parallelism.divergence_check={every_syncs: 2}",
        "parallelism.moment_scale=3",
        "parallelism.all_to_all.forward=bf16",
        "training.trace={first_step: 1, ranks: [3]}",
        "recovery.exchange_timeout_s=7",
        "parallelism.workers={min: 3, max: 5}",
    ):
        assert not changed(*AUTO.split("; "), change).parallelism.is_resolved


def test_a_chosen_layout_puts_numbers_in_the_place_of_auto() -> None:
    spec = changed(*AUTO.split("; "), "parallelism.workers={min: 3, max: 7}").with_layout(
        2, "inter_host"
    )
    sizes = spec.parallelism
    assert sizes.is_resolved
    assert (sizes.min_workers, sizes.world_size, sizes.group_size) == (4, 6, 2)
    assert (sizes.placement, sizes.failure_domain) == ("inter_host", "replica_group")
    assert load_spec(spec.model_dump_json()) == spec


def test_a_given_layout_stays_as_it_was_written() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}", "training.trace={first_step: 1}")
    assert spec.with_layout(2, "intra_host") == spec


def test_a_chosen_layout_is_checked_as_a_written_one_would_be() -> None:
    spec = changed(*AUTO.split("; "), "parallelism.moment_scale=3")
    with pytest.raises(SpecError) as caught:
        spec.with_layout(2, "intra_host")
    assert [p.path for p in caught.value.problems] == ["parallelism.moment_scale"]
    memory = ["embedding_tables[0].num_embeddings=1000", "resources.memory_bytes_per_worker=20000"]
    with pytest.raises(SpecError, match=r"embedding_tables\[0\].num_embeddings"):
        changed(*AUTO.split("; "), *memory).with_layout(1, "intra_host")


def test_what_was_asked_of_copies_is_no_fault_where_the_choice_left_one() -> None:
    spec = changed(
        *AUTO.split("; "), "parallelism.sync.every_steps=4", "recovery.exchange_timeout_s=7"
    )
    assert spec.with_layout(4, "intra_host").parallelism.num_replicas == 1


def test_a_job_that_was_resized_has_that_many_workers() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}", "parallelism.sync.every_steps=4")
    assert spec.with_workers(4).parallelism.workers == 4
    assert spec.with_workers(2).parallelism.num_replicas == 1
    with pytest.raises(SpecError, match="multiple of shard_group_size"):
        spec.with_workers(3)


def test_a_spec_of_an_earlier_version_still_loads() -> None:
    spec = changed("parallelism.placement=inter_host")
    document: dict[str, Any] = spec.model_dump(mode="json")
    # What that version wrote: its default of `dense`, and nothing of what came since.
    document["parallelism"] |= {"dense": "every_step"}
    for section, names in {
        "parallelism": ["survive"],
        "training": ["on_non_finite"],
        "checkpoint": ["keep_every_steps", "asynchronous", "warm_start"],
    }.items():
        for name in names:
            del document[section][name]
    del document["recovery"]
    assert validate_spec(document).parallelism.failure_domain == "job"
    assert JobSpec.model_validate(document, context={"stored": True}).parallelism.num_replicas == 2


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


def test_sizes_and_shardings_that_buckets_do_not_allow_are_refused() -> None:
    for num_embeddings in ("auto", 65, 16):
        assert fault_of(dynamic({"num_embeddings": num_embeddings}))[0] == "dynamic_size"
    table_wise = {"constraints": {"sharding_types": ["table_wise"]}}
    assert fault_of(dynamic(table_wise))[0] == "unsupported_sharding"
    three = {"workers": 3, "shard_group_size": 3}
    assert fault_of(dynamic(parallelism=three))[0] == "dynamic_buckets"
    fitting = {"num_embeddings": 72, "dynamic": {"num_buckets": 12}}
    assert validate_spec(dynamic(fitting, parallelism=three)).parallelism.group_size == 3


def test_more_than_one_copy_is_refused_with_the_reason() -> None:
    for workers in (4, {"min": 2, "max": 4}):
        for size in (2, "auto"):
            parallelism = {"workers": workers, "shard_group_size": size}
            code, message = fault_of(dynamic(parallelism=parallelism))
            assert code == "dynamic_copies"
            assert "HashZch" in message and "CUDA" in message


def test_weights_of_pooled_ids_are_refused_as_they_would_be_dropped() -> None:
    document = dynamic()
    document["features"][0] |= {"type": "id_list", "weights_column": "w"}
    assert fault_of(document)[0] == "dynamic_weights"
    document["features"][0] |= {"type": "sequence"}
    assert validate_spec(document).has_weighted_sequences


def test_ids_that_wait_for_their_admission_count_as_memory() -> None:
    few = validate_spec(dynamic())
    table = few.embedding_tables[0]
    rows_bytes = 64 * (8 * 4 + 4 + 3 * 8)
    [feature] = [each for each in few.sparse_features if each.table == table.name]
    assert feature.type == "id"
    num_lookups = few.data.batch_size * 2
    assert few.size_bytes(table) == rows_bytes + 24 * 10 * num_lookups
    many = validate_spec(dynamic({"dynamic": {"eviction_interval": 100_000}}))
    # Two shards fold what they have seen when it is 2^20 lookups.
    assert many.size_bytes(many.embedding_tables[0]) == rows_bytes + 24 * (2 * 2**20 + num_lookups)


def test_a_job_whose_waiting_ids_do_not_fit_is_refused_before_it_starts() -> None:
    resources = {"memory_bytes_per_worker": 2**20}
    assert validate_spec(dynamic(resources=resources))
    waiting = {"dynamic": {"eviction_interval": 100_000}}
    code, message = fault_of(dynamic(waiting, resources=resources))
    assert code == "tables_too_large" or "memory" in message


def test_a_feature_is_encoded_in_one_way_or_none() -> None:
    assert changed().sparse_features[0].encoding is None
    for way, given in {
        "hashing": "{num_buckets: 5}",
        "vocabulary": "{}",
        "bucketize": "{boundaries: [1, 2, 3]}",
    }.items():
        (feature,) = changed(f"features[0].{way}={given}").sparse_features
        assert feature.encoding == getattr(feature, way)

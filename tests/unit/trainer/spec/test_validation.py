"""Checks across sections of a spec: sizes, layouts, recovery, dynamic tables, encodings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.spec.test_spec import AUTO, DYNAMIC, ROWS, SURVIVE, changed
from trainer.spec import load_spec, validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec


def test_elastic_bounds_are_the_fewest_and_the_most_workers() -> None:
    sizes = changed("parallelism.workers={min: 2, max: 6}").parallelism
    assert (sizes.min_workers, sizes.world_size, sizes.num_replicas) == (2, 6, 3)
    assert sizes.is_elastic
    assert not changed("parallelism.workers={min: 4, max: 4}").parallelism.is_elastic


def test_who_wants_to_survive_a_host_need_not_know_placements() -> None:
    sizes = changed(SURVIVE).parallelism
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
        (["placement=inter_host", "sync={every_steps: auto, overlap: true}"], "replica_group"),
        (["placement=inter_host", "sync={every_steps: auto}"], "replica_group"),
        (["placement=inter_host", "sync={dtype: fp16, optimizer_state: delayed}"], "replica_group"),
        (["placement=inter_host", "divergence_check={every_syncs: 2}"], "replica_group"),
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
    assert sizes.has_independent_groups == (domain == "replica_group")


def test_checks_that_need_sizes_wait_for_them() -> None:
    for change in (
        "parallelism.sync.every_steps=4",
        "parallelism.dense=at_sync",
        "parallelism.divergence_check={every_syncs: 2}",
        "parallelism.moment_scale=3",
        "parallelism.all_to_all.forward=bf16",
        "recovery.exchange_timeout_s=7",
        "parallelism.workers={min: 3, max: 5}",
    ):
        assert not changed(AUTO, change).parallelism.is_resolved


def test_a_chosen_layout_puts_numbers_in_the_place_of_auto() -> None:
    spec = changed(AUTO, "parallelism.workers={min: 3, max: 7}").with_layout(2, "inter_host")
    sizes = spec.parallelism
    assert sizes.is_resolved
    assert (sizes.min_workers, sizes.world_size, sizes.group_size) == (4, 6, 2)
    assert (sizes.placement, sizes.failure_domain) == ("inter_host", "replica_group")
    assert load_spec(spec.model_dump_json()) == spec


def test_a_given_layout_stays_as_it_was_written() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}")
    assert spec.with_layout(2, "intra_host") == spec


def test_a_chosen_layout_is_checked_as_a_written_one_would_be() -> None:
    memory = ["embedding_tables[0].num_embeddings=1000", "resources.memory_bytes_per_worker=20000"]
    with pytest.raises(SpecError, match=r"embedding_tables\[0\].num_embeddings"):
        changed(AUTO, *memory).with_layout(1, "intra_host")


def test_what_was_asked_of_copies_is_no_fault_where_the_choice_left_one() -> None:
    asked = ["parallelism.sync.every_steps=4", "parallelism.moment_scale=3"]
    spec = changed(AUTO, "recovery.exchange_timeout_s=7", *asked)
    one_copy = spec.with_layout(4, "intra_host")
    assert one_copy.parallelism.num_replicas == 1
    assert JobSpec.checked(one_copy.model_dump(mode="json"), {"stored": True}) == one_copy


def test_a_job_that_was_resized_has_that_many_workers() -> None:
    elastic = "parallelism.workers={min: 2, max: 6}; parallelism.moment_scale=3"
    spec = changed(elastic, "parallelism.sync.every_steps=4")
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


def test_a_stored_spec_may_name_steps_to_trace() -> None:
    document: dict[str, Any] = changed().model_dump(mode="json")
    document["training"]["trace"] = None  # the default, as documents with all defaults have it
    assert validate_spec(document) == changed()
    document["training"]["trace"] = {"first_step": 3, "num_steps": 3, "ranks": [0]}
    assert JobSpec.model_validate(document, context={"stored": True}) == changed()
    with pytest.raises(SpecError, match=r"training\.trace: .* `shardloom trace JOB`"):
        validate_spec(document)


def test_a_dynamic_table_takes_any_id_below_its_input_hash_size() -> None:
    assert changed(DYNAMIC).embedding_tables[0].num_ids == 2**62
    limited = changed(DYNAMIC, "embedding_tables[0].dynamic.input_hash_size=1000")
    assert limited.embedding_tables[0].num_ids == 1000
    assert limited.embedding_tables[0].num_embeddings == 64
    assert changed(DYNAMIC, "features[0].hashing={num_buckets: 1000}").features[0].hashing


def test_buckets_that_fit_the_shards_and_weights_of_sequences_are_accepted() -> None:
    three = "parallelism.workers=3; parallelism.shard_group_size=3"
    table = f"{ROWS}=72; embedding_tables[0].dynamic.num_buckets=12"
    assert changed(DYNAMIC, three, table).parallelism.group_size == 3
    weighted = "features[0].type=sequence; features[0].weights_column=w"
    assert changed(DYNAMIC, weighted).has_weighted_sequences


def test_ids_that_wait_for_their_admission_count_as_memory() -> None:
    few = changed(DYNAMIC, "resources.memory_bytes_per_worker=1048576")
    rows_bytes, num_lookups = 64 * (8 * 4 + 4 + 3 * 8), few.data.batch_size * 2
    assert few.table_bytes == rows_bytes + 24 * 10 * num_lookups
    many = changed(DYNAMIC, "embedding_tables[0].dynamic.eviction_interval=100000")
    # Two shards fold what they have seen when it is 2^20 lookups.
    assert many.table_bytes == rows_bytes + 24 * (2 * 2**20 + num_lookups)

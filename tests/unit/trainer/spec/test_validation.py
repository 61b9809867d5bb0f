"""Checks across sections of a spec: sizes, layouts, recovery, dynamic tables, encodings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.spec.test_spec import minimal, refusal
from trainer.spec import load_spec, validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides

_AUTO = ["parallelism.shard_group_size=auto", "parallelism.placement=auto"]
_SURVIVE = ["parallelism.survive={hosts: 1}", "parallelism.workers={min: 2, max: 6}"]


def changed(*changes: str) -> JobSpec:
    """The minimal spec, 4 workers with L = 2, after `changes`."""
    return validate_spec(apply_overrides(minimal(), list(changes)))


def test_elastic_bounds_are_the_fewest_and_the_most_workers() -> None:
    sizes = changed("parallelism.workers={min: 2, max: 6}").parallelism
    assert (sizes.min_workers, sizes.world_size, sizes.num_replicas) == (2, 6, 3)
    assert sizes.is_elastic
    assert not changed("parallelism.workers={min: 4, max: 4}").parallelism.is_elastic


@pytest.mark.parametrize(
    ("changes", "path", "code", "part"),
    [
        (["parallelism.workers={min: 6, max: 2}"], "workers", "bounds", "min (6) is above max (2)"),
        (["parallelism.workers={min: 3, max: 6}"], "workers.min", "not_divisible", "2 or 4"),
        (["parallelism.workers={min: 2, max: 5}"], "workers.max", "not_divisible", "4 or 6"),
        (["parallelism.survive={hosts: 0}"], "survive.hosts", "greater_than", ""),
        (["parallelism.survive={hosts: 2}"], "survive.hosts", "survive", "raise workers to 6"),
        (["parallelism.survive={hosts: 2}"], "survive.hosts", "survive", "lower it to 1"),
        ([*_AUTO, "parallelism.survive={hosts: 4}"], "survive.hosts", "survive", "make 4 of 1"),
    ],
)
def test_sizes_that_can_never_be_are_refused_at_once(
    changes: list[str], path: str, code: str, part: str
) -> None:
    problems = refusal(changes)
    assert list(problems) == [f"parallelism.{path}"]
    assert problems[f"parallelism.{path}"][0] == code
    assert part in problems[f"parallelism.{path}"][1]


def test_who_wants_to_survive_a_host_need_not_know_placements() -> None:
    sizes = changed(*_SURVIVE).parallelism
    assert sizes.placement == "auto"
    assert sizes.failure_domain == "replica_group"
    assert sizes.dense_policy == "at_sync"
    assert changed().parallelism.placement == "intra_host"


def test_what_ties_groups_together_is_refused_where_a_host_may_be_lost() -> None:
    for change, part in {
        "placement=intra_host": "inter_host",
        "dense=every_step": "independent",
        "sync.overlap=true": "independent",
        "sync.dtype=bf16": "independent",
        "sync.optimizer_state=never": "moments",
        "divergence_check={every_syncs: 2}": "vote",
    }.items():
        [(path, (code, message))] = refusal([*_SURVIVE, f"parallelism.{change}"]).items()
        assert (path, code) == (f"parallelism.{change.partition('=')[0]}", "survive")
        assert part in message
    alone = ["parallelism.survive={hosts: 1}", "parallelism.shard_group_size=4"]
    assert "4 worker(s) make 1 of 4; raise workers to 8" in next(iter(refusal(alone).values()))[1]


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
        assert not changed(*_AUTO, change).parallelism.is_resolved


def test_tables_that_all_workers_together_cannot_hold_are_refused_before_a_choice() -> None:
    # 36 000 bytes; four workers of 10 000 bytes less 15 % hold 34 000.
    table = ["embedding_tables[0].num_embeddings=1000", *_AUTO]
    path = "embedding_tables[0].num_embeddings"
    problems = refusal([*table, "resources.memory_bytes_per_worker=10000"])
    assert problems[path][0] == "table_too_large"
    assert changed(*table, "resources.memory_bytes_per_worker=11000").table_bytes == 36_000


def test_a_chosen_layout_puts_numbers_in_the_place_of_auto() -> None:
    spec = changed(*_AUTO, "parallelism.workers={min: 3, max: 7}").with_layout(2, "inter_host")
    sizes = spec.parallelism
    assert sizes.is_resolved
    assert (sizes.min_workers, sizes.world_size, sizes.group_size) == (4, 6, 2)
    assert (sizes.placement, sizes.failure_domain) == ("inter_host", "replica_group")
    assert load_spec(spec.model_dump_json()) == spec


def test_a_given_layout_stays_as_it_was_written() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}", "training.trace={first_step: 1}")
    assert spec.with_layout(2, "intra_host") == spec


def test_a_chosen_layout_is_checked_as_a_written_one_would_be() -> None:
    spec = changed(*_AUTO, "parallelism.moment_scale=3")
    with pytest.raises(SpecError) as caught:
        spec.with_layout(2, "intra_host")
    assert [p.path for p in caught.value.problems] == ["parallelism.moment_scale"]
    memory = ["embedding_tables[0].num_embeddings=1000", "resources.memory_bytes_per_worker=20000"]
    with pytest.raises(SpecError, match=r"embedding_tables\[0\].num_embeddings"):
        changed(*_AUTO, *memory).with_layout(1, "intra_host")


def test_what_was_asked_of_copies_is_no_fault_where_the_choice_left_one() -> None:
    spec = changed(*_AUTO, "parallelism.sync.every_steps=4", "recovery.exchange_timeout_s=7")
    assert spec.with_layout(4, "intra_host").parallelism.num_replicas == 1


def test_a_job_that_was_resized_has_that_many_workers() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}", "parallelism.sync.every_steps=4")
    assert spec.with_workers(4).parallelism.workers == 4
    assert spec.with_workers(2).parallelism.num_replicas == 1
    with pytest.raises(SpecError, match="multiple of shard_group_size"):
        spec.with_workers(3)


def test_a_limit_on_exchanges_is_refused_where_no_groups_exchange_anything() -> None:
    change = "recovery.exchange_timeout_s=7"
    assert refusal([change])["recovery.exchange_timeout_s"][0] == "no_effect"
    assert changed(change, "parallelism.placement=inter_host").recovery.exchange_timeout_s == 7


def test_a_fault_in_what_keeps_a_job_alive_names_its_field() -> None:
    for change in (
        "recovery.hang_factor=1",
        "recovery.heartbeat_timeout_s=0",
        "recovery.exclude_host_after=0",
        "training.on_non_finite=ignore",
        "checkpoint.keep_every_steps=0",
    ):
        assert list(refusal([change])) == [change.partition("=")[0]]
    for start, path in {
        "{}": "path",
        "{path: x, tables: []}": "tables",
        "{path: x, tables: [users, movies]}": "tables[1]",
    }.items():
        problems = refusal([f"checkpoint.warm_start={start}"])
        assert list(problems) == [f"checkpoint.warm_start.{path}"]
    assert "'movies' is not in embedding_tables (users)" in next(iter(problems.values()))[1]


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


def with_features(
    sparse: dict[str, Any] | None = None, dense: dict[str, Any] | None = None
) -> JobSpec:
    """The minimal spec, its id feature and its dense one changed."""
    document = minimal()
    user, age = document["features"]
    document["features"] = [age | (dense or {}), user | (sparse or {})]
    return validate_spec(document)


HASHING = {"hashing": {"num_buckets": 5}}
BUCKETIZE = {"bucketize": {"boundaries": [1, 2, 3]}}
BOTH = {"path": "v", "column": "c"}


def test_a_feature_is_encoded_in_one_way_or_none() -> None:
    encodings: list[dict[str, Any]] = [HASHING, {"hashing": {}}, {"vocabulary": {}}, BUCKETIZE]
    for encoding in encodings:
        (feature,) = with_features(encoding).sparse_features
        assert feature.encoding == getattr(feature, next(iter(encoding)))
    assert with_features().sparse_features[0].encoding is None


@pytest.mark.parametrize(
    ("kind", "changes", "field", "code"),
    [
        ("sparse", HASHING | BUCKETIZE, "bucketize", "several_encodings"),
        ("sparse", {"hashing": {"num_buckets": 1}}, "hashing.num_buckets", None),
        ("sparse", {"hashing": {"num_buckets": 11}}, "hashing.num_buckets", "vocabulary_too_large"),
        ("sparse", {"hashing": {"seed": -1}}, "hashing.seed", None),
        ("sparse", {"bucketize": {"boundaries": [1, 1]}}, "bucketize.boundaries", "not_ascending"),
        ("sparse", {"bucketize": {"boundaries": []}}, "bucketize.boundaries", None),
        ("sparse", {"vocabulary": {"path": "/etc/passwd"}}, "vocabulary.path", "outside_data_path"),
        ("sparse", {"vocabulary": {"path": "../other"}}, "vocabulary.path", "outside_data_path"),
        ("sparse", {"vocabulary": {"path": "s3://b/v"}}, "vocabulary.path", "outside_data_path"),
        ("sparse", {"vocabulary": BOTH}, "vocabulary.column", "several_vocabularies"),
        ("sparse", {"transform": "log1p"}, "transform", "unexpected_transform"),
        ("sparse", {"missing": 0}, "missing", "unexpected_transform"),
        ("dense", HASHING, "hashing", "unexpected_encoding"),
        ("dense", {"mean": 1.0}, "mean", "no_effect"),
        ("dense", {"transform": "log1p", "std": 1.0}, "std", "no_effect"),
        ("dense", {"transform": "standardise", "std": 0.0}, "std", None),
    ],
)
def test_a_fault_of_a_feature_names_its_field(
    kind: str, changes: dict[str, Any], field: str, code: str | None
) -> None:
    with pytest.raises(SpecError) as refusal:
        with_features(**{kind: changes})
    (problem,) = refusal.value.problems
    assert problem.path == f"features[{int(kind == 'sparse')}].{field}"
    assert code is None or problem.code == code


def test_options_of_training_that_cannot_work_are_refused_by_field() -> None:
    sharding = "embedding_tables[0].constraints.sharding_types"
    for changes, path, code in (
        (["checkpoint.every_steps=6"], "checkpoint.every_steps", "accumulate_steps"),
        (["training.report_every_steps=10"], "training.report_every_steps", "accumulate_steps"),
        (
            ["training.early_stopping={patience: 1}", "data.split={validation: null}"],
            "training.early_stopping",
            "no_validation",
        ),
        (
            ["optimizer.sparse.max_gradient=1.0", f"{sharding}=[data_parallel]"],
            sharding,
            "max_gradient",
        ),
        (
            ["parallelism.placement=inter_host", "parallelism.sync={every_steps: 6}"],
            "parallelism.sync.every_steps",
            "accumulate_steps",
        ),
    ):
        steps = ["training.accumulate_steps=4", "training.report_every_steps=8"]
        [(found, (said, _))] = refusal([*steps, *changes]).items()
        assert (found, said) == (path, code)

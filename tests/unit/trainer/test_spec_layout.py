"""Elastic bounds, `survive`, `auto` layouts and recovery in the spec."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.test_spec import minimal, refusal
from trainer.parallel.layout import Layout
from trainer.spec import JobSpec, SpecError, apply_overrides, load_spec, validate_spec

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
        (
            ["parallelism.survive={hosts: 1}", "parallelism.shard_group_size=4"],
            "survive.hosts",
            "survive",
            "needs 2 sharding groups on as many hosts, but 4 worker(s) make 1 of 4; raise workers "
            "to 8, or remove survive",
        ),
        ([*_AUTO, "parallelism.survive={hosts: 4}"], "survive.hosts", "survive", "make 4 of 1"),
        ([*_SURVIVE, "parallelism.placement=intra_host"], "placement", "survive", "inter_host"),
        ([*_SURVIVE, "parallelism.dense=every_step"], "dense", "survive", "independent"),
        ([*_SURVIVE, "parallelism.sync.overlap=true"], "sync.overlap", "survive", "independent"),
        ([*_SURVIVE, "parallelism.sync.dtype=bf16"], "sync.dtype", "survive", "independent"),
        (
            [*_SURVIVE, "parallelism.sync.optimizer_state=never"],
            "sync.optimizer_state",
            "survive",
            "moments",
        ),
        (
            [*_SURVIVE, "parallelism.divergence_check={every_syncs: 2}"],
            "divergence_check",
            "survive",
            "vote",
        ),
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


@pytest.mark.parametrize(
    ("changes", "domain"),
    [
        ([], "job"),
        (["parallelism.placement=inter_host"], "replica_group"),
        (["parallelism.placement=inter_host", "parallelism.dense=every_step"], "job"),
        (["parallelism.placement=inter_host", "parallelism.sync.overlap=true"], "job"),
        (["parallelism.placement=auto", "parallelism.shard_group_size=4"], "job"),
        (["parallelism.placement=auto", "parallelism.dense=every_step"], "job"),
        ([*_AUTO, "parallelism.survive={hosts: 1}"], "replica_group"),
        (["parallelism.shard_group_size=auto"], "job"),
    ],
)
def test_the_failure_domain_is_known_where_no_choice_can_change_it(
    changes: list[str], domain: str
) -> None:
    assert changed(*changes).parallelism.failure_domain == domain


@pytest.mark.parametrize(
    "changes",
    [
        _AUTO,
        ["parallelism.placement=auto"],
        ["parallelism.shard_group_size=auto", "parallelism.placement=inter_host"],
    ],
)
def test_the_failure_domain_is_open_while_a_choice_decides_it(changes: list[str]) -> None:
    sizes = changed(*changes).parallelism
    assert not sizes.is_resolved
    with pytest.raises(ValueError, match="still 'auto'"):
        _ = sizes.failure_domain


@pytest.mark.parametrize(
    "change",
    [
        "parallelism.sync.every_steps=4",
        "parallelism.dense=at_sync",
        "parallelism.divergence_check={every_syncs: 2}",
        "parallelism.moment_scale=3",
        "parallelism.all_to_all.forward=bf16",
        "training.trace={first_step: 1, ranks: [3]}",
        "recovery.exchange_timeout_s=7",
        "parallelism.workers={min: 3, max: 5}",
    ],
)
def test_checks_that_need_sizes_wait_for_them(change: str) -> None:
    assert not changed(*_AUTO, change).parallelism.is_resolved


def test_tables_that_all_workers_together_cannot_hold_are_refused_before_a_choice() -> None:
    # 36 000 bytes; four workers of 10 000 bytes less 15 % hold 34 000.
    table = ["embedding_tables[0].num_embeddings=1000", *_AUTO]
    path = "embedding_tables[0].num_embeddings"
    problems = refusal([*table, "resources.memory_bytes_per_worker=10000"])
    assert problems[path][0] == "table_too_large"
    assert changed(*table, "resources.memory_bytes_per_worker=11000").table_bytes == 36_000


def test_a_chosen_layout_puts_numbers_in_the_place_of_auto() -> None:
    spec = changed(*_AUTO, "parallelism.workers={min: 3, max: 7}").with_layout(
        Layout(6, 2, "inter_host")
    )
    sizes = spec.parallelism
    assert sizes.is_resolved
    assert (sizes.min_workers, sizes.world_size, sizes.group_size) == (4, 6, 2)
    assert (sizes.placement, sizes.failure_domain) == ("inter_host", "replica_group")
    assert load_spec(spec.model_dump_json()) == spec


def test_a_given_layout_stays_as_it_was_written() -> None:
    spec = changed("parallelism.workers={min: 2, max: 6}", "training.trace={first_step: 1}")
    assert spec.with_layout(Layout(2, 2, "intra_host")) == spec


def test_a_chosen_layout_is_checked_as_a_written_one_would_be() -> None:
    spec = changed(*_AUTO, "parallelism.moment_scale=3")
    with pytest.raises(SpecError) as caught:
        spec.with_layout(Layout(4, 2, "intra_host"))
    assert [p.path for p in caught.value.problems] == ["parallelism.moment_scale"]
    memory = [
        "embedding_tables[0].num_embeddings=1000",
        "resources.memory_bytes_per_worker=20000",
    ]
    with pytest.raises(SpecError, match=r"embedding_tables\[0\].num_embeddings"):
        changed(*_AUTO, *memory).with_layout(Layout(4, 1, "intra_host"))


def test_what_was_asked_of_copies_is_no_fault_where_the_choice_left_one() -> None:
    spec = changed(*_AUTO, "parallelism.sync.every_steps=4", "recovery.exchange_timeout_s=7")
    assert spec.with_layout(Layout(4, 4, "intra_host")).parallelism.num_replicas == 1


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


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("recovery.hang_factor=1", "recovery.hang_factor"),
        ("recovery.heartbeat_timeout_s=0", "recovery.heartbeat_timeout_s"),
        ("recovery.exclude_host_after=0", "recovery.exclude_host_after"),
        ("training.on_non_finite=ignore", "training.on_non_finite"),
        ("checkpoint.keep_every_steps=0", "checkpoint.keep_every_steps"),
        ("checkpoint.warm_start={}", "checkpoint.warm_start.path"),
        ("checkpoint.warm_start={path: x, tables: []}", "checkpoint.warm_start.tables"),
        (
            "checkpoint.warm_start={path: x, tables: [users, movies]}",
            "checkpoint.warm_start.tables[1]",
        ),
    ],
)
def test_a_fault_in_what_keeps_a_job_alive_names_its_field(change: str, path: str) -> None:
    assert list(refusal([change])) == [path]


def test_a_table_to_start_from_that_does_not_exist_is_named_with_those_that_do() -> None:
    message = refusal(["checkpoint.warm_start={path: x, tables: [movies]}"])
    assert "'movies' is not in embedding_tables (users)" in next(iter(message.values()))[1]


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

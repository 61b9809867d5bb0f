"""Syncs on gloo ranks: touched rows give what a full all-reduce gives; each policy; fallbacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch

from tests.harness.ranks import run_in_turn, run_ranks
from tests.integration.ranks.sync_cases import (
    SyncCase,
    Table,
    Training,
    assert_bitwise,
    check_cases,
    check_resharded,
    clones,
    random_case,
    restore,
    untouched_rows,
)
from trainer.parallel.collectives import ReplicaCollectives, WorldReplicaGroup, run_exchange
from trainer.parallel.mesh import form_replica_levels
from trainer.spec.training import SparseOptimizerName, SparseOptimizerSpec

CASES_A_RUN = 10
TABLES = (Table(300), Table(20, num_features=2), Table(6, sharding="data_parallel"))
CASE = SyncCase(2, 1, tables=TABLES, batch_size=3)
OPTIMIZERS = get_args(SparseOptimizerName)
STATEFUL = [name for name in OPTIMIZERS if SparseOptimizerSpec(name=name).has_state]
MODES = ({"mode": "touched_rows", "full_above": 1.0}, {"mode": "full"})


def overlapped_keeps_what_was_learned(case: SyncCase, num_steps: int) -> int:
    """Means land as a difference after `num_steps`; the number of values that had moved on."""
    training = Training(case)
    sync = training.build_sync(overlap=num_steps, every_steps=num_steps)
    moved = 0
    for _ in range(3):
        training.train()
        tensors = [*training.weights(), *training.moments()]
        snapshots, means = clones(tensors), training.mean_of(tensors)
        sync()
        for _ in range(num_steps - 1):
            training.train()
            before = clones(tensors)
            sync.tick()
            assert_bitwise(tensors, before)  # nothing is applied yet
        training.train()
        currents = clones(tensors)
        sync.tick()
        for tensor, mean, current, start in zip(tensors, means, currents, snapshots, strict=True):
            stayed = current == start
            assert torch.equal(tensor[stayed], mean[stayed])
            torch.testing.assert_close(tensor, mean + (current - start), rtol=1e-6, atol=1e-7)
            moved += int((~stayed).sum())
    _check_flush(training, sync)
    sync.close()
    return moved


def delayed_moments_lag_one_sync(case: SyncCase) -> bool:
    """Weights are averaged at once, moments of shards a sync later; whether these differed at all.

    State of what is averaged whole may shrink, so it never comes late.
    """
    training = Training(case)
    sync = training.build_sync(optimizer_state="delayed")
    training.train()
    moments = training.shard_moments()
    snapshots, means = clones(moments), training.mean_of(moments)
    weight_means = training.mean_of(training.weights())
    state_means = training.mean_of(training.whole_states())
    sync()
    assert_bitwise(training.weights(), weight_means)
    assert_bitwise(training.whole_states(), state_means)
    assert_bitwise(moments, snapshots)
    training.train()
    currents = clones(moments)
    sync()
    training.assert_copies_equal(training.weights())
    assert_bitwise(
        moments,
        [
            mean + (current - start)
            for mean, current, start in zip(means, currents, snapshots, strict=True)
        ],
    )
    training.train()
    _check_flush(training, sync)
    sync.close()
    pairs = zip(means, snapshots, strict=True)
    return any(not torch.equal(mean, start) for mean, start in pairs)


def moments_stay_until_a_flush(case: SyncCase) -> None:
    """Under `never` syncs leave moments alone, and a flush averages all that differ."""
    training = Training(case)
    sync = training.build_sync(optimizer_state="never")
    for _ in range(2):
        training.train()
        before = clones(training.moments())
        sync()
        training.assert_copies_equal(training.weights())
        assert_bitwise(training.moments(), before)
    means = training.mean_of(training.moments())
    sync.flush()
    assert_bitwise(training.moments(), means)
    assert sync().density == 0
    sync.close()


def _check_flush(training: Training, sync: Any) -> None:
    sync.flush()
    training.assert_copies_equal([*training.weights(), *training.moments()])


def flush_is_exact(case: SyncCase) -> None:
    """In the middle of everything a flush makes all copies equal, moments included."""
    for state in ("every", "delayed", "never"):
        for overlap in (False, True):
            training = Training(case)
            sync = training.build_sync(optimizer_state=state, overlap=overlap)
            training.train()
            sync()
            training.train()
            _check_flush(training, sync)
            training.train(2)
            sync()
            _check_flush(training, sync)
            sync.close()


def errors_of_changes(case: SyncCase, overlap: bool) -> list[tuple[float, float]]:
    """(largest error against the exact mean, largest change) of each sync in half precision."""
    training = Training(case)
    sync = training.build_sync(overlap=overlap)
    tensors = [*training.weights(), *training.moments()]
    errors = []
    for _ in range(3):
        starts = clones(tensors)
        training.train()
        means = training.mean_of(tensors)
        # What travels is a copy's own change, so errors are relative to the largest of those.
        copies = [
            training.copies_of(tensor - start)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        largest = max(changes.abs().max().item() for changes in copies)
        sync()
        sync.finish()
        pairs = zip(tensors, means, strict=True)
        errors.append((max((t - m).abs().max().item() for t, m in pairs), largest))
        training.assert_copies_equal(tensors)
    sync.close()
    assert not training.warnings
    return errors


def overlapped_changes_agree_later(case: SyncCase) -> None:
    """Overlapped syncs in half precision keep one base on all copies, so copies come together."""
    training = Training(case)
    sync = training.build_sync(overlap=True)
    for _ in range(4):
        training.train()
        sync.finish()
        sync()
    sync.finish()
    training.assert_copies_equal([*training.weights(), *training.moments()])
    sync.close()


def overflow_falls_back(case: SyncCase) -> list[str]:
    """Changes beyond fp16 travel exactly; the warnings of twelve such syncs."""
    training = Training(case)
    sync = training.build_sync()
    tensors = training.weights()
    for _ in range(12):
        with torch.no_grad():
            # Only one copy overflows; all of them must fall back together.
            for shard in training.model.table_shards():
                shard.weight.fill_(0.0)
        sync.reset()
        training.train()
        if training.copy == 0:
            for shard in training.model.table_shards():
                shard.weight.mul_(1e12)
        means = training.mean_of(tensors)
        sync()
        assert_bitwise(tensors, means)
        training.assert_copies_equal(tensors)
    sync.close()
    return training.warnings


def weight_decay_is_full(case: SyncCase) -> tuple[float, list[str]]:
    """(density, warnings) where every step changes every row; the copies end equal."""
    training = Training(case)
    sync = training.build_sync()
    training.train(3)
    report = sync()
    training.assert_copies_equal([*training.weights(), *training.moments()])
    sync.close()
    return report.density, training.warnings


def syncs_by_level_change_no_bit(case: SyncCase) -> None:
    """Host by host a sync has the result that it has without regard to hosts."""
    training = Training(case)
    assert form_replica_levels(training.groups)
    by_level = training.build_sync()
    with patch("trainer.parallel.sync.form_replica_levels", return_value=()):
        flat = training.build_sync()
    tensors = [*training.weights(), *training.moments()]
    for _ in range(2):
        training.train(2)
        before, found = clones(tensors), []
        for sync in (by_level, flat):
            restore(tensors, before)
            sync()
            sync.finish()
            found.append(clones(tensors))
        assert_bitwise(*found)
        assert any(not torch.equal(*pair) for pair in zip(before, found[0], strict=True))
        training.assert_copies_equal(tensors)
    by_level.close()
    flat.close()


def bytes_by_level(case: SyncCase, numel: int) -> dict[torch.dtype, int]:
    """Bytes that a rank sends for the mean of `numel` numbers, which are those of one level."""
    groups = Training(case).groups
    levels = [*map(WorldReplicaGroup, form_replica_levels(groups))]
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        values, means = (torch.randn(numel) * 100).to(dtype), []
        for over in ([WorldReplicaGroup(groups.replica_group)], levels):
            replicas = ReplicaCollectives(over, groups.device)
            means.append(torch.empty_like(values))
            run_exchange(replicas.average(values, means[-1]))
        assert torch.equal(*means)
        found[dtype] = replicas.num_bytes
    return found


def price_of_syncs(case: SyncCase) -> list[tuple[float, int]]:
    """(density, bytes) of a sync after a step, of one after none, and of a dense one.

    The first is made again, so that it lands in a flush: what it sent by then, and the next one.
    """
    training = Training(case)
    sync = training.build_sync()
    training.train()
    reports = [sync(), sync()]
    training.train(40)
    reports.append(sync())
    sync.close()
    training = Training(case)
    sync = training.build_sync(overlap=True)
    training.train()
    reports.append(sync())
    sync.flush()
    reports.append(sync())
    sync.close()
    return [(each.density, each.num_bytes) for each in reports]


@pytest.fixture(params=MODES, ids=["touched_rows", "full"])
def case(request: pytest.FixtureRequest) -> SyncCase:
    """A case in each mode."""
    return replace(CASE, sync=request.param)


def test_overlapped_means_land_as_a_difference(case: SyncCase) -> None:
    runs = (*((name, 1) for name in OPTIMIZERS), ("adagrad", 4))
    calls = [
        (overlapped_keeps_what_was_learned, replace(case, optimizer=optimizer), num_steps)
        for optimizer, num_steps in runs
    ]
    assert all(number > 0 for moved in run_in_turn(2, *calls) for number in moved)


def test_delayed_moments_lag_one_sync(case: SyncCase) -> None:
    cases = [replace(case, optimizer=optimizer) for optimizer in STATEFUL]
    runs = run_in_turn(2, *((delayed_moments_lag_one_sync, each) for each in cases))
    assert all(differed for ranks in runs for differed in ranks)


def test_moments_that_are_never_synced_are_equal_after_a_flush() -> None:
    run_ranks(moments_stay_until_a_flush, 2, replace(CASE, sync=MODES[0]))


def test_a_flush_makes_all_copies_equal_whatever_the_policy(case: SyncCase) -> None:
    run_ranks(flush_is_exact, 3, replace(case, world_size=3))


@pytest.mark.parametrize(
    ("dtype", "precision", "overlap"), [("bf16", 2.0**-8, True), ("fp16", 2.0**-11, False)]
)
def test_changes_in_half_precision_err_by_a_rounding_on_the_way_and_one_back(
    case: SyncCase, dtype: str, precision: float, overlap: bool
) -> None:
    half = replace(case, optimizer="sgd", sync=case.sync | {"dtype": dtype})
    for errors in run_ranks(errors_of_changes, 2, half, overlap):
        for error, largest in errors:
            assert largest > 0
            # Half a unit each, and fp32's own rounding of weights below 1.
            assert error <= precision * largest + 2.0**-23


def test_overlapped_changes_in_half_precision_bring_copies_together(case: SyncCase) -> None:
    half = replace(case, optimizer="adagrad", sync=case.sync | {"dtype": "bf16"})
    run_ranks(overlapped_changes_agree_later, 2, half)


def test_a_change_too_large_for_fp16_travels_in_fp32_on_all_copies(case: SyncCase) -> None:
    half = replace(case, optimizer="sgd", sync=case.sync | {"dtype": "fp16"})
    first, other = run_ranks(overflow_falls_back, 2, half)
    # Told by one rank of the replica group, at the first such sync and at the tenth.
    assert ["so far: 1." in first[0], "so far: 10." in first[1]] == [True, True]
    assert len(first) == 2 and other == []


def test_weight_decay_switches_touched_rows_off_with_a_warning() -> None:
    decayed = replace(CASE, weight_decay=0.1, sync=MODES[0])
    (density, (warning,)), other = run_ranks(weight_decay_is_full, 2, decayed)
    assert density == 1.0
    assert "optimizer.sparse.weight_decay (0.1)" in warning
    assert other == (1.0, [])


def test_a_sync_costs_what_was_touched_and_falls_back_to_full_when_that_is_most() -> None:
    tables = (Table(3000), Table(500))
    for prices in run_ranks(price_of_syncs, 2, replace(CASE, tables=tables, batch_size=60)):
        (some, some_bytes), (none, none_bytes), (all_, all_bytes), *late = prices
        assert 0 < some < 0.2
        assert none == 0
        assert none_bytes == 2 * (2 - 1) * (3500 // 8 // 2 + 1)  # 2 (M - 1) / M of the bitmap
        assert all_ == 1.0
        assert none_bytes < some_bytes < 0.25 * all_bytes
        # With the next sync: what landed in the flush, whose bitmap counts, too.
        assert late == [(some, none_bytes), (none, some_bytes + none_bytes)]


@pytest.mark.parametrize(
    ("world_size", "first_seed"),
    [
        (4, 0),  # M = 2 (L = 2) and M = 4 (L = 1)
        pytest.param(4, 100, marks=pytest.mark.slow),
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(3, 100, marks=pytest.mark.slow),
    ],
)
def test_touched_rows_equal_the_full_all_reduce(world_size: int, first_seed: int) -> None:
    seeds = range(first_seed, first_seed + CASES_A_RUN)
    runs = [random_case(seed, world_size) for seed in seeds]
    densities = run_ranks(check_cases, world_size, runs)
    assert any(0 < density < 1 for rank in densities for density in rank)


def test_rows_that_nobody_touched_never_drift_though_three_copies_round() -> None:
    case = SyncCase(3, 1, tables=(Table(300), Table(200)))
    for shares in run_ranks(untouched_rows, 3, case):
        assert shares["touched_rows"] == 0
        assert shares["full"] > 0.1


def test_touched_rows_stay_exact_in_tables_loaded_at_another_layout(tmp_path: Path) -> None:
    before = SyncCase(4, 2, tables=(Table(40), Table(9, num_features=2), Table(30, "table_wise")))
    after = SyncCase(4, 1, tables=before.tables, placement="inter_host")
    for first, second in run_ranks(check_resharded, 4, before, after, tmp_path / "step"):
        assert first == 0
        assert 0 < second < 1


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "sync"),
    [
        (4, 2, {"mode": "full", "dtype": "fp16"}),
        (4, 2, {"mode": "touched_rows", "full_above": 1.0, "dtype": "bf16", "overlap": True}),
        pytest.param(8, 4, {"mode": "touched_rows", "full_above": 1.0}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"mode": "full"}, marks=pytest.mark.slow),
    ],
)
def test_a_sync_host_by_host_changes_no_bit(
    num_ranks: int, ranks_per_host: int, sync: dict[str, Any]
) -> None:
    case = replace(
        CASE, world_size=num_ranks, ranks_per_host=ranks_per_host, tables=TABLES, sync=sync
    )
    run_ranks(syncs_by_level_change_no_bit, num_ranks, case)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)]
)
def test_a_sync_host_by_host_sends_other_hosts_only_what_hosts_have_summed(
    num_ranks: int, ranks_per_host: int
) -> None:
    case = replace(CASE, world_size=num_ranks, ranks_per_host=ranks_per_host)
    part = 1000  # numbers for each rank
    for found in run_ranks(bytes_by_level, num_ranks, case, part * num_ranks):
        for dtype, num_bytes in found.items():
            size = dtype.itemsize
            inside = 2 * (ranks_per_host - 1) * part * num_ranks // ranks_per_host * size
            others = num_ranks // ranks_per_host - 1
            assert num_bytes == inside + others * part * (max(4, size) + size)

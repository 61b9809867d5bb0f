"""Training runs that show what each sync policy does, on every rank; M = 2 unless a case says so.

Each function checks its claims on its own rank, against means that the test forms itself.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.integration.ranks.sync_cases import SyncCase, Training, assert_bitwise, clones


def overlapped_equals_immediate(case: SyncCase) -> None:
    """Finished before another step, an overlapped sync has the result of one that does not."""
    training = Training(case)
    sync = training.build_sync(overlap=True)
    for _ in range(2):
        training.train(2)
        tensors = [*training.weights(), *training.moments()]
        means = training.mean_of(tensors)
        before = clones(tensors)
        sync()
        assert_bitwise(tensors, before)  # nothing is applied yet
        sync.finish()
        assert_bitwise(tensors, means)
    sync.close()


def overlapped_keeps_what_was_learned(case: SyncCase) -> int:
    """Means land as a difference after the next step; the number of values that had moved on."""
    training = Training(case)
    sync = training.build_sync(overlap=True)
    moved = 0
    for _ in range(3):
        training.train()
        tensors = [*training.weights(), *training.moments()]
        snapshots, means = clones(tensors), training.mean_of(tensors)
        sync()
        training.train()
        currents = clones(tensors)
        sync.finish()
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
    assert sync.flush().density == 0
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


def small_updates_survive(case: SyncCase) -> tuple[float, float]:
    """(mean change applied, mean change meant) where weights are large and updates small."""
    training = Training(case)
    with torch.no_grad():
        for weight in training.weights():
            weight.fill_(8.0)
    sync = training.build_sync()
    sync.reset()
    training.train()
    means = training.mean_of(training.weights())
    sync()
    sync.close()
    applied = sum((weight - 8.0).abs().sum().item() for weight in training.weights())
    meant = sum((mean - 8.0).abs().sum().item() for mean in means)
    return applied, meant


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


def price_of_syncs(case: SyncCase) -> list[tuple[float, int]]:
    """(density, bytes) of a sync after a step, of one after none, and of a dense one."""
    training = Training(case)
    sync = training.build_sync()
    training.train()
    first = sync()
    second = sync()
    training.train(40)
    third = sync()
    sync.close()
    return [(each.density, each.num_bytes) for each in (first, second, third)]


def evaluation_touches_nothing(case: SyncCase) -> float:
    """Density of a sync after a forward pass without gradients and one in eval mode."""
    from tests.integration.ranks.sync_cases import make_batch

    training = Training(case)
    sync = training.build_sync()
    batch = make_batch(case, 1, training.groups.rank, training.copy)
    with torch.no_grad():
        training.model(batch)
    training.model.eval()
    training.model(batch)
    density = sync().density
    sync.close()
    return density

"""Syncs between groups that are worlds of their own, on real gloo ranks and a real coordinator."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from tests.harness.small_model import pairwise_mean
from tests.harness.wait import wait_for
from tests.integration.elastic.group_sync_cases import (
    EXCHANGE_TIMEOUT_S,
    Groups,
    Life,
    assert_all_equal,
    open_coordinator,
    run_groups,
)
from tests.integration.ranks.sync_cases import Table, clones
from trainer.coordination.client import Refused
from trainer.coordination.messages import Arrive, Round, RoundResult, Vote
from trainer.elastic.coordinator.server import Coordinator
from trainer.elastic.group_sync import ExchangeError
from trainer.parallel.sync import PendingSync, apply_difference
from trainer.spec.parallelism import DivergenceCheckSpec

WEIGHTS = (8, 24)
SYNCS = {  # what the policy changes to before a sync
    "touched_rows": {"full_above": 1.0},
    "above": {"full_above": 0.0},
    "retried": {"full_above": 1.0},
}


def _sync_with_weights(groups: Groups) -> dict[str, Any]:
    """What this rank held before and after each sync, and at the second try of a failed one."""
    group = dist.get_rank() // groups.num_ranks
    life = Life(groups, group)
    life.join()
    life.exchange()
    found: dict[str, Any] = {}
    for name, changes in SYNCS.items():
        life.sync._spec = life.sync._spec.model_copy(update=changes)
        life.train()
        before = life.state()
        if name == "retried":
            found["at_retry"] = _fail_once(life)
        _, report = life.exchange(WEIGHTS[group])
        found[name] = (before, life.state(), report)
    found["ahead"] = _train_ahead(life, WEIGHTS[group])
    _fail_once(life)
    *_, result = _train_ahead(life, WEIGHTS[group])
    assert not result.committed
    # What was trained before and after the round that failed.
    result, _ = life.exchange(2 * WEIGHTS[group], num_leases=2)
    assert result.committed
    found["hashes"] = life.hashes
    found["progress"] = life.member.heartbeats()[0].progress
    found["num_row_tensors"] = len(life.training.model.table_shards()) * 2
    life.end()
    return found


def _train_ahead(life: Life, num_rows: int, lands: bool = False) -> tuple[Any, ...]:
    """States at the beginning of a sync, before and after its averages are applied, and how it
    ended; where it `lands` another step is trained before it ends.
    """
    life.train()
    snapshot = life.state()
    assert life.begin(num_rows, may_overlap=True)
    life.train()
    before = life.state()
    if lands:
        life.sync.land()
        after = life.state()
        life.train()
    result, _ = life.finish()
    life.hashes.pop(life.ledger.commit, None)  # it holds more than what is committed
    return snapshot, before, after if lands else life.state(), result


def _fail_once(life: Life) -> list[list[torch.Tensor]]:
    """Let group 1 fail in the next round, with averages at hand; what is held at each arrival."""
    vote, arrive = life.member.vote, life.member.arrive
    states: list[list[torch.Tensor]] = []

    def failing(own: Vote) -> RoundResult:
        fails = life.group == 1 and len(states) == 1
        return vote(own.model_copy(update={"ok": False, "error": "a test"}) if fails else own)

    def arriving(arrival: Arrive) -> Round:
        states.append(life.state())
        return arrive(arrival)

    life.member.vote, life.member.arrive = failing, arriving  # type: ignore[method-assign]
    return states


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same by rank: two groups of two."""
    return run_groups(_sync_with_weights, 4, tmp_path_factory.mktemp("attempt"), num_ranks=2)


def _is_mean(shard: int, name: str, weighted: list[dict[str, Any]]) -> None:
    """The sync made the weighted mean of every row that differed and left the others alone."""
    copies = (weighted[shard], weighted[shard + 2])
    num_row_tensors = copies[0]["num_row_tensors"]
    pairs = zip(copies[0][name][0], copies[1][name][0], copies[0][name][1], strict=True)
    for number, (mine, theirs, after) in enumerate(pairs):
        parts = torch.stack([mine, theirs])
        mean = pairwise_mean(parts.view(2, -1), WEIGHTS).view_as(mine)
        if number < num_row_tensors and name != "above":
            differs = (mine != theirs).view(mine.shape[0], -1).any(dim=1)
            assert bool(differs.any()) and not bool(differs.all())
            mean[~differs] = mine[~differs]
        assert torch.equal(after, mean)


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("shard", [0, 1])
def test_copies_become_their_mean_weighted_by_rows(
    shard: int, name: str, weighted: list[dict[str, Any]]
) -> None:
    _is_mean(shard, name, weighted)


def test_all_groups_hold_the_same_bits_after_every_commit(weighted: list[dict[str, Any]]) -> None:
    assert_all_equal([each["hashes"] for each in weighted], 2)
    assert set(weighted[0]["hashes"]) == {1, 2, 3, 4, 6}


def test_a_round_that_fails_changes_nothing_and_is_tried_again(
    weighted: list[dict[str, Any]],
) -> None:
    for rank in weighted:
        first, second, *_ = rank["at_retry"]
        for tensor, at_first, at_retry in zip(rank["retried"][0], first, second, strict=True):
            assert torch.equal(tensor, at_first)
            assert torch.equal(tensor, at_retry)


@pytest.mark.parametrize("shard", [0, 1])
def test_what_is_trained_while_the_means_are_formed_is_kept_on_top_of_them(
    shard: int, weighted: list[dict[str, Any]]
) -> None:
    ours, theirs = weighted[shard]["ahead"], weighted[shard + 2]["ahead"]
    for mine, other, before, after in zip(ours[0], theirs[0], *ours[1:3], strict=True):
        mean = pairwise_mean(torch.stack([mine, other]).view(2, -1), WEIGHTS).view_as(mine)
        mean = torch.where(mine == other, mine, mean)
        assert torch.equal(after, apply_difference(before, mine, mean))


def test_each_exchange_is_progress_that_the_heartbeats_tell(weighted: list[dict[str, Any]]) -> None:
    assert all(rank["progress"] > len(rank["hashes"]) for rank in weighted)


def test_a_sync_reports_what_it_moved(weighted: list[dict[str, Any]]) -> None:
    touched, above = weighted[0]["touched_rows"][2], weighted[0]["above"][2]
    assert 0 < touched.density < above.density == 1
    assert 0 < touched.num_bytes < above.num_bytes


def _sync_changes(groups: Groups, sync: dict[str, Any]) -> dict[str, Any]:
    """What this rank agreed on, held before and held after syncs in half precision, by name."""
    group = dist.get_rank()
    life = Life(groups, group, optimizer="adagrad", lr=0.01, sync=sync)
    life.join()
    life.exchange()
    found: dict[str, Any] = {}
    agreed = life.state()
    for name in ("plain", "retried", "exact"):
        life.train()
        before = life.state()
        if name == "retried":
            _fail_once(life)
        life.exchange(WEIGHTS[group], needs_exact=name == "exact")
        found[name] = (agreed, before, agreed := life.state())
    snapshot, before, after, _ = _train_ahead(life, WEIGHTS[group], lands=True)
    agreed = [new - (b - a) for a, b, new in zip(snapshot, before, after, strict=True)]
    _fail_once(life)
    *_, result = _train_ahead(life, WEIGHTS[group], lands=True)
    before = life.state()
    assert not result.committed
    life.exchange(2 * WEIGHTS[group], num_leases=2)
    found["after_failure"] = (agreed, before, life.state())
    found["hashes"] = life.hashes
    life.end()
    return found


@pytest.mark.parametrize(
    "sync",
    [
        {"dtype": "bf16"},
        {"dtype": "bf16", "mode": "full"},
        {"dtype": "fp16", "full_above": 0.0},
    ],
    ids=["bf16", "full", "fp16"],
)
def test_changes_travel_in_half_precision_from_the_last_commit_on(
    sync: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = run_groups(_sync_changes, 2, tmp_path, sync)
    assert_all_equal([ours["hashes"], theirs["hashes"]], 1)
    assert set(ours["hashes"]) == {1, 2, 3, 4, 6}
    for name in ("plain", "retried", "exact", "after_failure"):
        worst = 0.0
        for agreed, mine, after, other in zip(*ours[name], theirs[name][1], strict=True):
            mean = pairwise_mean(torch.stack([mine, other]).view(2, -1), WEIGHTS).view_as(mine)
            largest = max((copy - agreed).abs().max().item() for copy in (mine, other))
            error = (after - mean).abs().max().item()
            # Half a unit of the change on the way, and of its mean on the way back.
            assert error <= 2.0**-8 * largest + 2.0**-22, name
            worst = max(worst, error)
        # What is exact errs by the rounding of rows that no copy touched.
        assert (worst > 2.0**-21) is (name != "exact"), name


def _leave_state(groups: Groups, sync: dict[str, Any]) -> dict[str, Any]:
    """What this rank held before and after syncs that average optimizer state where exact."""
    group = dist.get_rank()
    life = Life(groups, group, optimizer="adagrad", sync=sync)
    life.join()
    life.exchange()
    found: dict[str, Any] = {"are_states": life.are_states}
    for name in ("first", "retried", "exact", "last", "untrained"):
        if name != "untrained":
            life.train()
        before = life.state()
        if name == "retried":
            _fail_once(life)
        is_exact = name in ("exact", "untrained")
        life.exchange(WEIGHTS[group] if name != "untrained" else 0, needs_exact=is_exact)
        assert life.sync.is_exact is is_exact
        found[name] = (before, life.state())
    found["hashes"] = life.hashes
    life.end()
    return found


@pytest.mark.parametrize("mode", ["touched_rows", "full"])
def test_state_that_is_never_synced_stays_until_a_round_that_is_exact(
    mode: str, tmp_path: Path
) -> None:
    sync = {"mode": mode, "optimizer_state": "never"}
    ours, theirs = run_groups(_leave_state, 2, tmp_path, sync)
    assert_all_equal([ours["hashes"], theirs["hashes"]], 1)
    assert set(ours["hashes"]) == {1, 2, 3, 4, 5, 6}
    for name in ("first", "retried", "exact", "last", "untrained"):
        weights = (1, 1) if name == "untrained" else WEIGHTS
        held = zip(ours["are_states"], *ours[name], theirs[name][0], strict=True)
        for is_state, mine, after, other in held:
            mean = pairwise_mean(torch.stack([mine, other]).view(2, -1), weights).view_as(mine)
            if is_state and name not in ("exact", "untrained"):
                assert torch.equal(after, mine)
            else:
                torch.testing.assert_close(after, mean, rtol=2.0**-22, atol=0)
            assert bool((mine != other).any()) is (is_state or name != "untrained")


def _delay_moments(groups: Groups, sync: dict[str, Any]) -> dict[str, Any]:
    """The moments that this rank held before and after syncs.

    The third fails at first, and at the fifth group 1 could not form the means of the fourth.
    """
    group = dist.get_rank()
    life = Life(groups, group, optimizer="adagrad", sync=sync)
    life.join()
    life.exchange()
    found: dict[str, Any] = {}
    for name in ("first", "second", "retried", "fourth", "refused", "exact"):
        life.train()
        before = clones(life.training.shard_moments())
        if name == "retried":
            _fail_once(life)
        if name == "refused" and group == 1:
            assert life.sync._delayed
            life.sync._delayed = replace(life.sync._delayed, wait=_refuse)
        life.exchange(WEIGHTS[group], needs_exact=name == "exact")
        found[name] = (before, clones(life.training.shard_moments()))
    found["hashes"] = life.hashes
    life.end()
    return found


def _sync_buffers(groups: Groups) -> list[list[float]]:
    """[mean, count, flag] of a module of this rank after syncs: weighted, alone, overlapping."""
    group = dist.get_rank()
    life = Life(groups, group)
    module = life.training.model.module
    for name, value in (("mean", 0.0), ("count", 0), ("flag", False)):
        module.register_buffer(name, torch.tensor(value))
    module.register_buffer("constant", torch.tensor(float(group)), persistent=False)
    life.join()
    life.exchange()
    found = []
    for num_rows in (WEIGHTS[group], 8 * group):
        life.train()
        module.mean, module.count = torch.tensor(group + 1.0), torch.tensor(2**40 + group)
        module.flag = torch.tensor(group == 0)
        life.exchange(num_rows)
        found.append([each.item() for each in (module.mean, module.count, module.flag)])
    life.train()
    assert life.begin(WEIGHTS[group], may_overlap=True)
    module.mean += 1.0
    module.count += 1
    life.train()
    life.finish()
    found.append([each.item() for each in (module.mean, module.count, module.flag)])
    assert module.constant.item() == group
    life.end()
    return found


def test_module_buffers_become_means_or_those_of_a_copy_that_counts(tmp_path: Path) -> None:
    ours, theirs = run_groups(_sync_buffers, 2, tmp_path)
    count = 2**40
    assert ours[0] == theirs[0] == [pytest.approx(1.75), count, True]
    assert ours[1] == theirs[1] == [2.0, count + 1, False], "group 0 has trained nothing"
    assert ours[2] == theirs[2] == [3.0, count + 2, False], "what changed meanwhile is kept"


def _refuse() -> None:
    raise ExchangeError("a test lets it fail")


@pytest.mark.parametrize("mode", ["touched_rows", "full"])
def test_delayed_moments_come_with_the_next_commit_unless_a_round_fails_before(
    mode: str, tmp_path: Path
) -> None:
    sync = {"mode": mode, "optimizer_state": "delayed"}
    ours, theirs = run_groups(_delay_moments, 2, tmp_path, sync)
    assert_all_equal([ours["hashes"], theirs["hashes"]], 1)
    for number in range(len(ours["first"][0])):
        before, mean, after = {}, {}, {}
        for name in ("first", "second", "retried", "fourth", "refused", "exact"):
            before[name], after[name] = (held[number] for held in ours[name])
            parts = torch.stack([before[name], theirs[name][0][number]])
            mean[name] = pairwise_mean(parts.view(2, -1), WEIGHTS).view_as(before[name])
            assert not torch.equal(*parts)
        assert torch.equal(after["first"], before["first"])
        _is_close(
            after["second"], apply_difference(before["second"], before["first"], mean["first"])
        )
        for failed in ("retried", "refused"):
            assert torch.equal(after[failed], before[failed]), "delayed means are forgotten"
        moved = apply_difference(before["fourth"], before["retried"], mean["retried"])
        _is_close(after["fourth"], moved)
        _is_close(after["exact"], mean["exact"])


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the rounding of rows that are equal on all copies."""
    torch.testing.assert_close(found, wanted, rtol=2.0**-21, atol=0)


def _flip_a_bit(groups: Groups, sync: dict[str, Any]) -> dict[int, str]:
    """Copies are compared at every second commit; a bit of group 1 flips after the third."""
    check = DivergenceCheckSpec(every_syncs=2)
    life = Life(groups, dist.get_rank(), sync=sync, check=check, tables=(Table(2000), Table(37)))
    life.join()
    has_listened, num_trained = False, 0
    while num_trained < 3:
        if (life.group, life.ledger.commit, has_listened) == (1, 3, False):
            weight = life.training.model.table_shards()[0].weight
            weight.view(torch.int32)[1999, 0] ^= 1
        life.interval()
        standing = life.standing_of(1, 0)
        has_listened |= standing == "listening"
        num_trained += has_listened and standing == "current"
    life.end()
    return life.hashes


@pytest.mark.parametrize(
    "sync", [{}, {"dtype": "bf16", "optimizer_state": "never"}], ids=["every", "never"]
)
def test_a_group_with_a_flipped_bit_is_found_and_copies_another(
    sync: dict[str, Any], tmp_path: Path
) -> None:
    whole, flipped = run_groups(_flip_a_bit, 2, tmp_path, sync, on_divergence="rebroadcast")
    assert_all_equal([whole, flipped], 1)
    assert set(whole) - set(flipped) >= {4}, "it was found at the next check"
    assert len(flipped) >= 6, "it trains again"


def _lose_peers(groups: Groups, gone_on: Path) -> dict[str, Any]:
    """Three groups: one dies in the middle of an exchange, one hangs there, one goes on alone.

    `gone_on` is there once it has.
    """
    life = Life(groups, dist.get_rank())
    life.join()
    times_s, reports = [], []
    for commit in range(1, 6):
        life.train() if life.leases else None
        if (life.group, commit) in ((2, 3), (1, 5)):
            return _fail_in_exchange(life, gone_on if life.group == 1 else None)
        started = time.perf_counter()
        _, report = life.exchange()
        times_s.append(time.perf_counter() - started)
        reports.append(report)
    gone_on.touch()
    life.end()
    return {"hashes": life.hashes, "times_s": times_s, "reports": reports}


def _hangs(gone_on: Path) -> Path:
    """A file that is there once the group hangs."""
    return gone_on.with_name("hangs")


def _fail_in_exchange(life: Life, gone_on: Path | None) -> dict[str, Any]:
    """Leave the others waiting: with a closed connection, or an open one until they went on."""
    form_means = PendingSync.form_means

    def fail(pending: PendingSync) -> None:
        if gone_on is None:
            life.end()
            raise ConnectionError("it died")
        _hangs(gone_on).touch()
        wait_for(gone_on.exists, "a commit of the others")
        form_means(pending)

    PendingSync.form_means = fail  # type: ignore[method-assign]
    with pytest.raises(Refused if gone_on else ConnectionError):
        life.exchange()
    life.end()
    return {"hashes": life.hashes}


def _drop_the_hung(coordinator: Coordinator, hangs: Path) -> None:
    """Drop group 1 once it stands in the fifth sync: what the watch for hangs does, sooner."""
    wait_for(hangs.exists, "group 1 to hang", 120)
    coordinator.request("drop", 1, 0, "hang")


def test_the_others_go_on_when_a_group_dies_or_hangs_in_the_middle_of_an_exchange(
    tmp_path: Path,
) -> None:
    coordinator, gone_on = open_coordinator(3, tmp_path), tmp_path / "gone_on"
    dropping = threading.Thread(target=_drop_the_hung, args=(coordinator, _hangs(gone_on)))
    dropping.start()
    try:
        found = run_ranks(_lose_peers, 3, Groups(coordinator.address, 1), gone_on, fresh=True)
    finally:
        dropping.join()
        coordinator.stop()
    assert_all_equal([each["hashes"] for each in found], 1)
    assert [set(each["hashes"]) for each in found] == [{1, 2, 3, 4, 5}, {1, 2, 3, 4}, {1, 2}]
    survivor = found[0]
    assert survivor["reports"][2].num_bytes > 0
    assert survivor["reports"][4].num_bytes == 0, "one group has nobody to exchange with"
    # Neither waited for the time-out of an operation.
    assert survivor["times_s"][2] < EXCHANGE_TIMEOUT_S / 2
    assert survivor["times_s"][4] < EXCHANGE_TIMEOUT_S / 2

"""Managed collision in buckets: no two ids share a row, and policies evict what they should."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor

from trainer.models import managed_collision
from trainer.models.managed_collision import NO_ID, BucketedIds, mix, with_dynamic_ids
from trainer.parallel.sharding import uniform
from trainer.spec.tables import MAX_INPUT_HASH_SIZE, DynamicSpec

CPU = torch.device("cpu")
IDS = st.integers(0, MAX_INPUT_HASH_SIZE - 1)


def made(num_rows: int = 64, first: int = 0, end: int | None = None, **spec: object) -> BucketedIds:
    fields = {"eviction_interval": 1, "num_buckets": 4, **spec}
    return BucketedIds(num_rows, DynamicSpec.model_validate(fields), CPU, first, end)


def look_up(ids: BucketedIds, raw: list[int]) -> list[int]:
    """Rows of raw ids in one step of training."""
    values = torch.tensor(raw, dtype=torch.int64)
    feature = JaggedTensor(values=values, lengths=torch.tensor([len(raw)]))
    return ids({"t": feature})["t"].values().tolist()


# The last row of each of four buckets.
SHARED_ROWS = {15, 31, 47, 63}


@given(st.lists(IDS, min_size=2, max_size=200, unique=True))
def test_mixing_never_makes_two_ids_one(raw: list[int]) -> None:
    mixed = mix(torch.tensor(raw, dtype=torch.int64)).tolist()
    assert len(set(mixed)) == len(raw)
    assert all(0 <= each < MAX_INPUT_HASH_SIZE for each in mixed)


def test_consecutive_ids_and_multiples_spread_over_the_buckets() -> None:
    for stride in (1, 16, 4096, 2**32):
        buckets = (mix(torch.arange(4096) * stride) >> 58).bincount(minlength=16)
        assert buckets.min() > 180, stride
        assert buckets.max() < 340, stride


@given(
    st.lists(st.lists(IDS, min_size=1, max_size=30), min_size=1, max_size=8),
    st.sampled_from(["lru", "lfu", "distance_lfu"]),
    st.integers(1, 3),
)
def test_an_id_with_a_row_has_it_for_itself(
    steps: list[list[int]], eviction: str, interval: int
) -> None:
    ids = made(eviction=eviction, eviction_interval=interval)
    for raw in steps:
        rows = look_up(ids, raw)
        own = {each: row for each, row in zip(raw, rows, strict=True) if row not in SHARED_ROWS}
        assert len(set(own.values())) == len(own)
        assert all(0 <= row < 64 for row in rows)
    known = ids.ids[ids.ids != NO_ID]
    assert len(known) == len(known.unique())
    assert sorted(ids.rows.tolist()) == list(range(64))
    assert int(ids.open_slots()) == 60 - len(known)
    assert ids.tally.num_admitted - ids.tally.num_evicted == len(known)


def test_until_it_is_admitted_an_id_has_the_row_of_all_that_are_not() -> None:
    ids = made(eviction_interval=2)
    assert set(look_up(ids, [1, 2, 3])) <= SHARED_ROWS
    first = look_up(ids, [1, 2, 3])
    assert not set(first) & SHARED_ROWS
    assert look_up(ids, [3, 2, 1]) == first[::-1]
    assert set(look_up(ids.eval(), [9, 10])) <= SHARED_ROWS
    assert ids._current_iter_tensor.item() == 3


def in_one_bucket(num: int) -> list[int]:
    """Raw ids that all fall into the first of 4 buckets."""
    raw = torch.arange(100_000)
    return raw[mix(raw) < MAX_INPUT_HASH_SIZE // 4][:num].tolist()


def keeps(eviction: str, steps: list[list[int]]) -> set[int]:
    """Which raw ids have rows after `steps`, in buckets of three rows and the shared one."""
    ids = made(16, eviction=eviction)
    for raw in steps:
        look_up(ids, raw)
    raw = sorted({each for step in steps for each in step})
    rows = dict(zip(raw, look_up(ids.eval(), raw), strict=True))
    return {each for each, row in rows.items() if row % 4 != 3}


def test_a_full_bucket_evicts_by_its_policy() -> None:
    a, b, c, d = in_one_bucket(4)
    seen = [[a, a, a], [b, b], [c, c, c, c], [d, d, d]]
    assert keeps("lru", seen) == {b, c, d}
    assert keeps("lfu", seen) == {a, c, d}
    # Counts by age (1 + steps): a 3/4, b 2/3, c 4/2, d 3/1.
    assert keeps("distance_lfu", seen) == {a, c, d}
    assert keeps("lfu", [[a, a], [b, b], [c, c], [d]]) == {a, b, c}


def test_evictions_are_told_once_and_counted() -> None:
    a, b, c, d = in_one_bucket(4)
    ids = made(16, eviction="lru")
    rows = look_up(ids, [a, b, c])
    told = ids.evict()
    assert told is not None and told.tolist() == sorted(rows)
    assert ids.evict() is None
    (row,) = look_up(ids, [d])
    evicted = ids.evict()
    assert evicted is not None and evicted.tolist() == [row]
    assert row in rows
    assert (ids.tally.num_admitted, ids.tally.num_evicted) == (4, 1)


def test_buckets_give_the_same_rows_wherever_they_are_held() -> None:
    raw = torch.randint(0, 2**61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = made()
    look_up(whole, raw)
    expected = dict(zip(raw, look_up(whole, raw), strict=True))
    for first in range(4):
        part = made(first=first, end=first + 1)
        size = MAX_INPUT_HASH_SIZE // 4
        mine = [each for each in raw if mix(torch.tensor(each)) // size == first]
        look_up(part, mine)
        assert look_up(part, mine) == [expected[each] for each in mine]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "distance_lfu"])
def test_ids_that_come_again_are_held_once_until_they_are_admitted(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = torch.randint(0, 150, (29, 100), generator=torch.Generator().manual_seed(2)).tolist()
    states = []
    for most in (2**20, 50):
        monkeypatch.setattr(managed_collision, "MAX_SEEN", most)
        ids = made(eviction=eviction, eviction_interval=30)
        for raw in drawn:
            look_up(ids, raw)
        held = sum(each.ids.numel() for each in ids._seen)
        assert held == 2900 if most > 2900 else held <= 2 * 150
        look_up(ids, [1, 2, 3])
        states.append(ids.state_dict())
    one, other = states
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("eviction", ["lru", "lfu", "distance_lfu"])
def test_the_state_of_another_number_of_buckets_is_found_out(eviction: str) -> None:
    ids = made(48, eviction=eviction)
    for raw in (range(20), range(10, 60)):
        look_up(ids, list(raw))
        assert ids.has_sound_places()
    for num_buckets in (2, 3, 4, 6, 8):
        other = made(48, eviction=eviction, num_buckets=num_buckets)
        assert other.has_sound_places()
        other.load_state_dict(ids.state_dict())
        assert other.has_sound_places() == (num_buckets == 4)
    ids.rows[0] = ids.rows[1]
    assert not ids.has_sound_places(), "a damaged state is found out, too"


def test_new_weights_depend_on_step_and_row_alone() -> None:
    rows = torch.arange(1000)
    shares = uniform(rows, 16, step=7)
    assert torch.equal(shares[3:5], uniform(rows[3:5], 16, step=7))
    assert not torch.equal(shares, uniform(rows, 16, step=8))
    assert shares.min() >= 0 and shares.max() < 1
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.std() == pytest.approx(12**-0.5, abs=0.01)


def test_an_unsharded_collection_looks_up_the_rows_of_its_ids() -> None:
    config = EmbeddingBagConfig(
        name="users", embedding_dim=4, num_embeddings=64, feature_names=["user"]
    )
    tables = EmbeddingBagCollection(tables=[config], device=CPU)
    bags = with_dynamic_ids(tables, {"users": DynamicSpec(eviction_interval=1, num_buckets=4)})
    weight = bags._embedding_module.embedding_bags["users"].weight
    raw = [5, 2**60, 7]
    keys = KeyedJaggedTensor(
        keys=["user"], values=torch.tensor(raw), lengths=torch.tensor([1, 1, 1])
    )
    bags(keys)
    ids = bags._managed_collision_collection._managed_collision_modules["users"]
    rows = look_up(ids.eval(), raw)
    assert len({*rows} - SHARED_ROWS) == 3
    assert torch.equal(bags.eval()(keys)[0]["user"], weight[rows])

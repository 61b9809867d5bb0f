"""Row containers: gathered, cut and joined as lists in plain Python; rows that do not count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from trainer.data.batches import TrainBatches, drop_padding_ids
from trainer.data.ragged import gather, offsets_of
from trainer.data.reader import open_source
from trainer.data.rows import IdLists, Rows, SparseIds, concat_rows
from trainer.models.managed_collision import NO_ID, BucketedIds
from trainer.spec.job import JobSpec

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=12)


def column_of(lists: list[list[int]], is_weighted: bool = False) -> IdLists:
    ids = np.array([item for items in lists for item in items], dtype=np.int64)
    offsets = offsets_of(np.array([len(items) for items in lists]))
    return IdLists(ids, offsets, (ids / 2).astype(np.float32) if is_weighted else None)


def lists_of(column: IdLists) -> list[list[int]]:
    ends = offsets_of(column.lengths)[1:-1]
    return [part.tolist() for part in np.split(column.ids, ends)]


def rows_of(lists: list[list[int]]) -> Rows:
    """Each row's number as its dense value, label and single id; the lists with weights."""
    number = np.arange(len(lists), dtype=np.float32)
    return Rows(
        **dict.fromkeys(("dense", "label", "offset", "scale"), number[:, None]),
        row_weight=number,
        sparse=SparseIds(
            is_single=(True, False),
            singles=number.astype(np.int32)[:, None],
            lists=(column_of(lists, is_weighted=True),),
        ),
        faults=number.astype(np.int32),
    )


def check(rows: Rows, lists: list[list[int]], numbers: list[int]) -> None:
    """`rows` are those `numbers` of `rows_of(lists)`."""
    single, ragged = rows.sparse.singles[:, 0], rows.sparse.lists[0]
    assert rows.dense[:, 0].tolist() == rows.row_weight.tolist() == numbers
    assert single.tolist() == rows.faults.tolist() == numbers
    assert lists_of(ragged) == [lists[number] for number in numbers]
    assert np.array_equal(ragged.weights, ragged.ids / 2)


@given(lists=LISTS, data=st.data())
def test_rows_are_gathered_cut_and_joined(lists, data) -> None:
    rows = rows_of(lists)
    some = st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=9)
    picked = data.draw(some)
    taken = rows.take(np.array(picked))
    check(taken, lists, picked)
    first = data.draw(st.integers(0, len(picked) - 1))
    stop = data.draw(st.integers(first + 1, len(picked)))
    check(taken.slice(first, stop), lists, picked[first:stop])
    again = data.draw(some)
    joined = concat_rows([taken.slice(first, stop), rows.take(np.array(again))])
    check(joined, lists, picked[first:stop] + again)


@given(lists=LISTS, limit=st.integers(1, 6))
def test_the_last_ids_keep_their_weights(lists, limit) -> None:
    cut = column_of(lists, is_weighted=True).last(limit)
    assert lists_of(cut) == [items[-limit:] for items in lists]
    assert np.array_equal(cut.weights, cut.ids / 2)
    assert (cut.lengths <= limit).all()


FEATURES = st.lists(st.booleans(), min_size=1, max_size=7)


@given(lists=LISTS, is_single=FEATURES, is_weighted=st.booleans(), data=st.data())
def test_ids_are_packed_feature_by_feature_in_any_order(
    lists, is_single, is_weighted, data
) -> None:
    column = column_of(lists, is_weighted)
    numbers = np.arange(len(lists) * sum(is_single), dtype=np.int32)
    ids = SparseIds(
        is_single=tuple(is_single),
        singles=numbers.reshape(len(lists), -1),
        lists=(column,) * (len(is_single) - sum(is_single)),
    )
    count = data.draw(st.integers(0, len(is_single)))
    expected = {True: iter(ids.singles.T.tolist()), False: iter([column.ids.tolist()] * 7)}
    by_feature = [next(expected[each]) for each in is_single]
    first, after = ids.split(count)
    for part, wanted, kinds in (
        (ids, by_feature, is_single),
        (first, by_feature[:count], is_single[:count]),
        (after, by_feature[count:], is_single[count:]),
    ):
        assert part.packed().tolist() == [item for items in wanted for item in items]
        assert part.packed().dtype == np.int64
        ones, lengths = [1] * len(lists), column.lengths.tolist()
        assert part.lengths().tolist() == [ones if each else lengths for each in kinds]
        weights = [[1.0] * len(lists) if each else column.some_weights.tolist() for each in kinds]
        assert part.weights().tolist() == [item for items in weights for item in items]


@given(st.lists(st.integers(), min_size=1, max_size=30), st.data())
def test_gather_reads_any_ranges(values, data):
    ends = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=8))
    starts = [data.draw(st.integers(0, end)) for end in ends]
    found = gather(np.array(values, dtype=object), np.array(starts), np.array(ends))
    parts = [part.tolist() for part in np.split(found.values, found.offsets[1:-1])]
    assert parts == [values[start:end] for start, end in zip(starts, ends, strict=True)]


KEYS = ("a", "b", "c")


@given(st.data())
def test_only_the_chosen_features_lose_ids_and_only_in_rows_of_weight_0(data: st.DataObject):
    num_rows = data.draw(st.integers(1, 6))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=3 * num_rows, max_size=3 * num_rows))
    weight = data.draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=num_rows, max_size=num_rows))
    chosen = data.draw(st.sets(st.sampled_from(KEYS)))
    values = torch.arange(sum(lengths))
    ids = KeyedJaggedTensor(
        keys=list(KEYS), values=values, lengths=torch.tensor(lengths), weights=values.float() / 2
    )
    found = drop_padding_ids(ids, chosen, torch.tensor(weight)).to_dict()
    for key, before in ids.to_dict().items():
        rows = [part.tolist() for part in before.to_dense()]
        is_lost = [key in chosen and not row_weight for row_weight in weight]
        wanted = [[] if lost else row for row, lost in zip(rows, is_lost, strict=True)]
        assert [part.tolist() for part in found[key].to_dense()] == wanted
        assert torch.equal(found[key].weights(), found[key].values() / 2)


def dynamic(spec: JobSpec, name: str) -> JobSpec:
    """The same with a dynamic table for the feature `name`."""
    tables = [
        {**table.model_dump(mode="json"), "num_embeddings": 4096, "dynamic": {"eviction": "lfu"}}
        if table.name == f"{name}_table"
        else table.model_dump(mode="json")
        for table in spec.embedding_tables
    ]
    document = spec.model_dump(mode="json") | {"embedding_tables": tables}
    return JobSpec.model_validate(document)


def test_counts_of_ids_are_those_of_the_rows_and_not_of_what_fills_up_batches(prepared, make_spec):
    spec = dynamic(make_spec(batch_size=37), "user_id")
    table = next(each for each in spec.embedding_tables if each.dynamic)
    ids = BucketedIds(4096, table.dynamic, torch.device("cpu"))
    num_filled = 0
    for rank in range(3):
        with TrainBatches(open_source(spec, prepared / "train"), spec, rank, 3) as batches:
            for batch, _ in batches:
                found = batch.sparse.to_dict()
                num_filled += int((batch.weight == 0).sum())
                assert found["user_id"].lengths().tolist() == batch.weight.tolist()
                assert found["movie_id"].lengths().sum() == 37
                ids({"user_id": found["user_id"]})
    ids.admit()
    assert num_filled > 37
    users = pl.read_parquet(prepared / "train" / "*.parquet")["user_id"].to_list()
    counts = ids.counts[ids.ids != NO_ID]
    assert sorted(counts.tolist()) == sorted(Counter(users).values())

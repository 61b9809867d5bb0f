"""Rows that do not count, and dynamic tables: such rows have no ids that could be seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from trainer.data.batches import TrainBatches
from trainer.data.reader import open_source
from trainer.data.uncounted import without_uncounted
from trainer.parallel.dynamic_ids import NO_ID, BucketedIds
from trainer.spec import JobSpec

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
    found = without_uncounted(ids, chosen, torch.tensor(weight)).to_dict()
    for key, before in ids.to_dict().items():
        rows = [part.tolist() for part in before.to_dense()]
        is_lost = [key in chosen and not row_weight for row_weight in weight]
        wanted = [[] if lost else row for row, lost in zip(rows, is_lost, strict=True)]
        assert [part.tolist() for part in found[key].to_dense()] == wanted
        assert torch.equal(found[key].weights(), found[key].values() / 2)


def dynamic(spec: JobSpec, name: str, **changes: Any) -> JobSpec:
    """The same with a dynamic table for the feature `name`."""
    tables = [
        {**table.model_dump(mode="json"), "num_embeddings": 4096, "dynamic": {"eviction": "lfu"}}
        if table.name == f"{name}_table"
        else table.model_dump(mode="json")
        for table in spec.embedding_tables
    ]
    document = spec.model_dump(mode="json") | {"embedding_tables": tables} | changes
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

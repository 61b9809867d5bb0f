"""Batches against the Parquet they come from: contents, coverage, resuming, refusals."""

from __future__ import annotations

import shutil
import threading
from collections import Counter

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainer.data.batches import TrainBatches, make_batch, validation_batches
from trainer.data.columns import layout_of
from trainer.data.errors import BadValueError, ColumnError, CorruptFileError, TooFewRowsError
from trainer.data.position import DataPosition
from trainer.data.reader import RowReader, open_source

# (user, label, ids of a list feature): enough to tell rows apart.
Key = tuple[int, float, tuple[int, ...]]


def keys_of(batch) -> list[Key]:
    jagged = batch.sparse.to_dict()
    users = jagged["user_id"].values().tolist()
    histories = [tuple(part.tolist()) for part in jagged["history_liked"].to_dense()]
    stars = (batch.label * batch.label_scale + batch.label_offset)[:, 0].round(decimals=3).tolist()
    counted = batch.weight.tolist()
    rows = zip(users, stars, histories, counted, strict=True)
    return [(user, star, history) for user, star, history, weight in rows if weight]


def keys_in_file(prepared, split) -> Counter[Key]:
    frame = pl.read_parquet(prepared / split / "*.parquet")
    rows = frame.select("user_id", "rating", "history_liked").rows()
    return Counter((user, stars, tuple(history)) for user, stars, history in rows)


@pytest.fixture
def train(prepared, make_spec):
    return open_source(make_spec(), prepared / "train")


def test_a_batch_holds_what_the_file_holds(prepared, make_spec, train):
    spec = make_spec(batch_size=8, shuffle=False)
    expected = pl.read_parquet(prepared / "train" / "part-00000.parquet")[:8]
    with TrainBatches(train, spec, rank=0, world_size=1) as batches:
        batch, position = next(batches)
    assert position == DataPosition(0, 8)
    assert batch.num_rows == 8
    assert batch.sparse.keys() == [feature.name for feature in spec.sparse_features]
    assert batch.sparse.lengths().dtype == torch.int32
    assert batch.sparse.values().dtype == torch.int64
    for name, jagged in batch.sparse.to_dict().items():
        lists = [part.tolist() for part in jagged.to_dense()]
        wanted = expected[name].to_list()
        assert lists == [item if isinstance(item, list) else [item] for item in wanted]
    dense = expected.select("year", "user_activity").to_numpy()
    assert np.allclose(batch.dense.numpy(), dense)
    label = (expected["rating"] - expected["user_mean"]) / expected["user_scale"]
    assert np.allclose(batch.label[:, 0].numpy(), label.to_numpy(), atol=1e-6)
    assert np.allclose(batch.label_offset[:, 0].numpy(), expected["user_mean"].to_numpy())
    assert np.allclose(batch.label_scale[:, 0].numpy(), expected["user_scale"].to_numpy())
    assert batch.weight.tolist() == [1.0] * 8


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 16), (4, 64), (2, 500)])
def test_an_epoch_over_all_ranks_takes_each_row_once(
    prepared, make_spec, train, world_size, batch_size
):
    spec, taken, counts = make_spec(batch_size=batch_size), Counter(), set()
    for rank in range(world_size):
        with TrainBatches(train, spec, rank, world_size) as batches:
            own = [batch for batch, _ in batches]
        assert {batch.num_rows for batch in own} == {batch_size}
        counts.add(len(own))
        taken.update(key for batch in own for key in keys_of(batch))
    assert len(counts) == 1
    assert taken == keys_in_file(prepared, "train")


def test_epochs_differ_and_a_seed_repeats(make_spec, train):
    def first_keys():
        with TrainBatches(train, make_spec(batch_size=600, epochs=2), 0, 1) as batches:
            return [keys_of(batch) for batch, _ in batches]

    once, again = first_keys(), first_keys()
    half = len(once) // 2
    assert len(once) == 2 * -(-train.num_rows // 600)
    assert once == again
    assert once[0] != once[half]


def test_resuming_at_another_world_size_goes_on_where_the_first_run_stopped(make_spec, train):
    def rows_of_step(position, world_size, batch_size):
        rows = []
        for rank in range(world_size):
            spec = make_spec(batch_size=batch_size)
            with TrainBatches(train, spec, rank, world_size, position) as batches:
                batch, after = next(batches)
            rows += keys_of(batch)
        return rows, after

    whole, _ = rows_of_step(DataPosition(), 1, 200)
    first, position = rows_of_step(DataPosition(), 4, 25)
    second, position = rows_of_step(position, 2, 50)
    assert first + second == whole
    assert position == DataPosition(0, 200)


def test_windows_read_from_disk_give_the_order_of_the_cached_split(make_spec, train):
    def rows(cache_bytes):
        reader = RowReader(
            train, layout_of(make_spec()), seed=5, cache_bytes=cache_bytes, window_rows=300
        )
        return [reader.read(1, range(start, start + 170)) for start in range(0, 1700, 170)]

    for cached, streamed in zip(rows(2**30), rows(0), strict=True):
        assert np.array_equal(cached.ids, streamed.ids)
        assert np.array_equal(cached.lengths, streamed.lengths)
        assert np.array_equal(cached.dense, streamed.dense)
        assert np.array_equal(cached.label, streamed.label)


def test_rows_that_span_windows_are_those_of_the_file(prepared, make_spec, train):
    reader = RowReader(train, layout_of(make_spec()), shuffle=False, window_rows=128)
    rows = make_batch(reader.read(0, range(100, 400)), make_spec())
    expected = pl.read_parquet(prepared / "train" / "*.parquet")[100:400]
    jagged = rows.sparse.to_dict()
    for name in ("movie_id", "history_liked"):
        lists = [part.tolist() for part in jagged[name].to_dense()]
        assert lists == [x if isinstance(x, list) else [x] for x in expected[name].to_list()]
    assert rows.label_offset[:, 0].tolist() == pytest.approx(expected["user_mean"].to_list())


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 16), (4, 64), (2, 500)])
def test_validation_counts_every_row_once_over_all_ranks(
    prepared, make_spec, world_size, batch_size
):
    spec = make_spec(batch_size=batch_size)
    source = open_source(spec, prepared / "validation")
    counted, sizes = Counter(), []
    for rank in range(world_size):
        batches = list(validation_batches(source, spec, rank, world_size))
        assert {batch.num_rows for batch in batches} == {batch_size}
        sizes.append(len(batches))
        counted.update(key for batch in batches for key in keys_of(batch))
    assert len(set(sizes)) == 1
    assert counted == keys_in_file(prepared, "validation")


def test_a_job_with_more_rows_a_step_than_there_are_is_refused(make_spec, train):
    with pytest.raises(TooFewRowsError, match=r"4 workers x data\.batch_size 1000"):
        TrainBatches(train, make_spec(batch_size=1000), rank=0, world_size=4)


def test_closing_early_ends_the_thread(make_spec, train):
    batches = TrainBatches(train, make_spec(epochs=1000), rank=0, world_size=1)
    next(batches)
    batches.close()
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]
    assert list(batches) == []


def test_waiting_is_measured(make_spec, train):
    with TrainBatches(train, make_spec(), rank=0, world_size=1) as batches:
        assert batches.wait_s == 0
        next(batches)
        assert batches.wait_s > 0


def test_a_batch_moves_to_a_device_whole(make_spec, train):
    with TrainBatches(train, make_spec(), rank=0, world_size=1) as batches:
        batch, _ = next(batches)
    moved = batch.to(torch.device("meta"))
    devices = {moved.dense.device, moved.sparse.device(), moved.label.device, moved.weight.device}
    assert {device.type for device in devices} == {"meta"}


@pytest.mark.parametrize(
    ("column", "value", "wanted"),
    [
        ("user_id", 10**6, "an id of the table"),
        ("movie_id", -1, "an id of the table"),
        ("genres", [1, -3], "an id of the table"),
        ("tokens", [0, None], "an id"),
        ("tokens", None, "a value"),
        ("user_id", None, "a value"),
        ("rating", float("nan"), "a finite number"),
        ("rating", float("inf"), "a finite number"),
        ("rating", None, "a value"),
        ("year", float("nan"), "a finite number"),
        ("user_scale", 0.0, "a scale above 0"),
        ("user_scale", -1.0, "a scale above 0"),
        ("user_mean", float("nan"), "a finite number"),
    ],
)
@pytest.mark.parametrize("cache_bytes", [0, 2**28])
def test_a_bad_value_names_file_row_and_column(
    spoil, make_spec, column, value, wanted, cache_bytes
):
    folder = spoil(column, 200, value)
    source = open_source(make_spec(), folder)
    with (
        TrainBatches(source, make_spec(), 0, 1, cache_bytes=cache_bytes) as batches,
        pytest.raises(BadValueError, match=f"row 200, column '{column}'.*{wanted}") as raised,
    ):
        list(batches)
    assert raised.value.path == str(folder / "part-00001.parquet")


BINARY = {
    "dense_arch": {"layer_sizes": [4]},
    "over_arch": {"layer_sizes": [1]},
    "tasks": [{"loss": "bce"}],
}


def rated_as(prepared, tmp_path, labels):
    """Copy the training part with the ratings of its second file replaced, those of others 1."""
    folder = shutil.copytree(prepared / "train", tmp_path / "train")
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path)
        given = labels if path.name == "part-00001.parquet" else ()
        values = [*given, *[1.0] * (len(table) - len(given))]
        index = table.schema.get_field_index("rating")
        stars = pa.array(values, table.schema.field(index).type)
        pq.write_table(table.set_column(index, "rating", stars), path)
    return folder


def test_labels_of_0_and_1_train_with_bce(prepared, make_spec, tmp_path):
    data = {"path": str(prepared), "batch_size": 16, "label": {"column": "rating"}}
    spec = make_spec(data=data, model=BINARY)
    source = open_source(spec, rated_as(prepared, tmp_path, [0.0, 1.0, 0.0]))
    with TrainBatches(source, spec, 0, 1) as batches:
        labels = torch.cat([batch.label[:, 0] for batch, _ in batches])
    assert set(labels.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0])
def test_another_label_is_refused_with_bce(prepared, make_spec, tmp_path, value):
    data = {"path": str(prepared), "batch_size": 16, "label": {"column": "rating"}}
    spec = make_spec(data=data, model=BINARY)
    folder = rated_as(prepared, tmp_path, [0.0, 1.0, value])
    with (
        TrainBatches(open_source(spec, folder), spec, 0, 1) as batches,
        pytest.raises(BadValueError, match=f"row 2, column 'rating': {value} is not 0 or 1") as bad,
    ):
        list(batches)
    assert bad.value.path == str(folder / "part-00001.parquet")


def test_with_bce_the_label_counts_after_its_offset_and_scale(prepared, make_spec, tmp_path):
    label = {"column": "rating", "offset_column": "user_mean"}
    data = {"path": str(prepared), "batch_size": 16, "label": label}
    spec = make_spec(data=data, model=BINARY)
    source = open_source(spec, rated_as(prepared, tmp_path, []))
    with (
        TrainBatches(source, spec, 0, 1) as batches,
        pytest.raises(BadValueError, match=r"column 'rating'.*after its offset and scale"),
    ):
        list(batches)


def test_after_a_fault_there_are_no_more_batches(spoil, make_spec):
    folder = spoil("user_id", 0, -1)
    batches = TrainBatches(open_source(make_spec(), folder), make_spec(), 0, 1)
    with pytest.raises(BadValueError):
        next(batches)
    assert list(batches) == []


def test_a_bad_validation_value_is_named(spoil, make_spec):
    folder = spoil("rating", 3, float("nan"))
    with pytest.raises(BadValueError, match="row 3, column 'rating'"):
        list(validation_batches(open_source(make_spec(), folder), make_spec(), 0, 1))


def test_a_file_cut_short_while_training_is_named(prepared, make_spec, tmp_path):
    folder = shutil.copytree(prepared / "train", tmp_path / "train")
    source = open_source(make_spec(), folder)
    part = folder / "part-00002.parquet"
    part.write_bytes(part.read_bytes()[:2000])
    with (
        TrainBatches(source, make_spec(), 0, 1) as batches,
        pytest.raises(CorruptFileError, match=r"part-00002\.parquet"),
    ):
        list(batches)


def feature(name: str, kind: str, column: str) -> dict[str, str]:
    table = {} if kind == "dense" else {"table": "user_id_table"}
    return {"name": name, "type": kind, "column": column, **table}


@pytest.mark.parametrize(
    ("kind", "column", "message"),
    [
        ("id", "absent", r"features\[1\]\.column: .*no column 'absent'"),
        ("id", "year", r"features\[1\]\.column: column 'year' .* is float, not an integer"),
        ("id", "genres", r"features\[1\]\.column: .* not an integer"),
        ("id_list", "movie_id", r"features\[1\]\.column: .* not a list of integers"),
        ("tokens", "history_ratings", r"features\[1\]\.column: .* not a list of integers"),
        ("dense", "tokens", r"features\[1\]\.column: .* not a number"),
    ],
)
def test_a_missing_or_ill_typed_column_is_named_by_its_spec_field(
    prepared, make_spec, kind, column, message
):
    features = [
        feature("user_id", "id", "user_id"),
        feature("other", kind, column),
        feature("year", "dense", "year"),
    ]
    tables = [{"name": "user_id_table", "embedding_dim": 4, "num_embeddings": 10**6}]
    spec = make_spec(features=features, embedding_tables=tables)
    with pytest.raises(ColumnError, match=message):
        open_source(spec, prepared / "train")


def test_a_missing_label_column_is_named_by_its_spec_field(prepared, make_spec):
    spec = make_spec(data={"path": str(prepared), "label": {"column": "stars"}})
    with pytest.raises(ColumnError, match=r"data\.label\.column: .*no column 'stars'"):
        open_source(spec, prepared / "train")

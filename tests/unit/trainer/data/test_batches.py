"""Batches against the Parquet they come from: contents, labels, weights, coverage, refusals."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

from tests.unit.trainer.conftest import DENSE, SPARSE
from trainer.data import reader
from trainer.data.batches import TrainBatches, ValidationBatches
from trainer.data.decode import check_schema, decode, layout_of
from trainer.data.position import DataPosition
from trainer.data.reader import RowReader, open_source
from trainer.data.rows import Rows
from trainer.errors import BadValueError, ColumnError
from trainer.spec.job import JobSpec
from trainer.spec.model import TaskSpec

# (user, label, ids of a list feature): enough to tell rows apart.
Key = tuple[int, float, tuple[int, ...]]


def keys_of(batch) -> list[Key]:
    """The rows that count."""
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


def test_a_batch_holds_what_the_file_holds(prepared, make_spec, train):
    spec = make_spec(batch_size=8, shuffle=False)
    expected = pl.read_parquet(prepared / "train" / "part-00000.parquet")[:8]
    with TrainBatches(train, spec, rank=0, world_size=1) as batches:
        batch, step = next(batches)
    assert step.end == DataPosition(0, 8)
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
    on_device = batch.to(torch.device("meta")).sparse  # from where nothing can be read
    assert on_device.length_per_key() == batch.sparse.lengths().view(-1, 8).sum(1).tolist()


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 7), (3, 16), (4, 64), (2, 500)])
def test_every_row_counts_once_over_all_ranks_in_equally_many_full_batches(
    prepared, make_spec, split, world_size, batch_size
):
    spec, taken, counts = make_spec(batch_size=batch_size), Counter(), set()
    source = open_source(spec, prepared / split)
    for rank in range(world_size):
        if split == "validation":
            own = [batch for batch, _ in ValidationBatches(source, spec, rank, world_size)]
        else:
            with TrainBatches(source, spec, rank, world_size) as batches:
                own = [batch for batch, _ in batches]
        assert {batch.num_rows for batch in own} == {batch_size}
        counts.add(len(own))
        taken.update(key for batch in own for key in keys_of(batch))
    assert len(counts) == 1
    assert taken == keys_in_file(prepared, split)


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_a_rank_decodes_its_own_part_and_at_most_two_windows_of_others(
    make_spec, prepared, monkeypatch, cache_bytes
):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 300)
    monkeypatch.setattr(reader, "CACHE_BYTES", cache_bytes)
    spec, world_size = make_spec(batch_size=16), 4
    for rank in range(world_size):
        source = open_source(spec, prepared / "train")
        most = 300 + int(source.group_rows.max())  # that a window has
        with (
            patch.object(source, "read_group", wraps=source.read_group) as read,
            TrainBatches(source, spec, rank, world_size) as batches,
        ):
            num_used = sum(int(batch.weight.sum()) for batch, _ in batches)
        num_decoded = sum(int(source.group_rows[call.args[0]]) for call in read.call_args_list)
        assert num_used <= num_decoded <= num_used + 2 * most
        assert num_decoded < source.num_rows


def test_epochs_differ_and_a_seed_repeats(make_spec, train):
    def keys(seed: int) -> list[list[Key]]:
        spec = make_spec(batch_size=600, training={"epochs": 2, "seed": seed})
        with TrainBatches(train, spec, 0, 1) as batches:
            return [keys_of(batch) for batch, _ in batches]

    once, again, other = keys(3), keys(3), keys(4)
    half = len(once) // 2
    assert len(once) == 2 * -(-train.num_rows // 600)
    assert once == again
    assert once[0] != once[half]
    assert once[0] != other[0]


def test_windows_read_from_disk_give_the_order_of_the_cached_split(make_spec, train, monkeypatch):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 300)
    monkeypatch.setattr(reader, "_PICKED_ROWS", 200)

    def rows(cache_bytes):
        monkeypatch.setattr(reader, "CACHE_BYTES", cache_bytes)
        found = RowReader(train, make_spec())
        found.expect(1, [(0, 170), (170, 1500)])
        return [found.read(1, [(start, start + 170)]) for start in range(0, 1700, 170)]

    for cached, streamed in zip(rows(2**30), rows(0), strict=True):
        assert np.array_equal(cached.sparse.packed(), streamed.sparse.packed())
        assert np.array_equal(cached.sparse.lengths(), streamed.sparse.lengths())
        assert all(
            np.array_equal(cached.arrays[name], streamed.arrays[name]) for name in cached.arrays
        )


def test_windows_are_decoded_ahead_in_the_order_in_which_they_are_needed(
    make_spec, train, monkeypatch
):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 300)
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)  # one window ahead
    decode, decoded = RowReader._read_window, []

    def noting(self: RowReader, epoch: int, number: int) -> Rows:
        decoded.append((epoch, number, threading.current_thread().name.split("_")[0]))
        return decode(self, epoch, number)

    monkeypatch.setattr(RowReader, "_read_window", noting)
    with TrainBatches(train, make_spec(training={"epochs": 2}), rank=0, world_size=1) as batches:
        assert sum(int(batch.weight.sum()) for batch, _ in batches) == 2 * train.num_rows
    places = [place for *place, _ in decoded]
    assert places == sorted(places) and len(places) > 4
    # What begins an epoch is needed before it is expected.
    assert {number for _, number, thread in decoded if thread == "batches"} == {0}


def test_rows_that_begin_in_the_open_window_have_the_next_decoded_ahead(
    make_spec, train, monkeypatch
):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 300)
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)  # one window ahead
    found = RowReader(train, make_spec())
    found.expect(0, [(0, 20)])
    found.expect(0, [(20, 40)])
    found.read(0, [(0, 20)])
    assert not found._decoding, "the open one is not decoded once more"
    found.expect(0, [(40, 1500)])
    assert list(found._decoding) == [(0, 1)]
    found.close()


def test_large_row_groups_are_decoded_ahead_as_far_as_memory_allows(make_spec, train, monkeypatch):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 1)  # each row group is a window
    group_bytes = train.decoded_bytes * int(train.group_rows.max()) // train.num_rows
    for num_ahead in (1, 2):
        monkeypatch.setattr(reader, "CACHE_BYTES", num_ahead * group_bytes)
        found = RowReader(train, make_spec())
        found.expect(0, [(0, 1500)])
        found.read(0, [(0, 20)])
        assert len(found._decoding) == num_ahead
        found.close()


def test_closing_early_ends_the_threads(make_spec, train, monkeypatch):
    monkeypatch.setattr(reader, "WINDOW_ROWS", 300)
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)
    before = {*threading.enumerate()}  # of other tests
    batches = TrainBatches(train, make_spec(epochs=1000), rank=0, world_size=1)
    next(batches)
    for _ in range(2):
        batches.close()
    names = [thread.name for thread in {*threading.enumerate()} - before]
    assert not [name for name in names if name.startswith(("batches", "decode"))]
    assert list(batches) == []


BINARY = {
    "dense_arch": {"layer_sizes": [4]},
    "over_arch": {"layer_sizes": [1]},
    "tasks": [{"loss": "bce"}],
}


def test_labels_are_0_or_1_after_offset_and_scale_with_bce(prepared, make_spec, tmp_path):
    def epoch(labels: list[float], **label: str) -> set[float]:
        folder = shutil.copytree(prepared / "train", tmp_path / "train", dirs_exist_ok=True)
        for path in sorted(folder.iterdir()):
            given = labels if path.name == "part-00001.parquet" else []
            frame = pl.read_parquet(path)
            stars = pl.Series("rating", given + [1.0] * (len(frame) - len(given)), pl.Float32)
            frame.with_columns(stars).write_parquet(path)
        data = {"path": str(prepared), "batch_size": 16, "label": {"column": "rating"} | label}
        spec = make_spec(data=data, model=BINARY)
        with TrainBatches(open_source(spec, folder), spec, 0, 1) as batches:
            return {label for batch, _ in batches for label in batch.label[:, 0].tolist()}

    assert epoch([0.0, 1.0, 0.0]) == {0.0, 1.0}
    with pytest.raises(BadValueError, match=r"row 2, column 'rating': 0\.5 is not 0 or 1") as bad:
        epoch([0.0, 1.0, 0.5])
    assert bad.value.path == str(tmp_path / "train" / "part-00001.parquet")
    with pytest.raises(BadValueError, match=r"column 'rating'.*after its offset and scale"):
        epoch([0.0, 1.0, 0.0], offset_column="user_mean")


def test_text_in_one_split_and_numbers_in_the_other_are_not_hashed(make_spec, tmp_path):
    features = [
        {"name": "city", "type": "id", "table": "cities", "hashing": {}},
        {"name": "user_mean", "type": "dense"},
    ]
    tables = [{"name": "cities", "embedding_dim": 4, "num_embeddings": 10}]
    spec = make_spec(features=features, embedding_tables=tables)
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"path": str(tmp_path)})})

    def opened(name, city, train=None):
        (tmp_path / name).mkdir(exist_ok=True)
        row = {"city": city, "user_mean": 3.0, "user_scale": 1.0, "rating": 4.0}
        pl.DataFrame([row]).write_parquet(tmp_path / name / "0.parquet")
        return open_source(spec, tmp_path / name, train)

    train = opened("train", 7)
    opened("validation", 8, train)
    with pytest.raises(ColumnError, match=r"features\[0\].*'city' in .*validation is .*numbers"):
        opened("validation", "8", train)


@pytest.mark.parametrize(
    ("kind", "column", "message"),
    [
        ("id", "movie_ids", "column: .*no column 'movie_ids' .did you mean 'movie_id'.*; it has "),
        ("id", "year", "column: .*column 'year' .* is float, not an integer; store it as such"),
        ("id", "genres", "column: .*not an integer; set features.1..type to id_list"),
        ("id_list", "movie_id", "column: .*not a list of integers; set .*type to id"),
        ("tokens", "history_ratings", "column: .*not a list of integers"),
        ("sequence", "movie_id", "column: .*int64, not a list of integers"),
        ("dense", "tokens", "column: .*not a number"),
        ("id_list", "genres weighted by absent", "weights_column: .*no column 'absent'"),
        ("id_list", "genres weighted by genres", "weights_column: .*not a list of floats"),
    ],
)
def test_a_missing_or_ill_typed_column_is_named_by_its_spec_field(
    prepared, make_spec, kind, column, message
):
    column, _, weights = column.partition(" weighted by ")
    other = {"name": "other", "type": kind, "column": column, "weights_column": weights or None}
    features = [
        {"name": "user_id", "type": "id", "table": "user_id_table"},
        other | ({} if kind == "dense" else {"table": "other"}),
        {"name": "year", "type": "dense"},
    ]
    names = [feature["table"] for feature in features if "table" in feature]
    tables = [{"name": n, "embedding_dim": 4, "num_embeddings": 10**6} for n in names]
    spec = make_spec(features=features, embedding_tables=tables)
    with pytest.raises(ColumnError, match=rf"features\[1\]\.{message}"):
        open_source(spec, prepared / "train")
    spec = make_spec(data={"path": str(prepared), "label": {"column": "stars"}})
    with pytest.raises(ColumnError, match=r"data\.label\.column: .*no column 'stars'"):
        open_source(spec, prepared / "train")
    layout = replace(layout_of(spec), dense=(), sparse=())
    with pytest.raises(ColumnError, match=r"is string, not a number; store numbers, for two cla"):
        check_schema(layout, pa.schema([("stars", pa.string())]), "x")
    twice = pa.schema([("rating", pa.float32()), ("stars", pa.int64()), ("stars", pa.int64())])
    with pytest.raises(ColumnError, match=r"data\.label\.column: .*several columns 'stars'"):
        check_schema(layout, twice, "x")


def test_each_task_has_its_own_column_of_labels_and_names_it(prepared, make_spec):
    def with_task(**task) -> JobSpec:
        spec = make_spec(batch_size=8, shuffle=False)
        tasks = (spec.model.tasks[0], TaskSpec.model_validate(task))
        return spec.model_copy(update={"model": spec.model.model_copy(update={"tasks": tasks})})

    year = {"column": "year", "offset_column": "user_mean"}
    spec = with_task(name="year", loss="mse", label=year)
    with TrainBatches(open_source(spec, prepared / "train"), spec, 0, 1) as batches:
        batch, _ = next(batches)
    rows = pl.read_parquet(prepared / "train" / "part-00000.parquet")[:8]
    assert batch.label.shape == batch.label_offset.shape == batch.label_scale.shape == (8, 2)
    stars = (rows["rating"] - rows["user_mean"]) / rows["user_scale"]
    assert batch.label[:, 0].tolist() == pytest.approx(stars.to_list(), abs=1e-5)
    years = (rows["year"] - rows["user_mean"]).to_list()
    assert batch.label[:, 1].tolist() == pytest.approx(years, abs=1e-5)
    assert batch.label_scale[:, 1].tolist() == [1.0] * 8

    # Differences of large numbers keep their digits.
    late = pa.table({"year": [1.7e9 + 3, 1.7e9 + 50], "user_mean": [1.7e9, 1.7e9]})
    columns = {name: pa.array([1.0] * 2) for name in ("rating", "user_scale", *DENSE)}
    ids = {n: pa.array([1, 2] if t == "id" else [[], [1]], None) for n, t in SPARSE.items()}
    table = pa.table(columns | ids | {name: late[name] for name in late.column_names})
    assert decode(table, layout_of(spec), lambda row: ("", row)).label[:, 1].tolist() == [3, 50]

    layout = layout_of(with_task(name="c", loss="bce", label={"column": "rating"}))
    fields = [label.value.field for label in layout.labels]
    assert fields == ["data.label.column", "model.tasks[1].label.column"]
    source = open_source(make_spec(), prepared / "train")
    with pytest.raises(BadValueError, match=r"column 'rating': .* is not 0 or 1.*quarantine"):
        decode(source.read_group(0), layout, source.locate)


def weighted(prepared) -> dict[str, Any]:
    data = {"path": str(prepared), "batch_size": 64, "label": {"column": "rating"}}
    return data | {"shuffle": False, "weight_column": "user_scale"}


def test_rows_weigh_what_their_column_says_and_padding_nothing(prepared, make_spec):
    spec = make_spec(data=weighted(prepared))
    source = open_source(spec, prepared / "validation")
    weights = torch.cat([batch.weight for batch, _ in ValidationBatches(source, spec, 0, 1)])
    rows = pl.read_parquet(prepared / "validation" / "*.parquet")
    assert weights[: len(rows)].tolist() == pytest.approx(rows["user_scale"].to_list())
    assert len(rows) % 64
    assert set(weights[len(rows) :].tolist()) == {0.0}


@pytest.mark.parametrize("value", [-0.5, float("nan"), None])
def test_a_weight_that_is_no_weight_is_refused(spoil, prepared, make_spec, value):
    spec = make_spec(data=weighted(prepared))
    source = open_source(spec, spoil("user_scale", 77, value))
    with (
        TrainBatches(source, spec, 0, 1) as batches,
        pytest.raises(BadValueError, match=r"row 77, column 'user_scale': .* is not a"),
    ):
        list(batches)

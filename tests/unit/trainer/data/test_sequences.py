"""Sequences cut to their last ids, and weights of pooled ids, against their Parquet."""

from __future__ import annotations

from unittest.mock import Mock

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainer.data import reader
from trainer.data.batches import Batch, TrainBatches, make_batch
from trainer.data.reader import RowReader, open_source
from trainer.errors import BadValueError

LIMIT = 3
SEQUENCE = {"name": "liked", "type": "sequence", "column": "history_liked", "table": "recent"}
SEQUENCE |= {"max_length": LIMIT}
WEIGHTED = {"name": "rated", "type": "id_list", "column": "history_movies", "table": "movies"}
WEIGHTED |= {"weights_column": "history_ratings"}
GENRES = {"name": "genres", "type": "id_list", "table": "genres"}
YEAR = {"name": "year", "type": "dense"}


@pytest.fixture
def spec_of(make_spec):
    """A function that makes a spec with the given features, and the tables that they name."""

    def make(*features, **options):
        names = dict.fromkeys(feature["table"] for feature in features)
        tables = [{"name": name, "embedding_dim": 4} for name in names]
        return make_spec(features=[YEAR, *features], embedding_tables=tables, **options)

    return make


@pytest.fixture
def first_batch(prepared):
    """A function that gives the first batch of the training part, in file order, and its rows."""

    def take(spec):
        with TrainBatches(open_source(spec, prepared / "train"), spec, 0, 1) as batches:
            batch, _ = next(batches)
        frame = pl.read_parquet(prepared / "train" / "part-00000.parquet")
        return batch, frame[: batch.num_rows]

    return take


def lists_of(jagged) -> list[list[int]]:
    return [part.tolist() for part in jagged.to_dense()]


def test_a_batch_holds_last_ids_whole_lists_and_weights_which_are_1_elsewhere(
    spec_of, first_batch
) -> None:
    batch, rows = first_batch(spec_of(GENRES, SEQUENCE, WEIGHTED, batch_size=300, shuffle=False))
    liked = rows["history_liked"].to_list()
    assert max(len(ids) for ids in liked) > LIMIT
    assert batch.sequences.keys() == ["liked"]
    assert lists_of(batch.sequences["liked"]) == [ids[-LIMIT:] for ids in liked]
    assert batch.sequences.weights_or_none() is None
    assert batch.sparse.keys() == ["genres", "rated"]
    genres, rated = batch.sparse["genres"], batch.sparse["rated"]
    assert lists_of(genres) == rows["genres"].to_list()
    assert lists_of(rated) == rows["history_movies"].to_list()
    assert batch.sparse.weights().dtype == torch.float32
    assert [w.tolist() for w in rated.to_dense_weights()] == rows["history_ratings"].to_list()
    assert set(genres.weights().tolist()) == {1.0}


def test_weights_of_a_sequence_are_cut_like_its_ids_and_are_1_elsewhere(
    spec_of, first_batch
) -> None:
    rated = WEIGHTED | {"type": "sequence", "max_length": LIMIT}
    batch, rows = first_batch(spec_of(GENRES, SEQUENCE, rated, batch_size=300, shuffle=False))
    wanted = [ratings[-LIMIT:] for ratings in rows["history_ratings"].to_list()]
    assert [w.tolist() for w in batch.sequences["rated"].to_dense_weights()] == wanted
    assert set(batch.sequences["liked"].weights().tolist()) == {1.0}
    assert batch.sparse.weights_or_none() is None


def test_a_batch_without_one_kind_of_ids_moves_too(spec_of, first_batch) -> None:
    batch, _ = first_batch(spec_of(SEQUENCE))
    assert batch.sparse.keys() == []
    moved = batch.to(torch.device("meta"))
    assert moved.sequences.values().device.type == "meta"
    assert moved.sequences.keys() == ["liked"]
    moved = first_batch(spec_of(WEIGHTED))[0].to(torch.device("meta"))
    assert moved.sequences is None
    parts = (moved.dense, moved.label, moved.weight, moved.sparse.values(), moved.sparse.weights())
    assert {part.device.type for part in parts} == {"meta"}


def test_every_part_of_a_batch_is_kept_for_a_stream() -> None:
    parts = [Mock() for _ in range(7)]
    for batch in (Batch(*parts[:6]), Batch(*parts[:6], sequences=parts[6])):
        batch.record_stream("copy")
    assert [part.record_stream.call_count for part in parts] == [2] * 6 + [1]


@pytest.mark.usefixtures("read_both_ways")
def test_sequences_and_weights_span_windows(prepared, spec_of, monkeypatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_ROWS", 128)
    spec = spec_of(WEIGHTED, SEQUENCE)
    rows = RowReader(open_source(spec, prepared / "train"), spec, shuffle=False)
    batch = make_batch(rows.read(0, [(100, 400)]), spec)
    rows = pl.read_parquet(prepared / "train" / "*.parquet")[100:400]
    wanted = [ids[-LIMIT:] for ids in rows["history_liked"].to_list()]
    assert lists_of(batch.sequences["liked"]) == wanted
    weights = [w.tolist() for w in batch.sparse["rated"].to_dense_weights()]
    assert weights == rows["history_ratings"].to_list()
    assert batch.label_offset[:, 0].tolist() == pytest.approx(rows["user_mean"].to_list())


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([0.5] * 99, r"99 is not the length of column 'history_movies', whose ids it weighs: \d+"),
        (None, r"0 is not the length of column 'history_movies', whose ids it weighs: \d+"),
        (float("inf"), "inf is not a finite weight"),
        ("null", "None is not a weight"),
    ],
)
def test_a_bad_weight_names_file_row_column_and_field(
    spoil, prepared, spec_of, value, found
) -> None:
    column = pl.read_parquet(prepared / "train" / "part-00001.parquet")["history_ratings"]
    row = next(row for row in range(200, len(column)) if len(column[row]) > 1)
    if isinstance(value, float | str):
        value = [*column[row].to_list()[:-1], None if value == "null" else value]
    folder = spoil("history_ratings", row, value)
    spec = spec_of(GENRES, WEIGHTED)
    with (
        TrainBatches(open_source(spec, folder), spec, 0, 1) as batches,
        pytest.raises(BadValueError, match=f"row {row}, column 'history_ratings': {found}") as bad,
    ):
        list(batches)
    assert bad.value.path == str(folder / "part-00001.parquet")
    assert "features[2].weights_column" in str(bad.value)


def test_bags_without_any_id_train_like_others(prepared, spec_of, tmp_path, monkeypatch) -> None:
    """Not one id in a whole batch, pooled or in sequence, weighted or not; lists may be null."""
    table = pq.read_table(prepared / "train" / "part-00000.parquet")
    for name in ("genres", "history_liked", "history_movies", "history_ratings"):
        index = table.schema.get_field_index(name)
        lists = [None if row % 2 else [] for row in range(len(table))]
        empty = pa.array(lists, table.schema.field(index).type)
        table = table.set_column(index, name, empty)
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=100)
    spec = spec_of(GENRES, WEIGHTED, SEQUENCE, batch_size=64)
    source = open_source(spec, tmp_path)
    monkeypatch.setattr(reader, "CACHE_BYTES", 0)
    with TrainBatches(source, spec, 0, 1) as made:
        batches = [batch for batch, _ in made]
    assert sum(batch.weight.sum() for batch in batches) == len(table)
    for batch in batches:
        assert batch.sparse.lengths().tolist() == [0] * (2 * 64)
        assert batch.sequences.lengths().tolist() == [0] * 64
        assert len(batch.sparse.values()) == len(batch.sparse.weights()) == 0

"""Bad rows: refused, or left out, counted once and named by file and reason."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.builders import spec_document
from tests.harness.properties import examples
from trainer.coordination.messages import Lease
from trainer.data import reader
from trainer.data.batches import LeaseBatches, TrainBatches, ValidationBatches
from trainer.data.position import DataPosition
from trainer.data.quarantine import OTHERS, most_quarantined
from trainer.data.reader import open_source
from trainer.errors import BadValueError, CorruptFileError, StorageError, TooManyBadRowsError
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import size_tables


@pytest.fixture
def tolerant(make_spec):
    """A function that makes a spec which leaves bad rows out."""

    def make(batch_size: int = 16, max_bad_share: float = 1.0, **document: Any) -> JobSpec:
        spec = make_spec(batch_size, **document)
        changes = {"on_bad_rows": "quarantine", "max_bad_share": max_bad_share}
        return spec.model_copy(update={"data": spec.data.model_copy(update=changes)})

    return make


def tally(batches) -> Counter[tuple[str, str]]:
    """Rows left out by (file name, reason)."""
    found: Counter[tuple[str, str]] = Counter()
    for batch in batches:
        for (file, reason), num_rows in batch.quarantined.items():
            found[Path(file).name, reason] += num_rows
    return found


def epoch_of(spec: JobSpec, folder: Path, num_ranks: int = 1) -> list:
    source = open_source(spec, folder)
    found = []
    for rank in range(num_ranks):
        with TrainBatches(source, spec, rank, num_ranks) as batches:
            found += [batch for batch, _ in batches]
    return found


@pytest.mark.usefixtures("read_both_ways")
@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("rating", math.inf, "a finite number"),
        ("rating", None, "a value"),
        ("user_scale", -1.0, "a scale above 0"),
        ("user_mean", math.nan, "a finite number"),
        ("year", -math.inf, "a finite number"),
        ("movie_id", -1, "an id of the table"),
        ("user_id", 10**6, "an id of the table"),
        ("movie_id", None, "a value"),
        ("genres", [1, None], "an id"),
        ("genres", [1, 10**9], "an id of the table"),
    ],
)
def test_one_bad_row_is_left_out_and_the_others_train(
    spoil, tolerant, make_spec, column, value, reason
) -> None:
    folder = spoil(column, 77, value)
    batches = epoch_of(tolerant(), folder, num_ranks=3)
    (((file, found), count),) = tally(batches).items()
    assert (file, count) == ("part-00001.parquet", 1)
    assert found.startswith(f"column '{column}' is not {reason}")
    num_rows = open_source(make_spec(), folder).num_rows
    assert sum(batch.weight.sum().item() for batch in batches) == num_rows - 1
    for batch in batches:
        assert torch.isfinite(batch.dense).all()
        assert torch.isfinite(batch.label).all()
    with pytest.raises(BadValueError, match=f"row 77, column '{column}'.*{reason}") as refused:
        epoch_of(make_spec(), folder)
    assert refused.value.path == str(folder / "part-00001.parquet")
    mend = {"year": ".missing, which replaces null and NaN", "user_id": "more num_embeddings"}
    assert f"{mend.get(column, '')}, or leave such rows out by data" in str(refused.value)


def test_the_other_rows_are_what_they_were(spoil, tolerant, prepared) -> None:
    spec = tolerant(batch_size=64, shuffle=False)
    whole = epoch_of(spec, prepared / "train")
    spoilt = epoch_of(spec, spoil("genres", 77, [1, 10**9]))
    assert sum(batch.weight.sum() for batch in whole) == 1 + sum(b.weight.sum() for b in spoilt)
    for before, after in zip(whole, spoilt, strict=True):
        kept = (after.weight > 0).nonzero().flatten()
        assert torch.equal(before.label[kept], after.label[kept])
        old, new = (batch.sparse["genres"].to_dense() for batch in (before, after))
        assert all(torch.equal(old[row], new[row]) for row in kept)


def test_weights_of_another_length_leave_the_row_out(spoil, tolerant) -> None:
    rated = {"name": "rated", "type": "id_list", "column": "history_movies", "table": "movies"}
    column = "history_ratings"
    spec = tolerant(
        features=[{"name": "year", "type": "dense"}, rated | {"weights_column": column}],
        embedding_tables=[{"name": "movies", "embedding_dim": 4}],
    )
    batches = epoch_of(spec, spoil(column, 77, [0.5] * 99))
    reason = f"column '{column}' is not as long as its ids"
    assert dict(tally(batches)) == {("part-00001.parquet", reason): 1}
    assert all(len(b.sparse.weights()) == len(b.sparse.values()) for b in batches)


@pytest.fixture
def three_files(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared / "train", tmp_path / "copy")


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def without_a_column(path: Path) -> None:
    pl.read_parquet(path).drop("movie_id").write_parquet(path, row_group_size=128)


def with_fewer_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path)[:-1], path, row_group_size=128)


@pytest.mark.usefixtures("read_both_ways")
@pytest.mark.parametrize("damage", [truncated, without_a_column, with_fewer_rows])
def test_a_file_that_changes_while_the_job_runs_is_left_out_or_named(
    three_files, tolerant, make_spec, damage
) -> None:
    path = three_files / "part-00001.parquet"
    source = open_source(tolerant(), three_files)
    footer = pq.read_metadata(path)
    damage(path)
    with TrainBatches(source, tolerant(), 0, 1) as batches:
        found = [batch for batch, _ in batches]
    lost = source.num_rows - sum(batch.weight.sum().item() for batch in found)
    assert list(tally(found)) == [(path.name, "row group cannot be read, or has changed")]
    # Of a file that lost its last row only the last row group has changed.
    last_rows = footer.row_group(footer.num_row_groups - 1).num_rows
    assert lost == (last_rows if damage is with_fewer_rows else footer.num_rows)
    with (
        TrainBatches(source, make_spec(), 0, 1) as batches,
        pytest.raises(CorruptFileError, match="part-00001"),
    ):
        list(batches)


@pytest.mark.usefixtures("read_both_ways")
def test_a_lost_row_group_is_left_out_where_some_files_allow_no_null(three_files, tolerant) -> None:
    _, *paths = sorted(three_files.iterdir())
    for path in paths:
        table = pq.read_table(path)
        required = pa.schema([field.with_nullable(False) for field in table.schema])
        pq.write_table(table.cast(required), path, row_group_size=128)
    source = open_source(tolerant(), three_files)
    lost = pq.read_metadata(paths[-1]).num_rows
    for num_rows in (source.num_rows, source.num_rows - lost):
        with TrainBatches(source, tolerant(), 0, 1) as batches:
            assert sum(batch.weight.sum().item() for batch, _ in batches) == num_rows
        truncated(paths[-1])


@pytest.mark.usefixtures("read_both_ways")
def test_storage_or_memory_that_fails_ends_the_job_and_leaves_no_row_out(
    three_files, tolerant, monkeypatch
) -> None:
    source, whole = open_source(tolerant(), three_files), pq.ParquetFile
    for error, raised, message in (
        (OSError(116, "Stale file"), StorageError, r"part-0000\d\.parquet cannot be read.*mounted"),
        (pa.ArrowMemoryError("malloc failed"), MemoryError, "malloc failed"),
    ):
        monkeypatch.setattr(pq, "ParquetFile", Mock(side_effect=error))
        with (
            TrainBatches(source, tolerant(), 0, 1) as batches,
            pytest.raises(raised, match=message),
        ):
            list(batches)
    monkeypatch.setattr(pq, "ParquetFile", whole)
    shutil.rmtree(three_files)
    with TrainBatches(source, tolerant(), 0, 1) as batches, pytest.raises(StorageError):
        list(batches)


@pytest.mark.usefixtures("read_both_ways")
def test_more_bad_rows_than_the_share_end_the_job(three_files, tolerant) -> None:
    spec = tolerant(max_bad_share=0.1)
    source = open_source(spec, three_files)
    truncated(three_files / "part-00001.parquet")
    with (
        TrainBatches(source, spec, 0, 1) as batches,
        pytest.raises(TooManyBadRowsError, match=r"part-00001.*data\.max_bad_share"),
    ):
        list(batches)
    with pytest.raises(TooManyBadRowsError):
        list(ValidationBatches(source, spec, 0, 1))


@pytest.mark.usefixtures("read_both_ways")
def test_the_share_of_bad_rows_is_that_of_one_epoch(spoil, tolerant, monkeypatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_ROWS", 1)  # or each epoch is one window
    source = open_source(tolerant(), spoil("rating", 77, math.nan))
    spec = tolerant(max_bad_share=1.5 / source.num_rows, training={"epochs": 3, "seed": 3})
    with TrainBatches(source, spec, 0, 1) as batches:
        assert tally(batch for batch, _ in batches).total() == 3


@pytest.mark.usefixtures("read_both_ways")
def test_the_share_of_bad_rows_is_that_of_all_windows_together(holed, monkeypatch) -> None:
    monkeypatch.setattr(reader, "WINDOW_ROWS", 1)
    folder, bad = holed
    spec = numbered(folder, batch_size=10)
    source = open_source(spec, folder)
    for few in (0, 1):
        data = spec.data.model_copy(update={"max_bad_share": (len(bad) - few) / 360})
        some = spec.model_copy(update={"data": data})
        refused = pytest.raises(TooManyBadRowsError, match=f"{len(bad)} of 360 rows")
        with TrainBatches(source, some, 0, 1) as batches, refused if few else nullcontext():
            list(batches)


def test_leases_and_validation_leave_rows_out_too(spoil, tolerant) -> None:
    spec = tolerant(batch_size=64)
    source = open_source(spec, spoil("rating", 77, math.nan))
    leased = []
    for rank in range(2):
        with LeaseBatches(source, spec, rank, num_ranks=2) as batches:
            batches.submit(Lease(id=0, epoch=0, spans=[(0, source.num_rows)]))
            leased += [batch for batch, _ in batches]
    for found in (leased, [batch for batch, _ in ValidationBatches(source, spec, 0, 1)]):
        assert tally(found).total() == 1
        assert sum(batch.weight.sum().item() for batch in found) == source.num_rows - 1


@pytest.fixture(scope="session")
def holed(prepared, tmp_path_factory) -> tuple[Path, set[int]]:
    """A split of numbered rows in several files and row groups, of which some have no label."""
    folder = tmp_path_factory.mktemp("holed")
    bad = {3, 4, 150, 151, 299, 300}
    for part, start in enumerate(range(0, 360, 120)):
        numbers = list(range(start, start + 120))
        label = [None if number in bad else number / 7 for number in numbers]
        table = pa.table({"number": numbers, "x": [1.0] * 120, "y": label})
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=25)
    return folder, bad


def numbered(folder: Path, batch_size: int) -> JobSpec:
    """A spec that reads the numbers of rows as ids, one more than each."""
    document = spec_document()
    split = {"train": ".", "validation": None}
    data = {"path": str(folder), "split": split, "batch_size": batch_size}
    document["data"] = data | {"label": {"column": "y"}, "on_bad_rows": "quarantine"}
    every = {"boundaries": list(range(1, 360))}
    number = {"name": "number", "type": "id", "table": "users", "bucketize": every}
    document["features"] = [{"name": "x", "type": "dense"}, number]
    document["embedding_tables"] = [{"name": "users", "embedding_dim": 8}]
    return size_tables(validate_spec(document), {})


@pytest.mark.usefixtures("read_both_ways")
@settings(max_examples=examples(20, fast=12))
@given(
    world_sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_size=st.integers(1, 20),
    num_steps=st.integers(0, 6),
)
def test_good_rows_train_once_and_bad_ones_are_counted_once_at_any_world_size(
    holed, world_sizes, batch_size, num_steps
) -> None:
    """Some steps at one world size, the rest of the epoch at another."""
    folder, bad = holed
    spec = numbered(folder, batch_size)
    source = open_source(spec, folder)
    trained: Counter[int] = Counter()
    left_out, position = 0, DataPosition()
    for world_size, limit in zip(world_sizes, (num_steps, 10**9), strict=True):
        start = position
        for rank in range(world_size):
            with TrainBatches(source, spec, rank, world_size, start) as batches:
                for _ in range(limit):
                    if (made := next(batches, None)) is None:
                        break
                    batch, step = made
                    position = step.end
                    numbers = batch.sparse["number"].values() - 1
                    trained.update(numbers[batch.weight > 0].tolist())
                    left_out += batch.quarantined.total()
    assert trained == Counter(set(range(360)) - bad)
    assert left_out == len(bad)


def test_the_most_are_listed_and_the_rest_is_summed_up() -> None:
    counted = Counter({(f"file-{n}", "r"): n for n in range(1, 15)})
    counted["file-3", "r"] += 20
    first, *middle, last = most_quarantined(counted).items()
    assert first == (("file-3", "r"), 23)
    assert len(middle) == 9
    assert last == ((OTHERS, OTHERS), 1 + 2 + 4 + 5)
    assert not most_quarantined(Counter())

"""A real S3 endpoint: files come and go, faults say what to change, and jobs train from it."""

from __future__ import annotations

import gzip
import os
import pickle
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.harness.object_store import SECRET_KEY, ObjectStore
from tests.harness.ranks import run_ranks
from tests.harness.sessions import make_config, train_session
from tests.harness.wait import wait_for
from trainer.data import reader
from trainer.data.inputs import resolve_inputs
from trainer.data.parquet import ParquetSource
from trainer.data.reader import RowReader, open_source
from trainer.datasets.io.csv_reader import read_blocks
from trainer.errors import (
    CorruptFileError,
    SourceMissingError,
    StorageAwayError,
    StorageError,
    StorageRefusedError,
)
from trainer.spec.job import JobSpec
from trainer.storage import Location

SETTINGS = ("training.max_steps=6", "parallelism.workers=2", "parallelism.shard_group_size=1")


@pytest.fixture(scope="module")
def uploaded(store: ObjectStore, small_movielens: Path) -> str:
    """URL of the small data set."""
    return store.upload(small_movielens, "movielens").text


def test_a_missing_key_and_a_missing_bucket_are_told_apart(store):
    with pytest.raises(SourceMissingError, match="s3://data/nothing is missing"):
        Location.parse(store.url("nothing")).read_bytes()
    with pytest.raises(StorageRefusedError, match="there is no bucket 'elsewhere'"):
        Location.parse("s3://elsewhere/key").write_bytes(b"x")


def test_an_endpoint_that_does_not_answer_is_named(store, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    nobody = Location.parse("s3://data/key?endpoint_override=http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"the endpoint does not answer.*AWS_ENDPOINT_URL"):
        nobody.exists()


TROUBLE = [
    {"rates": {"500": 0.1, "503": 0.1, "slow_down": 0.1}, "seed": 4},
    {"rates": {"reset": 0.2, "cut": 0.2}, "seed": 5},
    pytest.param({"bytes_per_s": 4_000_000}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("faults", TROUBLE, ids=["busy", "broken connections", "slow"])
def test_files_come_and_go_unchanged_through_a_store_in_trouble(store, tmp_path, faults):
    folder = Location.parse(store.url(f"trouble-{next(iter(faults))}-{faults.get('seed')}"))
    content = random.Random(1).randbytes(6 * 2**20)
    (tmp_path / "part.bin").write_bytes(content)
    lines = content[: 2**20].replace(b"\r", b"\n")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(lines))
    with store.failing(**faults) as seen:
        (folder / "part.bin").upload(tmp_path / "part.bin")
        found = (folder / "part.bin").size_and_sha256()
        (folder / "lines.gz").upload(tmp_path / "lines.gz")
        assert b"".join(block.lines for block in read_blocks(folder / "lines.gz", 2**16)) == lines
        (folder / "small.json").write_bytes(b"{}")
        assert (folder / "small.json").read_bytes() == b"{}"
        assert [file.name for file in folder.list()] == ["lines.gz", "part.bin", "small.json"]
        folder.delete()
        assert not folder.exists()
    assert found == Location.parse(tmp_path / "part.bin").size_and_sha256()
    assert "rates" not in faults or sum(seen.counts[fault] for fault in faults["rates"]) > 0


def test_a_store_that_is_away_is_not_taken_for_a_damaged_file(store, monkeypatch):
    file = Location.parse(store.url("lines.gz"))
    file.write_bytes(gzip.compress(b"line\n" * 1000))
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    with store.failing(rates={"503": 1.0}, only="GET .*lines.gz"), pytest.raises(StorageAwayError):
        list(read_blocks(file, 2**16))


def test_a_split_is_read_unchanged_through_a_store_in_trouble(store, uploaded, small_movielens):
    local = ParquetSource(small_movielens / "train", ["user_id", "history_movies"])
    groups = range(len(local.group_rows))
    with store.failing(rates={"503": 0.1, "cut": 0.1, "reset": 0.1}, seed=6) as seen:
        source = ParquetSource(Location.parse(uploaded) / "train", local.columns)
        for group, read in zip(groups, source.begin_reading(groups), strict=True):
            assert read() == local.read_group(group)
    assert sum(seen.counts[fault] for fault in ("503", "cut", "reset")) > 3


def test_the_first_window_of_a_split_has_the_link_to_itself_and_later_ones_come_ahead(
    uploaded, small_movielens, tmp_path
):
    spec = reading(make_config(small_movielens, tmp_path).spec, uploaded)
    source = open_source(spec, Location.parse(uploaded) / "train")
    begun, rows = [], (0, source.num_rows)

    def begin_reading(groups: Sequence[int]) -> list[Callable[[], Any]]:
        begun.append(tuple(groups))
        return ParquetSource.begin_reading(source, groups)

    with (
        patch.multiple(reader, CACHE_BYTES=0, WINDOW_ROWS=1),  # each row group is a window
        patch.object(source, "begin_reading", begin_reading),
        closing(RowReader(source, spec, shuffle=False)) as found,
    ):
        found.expect(0, [rows])
        found.read(0, [(0, 1)])
        assert begun[0] == (0,)
        wait_for(lambda: len(begun) > 1, "a window to come ahead")
        found.read(0, [rows])
    assert sorted(begun) == [(group,) for group in range(len(source.group_rows))]


def test_a_store_that_is_away_is_not_taken_for_bad_rows_and_a_replaced_object_is_refused(
    store, small_movielens, monkeypatch
):
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    folder = Location.parse(store.url("replaced"))
    names = ("part-00000.parquet", "part-00001.parquet")
    for name in names:
        (folder / name).upload(small_movielens / "train" / names[0])
    source = ParquetSource(folder, ["user_id"])
    with store.failing(rates={"503": 1.0}), pytest.raises(StorageAwayError):
        source.read_group(0)
    (folder / names[0]).upload(small_movielens / "validation" / names[0])
    with pytest.raises(CorruptFileError, match=r"part-00000\.parquet: row group 0 cannot be read"):
        source.read_group(0)
    (folder / names[1]).delete()
    with pytest.raises(SourceMissingError, match=r"part-00001\.parquet is missing"):
        source.read_group(len(source.group_rows) - 1)


@pytest.mark.slow
def test_an_answer_that_stalls_is_asked_for_again(store, monkeypatch):
    file = Location.parse(store.url("stalled"))
    file.write_bytes(b"content")
    monkeypatch.setenv("SHARDLOOM_STORAGE_TIMEOUT_S", "1")
    with store.failing(rates={"stall": 0.5}, stall_s=4.0, seed=1) as seen:
        assert Location.parse(store.url("stalled")).read_bytes() == b"content"
    assert seen.counts["stall"] > 0


@pytest.mark.parametrize(
    "wrong", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}]
)
def test_wrong_credentials_are_refused_at_once_with_what_to_set(store, monkeypatch, wrong):
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    mine = Location.parse(store.url("mine"))
    with store.failing() as seen:
        for use in (mine.exists, mine.list, lambda: mine.write_bytes(b"x"), mine.read_bytes):
            with pytest.raises(StorageRefusedError, match=r"access was denied; set AWS_ACCESS"):
                use()
    assert not seen.counts, "nothing was let through"


def test_a_location_takes_no_credentials_along(store):
    packed = pickle.dumps(Location.parse(store.url("key")))
    assert SECRET_KEY.encode() not in packed
    assert str(pickle.loads(packed)) == store.url("key")


# ---- training


def reading(spec: JobSpec, path: str) -> JobSpec:
    return spec.model_copy(update={"data": spec.data.model_copy(update={"path": path})})


def test_two_ranks_train_from_a_bucket_as_from_the_disk(
    small_movielens: Path, uploaded: str, tmp_path: Path
) -> None:
    local = make_config(small_movielens, tmp_path / "local", *SETTINGS)
    unsized = local.spec.model_copy(
        update={
            "embedding_tables": tuple(
                table.model_copy(update={"num_embeddings": "auto"})
                for table in local.spec.embedding_tables
            )
        }
    )
    resolved = resolve_inputs(reading(unsized, uploaded))
    assert resolved.embedding_tables == local.spec.embedding_tables

    wanted = run_ranks(train_session, 2, local)[0]["metrics"]
    remote = replace(local, spec=resolved, run_dir=tmp_path / "remote")
    environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    found = run_ranks(train_session, 2, remote, environment=environment)[0]["metrics"]
    losses = {name for name in wanted if name.endswith(("loss", "rmse", "mae"))}
    assert losses
    assert {name: found[name] for name in losses} == {name: wanted[name] for name in losses}


def test_a_bucket_that_is_not_there_is_a_data_error(
    store: ObjectStore, tmp_path: Path, small_movielens: Path
) -> None:
    spec = make_config(small_movielens, tmp_path, *SETTINGS).spec
    for url in ("s3://elsewhere/movielens", store.url("empty")):
        with pytest.raises(SourceMissingError, match=f"{url} holds no manifest.json"):
            resolve_inputs(reading(spec, url))

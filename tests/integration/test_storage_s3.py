"""Locations on a real S3 endpoint: round trips, and faults that say what to change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.object_store import ObjectStore, run_object_store
from trainer.data.errors import SourceMissingError, StorageError
from trainer.data.storage import Location


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with run_object_store() as store:
        yield store


def test_files_are_uploaded_listed_and_downloaded(store, tmp_path):
    (tmp_path / "part.bin").write_bytes(bytes(range(256)) * 1000)
    folder = Location.parse(store.url("round/trip"))
    (folder / "b" / "part.bin").upload(tmp_path / "part.bin")
    (folder / "a.json").write_bytes(b"{}")
    names = [file.relative_to(folder) for file in folder.list(recursive=True)]
    assert names == ["a.json", "b/part.bin"]
    (folder / "b" / "part.bin").download(tmp_path / "copy.bin")
    assert (tmp_path / "copy.bin").read_bytes() == (tmp_path / "part.bin").read_bytes()
    folder.delete()
    assert not folder.exists()


def test_a_missing_key_and_a_missing_bucket_are_told_apart(store):
    with pytest.raises(SourceMissingError, match="s3://data/nothing is missing"):
        Location.parse(store.url("nothing")).read_bytes()
    with pytest.raises(StorageError, match="there is no bucket 'elsewhere'"):
        Location.parse("s3://elsewhere/key").write_bytes(b"x")


def test_an_endpoint_that_does_not_answer_is_named(store, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    nobody = Location.parse("s3://data/key?endpoint_override=http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"the endpoint does not answer.*AWS_ENDPOINT_URL"):
        nobody.exists()

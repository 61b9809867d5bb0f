"""Locations: local files, what a URL means, refusals."""

from __future__ import annotations

import errno
import io
import pickle
from pathlib import Path

import pytest
from pyarrow import fs

from trainer.data import storage
from trainer.data.errors import SourceMissingError, StorageError
from trainer.data.retry import Backoff
from trainer.data.storage import Location


def test_a_file_is_written_listed_read_and_deleted(tmp_path):
    folder = Location.parse(tmp_path / "deep" / "folder")
    (folder / "b.txt").write_bytes(b"two")
    (folder / "a.txt").write_bytes(b"one")
    (folder / "inner" / "c.txt").write_bytes(b"three")
    assert [file.name for file in folder.list()] == ["a.txt", "b.txt"]
    below = [file.relative_to(folder) for file in folder.list(recursive=True)]
    assert below == ["a.txt", "b.txt", "inner/c.txt"]
    assert (folder / "b.txt").read_bytes() == b"two"
    assert (folder / "b.txt").size_bytes() == 3
    assert folder.is_folder() and not (folder / "a.txt").is_folder()
    (folder / "a.txt").delete()
    assert not (folder / "a.txt").exists()
    folder.delete()
    assert not folder.exists() and folder.list() == ()


def test_relative_and_file_urls_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Location.parse("data/x").local_path == tmp_path / "data" / "x"
    assert Location.parse(f"file://{tmp_path}/my%20data").local_path == tmp_path / "my data"
    # A question mark is part of a local name, not a query.
    assert Location.parse(tmp_path / "why?").local_path == tmp_path / "why?"


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(SourceMissingError, match=r"nothing\.csv is missing"):
        Location.parse(tmp_path / "nothing.csv").open_input()
    with pytest.raises(SourceMissingError, match=r"nothing\.csv is missing"):
        Location.parse(tmp_path / "nothing.csv").size_bytes()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file/below cannot be written"):
        (Location.parse(tmp_path) / "file" / "below").write_bytes(b"x")


def test_an_s3_url_says_bucket_key_and_endpoint():
    url = "s3://bucket/some/folder?endpoint_override=http://127.0.0.1:9000&region=eu-west-1"
    location = Location.parse(url) / "part.parquet"
    assert location.path == "bucket/some/folder/part.parquet"
    assert str(location) == "s3://bucket/some/folder/part.parquet"
    assert Location.parse(location.text) == location
    assert isinstance(location.fs, fs.S3FileSystem) and location.fs.region == "eu-west-1"
    assert not location.is_local
    with pytest.raises(ValueError, match="not on this machine"):
        _ = location.local_path


def test_the_endpoint_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    stated = Location.parse("s3://b/k?endpoint_override=http://127.0.0.1:9000&region=us-east-1")
    assert Location.parse("s3://b/k?region=us-east-1").fs == stated.fs


def test_a_google_url_is_understood():
    location = Location.parse("gs://bucket/folder/?anonymous=true")
    assert isinstance(location.fs, fs.GcsFileSystem)
    assert location.parent.path == "bucket"


def test_locations_travel_between_processes():
    location = Location.parse("s3://b/k?endpoint_override=http://127.0.0.1:9000&region=us-east-1")
    assert pickle.loads(pickle.dumps(location)) == location


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/file", "cannot read 'ftp://'"),
        ("s3:///key", "names no bucket"),
        ("s3://bucket/key?endpoint=x", "unknown option 'endpoint'"),
    ],
)
def test_urls_that_mean_nothing_are_refused(url, message):
    with pytest.raises(StorageError, match=message):
        Location.parse(url)


def test_a_copy_that_cannot_be_written_is_no_fault_of_what_is_read(tmp_path):
    (tmp_path / "source").write_bytes(b"content")
    source = Location.parse(tmp_path / "source")
    source.download(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(OSError, match="No space left on device"):
        source.download(Path("/dev/full"))


class _SomebodyElseDeletes:
    """A file system whose files and folders are gone between a look and the deletion."""

    def __init__(self, kind: fs.FileType) -> None:
        self.kind = kind
        self.num_deletions = 0

    def get_file_info(self, path: str) -> fs.FileInfo:
        return fs.FileInfo(path, self.kind)

    def delete_file(self, path: str) -> None:
        self.num_deletions += 1
        raise FileNotFoundError(path)

    delete_dir = delete_file


@pytest.mark.parametrize("kind", [fs.FileType.File, fs.FileType.Directory])
def test_what_somebody_else_deletes_in_the_same_moment_is_deleted(kind):
    system = _SomebodyElseDeletes(kind)
    Location(system, "bucket/checkpoints/.probe", "s3://").delete()
    assert system.num_deletions == 1


def test_an_upload_whose_source_fails_leaves_nothing_and_says_what_failed(tmp_path):
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise OSError(errno.EIO, "Input/output error", "source.bin")
            return super().read(4)

    class Source:
        def open(self, mode: str) -> Failing:
            return Failing(b"content")

    target = Location.parse(tmp_path / "there" / "part.bin")
    with pytest.raises(OSError, match=r"source\.bin"):
        target.upload(Source())
    assert not target.exists()


@pytest.mark.parametrize("said", ["", "  ", None])
def test_a_time_that_is_set_to_nothing_is_the_default(monkeypatch, said):
    monkeypatch.delenv("SHARDLOOM_STORAGE_RETRY_S", raising=False)
    if said is not None:
        monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", said)
    assert Backoff.from_environment() == Backoff()


@pytest.mark.parametrize("said", ["1m", "nan", "-1", "inf"])
def test_a_time_that_is_no_number_of_seconds_is_refused_by_its_name(monkeypatch, said):
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", said)
    with pytest.raises(StorageError, match=r"SHARDLOOM_STORAGE_RETRY_S is .*number of seconds"):
        Backoff.from_environment()
    monkeypatch.setenv("SHARDLOOM_STORAGE_TIMEOUT_S", said)
    with pytest.raises(StorageError, match="SHARDLOOM_STORAGE_TIMEOUT_S"):
        Location.parse("s3://bucket/key?region=us-east-1")


def test_the_sdk_gives_up_early_enough_to_be_asked_again():
    sdk_s = storage._MAX_ATTEMPTS * storage._REQUEST_TIMEOUT_S
    assert Backoff().delay_s(1, sdk_s, draw=1.0) is not None

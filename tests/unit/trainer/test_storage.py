"""Locations: local files, URLs, refusals; when remote storage is tried again, and for how long."""

from __future__ import annotations

import errno
import io
import pickle
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from tests.harness.clock import FakeClock
from trainer import storage as module
from trainer.errors import (
    CorruptFileError,
    SourceMissingError,
    StorageAwayError,
    StorageError,
    StorageRefusedError,
)
from trainer.spec.base import is_remote
from trainer.storage import STORES, Location, retry, write_upload


def test_a_file_is_written_listed_read_and_deleted(tmp_path):
    folder = Location.parse(tmp_path / "deep" / "folder")
    (folder / "b.txt").write_bytes(b"two")
    (folder / "a.txt").write_bytes(b"one")
    (folder / "inner" / "c.txt").write_bytes(b"three")
    assert [file.name for file in folder.list()] == ["a.txt", "b.txt"]
    below = [file.relative_to(folder) for file in folder.list(recursive=True)]
    assert below == ["a.txt", "b.txt", "inner/c.txt"]
    assert (folder / "b.txt").read_bytes() == b"two"
    remote = Location.parse("s3://bucket/data")
    keys = {str(remote / name) for name in ("train/a", "./train/a", "train//a", "train/./a")}
    assert keys == {"s3://bucket/data/train/a"} and remote / "." == remote
    assert (folder / "b.txt").size_bytes() == 3
    assert folder.is_dir() and not (folder / "a.txt").is_dir()
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


def test_what_cannot_be_read_or_written_is_named(tmp_path):
    missing = Location.parse(tmp_path / "nothing.csv")
    for read in (missing.open_input, missing.size_bytes):
        with pytest.raises(SourceMissingError, match=r"nothing\.csv is missing"):
            read()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file/below cannot be written"):
        (Location.parse(tmp_path) / "file" / "below").write_bytes(b"x")
    odd = tmp_path / b"caf\xe9".decode(errors="surrogateescape")
    odd.write_text("named in Latin-1")
    with pytest.raises(CorruptFileError, match=f"{tmp_path} cannot be listed.*not UTF-8; rename"):
        Location.parse(tmp_path).list()
    with pytest.raises(CorruptFileError, match=r"caf\? cannot be looked up.*not UTF-8; rename"):
        Location.parse(odd).exists()


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
    # Locations travel between processes.
    assert pickle.loads(pickle.dumps(stated)) == stated
    google = Location.parse("gs://bucket/folder/?anonymous=true")
    assert isinstance(google.fs, fs.GcsFileSystem)
    assert google.parent.path == "bucket"
    for name in ("a#b", "a?b=c", "day=1/100% café", "a%20b"):
        odd = stated / name
        assert pickle.loads(pickle.dumps(odd)) == Location.parse(odd.text) == odd


def test_a_spec_takes_urls_of_every_store_and_of_no_other():
    assert all(is_remote(f"{scheme}://bucket/key") for scheme in STORES)
    assert not is_remote("file:///key") and not is_remote("s3")


def test_urls_that_mean_nothing_are_refused():
    for url, message in {
        "ftp://host/file": "cannot read 'ftp://'",
        "s3:///key": "names no bucket",
        "s3://bucket/key?endpoint=x": "unknown option 'endpoint'",
        "s3://bucket/key#v2": "write %23",
        "file://folder/part": "names the host 'folder'; write file:///FOLDER",
        "file:///folder#v2": "write %23",
        "file:///folder?v2": "write %3F",
        "s3://[bucket/key": "write %5B",
        "s3://bucket/key?scheme=ftp": "s3://bucket/key: .*check the options",
        "s3://bucket/key?endpoint_override=http://[": "s3://bucket/key: .*check the options",
        "~nobody-of-that-name/data": "give an absolute path",
    }.items():
        with pytest.raises(StorageError, match=message):
            Location.parse(url)


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


def test_an_upload_keeps_little_in_memory(monkeypatch) -> None:
    monkeypatch.setattr(module, "_UNSENT_BYTES", 100)
    stream = io.BytesIO()
    flushed: list[int] = []
    monkeypatch.setattr(stream, "flush", lambda: flushed.append(stream.tell()), raising=False)
    content = bytes(range(256)) * 2
    for start, end in ((0, 30), (30, 100), (100, 140), (140, 512)):
        write_upload(stream, content[start:end])
    assert stream.getvalue() == content
    assert flushed == [100, 200, 300, 400, 500]


def test_a_time_that_is_no_number_of_seconds_is_refused_by_its_name(monkeypatch):
    for said in ("1m", "nan", "-1", "inf"):
        monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", said)
        with pytest.raises(StorageError, match=r"SHARDLOOM_STORAGE_RETRY_S is .*number of seconds"):
            retry(lambda: None)
        monkeypatch.setenv("SHARDLOOM_STORAGE_TIMEOUT_S", said)
        with pytest.raises(StorageError, match="SHARDLOOM_STORAGE_TIMEOUT_S"):
            Location.parse("s3://bucket/key?region=us-east-1")


class Storage:
    """Fails `num_failures` times with `error`; its clock moves by what is slept."""

    def __init__(self, num_failures: int, error: Exception, takes_s: float = 0.0) -> None:
        self.left, self.error, self.takes_s = num_failures, error, takes_s
        self.clock = FakeClock()

    def read(self) -> str:
        self.clock.now += self.takes_s
        if self.left:
            self.left -= 1
            raise self.error
        return "content"

    def retried(self, draw: float = 1.0) -> str:
        with patch.multiple(module, time=self.clock, random=Mock(random=lambda: draw)):
            return retry(self.read)


# Set to nothing is not set.
@pytest.mark.parametrize("said", ["", "  "])
def test_delays_double_up_to_the_longest(monkeypatch, said) -> None:
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", said)
    storage = Storage(7, StorageAwayError("busy"))
    assert storage.retried() == "content"
    assert storage.clock.slept == [0.5, 1, 2, 4, 8, 10, 10]
    sdk_s = module._MAX_ATTEMPTS * module._REQUEST_TIMEOUT_S
    assert sdk_s + module._FIRST_DELAY_S < module._RETRY_S, "the SDK would leave no time for any"


def test_what_no_retry_helps_is_said_at_once(monkeypatch) -> None:
    for error, budget in ((StorageRefusedError("denied"), "60"), (StorageAwayError("busy"), "0")):
        monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", budget)
        storage = Storage(1, error)
        with pytest.raises(type(error), match=str(error)):
            storage.retried()
        assert storage.clock.slept == []


@given(budget_s=st.floats(0, 100), draw=st.floats(0, 1))
def test_a_spent_budget_ends_in_the_last_error(budget_s, draw) -> None:
    storage = Storage(10_000, StorageAwayError("busy"))
    with pytest.MonkeyPatch.context() as set_, pytest.raises(StorageAwayError, match="busy"):
        set_.setenv("SHARDLOOM_STORAGE_RETRY_S", str(budget_s))
        storage.retried(draw)
    assert budget_s - 10 < storage.clock.now <= budget_s
    assert all(0.25 <= slept_s <= 10 for slept_s in storage.clock.slept)


def test_the_time_in_which_an_upload_went_well_is_no_part_of_the_budget() -> None:
    for takes_s, num_failures in ((55, 1), (90, 4)):
        assert Storage(num_failures, StorageAwayError("busy"), takes_s).retried() == "content"
    endless = Storage(10_000, StorageAwayError("busy"), takes_s=90)
    with pytest.raises(StorageAwayError):
        endless.retried()
    assert len(endless.clock.slept) == 5


def test_a_read_goes_on_where_its_connection_broke(monkeypatch) -> None:
    content, asked = bytes(range(100)), []
    monkeypatch.setattr(module, "_READ_BYTES", 30)
    monkeypatch.setattr(module, "time", FakeClock())

    def read_at(size: int, position: int) -> bytes:
        asked.append((position, size))
        if len(asked) in (3, 4):
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 18")
        return content[position : position + size]

    remote = Mock(read_at=read_at, size=lambda: len(content))
    file = Location.parse("s3://bucket/key?region=us-east-1")
    file = replace(file, fs=Mock(open_input_file=lambda _: remote))
    with file.open_input() as stream:
        assert stream.read(95) == content[:95]
        assert stream.read() == content[95:]
    assert asked == [(0, 30), (30, 30), *3 * [(60, 30)], (90, 5), (95, 5)]


def test_messages_of_the_sdks_are_told_apart() -> None:
    for (kind, words), messages in {
        (StorageAwayError, "check AWS_ACCESS_KEY_ID, "): (
            "AWS Error SLOW_DOWN during ListObjectsV2 operation: SlowDown",
            "AWS Error UNKNOWN (HTTP status 503) during HeadObject operation",
            "AWS Error UNKNOWN (HTTP status 429) during HeadObject operation",
            "AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 18",
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted)",
        ),
        (StorageRefusedError, "credentials that may use 'bucket'"): (
            "AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
            "AWS Error SIGNATURE_DOES_NOT_MATCH during CreateMultipartUpload",
            "AWS Error UNKNOWN (HTTP status 400) during ListObjectsV2 operation: Unable to parse "
            "ExceptionName: ExpiredToken Message: The provided token has expired.",
            "google::cloud::Status(PERMISSION_DENIED: Permanent error)",
        ),
        (StorageError, "clock"): ("AWS Error REQUEST_TIME_TOO_SKEWED during HeadObject: The diff",),
        (StorageRefusedError, "no bucket"): ("AWS Error NO_SUCH_BUCKET during ListObjectsV2",),
        (StorageError, "exists"): ("AWS Error UNKNOWN (HTTP status 400) during HeadObject",),
    }.items():
        for message in messages:
            error = Location.parse("s3://bucket/key?region=x")._storage_error("read", message)
            assert type(error) is kind and words in str(error)

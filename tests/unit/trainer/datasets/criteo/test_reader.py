"""Reading Criteo files: what counts as the same rows, and networks that fail for a while."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import fs

from tests.harness.clock import FakeClock
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
from trainer.datasets.io.csv_reader import read_blocks
from trainer.datasets.io.sources import check_distinct, find_sources
from trainer.errors import SourceMissingError, StorageAwayError
from trainer.storage import Location

TEXT = b"".join(b"line %d\n" % number for number in range(5000))
BLOCK_BYTES = 4096


class Network:
    """Files of this machine, of which the `nth` read over all fails `num_failures` times."""

    def __init__(self, nth: int, num_failures: int) -> None:
        self._nth, self._num_failures = nth, num_failures
        self._num_reads = 0
        self._disk = fs.LocalFileSystem()

    def open_input_file(self, path: str) -> Network.File:
        return Network.File(self, self._disk.open_input_file(path))

    def check(self) -> None:
        self._num_reads += 1
        if 0 <= self._num_reads - self._nth < self._num_failures:
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject: Timeout was reached")

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    class File:
        def __init__(self, network: Network, file: pa.NativeFile) -> None:
            self._network, self._file = network, file

        def read_at(self, num_bytes: int, offset: int) -> bytes:
            self._network.check()
            return self._file.read_at(num_bytes, offset)

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)


def remote(path: Path, nth: int, num_failures: int) -> Location:
    """A file of this machine that passes for a remote one, behind a network that fails."""
    return Location(Network(nth, num_failures), str(path), root="s3://")


def write(path: Path, *, is_compressed: bool) -> Path:
    path = path.with_suffix(".gz") if is_compressed else path
    path.write_bytes(gzip.compress(TEXT) if is_compressed else TEXT)
    return path


def text_of(location: Location) -> bytes:
    return b"".join(block.lines for block in read_blocks(location, BLOCK_BYTES))


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_network_that_fails_is_asked_again_and_not_blamed_on_the_file(
    tmp_path, monkeypatch, is_compressed
):
    path, nth = write(tmp_path / "day_0", is_compressed=is_compressed), 1 if is_compressed else 3
    clock = FakeClock()
    monkeypatch.setattr("trainer.storage.time", clock)
    assert text_of(remote(path, nth, 2)) == TEXT
    assert len(clock.slept) == 2
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    with pytest.raises(StorageAwayError, match=r"the endpoint does not answer.*\(AWS "):
        text_of(remote(path, nth, 1000))


def test_work_done_before_the_network_failed_is_kept(tmp_path, monkeypatch):
    generate_criteo(tmp_path / "raw", CriteoGeneratorOptions(num_rows=3000, max_ids=50))
    raw = tmp_path / "raw/train.txt"
    options = CriteoOptions(num_partitions=2, block_bytes=65_536, run_blocks=1)
    # All are read once to be counted.
    source = remote(raw, 2 * (raw.stat().st_size // options.block_bytes), 1000)
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    with pytest.raises(StorageAwayError) as raised:
        prepare_criteo([source], tmp_path / "out", options=options)
    assert "run the same command again" in raised.value.__notes__[0]
    assert list((tmp_path / ".out.partial").glob("scratch/runs/*.arrow"))


def test_a_folder_with_a_file_and_its_compressed_copy_is_refused(tmp_path):
    for name in ("day_0", "day_1", "day_1.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceMissingError, match=r"day_1.gz and .*day_1 are the same rows"):
        check_distinct(find_sources([str(tmp_path)]))


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_one_file_by_two_names_is_refused(tmp_path, link):
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "day_0").write_bytes(b"")
    link(folder / "day_0", tmp_path / "train.txt")
    for twice in ([folder, folder / "day_0"], [folder, tmp_path / "train.txt"]):
        with pytest.raises(SourceMissingError, match="same rows, which would be counted twice"):
            check_distinct(find_sources([str(path) for path in twice]))
    # Equal names in two folders are two files.
    (tmp_path / "days" / "train.txt").write_bytes(b"")
    check_distinct(find_sources([str(folder / "train.txt"), str(tmp_path / "train.txt")]))

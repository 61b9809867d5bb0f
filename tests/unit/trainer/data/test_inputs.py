"""The cache of remote data: what is fetched, how often, and what has to go.

A local folder stands for the remote one; tests/integration/storage/test_s3.py takes a real S3.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.harness.wait import scaled
from trainer.data import inputs
from trainer.data.inputs import DataCache, RemoteData, look_up
from trainer.data.manifest import load_manifest, verify_checksums, write_manifest
from trainer.data.reader import open_source
from trainer.errors import CorruptFileError, ManifestError, StorageError
from trainer.spec.data import SplitSpec
from trainer.storage import Location


@pytest.fixture(autouse=True)
def own_locks(monkeypatch):
    """Each test is a process of its own, as far as the cache can tell."""
    locks: dict[Path, int] = {}
    monkeypatch.setattr(inputs, "_in_use", locks)
    yield
    for handle in locks.values():
        os.close(handle)


@pytest.fixture
def uploaded(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared, tmp_path / "remote")


def data_in(folder: Path) -> RemoteData:
    return look_up(Location.parse(folder))


def files_in(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget_uses() -> None:
    """What a process that ends does."""
    while inputs._in_use:
        os.close(inputs._in_use.popitem()[1])


def test_a_prepared_folder_is_fetched_whole_and_once(uploaded, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cache = DataCache(tmp_path / "cache")
    folder = cache.fetch(data_in(uploaded))
    assert files_in(folder) == files_in(uploaded)
    verify_checksums(folder, load_manifest(folder))
    num_files = len(files_in(uploaded)) - 1
    assert caplog.messages[-1].startswith(f"fetched {num_files} files")
    caplog.clear()
    assert cache.fetch(data_in(uploaded)) == folder
    assert not caplog.messages


def test_only_the_parts_that_are_wanted_are_fetched(uploaded, tmp_path):
    cache = DataCache(tmp_path / "cache")
    folder = cache.fetch(data_in(uploaded), ("vocab",))
    assert {path.split("/")[0] for path in files_in(folder)} <= {"vocab", "manifest.json"}
    assert cache.fetch(data_in(uploaded), ("vocab", "train")) == folder
    assert "train/part-00000.parquet" in files_in(folder)
    assert not (folder / "validation").exists()


def test_a_job_with_a_nested_split_finds_it_on_its_node_and_not_its_neighbours(
    uploaded, tmp_path, make_spec, monkeypatch
):
    (uploaded / "manifest.json").unlink()
    for name in ("2024/train", "2024/train-old", "2024/validation"):
        shutil.copytree(uploaded / "train", uploaded / name)

    def fetched(path: str, parts: Collection[str] | None = None) -> Path:
        assert path == "s3://bucket/data"
        return DataCache(tmp_path / "cache").fetch(data_in(uploaded), parts)

    monkeypatch.setattr(inputs, "local_folder", fetched)
    split = SplitSpec(train="2024/train", validation="2024/validation")
    spec = make_spec()
    data = spec.data.model_copy(update={"path": "s3://bucket/data", "split": split})
    here = Path(inputs.on_this_node(spec.model_copy(update={"data": data})).data.path)
    assert open_source(spec, here / "2024/train").num_rows > 0
    found = {path.rpartition("/")[0] for path in files_in(here)}
    assert found - {"vocab"} == {"2024/train", "2024/validation"}


def test_plain_parquet_is_fetched_without_hidden_files_and_others(uploaded, tmp_path):
    (uploaded / "manifest.json").unlink()
    whole = files_in(uploaded)
    (uploaded / "notes.txt").write_text("not data")
    for name in (".part-0.parquet", "_part-0.parquet"):
        shutil.copy(uploaded / "train" / "part-00000.parquet", uploaded / "train" / name)
    assert files_in(DataCache(tmp_path / "cache").fetch(data_in(uploaded))) == whole


def test_what_was_cut_short_or_replaced_by_as_many_bytes_is_fetched_again(uploaded, tmp_path):
    cache, name = DataCache(tmp_path / "cache"), "train/part-00000.parquet"
    part = cache.fetch(data_in(uploaded)) / name
    part.write_bytes(part.read_bytes()[:100])
    verify_checksums(cache.fetch(data_in(uploaded)), load_manifest(uploaded))
    (uploaded / "manifest.json").unlink()
    cache.fetch(data_in(uploaded))
    corrected = (uploaded / name).read_bytes()[::-1]
    (uploaded / name).write_bytes(corrected)
    os.utime(uploaded / name, ns=(1, 1))
    assert (cache.fetch(data_in(uploaded)) / name).read_bytes() == corrected


def test_another_version_gets_a_folder_of_its_own(uploaded, tmp_path):
    cache = DataCache(tmp_path / "cache")
    before = cache.fetch(data_in(uploaded))
    manifest = load_manifest(uploaded)
    write_manifest(uploaded, manifest.model_copy(update={"statistics": {"other": 1.0}}))
    after = cache.fetch(data_in(uploaded))
    assert after != before
    assert load_manifest(after).statistics == {"other": 1.0}
    assert load_manifest(before) == manifest


def test_a_damaged_file_is_refused(uploaded, tmp_path):
    part = uploaded / "train" / "part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"part-00001\.parquet is damaged: its sha256"):
        DataCache(tmp_path / "cache").fetch(data_in(uploaded))
    part.write_bytes(content[:-5])
    with pytest.raises(CorruptFileError, match="was it replaced"):
        DataCache(tmp_path / "cache").fetch(data_in(uploaded))


def test_a_manifest_cannot_write_outside_of_the_cache(uploaded):
    text = (uploaded / "manifest.json").read_text()
    (uploaded / "manifest.json").write_text(text.replace("train/part-00000", "../part-00000"))
    with pytest.raises(ManifestError, match="not below its folder"):
        data_in(uploaded)


def test_unused_data_makes_room_and_used_data_stays(uploaded, tmp_path):
    cache = DataCache(tmp_path / "cache", max_bytes=int(2.5 * size_of(uploaded)))
    copies = [shutil.copytree(uploaded, tmp_path / f"copy-{n}") for n in range(4)]
    first = cache.fetch(data_in(copies[0]))
    second = cache.fetch(data_in(copies[1]))
    with pytest.raises(StorageError, match="SHARDLOOM_DATA_CACHE_BYTES"):
        cache.fetch(data_in(copies[2]))
    forget_uses()
    os.utime(cache.root / f"{second.name}.use", (1, 1))  # unused for longest
    third = cache.fetch(data_in(copies[2]))
    assert first.exists()
    assert third.exists()
    assert not second.exists()
    cache.fetch(data_in(copies[0]))
    with pytest.raises(StorageError):
        cache.fetch(data_in(copies[3]))
    assert first.exists()


def test_room_for_what_is_on_its_way_is_not_given_away(uploaded, tmp_path, monkeypatch):
    other = shutil.copytree(uploaded, tmp_path / "other")
    cache = DataCache(tmp_path / "cache", max_bytes=int(1.5 * size_of(uploaded)))
    download, refusals = inputs._download, []

    def fetch_another_meanwhile(*arguments) -> None:
        monkeypatch.setattr(inputs, "_download", download)
        with pytest.raises(StorageError, match="SHARDLOOM_DATA_CACHE_BYTES") as refused:
            cache.fetch(data_in(other))
        refusals.append(str(refused.value))
        download(*arguments)

    monkeypatch.setattr(inputs, "_download", fetch_another_meanwhile)
    cache.fetch(data_in(uploaded))
    assert len(refusals) == 1
    assert size_of(cache.root) <= cache.max_bytes
    forget_uses()
    cache.fetch(data_in(other))
    assert size_of(cache.root) <= cache.max_bytes


def test_a_cache_or_disk_that_cannot_take_the_data_is_named(uploaded, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="SHARDLOOM_DATA_CACHE"):
        DataCache(tmp_path / "file").fetch(data_in(uploaded))
    full = shutil._ntuple_diskusage(10**12, 10**12 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(StorageError, match=r"the disk of .* has only 1,000 free"):
        DataCache(tmp_path / "cache").fetch(data_in(uploaded))


def test_a_disk_that_fills_up_is_named_and_nothing_half_done_stays(uploaded, tmp_path, monkeypatch):
    def fill_up(location: Location, target: Path) -> None:
        target.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Location, "download", fill_up)
    with pytest.raises(StorageError, match=r"No space left.*SHARDLOOM_DATA_CACHE") as full:
        DataCache(tmp_path / "cache").fetch(data_in(uploaded))
    assert "AWS_" not in str(full.value)
    assert not list((tmp_path / "cache").rglob("*.part"))


def fetch_and_count(source: Path, root: Path, begin, counts) -> None:
    """One of several processes that want the same data: how many files it fetched."""
    counted = []
    download = inputs._download
    inputs._download = lambda *args: (counted.append(1), download(*args))
    begin.wait()
    folder = DataCache(root).fetch(data_in(source))
    verify_checksums(folder, load_manifest(folder))
    counts.put(len(counted))


@pytest.mark.slow
def test_processes_that_come_together_fetch_each_file_once(uploaded, tmp_path):
    context = multiprocessing.get_context("spawn")
    begin, counts = context.Barrier(3), context.Queue()
    arguments = (uploaded, tmp_path / "cache", begin, counts)
    processes = [context.Process(target=fetch_and_count, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    fetched = [counts.get(timeout=scaled(60)) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(fetched) == [0, 0, len(files_in(uploaded)) - 1]

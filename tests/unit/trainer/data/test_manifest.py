"""A prepared folder is checked against its manifest before anything trains on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer.data.manifest import load_manifest, verify_checksums
from trainer.errors import CorruptFileError, ManifestError, SourceMissingError


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared, tmp_path / "copy")


def test_a_folder_without_manifest_is_told_how_to_get_one(tmp_path):
    with pytest.raises(SourceMissingError, match=r"absent does not exist.*data\.path"):
        load_manifest(tmp_path / "absent")
    with pytest.raises(ManifestError, match="shardloom data prepare"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("body", ["{", "[]", '{"schema_version": 99}'])
def test_an_unreadable_manifest_is_refused(copy, body):
    (copy / "manifest.json").write_text(body)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        load_manifest(copy)


def test_a_truncated_file_is_named(copy):
    part = copy / "train" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match=r"part-00001\.parquet.*truncated"):
        load_manifest(copy)


def test_a_missing_file_is_named(copy):
    (copy / "train" / "part-00002.parquet").unlink()
    with pytest.raises(CorruptFileError, match=r"part-00002\.parquet.*missing"):
        load_manifest(copy)


def test_a_file_that_was_swapped_is_refused(copy):
    shutil.copy(copy / "train" / "part-00000.parquet", copy / "validation" / "part-00000.parquet")
    with pytest.raises(CorruptFileError, match=r"validation/part-00000\.parquet is not the file"):
        load_manifest(copy)


def test_a_row_count_that_differs_is_refused(copy):
    document = json.loads((copy / "manifest.json").read_text())
    document["splits"]["train"]["files"][0]["num_rows"] += 1
    (copy / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(CorruptFileError, match="not the file"):
        load_manifest(copy)


def test_a_changed_byte_is_found_by_the_checksum_alone(copy):
    manifest = load_manifest(copy)
    assert verify_checksums(copy, manifest) == len(list(copy.glob("*/*.parquet")))
    for damaged in ("validation/part-00000.parquet", "train/part-00002.parquet"):
        # Size and footer stay as they were.
        body = bytearray((copy / damaged).read_bytes())
        body[len(body) // 4] ^= 0xFF
        (copy / damaged).write_bytes(body)
        with pytest.raises(CorruptFileError, match=f"{damaged} is damaged: its sha256"):
            verify_checksums(copy, load_manifest(copy))


def test_a_file_that_vanished_since_loading_is_named(copy):
    manifest = load_manifest(copy)
    (copy / "train" / "part-00001.parquet").unlink()
    with pytest.raises(SourceMissingError, match=r"part-00001\.parquet is missing"):
        verify_checksums(copy, manifest)

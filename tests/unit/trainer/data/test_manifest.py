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


@pytest.mark.parametrize("body", ["{", "[]", '{"schema_version": 99}'])
def test_an_unreadable_manifest_is_refused(copy, body):
    (copy / "manifest.json").write_text(body)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        load_manifest(copy)


def test_a_manifest_without_an_end_is_refused(copy):
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match="more than 64 MiB"):
        load_manifest(copy)


def test_a_file_that_is_not_the_one_of_the_manifest_is_named(copy):
    def refused(message: str) -> None:
        with pytest.raises(CorruptFileError, match=message):
            load_manifest(copy)

    document = json.loads((copy / "manifest.json").read_text())
    shutil.copy(copy / "train" / "part-00000.parquet", copy / "validation" / "part-00000.parquet")
    refused(r"validation/part-00000\.parquet is not the file")
    (copy / "train" / "part-00002.parquet").unlink()
    refused(r"part-00002\.parquet.*missing")
    part = copy / "train" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    refused(r"part-00001\.parquet.*truncated")
    document["splits"]["train"]["files"][0]["num_rows"] += 1
    (copy / "manifest.json").write_text(json.dumps(document))
    refused(r"part-00000\.parquet is not the file")


def test_a_changed_byte_is_found_by_the_checksum_alone_and_a_file_that_vanished_named(copy):
    manifest = load_manifest(copy)
    assert verify_checksums(copy, manifest) == len(list(copy.glob("*/*.parquet")))
    for damaged in ("validation/part-00000.parquet", "train/part-00002.parquet"):
        # Size and footer stay as they were.
        body = bytearray((copy / damaged).read_bytes())
        body[len(body) // 4] ^= 0xFF
        (copy / damaged).write_bytes(body)
        with pytest.raises(CorruptFileError, match=f"{damaged} is damaged: its sha256"):
            verify_checksums(copy, load_manifest(copy))
    (copy / "train" / "part-00001.parquet").unlink()
    with pytest.raises(SourceMissingError, match=r"part-00001\.parquet is missing"):
        verify_checksums(copy, manifest)

"""Preparing from and to an object store: the same bytes, the manifest last."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.manifest import MANIFEST_NAME
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.datasets.movielens.synthetic import generate_movielens
from trainer.errors import OutputExistsError, StorageError
from trainer.storage import Location

OPTIONS = MovieLensOptions(unit_rows=500, num_partitions=4, row_group_rows=128)


@pytest.fixture(scope="module")
def csv_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ratings") / "csv"
    generate_movielens(folder, num_ratings=3000, seed=5)
    return folder


@pytest.fixture(scope="module")
def remote_csv(store, csv_folder) -> Location:
    return store.upload(csv_folder, "csv")


@pytest.fixture(scope="module")
def expected(csv_folder, tmp_path_factory) -> dict[str, bytes]:
    """What a local run gives, by path."""
    out = tmp_path_factory.mktemp("local") / "out"
    prepare_movielens(csv_folder, out, options=OPTIONS)
    return contents(Location.parse(out))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch) -> Path:
    """Working files of this test only."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def contents(folder: Location) -> dict[str, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.list(recursive=True)}


def test_from_and_to_an_object_store_the_bytes_are_those_of_a_local_run(
    store, remote_csv, expected, tmp_path
):
    out = Location.parse(store.url("prepared"))
    prepare_movielens(remote_csv.text, out.text, options=OPTIONS)
    assert contents(out) == expected
    assert not list(tmp_path.iterdir()), "no working files are left"


def test_an_upload_that_fails_leaves_no_manifest_and_is_gone_on_with(
    store, remote_csv, expected, monkeypatch
):
    out = Location.parse(store.url("interrupted"))
    upload, uploaded = Location.upload, []

    def upload_some(self: Location, source: Path) -> None:
        if len(uploaded) == 3:
            raise StorageError(f"{self} cannot be written: the endpoint does not answer")
        uploaded.append(self.name)
        upload(self, source)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="not answer") as raised:
        patch.setattr(Location, "upload", upload_some)
        prepare_movielens(remote_csv, out, options=OPTIONS)
    assert "run the same command again" in raised.value.__notes__[0]
    assert len(out.list(recursive=True)) == 3
    assert not (out / MANIFEST_NAME).exists()

    def note_upload(self: Location, source: Path) -> None:
        uploaded.append(self.name)
        upload(self, source)

    uploaded.clear()
    monkeypatch.setattr(Location, "upload", note_upload)
    prepare_movielens(remote_csv, out, options=OPTIONS)
    assert contents(out) == expected
    assert len(uploaded) == len(expected) - 3, "what was uploaded is not uploaded again"
    assert uploaded[-1] == MANIFEST_NAME


@pytest.mark.slow
def test_what_is_not_ours_below_the_output_is_never_written_over_or_deleted(store, remote_csv):
    out = Location.parse(store.url("shared"))
    (out / "checkpoints/best.bin").write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match=r"checkpoints/best.bin and no manifest"):
        prepare_movielens(remote_csv, out, options=OPTIONS)
    (out / MANIFEST_NAME).write_bytes(b'{"name": "somebody\'s web page"}')
    with pytest.raises(OutputExistsError, match="no manifest of ours"):
        prepare_movielens(remote_csv, out, options=OPTIONS, overwrite=True)
    assert set(contents(out)) == {"checkpoints/best.bin", MANIFEST_NAME}


def test_a_prepared_folder_is_replaced_when_told_without_what_others_put_there(
    store, remote_csv, expected
):
    out = Location.parse(store.url("guests"))
    fewer = OPTIONS.model_copy(update={"num_partitions": 2})
    prepare_movielens(remote_csv, out, options=OPTIONS)
    (out / "train/notes.md").write_bytes(b"precious")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        prepare_movielens(remote_csv, out, options=OPTIONS)
    manifest = prepare_movielens(remote_csv, out, options=fewer, overwrite=True)
    found = contents(out)
    assert found.pop("train/notes.md") == b"precious"
    parts = {name for name in found if name.startswith("train/")}
    assert parts == {file.path for file in manifest.splits["train"].files}, "older ones are gone"


@pytest.mark.slow
def test_other_work_at_the_same_place_removes_what_the_interrupted_one_uploaded(
    store, remote_csv, expected, monkeypatch
):
    out = Location.parse(store.url("changed"))
    upload = Location.upload

    def refuse_manifest(self: Location, source: Path) -> None:
        if self.name == MANIFEST_NAME:
            raise StorageError(f"{self} cannot be written")
        upload(self, source)

    more = OPTIONS.model_copy(update={"num_partitions": 6})
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(Location, "upload", refuse_manifest)
        prepare_movielens(remote_csv, out, options=more)
    assert "train/part-00005.parquet" in contents(out)
    prepare_movielens(remote_csv, out, options=OPTIONS)
    assert contents(out) == expected


@pytest.mark.slow
def test_a_whole_bucket_and_a_folder_that_holds_the_source_are_refused(
    store, remote_csv, csv_folder
):
    with pytest.raises(OutputExistsError, match="is a whole bucket; choose a folder in it"):
        prepare_movielens(csv_folder, f"s3://{store.bucket}", options=OPTIONS)
    with pytest.raises(OutputExistsError, match="which is read; choose another folder"):
        prepare_movielens(remote_csv, remote_csv, options=OPTIONS, overwrite=True)
    assert (remote_csv / "ratings.csv").exists()


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_named_before_any_work(remote_csv, tmp_path):
    with pytest.raises(StorageError, match="there is no bucket 'absent'; make it"):
        prepare_movielens(remote_csv, "s3://absent/out", options=OPTIONS)
    assert not list(tmp_path.iterdir())

"""Training from an S3 bucket: the same job as from the disk, with data fetched once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gloo import run_ranks
from tests.integration.object_store import ObjectStore, run_object_store
from tests.integration.session_cases import make_config, train_session
from trainer.data.errors import SourceMissingError
from trainer.data.inputs import on_this_node, resolve_inputs
from trainer.data.storage import Location
from trainer.ray_worker import WorkerConfig
from trainer.spec import JobSpec

SETTINGS = ("training.max_steps=6", "parallelism.workers=2", "parallelism.shard_group_size=1")


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with run_object_store() as store:
        yield store


@pytest.fixture
def uploaded(store: ObjectStore, small_movielens: Path) -> str:
    """URL of the small data set."""
    folder = Location.parse(store.url("movielens"))
    for path in sorted(small_movielens.rglob("*")):
        if path.is_file():
            (folder / path.relative_to(small_movielens).as_posix()).upload(path)
    return folder.text


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDLOOM_DATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def reading(spec: JobSpec, path: str) -> JobSpec:
    return spec.model_copy(update={"data": spec.data.model_copy(update={"path": path})})


def train_with(environment: Mapping[str, str], config: WorkerConfig) -> dict[str, Any]:
    """A session of a rank whose process has this environment; its metrics and where it read."""
    os.environ.update(environment)
    return train_session(config)["metrics"]


def test_two_ranks_train_from_a_bucket_as_from_the_disk(
    small_movielens: Path, uploaded: str, cache: Path, tmp_path: Path
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
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert not (folder / "train").exists(), "sizes need the manifest only"

    wanted = run_ranks(train_session, 2, local)[0]["metrics"]
    remote = replace(local, spec=resolved, run_dir=tmp_path / "remote")
    environment = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    environment["SHARDLOOM_DATA_CACHE"] = str(cache)
    found = run_ranks(train_with, 2, environment, remote)
    losses = {name for name in wanted if name.endswith(("loss", "rmse", "mae"))}
    assert losses
    assert {name: found[0][name] for name in losses} == {name: wanted[name] for name in losses}
    fetched = {path.name for path in (folder / "train").glob("*.parquet")}
    assert fetched == {path.name for path in (small_movielens / "train").glob("*.parquet")}


def test_data_that_is_there_needs_no_bucket(uploaded: str, cache: Path, small_movielens: Path):
    spec = reading(make_config(small_movielens, cache, *SETTINGS).spec, uploaded)
    folder = Path(on_this_node(spec).data.path)
    assert folder.is_relative_to(cache)
    assert on_this_node(spec).data.path == str(folder)
    assert on_this_node(reading(spec, str(small_movielens))).data.path == str(small_movielens)


def test_a_bucket_that_is_not_there_is_a_data_error(
    store: ObjectStore, cache: Path, small_movielens: Path
) -> None:
    spec = make_config(small_movielens, cache, *SETTINGS).spec
    for url in ("s3://elsewhere/movielens", store.url("empty")):
        with pytest.raises(SourceMissingError, match=f"{url} holds no manifest.json"):
            on_this_node(reading(spec, url))

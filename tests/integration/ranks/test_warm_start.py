"""Warm starts on real gloo ranks: whole, by table, in another sharding, and what is refused."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.files import Call
from tests.harness.ranks import run_in_turn
from tests.harness.small_model import TABLE_ROWS
from tests.integration.ranks.checkpoint_cases import (
    Sharding,
    build,
    held,
    refusal_of,
    spec_of,
    train_and_save,
    whole_tables,
)
from trainer.checkpoint import save_load
from trainer.checkpoint.files import Commit, RowOrder, write_marker
from trainer.checkpoint.resume import warm_start
from trainer.checkpoint.state_dict import METERS, load_packed
from trainer.protocol.run_dir import file_record
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.training import WarmStartSpec

SAVER = Sharding(2, 2, ("row_wise", "column_wise", "row_wise"), min_partition=8)
OTHER = Sharding(2, 1, ("row_wise",))


def save_checkpoint(folder: Path) -> dict[str, Any]:
    """A committed checkpoint, made with moment scale 1; what this rank held."""
    result = train_and_save(SAVER, folder)
    commit(folder)
    return result


def commit(folder: Path) -> None:
    """Put a marker for the files that are in `folder`."""
    if torch.distributed.get_rank() == 0:
        files = {path.name: file_record(path) for path in folder.iterdir()}
        row_order = RowOrder(96, "a digest")
        place = Commit(3, 0, 96, 96, 2, 2, "intra_host", 0.0, 1.0, row_order, files=files)
        write_marker(folder, place)
    torch.distributed.barrier()


def start(sharding: Sharding, warm: WarmStartSpec | None, rename: str = "") -> dict[str, Any]:
    """Build a job and start it warm; what this rank then holds."""
    spec = _spec(sharding, warm, rename)
    model, optimizers = build(sharding, spec)
    warm_start(spec, model, optimizers, Path("nowhere"))
    return held(model, optimizers)


def refusal(sharding: Sharding, warm: WarmStartSpec, rename: str = "") -> str:
    """The message with which a warm start is refused."""
    return refusal_of(lambda: start(sharding, warm, rename))


def refusals_of_code(folder: Path, ran: Path) -> tuple[str, ...]:
    """How a warm start and resumes from pickles that would make the folder `ran` are refused."""
    hostile, packed = Call(os.mkdir, ran), io.BytesIO()
    torch.save(hostile, packed)
    save_load.save(folder / "meters", {METERS: hostile})
    save_load.save(folder / "packed", {METERS: packed.getvalue()})
    save_load.save(folder / "metadata", {METERS: b""})
    if torch.distributed.get_rank() == 0:
        (folder / "metadata/.metadata").write_bytes(pickle.dumps(hostile))
    commit(folder / "metadata")
    return (
        refusal(OTHER, WarmStartSpec(path=str(folder / "metadata"))),
        *(refusal_of(partial(load_packed, folder / n, METERS)) for n in ("meters", "packed")),
    )


def _spec(sharding: Sharding, warm: WarmStartSpec | None, rename: str) -> JobSpec:
    spec = spec_of(sharding)
    checkpoint = spec.checkpoint.model_copy(update={"warm_start": warm})
    document = spec.model_copy(update={"checkpoint": checkpoint}).model_dump(mode="json")
    for table in document["embedding_tables"]:
        table["name"] = rename if rename and table["name"] == "movies" else table["name"]
    for feature in document["features"]:
        if rename and feature.get("table") == "movies":
            feature["table"] = rename
    return validate_spec(document)


def test_tables_and_dense_part_come_along_whole_or_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved, fresh, whole, by_name = run_in_turn(
        2,
        (save_checkpoint, folder),
        (start, OTHER, None),
        (start, OTHER, WarmStartSpec(path=str(folder))),
        (start, OTHER, WarmStartSpec(path=str(tmp_path), tables=("movies",), dense=False)),
    )
    expected, untouched = whole_tables(saved), whole_tables(fresh)
    found, partly = whole_tables(whole), whole_tables(by_name)
    for table in TABLE_ROWS:
        assert torch.equal(found[table], expected[table]), table
        assert torch.equal(
            partly[table], expected[table] if table == "movies" else untouched[table]
        )
        # Two copies at scale c = 2 where the saver had one: moments grow in proportion.
        assert found[f"{table}.moments"].any(), table
        assert partly[f"{table}.moments"].any() == (table == "movies"), table
    means = expected["users.moments"].mean(1, keepdim=True).expand_as(expected["users"])
    torch.testing.assert_close(found["users.moments"], 2 * means, rtol=2e-6, atol=0)
    for loaded, wanted in ((whole, saved), (by_name, fresh)):
        torch.testing.assert_close(loaded[0]["dense"], wanted[0]["dense"], atol=0, rtol=0)


def test_a_checkpoint_runs_no_code_and_every_rank_refuses_it(tmp_path: Path) -> None:
    ((first, second),) = run_in_turn(2, (refusals_of_code, tmp_path, tmp_path / "ran"))
    assert first == second, "every rank says the same"
    assert "metadata is no description of a checkpoint: it holds posix.mkdir" in first[0]
    assert "meters is refused: it holds posix.mkdir, which may run code" in first[1]
    assert "packed is refused" in first[2]
    assert all(each.startswith("CheckpointRefused") for each in first)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_what_is_missing_is_named_with_what_there_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    path = str(folder)
    (tmp_path / "empty").mkdir()
    _, renamed, other_optimizer, nowhere, empty = run_in_turn(
        2,
        (save_checkpoint, folder),
        (refusal, OTHER, WarmStartSpec(path=path), "films"),
        (refusal, replace(OTHER, optimizer="adagrad"), WarmStartSpec(path=path)),
        (refusal, OTHER, WarmStartSpec(path=str(tmp_path / "nowhere"))),
        (refusal, OTHER, WarmStartSpec(path=str(tmp_path / "empty"))),
    )
    tables = ", ".join(sorted(TABLE_ROWS))
    assert f"it has no table films; its tables are {tables}" in renamed[0]
    assert "checkpoint.warm_start.tables" in renamed[0]
    assert "optimizer state of table" in other_optimizer[0]
    assert "sharding, workers and placement may differ" in other_optimizer[0]
    assert "there is no folder" in nowhere[0]
    assert "holds no checkpoint that is whole" in empty[0]
    for messages in (renamed, other_optimizer, nowhere, empty):
        assert len(set(messages)) == 1, "every rank says the same"

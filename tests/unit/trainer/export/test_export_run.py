"""Whole exports of small checkpoints: what they predict, what is refused, what is left behind."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.harness.files import Call
from tests.unit.trainer.export.conftest import Exports
from tests.unit.trainer.export.export_case import (
    NUM_IDS,
    NUM_TAGS,
    make_spec,
    random_model,
    rows,
    spec_document,
    write_data,
    write_run,
)
from trainer.checkpoint.files import RowOrder, matches, remove_folder, write_marker
from trainer.checkpoint.save_load import CheckpointMismatch, CheckpointRefused
from trainer.data.decode import decode, layout_of
from trainer.data.manifest import Manifest
from trainer.errors import ColumnError, StorageError
from trainer.export import exporter, load
from trainer.export.__main__ import main
from trainer.export.artifact import (
    PROGRAM,
    ArtifactError,
    BadRow,
    ExportError,
    read_manifest,
    write_manifest,
)
from trainer.export.exporter import copy_vocabularies, export, with_data
from trainer.export.load import (
    check_memory,
    find_checkpoint,
    read_run_spec,
    stored_weights,
)
from trainer.export.predict import Predictor, in_own_unit
from trainer.export.report import Report, measure, outputs_of
from trainer.export.requests import ask_for, places_digest
from trainer.protocol.requests import Rewind
from trainer.protocol.run_dir import RunDir
from trainer.spec import validate_spec
from trainer.spec.data import VocabularySpec
from trainer.spec.job import JobSpec
from trainer.spec.training import Quantization
from trainer.storage import Location

MODEL = "archive/models/model.json"
CONSTANTS = "archive/data/constants/model_constants_config.json"
DCN = {
    "arch": "dcn_v2",
    "dense_arch": {"layer_sizes": [16, 8]},
    "over_arch": {"layer_sizes": [8, 2]},
    "tasks": [
        {"name": "stars", "loss": "mse"},
        {
            "name": "liked",
            "loss": "bce",
            "label": {"column": "liked", "offset_column": "low", "scale_column": "gap"},
        },
    ],
}


def trainers(spec: JobSpec, seed: int) -> dict[str, Any]:
    """What the trainer's own model predicts for `rows`."""
    table = rows()
    decoded = decode(table, layout_of(spec), lambda row: (Path("x"), row))
    return in_own_unit(outputs_of(random_model(spec, seed), decoded, spec), decoded, spec)


# By how much a prediction may be off, and bytes of a row of 8: those of int8 are filled up to 16.
_FORMS = {"none": (1e-5, 32), "fp16": (2e-3, 16), "int8": (3e-2, 16)}


@pytest.mark.parametrize("quantize", get_args(Quantization))
def test_an_export_predicts_what_the_model_of_the_checkpoint_does(
    exports: Exports, data: Path, quantize: Any
) -> None:
    folder, report = exports(quantize)
    wanted = trainers(make_spec(data), 20)["stars"]
    found = Predictor(folder).predict(rows())["stars"]
    assert wanted.std() > 0.1
    error, (most, row_bytes) = np.abs(found - wanted).max(), _FORMS[quantize]
    assert error <= most
    assert report.tasks["stars"].max_abs_error == pytest.approx(error, abs=1e-6)
    assert report.program_error is not None
    assert report.program_error < 1e-5
    assert report.num_rows == len(rows())
    assert 1 < report.program_bytes / (NUM_TAGS * row_bytes) < 1.7, "each table is written once"


def test_a_row_at_a_time_is_predicted_like_all_at_once(predictor: Predictor) -> None:
    table = rows()
    whole = predictor.predict(table)["stars"]
    names = [each["name"] for each in predictor.features["inputs"]]
    dicts = table.select(names).to_pylist()
    alone = [predictor.predict([row])["stars"][0] for row in dicts[:20]]
    np.testing.assert_allclose(alone, whole[:20], rtol=0, atol=1e-5)
    assert len(predictor.predict([])["stars"]) == 0


def test_tasks_of_dcn_v2_come_in_their_own_units_and_need_no_data_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: Any = tmp_path / "gone"
    assert "gone" in with_data(make_spec(gone))[1][0]
    away: Any = "s3://bucket/gone?endpoint_override=http://127.0.0.1:9&region=us-east-1"
    monkeypatch.setenv("SHARDLOOM_STORAGE_RETRY_S", "0")
    monkeypatch.setattr("trainer.storage._MAX_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    tables = spec_document(tmp_path)["embedding_tables"]
    tables = [table | {"data_type": "fp16"} for table in tables]
    spec = make_spec(away, model=DCN, embedding_tables=tables)
    report = export(write_run(tmp_path / "run", spec, 3), tmp_path / "out")
    assert report.not_measured is not None
    assert "gone" in report.notes[0]
    # The program is checked where no row can be compared.
    assert report.program_error is not None
    assert report.program_error < 1e-5
    found, wanted = Predictor(tmp_path / "out").predict(rows()), trainers(spec, 3)
    assert set(found) == set(wanted) == {"stars", "liked"}
    assert ((found["liked"] > 0) & (found["liked"] < 1)).all()
    for task, values in found.items():
        np.testing.assert_allclose(values, wanted[task], rtol=0, atol=3e-2)


def test_what_is_missing_from_a_row_is_an_empty_list_an_unknown_value_or_a_fault(
    predictor: Predictor,
) -> None:
    row = {"age": 1.0, "user": 3, "mean": 3.0, "spread": 1.0}
    full = row | {"price": None, "tags": [], "tag_weights": [], "colour": None, "seen": None}
    assert predictor.predict([row]) == predictor.predict([full])
    del row["user"]
    with pytest.raises(BadRow, match="row 1, 'user': is missing"):
        predictor.predict([full, row])


def test_a_bad_value_names_its_row_and_column(predictor: Predictor) -> None:
    good = {"age": 1.0, "user": 3, "colour": "red", "mean": 3.0, "spread": 1.0}
    for column, values in {
        "user": (40, -1, "3", 1.5, True, 2**64),
        "seen": ([1, "2"], [1.5]),
        "tags": (3,),
        "colour": (5,),
        "age": ("old", float("nan")),
        "spread": (0,),
        "aeg": (1,),
    }.items():
        for value in values:
            with pytest.raises(BadRow) as caught:
                predictor.predict([good, good | {column: value}])
            assert (caught.value.row, caught.value.column) == (1, column)
    with pytest.raises(BadRow, match="tag_weights"):
        predictor.predict([good | {"tags": [1, 2]}])
    table = rows()
    table = table.set_column(table.column_names.index("user"), "user", table["colour"])
    off = rows().set_column(rows().column_names.index("mean"), "mean", table["colour"])
    with pytest.raises(ColumnError, match="'mean' in the table is string, not a number"):
        predictor.predict(off)
    with pytest.raises(ColumnError, match="user"):
        predictor.predict(table)


def test_the_checkpoint_is_the_one_that_was_asked_for(run_dir: RunDir, tmp_path: Path) -> None:
    assert find_checkpoint(run_dir, "newest").commit.step == 20
    assert find_checkpoint(run_dir, "7").commit.step == 7
    # No checkpoint of the run was ever best.
    assert find_checkpoint(run_dir, "best").commit.step == 20
    with pytest.raises(ExportError, match="steps 7, 20"):
        find_checkpoint(run_dir, "8")
    with pytest.raises(ExportError, match="no checkpoint yet"):
        find_checkpoint(RunDir(tmp_path), "newest")
    folder = find_checkpoint(run_dir, "7").path
    assert find_checkpoint(run_dir, str(folder)).commit.step == 7
    with pytest.raises(ExportError, match="no whole checkpoint"):
        find_checkpoint(run_dir, str(tmp_path))


def test_what_a_rewind_left_behind_is_neither_newest_nor_best(data: Path, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_spec(data), 7, 20)
    newest = find_checkpoint(run_dir, "newest")
    write_marker(newest.path, replace(newest.commit, is_best=True))
    assert find_checkpoint(run_dir, "best").commit.step == 20
    rewind = Rewind(checkpoint=find_checkpoint(run_dir, "7").path.name, attempt_index=1)
    run_dir.rewind_path.write_text(rewind.model_dump_json())
    assert find_checkpoint(run_dir, "newest").commit.step == 7
    assert find_checkpoint(run_dir, "best").commit.step == 7
    # By its step it can be had until it is removed.
    assert find_checkpoint(run_dir, "20").commit.step == 20


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step-00000020-a0-r0"])
def test_a_link_to_checkpoints_of_another_job_is_not_followed_for_a_service(
    run_dir: RunDir, data: Path, tmp_path: Path, place: str
) -> None:
    theirs = write_run(tmp_path, make_spec(data))
    (theirs.root / place).parent.mkdir(exist_ok=True)
    (theirs.root / place).symlink_to(run_dir.root / place)
    assert find_checkpoint(theirs, "newest").commit.step == 20
    with pytest.raises(ExportError, match=f"{place} is a link"):
        find_checkpoint(theirs, "newest", places_digest(read_run_spec(theirs)))


def test_a_damaged_checkpoint_is_never_exported(data: Path, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, make_spec(data), 7, 20)
    newest = find_checkpoint(run_dir, "newest").path
    file = next(newest.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert find_checkpoint(run_dir, "newest").commit.step == 7
    with pytest.raises(ExportError, match="damaged"):
        find_checkpoint(run_dir, "20")


def test_a_checkpoint_that_retention_removes_meanwhile_is_followed_by_the_one_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path, make_spec(data), 7, 20)
    newest = find_checkpoint(run_dir, "newest").path

    def matches_after_retention(*file: Any) -> bool:
        remove_folder(newest)
        return matches(*file)

    monkeypatch.setattr(load, "matches", matches_after_retention)
    assert find_checkpoint(run_dir, "newest").commit.step == 7


@pytest.mark.parametrize("reader", ["stored_weights", "load_model"])
def test_a_checkpoint_that_retention_removes_while_it_is_loaded_is_followed_by_what_there_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    run_dir = write_run(tmp_path / "run", make_spec(data), 5, 7, 20)
    read, removed = getattr(exporter, reader), list[str]()

    def after_retention(*given: Any) -> Any:
        if not removed or removed == ["step-00000020-a0-r0", "again"]:
            removed.append(given[-1].name)
            remove_folder(given[-1])
        return read(*given)

    monkeypatch.setattr(exporter, reader, after_retention)
    assert export(run_dir, tmp_path / "out", max_report_rows=5).step == 7
    removed.append("again")
    with pytest.raises(ExportError, match=r"step-00000007-a0-r0 was removed while .*`newest`"):
        export(run_dir, tmp_path / "named", "7")


def test_where_the_checkpoints_of_a_job_are_not_mounted_an_export_says_so(
    data: Path, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", make_spec(data, checkpoint={"path": "/nowhere"}))
    with pytest.raises(ExportError, match=r"does not see /nowhere/run/checkpoints.*mount it"):
        find_checkpoint(run_dir, "newest")


def test_tables_that_do_not_fit_are_refused_before_anything_is_read(data: Path) -> None:
    spec = make_spec(data)
    needed = 9 * 8 * (2 * 40 + 16 + NUM_TAGS)
    check_memory(spec, "int8", needed)
    with pytest.raises(ExportError, match="more memory"):
        check_memory(spec, "int8", needed - 1)


def test_a_checkpoint_of_another_model_is_refused(run_dir: RunDir, tmp_path: Path) -> None:
    document = read_run_spec(run_dir).model_dump(mode="json")
    document["model"]["over_arch"]["layer_sizes"] = [9, 1]
    other = write_run(tmp_path / "run", validate_spec(document))
    other.checkpoints_dir.symlink_to(run_dir.checkpoints_dir)
    with pytest.raises(CheckpointMismatch, match=r"Size mismatch .*over_arch.*the spec changed"):
        export(other, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_what_cannot_be_exported_is_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", make_spec(data), 3)
    path = run_dir.attempt("job-x-a0").spec_path
    dynamic, own = spec_document(data), json.loads(path.read_text())
    dynamic["embedding_tables"][0] |= {"dynamic": {}, "num_embeddings": 48}
    path.write_text(json.dumps(validate_spec(dynamic).model_dump(mode="json")))
    with pytest.raises(ExportError, match="managed collision"):
        export(run_dir, tmp_path / "out")
    own["model"]["module"] = "mine:Net"
    path.write_text(json.dumps(own))
    with pytest.raises(ExportError, match="no user code may run here"):
        export(run_dir, tmp_path / "out", may_run_code=False)
    anew = write_data(tmp_path / "data")  # with more ids than its table has rows
    content = {"source": "s", "splits": {}, "columns": {}, "options": {}, "statistics": {}}
    manifest = Manifest(vocab_sizes={"user": NUM_IDS + 1}, **content)
    (anew / "manifest.json").write_text(manifest.model_dump_json())
    path.write_text(make_spec(anew).model_dump_json())
    found = find_checkpoint(run_dir, "newest")
    write_marker(found.path, replace(found.commit, row_order=RowOrder(90, "", "other ids")))
    with pytest.raises(ExportError, match="was prepared anew, with other vocabularies"):
        export(run_dir, tmp_path / "out")


def test_a_vocabulary_is_copied_as_what_it_says_and_no_other_file_of_the_host_is(
    data: Path, tmp_path: Path
) -> None:
    spec = make_spec(data)
    vocab = tmp_path / "data" / "vocab"
    vocab.mkdir(parents=True)
    values = {"value": ["ann"], "index": [1], "secret": ["s"]}
    pq.write_table(pa.table(values), vocab / "user.parquet")
    (tmp_path / "environ").write_text("KEY=secret")
    (vocab / "text.parquet").symlink_to(tmp_path / "environ")
    (vocab / "rows.parquet").symlink_to(data / "train" / "part-0.parquet")
    linked = spec.model_copy(update={"data": make_spec(vocab.parent).data})
    copy_vocabularies(linked, tmp_path / "copied")
    (copied,) = (tmp_path / "copied").rglob("*.parquet")
    assert pq.read_table(copied).to_pydict() == {"value": ["ann"], "index": [1]}
    (used,) = [each for each in spec.features if each.name == "user"]
    used = used.model_copy(update={"vocabulary": VocabularySpec(column="rows")})
    with pytest.raises(ColumnError, match="no column 'value'"):
        copy_vocabularies(linked.model_copy(update={"features": (used,)}), tmp_path / "none")


def test_a_spec_that_a_job_put_in_place_of_the_drivers_is_not_followed(
    data: Path, tmp_path: Path
) -> None:
    spec = make_spec(data)
    run_dir = write_run(tmp_path / "run", spec, 3)
    places = places_digest(spec)
    assert read_run_spec(run_dir, places) == spec
    resolved = run_dir.attempt("job-x-a0").resolved_spec_path
    resolved.write_text(make_spec(tmp_path).model_dump_json())
    with pytest.raises(ExportError, match="names another data"):
        export(run_dir, tmp_path / "out", places=places)
    resolved.unlink()
    (tmp_path / "key.json").write_text('{"name": "secret"}')
    resolved.symlink_to(tmp_path / "key.json")
    with pytest.raises(ExportError, match="is a link") as refused:
        read_run_spec(run_dir)
    assert "secret" not in str(refused.value)
    resolved.unlink()
    for path in (resolved, run_dir.rewind_path):
        os.mkfifo(path)
    with pytest.raises(ExportError, match="no regular file"):
        read_run_spec(run_dir)
    (checkpoint,) = run_dir.checkpoints_dir.iterdir()
    file = next(checkpoint.glob("*.distcp"))
    file.rename(tmp_path / "theirs")
    file.symlink_to(tmp_path / "theirs")
    with pytest.raises(ExportError, match="are damaged"):
        find_checkpoint(run_dir, "newest")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ExportError, match="are damaged"):
        find_checkpoint(run_dir, "newest")
    with pytest.raises(StorageError, match="it is a pipe"):
        Location.parse(file).read_bytes()
    (checkpoint / "COMMIT.json").unlink()
    os.mkfifo(checkpoint / "COMMIT.json")
    with pytest.raises(StorageError, match="no regular file"):
        find_checkpoint(run_dir, "newest")


@pytest.mark.parametrize(
    ("during", "place", "target"),
    [
        ("quantized", "model.pt2", "key"),
        ("quantized", "report.json", "key"),
        ("quantized", ".", "."),
        ("read_vocabulary", "vocabularies/vocab", "."),
    ],
)
def test_nothing_is_written_where_a_link_of_a_job_leads(
    run_dir: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
    place: str,
    target: str,
) -> None:
    folder = ask_for(run_dir, "newest", "int8")
    link = folder.root / ".artifact.partial" / place
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key").write_text("kept")
    function = getattr(exporter, during)

    def beside_a_job(*given: Any) -> Any:
        if link.exists():
            link.rename(tmp_path / "moved")
        link.symlink_to(outside / target)
        return function(*given)

    monkeypatch.setattr(exporter, during, beside_a_job)
    places = places_digest(read_run_spec(run_dir))
    assert main(["--request", str(folder.root), "--places", places]) == 1
    assert [path.name for path in outside.iterdir()] == ["key"]
    assert (outside / "key").read_text() == "kept"


def test_an_export_replaces_nothing_and_says_what_changed_since(
    run_dir: RunDir, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="exists already"):
        export(run_dir, exported)
    with pytest.raises(ArtifactError, match=r"no EXPORT\.json"):
        Predictor(tmp_path)
    manifest = read_manifest(exported)
    assert (manifest.job, manifest.step, manifest.quantize) == ("tiny", 20, "int8")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (path for path in exported.iterdir() if path.is_file()):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "spec.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"spec\.json is missing, or not as it was exported"):
        Predictor(copy)


def test_an_export_in_a_folder_with_a_colon_in_its_name_is_read(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("movielens:v2").symlink_to(exported)
    assert Predictor(Path("movielens:v2")).manifest.step == 20


def test_a_checkpoint_that_debians_python_wrote_can_be_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "run", make_spec(data), 3)
    (folder,) = run_dir.checkpoints_dir.iterdir()
    expected = stored_weights(folder)
    described = pickle.loads((folder / ".metadata").read_bytes())
    reduced = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    assert b"getattr" in pickle.dumps(described)
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    assert stored_weights(folder) == expected


def test_a_checkpoints_description_runs_nothing_and_gets_no_other_attribute(
    data: Path, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "run", make_spec(data), 3)
    (folder,) = run_dir.checkpoints_dir.iterdir()
    for call in (
        Call(Path.touch, tmp_path / "ran"),
        Call(getattr, Metadata, "__init__"),
        Call(getattr, _MEM_FORMAT_ENCODING, "mro"),
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(call))
        with pytest.raises(CheckpointRefused, match="is no description of a checkpoint"):
            stored_weights(folder)
    assert not (tmp_path / "ran").exists()


def _pickled_constant(records: dict[str, bytes], call: bytes, ran: Path) -> None:
    config = json.loads(records[CONSTANTS])
    first = next(iter(config["config"].values()))
    first["use_pickle"] = True
    records[f"archive/data/constants/{first['path_name']}"] = call
    records[CONSTANTS] = json.dumps(config).encode()


def _evaluated_size(records: dict[str, bytes], call: bytes, ran: Path) -> None:
    size = json.dumps({"expr_str": f"__import__('pathlib').Path('{ran}').touch()"})
    first = re.search(rb'{"expr_str": "[^"]*"', records[MODEL])
    assert first is not None
    records[MODEL] = records[MODEL].replace(first[0], size[:-1].encode())


def _operator_that_writes(records: dict[str, bytes], call: bytes, ran: Path) -> None:
    program = json.loads(records[MODEL])
    graph = program["graph_module"]["graph"]
    place = next(i for i, n in enumerate(graph["nodes"]) if n["target"].endswith("relu.default"))
    given = {
        "filename": {"as_string": str(ran)},
        "shared": {"as_bool": True},
        "size": {"as_int": 4},
    }
    node = {
        "target": "torch.ops.aten.from_file.default",
        "inputs": [{"name": name, "arg": arg, "kind": 1} for name, arg in given.items()],
        "outputs": [{"as_tensor": {"name": "written"}}],
        "name": "written",
    }
    graph["tensor_values"]["written"] = next(iter(graph["tensor_values"].values()))
    graph["nodes"].insert(place, graph["nodes"][place] | node)
    records[MODEL] = json.dumps(program).encode()


def _pickled_examples_and_a_guard(records: dict[str, bytes], call: bytes, ran: Path) -> None:
    records["archive/data/sample_inputs/model.pt"] = call
    guard = f"__import__('pathlib').Path('{ran}').touch() is None"
    program = json.loads(records[MODEL]) | {"guards_code": [guard]}
    records[MODEL] = json.dumps(program).encode()


@pytest.mark.parametrize(
    ("edit", "refusal"),
    [
        (_pickled_constant, r"pickled objects \(data/constants/"),
        (_evaluated_size, "__import__"),
        (_operator_that_writes, r"torch\.ops\.aten\.from_file"),
        (_pickled_examples_and_a_guard, None),
    ],
)
def test_a_program_runs_no_code_but_its_operators(
    exported: Path, run_dir: RunDir, tmp_path: Path, edit: Any, refusal: str | None
) -> None:
    folder, ran, call = tmp_path / "export", tmp_path / "ran", io.BytesIO()
    shutil.copytree(exported, folder)
    torch.save(Call(Path.touch, ran), call)
    with zipfile.ZipFile(folder / PROGRAM) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    edit(records, call.getvalue(), ran)
    with zipfile.ZipFile(folder / PROGRAM, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    manifest = read_manifest(exported)
    write_manifest(folder, **manifest.model_dump(exclude={"created", "files"}))
    refused = ""
    try:
        assert Predictor(folder).predict(rows(3))["stars"].shape == (3,)
    except ArtifactError as error:
        refused = str(error)
    assert not ran.exists()
    assert re.search(rf"is refused: it holds .*{refusal}", refused) if refusal else not refused


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table, Report]:
    """An export whose model cuts a score into buckets, with the rows that training weighs and the
    report; training leaves out the fourth row, and a file that is damaged."""
    folder = tmp_path_factory.mktemp("scored")
    values = pa.array([3.3, 0.7, 2.0, 3.4] * 10, pa.float32())
    table = rows(len(values)).append_column("score", values)
    ids = table["user"].to_numpy().copy()
    ids[3] = 10**6
    with_a_bad_row = table.set_column(table.column_names.index("user"), "user", pa.array(ids))
    for part, content in (("train", table), ("validation", with_a_bad_row)):
        (folder / "data" / part).mkdir(parents=True)
        pq.write_table(content, folder / "data" / part / "part-0.parquet")
    content = bytearray((folder / "data" / "validation" / "part-0.parquet").read_bytes())
    content[4:100] = bytes(96)
    (folder / "data" / "validation" / "part-1.parquet").write_bytes(content)
    document = spec_document(folder / "data", model=DCN)
    document["data"] |= {"on_bad_rows": "quarantine", "weight_column": "price"}
    document["features"].append({"name": "raw_score", "type": "dense", "column": "score"})
    score = {"name": "score", "type": "id", "table": "users"}
    document["features"].append(score | {"bucketize": {"boundaries": [0.7, 3.3]}})
    run_dir = write_run(folder / "run", validate_spec(document), 3)
    report = export(run_dir, folder / "out", quantize="none")
    return folder / "out", table, report


def test_a_number_sent_as_json_falls_into_the_bucket_of_training(scored: Any) -> None:
    folder, table, _ = scored
    predictor = Predictor(folder)
    names = [each["name"] for each in predictor.features["inputs"]]
    dicts = table.select(names).to_pylist()
    for row, sent in zip(dicts, [3.3, 0.7, 2, 3.4] * 10, strict=True):
        row["score"] = sent
    as_json = predictor.predict(dicts)["stars"]
    np.testing.assert_allclose(as_json, predictor.predict(table)["stars"], rtol=0, atol=1e-5)
    (score,) = [each for each in predictor.features["inputs"] if each["name"] == "score"]
    assert (score["kind"], score["wanted"], score["precision"]) == ("number", "a number", "float32")
    # A bucket has an id for what is missing; the dense feature of the same column has none.
    assert score["is_required"]
    with pytest.raises(BadRow, match="'score': is missing"):
        predictor.predict([dicts[0] | {"score": None}])


def test_a_probability_is_compared_with_the_class_by_the_weights_of_training(scored: Any) -> None:
    folder, table, report = scored
    assert (report.not_measured, report.num_rows) == (None, len(table) - 1)
    assert report.tasks["stars"].max_abs_error < 1e-5
    predictor = Predictor(folder)
    assert {"mean", "spread"} == {"mean", "spread", "low", "gap"} & set(
        predictor.features["example"]
    )
    kept = table.filter(pa.array([row != 3 for row in range(len(table))]))
    found = predictor.predict(kept)["liked"].astype(np.float64)
    is_liked = kept["liked"].to_numpy() > 0
    losses = -np.log(np.where(is_liked, found, 1 - found))
    wanted = np.average(losses, weights=kept["price"].to_numpy())
    assert report.tasks["liked"].export_metric == pytest.approx(wanted, abs=1e-6)
    assert report.tasks["liked"].trainer_metric == pytest.approx(wanted, abs=1e-4)


def test_a_program_that_gives_nan_for_any_task_is_no_export(
    scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor(scored[0])
    score = predictor.score
    monkeypatch.setattr(predictor, "score", lambda rows: score(rows) | {"liked": np.array(np.nan)})
    spec = predictor.spec.model_copy(update={"data": make_spec(Path("gone")).data})
    model = random_model(predictor.spec, 3)
    with pytest.raises(ExportError, match="differs by nan"):
        measure(predictor, model, model, spec)

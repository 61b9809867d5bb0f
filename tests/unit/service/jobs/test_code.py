"""Uploaded code: who may send it, what is refused, and that jobs get what they name."""

from __future__ import annotations

import io
import itertools
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from service.domain.models import JobStatus
from service.errors import CodeStoreFull
from service.jobs.code_archives import keep_code
from service.reconciler.housekeeping import Housekeeper
from service.settings import Settings
from tests.harness.builders import spec_document
from tests.harness.service import Api, problem_in
from trainer.protocol.code_archive import id_of, pack
from trainer.protocol.untrusted import MAX_ENTRIES


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    folder = tmp_path / "src"
    (folder / "towers").mkdir(parents=True)
    # A service that imported or ran this would not live to answer.
    (folder / "towers" / "__init__.py").write_text("import os\nos._exit(17)\n")
    return pack(folder)


def upload(api: Api, data: bytes) -> Any:
    return api.http.post("/v1/code", content=data, headers={"Content-Type": "application/zip"})


def module_spec(code: str | None) -> dict[str, Any]:
    tasks = [{"name": "rating", "loss": "mse"}]
    return spec_document(model={"module": "towers:Towers", "code": code, "tasks": tasks})


@pytest.fixture
def code(api: Api, archive: bytes) -> str:
    """Id of uploaded code."""
    return str(upload(api, archive).json()["id"])


def kept_upload(api: Api) -> Path:
    (path,) = (api.settings.runs_dir / ".code").iterdir()
    return path


def test_an_upload_is_kept_by_its_content(api: Api, archive: bytes) -> None:
    first, again = upload(api, archive), upload(api, archive)
    assert first.status_code == again.status_code == 201
    kept = first.json()
    assert kept == again.json()
    assert (kept["id"], kept["num_files"]) == (id_of(archive), 1)
    assert kept_upload(api).read_bytes() == archive


def test_a_damaged_copy_is_mended_by_the_next_upload(api: Api, archive: bytes) -> None:
    upload(api, archive)
    path = kept_upload(api)
    path.write_bytes(archive[:-1])
    upload(api, archive)
    assert path.read_bytes() == archive


def test_uploads_are_removed_when_they_are_old_and_no_living_job_or_sweep_names_them(
    api: Api, archive: bytes, tmp_path: Path
) -> None:
    archives = [archive]
    for name in ("more.py", "most.py"):
        (tmp_path / "src" / "towers" / name).write_text("")
        archives.append(pack(tmp_path / "src"))
    named, searched, unnamed = (upload(api, each).json()["id"] for each in archives)
    api.submit(**module_spec(named))
    vary = [{"path": "optimizer.sparse.lr", "values": [0.1]}]
    sweep = {"spec": module_spec(searched), "parameters": vary, "metric": "validation/rmse"}
    assert api.http.post("/v1/sweeps", json=sweep).status_code == 201
    folder = api.settings.runs_dir / ".code"
    hours = itertools.count(int(time.time()), 3600)
    keeper = Housekeeper(api.store, api.settings, lambda: float(next(hours)))
    keeper.run()
    for path in folder.iterdir():
        os.utime(path, (time.time() - 29 * 86400,) * 2)
    keeper.run()
    assert {path.stem for path in folder.iterdir()} == {named, searched, unnamed}
    for path in folder.iterdir():
        os.utime(path, (time.time() - 31 * 86400,) * 2)
    keeper.run()
    assert {path.stem for path in folder.iterdir()} == {named, searched}


def test_what_is_sent_or_named_again_is_as_new(api: Api, archive: bytes, code: str) -> None:
    path = kept_upload(api)
    os.utime(path, (0, 0))
    upload(api, archive)
    assert path.stat().st_mtime > 1e9
    os.utime(path, (0, 0))
    api.submit(**module_spec(code))
    assert path.stat().st_mtime > 1e9


def test_uploads_end_where_the_settings_say(tmp_path: Path, archive: bytes) -> None:
    settings = Settings(runs_dir=tmp_path, code_max_bytes=2**20)
    kept = tmp_path / ".code" / f"{'ab' * 32}.zip"
    kept.parent.mkdir()
    kept.write_bytes(b"x" * (2**20 - len(archive) + 1))
    with pytest.raises(CodeStoreFull, match="SHARDLOOM_CODE_MAX_BYTES"):
        keep_code(settings, archive)
    kept.write_bytes(b"x" * (2**20 - len(archive)))
    assert keep_code(settings, archive).id == id_of(archive)
    assert keep_code(settings, archive).id == id_of(archive)
    kept.unlink()
    kept.with_name(f"{id_of(archive)}.zip").unlink()
    for number in range(MAX_ENTRIES - 100):
        kept.with_name(f"{number:064x}.zip").touch()
    with pytest.raises(CodeStoreFull, match="9900 uploads"):
        keep_code(settings, archive)


def test_what_is_no_safe_archive_is_refused_and_leaves_nothing(api: Api) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        made.writestr("../evil.py", "import os")
    for data, said in ((buffer.getvalue(), "evil"), (b"#!/bin/sh", "not a zip"), (b"", "")):
        problem = problem_in(upload(api, data), 422, "invalid_request")
        assert problem["fields"][0]["path"] == "body" and said in problem["detail"]
    assert not (api.settings.runs_dir / ".code").exists()


def test_a_spec_or_clone_that_names_code_nobody_sent_is_refused(api: Api, code: str) -> None:
    clone = {"set": {"model.code": "ab" * 32}}
    for path, body in (
        ("jobs", {"spec": module_spec("ab" * 32)}),
        ("jobs?dry_run=true", {"spec": module_spec("ab" * 32)}),
        (f"jobs/{api.submit(**module_spec(code))}:clone", clone),
    ):
        problem = problem_in(api.http.post(f"/v1/{path}", json=body), 422, "invalid_spec")
        (field,) = problem["fields"]
        assert (field["path"], field["code"]) == ("model.code", "unknown_code"), path
    assert len(api.http.get("/v1/jobs").json()["items"]) == 1


def test_a_plan_of_a_module_is_made_without_its_code(api: Api, code: str) -> None:
    for named in (None, code):
        answer = api.http.post("/v1/jobs?dry_run=true", json={"spec": module_spec(named)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["sharding_groups"]


def test_damaged_code_is_never_handed_to_the_cluster(api: Api, archive: bytes, code: str) -> None:
    job_id = api.submit(**module_spec(code))
    kept_upload(api).write_bytes(archive[:-1])
    api.poll()
    job = api.store.get_job(job_id)
    assert (job.status, job.reason) == (JobStatus.FAILED, "bad_spec")
    assert "submit again with `shardloom submit --code DIR`" in job.message


def test_a_repeated_submit_is_answered_though_its_upload_is_gone(api: Api, code: str) -> None:
    body, headers = {"spec": module_spec(code)}, {"Idempotency-Key": "k"}
    first = api.http.post("/v1/jobs", json=body, headers=headers)
    kept_upload(api).unlink()
    again = api.http.post("/v1/jobs", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])


def test_a_clone_takes_the_code_of_its_job_where_the_upload_is_gone(
    api: Api, archive: bytes, code: str
) -> None:
    job_id = api.submit(**module_spec(code))
    api.poll()
    kept = kept_upload(api)
    kept.unlink()
    answer = api.http.post(f"/v1/jobs/{job_id}:clone", json={})
    assert answer.status_code == 201, answer.text
    assert kept.read_bytes() == archive

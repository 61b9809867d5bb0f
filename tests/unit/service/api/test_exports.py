"""Exports over REST, the SDK and the command line: asked for, downloaded, deleted."""

from __future__ import annotations

import io
import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from service.client.client import ShardloomClient
from service.client.errors import ExportFailed
from service.jobs.exports import archive, delete_export
from service.jobs.run_storage import run_dir_of
from tests.harness.service import (
    Api,
    only_export,
    problem_in,
    shardloom,
    with_checkpoint,
    write_export,
)
from trainer.export.requests import ExportFolder, list_exports


def asked(api: Api, job_id: str, **body: Any) -> Any:
    return api.http.post(f"/v1/jobs/{job_id}/exports", json=body)


@pytest.fixture
def job_id(api: Api) -> str:
    return with_checkpoint(api)


def test_an_export_is_asked_for_and_listed(api: Api, job_id: str) -> None:
    response = asked(api, job_id, checkpoint="best", quantize="fp16")
    body = response.json()
    assert response.status_code == 202
    assert (body["status"], body["checkpoint"], body["quantize"]) == ("queued", "best", "fp16")
    assert api.http.get(response.headers["Location"]).json() == body
    assert api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"] == [body]


def test_a_finished_export_comes_as_a_zip_with_its_report(api: Api, job_id: str) -> None:
    export_id = asked(api, job_id).json()["id"]
    path = f"/v1/jobs/{job_id}/exports/{export_id}"
    problem_in(api.http.get(f"{path}/archive"), 409, "export_not_ready")
    folder = only_export(api, job_id)
    write_export(folder)
    found = api.http.get(path).json()
    assert (found["status"], found["step"], found["report"]) == ("succeeded", 10, {"num_rows": 3})
    assert found["size_bytes"] > 70_000
    response = api.http.get(f"{path}/archive", headers={"Accept-Encoding": "gzip"})
    assert "Content-Encoding" not in response.headers
    with zipfile.ZipFile(io.BytesIO(response.content)) as packed:
        names = packed.namelist()
        assert packed.read("model.pt2") == b"\x01" * 70_000
        assert {info.external_attr >> 16 for info in packed.infolist()} == {0o644}
    assert names[-1] == "EXPORT.json"
    assert set(names[:-1]) == {"model.pt2", "report.json", "vocabularies/user.parquet"}


def test_a_link_shows_no_file_of_the_host(api: Api, job_id: str, tmp_path: Path) -> None:
    path = f"/v1/jobs/{job_id}/exports/{asked(api, job_id).json()['id']}"
    folder = only_export(api, job_id)
    secret = tmp_path / "secret"
    secret.write_text('{"message": "secret"}')
    for name in ("progress.txt", "failure.json"):
        (folder.root / name).symlink_to(secret)
        found = api.http.get(path)
        assert found.json()["status"] != "succeeded"
        assert "secret" not in found.text
    theirs = ExportFolder(tmp_path / "theirs")
    write_export(theirs)
    (folder.root / "artifact").symlink_to(theirs.artifact)
    assert api.http.get(path).json()["status"] != "succeeded"
    (folder.root / "artifact").unlink()
    write_export(folder)
    (folder.artifact / "report.json").unlink()
    (folder.artifact / "report.json").symlink_to(secret)
    problem_in(api.http.get(f"{path}/archive"), 503, "storage_unavailable")
    folder.root.rename(tmp_path / "outside")
    folder.root.symlink_to(tmp_path / "outside")
    problem_in(api.http.get(path), 404, "export_not_found")


@pytest.mark.parametrize(
    ("part", "damage"), [("(?s)^.*$", "{"), (r"(?<=size_bytes\":)\s*\d+", str(10**400))]
)
def test_a_damaged_export_hides_no_other(api: Api, job_id: str, part: str, damage: str) -> None:
    damaged = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    write_export(folder)
    marker = folder.artifact / "EXPORT.json"
    marker.write_text(re.sub(part, damage, marker.read_text()))
    whole = asked(api, job_id).json()["id"]
    path = f"/v1/jobs/{job_id}/exports"
    items = {each["id"]: each for each in api.http.get(path).json()["items"]}
    assert (items[damaged]["status"], items[whole]["status"]) == ("failed", "queued")
    assert "EXPORT.json cannot be read" in items[damaged]["message"]
    problem_in(api.http.get(f"{path}/{damaged}"), 409, "export_not_ready")


def test_what_cannot_be_exported_is_refused(api: Api, job_id: str) -> None:
    problem_in(asked(api, api.submit(name="other")), 404, "checkpoint_not_found")
    other = problem_in(asked(api, job_id, checkpoint="11"), 404, "checkpoint_not_found")
    assert "10" in other["detail"]
    for wanted in ("/etc", "\N{ARABIC-INDIC DIGIT ONE}\N{ARABIC-INDIC DIGIT ZERO}"):
        problem_in(asked(api, job_id, checkpoint=wanted), 422, "invalid_request")
    problem_in(asked(api, job_id, quantize="nonsense"), 422, "invalid_request")
    problem_in(api.http.get(f"/v1/jobs/{job_id}/exports/x-00000000"), 404, "export_not_found")
    assert asked(api, job_id).status_code == 202
    problem_in(asked(api, job_id), 409, "export_pending")
    only_export(api, job_id).fail("no")
    assert asked(api, job_id).status_code == 202


def test_asking_again_wakes_an_export_that_nobody_tries_any_more(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(api, job_id)
    submitted: list[ExportFolder] = []
    monkeypatch.setattr(api.http.app.state.context.exports, "submit", submitted.append)
    problem_in(asked(api, job_id), 409, "export_pending")
    assert submitted == [only_export(api, job_id)]


# ---- deletion


@pytest.mark.parametrize("state", ["queued", "damaged"])
def test_a_deleted_export_is_gone_with_its_files(api: Api, job_id: str, state: str) -> None:
    export_id = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    if state == "damaged":
        write_export(folder)
        (folder.artifact / "EXPORT.json").write_text("{")
    path = f"/v1/jobs/{job_id}/exports/{export_id}"
    answer = api.http.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert [found for found in folder.root.parent.rglob("*") if found.is_file()] == []
    for gone in (api.http.get(path), api.http.get(f"{path}/archive"), api.http.delete(path)):
        problem_in(gone, 404, "export_not_found")
    assert asked(api, job_id).status_code == 202  # what was queued stands in nobody's way


@pytest.fixture
def finished(api: Api, job_id: str) -> ExportFolder:
    asked(api, job_id)
    folder = only_export(api, job_id)
    write_export(folder)
    return folder


def test_a_download_that_has_begun_goes_on_to_its_end(finished: ExportFolder) -> None:
    chunks = archive(finished)
    delete_export(finished)
    assert not finished.root.exists()
    with zipfile.ZipFile(io.BytesIO(b"".join(chunks))) as packed:
        assert packed.testzip() is None
        assert packed.namelist()[-1] == "EXPORT.json"


def test_a_download_that_nobody_reads_keeps_no_file_open(finished: ExportFolder) -> None:
    def is_open() -> bool:
        links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return any(link.startswith(str(finished.root)) for link in links)

    chunks = archive(finished)
    assert is_open()
    chunks.close()  # type: ignore[attr-defined]
    assert not is_open()


# ---- the SDK


@pytest.mark.usefixtures("client")
def test_the_command_line_deletes_exports(api: Api, job_id: str) -> None:
    export_id = asked(api, job_id).json()["id"]
    refused = shardloom("exports", job_id, "--delete", export_id, stdin="n\n")
    assert refused.exit_code == 130
    assert "(newest, int8, queued)" in refused.stderr
    assert only_export(api, job_id).id == export_id
    done = shardloom("exports", job_id, "--delete", export_id, "--yes")
    assert done.stdout == f"export {export_id} of {job_id} is deleted\n"
    again = shardloom("exports", job_id, "--delete", export_id, "--yes")
    assert (again.exit_code, "has no export" in again.stderr) == (2, True)


def test_the_sdk_waits_for_an_export_and_saves_it_whole(
    api: Api, client: ShardloomClient, job_id: str, tmp_path: Path
) -> None:
    requested = client.request_export(job_id)
    write_export(only_export(api, job_id))
    assert client.wait_for_export(job_id, requested.id).step == 10
    to = client.download_export(job_id, requested.id, tmp_path / "out")
    assert (to / "vocabularies" / "user.parquet").read_bytes() == b"v"
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out"]
    with pytest.raises(FileExistsError):
        client.download_export(job_id, requested.id, to)
    again = client.request_export(job_id)
    list_exports(run_dir_of(api.settings, job_id))[-1].fail("no memory")
    with pytest.raises(ExportFailed, match="no memory"):
        client.wait_for_export(job_id, again.id)

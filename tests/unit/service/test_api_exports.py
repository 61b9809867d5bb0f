"""Exports over REST: asked for, made by a process beside the service, downloaded."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.artifact_errors import ExportRefused, ExportUnavailable
from service.client import ShardloomClient
from service.client_errors import ExportFailed
from service.export_archive import archive
from service.export_removal import delete_export, remove_all_deleted, remove_old_exports
from service.exports import (
    ExportRunner,
    environment,
    request_export,
    unfinished,
    with_keys_of_job,
)
from service.housekeeping import Housekeeper
from service.settings import Settings
from service.submission import run_dir_of
from tests.unit.service.api_house import LOOPBACK_URL, Api, problem_in
from tests.unit.service.builders import batch, checkpoint
from tests.unit.service.fake_service import shardloom
from trainer.export.artifact import write_manifest
from trainer.export.folder import ExportFolder, ask_for, list_exports

FACTS = {"job": "ratings", "checkpoint": "step-10", "step": 10, "quantize": "int8", "versions": {}}


def finish(folder: ExportFolder) -> None:
    """Let an export be done."""
    (folder.artifact / "vocabularies").mkdir(parents=True)
    (folder.artifact / "model.pt2").write_bytes(b"\x01" * 70_000)
    (folder.artifact / "vocabularies" / "user.parquet").write_bytes(b"v")
    (folder.artifact / "report.json").write_text('{"num_rows": 3}')
    write_manifest(folder.artifact, **FACTS)


def asked(api: Api, job_id: str, **body: Any) -> Any:
    return api.http.post(f"/v1/jobs/{job_id}/exports", json=body)


@pytest.fixture
def job_id(api: Api) -> str:
    """A job with a checkpoint of step 10."""
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(checkpoint(10)))
    return job_id


def only_export(api: Api, job_id: str) -> ExportFolder:
    (folder,) = list_exports(run_dir_of(api.settings, job_id))
    return folder


@pytest.mark.parametrize(
    ("python", "missing"),
    [("/nowhere/python", "it is not there"), (sys.executable, "it has no torch, torchrec")],
)
def test_a_service_whose_python_cannot_export_says_so_before_anything_is_asked_for(
    api: Api, job_id: str, tmp_path: Path, python: str, missing: str
) -> None:
    # A Python of this version without a package.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {python} -I -S "$@"\n')
    bare.chmod(0o755)
    poor = str(bare) if python == sys.executable else python
    settings = api.settings.model_copy(update={"trainer_python": poor})
    job = api.store.get_job(job_id)
    with pytest.raises(ExportUnavailable, match=missing) as raised:
        request_export(api.store, settings, job, "newest", "none")
    assert "Dockerfile.service-export" in str(raised.value)
    assert raised.value.status == 409
    assert list_exports(run_dir_of(settings, job_id)) == []


def test_an_export_is_asked_for_and_listed(api: Api, job_id: str) -> None:
    response = asked(api, job_id, checkpoint="best", quantize="fp16")
    assert response.status_code == 202
    body = response.json()
    assert (body["status"], body["checkpoint"], body["quantize"]) == ("queued", "best", "fp16")
    assert api.http.get(response.headers["Location"]).json()["id"] == body["id"]
    assert [each["id"] for each in api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"]] == [
        body["id"]
    ]


def test_a_finished_export_comes_as_a_tar_with_its_report(api: Api, job_id: str) -> None:
    export_id = asked(api, job_id).json()["id"]
    path = f"/v1/jobs/{job_id}/exports/{export_id}"
    problem_in(api.http.get(f"{path}/archive"), 409, "export_not_ready")
    folder = only_export(api, job_id)
    finish(folder)
    found = api.http.get(path).json()
    assert (found["status"], found["step"], found["report"]) == ("succeeded", 10, {"num_rows": 3})
    assert found["size_bytes"] > 70_000
    response = api.http.get(f"{path}/archive", headers={"Accept-Encoding": "gzip"})
    assert int(response.headers["Content-Length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content)) as tar:
        names = tar.getnames()
        model = tar.extractfile("model.pt2")
        assert model is not None
        assert model.read() == b"\x01" * 70_000
    assert names[-1] == "EXPORT.json"
    assert set(names) == {
        "EXPORT.json",
        "model.pt2",
        "report.json",
        "vocabularies/user.parquet",
    }


def test_a_link_out_of_an_export_is_not_followed(api: Api, job_id: str, tmp_path: Path) -> None:
    export_id = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    finish(folder)
    (tmp_path / "secret").write_text("s")
    (folder.artifact / "report.json").unlink()
    (folder.artifact / "report.json").symlink_to(tmp_path / "secret")
    response = api.http.get(f"/v1/jobs/{job_id}/exports/{export_id}/archive")
    problem_in(response, 503, "storage_unavailable")


@pytest.mark.parametrize("name", ["progress.txt", "failure.json", "artifact", "export.log"])
def test_a_link_shows_no_file_of_the_host(
    api: Api, job_id: str, tmp_path: Path, name: str, running: Callable[[Script], ExportRunner]
) -> None:
    export_id = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    outside = tmp_path / "outside"
    if name == "artifact":
        outside.mkdir()
        (outside / "report.json").write_text('{"secret": 1}')
        write_manifest(outside, **FACTS)
    else:
        outside.write_text('{"message": "secret"}')
    before = outside.stat()
    (folder.root / name).symlink_to(outside)
    found = api.http.get(f"/v1/jobs/{job_id}/exports/{export_id}")
    assert found.json()["status"] != "succeeded"
    assert "secret" not in found.text
    runner = running(Script("print('written')"))
    runner.close()
    assert outside.stat().st_size == before.st_size


def test_an_export_that_is_a_link_is_not_there(api: Api, job_id: str, tmp_path: Path) -> None:
    export_id = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    folder.root.rename(tmp_path / "outside")
    folder.root.symlink_to(tmp_path / "outside")
    response = api.http.get(f"/v1/jobs/{job_id}/exports/{export_id}")
    problem_in(response, 404, "export_not_found")


def test_a_damaged_export_hides_no_other(api: Api, job_id: str) -> None:
    damaged = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    finish(folder)
    (folder.artifact / "EXPORT.json").write_text("{")
    whole = asked(api, job_id).json()["id"]
    path = f"/v1/jobs/{job_id}/exports"
    items = {each["id"]: each for each in api.http.get(path).json()["items"]}
    assert (items[damaged]["status"], items[whole]["status"]) == ("failed", "queued")
    assert "EXPORT.json cannot be read" in items[damaged]["message"]
    problem_in(api.http.get(f"{path}/{damaged}"), 409, "export_not_ready")


def test_what_cannot_be_exported_is_refused(api: Api, job_id: str) -> None:
    problem_in(asked(api, api.submit(name="other")), 404, "checkpoint_not_found")
    assert (
        "10"
        in problem_in(asked(api, job_id, checkpoint="11"), 404, "checkpoint_not_found")["detail"]
    )
    problem_in(asked(api, job_id, checkpoint="/etc"), 422, "invalid_request")
    problem_in(asked(api, job_id, quantize="int4"), 422, "invalid_request")
    problem_in(api.http.get(f"/v1/jobs/{job_id}/exports/x-00000000"), 404, "export_not_found")
    assert asked(api, job_id).status_code == 202
    problem_in(asked(api, job_id), 409, "export_pending")
    only_export(api, job_id).fail("no")
    assert asked(api, job_id).status_code == 202


def test_a_repeated_request_makes_one_export(api: Api, job_id: str) -> None:
    path, headers = f"/v1/jobs/{job_id}/exports", {"Idempotency-Key": "once"}
    answers = [api.http.post(path, json={}, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(list_exports(run_dir_of(api.settings, job_id))) == 1


# ---- the process that makes them


def wanted(api: Api, job_id: str) -> ExportFolder:
    """An export that was asked for, as the API does."""
    return request_export(api.store, api.settings, api.store.get_job(job_id), "newest", "int8")


class Script:
    """Stands in for the trainer: runs a line of Python with the folder of the export."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.environments: list[dict[str, str]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        import subprocess

        self.environments.append(options["env"])
        line = self.lines.pop(0)
        return subprocess.Popen([sys.executable, "-c", line, *command[1:]], **options)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


@pytest.fixture
def running(api: Api) -> Iterator[Callable[[Script], ExportRunner]]:
    """Starts runners over the API's storage."""
    runners: list[ExportRunner] = []

    def start(script: Script, settings: Settings | None = None) -> ExportRunner:
        runners.append(ExportRunner(api.store, settings or api.settings, script))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


def test_a_process_that_dies_leaves_a_failed_export(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner]
) -> None:
    script = Script("import sys; print('boom'); sys.exit(9)")
    runner = running(script)
    folder = wanted(api, job_id)
    runner.submit(folder)
    until(lambda: folder.status == "failed")
    assert "ended with code 9: boom" in folder.message
    assert (folder.root / "export.log").read_text() == "boom\n"


def test_a_service_that_is_restarted_goes_on_with_what_is_not_done(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner]
) -> None:
    folder = wanted(api, job_id)
    started = folder.root / "started"
    hang = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    runner = running(Script(hang))
    until(started.exists)
    runner.close()
    assert folder.status == "queued"
    running(Script("import sys; assert sys.argv[1:4] == ['-m', 'trainer.export', '--request']"))
    until(lambda: folder.status == "failed")
    assert "code 0" in folder.message


def test_only_what_a_service_asked_for_is_made(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner]
) -> None:
    run_dir = run_dir_of(api.settings, job_id)
    by_driver = ask_for(run_dir, "newest", "int8")
    folder = wanted(api, job_id)  # nobody will make the other one: it does not stand in the way
    altered = json.loads((folder.root / "request.json").read_text()) | {"checkpoint": "best"}
    copied = run_dir.exports_dir / "x-0000000a"
    copied.mkdir()
    (copied / "request.json").write_text((folder.root / "request.json").read_text())
    (folder.root / "request.json").write_text(json.dumps(altered))
    assert unfinished(api.settings) == []
    script = Script()
    runner = running(script)
    for each in (by_driver, ExportFolder(copied), folder):
        runner.submit(each)
    until(lambda: runner._queue.empty())
    runner.close()
    assert script.environments == []


def test_a_buried_job_is_not_exported(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner]
) -> None:
    wanted(api, job_id)
    root = run_dir_of(api.settings, job_id).root
    root.rename(root.with_name(f"{job_id}.deleted-1"))
    assert unfinished(api.settings) == []


@pytest.mark.parametrize(("auth", "is_refused"), [("local", False), ("required", True)])
def test_the_process_refuses_user_code_where_many_submit(
    api: Api,
    job_id: str,
    running: Callable[[Script], ExportRunner],
    auth: str,
    is_refused: bool,
) -> None:
    folder = wanted(api, job_id)
    script = Script("import sys; print('--no-user-code' in sys.argv)")
    running(script, api.settings.model_copy(update={"auth": auth}))
    until(lambda: folder.status == "failed")
    assert f"code 0: {is_refused}" in folder.message


def test_an_export_is_made_again_when_storage_is_back(
    api: Api,
    job_id: str,
    running: Callable[..., ExportRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.exports._RETRY_AFTER_S", (0.01,))
    fail, faults = ExportFolder.fail, iter([OSError(28, "No space left on device")])

    def full_at_first(folder: ExportFolder, message: str) -> None:
        if (fault := next(faults, None)) is not None:
            raise fault
        fail(folder, message)

    monkeypatch.setattr(ExportFolder, "fail", full_at_first)
    folder = wanted(api, job_id)
    running(Script("print('first')", "print('second')"))
    until(lambda: folder.status == "failed")
    assert "code 0: second" in folder.message


def test_asking_again_wakes_an_export_that_nobody_tries_any_more(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = wanted(api, job_id)
    submitted: list[ExportFolder] = []
    monkeypatch.setattr(api.http.app.state.context.exports, "submit", submitted.append)
    problem_in(asked(api, job_id), 409, "export_pending")
    assert submitted == [folder]


def test_a_process_that_is_stopped_with_the_service_leaves_its_export_queued(
    api: Api, job_id: str, running: Callable[..., ExportRunner]
) -> None:
    folder = wanted(api, job_id)
    ready = folder.root / "ready"
    line = (
        f"import pathlib, os, signal; own = os.getpgid(0) == os.getpid(); print(own, flush=True); "
        f"pathlib.Path({str(ready)!r}).touch(); os.kill(os.getpid(), signal.SIGTERM)"
    )
    runner = running(Script(line))
    until(ready.exists)
    runner.close()
    assert folder.last_output == "True"
    assert folder.status == "queued"


def test_one_that_takes_too_long_says_so(
    api: Api,
    job_id: str,
    running: Callable[..., ExportRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.exports._LONGEST_S", 0.5)
    folder = wanted(api, job_id)
    running(Script("import time; time.sleep(600)"))
    until(lambda: folder.status == "failed")
    assert "it took longer than" in folder.message


def test_the_process_sees_no_secret_of_the_service() -> None:
    ours = {"PATH": "/bin", "SHARDLOOM_SECRET_KEY": "k", "SHARDLOOM_DATABASE_URL": "s"}
    assert environment(ours) == {"PATH": "/bin"}


def test_the_process_can_read_the_storage_that_jobs_read() -> None:
    from trainer.data.remote import CACHE_VARIABLE, MAX_BYTES_VARIABLE

    ours = dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"], "s")
    ours |= {CACHE_VARIABLE: "/cache", MAX_BYTES_VARIABLE: "9"}
    assert environment(ours) == ours


def test_a_job_with_keys_of_its_own_is_exported_with_them_alone() -> None:
    ours = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "ours", "AWS_SESSION_TOKEN": "ours"}
    ours["AWS_PROFILE"] = "ours"
    theirs = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    elsewhere = {"AWS_ENDPOINT_URL": "http://x", "AWS_CONFIG_FILE": "/tmp/x", "LD_PRELOAD": "x"}
    found = with_keys_of_job(ours, theirs | elsewhere, may_choose_endpoint=False)
    assert found == {"PATH": "/bin"} | theirs
    found = with_keys_of_job(ours, theirs | elsewhere, may_choose_endpoint=True)
    assert found == {"PATH": "/bin", "AWS_ENDPOINT_URL": "http://x"} | theirs
    assert with_keys_of_job(ours, {"WANDB": "x"}, may_choose_endpoint=True) == ours


def test_user_code_never_runs_beside_a_service_that_asks_for_credentials(
    api: Api, job_id: str
) -> None:
    job = api.store.get_job(job_id)
    model = job.spec.model.model_copy(update={"module": "mine:Net"})
    theirs = replace(job, spec=job.spec.model_copy(update={"model": model}))
    guarded = api.settings.model_copy(update={"auth": "required"})
    with pytest.raises(ExportRefused, match="--run-dir"):
        request_export(api.store, guarded, theirs, "newest", "int8")
    assert request_export(api.store, api.settings, theirs, "newest", "int8").status == "queued"


# ---- deletion


def files_of(folder: ExportFolder) -> list[Path]:
    return [path for path in folder.root.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize("state", ["succeeded", "failed", "queued", "damaged"])
def test_a_deleted_export_is_gone_with_its_files(api: Api, job_id: str, state: str) -> None:
    export_id = asked(api, job_id).json()["id"]
    folder = only_export(api, job_id)
    if state == "failed":
        folder.fail("no")
    elif state != "queued":
        finish(folder)
    if state == "damaged":
        (folder.artifact / "EXPORT.json").write_text("{")
    path = f"/v1/jobs/{job_id}/exports/{export_id}"
    answer = api.http.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert files_of(folder) == []
    for gone in (api.http.get(path), api.http.get(f"{path}/archive"), api.http.delete(path)):
        problem_in(gone, 404, "export_not_found")
    assert asked(api, job_id).status_code == 202  # what was queued stands in nobody's way


def test_a_download_that_has_begun_goes_on_to_its_end(api: Api, job_id: str) -> None:
    asked(api, job_id)
    folder = only_export(api, job_id)
    finish(folder)
    size, chunks = archive(folder.artifact)
    delete_export(folder)
    assert not folder.root.exists()
    content = b"".join(chunks)
    assert len(content) == size
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert tar.getnames()[-1] == "EXPORT.json"


def test_a_download_that_nobody_reads_keeps_no_file_open(api: Api, job_id: str) -> None:
    asked(api, job_id)
    folder = only_export(api, job_id)
    finish(folder)

    def is_open() -> bool:
        links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
        return any(link.startswith(str(folder.root)) for link in links)

    _, chunks = archive(folder.artifact)
    assert is_open()
    chunks.close()  # type: ignore[attr-defined]
    assert not is_open()


def test_deleting_an_export_that_is_made_ends_its_process(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner]
) -> None:
    folder = wanted(api, job_id)
    pid_path = api.settings.runs_dir / "pid"
    hang = (
        f"import fcntl, os, pathlib, sys, time; folder = pathlib.Path(sys.argv[4]); "
        f"file = open(folder / 'lock', 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        f"path = pathlib.Path({str(pid_path)!r}); path.with_suffix('.p').write_text("
        f"str(os.getpid())); path.with_suffix('.p').rename(path); time.sleep(600)"
    )
    running(Script(hang))
    until(pid_path.exists)
    assert folder.status == "running"
    assert api.http.delete(f"/v1/jobs/{job_id}/exports/{folder.id}").status_code == 204
    assert api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"] == []
    until(lambda: not folder.root.exists())
    assert files_of(folder) == []
    until(lambda: not Path(f"/proc/{pid_path.read_text()}").exists())


@pytest.mark.parametrize("cut_off", ["marked", "renamed", "half_removed"])
def test_a_deletion_that_was_cut_off_is_finished_at_the_next_start(
    api: Api, job_id: str, running: Callable[[Script], ExportRunner], cut_off: str
) -> None:
    asked(api, job_id)
    folder = only_export(api, job_id)
    finish(folder)
    folder.mark_deleted()
    if cut_off != "marked":
        gone = folder.root.rename(folder.root.with_name(f".{folder.id}.gone"))
    if cut_off == "half_removed":
        (gone / "deleting").unlink()
    assert list_exports(run_dir_of(api.settings, job_id)) == []
    running(Script())
    assert files_of(folder) == []
    assert list(folder.root.parent.iterdir()) == []


def test_exports_are_kept_for_as_long_as_the_settings_say(api: Api, job_id: str) -> None:
    old = wanted(api, job_id)
    finish(old)
    made = wanted(api, job_id)
    until(lambda: made.wanted.created > old.wanted.created)
    now = old.wanted.created + 2 * 86400.0
    kept = api.settings.model_copy(update={"export_retention_days": 0.0})
    short = api.settings.model_copy(update={"export_retention_days": 2.0})
    assert remove_old_exports(kept, now + 1e9) == 0
    assert remove_old_exports(short, now) == 0
    with made.hold():  # somebody makes it
        assert remove_old_exports(short, now + 10) == 1
    assert [each.id for each in list_exports(run_dir_of(api.settings, job_id))] == [made.id]
    assert not old.root.exists()


def test_housekeeping_deletes_old_exports(api: Api, job_id: str) -> None:
    folder = wanted(api, job_id)
    settings = api.settings.model_copy(update={"export_retention_days": 1.0})
    now = folder.wanted.created + 86401.0
    Housekeeper(api.store, settings, lambda: now).run()
    assert not folder.root.exists()


def test_an_export_that_cannot_be_deleted_keeps_no_other(
    api: Api, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    folders = []
    for _ in range(3):
        folders.append(wanted(api, job_id))
        finish(folders[-1])
    barred, old, cut_off = folders
    (barred.root / "deleting").symlink_to("/nonexistent/x")
    cut_off.mark_deleted()
    settings = api.settings.model_copy(update={"export_retention_days": 1.0})
    now = cut_off.wanted.created + 86401.0
    Housekeeper(api.store, settings, lambda: now).run()
    assert barred.root.exists() and not old.root.exists() and not cut_off.root.exists()
    assert f"cannot delete the old export {barred.root}, trying again" in caplog.text


def test_what_a_link_leads_to_is_never_deleted(api: Api, job_id: str, tmp_path: Path) -> None:
    asked(api, job_id)
    folder = only_export(api, job_id)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kept").write_text("k")
    (folder.root / "artifact").symlink_to(tmp_path / "theirs")
    (folder.root.parent / ".x-0000000a.gone").symlink_to(tmp_path / "theirs")
    delete_export(folder)
    remove_all_deleted(api.settings)
    assert not folder.root.exists()
    assert (tmp_path / "theirs" / "kept").read_text() == "k"


# ---- the SDK


def test_the_sdk_and_the_command_line_delete_exports(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_client(_url: str | None) -> ShardloomClient:
        return ShardloomClient(LOOPBACK_URL, transport=api.http._transport)

    monkeypatch.setattr("service.commands.context.open_client", open_client)
    export_id = asked(api, job_id).json()["id"]
    refused = shardloom("exports", job_id, "--delete", export_id, stdin="n\n")
    assert refused.exit_code == 1
    assert "(newest, int8, queued)" in refused.stderr
    assert only_export(api, job_id).id == export_id
    done = shardloom("exports", job_id, "--delete", export_id, "--yes")
    assert done.stdout == f"export {export_id} of {job_id} is deleted\n"
    again = shardloom("exports", job_id, "--delete", export_id, "--yes")
    assert again.exit_code == 2
    assert "has no export" in again.stderr


def test_the_sdk_waits_for_an_export_and_saves_it_whole(
    api: Api, job_id: str, tmp_path: Path
) -> None:
    with ShardloomClient(LOOPBACK_URL, transport=api.http._transport) as client:
        requested = client.request_export(job_id)
        finish(only_export(api, job_id))
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

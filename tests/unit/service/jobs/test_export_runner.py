"""The process beside the service that makes exports, and how exports are removed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.errors import ExportRefused
from service.jobs.export_runner import ExportRunner, environment, with_keys_of_job
from service.jobs.exports import (
    delete_export,
    may_be_made,
    remove_all_deleted,
    remove_old_exports,
    request_export,
    unfinished,
)
from service.jobs.run_storage import run_dir_of
from service.reconciler.housekeeping import Housekeeper
from service.settings import Settings
from tests.harness.service import Api, with_checkpoint, write_export
from tests.harness.wait import wait_for
from trainer.export.requests import HELD, ExportFolder, ask_for, list_exports, places_digest


def wanted(api: Api, job_id: str) -> ExportFolder:
    """An export that was asked for, as the API does."""
    return request_export(api.store, api.settings, api.store.get_job(job_id), "newest", "int8")


class Script:
    """Stands in for the trainer: runs a line of Python with the folder of the export."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.environments: list[dict[str, str]] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        self.environments.append(options["env"])
        line = self.lines.pop(0)
        return subprocess.Popen([sys.executable, "-c", line, *command[1:]], **options)


Start = Callable[..., ExportRunner]


def wait_until_failed(folder: ExportFolder) -> None:
    wait_for(lambda: folder.status == "failed", "the export to fail")


@pytest.fixture
def running(api: Api) -> Iterator[Start]:
    """Starts runners over the API's storage."""
    runners: list[ExportRunner] = []

    def start(script: Callable[..., Any], settings: Settings | None = None) -> ExportRunner:
        runners.append(ExportRunner(api.store, settings or api.settings, script))
        runners[-1].start()
        return runners[-1]

    yield start
    for runner in runners:
        runner.close()


@pytest.fixture
def job_id(api: Api) -> str:
    return with_checkpoint(api)


def test_an_export_that_the_python_here_cannot_make_says_what_to_do(
    api: Api, job_id: str, tmp_path: Path, running: Start
) -> None:
    bare = tmp_path / "bare"  # a Python that has no packages of its own
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    for python, said in (
        ("/nowhere/python", "No such file"),
        (text, "Exec format error"),
        (text / "python", "Not a directory"),
        (tmp_path, "Permission denied"),
        (bare, "No module named"),
    ):
        settings = api.settings.model_copy(update={"trainer_python": str(python)})
        folder = wanted(api, job_id)
        runner = running(subprocess.Popen, settings)
        wait_until_failed(folder)
        runner.close()
        assert said in folder.message
        assert "Dockerfile.service-export" in folder.message
        assert "on_success" in folder.message


def test_a_process_that_dies_leaves_a_failed_export(api: Api, job_id: str, running: Start) -> None:
    script = Script("import sys; print('boom'); sys.exit(9)")
    runner = running(script)
    folder = wanted(api, job_id)
    runner.submit(folder)
    wait_until_failed(folder)
    assert "ended with code 9: boom" in folder.message
    assert (folder.root / "export.log").read_text() == "boom\n"


# systemd ends all processes of a unit: this one before the service itself.
@pytest.mark.parametrize("then", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_service_that_is_restarted_goes_on_with_what_is_not_done(
    api: Api, job_id: str, running: Start, then: str
) -> None:
    folder = wanted(api, job_id)
    started = folder.root / "started"
    touch = f"pathlib.Path({str(started)!r}).touch()"
    runner = running(Script(f"import os, pathlib, signal, time; {touch}; {then}"))
    wait_for(started.exists, "the process")
    runner.close()
    assert folder.status == "queued"
    running(Script("import sys; assert sys.argv[1:4] == ['-m', 'trainer.export', '--request']"))
    wait_until_failed(folder)
    assert "code 0" in folder.message


def test_only_what_a_service_asked_for_is_made(
    api: Api, job_id: str, running: Start, monkeypatch: pytest.MonkeyPatch
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
    wait_for(lambda: runner._queue.empty(), "the queue to be empty")
    runner.close()
    assert script.environments == []
    (folder.root / "request.json").write_text("{")
    monkeypatch.setattr("service.jobs.exports.list_exports", lambda _: [folder])
    assert unfinished(api.settings) == [], "it was spoilt after it had been listed"


def test_a_buried_job_is_not_exported(api: Api, job_id: str, running: Start) -> None:
    wanted(api, job_id)
    root = run_dir_of(api.settings, job_id).root
    root.rename(root.with_name(f"{job_id}.deleted-1"))
    assert unfinished(api.settings) == []


def test_the_process_refuses_other_paths_than_the_jobs_and_user_code_where_many_submit(
    api: Api, job_id: str, running: Start
) -> None:
    places = places_digest(api.store.get_job(job_id).spec)
    for auth, is_refused in (("local", False), ("required", True)):
        folder = wanted(api, job_id)
        script = Script("import sys; print(sys.argv[5:])")
        runner = running(script, api.settings.model_copy(update={"auth": auth}))
        wait_until_failed(folder)
        options = ["--places", places, *["--no-user-code"] * is_refused]
        assert f"code 0: {options}" in folder.message
        runner.close()


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


def test_jobs_of_an_isolated_project_make_their_exports_themselves(api: Api, job_id: str) -> None:
    asked = wanted(api, job_id)
    isolated = api.settings.model_copy(update={"kuberay_namespaces": {"default": "ads-training"}})
    assert may_be_made(api.store, api.settings, asked)
    assert not may_be_made(api.store, isolated, asked)
    with pytest.raises(ExportRefused, match="isolated project"):
        request_export(api.store, isolated, api.store.get_job(job_id), "newest", "int8")


def test_an_export_is_made_again_when_storage_is_back(
    api: Api, job_id: str, running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.export_runner._RETRY_AFTER_S", (0.01,))
    fail, faults = ExportFolder.fail, iter([OSError(28, "No space left on device")])

    def full_at_first(folder: ExportFolder, message: str) -> None:
        if (fault := next(faults, None)) is not None:
            raise fault
        fail(folder, message)

    monkeypatch.setattr(ExportFolder, "fail", full_at_first)
    folder = wanted(api, job_id)
    running(Script("print('first')", "print('second')"))
    wait_until_failed(folder)
    assert "code 0: second" in folder.message


def test_others_are_made_while_the_lock_of_one_is_held_and_then_that_one(
    api: Api, job_id: str, running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.export_runner._HELD_WAIT_S", 0.01)
    held, other = wanted(api, job_id), wanted(api, with_checkpoint(api))
    script = Script("print('other')", f"import sys; sys.exit({HELD})", "print('held')")
    with held.hold():
        running(script)
        wait_until_failed(other)
        assert "code 0: other" in other.message
    wait_until_failed(held)
    assert "code 0: held" in held.message


def test_one_that_takes_too_long_says_so(
    api: Api, job_id: str, running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.export_runner._LONGEST_S", 0.5)
    folder = wanted(api, job_id)
    running(Script("import time; time.sleep(600)"))
    wait_until_failed(folder)
    assert "it took longer than" in folder.message


_POD_IDENTITY = ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")


def test_the_process_sees_what_jobs_read_storage_with_and_no_secret_of_the_service() -> None:
    secrets = {"SHARDLOOM_SECRET_KEY": "k", "SHARDLOOM_DATABASE_URL": "s"}
    ours = dict.fromkeys(["PATH", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", *_POD_IDENTITY], "s")
    assert environment(ours | secrets) == ours


def test_a_job_with_keys_of_its_own_is_exported_with_them_alone() -> None:
    ours = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "ours", "AWS_SESSION_TOKEN": "ours"}
    ours |= dict.fromkeys(["AWS_PROFILE", *_POD_IDENTITY], "ours")
    theirs = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    elsewhere = {"AWS_ENDPOINT_URL": "http://x", "AWS_CONFIG_FILE": "/tmp/x", "LD_PRELOAD": "x"}
    found = with_keys_of_job(ours, theirs | elsewhere, may_choose_endpoint=False)
    assert found == {"PATH": "/bin"} | theirs
    found = with_keys_of_job(ours, theirs | elsewhere, may_choose_endpoint=True)
    assert found == {"PATH": "/bin", "AWS_ENDPOINT_URL": "http://x"} | theirs
    assert with_keys_of_job(ours, {"WANDB": "x"}, may_choose_endpoint=True) == ours


def test_deleting_an_export_that_is_made_ends_its_process(
    api: Api, job_id: str, running: Start
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
    wait_for(pid_path.exists, "the process")
    assert folder.status == "running"
    assert api.http.delete(f"/v1/jobs/{job_id}/exports/{folder.id}").status_code == 204
    assert api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"] == []
    wait_for(lambda: not folder.root.exists(), "the export to go")
    wait_for(lambda: not Path(f"/proc/{pid_path.read_text()}").exists(), "its process to end")


@pytest.mark.parametrize("cut_off", ["marked", "half_removed"])
def test_a_deletion_that_was_cut_off_is_finished_at_the_next_start(
    api: Api, job_id: str, running: Start, cut_off: str
) -> None:
    folder = wanted(api, job_id)
    write_export(folder)
    folder.mark_deleted()
    if cut_off == "half_removed":
        gone = folder.root.rename(folder.root.with_name(f".{folder.id}.gone"))
        (gone / "deleting").unlink()
    assert list_exports(run_dir_of(api.settings, job_id)) == []
    running(Script()).close()
    assert list(folder.root.parent.iterdir()) == []


def test_the_log_of_the_process_is_not_written_through_a_link(
    api: Api, job_id: str, tmp_path: Path, running: Start, caplog: pytest.LogCaptureFixture
) -> None:
    folder = wanted(api, job_id)
    (tmp_path / "outside").touch()
    (folder.root / "export.log").symlink_to(tmp_path / "outside")
    running(Script("print('written')"))
    wait_for(lambda: f"export {folder.root} cannot be made" in caplog.text, "the refusal")
    assert (tmp_path / "outside").read_text() == ""


def test_an_export_that_two_delete_at_once_is_deleted(api: Api, job_id: str) -> None:
    folder = wanted(api, job_id)
    for _ in range(2):
        delete_export(folder)
    assert list_exports(run_dir_of(api.settings, job_id)) == []


def test_exports_are_kept_for_as_long_as_the_settings_say(api: Api, job_id: str) -> None:
    old = wanted(api, job_id)
    write_export(old)
    made = wanted(api, job_id)
    assert made.wanted.created > old.wanted.created
    now = old.wanted.created + 2 * 86400.0
    kept = api.settings.model_copy(update={"export_retention_days": 0.0})
    short = api.settings.model_copy(update={"export_retention_days": 2.0})
    assert remove_old_exports(kept, now + 1e9) == 0
    assert remove_old_exports(short, now) == 0
    with made.hold():  # somebody makes it
        assert remove_old_exports(short, now + 10) == 1
    assert [each.id for each in list_exports(run_dir_of(api.settings, job_id))] == [made.id]
    assert not old.root.exists()


def test_an_export_that_cannot_be_deleted_keeps_no_other(
    api: Api, job_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    folders = []
    for _ in range(3):
        folders.append(wanted(api, job_id))
        write_export(folders[-1])
    barred, old, cut_off = folders
    (barred.root / "deleting").symlink_to("/nonexistent/x")
    cut_off.mark_deleted()
    settings = api.settings.model_copy(update={"export_retention_days": 1.0})
    now = cut_off.wanted.created + 86401.0
    Housekeeper(api.store, settings, lambda: now).run()
    assert barred.root.exists() and not old.root.exists() and not cut_off.root.exists()
    assert f"cannot delete export {barred.root}, trying again" in caplog.text


def test_what_a_link_leads_to_is_never_deleted(api: Api, job_id: str, tmp_path: Path) -> None:
    folder = wanted(api, job_id)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kept").write_text("k")
    (folder.root / "artifact").symlink_to(tmp_path / "theirs")
    (folder.root.parent / ".x-0000000a.gone").symlink_to(tmp_path / "theirs")
    delete_export(folder)
    remove_all_deleted(api.settings)
    assert not folder.root.exists()
    assert (tmp_path / "theirs" / "kept").read_text() == "k"

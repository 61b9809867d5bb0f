"""What a job puts in the place of its files: pipes, links, folders, endless files."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.api import deps, views
from service.auth import permissions
from service.db import queries
from service.domain.metrics import MAX_METRICS, MAX_OF_TABLES
from service.domain.models import JobStatus
from service.domain.sharding import newest_workers
from service.jobs import actions, run_storage
from service.jobs.run_storage import limit_growth, run_dir_of, withdraw_pause
from service.reconciler.outbox import unread_batches
from tests.harness.builders import (
    NOW,
    attempt_ended,
    batch,
    checkpoint,
    metrics,
    spec_document,
    workers_started,
)
from tests.harness.service import Api, GuardedApps, House, end, problem_in, running
from trainer.export.requests import ask_for
from trainer.protocol import code_archive
from trainer.protocol.events import Note
from trainer.protocol.untrusted import (
    NotRegular,
    list_untrusted,
    open_untrusted,
    read_untrusted,
    replace_untrusted,
)

REPO = Path(__file__).parents[4]
SECRET = "the secret of the host"


def _hangs(*_: object) -> None:
    """A call to storage that has not answered."""
    raise TimeoutError(errno.ETIMEDOUT, "storage hangs", "/runs")


def _linked_folder(path: Path, secret: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(secret.parent)
    secret.rename(secret.parent / path.name)


HOSTILE: dict[str, Callable[[Path, Path], object]] = {
    "pipe": lambda path, secret: os.mkfifo(path),
    "link": lambda path, secret: path.symlink_to(secret),
    "folder": lambda path, secret: path.mkdir(),
    "linked folder": _linked_folder,
}


@pytest.mark.parametrize("put", HOSTILE.values(), ids=HOSTILE)
def test_only_regular_files_reached_without_a_link_are_opened(
    tmp_path: Path, put: Callable[[Path, Path], object]
) -> None:
    (tmp_path / "host").mkdir()
    secret = tmp_path / "host" / "secret"
    secret.write_text(SECRET)
    path = tmp_path / "runs" / "job" / "file.json"
    path.parent.mkdir(parents=True)
    put(path, secret)
    for mode in ("rb", "ab"):
        with pytest.raises(NotRegular) as raised:
            open_untrusted(path, tmp_path / "runs", mode)
        assert str(path.parent) in str(raised.value)
    if put is _linked_folder:
        with pytest.raises(NotRegular):
            replace_untrusted(path, b"x", tmp_path / "runs")
        assert (tmp_path / "host" / path.name).read_text() == SECRET


def test_a_trusted_folder_may_be_a_link_and_names_must_not_lead_up(tmp_path: Path) -> None:
    (tmp_path / "real" / "job").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "real")
    replace_untrusted(tmp_path / "runs" / "job" / "a" / "b", b"12345", tmp_path / "runs")
    path = tmp_path / "runs" / "job" / "a" / "b"
    assert read_untrusted(path, tmp_path / "runs", 5) == b"12345"
    with pytest.raises(NotRegular) as raised:
        read_untrusted(path, tmp_path / "runs", 4)
    assert raised.value.errno == errno.EFBIG
    with pytest.raises(NotRegular):
        open_untrusted(tmp_path / "runs/job/../../real/job/a/b", tmp_path / "runs")
    assert list_untrusted(path.parent, tmp_path / "runs") == [path]
    assert list_untrusted(tmp_path / "runs" / "gone", tmp_path / "runs") == []


def test_storage_that_refuses_a_file_is_told_of_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", name)

    monkeypatch.setattr(os, "unlink", refuse)
    open_at = os.open

    def open_existing(name: str, flags: int, *args: int, **at: int) -> int:
        if flags & os.O_CREAT:
            refuse(name)
        return open_at(name, flags, *args, **at)

    monkeypatch.setattr(os, "open", open_existing)
    path = tmp_path / "job" / "spec.json"
    path.parent.mkdir()
    with pytest.raises(OSError, match=r"spec\.json") as raised:
        replace_untrusted(path, b"x", tmp_path)
    assert raised.value.filename == str(path)


def test_records_come_from_whole_lines_of_regular_files_of_bounded_size(house: House) -> None:
    job = house.submit("running", "failed")
    house.poll()
    good = metrics(1, train_loss=0.5)
    path = house.leave(job, good, stream="workers-0")
    os.mkfifo(path.with_name("workers-1.jsonl"))
    path.with_name("workers-2.jsonl").symlink_to("/proc/self/environ")
    path.with_name("workers-3.jsonl").mkdir()
    long = path.with_name("workers-4.jsonl")
    long.write_text(
        "x" * (3 << 20) + "\n" + good.model_dump_json().replace("train/", "late/") + "\n"
    )
    sparse = path.with_name("workers-5.jsonl")
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    path.with_name("driver-0\n.jsonl").write_bytes(path.read_bytes())
    house.poll(3)
    assert house.status(job) is JobStatus.QUEUED, "its next attempt is due"
    assert house.store.metric_names(job.id) == ["late/loss", "train/loss"]
    damaged = [line for line in house.store.list_timeline(job.id) if "damaged" in line.message]
    assert len(damaged) == 1


def test_a_pipe_in_the_place_of_a_growth_limit_is_replaced(house: House) -> None:
    job = house.submit("running")
    house.poll(2)
    job = house.store.get_job(job.id)
    path = house.files(job).growth_limit_path
    os.mkfifo(path)
    limit_growth(house.settings, job, 2)
    assert path.read_text() == '{"max_workers": 2}'


def test_data_whose_manifest_is_a_pipe_is_refused_at_once_however_often_it_is_named(
    api: Api, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    spec = spec_document()
    spec["data"]["path"] = str(tmp_path)
    for _ in range(60):
        answer = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec})
        assert answer.json()["fields"][0]["code"] == "unreadable_manifest"
    assert api.http.get("/healthz").is_success


def test_where_a_spec_leads_is_looked_at_with_a_deadline(
    open_guarded: GuardedApps, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = open_guarded()
    asked: list[Path] = []

    def ask(path: Path, call: Callable[[], Any], deadline_s: float = 0.0) -> Any:
        asked.append(path)
        raise TimeoutError(errno.ETIMEDOUT, "storage hangs", str(path))

    spec = spec_document(checkpoint={"path": "/mnt/hung"})
    for module in (permissions, deps):
        with monkeypatch.context() as patched:
            patched.setattr(module, "in_time", ask)
            answer = house.send("POST", "/v1/jobs", "submitter", json={"spec": spec})
            problem_in(answer, 503, "storage_unavailable")
    assert asked


def test_logs_and_traces_that_are_links_or_of_an_attempt_that_is_one_are_not_shown(
    api: Api, tmp_path: Path
) -> None:
    job_id = api.start()
    attempt = api.files(job_id).root
    for name in ("logs", "traces"):
        (tmp_path / "host" / name).mkdir(parents=True)
    secret = tmp_path / "host" / "logs" / "rank-0.log"
    secret.write_text(SECRET)
    trace = "spec-rank0.json.gz"
    (tmp_path / "host" / "traces" / trace).write_text(SECRET)
    api.log(f"{job_id}-a0", "driver", "hello\n")
    (attempt / "logs" / "rank-0.log").symlink_to(secret)
    shown = api.http.get(f"/v1/jobs/{job_id}/logs").text
    assert "hello" in shown and SECRET not in shown
    download = api.http.get(f"/v1/jobs/{job_id}/logs:download", params={"source": "rank-0"})
    assert SECRET not in download.text
    api.post_events(f"{job_id}-a0", batch(metrics(1, train_loss=0.5)))
    attempt.rename(tmp_path / "aside")
    attempt.symlink_to(tmp_path / "host")
    assert SECRET not in api.http.get(f"/v1/jobs/{job_id}/logs").text
    assert api.http.get(f"/v1/jobs/{job_id}/traces/{trace}").status_code == 404


def test_routes_of_files_say_that_storage_hangs_while_others_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.start()
    monkeypatch.setattr(run_storage, "in_time", _hangs)
    for route in ("logs", "logs:download", "exports"):
        problem = problem_in(api.http.get(f"/v1/jobs/{job_id}/{route}"), 503, "storage_unavailable")
        assert "storage hangs" in problem["detail"]
    problem_in(api.http.post("/v1/code", content=b"x"), 503, "storage_unavailable")
    assert api.http.get(f"/v1/jobs/{job_id}").is_success


def test_jobs_are_cancelled_and_restarts_refused_while_storage_hangs(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(checkpoint(40)))
    for module in (run_storage, actions):
        monkeypatch.setattr(module, "in_time", _hangs)
    waiting = api.submit()
    assert api.http.post(f"/v1/jobs/{waiting}:cancel").json()["status"] == "CANCELLED"
    end(api, job_id)
    problem_in(api.http.post(f"/v1/jobs/{job_id}:restart"), 503, "storage_unavailable")


def test_a_download_is_cut_off_where_storage_hangs_on_the_way(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.start()
    api.log(f"{job_id}-a0", "driver", "a line\n")
    monkeypatch.setattr(deps, "in_time", _hangs)
    assert api.http.get(f"/v1/jobs/{job_id}/logs:download").content == b""


def test_documents_nested_without_end_are_damaged_ones(api: Api, tmp_path: Path) -> None:
    nested = "[" * 100_000
    (tmp_path / "manifest.json").write_text(nested)
    spec = spec_document()
    spec["data"]["path"] = str(tmp_path)
    answer = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec})
    assert answer.json()["fields"][0]["code"] == "unreadable_manifest"
    job_id = api.start()
    folder = ask_for(run_dir_of(api.settings, job_id), "newest", "int8")
    (folder.root / "failure.json").write_text(nested)
    (shown,) = api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"]
    assert shown["status"] == "failed"


def test_a_job_has_so_many_metrics_and_no_more_whatever_it_reports(api: Api) -> None:
    job_id = api.start()
    flood = {f"train/{number}": 1.0 for number in range(MAX_METRICS)} | {"x" * 1000: 1.0}
    for step, values in enumerate(({"train/loss": 1.0}, flood, {"late": 1.0, "train/loss": 0.5})):
        record = metrics(step).model_copy(update={"values": values})
        api.post_events(f"{job_id}-a0", batch(record, first_seq=step))
    shown = api.http.get(f"/v1/jobs/{job_id}").json()["latest_metrics"]
    assert len(shown) == len(api.store.metric_names(job_id)) == MAX_METRICS
    assert shown["train/loss"] == 0.5
    assert not {"late", "x" * 1000} & {*shown, *api.store.metric_names(job_id)}


def test_metrics_of_many_tables_leave_room_for_those_told_with_them_and_after_them(
    api: Api,
) -> None:
    job_id = api.start()
    tables = {f"table/{number}/lookups": 1.0 for number in range(MAX_METRICS)}
    for step, values in enumerate((tables | {"train/loss": 0.5}, {"validation/auc": 0.7})):
        record = metrics(step).model_copy(update={"values": values})
        api.post_events(f"{job_id}-a0", batch(record, first_seq=step))
    for found in (api.store.get_job(job_id).latest_metrics, api.store.metric_names(job_id)):
        assert {*found} - {*tables} == {"train/loss", "validation/auc"}
        assert len(found) == MAX_OF_TABLES + 2


def test_the_timeline_of_a_job_has_room_for_so_many_events_and_bytes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_MAX_LINES", 16)
    monkeypatch.setattr(queries, "_MAX_LARGE_BYTES", 300_000)
    job_id = api.start()
    known = len(api.store.list_timeline(job_id))
    plans = [workers_started().model_copy(update={"hosts": [f"h{k}" * 100] * 500}) for k in "abcd"]
    saved = checkpoint(1).model_copy(update={"metrics": {f"{k:0200}": 1.0 for k in range(500)}})
    for seq, told in enumerate((*plans, saved, saved)):
        api.post_events(f"{job_id}-a0", batch(told, first_seq=seq))
    lines = api.store.list_timeline(job_id)
    # The newest plan stays, whatever else is told.
    kinds = [line.kind for line in lines][known:]
    assert kinds == ["note"] * 3 + ["workers_started", "note", "checkpoint_committed"]
    assert newest_workers(lines).hosts == plans[-1].hosts
    assert lines[known].data["left_out_bytes"] > 100_000
    assert api.store.get_job(job_id).status is JobStatus.RUNNING
    notes = [Note(time=NOW, message=str(number)) for number in range(100)]
    for stream in ("a", "b"):
        api.post_events(f"{job_id}-a0", batch(*notes, stream=stream))
    lines = api.store.list_timeline(job_id)
    assert len(lines) == 16
    assert "the timeline is full" in lines[-1].message


def test_the_oldest_checkpoints_leave_a_full_timeline_to_what_is_told_next(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_MAX_LINES", 16)
    monkeypatch.setattr(queries, "_NUM_SAVES", 3)
    job_id = api.start()
    told = [*map(checkpoint, range(30)), workers_started(), *map(checkpoint, range(30, 40))]
    for seq, each in enumerate(told):
        api.post_events(f"{job_id}-a0", batch(each, first_seq=seq))
    lines = api.store.list_timeline(job_id)
    steps = [line.data["step"] for line in lines if line.kind == "checkpoint_committed"]
    assert len(lines) <= 15 and steps == [*range(40 - len(steps), 40)]
    assert newest_workers(lines).hosts == workers_started().hosts


def test_documents_are_bounded_more_tightly_than_archives_of_code(api: Api) -> None:
    large = b"[" + b"{}," * (3 << 20) + b"{}]"
    for path in ("/v1/jobs", "/v1/attempts/x/events"):
        problem_in(api.http.post(path, content=large), 413, "body_too_large")
    problem_in(api.http.post("/v1/code", content=large), 422, "invalid_request")


def test_an_outbox_is_read_a_record_at_a_time_where_they_are_large_and_to_where_it_ended(
    house: House,
) -> None:
    job = house.submit("running", "failed")
    house.poll()
    line = metrics(1, train_loss=0.5).model_dump_json() + "\n"
    path = house.leave(job)
    path.write_text(("x" * (3 << 20) + "\n") * 2)
    told = [batch.events for batch in unread_batches(house.files(job), {}, NOW)]
    assert [len(events) for events in told if events] == [1, 1]
    path.write_text(line * 100)
    batches = unread_batches(house.files(job), {}, NOW)
    for found in batches:
        assert found.first_seq == 0
        with path.open("a") as file:
            file.write(line * 100)


def test_what_lies_among_uploads_of_code_keeps_nobody_from_uploading(
    api: Api, tmp_path: Path
) -> None:
    uploads = api.settings.runs_dir / ".code"
    uploads.mkdir(parents=True)
    (uploads / f"{'0' * 64}.zip").symlink_to("/nowhere")
    (uploads / "junk.zip").touch()
    os.truncate(uploads / "junk.zip", 1 << 40)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.py").touch()
    answer = api.http.post("/v1/code", content=code_archive.pack(tmp_path / "package"))
    assert answer.status_code == 201


def test_nothing_is_made_or_removed_through_an_attempt_that_is_a_link(
    api: Api, tmp_path: Path
) -> None:
    job_id = running(api)
    attempt, theirs = api.files(job_id).root, tmp_path / "theirs"
    attempt.rename(theirs)
    attempt.symlink_to(theirs)
    for name in ("pause-request.json", "growth-limit.json"):
        (theirs / name).write_text("{}")
    job = api.store.get_job(job_id)
    for change in (
        lambda: withdraw_pause(api.settings, job_id, f"{job_id}-a0"),
        lambda: limit_growth(api.settings, job, None),
    ):
        with pytest.raises(NotRegular):
            change()
    assert api.http.post(f"/v1/jobs/{job_id}/traces", json={}).status_code == 503
    assert {"pause-request.json", "growth-limit.json"} <= {each.name for each in theirs.iterdir()}


def test_lists_show_the_newest_exports_and_messages_of_bounded_length(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = api.start()
    monkeypatch.setattr(views, "_MAX_EXPORTS", 2)
    folders = [ask_for(run_dir_of(api.settings, job_id), "newest", "int8") for _ in range(3)]
    shown = api.http.get(f"/v1/jobs/{job_id}/exports").json()["items"]
    assert [each["id"] for each in shown] == [folder.id for folder in folders[1:]]
    ended = attempt_ended("training_error").model_copy(update={"message": "a" + "x" * 10**6 + "z"})
    api.post_events(f"{job_id}-a0", batch(ended))
    reported = api.store.get_attempt(f"{job_id}-a0").reported_end
    messages = [reported.message, api.store.list_timeline(job_id)[-1].message]
    assert all(len(each) < 30_000 and "[...]" in each for each in messages)


# What is no file of a job: packaged files, the service's own home, what the operator names, mounts.
OWN_FILES = {
    "service/app.py",
    "service/auth/crypto.py",
    "service/backends/fake.py",
    "service/backends/kuberay/backend.py",
    "service/backends/kuberay/client.py",
    "service/dashboard/app.py",
    "service/dashboard/shell.py",
    "service/dashboard/spec_text.py",
    "service/db/engine.py",
    "service/files.py",
    "service/healthcheck.py",
    "service/storage.py",
}
READS = {"open", "read_bytes", "read_text", "FileResponse", "write_bytes", "write_text"}
# They run on the machine of whoever calls them.
LOCAL = ("service/cli/", "service/client/", "service/local/")


def test_the_service_opens_files_of_jobs_as_untrusted_only() -> None:
    found = set()
    for path in sorted((REPO / "service").rglob("*.py")):
        name = path.relative_to(REPO).as_posix()
        if name in OWN_FILES or name.startswith(LOCAL):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                # Dialogs, stores and archives in memory open as well, but no paths.
                if called in READS and not _opens_no_path(node):
                    found.add(f"{name}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == set()


def _opens_no_path(call: ast.Call) -> bool:
    owner = ast.unparse(call.func).rpartition(".")[0]
    return owner.endswith(("_dialog", "Store", "Security", "archive", "KubeApi"))

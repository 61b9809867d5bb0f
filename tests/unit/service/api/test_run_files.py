"""Files of a run between the service and hosts that share no run storage with it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi.testclient import TestClient

from service.app import build_app
from service.errors import ServiceError
from service.jobs import run_storage
from service.jobs.run_storage import run_dir_of
from service.settings import Settings
from tests.harness.builders import spec_document
from tests.harness.service import TINY_DATA, Guarded, GuardedApps, problem_in, replace_attempt
from trainer.protocol import mirror
from trainer.protocol.log_pump import append
from trainer.protocol.mirror import Mirror, MirrorConfig, NotTaken, Refused
from trainer.protocol.run_dir import AttemptDir, RunDir, write_whole

CHECKPOINTS = "s3://bucket/checkpoints"


@pytest.fixture
def house(open_guarded: GuardedApps) -> Guarded:
    return open_guarded(runs_shared=False, checkpoint_root=CHECKPOINTS)


@pytest.fixture
def job(house: Guarded) -> str:
    """A job whose first attempt was submitted."""
    job_id = house.submit("submitter")
    house.poll()
    house.keys["driver"] = house.security.master.attempt_token(f"{job_id}-a0")
    return job_id


class Host:
    """A host of the first attempt with a disk of its own."""

    def __init__(
        self, house: Guarded, job: str, disk: Path, *, takes_streams: bool = False
    ) -> None:
        self.takes_streams = takes_streams
        token = {"Authorization": f"Bearer {house.keys['driver']}"}
        self.http = TestClient(house.http.app, base_url=str(house.http.base_url), headers=token)
        self.run = RunDir(disk / job)
        self.files.root.mkdir(parents=True)
        self.files.logs_dir.mkdir()
        self.restart()

    @property
    def files(self) -> AttemptDir:
        return self.run.attempt(f"{self.run.root.name}-a0")

    def restart(self) -> None:
        """Another process exchanges from now on."""
        url = str(self.http.base_url)
        config = MirrorConfig(str(self.run.root), self.files.root.name, url, "")
        self.mirror = Mirror(config, self.http, takes_streams=self.takes_streams)

    def exchange(self) -> None:
        self.mirror.exchange()

    def log(self, source: str, text: str, max_bytes: int = 2**20) -> None:
        append(self.files.log_path(source), max_bytes, text.encode())

    @contextmanager
    def losing(self, method: str) -> Iterator[None]:
        """The service carries out requests of a method, and no answer of it arrives."""
        request = self.http.request

        def lose(verb: str, *args: Any, **options: Any) -> httpx.Response:
            answer = request(verb, *args, **options)
            if verb == method:
                raise httpx.ReadError("lost")
            return answer

        with mock.patch.object(self.http, "request", lose):
            yield


@pytest.fixture
def host(house: Guarded, job: str, tmp_path: Path) -> Host:
    return Host(house, job, tmp_path / "disk")


@pytest.fixture
def kept(house: Guarded, job: str) -> RunDir:
    """The run folder as the service has it."""
    return run_dir_of(house.settings, job)


def attempt_of(run: RunDir) -> AttemptDir:
    return run.attempt(f"{run.root.name}-a0")


def test_requests_reach_the_hosts_and_are_withdrawn_there(host: Host, kept: RunDir) -> None:
    host.exchange()
    spec = attempt_of(kept).spec_path.read_bytes()
    assert host.files.spec_path.read_bytes() == spec
    assert not attempt_of(kept).token_path.exists()
    write_whole(attempt_of(kept).pause_request_path, b"{}")
    write_whole(kept.rewind_path, b'{"checkpoint": "x"}')
    host.exchange()
    assert host.files.pause_request_path.exists()
    assert host.run.rewind_path.read_bytes() == b'{"checkpoint": "x"}'
    attempt_of(kept).pause_request_path.unlink()
    host.exchange()
    assert not host.files.pause_request_path.exists()
    # What a host does to them is not the service's.
    host.run.rewind_path.unlink()
    host.exchange()
    assert kept.rewind_path.exists()


def test_what_workers_wait_for_comes_after_all_that_they_read(
    house: Guarded, job: str, host: Host, kept: RunDir, tmp_path: Path
) -> None:
    for path in (kept.rewind_path, kept.code_path("a" * 64), kept.sink_path("mlflow")):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_whole(host.files.resolved_spec_path, b"{}")
    host.exchange()
    other = Host(house, job, tmp_path / "other")
    taken: list[Path] = []
    take = mirror.write_whole
    with mock.patch.object(mirror, "write_whole", lambda p, c: (taken.append(p), take(p, c))):
        other.exchange()
    assert taken[-1] == other.files.resolved_spec_path
    assert len(taken) == 5


def test_what_hosts_tell_one_another_goes_by_the_service(
    house: Guarded, job: str, host: Host, kept: RunDir, tmp_path: Path
) -> None:
    # Left by an attempt before, which ran here.
    write_whole(host.run.skipped_rows_path, b"old")
    write_whole(kept.skipped_rows_path, b"[1]")
    other = Host(house, job, tmp_path / "other")
    for each in (host, other):
        each.exchange()
    assert host.run.skipped_rows_path.read_bytes() == b"[1]"
    write_whole(other.run.skipped_rows_path, b"[1, 2]")
    write_whole(host.files.stop_request_path, b"stop")
    for each in (host, other, host):
        each.exchange()
    assert host.run.skipped_rows_path.read_bytes() == b"[1, 2]"
    assert other.files.stop_request_path.read_bytes() == b"stop"
    other.files.stopping_path(0).touch()
    for each in (other, host):
        each.exchange()
    assert host.files.stopping_path(0).exists()


def test_a_log_that_moves_to_another_host_goes_on_and_nothing_comes_twice(
    house: Guarded, job: str, host: Host, kept: RunDir, tmp_path: Path
) -> None:
    log, other = attempt_of(kept).log_path("rank-0"), Host(house, job, tmp_path / "other")
    host.log("rank-0", "one\n")
    host.exchange()
    host.log("rank-0", "two\n")
    with host.losing("POST"), pytest.raises(httpx.ReadError):
        host.exchange()
    # Longer than what was sent, as it goes again.
    host.log("rank-0", "and more\n")
    host.exchange()
    other.log("rank-0", "three\n")
    other.exchange()
    host.restart()
    host.log("rank-0", "four\n")
    host.exchange()
    assert log.read_text() == "one\ntwo\nand more\nthree\nfour\n"


def test_records_of_all_hosts_reach_the_service_and_the_driver_s_host(
    house: Guarded, job: str, host: Host, kept: RunDir, tmp_path: Path
) -> None:
    driver = Host(house, job, tmp_path / "driver", takes_streams=True)
    for each, name in ((driver, "driver"), (host, "workers-0")):
        path = each.files.stream_path(name)
        path.parent.mkdir()
        path.write_text(f"{name} 1\n")
    earlier = kept.attempt("job-0-a0").stream_path("workers-9")
    earlier.parent.mkdir(parents=True)
    earlier.write_text("before\n")
    for each in (host, driver):
        each.exchange()
    with host.files.stream_path("workers-0").open("a") as file:
        file.write("workers-0 2\n")
    with host.losing("POST"), pytest.raises(httpx.ReadError):
        host.exchange()
    for each in (host, driver):
        each.exchange()
    whole = "workers-0 1\nworkers-0 2\n"
    assert attempt_of(kept).stream_path("workers-0").read_text() == whole
    assert driver.files.stream_path("workers-0").read_text() == whole
    assert driver.run.attempt("job-0-a0").stream_path("workers-9").read_text() == "before\n"
    assert attempt_of(kept).stream_path("driver").read_text() == "driver 1\n"
    assert not host.files.stream_path("driver").exists(), "of no use there"


def test_a_log_whose_middle_is_dropped_before_it_was_sent_goes_on_behind_it(
    host: Host, kept: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", 100)
    for number in range(400):
        host.log("driver", f"line {number:05d}\n", 2000)
        if number == 100:
            host.exchange()
    host.exchange()
    lines = attempt_of(kept).log_path("driver").read_text().splitlines()
    assert lines[:101] == [f"line {number:05d}" for number in range(101)]
    assert lines[-50:] == [f"line {number:05d}" for number in range(350, 400)]
    assert len(lines) < 400


def test_a_file_in_pieces_appears_whole_and_its_marker_last(
    host: Host, kept: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PIECE_BYTES", 1000)
    export = host.run.exports_dir / "x-00000000" / "artifact"
    export.mkdir(parents=True)
    (export.parent / "request.json").write_text("{}")
    host.exchange()
    table = os.urandom(4500)
    (export / "EXPORT.json").write_text("{}")
    (export / "tables.bin").write_bytes(table)
    (export / "empty").touch()
    # As a column of the user's may be called.
    (export / "vocabularies").mkdir()
    (export / "vocabularies" / "_user id=1.parquet").write_bytes(b"v")
    with host.losing("PUT"), pytest.raises(httpx.ReadError):
        host.exchange()
    there = kept.exports_dir / "x-00000000" / "artifact"
    assert not (there / "EXPORT.json").exists()
    host.exchange()
    assert (there / "tables.bin").read_bytes() == table
    names = {path.name for path in there.rglob("*")}
    assert names == {
        *("EXPORT.json", "empty", "tables.bin", "vocabularies", "_user id=1.parquet"),
    }
    # Deleted at the service while it is made here: nothing of it comes back.
    shutil.rmtree(there.parent)
    (export / "tables.bin").write_bytes(table[1:])
    with pytest.raises(Refused):
        host.exchange()
    assert not there.parent.exists()


def test_what_is_refused_for_good_hides_nothing_that_is_only_late(
    host: Host, kept: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = host.run.exports_dir / "x-00000000"
    export.mkdir(parents=True)
    (export / "of-no-request").touch()
    host.log("driver", "late\n")
    full = SimpleNamespace(f_bavail=4, f_blocks=100, f_favail=50, f_files=100)
    monkeypatch.setattr(run_storage.os, "statvfs", lambda path: full)
    with pytest.raises(NotTaken) as late:
        host.exchange()
    assert not isinstance(late.value, Refused), "the copy would be removed"
    full.f_bavail = 50
    with pytest.raises(Refused):
        host.exchange()
    assert attempt_of(kept).log_path("driver").read_text() == "late\n"


def test_what_was_noted_of_another_attempt_is_forgotten_by_the_next(host: Host) -> None:
    write_whole(host.run.lock_path, json.dumps({"name": "job-000000000000-a7"}).encode())
    host.exchange()
    assert host.run.lock_owner() is None


def test_records_that_come_after_the_end_are_collected_once_more(
    house: Guarded, job: str, host: Host
) -> None:
    attempt = house.store.get_attempt(f"{job}-a0")
    house.store.update_job(house.store.get_job(job), attempt=replace(attempt, ended_at=time.time()))
    path = host.files.stream_path("workers-0")
    path.parent.mkdir()
    path.write_text("{}\n")
    host.exchange()
    due = house.store.attempts_to_collect(time.time() + 60)
    assert due == [(job, 0)]


def test_an_attempt_that_was_replaced_learns_it_and_changes_nothing_of_the_run(
    house: Guarded, job: str, host: Host, kept: RunDir
) -> None:
    host.exchange()
    assert host.run.lock_owner() is None
    replace_attempt(house.store, job)
    write_whole(host.run.skipped_rows_path, b"[9]")
    host.log("driver", "last words\n")
    with pytest.raises(Refused, match="does not have the run folder"):
        host.exchange()
    answer = house.send("DELETE", f"/v1/attempts/{job}-a0/files/skipped-rows.json", "driver")
    problem_in(answer, 403, "forbidden")
    assert host.run.lock_owner() == f"{job}-a1"
    assert not kept.skipped_rows_path.exists()
    assert attempt_of(kept).log_path("driver").read_text() == "last words\n"
    ended = replace(house.store.get_attempt(f"{job}-a0"), ended_at=1.0)
    house.store.update_job(house.store.get_job(job), attempt=ended)
    url = f"/v1/attempts/{job}-a0/files"
    assert problem_in(house.send("GET", url, "driver"), 403, "forbidden")


@pytest.mark.parametrize(
    "path",
    [
        "job.json",
        "run.lock",
        "rewind.json",
        "attempts/ATTEMPT/token",
        "attempts/ATTEMPT/spec.json",
        "attempts/job-000000000000-a0/stop-request.json",
        "attempts/ATTEMPT/traces/../../../job.json.gz",
        "exports/x-00000000/../../job.json",
        "sinks/%2e%2e%2fjob.json",
        "/etc/passwd",
    ],
)
def test_hosts_write_what_is_theirs_and_no_more(
    house: Guarded, job: str, path: str, kept: RunDir
) -> None:
    before = {each: each.read_bytes() for each in kept.root.rglob("*") if each.is_file()}
    url = f"/v1/attempts/{job}-a0/files/{path.replace('ATTEMPT', f'{job}-a0')}"
    where = {"at": 0, "total": 1}
    for answer in (
        house.send("PUT", url, "driver", content=b"x", params=where),
        house.send("DELETE", url, "driver"),
    ):
        assert answer.status_code in (404, 403, 405), answer.text
    assert {each: each.read_bytes() for each in kept.root.rglob("*") if each.is_file()} == before
    assert "root:" not in house.send("GET", url, "driver").text


def test_logs_have_the_names_of_processes_and_pieces_follow_one_another(
    house: Guarded, job: str, kept: RunDir
) -> None:
    base = f"/v1/attempts/{job}-a0"
    for name in ("..%2Fjob", "mlflow", "rank-1@000000000000005"):
        answer = house.send("POST", f"{base}/logs/{name}", "driver", content=b"x")
        assert answer.status_code == 404
        answer = house.send("POST", f"{base}/outbox/{name.upper()}", "driver", content=b"x")
        assert answer.status_code == 404
    url, where = f"{base}/files/attempts/{job}-a0/traces/a.json.gz", {"at": 5, "total": 9}
    answer = house.send("PUT", url, "driver", content=b"xxxx", params=where)
    assert answer.json() == {"version": None, "size": 0}
    # An answer may be lost: what comes again is not there twice.
    for at, size in ((0, 3), (3, 6), (3, 6), (6, 9)):
        where = {"at": at, "total": 9}
        answer = house.send("PUT", url, "driver", content=b"abcdefghi"[at : at + 3], params=where)
        assert answer.json()["size"] == size
    assert (attempt_of(kept).traces_dir / "a.json.gz").read_bytes() == b"abcdefghi"
    beyond = house.send("PUT", url, "driver", content=b"xxxx", params={"at": 0, "total": 3})
    problem_in(beyond, 422, "invalid_request")
    found = run_storage.list_untrusted
    with mock.patch.object(run_storage, "list_untrusted", wraps=found) as listed:
        ends = [
            house.send("POST", f"{base}/logs/rank-1", "driver", content=b"xx").json()["end"]
            for _ in range(3)
        ]
    assert ends == [2, 4, 6]
    assert listed.call_count == 1, "of the logs of thousands of ranks"


def test_records_that_a_host_hands_over_are_on_the_disk_before_they_are_taken(
    house: Guarded, job: str, kept: RunDir
) -> None:
    path = attempt_of(kept).stream_path("driver")
    synced: list[str] = []

    def note(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        if target in (path, path.parent):
            synced.append(f"{target.name} {path.read_text()}")

    with mock.patch.object(run_storage.os, "fsync", note):
        for _ in range(2):
            url = f"/v1/attempts/{job}-a0/outbox/driver"
            assert house.send("POST", url, "driver", content=b"x").json()["taken"]
    assert synced == ["driver.jsonl x", "outbox x", "driver.jsonl xx"]


@pytest.mark.parametrize("full", [{"f_bavail": 4}, {"f_favail": 4}])
def test_a_full_disk_is_kept_for_what_service_and_hosts_tell_one_another(
    host: Host, kept: RunDir, monkeypatch: pytest.MonkeyPatch, full: dict[str, int]
) -> None:
    found = SimpleNamespace(f_bavail=50, f_blocks=100, f_favail=50, f_files=100)
    monkeypatch.setattr(run_storage.os, "statvfs", lambda path: found)
    vars(found).update(full)
    host.log("driver", "waits\n")
    host.files.traces_dir.mkdir()
    (host.files.traces_dir / "spec-rank0.json.gz").write_bytes(b"waits")
    write_whole(host.files.stop_request_path, b"stop")
    with pytest.raises(NotTaken, match="less than 5%"):
        host.exchange()
    assert attempt_of(kept).stop_request_path.read_bytes() == b"stop"
    vars(found).update(dict.fromkeys(full, 50))
    host.exchange()
    assert attempt_of(kept).log_path("driver").read_text() == "waits\n"
    assert (attempt_of(kept).traces_dir / "spec-rank0.json.gz").exists()


@pytest.mark.parametrize("place", ["logs/driver.log", "outbox/driver.jsonl"])
def test_a_pipe_or_a_link_in_the_place_of_a_log_holds_nobody(
    house: Guarded, job: str, kept: RunDir, place: str
) -> None:
    # The service's machine may be a host of Ray: jobs can write to its folder then.
    path = attempt_of(kept).root / place
    path.parent.mkdir()
    url = f"/v1/attempts/{job}-a0/{place.rpartition('.')[0]}"
    secret = house.settings.home / "secret-key"
    before = secret.read_bytes()
    for make in (os.mkfifo, lambda at: at.symlink_to(secret)):
        make(path)
        assert house.send("POST", url, "driver", content=b"x").status_code == 503
        path.unlink()
    assert secret.read_bytes() == before
    assert house.send("POST", url, "driver", content=b"x").json() == {"end": 1, "taken": True}


def test_what_is_withdrawn_while_it_is_read_is_gone(host: Host, kept: RunDir) -> None:
    write_whole(attempt_of(kept).pause_request_path, b"{}")
    ask = host.mirror._ask

    def withdraw(method: str, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("pause-request.json"):
            attempt_of(kept).pause_request_path.unlink()
        return ask(method, path, *args, **options)

    with mock.patch.object(host.mirror, "_ask", withdraw):
        host.exchange()
    assert not host.files.pause_request_path.exists()


def test_what_a_host_does_with_files_counts_as_its_job_s(
    house: Guarded, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = []

    def note(path: Path, call: Any, deadline_s: float, owner: str) -> Any:
        owners.append(owner)
        return call()

    monkeypatch.setattr(run_storage, "in_time", note)
    attempt = f"/v1/attempts/{job}-a0"
    files = f"{attempt}/files"
    report = f"{files}/attempts/{job}-a0/result.json"
    where = {"at": 0, "total": 2}
    for method, path, options in (
        ("PUT", report, {"content": b"{}", "params": where}),
        ("GET", files, {}),
        ("GET", f"{files}/job.json", {}),
        ("DELETE", report, {}),
        ("POST", f"{attempt}/logs/driver", {"content": b"x"}),
        ("POST", f"{attempt}/outbox/driver", {"content": b"x"}),
    ):
        house.send(method, path, "driver", **options)
    assert owners == [job] * 6


def test_a_code_gives_its_token_to_one_process(house: Guarded, job: str) -> None:
    record = house.backend.record(f"{job}-a0")
    assert record is not None
    assert house.keys["driver"] not in str(record)
    code = house.security.master.mac("attempt-codes", f"{job}-a0")
    assert code in str(record)
    body = {"attempt_id": f"{job}-a0", "code": code, "claim": "c" * 43}
    for _ in range(2):  # an answer may be lost
        answer = house.send("POST", "/v1/attempts:claim", json=body)
        assert answer.json() == {"token": house.keys["driver"]}
        assert answer.headers["cache-control"] == "no-store"
    secrets = f"/v1/attempts/{job}-a0/secrets"
    assert house.send("POST", secrets, "driver", json={"claim": "c" * 43}).status_code == 200
    keyed = {"Idempotency-Key": "again"}
    assert house.send("POST", "/v1/attempts:claim", json=body, headers=keyed).status_code == 200
    for change in ({"claim": "d" * 43}, {"code": "0" * 64}, {"attempt_id": f"{job}-a1"}):
        answer = house.send("POST", "/v1/attempts:claim", json=body | change)
        problem_in(answer, 403, "forbidden")
    replace_attempt(house.store, job)
    problem_in(house.send("POST", "/v1/attempts:claim", json=body), 403, "forbidden")


def test_on_shared_storage_nothing_is_exchanged(open_guarded: GuardedApps) -> None:
    house = open_guarded()
    job = house.submit("submitter")
    house.poll()
    house.keys["driver"] = house.security.master.attempt_token(f"{job}-a0")
    answer = house.send("GET", f"/v1/attempts/{job}-a0/files", "driver")
    problem_in(answer, 409, "runs_are_shared")
    code = house.security.master.mac("attempt-codes", f"{job}-a0")
    body = {"attempt_id": f"{job}-a0", "code": code, "claim": "c" * 43}
    problem_in(house.send("POST", "/v1/attempts:claim", json=body), 403, "forbidden")


def test_settings_without_shared_runs_say_where_checkpoints_are(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "other", backend="fake", runs_shared=False)
    with pytest.raises(ServiceError, match="SHARDLOOM_CHECKPOINT_ROOT"):
        build_app(settings)


def test_a_config_shows_no_token() -> None:
    config = MirrorConfig("/runs/job-1", "job-1-a0", "http://service", "sla_secret")
    assert "secret" not in repr(config)


def test_what_would_be_left_on_a_disk_of_a_host_is_refused(
    house: Guarded,
) -> None:
    epochs = {"path": "training.epochs", "values": [1, 2]}
    search = {"parameters": [epochs], "metric": "train/loss"}
    for changes, field in (
        ({"sinks": {"tensorboard": {}}}, "sinks.tensorboard.dir"),
        ({"sinks": {"mlflow": {"tracking_uri": "file:///x"}}}, "sinks.mlflow.tracking_uri"),
        ({"checkpoint": {"path": str(TINY_DATA)}}, "checkpoint.path"),
    ):
        body = {"spec": spec_document(**changes)}
        for path in ("/v1/jobs", "/v1/jobs?dry_run=true", "/v1/sweeps"):
            sent = body | search if path == "/v1/sweeps" else body
            answer = house.send("POST", path, "submitter", json=sent)
            assert [each["path"] for each in problem_in(answer, 422, "invalid_spec")["fields"]] == [
                field
            ]
    body = {"spec": spec_document()}
    assert house.send("POST", "/v1/jobs?dry_run=true", "submitter", json=body).status_code == 200

"""The service process is killed at fixed points and restarted: nothing lost, nothing doubled."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.backends.fake import Script
from service.client.client import ShardloomClient
from service.client.errors import ProblemError
from service.domain.models import JobStatus
from service.local.processes import identify, is_alive, process_table, process_tree, terminate_tree
from service.schemas.jobs import JobDetail
from tests.harness.builders import (
    attempt_ended,
    batch,
    checkpoint,
    metrics,
    spec_document,
    workers_started,
)
from tests.harness.service_process import PATIENT, SHUTDOWN_TIMEOUT_S, ServiceProcess
from tests.harness.wait import free_port, scaled, wait_for

WAIT_S = 60.0
RECORDS = [workers_started(), *[metrics(step, train_loss=1.0 / step) for step in range(1, 9)]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """On a cluster where attempts run until their driver says otherwise."""
    home = tmp_path_factory.mktemp("home")
    with ServiceProcess(home, free_port(), is_killable=True) as started:
        started.cluster.play("default", Script(("pending", "running")))
        yield started


@pytest.fixture
def service(shared: ServiceProcess) -> ServiceProcess:
    """Alive, with the jobs of the tests before, which have ended."""
    shared.start_if_ended()
    return shared


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[ShardloomClient]:
    with ShardloomClient(service.url, retry=PATIENT) as opened:
        yield opened


def submit_running(service: ServiceProcess, client: ShardloomClient) -> JobDetail:
    """A job whose workers have told that they run."""
    job = client.submit(spec_document())
    wait_for(lambda: service.cluster.record(f"{job.id}-a0"), "the submission", WAIT_S)
    assert service.post_events(f"{job.id}-a0", batch(*RECORDS[:6])) == 6
    wait_for(lambda: client.get_job(job.id).status is JobStatus.RUNNING, "it to run", WAIT_S)
    return job


def end(service: ServiceProcess, job: JobDetail) -> None:
    """Let the driver write the rest of its records to storage and end well."""
    files = service.attempt_files(job.id)
    files.stream_path("rank-0").parent.mkdir(parents=True, exist_ok=True)
    everything = [*RECORDS, checkpoint(8, is_best=True)]
    text = "".join(record.model_dump_json() + "\n" for record in everything)
    files.stream_path("rank-0").write_text(text)
    files.stream_path("driver").write_text(attempt_ended().model_dump_json() + "\n")
    service.cluster.play(f"{job.id}-a0", Script(("succeeded",)))


def assert_told_once(service: ServiceProcess, client: ShardloomClient, job: JobDetail) -> None:
    """One attempt, never stopped, and every record of it exactly once."""
    assert client.wait(job.id, timeout_s=scaled(WAIT_S), poll_s=0.05).status is JobStatus.SUCCEEDED
    submitted = [each for each in service.cluster.attempt_ids() if each.startswith(job.id)]
    assert submitted == [f"{job.id}-a0"]
    record = service.cluster.record(f"{job.id}-a0")
    assert record is not None
    assert record.num_stops == 0
    (series,) = client.metrics(job.id, names=["train/loss"]).series
    assert [point.step for point in series.points] == list(range(1, 9))
    assert [point.step for point in client.checkpoints(job.id)] == [8]
    kinds = [line.kind for line in client.iter_events(job.id)]
    assert len(kinds) == len(set(kinds)), kinds


@pytest.mark.parametrize(
    "point",
    [
        # The queue lets the job start; the attempt is made, and its submission is noted as tried.
        pytest.param("before store.update_job:1", marks=pytest.mark.slow),
        "after store.update_job:2",
        "before backend.submit",
        "after backend.submit",
        pytest.param("after store.update_job:3", marks=pytest.mark.slow),
    ],
)
def test_a_kill_around_a_submission_makes_one_attempt(
    service: ServiceProcess, client: ShardloomClient, point: str
) -> None:
    before = {each.id for each in client.iter_jobs()}
    service.kill_at(point)
    with ThreadPoolExecutor(1) as pool:
        # The answer may be lost in the crash: the client asks again with the same key.
        submitted = pool.submit(client.submit, spec_document(), idempotency_key=point)
        service.start_once_killed()
        job = submitted.result(scaled(WAIT_S))
    assert client.submit(spec_document(), idempotency_key=point).id == job.id
    assert {each.id for each in client.iter_jobs()} - before == {job.id}
    wait_for(
        lambda: [each.submitted_at for each in client.attempts(job.id) if each.submitted_at],
        "the submission to be known",
        WAIT_S,
    )
    end(service, job)
    assert_told_once(service, client, job)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_the_commit_of_records_neither_loses_nor_doubles_them(
    service: ServiceProcess, client: ShardloomClient, when: str
) -> None:
    job = submit_running(service, client)
    service.kill_at(f"{when} store.append_events")
    with pytest.raises(httpx.TransportError):
        service.post_events(f"{job.id}-a0", batch(*RECORDS[4:8], first_seq=4))
    service.start_once_killed()
    assert service.post_events(f"{job.id}-a0", batch(*RECORDS[4:8], first_seq=4)) == 8
    end(service, job)
    assert_told_once(service, client, job)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_the_storing_of_an_end_tells_it_once(
    service: ServiceProcess, client: ShardloomClient, when: str
) -> None:
    job = submit_running(service, client)
    service.kill()
    end(service, job)
    service.kill_at(f"{when} store.update_job")
    service.start()
    service.start_once_killed()
    assert_told_once(service, client, job)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deletion_that_a_kill_cut_off_can_be_asked_for_again_or_is_finished(
    service: ServiceProcess, client: ShardloomClient, when: str
) -> None:
    job = submit_running(service, client)
    end(service, job)
    assert_told_once(service, client, job)
    service.kill_at(f"{when} store.delete_job")
    with pytest.raises(httpx.TransportError):
        httpx.delete(f"{service.url}/v1/jobs/{job.id}", trust_env=False, timeout=scaled(10.0))
    service.start_once_killed()
    if when == "before":
        assert client.get_job(job.id).status is JobStatus.SUCCEEDED
        httpx.delete(f"{service.url}/v1/jobs/{job.id}", trust_env=False).raise_for_status()
    with pytest.raises(ProblemError) as caught:
        client.get_job(job.id)
    assert caught.value.status == 404
    run_dir = service.attempt_files(job.id).root.parents[1]
    wait_for(lambda: not run_dir.exists(), "the files of the job to be gone", WAIT_S)


def test_a_follower_sees_every_line_once_across_a_restart(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    job = client.submit(spec_document())
    wait_for(lambda: service.cluster.record(f"{job.id}-a0"), "the submission", WAIT_S)
    seen: list[str] = []

    def follow() -> None:
        with ShardloomClient(service.url, retry=PATIENT) as follower:
            seen.extend(line.kind for line in follower.follow_events(job.id))

    thread = threading.Thread(target=follow)
    thread.start()
    service.kill()
    service.start()
    client.cancel(job.id)
    thread.join(scaled(WAIT_S))
    assert not thread.is_alive()
    assert seen == [line.kind for line in client.iter_events(job.id)]
    assert seen[-1] == "job_ended"


def test_a_port_in_use_is_named_and_exits_non_zero(service: ServiceProcess, tmp_path: Path) -> None:
    other_home = tmp_path / "other"
    second = service.run_to_the_end(SHARDLOOM_HOME=str(other_home))
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{service.port}" in second.stderr
    assert "SHARDLOOM_PORT" in second.stderr
    assert "Traceback" not in second.stderr
    assert not other_home.exists()


def test_followed_streams_do_not_hold_up_a_shutdown(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    job = client.submit(spec_document())
    headers = {"Accept": "text/event-stream"}
    with (
        httpx.Client(base_url=service.url, trust_env=False) as http,
        http.stream("GET", f"/v1/jobs/{job.id}/events", headers=headers) as response,
    ):
        chunks = response.iter_text()  # which would end the stream with it
        next(chunks)
        assert "shardloom_stream_followers 1.0" in http.get("/metrics").text
        assert service.terminate() < SHUTDOWN_TIMEOUT_S / 2
    assert "Traceback" not in service.log()


# A child that ignores SIGTERM and a grandchild in a session of its own.
PARENT = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_root_killed_first", [False, True])
def test_a_process_tree_ends_with_its_root_and_orphans_of_a_killed_root_by_name(
    is_root_killed_first: bool,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        root = identify(parent.pid)
        members = process_tree(root, process_table())
        assert len(members) == 3
        others = set()
        if is_root_killed_first:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            others = {each for each in members if is_alive(each)} - process_tree(
                root, process_table()
            )
            assert len(others) == 1, "the grandchild in a session of its own"
        assert terminate_tree(root, grace_s=5.0) == set()
        assert not any(is_alive(each) for each in members - others)
        for each in others:
            assert terminate_tree(each, grace_s=5.0) == set()

"""The service process is killed and restarted under running jobs: nothing lost, nothing doubled."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from service.backends.fake import Script
from service.client import RetryPolicy, ShardloomClient
from service.domain import JobStatus
from tests.integration.ports import free_port
from tests.integration.service_process import SHUTDOWN_TIMEOUT_S, ServiceProcess
from tests.unit.service.builders import (
    attempt_ended,
    batch,
    checkpoint,
    metrics,
    spec_document,
    workers_started,
)
from trainer.events import EventBatch

WAIT_S = 60.0
# A restart takes a while on a busy machine.
PATIENT = RetryPolicy(num_retries=200, max_delay_s=0.3)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path, free_port()) as started:
        started.cluster.play("default", Script(("pending", "running")))
        yield started


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[ShardloomClient]:
    with ShardloomClient(service.url) as opened:
        yield opened


def _wait_for(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def _post(service: ServiceProcess, attempt_id: str, records: EventBatch) -> int:
    """Post a batch as a driver does; returns `next_seq`."""
    response = httpx.post(
        f"{service.url}/v1/attempts/{attempt_id}/events",
        content=records.model_dump_json(),
        headers={"Content-Type": "application/json"},
        trust_env=False,
    )
    response.raise_for_status()
    return int(response.json()["next_seq"])


def test_a_job_outlives_the_service_and_nothing_is_lost_or_doubled(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    job = client.submit(spec_document(), idempotency_key="once")
    attempt_id = f"{job.id}-a0"
    _wait_for(lambda: service.cluster.record(attempt_id))
    records = [workers_started(), *[metrics(step, train_loss=1.0 / step) for step in range(1, 9)]]
    assert _post(service, attempt_id, batch(*records[:6])) == 6
    _wait_for(lambda: client.get_job(job.id).status is JobStatus.RUNNING)

    service.kill()
    # Training goes on: the driver cannot post, and leaves its records on storage.
    outbox = service.attempt_files(job.id).stream_path("rank-0")
    outbox.parent.mkdir(parents=True, exist_ok=True)
    everything = [*records, checkpoint(8, is_best=True)]
    outbox.write_text("".join(record.model_dump_json() + "\n" for record in everything))
    service.start()

    # A batch whose answer was lost in the crash comes again, with what is new.
    assert _post(service, attempt_id, batch(*records[4:8], first_seq=4)) == 8
    assert client.get_job(job.id).status is JobStatus.RUNNING
    assert client.submit(spec_document(), idempotency_key="once").id == job.id

    driver = service.attempt_files(job.id).stream_path("driver")
    driver.write_text(attempt_ended().model_dump_json() + "\n")
    service.cluster.play(attempt_id, Script(("succeeded",)))
    assert client.wait(job.id, timeout_s=WAIT_S, poll_s=0.05).status is JobStatus.SUCCEEDED

    record = service.cluster.record(attempt_id)
    assert record is not None
    assert (record.num_submits, record.num_stops) == (1, 0)
    assert service.cluster.attempt_ids() == [attempt_id]
    (series,) = client.metrics(job.id, names=["train/loss"]).series
    assert [point.step for point in series.points] == list(range(1, 9))
    assert [point.step for point in client.checkpoints(job.id)] == [8]
    kinds = [line.kind for line in client.iter_events(job.id)]
    assert len(kinds) == len(set(kinds)), kinds


def test_kills_at_any_moment_of_a_submission_make_one_attempt(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    jobs = []
    for number in range(3):
        # Right behind the answer: the reconciler is between intent, submission and its record.
        jobs.append(client.submit(spec_document(name=f"job{number}")))
        service.kill()
        service.start()
    for job in jobs:
        _wait_for(lambda job=job: client.attempts(job.id)[0].submitted_at)
    assert service.cluster.attempt_ids() == sorted(f"{job.id}-a0" for job in jobs)


def test_a_follower_sees_every_line_once_across_a_restart(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    job = client.submit(spec_document())
    _wait_for(lambda: service.cluster.record(f"{job.id}-a0"))
    seen: list[str] = []

    def follow() -> None:
        with ShardloomClient(service.url, retry=PATIENT) as follower:
            seen.extend(line.kind for line in follower.follow_events(job.id))

    thread = threading.Thread(target=follow)
    thread.start()
    service.kill()
    service.start()
    client.cancel(job.id)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert seen == [line.kind for line in client.iter_events(job.id)]
    assert seen[-1] == "job_ended"


def test_followed_streams_do_not_hold_up_a_shutdown(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    job = client.submit(spec_document())
    headers = {"Accept": "text/event-stream"}
    with (
        httpx.Client(base_url=service.url, trust_env=False) as http,
        http.stream("GET", f"/v1/jobs/{job.id}/events", headers=headers) as response,
    ):
        next(response.iter_text())
        assert service.terminate() < SHUTDOWN_TIMEOUT_S / 2
    assert "Traceback" not in service.log()


def test_a_port_in_use_is_named_and_exits_non_zero(service: ServiceProcess, tmp_path: Path) -> None:
    other_home = tmp_path / "other"
    second = subprocess.run(
        [sys.executable, "-m", "service.main"],
        env={**service.environment(), "SHARDLOOM_HOME": str(other_home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{service.port}" in second.stderr
    assert "SHARDLOOM_PORT" in second.stderr
    assert "Traceback" not in second.stderr
    assert not other_home.exists()


def test_a_bad_setting_is_named(tmp_path: Path) -> None:
    environment = ServiceProcess(tmp_path, 1).environment() | {"SHARDLOOM_PORT": "99999"}
    process = subprocess.run(
        [sys.executable, "-m", "service.main"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert "SHARDLOOM_PORT" in process.stderr

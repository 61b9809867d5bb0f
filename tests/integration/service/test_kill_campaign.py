"""The service is SIGKILLed at random moments while fifty short jobs go through it.

The cluster is scripted; drivers are threads that write and post records as real ones do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest

from service.backends.fake import Script
from service.client.client import ShardloomClient
from service.domain.models import JobStatus
from tests.harness.builders import attempt_ended, metrics, spec_document, workers_started
from tests.harness.service_process import PATIENT, ServiceProcess
from tests.harness.wait import scaled
from trainer.protocol.outbox import EventWriter, OutboxPoster
from trainer.protocol.run_dir import AttemptDir

pytestmark = pytest.mark.slow

NUM_JOBS = 50
MIN_KILLS, MAX_KILLS = 8, 20
NUM_STEPS = 30
TIMEOUT_S = scaled(240.0)


class Drivers:
    """Drivers of all jobs. Every fifth job loses its first one halfway."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._known: set[str] = set()
        self._pool = ThreadPoolExecutor(NUM_JOBS)

    def start_new(self, fragile_jobs: set[str]) -> None:
        """Give every attempt that arrived at the cluster its driver."""
        for attempt_id in self._service.cluster.attempt_ids():
            if attempt_id not in self._known:
                self._known.add(attempt_id)
                job_id, _, index = attempt_id.rpartition("-a")
                is_lost = job_id in fragile_jobs and index == "0"
                self._pool.submit(self._drive, attempt_id, is_lost)

    def close(self) -> None:
        """Wait for all of them."""
        self._pool.shutdown()

    def _drive(self, attempt_id: str, is_lost: bool) -> None:
        random = Random(attempt_id)
        job_id, _, index = attempt_id.rpartition("-a")
        files: AttemptDir = self._service.attempt_files(job_id, int(index))
        files.outbox_dir.mkdir(parents=True, exist_ok=True)
        workers = EventWriter(files.stream_path("workers-0"))
        url = f"{self._service.url}/v1/attempts/{attempt_id}/events"
        # Not closed here: a poster that gave up waiting may still be in the middle of a request.
        poster = OutboxPoster(files, httpx.Client(trust_env=False), url, interval_s=0.05)
        poster.start()
        workers.write(workers_started())
        for step in range(1, NUM_STEPS // (1 + is_lost) + 1):
            workers.write(metrics(step, train_loss=1.0 / step))
            time.sleep(random.uniform(0, 0.05))
        if not is_lost:
            EventWriter(files.stream_path("driver")).write(attempt_ended())
        poster.close(timeout_s=0.2)  # what is not posted yet is read from storage
        end = "failed" if is_lost else "succeeded"
        self._service.cluster.play(attempt_id, Script((end,)))


def _submit_all(service: ServiceProcess, jobs: dict[str, str]) -> None:
    """Submit the jobs one after the other, whatever happens to the service; ids by name."""
    with ShardloomClient(service.url, retry=PATIENT) as client:
        for number in range(NUM_JOBS):
            name = f"job{number}"
            jobs[name] = client.submit(spec_document(name=name), idempotency_key=name).id
            time.sleep(0.1)


@pytest.mark.timeout(600)
def test_no_job_no_metric_and_no_healthy_attempt_is_lost_or_doubled(
    service: ServiceProcess,
) -> None:
    random, jobs, drivers = Random(7), dict[str, str](), Drivers(service)
    submitting = threading.Thread(target=_submit_all, args=(service, jobs), daemon=True)
    submitting.start()
    num_kills = 0
    deadline = time.monotonic() + TIMEOUT_S
    next_kill = time.monotonic() + 0.5
    while not _all_have_ended(service, jobs):
        assert time.monotonic() < deadline, service.log()[-3000:]
        drivers.start_new({jobs[name] for name in list(jobs) if int(name[3:]) % 5 == 0})
        if time.monotonic() > next_kill and num_kills < MAX_KILLS:
            num_kills += 1
            service.kill()
            time.sleep(random.uniform(0, 0.3))
            service.start()
            next_kill = time.monotonic() + random.uniform(0.1, 2.0)
        time.sleep(0.02)
    submitting.join()
    drivers.close()
    assert num_kills >= MIN_KILLS, "the jobs were over before there was anything to see"
    with ShardloomClient(service.url) as client:
        assert Counter(job.name for job in client.iter_jobs()) == Counter(jobs.keys())
        for name, job_id in jobs.items():
            _check_job(service, client, job_id, num_attempts=2 if int(name[3:]) % 5 == 0 else 1)


def _all_have_ended(service: ServiceProcess, jobs: dict[str, str]) -> bool:
    if len(jobs) < NUM_JOBS:
        return False
    with ShardloomClient(service.url, retry=PATIENT) as client:
        return all(job.status.is_terminal for job in client.iter_jobs())


def _check_job(
    service: ServiceProcess, client: ShardloomClient, job_id: str, num_attempts: int
) -> None:
    job = client.get_job(job_id)
    assert job.status is JobStatus.SUCCEEDED, (job.name, job.message)
    attempts = [attempt.id for attempt in client.attempts(job_id)]
    assert attempts == [f"{job_id}-a{index}" for index in range(num_attempts)]
    for attempt_id in attempts:
        record = service.cluster.record(attempt_id)
        assert record is not None
        # A submission whose answer was lost is sent again: the cluster knows it by its id.
        assert record.num_submits >= 1
        assert record.num_stops == 0, attempt_id
    (series,) = client.metrics(job_id, names=["train/loss"], max_points=1000).series
    assert [point.step for point in series.points] == list(range(1, NUM_STEPS + 1))
    lines = Counter((line.attempt_id, line.kind) for line in client.iter_events(job_id))
    assert set(lines.values()) == {1}, lines

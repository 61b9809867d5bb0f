"""Two service processes on one PostgreSQL share the jobs, and one takes over from the other."""

from __future__ import annotations

import time
from pathlib import Path

from service.backends.fake import Script
from service.client import ShardloomClient
from service.domain import JobStatus
from tests.integration.ports import free_port
from tests.integration.postgresql import PostgresqlServer
from tests.integration.service_process import ServiceProcess
from tests.unit.service.builders import spec_document

NUM_JOBS = 12
LEASE_S = 2.0
WAIT_S = 120.0


def test_jobs_of_a_service_that_is_killed_are_finished_by_the_other(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    settings = {
        "SHARDLOOM_DATABASE_URL": postgresql.empty_database(),
        "SHARDLOOM_LEASE_S": str(LEASE_S),
    }
    first, second = (ServiceProcess(tmp_path, free_port(), settings) for _ in range(2))
    first.cluster.play("default", Script(("pending", *["running"] * 10, "succeeded")))
    with first, second, ShardloomClient(first.url) as one, ShardloomClient(second.url) as other:
        clients = [one, other] * (NUM_JOBS // 2)
        jobs = [
            client.submit(spec_document(name=f"job{number}"), idempotency_key=f"key{number}")
            for number, client in enumerate(clients)
        ]
        _wait_until_submitted(other, [job.id for job in jobs])
        first.kill()
        ended = [other.wait(job.id, timeout_s=WAIT_S, poll_s=0.1) for job in jobs]
    assert {job.status for job in ended} == {JobStatus.SUCCEEDED}
    cluster = first.cluster
    assert cluster.attempt_ids() == sorted(f"{job.id}-a0" for job in jobs)
    assert all(cluster.record(each).num_stops == 0 for each in cluster.attempt_ids())


def _wait_until_submitted(client: ShardloomClient, job_ids: list[str]) -> None:
    """Until some attempt of the jobs has begun: then one service is in the midst of its work."""
    deadline = time.monotonic() + WAIT_S
    while not any(client.attempts(job_id) for job_id in job_ids):
        assert time.monotonic() < deadline, "no job was ever submitted"
        time.sleep(0.02)

"""A real Prometheus scrapes two real replicas of the service with our configuration and rules.

It is that of Debian's package (`apt-get install prometheus`), with shorter intervals.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
import yaml

from service.client.client import ShardloomClient
from tests.conftest import REPO
from tests.harness.builders import (
    TINY_DATA,
    batch,
    layout_chosen,
    membership_changed,
    progress,
    spec_document,
    workers_started,
)
from tests.harness.databases import PostgresqlServer
from tests.harness.processes import die_with_parent
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, wait_for
from tests.unit.observability.expressions import dashboard_queries
from trainer.protocol.events import Metrics

FOLDER = REPO / "deploy" / "observability"
_COMMAND = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _COMMAND is None, reason="needs Prometheus on PATH: apt-get install prometheus"
    ),
]


@contextmanager
def _prometheus(home: Path, targets: list[str], key: str) -> Iterator[httpx.Client]:
    """A client of a server with its files below `home`; `targets` take `key`."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (service,) = (job for job in config["scrape_configs"] if job["job_name"] == "shardloom")
    service["static_configs"] = [{"targets": targets}]
    shutil.copytree(FOLDER / "rules", home / "rules")
    (home / "prometheus.yml").write_text(yaml.safe_dump(config))
    (home / "shardloom-metrics-key").write_text(key)
    address = f"127.0.0.1:{free_port()}"
    files = [f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'tsdb'}"]
    process = subprocess.Popen(
        [str(_COMMAND), *files, f"--web.listen-address={address}"], preexec_fn=die_with_parent
    )
    try:
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=10.0) as http:
            yield http
    finally:
        process.kill()
        process.wait()


def _answer(http: httpx.Client, query: str) -> list[object]:
    """What an expression gives now: nothing, too, before Prometheus is ready."""
    try:
        answer = http.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
        return []
    assert answer.is_success, answer.text
    return answer.json()["data"]["result"]


SURVIVE = {"workers": 6, "shard_group_size": 2, "survive": {"hosts": 1}}


def _submit(replica: ServiceProcess, client: ShardloomClient) -> str:
    """A job of three groups on three hosts in the midst of its training."""
    job = client.submit(spec_document(parallelism=SURVIVE, name="dlrm"))
    attempt_id = f"{job.id}-a0"
    wait_for(lambda: replica.cluster.record(attempt_id), "the submission")
    now = time.time()
    goodput = {"goodput/share": 0.9, "goodput/lost_s/start": 30.0, "risk/steps_undurable": 5.0}
    told = batch(
        layout_chosen(time=now),
        workers_started(total_steps=100),
        membership_changed(time=now),
        Metrics(time=now, step=1, values=goodput),
        progress(40, time=now, rows_per_s=1000.0),
        stream="driver",
    )
    replica.post_events(attempt_id, told, replica.attempt_files(job.id).token_path.read_text())
    return job.id


def test_every_query_of_the_dashboards_is_answered(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    settings = {
        "SHARDLOOM_DATABASE_URL": postgresql.migrated_database(),
        "SHARDLOOM_AUTH": "required",
        "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(TINY_DATA)]),
    }
    one, other = (ServiceProcess(tmp_path, free_port(), settings) for _ in range(2))
    key = one.shell("keys", "create", "ops", "--admin").strip()
    (folder := tmp_path / "prometheus").mkdir()
    targets = [f"127.0.0.1:{each.port}" for each in (one, other)]
    # Nothing has failed, waited or been saved here, and half an hour has not passed.
    unanswered = ("p90_1h", "[45]..", "increase1h > 0", "ALERTS", "rate30m", "QUEUED")
    with one, other, ShardloomClient(one.url, api_key=key) as client:
        # The key that prometheus.yml says how to make.
        viewer = client.create_key("prometheus", roles={"*": "viewer"}).key
        with _prometheus(folder, targets, viewer) as http:
            job_id = _submit(one, client)
            wait_for(lambda: _answer(http, "count(shardloom_job_steps) == 2"), "both are scraped")
            for _, query in dashboard_queries(job_id=job_id):
                if not any(part in query for part in unanswered):
                    wait_for(partial(_answer, http, query), f"an answer to {query}")

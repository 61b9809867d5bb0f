"""A real Prometheus scrapes two real replicas of the service with our configuration and rules.

It is that of Debian's package (`apt-get install prometheus`), with shorter intervals.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

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
_START_TIMEOUT_S = 30.0
_INTERVAL = "1s"

Value = TypeVar("Value")


_COMMAND = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _COMMAND is None, reason="needs Prometheus on PATH: apt-get install prometheus"
    ),
]


class Prometheus:
    """A server with its files below `home`; `targets` are the service's, `key` is for them."""

    def __init__(self, home: Path, targets: list[str], key: str) -> None:
        self._home = home
        self._port = free_port()
        (home / "shardloom-metrics-key").write_text(key)
        self._write_config(targets)
        shutil.copytree(FOLDER / "rules", home / "rules")
        url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=10.0)

    def _write_config(self, targets: list[str]) -> None:
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL}
        (service,) = (job for job in config["scrape_configs"] if job["job_name"] == "shardloom")
        service["static_configs"] = [{"targets": targets}]
        (self._home / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Self:
        log = (self._home / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                str(_COMMAND),
                f"--config.file={self._home / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._home / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
        log.close()
        try:
            self.until(self._is_ready, "Prometheus is ready", _START_TIMEOUT_S)
        except BaseException:
            self.__exit__()  # nobody else does before all is up
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            return self._http.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """What it printed so far."""
        return (self._home / "prometheus.log").read_text()

    def query(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Label sets, without the metric's name, and values of an expression now."""
        answer = self._http.get("/api/v1/query", params={"query": expr})
        assert answer.is_success, answer.text
        found = answer.json()["data"]["result"]
        return {_labels(each["metric"]): float(each["value"][1]) for each in found}

    def until(self, find: Callable[[], Value | None], what: str, limit_s: float = 60.0) -> Value:
        """What `find` finds once it finds anything; an error has what Prometheus printed."""
        try:
            return wait_for(find, what, limit_s, poll_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None


def _labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in metric.items() if name != "__name__"))


SURVIVE = {"workers": 6, "shard_group_size": 2, "survive": {"hosts": 1}}
STEPS, WANTED = 40, 100


@dataclass(frozen=True)
class Watched:
    """Two replicas with a job, and the Prometheus that watches them."""

    replicas: list[ServiceProcess]
    prometheus: Prometheus
    job_id: str


@pytest.fixture(scope="module")
def watched(
    postgresql: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    home = tmp_path_factory.mktemp("service")
    settings = {
        "SHARDLOOM_DATABASE_URL": postgresql.migrated_database(),
        "SHARDLOOM_AUTH": "required",
        "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(TINY_DATA)]),
    }
    replicas = [ServiceProcess(home, free_port(), settings) for _ in range(2)]
    key = replicas[0].shell("keys", "create", "ops", "--admin").strip()
    with replicas[0] as one, replicas[1] as other:
        # The key that prometheus.yml says how to make.
        with ShardloomClient(one.url, api_key=key) as client:
            viewer = client.create_key("prometheus", roles={"*": "viewer"}).key
        targets = [f"127.0.0.1:{each.port}" for each in (one, other)]
        folder = tmp_path_factory.mktemp("prometheus")
        with Prometheus(folder, targets, viewer) as prometheus:
            yield Watched(replicas, prometheus, _submit(one, key))


def _submit(replica: ServiceProcess, key: str) -> str:
    """A job of three groups on three hosts in the midst of its training."""
    with ShardloomClient(replica.url, api_key=key) as client:
        job = client.submit(spec_document(parallelism=SURVIVE, name="dlrm"))
    attempt_id = f"{job.id}-a0"
    wait_for(lambda: replica.cluster.record(attempt_id), "the submission")
    now = time.time()
    goodput = {"goodput/share": 0.9, "goodput/lost_s/start": 30.0, "risk/steps_undurable": 5.0}
    told = batch(
        layout_chosen(time=now),
        workers_started(total_steps=WANTED),
        membership_changed(time=now),
        Metrics(time=now, step=1, values=goodput),
        progress(STEPS, time=now, rows_per_s=1000.0),
        stream="driver",
    )
    replica.post_events(attempt_id, told, replica.attempt_files(job.id).token_path.read_text())
    return job.id


def test_a_job_that_both_replicas_show_counts_once(watched: Watched) -> None:
    prometheus = watched.prometheus
    shown = prometheus.until(
        lambda: len(found := prometheus.query(f"shardloom_job_steps == {STEPS}")) == 2 and found,
        "both replicas show how far the job is",
    )
    instances = {dict(labels)["instance"] for labels in shown}
    assert instances == {f"127.0.0.1:{each.port}" for each in watched.replicas}
    ours = (("job_id", watched.job_id), ("project", "default"))
    rate = prometheus.until(
        lambda: prometheus.query("job_id:shardloom_job_rows_per_second:max"), "it is recorded"
    )
    assert rate == {ours: 1000.0}
    workers = prometheus.until(
        lambda: prometheus.query("project:shardloom_job_workers:sum"), "workers are recorded"
    )
    assert workers == {(("project", "default"),): 6.0}
    assert prometheus.query("sum(status:shardloom_live_jobs:max)") == {(): 1.0}


def test_every_query_of_the_dashboards_is_answered(watched: Watched) -> None:
    # Nothing has failed, waited or been saved here, and half an hour has not passed.
    unanswered = ("p90_1h", "[45]..", "increase1h > 0", "ALERTS", "rate30m", "QUEUED")
    empty: list[str] = []

    def _is_answered() -> bool:
        found = {
            query: watched.prometheus.query(query)
            for _, query in dashboard_queries(job_id=watched.job_id)
        }
        empty[:] = [
            query
            for query, answer in found.items()
            if not answer and not any(part in query for part in unanswered)
        ]
        return not empty

    try:
        watched.prometheus.until(_is_answered, "every query is answered", 30.0)
    except AssertionError as error:
        raise AssertionError(f"no answer to {empty}") from error

"""A real Prometheus scrapes two real replicas of the service with our configuration and rules.

It is that of Debian's package (`apt-get install prometheus`), with shorter times.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

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
from tests.harness.stack import Stack
from tests.harness.wait import free_port, wait_for
from tests.unit.observability.expressions import dashboard_queries
from trainer.protocol.events import Event, Metrics

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
    """A server with its files below `home`; `targets` by scrape job, `key` for the service.

    Texts of rules are replaced as `faster` says; `ray_nodes` are where Ray's nodes are scraped.
    """

    def __init__(
        self,
        home: Path,
        targets: Mapping[str, list[str]],
        key: str,
        faster: Mapping[str, str],
        ray_nodes: Sequence[str] = (),
    ) -> None:
        self._home = home
        self._port = free_port()
        (home / "shardloom-metrics-key").write_text(key)
        self._write_config(targets)
        (home / "ray-nodes.json").write_text(json.dumps([{"targets": list(ray_nodes)}]))
        self._write_rules(faster)
        url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=10.0)

    def _write_config(self, targets: Mapping[str, list[str]]) -> None:
        """Our configuration; jobs without targets of the test stay as they are."""
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL}
        for job in config["scrape_configs"]:
            if job["job_name"] in targets:
                job["static_configs"] = [{"targets": targets[job["job_name"]]}]
            for nodes in job.get("file_sd_configs", []):
                nodes["refresh_interval"] = _INTERVAL
        (self._home / "prometheus.yml").write_text(yaml.safe_dump(config))

    def _write_rules(self, faster: Mapping[str, str]) -> None:
        """Our rules, with the texts in `faster` replaced: each must be there."""
        (self._home / "rules").mkdir()
        texts = {path.name: path.read_text() for path in (FOLDER / "rules").glob("*.yaml")}
        for slow, fast in faster.items():
            assert any(slow in text for text in texts.values()), slow
            texts = {name: text.replace(slow, fast) for name, text in texts.items()}
        for name, text in texts.items():
            (self._home / "rules" / name).write_text(text)

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

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; raises on an expression that it cannot read."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Label sets, without the metric's name, and values of an expression now."""
        found = self.get("query", query=expr)["result"]
        return {_labels(each["metric"]): float(each["value"][1]) for each in found}

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire, by their name."""
        found = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in found if each["state"] == "firing"}

    def until(self, find: Callable[[], Value | None], what: str, limit_s: float = 60.0) -> Value:
        """What `find` finds once it finds anything; an error has what Prometheus printed."""
        try:
            return wait_for(find, what, limit_s, poll_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None


def _labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in metric.items() if name != "__name__"))


# A test has seconds where a platform team has minutes.
FASTER = {"> 900": "> 4", "for: 1m": "for: 1s"}
SURVIVE = {"workers": 6, "shard_group_size": 2, "survive": {"hosts": 1}}
STEPS, WANTED = 40, 100
# Of queries about Ray: GPUs and an autoscaler, which need not be here.
ABSENT = ("gram", "gpus", "cluster_pending", "cluster_failed", "cluster_idle", "cluster_active")


@dataclass
class Driver:
    """Posts records of an attempt as its driver does."""

    service: ServiceProcess
    attempt_id: str
    token: str
    _num_sent: int = field(default=0, init=False)

    def tell(self, *events: Event) -> None:
        part = batch(*events, stream="driver", first_seq=self._num_sent)
        self._num_sent = self.service.post_events(self.attempt_id, part, self.token)

    def step(self, step: int) -> None:
        """Say that the job got so far."""
        self.tell(progress(step, time=time.time(), rows_per_s=1000.0))


@dataclass(frozen=True)
class Watched:
    """Two replicas, what a key may read of them, and the Prometheus that does."""

    replicas: list[ServiceProcess]
    prometheus: Prometheus
    key: str
    job_id: str
    driver: Driver


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
        targets = {"shardloom": [f"127.0.0.1:{each.port}" for each in (one, other)]}
        folder = tmp_path_factory.mktemp("prometheus")
        with Prometheus(folder, targets, viewer, FASTER) as prometheus:
            job_id, driver = _submit(one, key)
            yield Watched(replicas, prometheus, key, job_id, driver)


def _submit(replica: ServiceProcess, key: str) -> tuple[str, Driver]:
    """A job of three groups on three hosts in the midst of its training."""
    with ShardloomClient(replica.url, api_key=key) as client:
        job = client.submit(spec_document(parallelism=SURVIVE, name="dlrm"))
    attempt_id = f"{job.id}-a0"
    wait_for(lambda: replica.cluster.record(attempt_id), "the submission")
    driver = Driver(replica, attempt_id, replica.attempt_files(job.id).token_path.read_text())
    now = time.time()
    goodput = {"goodput/share": 0.9, "goodput/lost_s/start": 30.0, "risk/steps_undurable": 5.0}
    driver.tell(
        layout_chosen(time=now),
        workers_started(total_steps=WANTED),
        membership_changed(time=now),
        Metrics(time=now, step=1, values=goodput),
    )
    driver.step(STEPS)
    return job.id, driver


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
            for name, query in dashboard_queries(job_id=watched.job_id)
            if name != "ray.json"
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


def test_a_job_that_gets_no_further_is_told_as_stuck_until_it_does(watched: Watched) -> None:
    prometheus = watched.prometheus
    alert = prometheus.until(
        lambda: prometheus.alerts().get("ShardloomJobStuck"), "the job is told as stuck"
    )
    assert alert["labels"] == {
        "alertname": "ShardloomJobStuck",
        "job_id": watched.job_id,
        "name": "dlrm",
        "project": "default",
        "severity": "critical",
    }
    assert alert["annotations"]["summary"] == f"Job dlrm ({watched.job_id}) is stuck"
    assert alert["annotations"]["runbook_url"] == "docs/guides/runbooks.md#shardloomjobstuck"

    def _steps_on() -> bool:
        watched.driver.step(int(time.time()))
        return "ShardloomJobStuck" not in prometheus.alerts()

    prometheus.until(_steps_on, "the alert is over")


def test_the_series_of_a_job_go_with_it(watched: Watched) -> None:
    prometheus = watched.prometheus
    with ShardloomClient(watched.replicas[1].url, api_key=watched.key) as client:
        client.cancel(watched.job_id)
    prometheus.until(lambda: not prometheus.query("shardloom_job_info"), "the job is gone")
    ended = 'sum(shardloom_ended_jobs_total{status="CANCELLED"})'
    assert prometheus.until(lambda: prometheus.query(f"{ended} > 0"), "its end is counted") == {
        (): 1.0
    }


def test_the_nodes_of_ray_are_found_and_fill_their_dashboard(stack: Stack, tmp_path: Path) -> None:
    address, token = stack.jobs_api()
    headers = {"Authorization": f"Bearer {token}"}
    nodes = httpx.get(f"{address}/nodes?view=summary", headers=headers, trust_env=False).json()
    raylets = [node["raylet"] for node in nodes["data"]["summary"]]
    listed = [f"{each['nodeManagerAddress']}:{each['metricsExportPort']}" for each in raylets]
    with Prometheus(tmp_path, {}, "", {}, ray_nodes=listed) as prometheus:
        prometheus.until(
            lambda: prometheus.query("last_over_time(ray_node_mem_total[2m])"),
            "Ray's nodes are scraped",
            limit_s=150.0,
        )
        assert set(prometheus.query('up{job="ray"}').values()) == {1.0}
        queries = [query for name, query in dashboard_queries() if name == "ray.json"]
        empty = [query for query in queries if not prometheus.query(query)]
    assert [query for query in empty if not any(part in query for part in ABSENT)] == []

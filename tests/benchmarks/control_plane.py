"""How fast the control plane answers with 100 000 jobs in its store, over an MLflow server.

python -m tests.benchmarks.control_plane --json FILE

Both are real server processes over SQLite, on loopback, with as many jobs (MLflow: runs) and as
many metric points in their databases, and are asked one call after another by one client: a job
with its spec is created, the newest 50 are listed, a job's page is read with all of its metrics
downsampled, and metric points of a running job are taken in, 1000 a call. Ours also tells a line of
a timeline to 200 followers, for which MLflow has nothing. Ours runs on the scripted backend, its
reconciler as busy as the jobs make it. What the reconciler alone costs is measured in a process of
its own (`control_plane_tick`).
"""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml

from service.domain.models import new_job_id
from tests.benchmarks.control_plane_tick import NUM_IDLE_JOBS, NUM_LIVE_JOBS
from tests.benchmarks.peers.mlflow_server import MlflowServer, copy_rows, mlflow_server
from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Values,
    log,
    main,
    run_module,
    run_pairs,
)
from tests.conftest import EXAMPLE_SPEC
from tests.harness.builders import TINY_DATA
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, wait_for
from trainer.protocol.events import Event, EventBatch, Metrics, Note

NAME = "control_plane"
PAIRS = 3
NUM_JOBS = 100_000
# Of these every one has all points: 100 x 10 x 10 000.
NUM_FULL_JOBS = 100
NUM_STEPS = 10_000
METRIC_NAMES = [f"train/metric_{number}" for number in range(10)]
NUM_SUBMITS = 200
NUM_LISTS = 200
NUM_PAGES = 30
NUM_BATCHES = 60
STEPS_PER_BATCH = 100
PAGE_POINTS = 320
LIST_LIMIT = 50
NUM_FOLLOWERS = 200
PEER = "MLflow tracking server, SQLite"
GOALS = [
    Goal("submit_p99", "submits_per_s_p99", "1/s", 5.0, "higher", PEER),
    Goal("list_p99", "lists_per_s_p99", "1/s", 5.0, "higher", PEER),
    Goal("job_page_p99", "pages_per_s_p99", "1/s", 5.0, "higher", PEER),
    Goal("ingest", "points_per_s", "points/s", 5.0, "higher", PEER),
    Goal("idle_cpu_share", "idle_cpu_share", "cores", 0.05, "lower", "one core"),
]


@dataclass
class ShardloomServer:
    """Our service; the calls that the benchmark times, as those of `MlflowServer`."""

    process: ServiceProcess
    spec: dict[str, Any]
    http: httpx.Client

    def submit(self) -> str:
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        job = self._answer(self.http.post("/v1/jobs", json={"spec": self.spec}, headers=headers))
        return str(job["id"])

    def list(self, limit: int) -> int:
        return len(self._answer(self.http.get("/v1/jobs", params={"limit": limit}))["items"])

    def read_page(self, job: str, names: list[str], max_points: int) -> int:
        """Read all that a job's page shows; how many points came."""
        self._answer(self.http.get(f"/v1/jobs/{job}"))
        params = {"name": names, "max_points": max_points}
        found = self._answer(self.http.get(f"/v1/jobs/{job}/metrics", params=params))
        return sum(len(series["points"]) for series in found["series"])

    def ingest(self, job: str, names: list[str], first_step: int, num_steps: int) -> None:
        """Store a value of each metric for so many steps; record number n holds step n."""
        now = time.time()
        events: list[Event] = [
            Metrics(time=now, step=step, values=dict.fromkeys(names, step * 0.5))
            for step in range(first_step, first_step + num_steps)
        ]
        self.post(job, EventBatch(stream="workers-0", first_seq=first_step, events=events))

    def post(self, job: str, batch: EventBatch) -> None:
        body = batch.model_dump_json()
        headers = {"Content-Type": "application/json"}
        path = f"/v1/attempts/{job}-a0/events"
        self._answer(self.http.post(path, content=body, headers=headers))

    def wait_for_attempt(self, job: str) -> None:
        wait_for(
            lambda: self._answer(self.http.get(f"/v1/jobs/{job}"))["current_attempt_id"],
            f"an attempt of {job}",
            60,
        )

    def multiply(self, job: str, num_jobs: int, num_full: int) -> None:
        """Copy a job in the database; the copies have succeeded, and are older than the job."""
        now = time.time()
        copies = [(new_job_id(now - 60 - number), number) for number in range(num_jobs)]
        with closing(sqlite3.connect(self.process.home / "shardloom.db", timeout=60)) as database:
            # At once: a read that turned into a write later would fail where the service writes.
            database.execute("BEGIN IMMEDIATE")
            database.execute("CREATE TEMP TABLE copies (id TEXT PRIMARY KEY, number INTEGER)")
            database.executemany("INSERT INTO copies VALUES (?, ?)", copies)
            for table, key in (("jobs", "id"), ("job_progress", "job_id"), ("attempts", "job_id")):
                _copy_rows(database, table, key, job)
            _copy_points(database, job, num_full)
            database.commit()

    @staticmethod
    def _answer(response: httpx.Response) -> Any:
        if response.is_error:
            raise BenchmarkError(f"the service answered {response.status_code}: {response.text}")
        return response.json()


def _copy_rows(database: sqlite3.Connection, table: str, key: str, job: str) -> None:
    changed = {key: "copies.id"}
    if table == "jobs":
        changed |= {
            "status": "'SUCCEEDED'",
            "reason": "'completed'",
            "current_attempt_id": "copies.id || '-a0'",
            "created_at": "created_at - 60 - copies.number",
            "ended_at": "created_at - copies.number",
        }
    if table == "attempts":
        changed |= {"id": "copies.id || '-a0'", "end_reason": "'completed'"}
    copy_rows(database, table, key, job, changed)


def _copy_points(database: sqlite3.Connection, job: str, num_full: int) -> None:
    # NULL: SQLite gives each name an id of its own.
    changed = {"id": "NULL", "job_id": "copies.id"}
    copy_rows(database, "metric_names", "job_id", job, changed, below=num_full)
    columns = [row[1] for row in database.execute("PRAGMA table_info(metric_points)")]
    values = ", ".join("copy.id" if column == "name_id" else f"p.{column}" for column in columns)
    database.execute(
        f"INSERT INTO metric_points ({', '.join(columns)}) SELECT {values} "
        "FROM metric_names AS copy "
        "JOIN metric_names AS own ON own.name = copy.name AND own.job_id = ?1 "
        "JOIN metric_points AS p ON p.name_id = own.id WHERE copy.job_id <> ?1",
        (job,),
    )


Server = ShardloomServer | MlflowServer


def fill(server: Server, begin: Callable[[str], None]) -> str:
    """Bring a server to `NUM_JOBS` jobs and their points; the job that the others are copies of."""
    job = server.submit()
    begin(job)
    for first_step in range(0, NUM_STEPS, STEPS_PER_BATCH):
        server.ingest(job, METRIC_NAMES, first_step, STEPS_PER_BATCH)
    server.multiply(job, NUM_JOBS - 1, NUM_FULL_JOBS - 1)
    return job


def measure(server: Server, job: str, next_step: Iterator[int]) -> Values:
    """Time every call; `next_step` gives steps that the job has not told of yet."""
    submits = [_timed(server.submit) for _ in range(NUM_SUBMITS)]
    lists = [_timed(lambda: _check(server.list(LIST_LIMIT), LIST_LIMIT)) for _ in range(NUM_LISTS)]
    pages = [
        _timed(lambda: _check(server.read_page(job, METRIC_NAMES, PAGE_POINTS), 1000))
        for _ in range(NUM_PAGES)
    ]
    began = time.perf_counter()
    for _ in range(NUM_BATCHES):
        server.ingest(job, METRIC_NAMES, next(next_step), STEPS_PER_BATCH)
    took_s = time.perf_counter() - began
    return {
        "submits_per_s_p99": 1 / _p99(submits),
        "lists_per_s_p99": 1 / _p99(lists),
        "pages_per_s_p99": 1 / _p99(pages),
        "points_per_s": NUM_BATCHES * STEPS_PER_BATCH * len(METRIC_NAMES) / took_s,
        "submit_median_s": statistics.median(submits),
    }


def _check(found: int, least: int) -> None:
    if found < least:
        raise BenchmarkError(f"an answer held {found} of what should be {least} at least")


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _p99(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=100, method="inclusive")[98]


async def follow(server: ShardloomServer, job: str) -> dict[str, float]:
    """Seconds from telling of an event until the last of all followers has heard of it."""
    word = f"note {uuid.uuid4().hex}"
    limits = httpx.Limits(max_connections=NUM_FOLLOWERS + 1)
    async with httpx.AsyncClient(
        base_url=server.process.url, timeout=60, trust_env=False, limits=limits
    ) as http:
        listening = [asyncio.Event() for _ in range(NUM_FOLLOWERS)]
        followers = [asyncio.create_task(_hear(http, job, word, each)) for each in listening]
        await asyncio.gather(*(each.wait() for each in listening))
        told = time.time()
        note = Note(time=told, level="info", message=word)
        batch = EventBatch(stream=f"followed-{word[5:13]}", first_seq=0, events=[note])
        await asyncio.to_thread(server.post, job, batch)
        heard = await asyncio.gather(*followers)
    delays = [at - told for at in heard]
    return {"follower_median_s": statistics.median(delays), "last_follower_s": max(delays)}


async def _hear(http: httpx.AsyncClient, job: str, word: str, listening: asyncio.Event) -> float:
    headers = {"Accept": "text/event-stream"}
    async with http.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as response:
        if response.is_error:
            raise BenchmarkError(f"a follower was answered {response.status_code}")
        async for line in response.aiter_lines():
            listening.set()
            if word in line:
                return time.time()
    raise BenchmarkError("a follower's stream ended before the event came")


@contextmanager
def shardloom_server(folder: Path) -> Iterator[ShardloomServer]:
    """Our service with its state in `folder`, without limits on how often it may be asked."""
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    document["data"]["path"] = str(TINY_DATA)
    settings = {
        "SHARDLOOM_RATE_LIMIT_PER_S": "1000000",
        "SHARDLOOM_RATE_LIMIT_BURST": "1000000",
        "SHARDLOOM_ATTEMPT_RATE_LIMIT_PER_S": "1000000",
        "SHARDLOOM_ATTEMPT_RATE_LIMIT_BURST": "1000000",
        "SHARDLOOM_RECONCILE_INTERVAL_S": "1",
        "SHARDLOOM_STREAM_POLL_S": "0.5",
    }
    with (
        ServiceProcess(folder, free_port(), settings) as process,
        httpx.Client(base_url=process.url, timeout=120, trust_env=False) as http,
    ):
        yield ShardloomServer(process, document, http)


def tick() -> Values:
    """What a pass over a thousand running jobs takes, and an idle second with a hundred."""
    with TemporaryDirectory(prefix="shardloom-tick-") as folder:
        return run_module("control_plane_tick", folder)


def run(num_pairs: int) -> BenchmarkReport:
    with TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        log("installing MLflow")
        ours = folder / "ours"
        ours.mkdir()
        parameters = {f"parameter_{number}": f"value {number}" for number in range(20)}
        with (
            mlflow_server(folder / "mlflow", parameters) as peer,
            shardloom_server(ours) as server,
        ):
            log(f"filling both stores with {NUM_JOBS:,} jobs")
            job = fill(server, server.wait_for_attempt)
            run_id = fill(peer, lambda _: None)
            steps = {
                side: iter(range(NUM_STEPS, 2**31, STEPS_PER_BATCH)) for side in ("ours", "peer")
            }

            def measure_ours() -> Values:
                found = measure(server, job, steps["ours"])
                return {**found, **asyncio.run(follow(server, job)), **tick()}

            def measure_peer() -> Values:
                return {**measure(peer, run_id, steps["peer"]), "idle_cpu_share": 1.0}

            runs = run_pairs(num_pairs, measure_ours, measure_peer)
    return BenchmarkReport(NAME, settings(), GOALS, runs)


def settings() -> dict[str, Any]:
    return {
        "num_jobs": NUM_JOBS,
        "num_points": NUM_FULL_JOBS * NUM_STEPS * len(METRIC_NAMES),
        "submits": NUM_SUBMITS,
        "lists": f"{NUM_LISTS}, {LIST_LIMIT} jobs each",
        "pages": f"{NUM_PAGES}, {len(METRIC_NAMES)} metrics of {PAGE_POINTS} points",
        "points_per_call": STEPS_PER_BATCH * len(METRIC_NAMES),
        "followers": NUM_FOLLOWERS,
        "tick": f"{NUM_LIVE_JOBS} live jobs, idle with {NUM_IDLE_JOBS}",
        "database": "SQLite, both",
        "peer": "mlflow server 3.17.2 with its default workers",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

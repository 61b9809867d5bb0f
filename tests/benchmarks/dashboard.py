"""Seconds until pages of the dashboard can be used in Chromium, over large stores.

python -m tests.benchmarks.dashboard --json FILE

The service is a process of its own over SQLite; Chromium runs beside it on the same cores. Each
time is from the start of the navigation until the page shows its data and its connection stands, so
that the next key press is answered: the list of 100 000 jobs, and that list after a search; a job
with a million metric points, with the charts that are in view, and with all of them; eight jobs
compared. The pages' scripts are in the browser's cache, as they are for whoever was there before.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from playwright.sync_api import Page, sync_playwright

from service.db.jobs import JobStore
from service.domain.models import Job, JobStatus, new_job_id
from tests.benchmarks.report import (
    BenchmarkReport,
    BenchmarkSkipped,
    Goal,
    Values,
    log,
    main,
    run_pairs,
)
from tests.conftest import EXAMPLE_SPEC
from tests.harness.databases import store_job
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port
from trainer.spec import validate_spec

NAME = "dashboard"
PAIRS = 3
NUM_JOBS = 100_000
NUM_COMPARED = 8
NUM_POINTS = 1_000_000
# Charts of the job's page: those in view at first, and all.
NUM_IN_VIEW, NUM_CHARTS = 3, 8
CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_PEER = "one second"
GOALS = [
    Goal(key, key, "s", 1.0, "lower", _PEER)
    for key in ("list_100k_s", "job_1m_points_s", "compare_8_s")
]
# Every reported metric of a job, with what it begins and ends at.
_CURVES = {
    "train/loss": (1.1, 0.7),
    "train/rmse": (1.05, 0.82),
    "validation/rmse": (0.98, 0.86),
    "speed/rows_per_s": (11_000.0, 16_500.0),
    "optimizer/lr_sparse": (0.02, 0.02),
    "phase/lookup_s": (0.012, 0.009),
    "phase/dense_s": (0.011, 0.010),
    "phase/backward_s": (0.021, 0.019),
    "sync/time_s": (0.044, 0.038),
    "memory/peak_rss_bytes": (1.1e9, 1.4e9),
}
_ENDS = (JobStatus.SUCCEEDED, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)
_IS_CONNECTED = "() => window.socket && window.socket.connected"


def fill(home: Path, num_jobs: int = NUM_JOBS, num_points: int = NUM_POINTS) -> Job:
    """Make a store with jobs in many projects; the newest one has `num_points` points."""
    home.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    data = home / "data"
    data.mkdir()
    (data / "manifest.json").write_text("{}")
    document["data"]["path"] = str(data)
    store = JobStore.open(f"sqlite:///{home / 'shardloom.db'}")
    now = time.time()
    spec = validate_spec(document)
    newest = store_job(
        store,
        Job(new_job_id(now), "movielens-long", spec, JobStatus.QUEUED, now - 7200, queued_at=now),
    )
    store.close()
    with closing(sqlite3.connect(home / "shardloom.db", timeout=60)) as database:
        _copy(database, newest, num_jobs - 1, now)
        steps = num_points // len(_CURVES)
        ids = [row[0] for row in database.execute("SELECT id FROM jobs ORDER BY id DESC LIMIT 100")]
        for place, job_id in enumerate(ids):
            _add_points(database, job_id, steps if job_id == newest.id else 1000, place, now)
        database.execute(
            "UPDATE jobs SET status='SUCCEEDED', reason='completed', ended_at=?", [now]
        )
        database.execute("UPDATE jobs SET started_at=created_at + 20")
        database.executemany(
            "UPDATE jobs SET status=?, reason=? WHERE id=?",
            [
                (_ENDS[i % 4], ("completed", "completed", "data_error", "cancelled")[i % 4], job_id)
                for i, job_id in enumerate(_ids(database))
            ],
        )
        database.commit()
        database.execute("ANALYZE")
        database.commit()
    return newest


def _ids(database: sqlite3.Connection) -> Sequence[str]:
    return [row[0] for row in database.execute("SELECT id FROM jobs ORDER BY id DESC")]


def _copy(database: sqlite3.Connection, job: Job, number: int, now: float) -> None:
    """Older jobs like one, each with a name, a project and results of its own."""
    draw = random.Random(0)
    models, projects = ("movielens", "criteo", "two-towers", "sequence"), ("ads", "feed", "search")
    columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
    template = dict(zip(columns, database.execute("SELECT * FROM jobs").fetchone(), strict=True))
    progress = [row[1] for row in database.execute("PRAGMA table_info(job_progress)")]
    jobs, done, labels = [], [], []
    for i in range(number):
        created, job_id = now - 7300 - 60 * i, new_job_id(now - 7300 - 60 * i)
        name = f"{models[i % 4]}-{'nightly' if i % 3 else 'sweep'}-{number - i}"
        changed = {"id": job_id, "name": name, "project": projects[i % 3], "created_at": created}
        jobs.append(tuple((template | changed).values()))
        rmse = 0.85 + 0.1 * draw.random()
        latest = {"train/loss": rmse**2, "validation/rmse": rmse, "speed/rows_per_s": 15_000.0}
        facts = dict.fromkeys(progress) | {
            **{"job_id": job_id, "step": 1000, "total_steps": 1000, "epoch": 2, "rows": 512_000},
            **{"rows_per_s": 15_000.0, "latest_metrics": json.dumps(latest)},
        }
        done.append(tuple(facts.values()))
        labels += [(job_id, "team", projects[i % 3]), (job_id, "kind", "base" if i % 5 else "wide")]
    for table, rows in (("jobs", jobs), ("job_progress", done), ("job_labels", labels)):
        places = ", ".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO {table} VALUES ({places})", rows)


def _add_points(
    database: sqlite3.Connection, job_id: str, num_steps: int, place: int, now: float
) -> None:
    draw = random.Random(place)
    for name, (first, last) in _CURVES.items():
        row = database.execute(
            "INSERT INTO metric_names (job_id, name, num_points) VALUES (?, ?, ?) RETURNING id",
            (job_id, name, num_steps),
        ).fetchone()
        bend, noise = 3.0 + place % 5, 0.02 + 0.004 * (place % 7)
        points: Iterator[tuple[Any, ...]] = (
            (
                row[0],
                10 * step,
                last
                + (first - last) * math.exp(-bend * step / num_steps)
                + first * noise * (draw.random() - 0.5),
                now - 7200 + 7200 * step / num_steps,
                0,
            )
            for step in range(1, num_steps + 1)
        )
        database.executemany("INSERT INTO metric_points VALUES (?, ?, ?, ?, ?)", points)


def _time_until(page: Page, url: str, selector: str, number: int) -> float:
    """Seconds until a page shows at least `number` of what a selector names, and is connected."""
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    _wait_for(page, selector, number)
    page.wait_for_function(_IS_CONNECTED, polling=10)
    return time.perf_counter() - began


def _wait_for(page: Page, selector: str, number: int) -> None:
    shown = "([s, n]) => document.querySelectorAll(s).length >= n"
    page.wait_for_function(shown, arg=[selector, number], polling=10, timeout=60_000)


def measure(page: Page, url: str, job_ids: Sequence[str]) -> Values:
    """Open each page once."""
    dashboard, found = f"{url}/dashboard", {}
    found["list_100k_s"] = _time_until(page, f"{dashboard}/", ".job-row", 50)
    began = time.perf_counter()
    page.get_by_label("Search name or id").fill("nightly-77777")
    page.wait_for_function("() => document.querySelectorAll('.job-row').length == 1", polling=10)
    found["search_100k_s"] = time.perf_counter() - began
    began = time.perf_counter()
    job_url = f"{dashboard}/jobs/{job_ids[0]}"
    found["job_1m_points_s"] = _time_until(page, job_url, ".drawn canvas", NUM_IN_VIEW)
    _wait_for(page, ".drawn", NUM_CHARTS)
    found["job_all_charts_s"] = time.perf_counter() - began
    compared = f"{dashboard}/compare?jobs={','.join(job_ids[:NUM_COMPARED])}"
    found["compare_8_s"] = _time_until(page, compared, ".drawn canvas", 4)
    return found


def run(num_pairs: int) -> BenchmarkReport:
    """Measure; raises `BenchmarkError`, or `BenchmarkSkipped` without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise BenchmarkSkipped("no 'chromium' on PATH (apt-get install chromium)")
    with TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        log(f"filling a store with {NUM_JOBS:,} jobs and {NUM_POINTS:,} points of one")
        fill(home)
        with closing(sqlite3.connect(home / "shardloom.db")) as database:
            ids = _ids(database)[:NUM_COMPARED]
        settings = {"SHARDLOOM_DASHBOARD": "true", "SHARDLOOM_RECONCILE_INTERVAL_S": "1"}
        with (
            ServiceProcess(home, free_port(), settings) as process,
            sync_playwright() as playwright,
            playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS) as browser,
        ):
            # A service that was just started imports, and fills its caches.
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            measure(page, process.url, ids)
            seconds = {goal.measured: 1.0 for goal in GOALS}
            runs = run_pairs(num_pairs, lambda: measure(page, process.url, ids), lambda: seconds)
    settings_of_run = {"num_jobs": NUM_JOBS, "num_points": NUM_POINTS, "compared": NUM_COMPARED}
    return BenchmarkReport(NAME, settings_of_run, GOALS, runs)


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

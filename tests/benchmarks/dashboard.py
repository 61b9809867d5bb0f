"""Seconds until pages of the dashboard can be used in Chromium, over large stores.

python -m tests.benchmarks.dashboard --json FILE

The service is a process of its own over SQLite; Chromium runs beside it on the same cores. Each
time is from the start of the navigation until the page shows its data and its connection stands, so
that the next key press is answered: the list of 100 000 jobs; a job with a million metric points,
with the charts that are in view; eight jobs compared. The pages' scripts are in the browser's
cache, as they are for whoever was there before.

MLflow's server with its own pages shows the same data: as many runs, of the newest ones the same
points. Its times end when its table has rows, and when the two charts that it shows at first have
the curves of the run, or of eight runs.
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

import yaml
from playwright.sync_api import Page, sync_playwright

from service.db.jobs import JobStore
from service.domain.models import Job, JobStatus, new_job_id
from tests.benchmarks.peers.mlflow_server import MlflowServer, mlflow_server
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
from tests.e2e.conftest import CHROMIUM_ARGS
from tests.harness.builders import TINY_DATA
from tests.harness.databases import store_job
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port
from trainer.spec import validate_spec

NAME = "dashboard"
PAIRS = 3
NUM_JOBS = 100_000
NUM_COMPARED = 8
NUM_POINTS = 1_000_000
# The newest jobs; the first of them has the million, the others 1000 a metric.
NUM_WITH_POINTS = 100
# Charts of the job's page that are in view at first.
NUM_IN_VIEW = 3
_PAGES = ("list_100k", "job_1m_points", "compare_8")
GOALS = [
    *(Goal(f"{page}_s", f"{page}_s", "s", 1.0, "lower", "one second") for page in _PAGES),
    *(Goal(f"{page}_over_mlflow", page, "s", 1.0, "lower", "MLflow's pages") for page in _PAGES),
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
# A chart of MLflow that has a curve, of which two are in view, and one with eight.
_MLFLOW_CHART = "[data-testid=experiment-view-compare-runs-card] .js-plotly-plot:has({})"
_MLFLOW_CURVE = ".trace:nth-child({}) path.js-line"
NUM_MLFLOW_IN_VIEW = 2
# Both tables draw further rows only as one scrolls.
NUM_ROWS_IN_VIEW = 15
_IS_CONNECTED = "() => window.socket && window.socket.connected"


def fill(home: Path, num_jobs: int = NUM_JOBS, num_points: int = NUM_POINTS) -> Job:
    """Make a store with jobs in many projects; the newest one has `num_points` points."""
    home.mkdir(parents=True, exist_ok=True)
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    document["data"]["path"] = str(TINY_DATA)
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
        for place, job_id in enumerate(_ids(database)[:NUM_WITH_POINTS]):
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


def _curves(
    num_steps: int, place: int, now: float
) -> Iterator[tuple[str, Iterator[tuple[int, float, float]]]]:
    """The metrics of the job at a place of the list, with their points: step, value, Unix time."""
    draw = random.Random(place)
    bend, noise = 3.0 + place % 5, 0.02 + 0.004 * (place % 7)
    for name, (first, last) in _CURVES.items():
        yield (
            name,
            (
                (
                    10 * step,
                    last
                    + (first - last) * math.exp(-bend * step / num_steps)
                    + first * noise * (draw.random() - 0.5),
                    now - 7200 + 7200 * step / num_steps,
                )
                for step in range(1, num_steps + 1)
            ),
        )


def _add_points(
    database: sqlite3.Connection, job_id: str, num_steps: int, place: int, now: float
) -> None:
    for name, points in _curves(num_steps, place, now):
        row = database.execute(
            "INSERT INTO metric_names (job_id, name, num_points) VALUES (?, ?, ?) RETURNING id",
            (job_id, name, num_steps),
        ).fetchone()
        rows = ((row[0], *point, 0) for point in points)
        database.executemany("INSERT INTO metric_points VALUES (?, ?, ?, ?, ?)", rows)


def fill_mlflow(server: MlflowServer) -> list[str]:
    """Make the same runs of an MLflow server; ids of the newest, the one with most points first."""
    newest, now = server.submit(), time.time()
    server.ingest(newest, [*_CURVES], 0, 1)
    with closing(sqlite3.connect(server.database, timeout=60)) as database:
        # Charts are of metrics that have steps.
        database.execute("DELETE FROM metrics")
        database.execute("UPDATE latest_metrics SET step = 10000, value = 0.9")
        database.commit()
    server.multiply(newest, NUM_JOBS - 1, 0)
    ids = server.newest(NUM_WITH_POINTS)
    statement = (
        "INSERT INTO metrics (run_uuid, key, step, value, timestamp, is_nan) "
        "VALUES (?, ?, ?, ?, ?, 0)"
    )
    with closing(sqlite3.connect(server.database, timeout=60)) as database:
        for place, run_id in enumerate(ids):
            steps = NUM_POINTS // len(_CURVES) if run_id == newest else 1000
            for name, points in _curves(steps, place, now):
                rows = ((run_id, name, at, y, int(1000 * told)) for at, y, told in points)
                database.executemany(statement, rows)
        database.commit()
        database.execute("ANALYZE")
        database.commit()
    return ids


def _time_until(page: Page, url: str, selector: str, number: int) -> float:
    """Seconds until a page shows at least `number` of what a selector names."""
    began = time.perf_counter()
    page.goto(url, wait_until="commit")
    _wait_for(page, selector, number)
    return time.perf_counter() - began


def _time_until_usable(page: Page, url: str, selector: str, number: int) -> float:
    """The same of a page of ours, which is connected then."""
    shown_s = _time_until(page, url, selector, number)
    shown = time.perf_counter()
    page.wait_for_function(_IS_CONNECTED, polling=10)
    return shown_s + time.perf_counter() - shown


def _wait_for(page: Page, selector: str, number: int) -> None:
    shown = "([s, n]) => document.querySelectorAll(s).length >= n"
    page.wait_for_function(shown, arg=[selector, number], polling=10, timeout=60_000)


def measure(page: Page, url: str, job_ids: Sequence[str]) -> Values:
    dashboard, found = f"{url}/dashboard", {}
    found["list_100k_s"] = _time_until_usable(page, f"{dashboard}/", ".job-row", 50)
    job_url = f"{dashboard}/jobs/{job_ids[0]}"
    found["job_1m_points_s"] = _time_until_usable(page, job_url, ".drawn canvas", NUM_IN_VIEW)
    compared = f"{dashboard}/compare?jobs={','.join(job_ids[:NUM_COMPARED])}"
    found["compare_8_s"] = _time_until_usable(page, compared, ".drawn canvas", 4)
    return found | {page_name: found[f"{page_name}_s"] for page_name in _PAGES}


def measure_mlflow(page: Page, url: str, run_ids: Sequence[str]) -> Values:
    """Open the same pages of MLflow once: its table, a run's charts, charts of the newest runs."""
    runs = f"{url}/#/experiments/0/runs"
    rows = ".ag-center-cols-container .ag-row"

    def until(address: str, selector: str, number: int) -> float:
        shown_s = _time_until(page, address, selector, number)
        # A new document next time, though only what is behind the # will change; and a page that
        # is not watched does nothing.
        page.goto("about:blank")
        return shown_s

    def until_drawn(address: str, num_curves: int) -> float:
        chart = _MLFLOW_CHART.format(_MLFLOW_CURVE.format(num_curves))
        return until(address, chart, NUM_MLFLOW_IN_VIEW)

    return {
        "list_100k": until(runs, rows, NUM_ROWS_IN_VIEW),
        "job_1m_points": until_drawn(f"{runs}/{run_ids[0]}/model-metrics", 1),
        "compare_8": until_drawn(f"{runs}?compareRunsMode=CHART", NUM_COMPARED),
    }


def run(num_pairs: int) -> BenchmarkReport:
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
        log("installing MLflow, and filling its store")
        with (
            mlflow_server(home / "mlflow", {}) as peer,
            ServiceProcess(home, free_port(), settings) as process,
            sync_playwright() as playwright,
            playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS) as browser,
        ):
            run_ids = fill_mlflow(peer)
            page, their_page = (
                browser.new_page(viewport={"width": 1440, "height": 900}) for _ in range(2)
            )
            seconds = {f"{page_name}_s": 1.0 for page_name in _PAGES}

            def ours() -> Values:
                return measure(page, process.url, ids)

            def theirs_and_a_second() -> Values:
                return seconds | measure_mlflow(their_page, peer.url, run_ids)

            # Servers that were just started import, and fill their caches.
            ours()
            theirs_and_a_second()
            runs = run_pairs(num_pairs, ours, theirs_and_a_second)
    settings_of_run = {
        **{"num_jobs": NUM_JOBS, "num_points": NUM_POINTS, "compared": NUM_COMPARED},
        "peer": "mlflow server 3.17.2 with its default workers, its own pages",
    }
    return BenchmarkReport(NAME, settings_of_run, GOALS, runs)


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))

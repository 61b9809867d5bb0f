"""The peer of the control plane benchmark: an MLflow tracking server over SQLite, and calls to it.

MLflow is installed into an environment of its own. A run stands for a job: its parameters for the
spec, its metrics for the job's. The calls are those of MLflow's own client and pages.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tests.benchmarks.report import BenchmarkError, run_child
from tests.harness.wait import free_port

_PACKAGE = "mlflow==3.17.2"
_START_TIMEOUT_S = 180.0
_API = "/api/2.0/mlflow"
_EXPERIMENT = "0"


def _install_mlflow(folder: Path) -> Path:
    """An environment with MLflow in `folder`; its `bin`. Raises `BenchmarkError`."""
    run_child(sys.executable, "-m", "venv", str(folder), what=f"an environment for {_PACKAGE}")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", _PACKAGE]
    run_child(*pip, what=f"installing {_PACKAGE}")
    return folder / "bin"


class MlflowServer:
    """`mlflow server` as it comes, but for its folder and port; the calls that the benchmark times.

    `parameters` are those of every new run.
    """

    def __init__(self, folder: Path, url: str, parameters: Mapping[str, str]) -> None:
        self.url, self.database = url, folder / "mlflow.db"
        self._parameters = [{"key": key, "value": value} for key, value in parameters.items()]
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def submit(self) -> str:
        """Create a run with its parameters, which takes MLflow's client two calls; its id."""
        body = {
            "experiment_id": _EXPERIMENT,
            "run_name": f"run-{uuid.uuid4().hex[:8]}",
            "start_time": _now_ms(),
        }
        run_id: str = self._post("runs/create", body)["run"]["info"]["run_id"]
        self._post("runs/log-batch", {"run_id": run_id, "params": self._parameters})
        return run_id

    def list(self, limit: int) -> int:
        """The newest runs; how many there are on the page."""
        return len(self.newest(limit))

    def newest(self, limit: int) -> list[str]:
        """Ids of the newest runs, in one call."""
        body = {
            "experiment_ids": [_EXPERIMENT],
            "max_results": limit,
            "order_by": ["attributes.start_time DESC"],
        }
        return [each["info"]["run_id"] for each in self._post("runs/search", body)["runs"]]

    def read_page(self, run_id: str, names: list[str], max_points: int) -> int:
        """What a run's page shows: the run, and downsampled metrics; how many points that is."""
        self._get("runs/get", {"run_id": run_id})
        points = 0
        for name in names:
            params = {"run_ids": run_id, "metric_key": name, "max_results": max_points}
            found = self._get(
                "metrics/get-history-bulk-interval", params, api="/ajax-api/2.0/mlflow"
            )
            points += len(found["metrics"])
        return points

    def ingest(self, run_id: str, names: list[str], first_step: int, num_steps: int) -> None:
        """Store a value of each metric for so many steps, in one call."""
        now = _now_ms()
        metrics = [
            {"key": name, "value": step * 0.5, "timestamp": now, "step": step}
            for step in range(first_step, first_step + num_steps)
            for name in names
        ]
        self._post("runs/log-batch", {"run_id": run_id, "metrics": metrics})

    def multiply(self, run_id: str, num_runs: int, num_full: int) -> None:
        """Put copies of a run into the database; `num_full` of them with all points.

        The others have its newest values only. By SQL, as no call of MLflow could in hours.
        """
        with closing(sqlite3.connect(self.database, timeout=60)) as database:
            copies = [(uuid.uuid4().hex, number) for number in range(num_runs)]
            database.execute("CREATE TEMP TABLE copies (id TEXT PRIMARY KEY, number INTEGER)")
            database.executemany("INSERT INTO copies VALUES (?, ?)", copies)
            # Runs that started one after the other, before the one that they are copies of.
            changed = {
                "run_uuid": "copies.id",
                "start_time": "start_time - 1000 * (copies.number + 1)",
            }
            for table in ("runs", "params", "tags", "latest_metrics"):
                copy_rows(database, table, "run_uuid", run_id, changed)
            copy_rows(database, "metrics", "run_uuid", run_id, changed, below=num_full)
            database.commit()

    def _post(self, call: str, body: Mapping[str, Any]) -> Any:
        return _answer_of(self._http.post(f"{_API}/{call}", json=body))

    def _get(self, call: str, params: Mapping[str, Any], api: str = _API) -> Any:
        return _answer_of(self._http.get(f"{api}/{call}", params=params))


def copy_rows(
    database: sqlite3.Connection,
    table: str,
    key: str,
    of: str,
    changed: Mapping[str, str],
    below: int = 2**31,
) -> None:
    """Copy the rows whose `key` is `of` for all `copies` numbered below some number.

    `changed` has columns that differ, as SQL over the table `copies`, of an id and a number each.
    """
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    values = ", ".join(changed.get(column, f'"{column}"') for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    database.execute(
        f"INSERT INTO {table} ({names}) SELECT {values} FROM copies, {table} "
        f"WHERE {table}.{key} = ? AND copies.number < ?",
        (of, below),
    )


def _answer_of(response: httpx.Response) -> Any:
    if response.is_error:
        raise BenchmarkError(f"MLflow answered {response.status_code}: {response.text[:300]}")
    return response.json()


def _now_ms() -> int:
    return int(time.time() * 1000)


@contextmanager
def mlflow_server(folder: Path, parameters: Mapping[str, str]) -> Iterator[MlflowServer]:
    """Install MLflow into `folder`, and start a server with its state there, ready to be called.

    Raises `BenchmarkError`.
    """
    programs = _install_mlflow(folder / "venv")
    port = free_port()
    command = [
        *(str(programs / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"),
        *("--artifacts-destination", str(folder / "artifacts")),
    ]
    with (folder / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, folder / "mlflow.log")
        with MlflowServer(folder, url, parameters) as server:
            yield server
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchmarkError(f"MLflow did not start: {log.read_text()[-500:]}")

"""A real Prometheus for tests, from Debian's package: `apt-get install prometheus`.

It runs our own configuration and rules, with shorter times and the targets of the test.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import pytest
import yaml

from tests.harness.processes import die_with_parent
from tests.harness.wait import free_port, wait_for

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
_START_TIMEOUT_S = 30.0
_INTERVAL = "1s"

Value = TypeVar("Value")


_COMMAND = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    _COMMAND is None, reason="needs Prometheus on PATH: apt-get install prometheus"
)


class Prometheus:
    """A server with its files below `home`; `targets` by scrape job, `key` for the service.

    Texts of rules are replaced as `faster` says; `ray_nodes` is where a Ray head lists its nodes.
    """

    def __init__(
        self,
        home: Path,
        targets: Mapping[str, list[str]],
        key: str,
        faster: Mapping[str, str],
        ray_nodes: Path | None = None,
    ) -> None:
        self._home = home
        self._port = free_port()
        (home / "shardloom-metrics-key").write_text(key)
        self._write_config(targets)
        if ray_nodes is not None:
            (home / "ray-nodes.json").symlink_to(ray_nodes)
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
            self._end()  # nobody else does before all is up
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
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

    def alerts(self, state: str = "firing") -> dict[str, dict[str, Any]]:
        """Alerts in a state by their name."""
        found = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"]: each for each in found if each["state"] == state}

    def until(self, find: Callable[[], Value | None], what: str, limit_s: float = 60.0) -> Value:
        """What `find` finds once it finds anything; an error has what Prometheus printed."""
        try:
            return wait_for(find, what, limit_s, poll_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None


def _labels(metric: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in metric.items() if name != "__name__"))

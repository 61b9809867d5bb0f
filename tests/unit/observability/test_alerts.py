"""Alerts, rules, runbooks and metrics: each names only what there is, and nothing is left out."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine

from service.domain.models import Job, JobStatus, Progress
from service.observability.metrics import ServiceMetrics
from tests.harness.builders import (
    NOW,
    folded_membership,
    layout_chosen,
    membership_changed,
    queued_job,
)
from tests.harness.processes import run_program
from tests.unit.observability.expressions import (
    FOLDER,
    REPO,
    alerts,
    dashboard_queries,
    metrics_in,
    rules,
)
from trainer.failures import EndReason

RULE_TESTS = sorted((Path(__file__).parent / "rules").glob("*_test.yaml"))
# Where alerts lead to.
RUNBOOKS = REPO / next(iter(alerts().values()))["annotations"]["runbook_url"].partition("#")[0]
# Prometheus' own.
BUILT_IN = {"up", "ALERTS"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool on PATH: apt-get install prometheus",
)


def _promtool(*arguments: str | Path) -> str:
    done = run_program(["promtool", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- promtool


@needs_promtool
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_the_rules_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in _promtool("test", "rules", path)


@needs_promtool
def test_prometheus_takes_configuration_and_rules() -> None:
    _promtool("check", "config", "--syntax-only", FOLDER / "prometheus.yml")
    found = _promtool("check", "rules", *sorted((FOLDER / "rules").glob("*.yaml")))
    assert sum(map(int, re.findall(r"SUCCESS: (\d+) rules found", found))) == len(rules())


@needs_promtool
def test_every_query_of_a_dashboard_is_promql(tmp_path: Path) -> None:
    queries = [query for _, query in dashboard_queries()]
    assert len(queries) > 50
    # A rules file is how promtool reads expressions without a server.
    records = [{"record": f"panel_{index}", "expr": each} for index, each in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    assert f"SUCCESS: {len(queries)} rules found" in _promtool("check", "rules", path)


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    fired = set[str]()
    for case in [case for path in RULE_TESTS for case in yaml.safe_load(path.read_text())["tests"]]:
        asked = case.get("alert_rule_test", ())
        fired |= {each["alertname"] for each in asked if each["exp_alerts"]}
        shown = [each for each in case.get("promql_expr_test", ()) if each["exp_samples"]]
        fired.update(re.findall(r'alertname="(\w+)"', str(shown)))
    assert fired == alerts().keys()


def test_failures_of_a_jobs_own_alert_nobody() -> None:
    (own,) = re.findall(r'reason!~"([^"]+)"', alerts()["ShardloomJobsFail"]["expr"])
    assert own.split("|") == [reason for reason in EndReason if reason.rule.blames_job]


# ---- runbooks


def test_every_alert_says_what_it_means_and_has_a_runbook() -> None:
    headings = re.findall(r"^## (\S+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        texts = rule["annotations"]
        assert texts["summary"] and texts["description"].endswith("."), name
        path, anchor = texts["runbook_url"].split("#")
        assert (REPO / path, anchor) == (RUNBOOKS, name.lower())


def test_commands_in_runbooks_exist() -> None:
    from typer.main import get_command

    from service.cli.main import build_app

    known = get_command(build_app()).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`shardloom ([a-z]+)", RUNBOOKS.read_text()))
    assert named <= known.keys()
    assert len(named) > 15


# ---- metrics


def _shown() -> set[str]:
    """The name of every sample that a service shows, of a job that has everything."""
    telemetry = ServiceMetrics(lambda: NOW)
    telemetry.watch(engine := create_engine("sqlite://"))
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql("SELECT 1")
    telemetry.answered("GET", "/v1/jobs", 200, 0.1)
    telemetry.saw_live_jobs([_busy_job()])
    text = telemetry.render().decode()
    families = text_string_to_metric_families(text)
    return {sample.name for family in families for sample in family.samples}


def _busy_job() -> Job:
    job = replace(queued_job(), status=JobStatus.RUNNING, started_at=NOW)
    attempt = f"{job.id}-a0"
    membership = folded_membership(layout_chosen(), membership_changed(), attempt_id=attempt)
    return replace(
        job,
        current_attempt_id=attempt,
        membership=membership,
        progress=Progress(step=1, advanced_at=NOW, checkpoint_at=NOW),
        latest_metrics={
            "goodput/share": 1.0,
            "goodput/lost_s/start": 1.0,
            "risk/steps_undurable": 1.0,
        },
    )


def _of_ray() -> set[str]:
    """Metrics that the installed Ray has of its nodes, as its reporter names them."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    reporter = Path(spec.origin).parent / "dashboard/modules/reporter/reporter_agent.py"
    names = re.findall(
        r'^    "((?:node|cluster)_\w+)": Gauge\(', reporter.read_text(), re.MULTILINE
    )
    return {f"ray_{name}" for name in names}


def test_rules_and_dashboards_read_only_metrics_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = _shown() | _of_ray() | recorded | BUILT_IN
    queries = [*dashboard_queries(), *(("rules", rule["expr"]) for rule in rules())]
    unknown = {name for _, query in queries for name in metrics_in(query)} - known
    assert unknown == set()


def test_every_recorded_series_is_read_by_something() -> None:
    queries = [query for _, query in dashboard_queries()] + [rule["expr"] for rule in rules()]
    read = {name for query in queries for name in metrics_in(query)}
    assert {rule["record"] for rule in rules() if "record" in rule} - read == set()

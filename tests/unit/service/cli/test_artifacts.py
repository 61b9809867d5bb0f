"""Commands about traces, plans, logs, webhooks, exports and code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console

from service.cli import stack
from service.cli.artifacts import exports_table, moment
from service.dashboard import fragments
from service.schemas.jobs import ExportOut
from service.schemas.wording import comparison
from tests.harness.builders import (
    NOW,
    queued_job,
    row_wise_plan,
    spec_document,
    table_wise_plan,
    workers_started,
)
from tests.harness.service import Api, FakeService, event_body, job_body, shardloom, trace_body
from trainer.protocol.code_archive import check, id_of
from trainer.protocol.run_dir import RunDir


def test_trace_asks_and_prints_the_id_for_scripts(service: FakeService) -> None:
    result = shardloom("trace", "ratings", "--steps", "5", "--rank", "0", "--rank", "1")
    assert (result.exit_code, result.stdout) == (0, "t-0000c0de\n")
    assert "shardloom traces ratings" in result.stderr
    assert json.loads(service.requests[0].content) == {"num_steps": 5, "ranks": [0, 1]}
    for steps in ("0", "101"):
        assert shardloom("trace", "ratings", "--steps", steps).exit_code == 2
    assert len(service.requests) == 1


def test_trace_out_saves_the_files_once_they_are_written(
    service: FakeService, tmp_path: Path
) -> None:
    service.traces = [trace_body(0), trace_body(1)]
    result = shardloom("trace", "ratings", "--out", str(tmp_path / "traces"))
    # A newer job may get the name meanwhile.
    assert {r.url.path.split("/")[3] for r in service.requests[1:]} == {"job-0000000000ab"}
    saved = sorted((tmp_path / "traces").iterdir())
    assert result.stdout.split() == [str(path) for path in saved]
    assert [path.read_bytes() for path in saved] == [b"\x1f\x8b"] * 2
    refused = shardloom("trace", "ratings", "--out", str(saved[0]))
    assert (refused.exit_code, "File exists" in refused.stderr) == (2, True)


def test_a_trace_that_never_comes_is_an_error(service: FakeService) -> None:
    service.states = [job_body(status="SUCCEEDED")]
    result = shardloom("trace", "ratings", "--wait")
    assert result.exit_code == 2
    assert "t-0000c0de did not come" in result.stderr


def test_traces_lists_them_or_says_how_to_get_one(service: FakeService) -> None:
    assert "shardloom trace ratings" in shardloom("traces", "ratings").stdout
    service.traces = [trace_body(1)]
    assert "t-0000c0de-rank1.json.gz" in shardloom("traces", "ratings").stdout
    assert json.loads(shardloom("traces", "ratings", "--json").stdout) == [trace_body(1)]


def test_show_tells_the_sync_the_time_of_a_step_and_the_plan(service: FakeService) -> None:
    assert "per position" not in shardloom("show", "ratings").stdout
    started = workers_started(tables=[row_wise_plan(), table_wise_plan("movies", 1)])
    data = started.model_dump(mode="json", exclude={"kind", "time"})
    service.events.append(event_body(3, kind="workers_started", data=data))
    service.states = [
        job_body(latest_metrics={"phase/backward_s": 0.03, "phase/data_wait_s": 0.01})
    ]
    lines = shardloom("show", "ratings").stdout.splitlines()
    assert any(
        line.split() == ["step", "40", "ms:", "backward", "75%,", "data", "wait", "25%"]
        for line in lines
    )
    assert any("every step: the rows touched since the last sync" in line for line in lines)
    (users,) = [line for line in lines if line.startswith("users")]
    assert users.split() == ["users", "row-wise", "fp32", "100", "8", "3.6", "kB", "0", "1"]
    assert "per position  0: 1.8 kB, 1: 5.4 kB  (imbalance 1.50)" in lines


def test_show_and_events_tell_of_divergences_and_traces(service: FakeService) -> None:
    data = {"level": "error", "table": "users"}
    service.events += [
        event_body(3, kind="divergence", message="shard 0 of rank(s) 1 differs", data=data),
        event_body(4, kind="divergence", message="shard 1 of rank(s) 3 differs", data=data),
        event_body(5, kind="trace_written", message="trace of 3 step(s)"),
    ]
    lines = shardloom("show", "ratings").stdout.splitlines()
    assert any("2 times; shard 1 of rank(s) 3 differs" in line for line in lines)
    assert any("1 (`shardloom traces job-0000000000ab`)" in line for line in lines)
    timeline = shardloom("events", "ratings").stdout
    assert "divergence" in timeline
    assert "trace of 3 step(s)" in timeline


# ---- logs and webhooks


def _params(service: FakeService) -> list[tuple[str, str]]:
    return service.requests[0].url.params.multi_items()


def test_what_is_wanted_of_logs_is_passed_on(service: FakeService) -> None:
    assert "step 50 [loss 0.41]" in shardloom("logs", "ratings").stdout
    assert _params(service) == [("tail", "100")]
    service.requests.clear()
    options = ["--rank", "0", "--rank", "3", "--level", "warning", "--grep", "x*y"]
    shardloom("logs", "ratings", *options)
    assert _params(service) == [("rank", "0"), ("rank", "3"), ("level", "warning"), ("q", "x*y")]


@pytest.mark.usefixtures("client")
def test_a_log_that_there_is_not_is_named_with_those_that_there_are(api: Api) -> None:
    job_id = api.start()
    folder = RunDir(api.settings.runs_dir / job_id).attempt(f"{job_id}-a0").logs_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank-0.log").write_text("a line\n")
    refused = shardloom("logs", job_id, "--rank", "99")
    assert (refused.exit_code, "rank-99" in refused.stderr) == (2, True)
    assert "it has: rank-0" in refused.stderr
    assert shardloom("logs", job_id, "--rank", "0").stdout.split() == ["rank-0", "a", "line"]


def test_times_are_dates_or_ages() -> None:
    assert moment("10m", NOW) == NOW - 600
    assert moment("1.5h", NOW) == NOW - 5400
    assert moment("1970-01-02T00:00:00+00:00", NOW) == 86_400
    assert moment(None, NOW) is None
    with pytest.raises(typer.BadParameter, match="is no time"):
        moment("soon", NOW)


def test_all_logs_are_saved_to_a_file(service: FakeService, tmp_path: Path) -> None:
    target = tmp_path / "logs.zip"
    done = shardloom("logs", "ratings", "--download", str(target))
    assert (done.exit_code, target.exists()) == (0, True)
    assert service.requests[0].url.path == "/v1/jobs/ratings/logs:download"
    for name in ("x" * 300, ".", ""):
        refused = shardloom("logs", "ratings", "--download", name)
        assert (refused.exit_code, ".partial: " in refused.stderr) == (2, True)
    picked = shardloom("logs", "ratings", "--rank", "0", "--download", str(tmp_path / "other"))
    assert (picked.exit_code, "whole logs" in picked.stderr) == (2, True)
    assert shardloom("logs", "nobody", "--download", str(tmp_path / "other")).exit_code != 0
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.usefixtures("client")
def test_webhooks_are_managed(api: Api) -> None:
    made = shardloom("webhooks", "create", "https://hooks.example/", "--kind", "job_ended")
    assert made.stdout.startswith("whsec_")
    assert len(made.stdout.split()) == 1, "the secret goes to standard output alone"
    (hook,) = json.loads(shardloom("webhooks", "list", "--json").stdout)
    assert hook["kinds"] == ["job_ended"]
    api.end(api.submit())
    (sent,) = json.loads(shardloom("webhooks", "deliveries", hook["id"], "--json").stdout)
    for arguments, shown in (
        (["list"], "https://hooks.example/"),
        (["deliveries", hook["id"]], "job_ended"),
        (["test", hook["id"]], "queued as"),
        (["redeliver", hook["id"], str(sent["id"])], "goes out again"),
        (["rotate", hook["id"]], "whsec_"),
        (["change", hook["id"], "--off"], "off"),
    ):
        done = shardloom("webhooks", *arguments)
        assert (done.exit_code, shown in done.stdout) == (0, True), done.output
        told = shardloom("webhooks", *arguments, "--json")
        assert told.exit_code == 0, told.output
        json.loads(told.stdout)
    assert shardloom("webhooks", "delete", hook["id"]).exit_code == 0
    assert json.loads(shardloom("webhooks", "list", "--json").stdout) == []


# ---- exports

REPORT = {
    "num_rows": 583,
    "tasks": {
        "rating": {
            "mean_abs_error": 6e-5,
            "max_abs_error": 7e-4,
            "metric": "rmse",
            "trainer_metric": 0.8604,
            "export_metric": 0.8605,
        }
    },
}


def export_out(**changes: Any) -> ExportOut:
    asked = {"id": "x-0000c0de", "checkpoint": "best", "quantize": "int8", "created": NOW - 60}
    done = {"status": "succeeded", "message": "", "step": 1200, "size_bytes": 2_000_000}
    return ExportOut.model_validate(asked | done | {"report": REPORT} | changes)


def test_export_refuses_what_makes_no_sense() -> None:
    for arguments, message in (
        (["--to", "out"], "either JOB or --run-dir"),
        (["ratings", "--run-dir", ".", "--to", "out"], "either JOB or --run-dir"),
        (["ratings"], "--to says which folder"),
        (["ratings", "--to", "."], "exists already"),
        (["ratings", "--to", "out", "--quantize", "nonsense"], "nonsense"),
    ):
        result = shardloom("export", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())


def test_what_is_no_run_folder_is_refused_by_the_trainers_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.export.__main__ import main

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """In this process: one of its own loads torch for 5 s (`test_export.py` has one)."""
        assert command[:3] == [sys.executable, "-m", "trainer.export"]
        return subprocess.CompletedProcess(command, main(command[3:]))

    monkeypatch.setattr("service.cli.artifacts.subprocess.run", run)
    result = shardloom("export", "--run-dir", str(tmp_path), "--to", str(tmp_path / "out"))
    assert (result.exit_code, "is no folder of a job" in result.stdout) == (1, True)


def test_the_comparison_with_the_trainer_is_printed() -> None:
    told = "rating: rmse 0.8604 as trained, 0.8605 exported; predictions differ by 6e-05 on average"
    assert comparison(export_out()) == f"{told}, 0.0007 at most (583 validation rows)"
    missing = export_out(report={"not_measured": "no validation rows"})
    assert comparison(missing).endswith("no validation rows")


@pytest.mark.parametrize(
    "report",
    [
        {"tasks": [1]},
        {"tasks": {"rating": {}}},
        {"tasks": {"rating": 1}},
        {"tasks": {"rating": dict.fromkeys(REPORT["tasks"]["rating"], "x")}, "num_rows": 3},
        {"tasks": {"rating": dict.fromkeys(REPORT["tasks"]["rating"], 10**400)}, "num_rows": 3},
        REPORT | {"num_rows": "x"},
    ],
)
def test_a_report_that_a_job_wrote_itself_breaks_no_list_of_exports(report: Any) -> None:
    assert "report cannot be read" in comparison(export_out(report=report))


def test_exports_are_listed_with_where_they_stand() -> None:
    failed = {"status": "failed", "message": "too large", "step": None, "size_bytes": None}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(exports_table([export_out(), export_out(**failed)], NOW))
    done, broken = captured.get().splitlines()[1:]
    for word in ("x-0000c0de", "succeeded", "best (step 1200)", "int8", "2 MB"):
        assert word in done
    assert "too large" in broken


def test_only_what_is_done_can_be_downloaded_from_the_dashboard() -> None:
    job = queued_job()
    queued = export_out(status="queued", step=None, size_bytes=None, report=None)
    link = f'href="/v1/jobs/{job.id}/exports/x-0000c0de/archive"'
    assert link not in fragments.render("exports.html", job=job, exports=[queued], now=NOW)
    shown = fragments.render("exports.html", job=job, exports=[export_out()], now=NOW)
    assert link in shown and "0.8604 as trained, 0.8605 exported" in shown


# ---- `--code`


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    model = {"module": "towers:Towers", "tasks": [{"loss": "mse"}]}
    path.write_text(yaml.safe_dump(spec_document(model=model)))
    return str(path)


def test_the_code_is_uploaded_before_the_job_that_names_it(
    service: FakeService, spec_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "towers.py").write_text("class Towers: ...\n")
    monkeypatch.setattr(stack, "ensure_running", lambda: None)
    service.states = [job_body(status="SUCCEEDED", reason="completed", ended_at=1100.0)]
    assert shardloom("submit", spec_file).exit_code == 0
    assert service.uploads == []
    assert "code" not in service.submitted.pop()["model"]
    for command in ("submit", "run"):
        service.requests.clear()
        result = shardloom(command, spec_file, "--code", str(folder), "--force")
        assert result.exit_code == 0, result.output
        assert [r.url.params.get("force") for r in service.requests][:2] == [None, "true"]
        archive = service.uploads.pop()
        assert check(archive).num_files == 1
        assert service.submitted.pop()["model"]["code"] == id_of(archive)
        assert [r.url.path for r in service.requests][:2] == ["/v1/code", "/v1/jobs"]


def test_a_folder_without_code_is_refused_before_anything_is_sent(
    service: FakeService, spec_file: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in (("empty", "no files"), ("missing", "does not exist")):
        result = shardloom("submit", spec_file, "--code", str(tmp_path / folder))
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())
    assert service.requests == []

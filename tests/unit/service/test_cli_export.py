"""The commands about trained models: what they refuse, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from service.api.export_schemas import ExportOut
from service.commands.export import comparison, exports_table
from service.dashboard.export_lines import export_lines
from tests.unit.service.builders import NOW, queued_job
from tests.unit.service.fake_service import shardloom

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
    facts = {
        "id": "x-0000c0de",
        "checkpoint": "best",
        "quantize": "int8",
        "status": "succeeded",
        "message": "",
        "created": NOW - 60,
        "step": 1200,
        "size_bytes": 2_000_000,
        "report": REPORT,
    }
    return ExportOut.model_validate(facts | changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "out"], "either JOB or --run-dir"),
        (["ratings", "--run-dir", ".", "--to", "out"], "either JOB or --run-dir"),
        (["ratings"], "--to says which folder"),
        (["ratings", "--to", "."], "exists already"),
        (["ratings", "--to", "out", "--quantize", "int4"], "int4"),
    ],
)
def test_export_refuses_what_makes_no_sense(arguments: list[str], message: str) -> None:
    result = shardloom("export", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_run_folder_without_checkpoints_is_refused_by_the_trainers_own_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = shardloom("export", "--run-dir", str(tmp_path), "--to", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "holds no checkpoint yet" in capfd.readouterr().out


def test_the_comparison_with_the_trainer_is_printed() -> None:
    lines = comparison(export_out()).splitlines()
    assert lines[0] == "583 validation rows compared"
    assert "max 7.00e-04; rmse 0.860400 (trainer) 0.860500 (export)" in lines[1]
    missing = export_out(report={"not_measured": "no validation rows"})
    assert comparison(missing).endswith("no validation rows")


def test_exports_are_listed_with_where_they_stand() -> None:
    failed = {"status": "failed", "message": "too large", "step": None, "size_bytes": None}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(exports_table([export_out(), export_out(**failed)], NOW))
    done, broken = captured.get().splitlines()[1:]
    for word in ("x-0000c0de", "succeeded", "best (step 1200)", "int8", "2.0 MB"):
        assert word in done
    assert "too large" in broken


def test_only_what_is_done_can_be_downloaded_from_the_dashboard() -> None:
    job = queued_job()
    queued = export_out(status="queued", step=None, size_bytes=None, report=None)
    waiting, done = export_lines(job, [queued, export_out()], NOW)
    assert waiting.href == ""
    assert done.href == f"/v1/jobs/{job.id}/exports/x-0000c0de/archive"
    assert "0.8604 as trained, 0.8605 exported" in done.message

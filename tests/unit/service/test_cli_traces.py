"""The commands about traces and the plan, against an in-memory service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.service.api_samples import event_body, job_body, problem_body, trace_body
from tests.unit.service.builders import row_wise_plan, table_wise_plan, workers_started
from tests.unit.service.fake_service import FakeService, shardloom


@pytest.fixture
def traced(service: FakeService) -> FakeService:
    """A service whose job has written the traces of ranks 0 and 1."""
    service.traces = [trace_body(0), trace_body(1)]
    return service


def test_trace_asks_and_prints_the_id_for_scripts(service: FakeService) -> None:
    result = shardloom("trace", "ratings", "--steps", "5", "--rank", "0", "--rank", "1")
    assert (result.exit_code, result.stdout) == (0, "t-0000c0de\n")
    assert "shardloom traces ratings" in result.stderr
    assert json.loads(service.requests[0].content) == {"num_steps": 5, "ranks": [0, 1]}


def test_trace_wait_prints_what_was_written(traced: FakeService) -> None:
    result = shardloom("trace", "ratings", "--wait")
    assert result.exit_code == 0
    for word in ("t-0000c0de-rank0.json.gz", "t-0000c0de-rank1.json.gz", "1,203", "1.2 MB"):
        assert word in result.stdout


def test_trace_out_saves_the_files_once_they_are_written(
    traced: FakeService, tmp_path: Path
) -> None:
    result = shardloom("trace", "ratings", "--out", str(tmp_path / "traces"))
    saved = sorted((tmp_path / "traces").iterdir())
    assert result.stdout.split() == [str(path) for path in saved]
    assert [path.read_bytes() for path in saved] == [b"\x1f\x8b"] * 2


def test_trace_out_names_a_folder_that_cannot_be_written(
    traced: FakeService, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    result = shardloom("trace", "ratings", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "cannot write to" in result.stderr


def test_a_trace_that_never_comes_is_an_error(service: FakeService) -> None:
    service.looks = [job_body(status="SUCCEEDED")]
    result = shardloom("trace", "ratings", "--wait")
    assert result.exit_code == 2
    assert "t-0000c0de did not come" in result.stderr


def test_a_job_that_does_not_run_is_refused(service: FakeService) -> None:
    service.refusal = problem_body(409, "job_not_running", "job x has no workers to trace")
    result = shardloom("trace", "ratings")
    assert result.exit_code == 2
    assert "has no workers to trace" in result.stderr


@pytest.mark.parametrize("steps", ["0", "101"])
def test_the_number_of_steps_is_checked_before_anything_is_sent(
    service: FakeService, steps: str
) -> None:
    assert shardloom("trace", "ratings", "--steps", steps).exit_code == 2
    assert service.requests == []


def test_traces_lists_them_or_says_how_to_get_one(service: FakeService) -> None:
    assert "shardloom trace ratings" in shardloom("traces", "ratings").stdout
    service.traces = [trace_body(1)]
    assert "t-0000c0de-rank1.json.gz" in shardloom("traces", "ratings").stdout
    assert json.loads(shardloom("traces", "ratings", "--json").stdout) == [trace_body(1)]


def test_show_tells_the_sync_the_time_of_a_step_and_the_plan(service: FakeService) -> None:
    started = workers_started(tables=[row_wise_plan(), table_wise_plan("movies", 1)])
    data = started.model_dump(mode="json", exclude={"kind", "time"})
    service.events.append(event_body(3, kind="workers_started", data=data))
    service.looks = [job_body(latest_metrics={"phase/backward_s": 0.03, "phase/data_wait_s": 0.01})]
    lines = shardloom("show", "ratings").stdout.splitlines()
    assert any(
        line.split() == ["step", "40", "ms:", "backward", "75%,", "data", "wait", "25%"]
        for line in lines
    )
    assert any("every step: the rows touched since the last sync" in line for line in lines)
    (users,) = [line for line in lines if line.startswith("users")]
    assert users.split() == ["users", "row-wise", "fp32", "100", "8", "3.6", "kB", "0", "1"]
    assert "per position  0: 1.8 kB, 1: 5.4 kB  (imbalance 1.50)" in lines


def test_show_does_without_a_plan_where_workers_told_none(service: FakeService) -> None:
    data = workers_started().model_dump(mode="json", exclude={"kind", "time", "tables"})
    service.events.append(event_body(3, kind="workers_started", data=data))
    result = shardloom("show", "ratings")
    assert result.exit_code == 0
    assert "per position" not in result.stdout


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
